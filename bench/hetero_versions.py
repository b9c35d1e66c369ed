"""Has every Megatron what the runtime replaces? ``python -m bench.hetero_versions [--train] [VERSION | FOLDER ...]``.

Versions of megatron-core come from the package index; a folder is a tree of Megatron-LM, whose
megatron.training is looked at too. Nothing is imported: names and arguments are read from the source.
Exit code 1 where a name is gone or takes other arguments. With ``--train`` each version also trains a
handful of unequal plans, which must equal one rank (``bench.hetero --handful``).
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from hapmoe.runtime.mesh import read_layout
from hapmoe.runtime.patches import Patch
from hapmoe.runtime.table import Attached, table

VERSIONS = ("0.12.0", "0.12.3", "0.13.1", "0.14.0", "0.15.3", "0.16.0", "0.16.1")
"""For Python 3.11."""


def patches() -> tuple[Patch, ...]:
    stage = {"tp": 1}
    return table(Attached(read_layout({"stages": [stage, stage], "micro_batch_size": 1}, 0)))


def problems(root: Path) -> Iterator[tuple[Patch, str]]:
    """Each patch that concerns the Megatron under ``root``, and what is wrong with it (empty: nothing)."""
    version = _version(root)
    for patch in patches():
        folder = root.joinpath(*patch.module.split("."))
        path = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
        if not patch.concerns(version) or (patch.optional and not (root / "megatron" / "training").is_dir()):
            continue
        yield patch, _problem(patch, path)


def _version(root: Path) -> tuple[int, ...]:
    text = (root / "megatron" / "core" / "package_info.py").read_text(encoding="utf-8")
    return tuple(int(found[1]) for found in re.finditer(r"^(?:MAJOR|MINOR|PATCH) = (\d+)", text, re.M))


def _problem(patch: Patch, path: Path) -> str:
    if not path.is_file():
        return "no such module"
    body: Sequence[ast.stmt] = ast.parse(path.read_text(encoding="utf-8")).body
    found: ast.stmt | None = None
    for name in patch.name.split("."):
        found = next((one for one in _definitions(body) if getattr(one, "name", "") == name), None)
        if found is None:
            return f"no {name}"
        body = getattr(found, "body", [])
    assert isinstance(found, ast.FunctionDef)
    taken = {one.arg for one in (*found.args.posonlyargs, *found.args.args, *found.args.kwonlyargs)}
    lost = [one for one in patch.parameters if one not in taken and found.args.kwarg is None]
    return f"no longer takes {', '.join(lost)}" if lost else ""


def _definitions(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """What stands in a module or class, also under if and try."""
    for one in body:
        yield one
        if isinstance(one, ast.If | ast.Try):
            yield from _definitions([*one.body, *one.orelse])


def main(arguments: Sequence[str] | None = None) -> int:
    good = True
    words = list(sys.argv[1:] if arguments is None else arguments)
    trains = "--train" in words
    for given in [word for word in words if word != "--train"] or VERSIONS:
        with tempfile.TemporaryDirectory(prefix="hapmoe-versions-") as folder:
            root = Path(given) if Path(given).is_dir() else _download(given, Path(folder))
            rows = list(problems(root))
            bad = [f"{patch.module}.{patch.name}: {said} ({patch.why})" for patch, said in rows if said]
            good = good and not bad
            version = ".".join(map(str, _version(root)))
            print(
                f"{version:<8} {len(rows) - len(bad):>2} of {len(rows)} names as they were read",
                *bad,
                sep="\n  ",
                flush=True,
            )
            if trains:
                good = _train(root) and good
    return 0 if good else 1


def _train(root: Path) -> bool:
    """Do unequal plans train as one rank does with the Megatron under ``root``?"""
    paths = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]).strip(os.pathsep)
    words = [sys.executable, "-m", "bench.hetero", "--handful"]
    return subprocess.run(words, env={**os.environ, "PYTHONPATH": paths}, check=False).returncode == 0


def _download(version: str, folder: Path) -> Path:
    """megatron-core and, where this Python has it not, what that version imports (pyproject.toml)."""
    older = ("numpy<2", "psutil") if version.startswith(("0.12.", "0.13.")) else ()
    words = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", "."]
    subprocess.run([*words, f"megatron-core=={version}", *older], cwd=folder, check=True, capture_output=True)
    for path in folder.glob("*.whl"):
        with zipfile.ZipFile(path) as wheel:
            wheel.extractall(folder)
    return folder


if __name__ == "__main__":
    sys.exit(main())
