"""Is the plan that the planner picks the fastest? ``python -m bench.unequal [--json] [--folder DIR]``.

The model and the two kinds of ``hapmoe demo`` (a processor, and the same some times slower), each slowness with its own
profile. For each slowness and number of layers four splits are trained: the planner's, and three others. Compared is
the CPU time of the busiest rank, which sets the step where every rank has a core of its own. Of two plans whose times
are less than a factor of two apart the load of the machine may decide: they are counted aside.
With ``--folder`` the results stay, and what is in it is not run again.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from hapmoe import tables
from hapmoe.cluster import Cluster
from hapmoe.clusterfile import load_cluster
from hapmoe.demo import SETTINGS, Trained, learned, script, slowed, split_plan, trained
from hapmoe.extract import extract
from hapmoe.job import JobSpec
from hapmoe.launch import target
from hapmoe.launch.write import write_files
from hapmoe.plan import Plan
from hapmoe.planfile import dump_plan
from hapmoe.search import search

__all__ = ["main"]

SLOW = (2, 3, 4, 5, 6)
"""How many times slower the second kind is."""
LAYERS = (6, 9)
STEPS = 3
"""Measured of each plan, the first of which makes buffers."""
APART = 2.0
NEEDED = 0.9
"""Share of the settings, and of the comparisons of plans that are far apart, which must come out right."""


@dataclass(frozen=True)
class Timed:
    """One plan: layers on the fast and on the slow kind, seconds of the busiest rank's step."""

    layers: tuple[int, int]
    predicted_s: float
    measured_s: float


@dataclass(frozen=True)
class Setting:
    """The picked plan and three others, on one pair of kinds."""

    slow: int
    layers: int
    picked: Timed
    others: tuple[Timed, ...]

    @property
    def right(self) -> bool:
        return all(self.picked.measured_s < other.measured_s for other in self.others)

    def pairs(self) -> Iterator[tuple[bool, bool]]:
        """(far apart, in the predicted order) of every two plans."""
        for a, b in combinations((self.picked, *self.others), 2):
            small, large = sorted((a.measured_s, b.measured_s))
            yield large >= APART * small, (a.measured_s < b.measured_s) == (a.predicted_s < b.predicted_s)


def others(layers: int, picked: tuple[int, int]) -> list[tuple[int, int]]:
    """Three other splits: even, the picked one turned around, nearly all on the slow kind."""
    even = (layers - layers // 2, layers // 2)
    wanted = [even, picked[::-1], (1, layers - 1), (2, layers - 2), (layers - 2, 2)]
    return [one for one in dict.fromkeys(wanted) if one != picked][:3]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.unequal", description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="keep results here, and go on from those it holds")
    options = parser.parse_args(arguments)
    found: list[Setting] = []
    with tempfile.TemporaryDirectory(prefix="hapmoe-unequal-") as name:
        root = options.folder.resolve() if options.folder else Path(name)
        for slow in SLOW:
            for layers in LAYERS:
                found.append(_setting(root / f"slow{slow}", slow, layers))
                print(_line(found[-1]), file=sys.stderr if options.json else sys.stdout, flush=True)
    fastest = sum(one.right for one in found)
    far = [right for one in found for apart, right in one.pairs() if apart]
    near = [right for one in found for apart, right in one.pairs() if not apart]
    if options.json:
        counts = {"settings": len(found), "picked_is_fastest": fastest}
        counts |= {"far_apart": len(far), "in_order": sum(far), "nearer": len(near), "nearer_in_order": sum(near)}
        print(json.dumps(counts, indent=1))
    else:
        print(f"the picked plan is the fastest of four in {fastest} of {len(found)} settings")
        print(f"of pairs at least {APART:g} times apart {sum(far)} of {len(far)} are in the predicted order")
        print(f"(of the nearer ones {sum(near)} of {len(near)})")
    return 0 if fastest >= NEEDED * len(found) and sum(far) >= NEEDED * len(far) else 1


def _setting(folder: Path, slow: int, layers: int) -> Setting:
    kept = folder / f"{layers}.json"
    if kept.exists():
        rows = [Timed((a, b), *times) for (a, b), *times in json.loads(kept.read_text())]
        return Setting(slow, layers, rows[0], tuple(rows[1:]))
    if not (folder / "tables").exists():
        learned(
            folder,
            lambda text: print(f"{slow} times slower: {text}", file=sys.stderr),
            slowed(slow),
            script(layers, STEPS + 1),
        )
    (folder / f"{layers}.sh").write_text(script(layers, STEPS + 1))
    job = extract(folder / f"{layers}.sh")
    cluster = tables.attach(load_cluster(folder / "cluster.yaml"), tables.load(folder / "tables"))
    best = search(job, cluster, settings=SETTINGS).plan
    assert best is not None
    picked = _timed(folder, slow, job, cluster, best)
    rows = [picked]
    for split in others(layers, picked.layers):
        rows.append(_timed(folder, slow, job, cluster, split_plan(job, cluster, ("fast", "slow"), split)))
    kept.write_text(json.dumps([(one.layers, one.predicted_s, one.measured_s) for one in rows]))
    return Setting(slow, layers, rows[0], tuple(rows[1:]))


def _timed(folder: Path, slow: int, job: JobSpec, cluster: Cluster, plan: Plan) -> Timed:
    counts = {stage.pool: stage.num_layers for stage in plan.stages}
    label = "{}-{}".format(*counts.values())
    with tempfile.TemporaryDirectory(dir=folder) as name:
        place = Path(name)
        (place / "profile").symlink_to(folder / "profile")
        write_files(place / label, target("torchrun")(job, cluster, plan, dump_plan(plan), slowed(slow)))
        found: Trained = trained(label, job, cluster, plan, place, steps=STEPS)
    return Timed((counts["fast"], counts["slow"]), max(found.expected_s), max(found.busy_s))


def _line(one: Setting) -> str:
    told = ", ".join(
        f"{plan.layers[0]}+{plan.layers[1]} {plan.predicted_s * 1e3:.0f}/{plan.measured_s * 1e3:.0f}"
        for plan in (one.picked, *one.others)
    )
    return (
        f"{one.slow} times slower, {one.layers} layers: {'right' if one.right else 'WRONG'}; "
        f"layers fast+slow, ms CPU predicted/measured: {told}"
    )


if __name__ == "__main__":
    sys.exit(main())
