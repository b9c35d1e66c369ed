"""The repository's own rules: imports point downwards, files stay small, one oracle, no traces of a machine."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "hapmoe"
FILES = sorted(PACKAGE.rglob("*.py"))
TEMPLATES = PACKAGE / "launch" / "templates"

ORDER = [
    *("errors", "units", "wholefile"),
    *("measured", "model", "plan", "cluster", "job", "hybrid", "options"),
    *("fields", "yamlfile", "catalog", "discovery", "clusterfile", "planfile", "tables", "logs", "routing"),
    *("script", "inputs", "extract"),
    *("efficiency", "comm"),
    *("counting", "shapes", "workload", "memory", "kernels", "calibrated", "timing", "pieces", "pricing"),
    *("schedule", "stagecost", "boundary", "volumes"),
    *("resolve", "backends", "rules"),
    *("cost", "search", "present", "compare"),
    *("runtime", "launch"),
    *("wording", "terminal", "summary_inputs", "summary", "summary_compare", "summary_explain", "report", "trace"),
    *(
        "runnable",
        "checking",
        "replanning",
        "planning",
        "verifying",
        "api",
        "probe",
        "profiling",
        "calibration",
        "alone",
        "lab",
        "demo",
    ),
    *(
        "cli_options",
        "cli_launch",
        "cli_look",
        "cli_runtime",
        "cli_tables",
        "cli_alone",
        "cli_calibrate",
        "cli_profile",
        "cli_demo",
        "cli",
        "__main__",
    ),
]
"""A module or package may use what stands before it, and nothing behind. A new one needs its place here."""

ALSO = {"backends.megatron": "rules"}
"""Parts of a package that may use more than the package as a whole: up to the module named."""

TOGETHER = {("script.params", "script.words")}
"""A module and one that it may import though that imports it: an expansion holds words, a word expansions."""


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path, *, start: bool = False) -> Iterator[str]:
    """What a file imports from the package, below ``hapmoe``: anywhere in it, or (``start``) when it is loaded."""
    package = path.relative_to(PACKAGE).parent.parts
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body if start else ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            if node.level:
                base = ".".join([*package[: len(package) - node.level + 1], *([node.module] if node.module else [])])
            elif node.module and node.module.partition(".")[0] == "hapmoe":
                base = node.module.partition(".")[2]
            else:
                continue
            for alias in node.names:
                child = f"{base}.{alias.name}".strip(".")
                yield child if is_module(child) else base
        elif isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[2] for alias in node.names if alias.name.startswith("hapmoe."))


def is_module(name: str) -> bool:
    path = PACKAGE.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def test_every_module_has_its_place() -> None:
    tops = {name_of(path).partition(".")[0] for path in FILES if path.parent != TEMPLATES} - {""}
    assert tops <= set(ORDER) and len(ORDER) == len(set(ORDER))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_downwards(path: Path) -> None:
    if path == PACKAGE / "__init__.py":
        assert set(imports(path)) <= {"api", "errors"}
        return
    if path.parent == TEMPLATES:
        assert not list(imports(path))  # runs on machines that do not have the package
        return
    name = name_of(path)
    top = name.partition(".")[0]
    limit = ORDER.index(ALSO.get(name, top))
    for used in imports(path):
        below = used.partition(".")[0]
        assert used == "" or below == top or ORDER.index(below) < limit, f"{name} imports {used}"


def test_imports_have_no_cycles() -> None:
    uses = {name_of(path): set(imports(path, start=True)) - {""} for path in FILES if path.parent != TEMPLATES}
    for name, used in TOGETHER:
        uses[name].remove(used)
    done: set[str] = set()
    while ready := {name for name in uses.keys() - done if uses[name] - {name} <= done}:
        done |= ready
    assert not uses.keys() - done, f"a cycle among {sorted(uses.keys() - done)}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_are_small_and_say_what_they_are(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 450
    tree = ast.parse(text)
    assert ast.get_docstring(tree) or not tree.body
    exported = {
        element.value
        for node in tree.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__"
        for element in getattr(node.value, "elts", [])
    }
    if (PACKAGE / "script") in path.parents and path.name != "read.py":
        return  # the shell's own parts, named as in its manual
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in exported:
            assert ast.get_docstring(node), f"{node.name} has no docstring"


def test_one_module_makes_estimates() -> None:
    """Every number that a user sees comes out of ``cost.evaluate``."""
    makers = {
        name_of(path)
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == "Estimate"
    }
    assert makers == {"cost"}


def test_planning_needs_no_framework() -> None:
    """Neither torch nor Megatron is imported anywhere but in what runs beside them."""
    for path in FILES:
        if {PACKAGE / "lab", PACKAGE / "probe", PACKAGE / "runtime", PACKAGE / "alone", TEMPLATES} & set(path.parents):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.partition(".")[0] for name in names} & {"torch", "megatron", "torch_npu"}, path


def kept_files() -> Iterator[Path]:
    """What is handed out: the project's folders, and the files beside them."""
    for top in sorted(ROOT.iterdir()):
        if top.is_file() and top.name != ".git":  # a file in worktrees
            yield top
    for folder in ("src", "tests", "bench", "docs", "examples", ".ci", "requirements"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file() and not {"__pycache__", ".ruff_cache", ".mypy_cache", ".hypothesis"} & set(path.parts):
                yield path


def test_no_traces_of_a_machine() -> None:
    """No path of the machine that the project was written on, and no name of its user."""
    forbidden = re.compile(r"(?<![\w.])/(?:work|root)/[\w.]|/tmp/(?:pytest|bash_jobs)|" + re.escape(str(ROOT)))
    found = []
    for path in kept_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # pictures
        found += [f"{path.relative_to(ROOT)}: {match[0]}" for match in forbidden.finditer(text)]
    assert not found


def test_examples_are_covered() -> None:
    """Every cluster of the paper is among the examples, and its two models are."""
    clusters = {path.stem for path in (ROOT / "examples" / "clusters").glob("*.yaml")}
    names = {f"{size}-{kind}" for size in (16, 24, 32) for kind in (1, 2, 3)}
    assert names | {f"16-{kind}-h" for kind in (1, 2, 3)} <= clusters
    assert {"mixtral-s", "mixtral-l"} <= {path.stem for path in (ROOT / "examples").glob("*.sh")}
