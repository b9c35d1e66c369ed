"""The exact search where a back end takes degrees of its own for each pool: the same degrees on all
stages first, then every combination that could beat that plan."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

import msgspec
import numpy as np

from hapmoe.backends import Capabilities, capabilities
from hapmoe.cluster import Cluster
from hapmoe.cost import evaluate
from hapmoe.job import JobSpec
from hapmoe.plan import Estimate, Plan, SearchReport, SearchResult, Stage
from hapmoe.resolve import resolve
from hapmoe.rules import flagscale, hetero
from hapmoe.rules.base import Context
from hapmoe.search.degrees import search_degrees
from hapmoe.search.exact import search_exact
from hapmoe.search.problem import Problem, Setting, make_plan
from hapmoe.search.state import UNPROVEN, Progress, State

__all__ = ["degrees_may_differ", "own_rules", "search_per_pool"]

BATCH = 768
"""Grid points whose stages are priced together: combinations are many and alike."""

Legal = Callable[[Problem, Setting], bool]


def degrees_may_differ(job: JobSpec, cluster: Cluster, backend: str) -> bool:
    """Could a plan of this job on this back end have unequal degrees?"""
    capability = capabilities(backend)
    if not capability.per_stage_degrees or len(cluster.pools) < 2:
        return False
    return not capability.runtime or hetero.degrees_may_differ(job, cluster, capability)


def own_rules(backend: str) -> Legal | None:
    """What a back end asks of a shape beyond the rules of the space, once per shape; None: nothing."""
    capability = capabilities(backend)
    if not capability.module.endswith(".flagscale"):
        return None
    known: dict[tuple[object, ...], bool] = {}

    def legal(problem: Problem, setting: Setting) -> bool:
        plan = make_plan(problem, setting, (1,) * setting.pp, ((0, 0),) * setting.pp, "exact", backend)
        key = tuple(_degrees(stage) for stage in plan.stages)
        if key not in known:
            known[key] = _keeps(problem.job, problem.cluster, plan, capability)
        return known[key]

    return legal


def _keeps(job: JobSpec, cluster: Cluster, plan: Plan, capability: Capabilities) -> bool:
    context = Context(job, cluster, resolve(job, cluster, plan), capability)
    return not any(True for rule in flagscale.RULES for _ in rule.check(context))


def search_per_pool(
    problem: Problem,
    *,
    planner: str,
    backend: str,
    top: int,
    time_limit_s: float | None,
    progress: Progress | None,
    started: float,
) -> SearchResult:
    """The fastest plan, certified over equal and unequal degrees."""
    legal = own_rules(backend)
    alike = search_exact(
        problem,
        planner=planner,
        backend=backend,
        top=top,
        time_limit_s=time_limit_s,
        legal=legal,
        progress=progress,
        started=started,
    )
    if not len(problem.space.options):
        return alike
    state = State(legal=legal, batch=BATCH, deadline=np.inf if time_limit_s is None else started + time_limit_s)
    state.best = alike.estimate.step_s if alike.estimate else np.inf
    mixed = search_degrees(problem, state, planner=planner, backend=backend, progress=progress)
    assert alike.report is not None
    pruned = Counter(alike.report.pruned) + mixed.pruned
    report = msgspec.structs.replace(
        alike.report,
        wall_s=time.perf_counter() - started,
        considered=alike.report.considered + mixed.considered,
        pruned=dict(sorted(pruned.items())),
    )
    found = [(plan, evaluate(problem.job, problem.cluster, plan)) for _, plan in mixed.plans[: -top - 1 : -1]]
    ranked = _distinct((*found, *alike.ranked))[:top]
    if not ranked:
        return msgspec.structs.replace(alike, report=report)
    return _certified(ranked, report, _bound(alike, mixed.open_bound))


def _bound(alike: SearchResult, open_bound: float) -> float:
    """The lowest step that what was not searched to the end could have."""
    if alike.estimate is None:
        reasons = alike.report.reasons if alike.report else ()
        return 0.0 if any(reason in UNPROVEN for reason in reasons) else open_bound
    return min(alike.estimate.lower_bound_s, open_bound)


def _certified(ranked: list[tuple[Plan, Estimate]], report: SearchReport, bound_s: float) -> SearchResult:
    step = ranked[0][1].step_s
    bound = min(step, bound_s)
    gap = (step - bound) / step
    report = msgspec.structs.replace(report, status="optimal" if gap <= 0.0 else "feasible", gap=gap, reasons=())
    rows = tuple((plan, msgspec.structs.replace(estimate, lower_bound_s=bound)) for plan, estimate in ranked)
    return SearchResult(status=report.status, plan=rows[0][0], estimate=rows[0][1], ranked=rows, gap=gap, report=report)


def _distinct(rows: tuple[tuple[Plan, Estimate], ...]) -> list[tuple[Plan, Estimate]]:
    """Best first, plans that differ in places or degrees."""
    kinds: set[tuple[object, ...]] = set()
    kept = []
    for plan, estimate in sorted(rows, key=lambda row: row[1].step_s):
        kind = tuple(_degrees(stage) for stage in plan.stages)
        if kind not in kinds:
            kinds.add(kind)
            kept.append((plan, estimate))
    return kept


def _degrees(stage: Stage) -> tuple[object, ...]:
    return (stage.pool, stage.tp, stage.cp, stage.ep, stage.etp, stage.dp, stage.micro_batch_size)
