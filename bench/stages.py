"""Does a stage take by itself what it takes in a whole run? ``python -m bench.stages [--json] [--folder DIR]``.

A first, a middle and a last stage of three run by themselves on torch's fake back end, as ``hapmoe profile`` runs
them; then the same three train together over gloo. Compared are the CPU seconds of a microbatch's passes and of the
optimizer, over those of a fixed piece of work (as ``bench.loop`` does), and the bytes that a microbatch sends.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.lab import run
from bench.loop import base, case, profile_run
from hapmoe.measured import Piece
from hapmoe.profiling.probed import MeasuredRank, load_rank, load_ranks
from hapmoe.profiling.runs import STAGES, stages_at

__all__ = ["main"]

LAYERS = 1
TOGETHER = case("pp3", (LAYERS,) * len(STAGES))
PHASES = ("forward", "backward", "optimizer")
NEEDED = 0.1
"""Median difference that is none."""


@dataclass(frozen=True)
class Row:
    """One part of a stage's step, at pace 1."""

    stage: str
    phase: str
    alone: float
    together: float

    @property
    def off(self) -> float:
        return self.alone / self.together - 1.0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.stages", description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="keep results here, and go on from those it holds")
    options = parser.parse_args(arguments)
    alone: defaultdict[tuple[int, str], list[float]] = defaultdict(list)
    together: defaultdict[tuple[int, str], list[float]] = defaultdict(list)
    sent: list[tuple[int, int]] = []
    with tempfile.TemporaryDirectory(prefix="hapmoe-stages-") as name:
        root = options.folder.resolve() if options.folder else Path(name)
        for number in range(options.rounds):
            place = root / f"round{number}"
            _train(place / "together")
            ranks = load_ranks(place / "together")
            for stage, (phase, seconds) in _times(ranks, place / "together"):
                together[stage, phase].append(seconds)
            job, cluster = base()
            for one in stages_at(job, cluster, cluster.pools[0], (1, 1, 1, 1, 1)):
                (table,) = profile_run(place / one.name, one)
                for row in table.rows:
                    assert isinstance(row, Piece)
                    alone[one.stage, row.phase].append(row.median_s)
                mine = load_rank(place / one.name / "results" / one.name / f"rank{one.started[0]}.jsonl")
                sent.append((_bytes(mine), _bytes(ranks[one.stage])))
    rows = [
        Row(STAGES[stage], phase, statistics.median(alone[stage, phase]), statistics.median(together[stage, phase]))
        for stage in range(len(STAGES))
        for phase in PHASES
    ]
    median, worst = (figure(abs(row.off) for row in rows) for figure in (statistics.median, max))
    equal = all(one == other for one, other in sent)
    if options.json:
        told = [{**vars(row), "off": row.off} for row in rows]
        print(json.dumps({"median": median, "largest": worst, "bytes_equal": equal, "rows": told}, indent=1))
    else:
        for row in rows:
            print(f"{row.stage:6} {row.phase:9} alone {row.alone:.3f}, together {row.together:.3f}, off {row.off:+.1%}")
        print(f"median difference {median:.1%}, largest {worst:.0%}; bytes sent {'equal' if equal else 'DIFFER'}")
    return 0 if equal and median <= NEEDED else 1


def _train(folder: Path) -> None:
    """All three stages over gloo, where ``folder`` does not hold what came out."""
    if not (folder / "paces.json").exists():
        shutil.rmtree(folder, ignore_errors=True)
        found = run(TOGETHER, probe=folder, variables={"HAPMOE_LAB_PACE": "1"}, timeout_s=900)
        paces = [[row["pace_s"] for row in rows[1:]] for rows in found.rows("iteration")]
        (folder / "paces.json").write_text(json.dumps(paces))


def _times(ranks: Sequence[MeasuredRank], folder: Path) -> list[tuple[int, tuple[str, float]]]:
    """(stage, (phase, CPU seconds at pace 1)): medians over microbatches and steps."""
    found = []
    for stage, (rank, paces) in enumerate(zip(ranks, json.loads((folder / "paces.json").read_text()), strict=True)):
        for phase in PHASES:
            times = [span.cpu_s or 0.0 for step in rank.steady for span in getattr(step, phase)]
            found.append((stage, (phase, statistics.median(times) / statistics.median(paces))))
    return found


def _bytes(rank: MeasuredRank) -> int:
    """Of a microbatch, to other stages."""
    step = rank.steps[1]
    sent = sum(row.calls * row.call_bytes for row in step.collectives if row.collective == "p2p")
    return sent // len(step.forward)


if __name__ == "__main__":
    sys.exit(main())
