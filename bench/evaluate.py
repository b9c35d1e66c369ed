"""How long one estimate takes: ``python -m bench.evaluate [--repeat N] [--json]``.

Llama 3 405B on 16 nodes of H200: the estimate of a plan of 16 stages and 128 microbatches, exact timeline
included, without and with 4 virtual stages, prices known (``cache``) and not; and the pricing of 100,000 stage
options. CPU seconds, the least of N, against the bars.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

import hapmoe
from hapmoe.cluster import Cluster
from hapmoe.cost import evaluate
from hapmoe.job import JobSpec
from hapmoe.options import Options
from hapmoe.plan import Plan
from hapmoe.pricing import price
from hapmoe.search import pose_for, search

CASES = Path(__file__).parent / "cases"
STAGES, MICROBATCHES, OPTIONS = 16, 128, 100_000
BARS_S = {"estimate, vpp 1": 0.005, "estimate, vpp 4": 0.020, "100,000 options": 1.0}


def plan_of(job: JobSpec, cluster: Cluster, vpp: int) -> Plan:
    """The best plan of one node per stage."""
    pins = ("pp=16", "tp=8", "cp=1", "mbs=1", f"vpp={vpp}")
    plan = search(job, cluster, settings=pins, top=1).plan
    assert plan is not None and plan.pp == STAGES and plan.vpp == vpp
    assert plan.num_microbatches == MICROBATCHES
    return plan


def least_s(work: Callable[[], object], repeat: int) -> float:
    """CPU seconds of the quickest of some runs."""
    found = []
    for _ in range(repeat):
        began = time.process_time()
        work()
        found.append(time.process_time() - began)
    return min(found)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.evaluate", description=__doc__)
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    job = hapmoe.extract(str(CASES / "llama3-405b.sh"))
    training = msgspec.structs.replace(job.training, global_batch_size=MICROBATCHES)
    job = msgspec.structs.replace(job, training=training)
    cluster = hapmoe.load_cluster(CASES / "128-1.yaml")
    (pool,) = cluster.pools
    found: dict[str, float] = {}
    for vpp in (1, 4):
        plan, cache = plan_of(job, cluster, vpp), {}
        evaluate(job, cluster, plan, cache)
        found[f"estimate, vpp {vpp}"] = least_s(lambda p=plan, c=cache: evaluate(job, cluster, p, c), options.repeat)
        found[f"estimate, vpp {vpp}, nothing priced"] = least_s(
            lambda p=plan: evaluate(job, cluster, p), options.repeat
        )
    some = pose_for(job, cluster).space.options
    many = Options(*(np.resize(getattr(some, name), OPTIONS) for name in Options.__slots__))
    found["100,000 options"] = least_s(lambda: price(job, pool, many), max(options.repeat // 10, 1))
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        for name, seconds in found.items():
            bar = f"bar {BARS_S[name] * 1e3:.0f} ms" if name in BARS_S else ""
            print(f"{name:36} {seconds * 1e3:9.2f} ms   {bar}")
    return int(any(found[name] > bar for name, bar in BARS_S.items()))


if __name__ == "__main__":
    sys.exit(main())
