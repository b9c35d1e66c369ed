"""The plan whose tokens cost least, in money or in energy: ``--objective cost`` and ``energy``.

A step costs its seconds times what its devices cost per second; devices that a plan leaves idle cost
nothing. Uses of nodes are searched one after the other (``usage``), the least possible cost first, until
none that is left can be cheaper than the best.
"""

from __future__ import annotations

import time

import numpy as np

from hapmoe.cluster import Cluster, Pool
from hapmoe.cost import evaluate
from hapmoe.errors import InputError
from hapmoe.options import FloatArray
from hapmoe.plan import Plan, SearchReport, SearchResult
from hapmoe.search.bounds import heavy_class
from hapmoe.search.problem import Problem
from hapmoe.search.space import count_points
from hapmoe.search.state import Progress
from hapmoe.search.usage import Seeker, speeds, uses

__all__ = ["OBJECTIVES", "rates_of", "search_objective"]

OBJECTIVES = {
    "step": "the shortest step",
    "cost": "the most tokens for the price: pools need price_per_device_hour",
    "energy": "the most tokens for the energy: devices need power",
}
"""What ``--objective`` takes."""


def rates_of(cluster: Cluster, objective: str) -> tuple[float, ...]:
    """Per pool what a device costs per second, or its watts; InputError where the cluster file does not say."""
    if objective not in OBJECTIVES:
        raise InputError(f"no objective {objective!r}", where="--objective", hint=f"one of {', '.join(OBJECTIVES)}")
    return tuple(_rate(pool, index, objective) for index, pool in enumerate(cluster.pools))


def _rate(pool: Pool, index: int, objective: str) -> float:
    if objective == "cost":
        if pool.price_per_device_hour is None:
            raise InputError(
                f"no price for pool {pool.name}, which --objective cost needs",
                where=f"pools[{index}].price_per_device_hour",
                hint="add price_per_device_hour: 2.5 (in any currency, the same for all pools)",
            )
        return pool.price_per_device_hour / 3600.0
    watts = pool.power_w if pool.power_w is not None else pool.device.power_w
    if watts is None:
        raise InputError(
            f"no power for pool {pool.name}, which --objective energy needs",
            where=f"pools[{index}].power",
            hint="add power: 700 W (of one device with its share of the node)",
        )
    return watts


def search_objective(
    problem: Problem,
    objective: str,
    seeker: Seeker,
    fastest: SearchResult,
    *,
    top: int,
    started: float,
    progress: Progress | None = None,
) -> SearchResult:
    """The plan with the least cost or energy per step, certified. ``fastest``: the search's for the step,
    whose plan is one to beat; returned as it is where nothing fits."""
    if fastest.plan is None or fastest.estimate is None:
        return fastest
    rates = np.asarray(rates_of(problem.cluster, objective))
    listed, complete = uses(problem, seeker.mixed)
    each = np.asarray([pool.devices_per_node for pool in problem.cluster.pools]) * rates
    values = [(use.floor_s * float(np.asarray(use.nodes) @ each), use) for use in listed]
    values.sort(key=lambda row: row[0])
    open_value, cut = np.inf if complete else _least(problem, each, seeker.mixed), False
    best = fastest.estimate.step_s * _rate_of(fastest.plan, problem.cluster, rates)
    found = [(best, fastest.plan, fastest.estimate)]
    searched = 0
    for floor, use in values:
        if floor >= best:
            break
        if cut:
            open_value = min(open_value, floor)
            break
        searched += 1
        rate = float(np.asarray(use.nodes) @ each)
        plan, open_s, cut = seeker.best(use.narrow(problem), best / rate if rate > 0 else np.inf)
        open_value = min(open_value, open_s * rate if np.isfinite(open_s) else np.inf)
        if plan is not None:
            estimate = evaluate(problem.job, problem.cluster, plan)
            value = estimate.step_s * _rate_of(plan, problem.cluster, rates)
            found.append((value, plan, estimate))
            best = min(best, value)
        if progress:
            progress(searched, len(values), min(found, key=lambda row: row[0])[2].step_s, use.floor_s)
    found.sort(key=lambda row: row[0])
    gap = max(0.0, (best - open_value) / best) if best > 0 else 0.0
    report = SearchReport(
        status="optimal" if gap <= 0.0 else "feasible",
        gap=gap,
        wall_s=time.perf_counter() - started,
        considered=count_points(problem.space, problem.job.model.num_layers),
        pruned={**dict(problem.space.dropped), "bound": len(values) - searched},
        objective=objective,
    )
    ranked = tuple((plan, estimate) for _, plan, estimate in found[:top])
    return SearchResult(
        status=report.status, plan=ranked[0][0], estimate=ranked[0][1], ranked=ranked, gap=gap, report=report
    )


def _rate_of(plan: Plan, cluster: Cluster, rates_P: FloatArray) -> float:
    pools = {pool.name: float(rate) for pool, rate in zip(cluster.pools, rates_P, strict=True)}
    return sum(stage.num_devices * pools[stage.pool] for stage in plan.stages)


def _least(problem: Problem, each_P: FloatArray, mixed: bool) -> float:
    """What no use costs less than: all work on the pool that does it cheapest."""
    layers = heavy_class(problem)[1]
    least = np.inf
    for microbatches, speed_P in speeds(problem, mixed):
        usable = speed_P > 0
        least = min(least, float((microbatches * layers * each_P[usable] / speed_P[usable]).min(initial=np.inf)))
    return least
