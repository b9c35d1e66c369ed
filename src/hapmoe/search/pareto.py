"""What less would cost: the fastest plans on fewer devices, and with less memory at the fullest device.

Every plan shown is slower than those with more devices or memory, and the fastest under its own bound,
as far as time allows. Uses of nodes are looked at from the fewest devices up, each below the best step so far.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hapmoe.cost import evaluate
from hapmoe.plan import Estimate, Plan
from hapmoe.search.problem import Problem
from hapmoe.search.usage import Seeker, uses

__all__ = ["fewer_devices", "less_memory", "peak_bytes"]

Row = tuple[Plan, Estimate]

MEMORY = (0.9, 0.8, 0.65, 0.5)
"""Parts of the best plan's peak that the others may have."""
MOST_SHOWN = 6
SLOWEST = 10.0
"""Plans slower than so many times the best one are of no use to anybody."""


def peak_bytes(estimate: Estimate) -> float:
    """Bytes of the fullest device of the plan."""
    return max(stage.memory_bytes for stage in estimate.stages)


def fewer_devices(problem: Problem, best: Row, seeker: Seeker) -> tuple[Row, ...]:
    """Faster than every plan on as many devices or fewer, up to those of ``best``; fastest first."""
    plan, estimate = best
    below = SLOWEST * estimate.step_s
    found: list[Row] = []
    listed, _ = uses(problem, seeker.mixed)
    for use in sorted(listed, key=lambda use: (use.devices, use.floor_s)):
        if use.devices >= plan.num_devices or use.floor_s >= below:
            continue
        other, _, cut = seeker.best(use.narrow(problem), below)
        if other is not None:
            judged = evaluate(problem.job, problem.cluster, other)
            if found and found[-1][0].num_devices == other.num_devices:
                found.pop()
            found.append((other, judged))
            below = judged.step_s
        if cut:
            break
    return tuple(found[::-1][:MOST_SHOWN])


def less_memory(problem: Problem, best: Row, seeker: Seeker) -> tuple[Row, ...]:
    """The fastest plan for each part of ``MEMORY`` of the best plan's peak; fastest first."""
    found: list[Row] = []
    for part in MEMORY:
        most = part * peak_bytes(best[1])
        if found and peak_bytes(found[-1][1]) <= most:
            continue
        tables = tuple(
            replace(table, memory_limit_bytes_K=np.minimum(table.memory_limit_bytes_K, most))
            for table in problem.tables
        )
        plan, _, cut = seeker.best(replace(problem, tables=tables), np.inf)
        if plan is None or cut:
            break
        found.append((plan, evaluate(problem.job, problem.cluster, plan)))
    return tuple(found)
