"""How long planning takes: ``python -m bench.search [--scale small|paper|large] [--repeat N] [--json]``.

Every figure is taken in a process of its own, N times, and the median is shown. ``command`` is all of
``hapmoe plan``, from start to exit, artefacts written; ``search`` is pricing and the exact search alone
(``pose_for`` and ``search``); ``uniform`` is the same with equal layers and one recomputation, for
comparison. CPU seconds count all threads and barely depend on what else the machine is doing.
``large`` ends with how search times grow, beside the paper's own search, and with those of other planners.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.search_growth import growth, peers

EXAMPLES = Path(__file__).parents[1] / "examples"
CASES = Path(__file__).parent / "cases"
PAPER = (*(f"{size}-{kind}" for size in (16, 24, 32) for kind in (1, 2, 3)), "16-1-h", "16-2-h", "16-3-h")


@dataclass(frozen=True)
class Case:
    """One line: what is planned, and the bar of search time and gap that it is held against."""

    script: Path
    cluster: Path
    bar_s: float
    bar_gap: float = 0.0
    limited: bool = False
    """Searched under a time limit, the bar."""


def _paper(model: str, cluster: str) -> Case:
    return Case(EXAMPLES / f"{model}.sh", EXAMPLES / "clusters" / f"{cluster}.yaml", 0.3)


SCALES = {
    "small": tuple(_paper("mixtral-s", cluster) for cluster in ("16-1", "24-2", "32-3")),
    "paper": tuple(_paper(model, cluster) for model in ("mixtral-s", "mixtral-l") for cluster in PAPER),
    "large": (
        _paper("mixtral-l", "32-3"),
        Case(EXAMPLES / "deepseek-v3.sh", CASES / "128-3.yaml", 1.0),
        Case(EXAMPLES / "deepseek-v3.sh", CASES / "1024-4.yaml", 4.0),
        Case(CASES / "llama3-405b.sh", CASES / "16384-4.yaml", 15.0, 0.005, limited=True),
    ),
}
PAPER_LIMIT_S = 60.0
"""The paper's claim for its search, in every setting (arXiv:2609.39350)."""


def measured(command: list[str]) -> dict[str, Any]:
    """Wall and CPU seconds, peak bytes, exit code and output of one child process."""
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as child:
        assert child.stdout is not None
        output = child.stdout.read()
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    return {
        "wall_s": time.perf_counter() - began,
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "peak_bytes": usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024),
        "exit": child.returncode,
        "output": output,
    }


def probe(script: str, cluster_file: str, limit_s: float | None) -> None:
    """In a child: the search alone, exact then uniform, as JSON on stdout."""
    import hapmoe
    from hapmoe.search import pose_for, search

    job, cluster = hapmoe.extract(script), hapmoe.load_cluster(cluster_file)
    found: dict[str, Any] = {}
    problem = None
    for planner in ("exact", "uniform"):
        wall, cpu = time.perf_counter(), time.process_time()
        problem = problem or pose_for(job, cluster)
        left_s = None if limit_s is None else max(limit_s - (time.perf_counter() - wall), 0.1)
        result = search(job, cluster, planner=planner, problem=problem, time_limit_s=left_s)
        found[planner] = {
            "wall_s": time.perf_counter() - wall,
            "cpu_s": time.process_time() - cpu,
            "status": result.status,
            "gap": result.gap,
            "step_s": result.estimate.step_s if result.estimate else None,
            "grid_points": result.report.considered if result.report else 0,
        }
    print(json.dumps(found))


def _median(runs: list[dict[str, Any]], key: str) -> float:
    return statistics.median(run[key] for run in runs)


def measure(case: Case, repeat: int) -> dict[str, Any]:
    """One line of the table."""
    script, cluster_file = str(case.script), str(case.cluster)
    model, cluster = case.script.stem, case.cluster.stem
    limit = ["--time-limit", str(case.bar_s)] if case.limited else []
    commands, probes = [], []
    with tempfile.TemporaryDirectory() as folder:
        whole = [sys.executable, "-m", "hapmoe", "plan", script, "--cluster", cluster_file, "--force", *limit]
        for _ in range(repeat):
            commands.append(measured([*whole, "--json", "--out", f"{folder}/plan"]))
            run = measured([sys.executable, "-m", "bench.search", "--probe", script, cluster_file, *limit])
            if commands[-1]["exit"] not in (0, 1) or run["exit"]:
                raise SystemExit(f"{model} on {cluster}: exit codes {commands[-1]['exit']} and {run['exit']}")
            probes.append(json.loads(run["output"]))
    exact = [run["exact"] for run in probes]
    uniform = [run["uniform"] for run in probes]
    best, plain = exact[0]["step_s"], uniform[0]["step_s"]
    return {
        "model": model,
        "cluster": cluster,
        "bar_s": case.bar_s,
        "bar_gap": case.bar_gap,
        "status": exact[0]["status"],
        "gap": exact[0]["gap"],
        "grid_points": exact[0]["grid_points"],
        "step_s": best,
        "command_wall_s": _median(commands, "wall_s"),
        "command_cpu_s": _median(commands, "cpu_s"),
        "command_peak_bytes": _median(commands, "peak_bytes"),
        "search_wall_s": _median(exact, "wall_s"),
        "search_cpu_s": _median(exact, "cpu_s"),
        "uniform_cpu_s": _median(uniform, "cpu_s"),
        "uniform_step_s": plain,
        "uniform_over_exact_step": plain / best if plain and best else None,
    }


def start_up(repeat: int) -> dict[str, float]:
    """CPU seconds of ``hapmoe --help`` beside those of a bare interpreter, in turns."""
    bare, helps = [], []
    for _ in range(max(repeat, 7)):
        bare.append(measured([sys.executable, "-c", "pass"]))
        helps.append(measured([sys.executable, "-m", "hapmoe", "--help"]))
    bare_s, help_s = _median(bare, "cpu_s"), _median(helps, "cpu_s")
    return {"bare_cpu_s": bare_s, "help_cpu_s": help_s, "ratio": help_s / bare_s}


HEADER = (
    f"{'model':12} {'cluster':8} {'points':>15} {'status':10} {'gap':>5}  {'command':>15}  {'search':>15}  "
    f"{'peak':>7}  {'step':>8}  {'uniform':>8} {'ratio':>6}  {'bar':>11}"
)
UNITS = f"{'':54}  {'wall s   CPU s':>15}  {'wall s   CPU s':>15}  {'MiB':>7}  {'s':>8}  {'s':>8}"


def _number(value: float | None, width: int, digits: int = 2) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:{width}.{digits}f}"


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['model']:12} {row['cluster']:8} {row['grid_points']:15,} {row['status']:10} {row['gap'] * 100:4.1f}%  "
        f"{row['command_wall_s']:7.2f} {row['command_cpu_s']:7.2f}  "
        f"{row['search_wall_s']:7.2f} {row['search_cpu_s']:7.2f}  {row['command_peak_bytes'] / 2**20:7.0f}  "
        f"{_number(row['step_s'], 8)}  {_number(row['uniform_step_s'], 8)} "
        f"{_number(row['uniform_over_exact_step'], 6)}  {row['bar_s']:5.1f} s {row['bar_gap'] * 100:.1f}%"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.search", description=__doc__.splitlines()[0])
    parser.add_argument("--scale", choices=tuple(SCALES), default="small")
    parser.add_argument("--repeat", type=int, default=3, metavar="N")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--probe", nargs=2, metavar=("SCRIPT", "CLUSTER"), help=argparse.SUPPRESS)
    parser.add_argument("--time-limit", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.probe:
        probe(*options.probe, options.time_limit)
        return
    told = sys.stderr if options.json else sys.stdout
    print(HEADER, UNITS, sep="\n", file=told, flush=True)
    rows = []
    for case in SCALES[options.scale]:
        rows.append(measure(case, max(options.repeat, 1)))
        print(_line(rows[-1]), file=told, flush=True)
    starting = start_up(options.repeat)
    slowest = max(row["search_wall_s"] for row in rows)
    print(
        f"\nslowest search {slowest:.2f} s wall, {slowest / PAPER_LIMIT_S:.3f} of the {PAPER_LIMIT_S:.0f} s "
        f"that the paper states as its limit\n"
        f"hapmoe --help {starting['help_cpu_s'] * 1e3:.0f} ms CPU, a bare interpreter "
        f"{starting['bare_cpu_s'] * 1e3:.0f} ms: {starting['ratio']:.1f} x",
        file=told,
    )
    more: dict[str, Any] = {}
    if options.scale == "large":
        more = {"growth": growth(told), "peers": peers(told)}
    if options.json:
        document = more | {"scale": options.scale, "repeat": options.repeat, "rows": rows, "start_up": starting}
        print(json.dumps(document | {"slowest_search_wall_s": slowest}, indent=1))


if __name__ == "__main__":
    main()
