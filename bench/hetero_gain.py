"""What degrees of each pool's own add on the paper's clusters: ``python -m bench.hetero_gain [--json]``.

The best plan of ``--backend megatron`` (one set of degrees) and of ``--backend megatron-hetero``, on the nine
heterogeneous clusters with Mixtral-S and Mixtral-L, and for LLaMA-2 13B on A100 + 910B, scored by the same oracle.
Where no plan fits, the optimizer's states are in host memory, as in bench.paper. Predictions, not measurements: these
clusters join vendors, which neither back end launches yet.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import hapmoe
from bench.paper import EXAMPLES, HETEROGENEOUS, geometric_mean, offloaded
from hapmoe.plan import Plan
from hapmoe.search import search

__all__ = ["gain"]

BACKENDS = ("megatron", "megatron-hetero")
PAIRS = (
    *((model, name) for model in ("mixtral-s", "mixtral-l") for name in HETEROGENEOUS),
    ("llama2-13b", "a100-910b"),
)


def gain(model: str, name: str) -> dict[str, Any]:
    """Step and search time of both back ends on one cluster, and the plan of unequal degrees."""
    job = hapmoe.extract(str(EXAMPLES / f"{model}.sh"))
    cluster = hapmoe.load_cluster(str(EXAMPLES / "clusters" / f"{name}.yaml"))
    offload = search(job, cluster, backend=BACKENDS[0], top=1).plan is None
    job = offloaded(job) if offload else job
    row: dict[str, Any] = {"model": model, "cluster": name, "offload": offload}
    for backend in BACKENDS:
        began = time.process_time()
        found = search(job, cluster, backend=backend, top=1)
        step = found.estimate.step_s if found.estimate else None
        row[backend] = {"step_s": step, "search_cpu_s": time.process_time() - began, "plan": _said(found.plan)}
    return row


def _said(plan: Plan | None) -> str:
    stages = plan.stages if plan else ()
    return " / ".join(f"{one.pool} {one.num_layers}L tp{one.tp} cp{one.cp} ep{one.ep} dp{one.dp}" for one in stages)


def _factor(row: dict[str, Any]) -> float | None:
    one, other = (row[backend]["step_s"] for backend in BACKENDS)
    return one / other if one and other else None


def _line(row: dict[str, Any]) -> str:
    steps = [(row[one]["step_s"], row[one]["search_cpu_s"]) for one in BACKENDS]
    times = "  ".join(f"{step:8.3f} s in {took:5.2f} s" if step else f"{'none fits':>20}" for step, took in steps)
    factor = _factor(row)
    more = f"{factor:.3f}" if factor else "-"
    return f"{row['model']:10} {row['cluster']:9} {times}  {more:>6}  {row[BACKENDS[1]]['plan']}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.hetero_gain", description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    rows = []
    if not options.json:
        print(f"{'model':10} {'cluster':9} {'equal degrees':>20}  {'own degrees':>20}  {'gain':>6}  plan")
    for model, name in PAIRS:
        rows.append(gain(model, name))
        if not options.json:
            print(_line(rows[-1]), flush=True)
    means = {
        model: geometric_mean([factor for row in rows if row["model"] == model and (factor := _factor(row))])
        for model in dict.fromkeys(model for model, _ in PAIRS)
    }
    if options.json:
        print(json.dumps({"rows": rows, "geometric_means": means}, indent=1))
    else:
        print("geometric means:", ", ".join(f"{model} {mean:.3f}" for model, mean in means.items() if mean))
    return 0 if all((_factor(row) or 1.0) >= 1.0 - 1e-9 for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
