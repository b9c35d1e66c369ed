"""The README against the program: its commands exist, and its example is what a run prints.

Figures of the example may age; its shape may not. ``python tests/test_readme.py`` puts a fresh run into it.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from click.testing import CliRunner

from hapmoe.cli import cli

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLE = re.compile(r"(?<=<!-- example -->\n```console\n).*?(?=```\n)", re.DOTALL)
COMMAND = "hapmoe plan examples/mixtral-8x7b.sh --cluster examples/clusters/a100-h100.yaml"


def _run(folder: Path) -> str:
    """What the example's command prints in a folder with the examples."""
    (folder / "examples").symlink_to(ROOT / "examples")
    environment = os.environ | {"COLUMNS": "100", "PYTHONPATH": str(ROOT / "src")}
    words = [sys.executable, "-m", *shlex.split(COMMAND)]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    return "".join(f"{line.rstrip()}\n" for line in done.stdout.splitlines())


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def _stages(text: str) -> list[str]:
    """The rows of the first table."""
    table = text.partition("recompute\n")[2].partition("\n\n")[0]
    return [line for line in table.splitlines() if re.match(r"\d+ ", line)]


def _layers(text: str) -> list[int]:
    """Every layer that the first table names, in order."""
    cells = " ".join(re.split(r"  +", row)[3] for row in _stages(text))
    runs = re.findall(r"(\d+)(?:-(\d+))?", re.sub(r"\(\d+\)", "", cells))
    return sorted(layer for first, last in runs for layer in range(int(first), int(last or first) + 1))


def _shape(text: str) -> list[str]:
    """Lines that no change of figures moves: what was asked for, headings, column heads, files."""
    heads = ("mixtral", "on ", "stage ", "E embedding", "Optimal", "this plan against", "next best", "What this rests")
    kept = [line for line in text.splitlines() if line.startswith((*heads, "Written", "  hapmoe-plan", "Next:"))]
    return [" ".join(line.partition(",")[0].split()) for line in kept]


def test_the_example_is_what_a_run_prints(tmp_path: Path) -> None:
    shown = EXAMPLE.search(README)
    assert shown
    command, _, output = shown[0].partition("\n")
    assert command == f"$ {COMMAND}"
    run = _run(tmp_path)
    assert _shape(output) == _shape(run) and len(_shape(run)) > 10
    assert len(_stages(output)) == len(_stages(run)) > 1
    assert _layers(output) == _layers(run) == list(range(32))
    assert "launch.sh" in run and "NOT LAUNCHABLE" not in run.upper()
    assert (tmp_path / "hapmoe-plan" / "report.html").exists() and (tmp_path / "hapmoe-plan" / "launch.sh").exists()


def test_commands_exist() -> None:
    names = set(re.findall(r"^\| `hapmoe (\w+)", README, re.MULTILINE))
    assert names == set(cli.commands)
    for name in names:
        below = getattr(cli.commands[name], "commands", {"": None})  # of a group: those of its commands
        said = "".join(CliRunner().invoke(cli, [name, *filter(None, [part]), "--help"]).output for part in below)
        line = next(line for line in README.splitlines() if line.startswith(f"| `hapmoe {name}"))
        for option in re.findall(r"--[a-z-]+", line):
            assert option in said, (name, option)
        assert "--json" in said


def test_one_command_each_for_trying_and_for_testing() -> None:
    trying, testing = _blocks("sh")
    assert COMMAND in trying and trying.count("\n") == testing.count("\n") == 1
    assert testing in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    lock = (ROOT / "requirements" / "dev.lock").read_text(encoding="utf-8")
    pins = [line for line in lock.splitlines() if not line.startswith("#")]
    assert pins and all(re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][\w.]*", pin) for pin in pins)


def test_python_example_runs(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    (code,) = _blocks("python")
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("optimal ") and done.stdout.endswith("\n()\n")


def test_cluster_example_is_a_cluster() -> None:
    import yaml

    from hapmoe.clusterfile import load_cluster

    (text,) = _blocks("yaml")
    shown, real = load_cluster(yaml.safe_load(text)), load_cluster(ROOT / "examples/clusters/a100-h100.yaml")
    assert shown.sha256 == real.sha256


def test_links_lead_somewhere() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), (page.name, target)


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as place:
        fresh = f"$ {COMMAND}\n{_run(Path(place))}"
    (ROOT / "README.md").write_text(EXAMPLE.sub(lambda _: fresh, README, count=1), encoding="utf-8")
