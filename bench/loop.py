"""The loop closed on CPU: profile, predict, measure. ``python -m bench.loop [--json] [--only TEXT]``.

A job is profiled at a few degrees (short runs of the script by ``profile.sh``, two depths each). Then other
configurations of it (splits, degrees, micro-batches, recomputation, not profiled ones) are trained on two ranks, and
the CPU seconds of their steps compared with the prediction from the tables. CPU time, not wall time: what a rank
computes, without the wait for others, whatever else the machine does.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.lab import MOE, SOURCE, Case, Run, block, prepare, run
from hapmoe import tables
from hapmoe.cluster import Cluster
from hapmoe.cost import evaluate
from hapmoe.job import JobSpec
from hapmoe.measured import Table
from hapmoe.plan import Plan, Recompute
from hapmoe.profiling.collect import collect
from hapmoe.profiling.folder import pool_files, write_profile
from hapmoe.profiling.probed import load_ranks
from hapmoe.profiling.runs import Chosen, Place, runs_at

__all__ = ["FLAGS", "Row", "main", "measured_s", "predicted_s", "profiled"]

FLAGS: dict[str, str | bool | None] = {
    # large enough that kernels, not Python, take the time
    "--hidden-size": "256",
    "--ffn-hidden-size": "512",
    "--moe-ffn-hidden-size": "384",
    "--seq-length": "128",
    "--max-position-embeddings": "128",
    "--train-iters": "6",
}
PLACES: tuple[Place, ...] = ((1, 1, 1, 1, 1), (1, 1, 2, 1, 2), (2, 1, 2, 1, 1))
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
    """The busiest rank's step of one configuration, in CPU seconds."""

    case: str
    predicted_s: float
    measured_s: float
    stages: tuple[tuple[float, float], ...]
    """Predicted and measured per stage."""

    @property
    def error(self) -> float:
        return abs(self.predicted_s - self.measured_s) / self.measured_s


def profiled(root: Path, places: Sequence[Place]) -> tuple[Table, ...]:
    """Run a profile of the base job at these degrees, by the files that are handed out."""
    job, cluster, _ = prepare(case("base", (4,), dp=2), root)
    pool = cluster.pools[0]
    runs = tuple(one for place in places for one in runs_at(job, cluster, pool, place))
    profile, files = pool_files(job, cluster, pool, Chosen(runs=runs), timeout_s=900)
    folder = write_profile(root / "profile", files)
    environment = {
        **os.environ,
        "HAPMOE_LAB": "1",
        "HAPMOE_TORCHRUN": str(Path(sys.executable).parent / "torchrun"),
        "PYTHONPATH": os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")]).strip(os.pathsep),
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
    }
    subprocess.run(["bash", folder / "profile.sh"], env=environment, check=True)
    return collect(job, cluster, pool, folder, profile)


def predicted_s(job: JobSpec, cluster: Cluster, plan: Plan) -> tuple[float, ...]:
    """CPU seconds of a step on a rank of each stage: its microbatches and its optimizer, no messages."""
    estimate = evaluate(job, cluster, plan)
    return tuple(
        plan.num_microbatches * (stage.forward_s + stage.backward_s - stage.exposed_comm_s) + stage.optimizer_s
        for stage in estimate.stages
    )


def measured_s(found: Run, out: Path) -> tuple[float, ...]:
    """CPU seconds of passes and optimizer of the steady steps: per stage the median over its ranks and steps."""
    ranks = load_ranks(out)
    result = []
    for stage in found.plan.stages:
        mine = ranks[stage.first_rank : stage.first_rank + stage.num_devices]
        steps = [step for rank in mine for step in rank.steady]
        result.append(
            statistics.median(
                sum(span.cpu_s or 0.0 for spans in (step.forward, step.backward, step.optimizer) for span in spans)
                for step in steps
            )
        )
    return tuple(result)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.loop", description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", default="", help="configurations whose name holds this text")
    options = parser.parse_args(arguments)
    rows = []
    with tempfile.TemporaryDirectory(prefix="hapmoe-loop-") as name:
        root = Path(name)
        found = profiled(root, PLACES)
        for number, one in enumerate(one for one in CASES if options.only in one.name):
            out = root / f"case{number}"
            trained = run(one, probe=out, timeout_s=900)
            with tempfile.TemporaryDirectory(dir=root) as place:
                job, cluster, plan = prepare(one, Path(place))
            stages = predicted_s(job, tables.attach(cluster, found), plan)
            measured = measured_s(trained, out)
            rows.append(Row(one.name, max(stages), max(measured), tuple(zip(stages, measured, strict=True))))
            print(_line(rows[-1]), file=sys.stderr if options.json else sys.stdout, flush=True)
    median = statistics.median(row.error for row in rows)
    if options.json:
        told = [{"case": row.case, "predicted_s": row.predicted_s, "measured_s": row.measured_s} for row in rows]
        print(json.dumps({"median_error": median, "rows": told}, indent=1))
    else:
        print(f"median error {median:.1%} over {len(rows)} configurations (CPU time of the busiest rank)")
    return 0 if median <= 0.1 else 1


def _line(row: Row) -> str:
    parts = " ".join(f"{predicted * 1e3:.0f}/{measured * 1e3:.0f}" for predicted, measured in row.stages)
    return f"{row.case:28} predicted {row.predicted_s * 1e3:6.0f} ms, measured {row.measured_s * 1e3:6.0f} ms, " + (
        f"off {row.error:.0%} (stages {parts})"
    )


if __name__ == "__main__":
    sys.exit(main())
