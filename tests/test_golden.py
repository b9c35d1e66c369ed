"""Launch files as people see them: whole, for one job on one cluster, per back end and target.

After a change that is meant: ``python tests/test_golden.py`` writes them anew, and the diff is read.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import builders as b
import msgspec
import pytest

import hapmoe
from hapmoe.launch import TARGETS, target
from hapmoe.launch.options import load_options
from hapmoe.plan import Plan, Recompute
from hapmoe.planfile import dump_plan
from hapmoe.resolve import resolve
from hapmoe.rules import check

ROOT = Path(__file__).parents[1]
GOLDEN = Path(__file__).parent / "golden"
OPTIONS = GOLDEN / "options.yaml"
VERBATIM = {"entry.py", "check_hosts.py", "check_ranks.py", "launch_nemo.py", "flagscale/hapmoe-hetero.patch"} | {
    f"hapmoe_runtime/{path.name}" for path in (ROOT / "src" / "hapmoe" / "runtime").glob("*.py")
}
"""Files that are the same in every launch: templates, and the runtime, as they are."""

FULL = Recompute(granularity="full", method="block", num_layers=2)
SELECTIVE = Recompute(granularity="selective", modules=("core_attn", "moe_act"))
UPSTREAM = b.plan(
    (6, 6, 10, 10),
    pools=("a100", "a100", "h100", "h100"),
    tp=2,
    dp=4,
    ep=8,
    recompute=(FULL, FULL, SELECTIVE, Recompute()),
)
MESHES = b.plan(
    (4, 14, 14),
    pools=("a100", "h100", "h100"),
    recompute=(FULL, Recompute(), Recompute()),
    stages=({"tp": 4, "dp": 4, "ep": 8}, {"tp": 2, "dp": 4, "ep": 8}, {"tp": 2, "dp": 4, "ep": 8}),
)
LAYERS = b.plan(
    (6, 6, 10, 10),
    pools=("a100", "a100", "h100", "h100"),
    recompute=(FULL, FULL, Recompute(), Recompute()),
    stages=({"tp": 2, "dp": 4, "ep": 8},) * 2 + ({"tp": 2, "dp": 4, "ep": 4},) * 2,
)
UNEQUAL = b.plan(
    (4, 28),
    pools=("a100", "h100"),
    micro_batch_size=2,
    recompute=(FULL, Recompute()),
    stages=(
        {"tp": 4, "dp": 4, "ep": 8, "micro_batch_size": 2},
        {"tp": 2, "dp": 8, "ep": 8, "micro_batch_size": 1},
    ),
)
PLANS = {
    "megatron": UPSTREAM,
    "megatron-hetero": msgspec.structs.replace(UNEQUAL, backend="megatron-hetero"),
    "flagscale": msgspec.structs.replace(MESHES, backend="flagscale"),
    "flagscale-patched": msgspec.structs.replace(UPSTREAM, backend="flagscale-patched"),
    "galvatron": msgspec.structs.replace(LAYERS, backend="galvatron"),
}
CASES = [
    ("megatron", "torchrun"),
    ("megatron", "slurm"),
    ("megatron", "kubernetes"),
    ("megatron", "nemorun"),
    ("megatron-hetero", "torchrun"),
    ("flagscale", "flagscale"),
    ("flagscale-patched", "torchrun"),
    ("galvatron", "galvatron"),
]


@cache
def files(backend: str, target_name: str) -> dict[str, str]:
    job = hapmoe.extract(ROOT / "examples" / "mixtral-8x7b.sh")
    if backend.startswith("flagscale"):  # its meshes save files per rank
        words = tuple(
            msgspec.structs.replace(word, text="torch") if word.text == "torch_dist" else word for word in job.argv
        )
        job = msgspec.structs.replace(job, argv=words)
    cluster = hapmoe.load_cluster(ROOT / "examples" / "clusters" / "a100-h100.yaml")
    plan: Plan = resolve(job, cluster, PLANS[backend])
    assert check(job, cluster, plan) == ()
    return target(target_name)(job, cluster, plan, dump_plan(plan), load_options(OPTIONS))


@pytest.mark.parametrize(("backend", "name"), CASES)
def test_files_are_as_they_were(backend: str, name: str) -> None:
    folder = GOLDEN / f"{backend}-{name}"
    kept = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}
    made = {path: text for path, text in files(backend, name).items() if path not in VERBATIM}
    assert sorted(made) == sorted(kept)
    for path, text in made.items():
        assert text == kept[path], f"{folder.name}/{path} is another: python tests/test_golden.py, and read the diff"


@pytest.mark.parametrize(("backend", "name"), CASES)
def test_no_path_of_this_machine_and_lines_to_be_read(backend: str, name: str) -> None:
    for path, text in files(backend, name).items():
        assert str(ROOT) not in text and "/home/" not in text and text.endswith("\n"), path
        if path not in VERBATIM and not path.startswith(("plan.json", "args/")):
            assert max(map(len, text.splitlines())) <= 140, path


def test_shell_is_clean() -> None:
    scripts = [path for path in GOLDEN.rglob("*") if path.suffix in (".sh", ".sbatch")]
    assert len(scripts) >= 10
    beside = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run(
        [beside if beside.exists() else "shellcheck", *scripts], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


def test_every_target_has_a_folder() -> None:
    assert {name for _, name in CASES} == set(TARGETS)


def write() -> None:
    for backend, name in CASES:
        folder = GOLDEN / f"{backend}-{name}"
        shutil.rmtree(folder, ignore_errors=True)
        for path, text in files(backend, name).items():
            if path not in VERBATIM:
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / path).write_text(text)


if __name__ == "__main__":
    write()
