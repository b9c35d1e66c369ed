"""Is the plan that the planner picks the fastest? ``python -m bench.unequal [--json]``.

The model and the two kinds of ``hapmoe demo`` (a processor, and the same three times slower). After a profile of both,
four splits are trained: the planner's and three others. Compared is the CPU time of the busiest rank, which sets the
step where every rank has a core of its own. Pairs whose measured times are within a fifth are left out: load decides.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

from hapmoe.demo import OPTIONS, SETTINGS, Trained, learned, split_plan, trained
from hapmoe.launch import target
from hapmoe.launch.write import write_files
from hapmoe.planfile import dump_plan
from hapmoe.search import search

__all__ = ["main"]

OTHERS = ((4, 4), (2, 6), (7, 1))
"""Layers on the fast and on the slow kind."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.unequal", description=__doc__)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    found: list[Trained] = []
    with tempfile.TemporaryDirectory(prefix="hapmoe-unequal-") as name:
        folder = Path(name).resolve() / "run"
        job, cluster = learned(folder, lambda text: print(text, file=sys.stderr))
        best = search(job, cluster, settings=SETTINGS).plan
        assert best is not None
        plans = {"picked": best}
        for fast, slow in OTHERS:
            plans[f"{fast}-{slow}"] = split_plan(job, cluster, ("fast", "slow"), (fast, slow))
        for label, plan in plans.items():
            write_files(folder / label, target("torchrun")(job, cluster, plan, dump_plan(plan), OPTIONS))
            found.append(trained(label, job, cluster, plan, folder))
            if not options.json:
                print(_line(found[-1]), flush=True)
    picked = all(max(found[0].busy_s) <= max(other.busy_s) for other in found)
    right = [_same_order(a, b) for a, b in combinations(found, 2) if _apart(a, b)]
    if options.json:
        told = [{"plan": one.name, "predicted_s": max(one.expected_s), "measured_s": max(one.busy_s)} for one in found]
        print(
            json.dumps({"picked_is_fastest": picked, "pairs": len(right), "right": sum(right), "plans": told}, indent=1)
        )
    else:
        print(f"the picked plan is {'' if picked else 'not '}the fastest; {sum(right)} of {len(right)} pairs in order")
    return 0 if picked and all(right) else 1


def _apart(a: Trained, b: Trained) -> bool:
    times = sorted((max(a.busy_s), max(b.busy_s)))
    return times[1] > 1.2 * times[0]


def _same_order(a: Trained, b: Trained) -> bool:
    return (max(a.busy_s) < max(b.busy_s)) == (max(a.expected_s) < max(b.expected_s))


def _line(one: Trained) -> str:
    layers = ", ".join(f"{stage.num_layers} {stage.pool}" for stage in one.plan.stages)
    return (
        f"{one.name:8} layers {layers:16} busiest rank: predicted {max(one.expected_s) * 1e3:6.0f} ms, "
        f"measured {max(one.busy_s) * 1e3:6.0f} ms CPU"
    )


if __name__ == "__main__":
    sys.exit(main())
