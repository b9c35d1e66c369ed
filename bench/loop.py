"""The loop closed on CPU: profile, predict, measure. ``python -m bench.loop [--json] [--only TEXT] [--folder DIR]``.

A job is profiled at a few degrees (short runs of the script by ``profile.sh``, two depths each). Then other
configurations of it (splits, degrees, micro-batches, recomputation, not profiled ones) are trained on two ranks, and
the CPU seconds of their steps compared with the prediction from the tables. CPU time, not wall time: what a rank
computes, without the wait for others, whatever else the machine does.

A core that shares caches with other work takes up to a third more CPU time from one minute to the next. So every run
also times a fixed piece of work between its steps (``hapmoe.lab.pace``), and all its times are divided by that, here
and there; runs of the profile and measured ones take turns; all of it ``--rounds`` times, medians of the rounds. With
``--folder`` the results stay, and what is in it is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import msgspec

from bench.lab import MOE, SOURCE, Case, block, prepare, run
from hapmoe import tables
from hapmoe.cluster import Cluster
from hapmoe.cost import evaluate
from hapmoe.job import JobSpec
from hapmoe.measured import Piece, Table
from hapmoe.plan import Plan, Recompute
from hapmoe.profiling.collect import collect
from hapmoe.profiling.folder import pool_files, write_profile
from hapmoe.profiling.probed import load_ranks
from hapmoe.profiling.runs import Chosen, Place, ProfileRun, runs_at

__all__ = ["CASES", "FLAGS", "Row", "base", "case", "main", "measured_s", "predicted_s", "profile_run", "together"]

FLAGS: dict[str, str | bool | None] = {
    # large enough that kernels, not Python, take the time
    "--hidden-size": "256",
    "--ffn-hidden-size": "512",
    "--moe-ffn-hidden-size": "384",
    "--seq-length": "128",
    "--max-position-embeddings": "128",
    "--train-iters": "6",
}
PLACES: tuple[Place, ...] = ((1, 1, 1, 1, 1), (1, 1, 1, 1, 4), (1, 1, 2, 1, 2), (2, 1, 2, 1, 1))
"""Profiled degrees: tp, cp, ep, etp, micro-batch size."""


def case(name: str, layers: tuple[int, ...], **degrees: object) -> Case:
    flags = {**FLAGS, "--num-layers": str(sum(layers))}
    return Case(name, layers, flags=flags, **degrees)  # type: ignore[arg-type]


CASES = (
    case("pp2, 4 + 2", (4, 2)),
    case("pp2, 1 + 5", (1, 5)),
    case("pp2, 6 + 2", (6, 2)),
    case("pp2, mbs 2", (2, 2), mbs=2),
    case("pp2, mbs 4", (3, 2), mbs=4),
    case("pp2, vpp 2", (4, 4), vpp=2),
    case("pp2, MoE recomputed", (2, 4), recompute=(MOE, Recompute())),
    case("pp2, one layer recomputed", (4, 2), recompute=(block(1), block(1))),
    case("dp2, 5 layers", (5,), dp=2),
    case("dp2, mbs 2, 2 layers", (2,), dp=2, mbs=2),
    case("dp2 ep2, 4 layers", (4,), dp=2, ep=2),
    case("dp2 ep2, mbs 4, 2 layers", (2,), dp=2, ep=2, mbs=4),
    case("tp2 ep2, 4 layers", (4,), tp=2, ep=2),
    case("tp2 ep2, mbs 2, 2 layers", (2,), tp=2, ep=2, mbs=2),
)


@dataclass(frozen=True)
class Row:
    """The busiest rank's step of one configuration: its CPU time over that of the fixed piece of work."""

    case: str
    predicted: float
    measured: float
    stages: tuple[tuple[float, float], ...]
    """Predicted and measured per stage."""

    @property
    def error(self) -> float:
        return abs(self.predicted - self.measured) / self.measured


def profile_run(root: Path, one: ProfileRun) -> tuple[Table, ...]:
    """A run of the profile by the files that are handed out, in ``root``; its tables, at pace 1."""
    job, cluster = base()
    pool = cluster.pools[0]
    profile, files = pool_files(job, cluster, pool, Chosen(runs=(one,)), timeout_s=900)
    if not (root / "results" / one.name).exists():
        shutil.rmtree(root, ignore_errors=True)
        write_profile(root, files)
        environment = {
            **os.environ,
            "HAPMOE_LAB": "1",
            "HAPMOE_LAB_OUT": str(root / "pace"),
            "HAPMOE_LAB_PACE": "1",
            "HAPMOE_TORCHRUN": str(Path(sys.executable).parent / "torchrun"),
            "PYTHONPATH": os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")]).strip(os.pathsep),
            "PYTHONWARNINGS": "ignore",
            "OMP_NUM_THREADS": "1",
        }
        subprocess.run(["bash", root / "profile.sh"], env=environment, check=True)
    pace_s = statistics.median(_paces(root / "pace"))
    return tuple(
        msgspec.structs.replace(table, rows=tuple(_over(row, pace_s) for row in table.rows if isinstance(row, Piece)))
        for table in collect(job, cluster, pool, root, profile)
        if table.kind == "pieces"
    )


def together(found: Sequence[Table]) -> Table:
    """One table of many: for every piece the median of its runs."""
    pieces: defaultdict[tuple[object, ...], list[Piece]] = defaultdict(list)
    for table in found:
        for row in table.rows:
            assert isinstance(row, Piece)
            pieces[row.key].append(row)
    rows = tuple(
        msgspec.structs.replace(rows[0], median_s=statistics.median(row.median_s for row in rows))
        for rows in pieces.values()
    )
    return msgspec.structs.replace(found[0], runs=tuple(run for table in found for run in table.runs), rows=rows)


def _over(row: Piece, pace_s: float) -> Piece:
    return msgspec.structs.replace(
        row, median_s=row.median_s / pace_s, p10_s=row.p10_s / pace_s, p90_s=row.p90_s / pace_s
    )


def _paces(folder: Path) -> list[float]:
    """Of all ranks and iterations but the first."""
    lines = [json.loads(line) for path in folder.glob("rank*.jsonl") for line in path.read_text().splitlines()]
    return [row["pace_s"] for row in lines if row["event"] == "iteration" and row["iteration"] > 1]


@cache
def base() -> tuple[JobSpec, Cluster]:
    """The job that is profiled, and two devices."""
    with tempfile.TemporaryDirectory() as name:
        return prepare(case("base", (4,), dp=2), Path(name))[:2]


def predicted_s(job: JobSpec, cluster: Cluster, plan: Plan) -> tuple[float, ...]:
    """CPU seconds of a step on a rank of each stage: its microbatches and its optimizer, no messages."""
    estimate = evaluate(job, cluster, plan)
    return tuple(
        plan.num_microbatches * (stage.forward_s + stage.backward_s - stage.exposed_comm_s) + stage.optimizer_s
        for stage in estimate.stages
    )


def measured_s(one: Case, root: Path) -> tuple[float, ...]:
    """CPU time of passes and optimizer of the steady steps at pace 1: per stage the median over its ranks and steps.

    Trains where ``root`` does not hold what came out.
    """
    if not (root / "paces.json").exists():
        shutil.rmtree(root, ignore_errors=True)
        found = run(one, probe=root, variables={"HAPMOE_LAB_PACE": "1"}, timeout_s=900)
        paces = [[row["pace_s"] for row in rows[1:]] for rows in found.rows("iteration")]
        (root / "paces.json").write_text(json.dumps(paces))
    ranks, paces = load_ranks(root), json.loads((root / "paces.json").read_text())
    result, (_, _, plan) = [], _prepared(one)
    for stage in plan.stages:
        mine = slice(stage.first_rank, stage.first_rank + stage.num_devices)
        steps = [step for rank in ranks[mine] for step in rank.steady]
        result.append(
            statistics.median(
                sum(span.cpu_s or 0.0 for spans in (step.forward, step.backward, step.optimizer) for span in spans)
                for step in steps
            )
            / statistics.median(pace for rank in paces[mine] for pace in rank)
        )
    return tuple(result)


def _prepared(one: Case) -> tuple[JobSpec, Cluster, Plan]:
    with tempfile.TemporaryDirectory() as name:
        return prepare(one, Path(name))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.loop", description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", default="", help="configurations whose name holds this text")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument(
        "--folder", type=Path, metavar="DIR", help="keep results here, and go on from those that it holds"
    )
    options = parser.parse_args(arguments)
    cases = [one for one in CASES if options.only in one.name]
    with tempfile.TemporaryDirectory(prefix="hapmoe-loop-") as name:
        root = options.folder.resolve() if options.folder else Path(name)
        found, measured = _rounds(root, cases, options.rounds)
    rows = []
    for one in cases:
        job, cluster, plan = _prepared(one)
        stages = predicted_s(job, tables.attach(cluster, (together(found),)), plan)
        medians = [statistics.median(times) for times in zip(*measured[one.name], strict=True)]
        rows.append(Row(one.name, max(stages), max(medians), tuple(zip(stages, medians, strict=True))))
        print(_line(rows[-1]), file=sys.stderr if options.json else sys.stdout, flush=True)
    median, worst = statistics.median(row.error for row in rows), max(row.error for row in rows)
    if options.json:
        told = [{"case": row.case, "predicted": row.predicted, "measured": row.measured} for row in rows]
        print(json.dumps({"median_error": median, "largest_error": worst, "rows": told}, indent=1))
    else:
        print(f"median error {median:.1%}, largest {worst:.0%}, over {len(rows)} configurations ", end="")
        print(f"(CPU time of the busiest rank, medians of {options.rounds} rounds)")
    return 0 if median <= 0.1 else 1


def _rounds(
    root: Path, cases: Sequence[Case], rounds: int
) -> tuple[list[Table], defaultdict[str, list[tuple[float, ...]]]]:
    """Tables of every run of the profile, and times per stage of every case, one a round."""
    job, cluster = base()
    profile = [one for place in PLACES for one in runs_at(job, cluster, cluster.pools[0], place)]
    found: list[Table] = []
    measured: defaultdict[str, list[tuple[float, ...]]] = defaultdict(list)
    for number in range(rounds):
        for index in range(max(len(profile), len(cases))):
            if index < len(profile):
                found += profile_run(root / f"round{number}" / profile[index].name, profile[index])
            if index < len(cases):
                place = root / f"round{number}" / re.sub(r"[^a-z0-9]+", "-", cases[index].name.lower())
                measured[cases[index].name].append(measured_s(cases[index], place))
    return found, measured


def _line(row: Row) -> str:
    parts = " ".join(f"{predicted:.1f}/{measured:.1f}" for predicted, measured in row.stages)
    return f"{row.case:28} predicted {row.predicted:6.1f}, measured {row.measured:6.1f}, off {row.error:.0%} ({parts})"


if __name__ == "__main__":
    sys.exit(main())
