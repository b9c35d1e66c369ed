"""The exact search with something taken away: what non-uniform plans are worth (the paper's Table 3).

``uniform_layers``: every stage holds the same number of layers. ``one_recompute``: every stage
recomputes the same. ``uniform_degrees``: every stage has the same degrees, also where the back end takes
others per pool; the other two imply it. All are restrictions of the same space, scored by the same oracle.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice, product

import msgspec
import numpy as np

from hapmoe.cost import evaluate
from hapmoe.options import FloatArray, StageTable
from hapmoe.plan import Plan, Recompute, SearchReport, SearchResult
from hapmoe.resolve import chunk_layers
from hapmoe.search.bounds import option_bounds
from hapmoe.search.entries import price_rows
from hapmoe.search.exact import Progress, search_exact
from hapmoe.search.points import Points
from hapmoe.search.problem import Problem, Setting, make_plan, settings_of
from hapmoe.search.space import count_vectors, legal_vpp
from hapmoe.search.split import Solution, score

__all__ = ["Restrictions", "equal_layers", "fastest", "one_recompute", "search_restricted"]

MOST_COUNTS = 100_000
CHUNK = 64
MOST_CHOICES = 256
"""Combinations of incomparable recomputations (virtual stages only) that are tried per grid point."""


@dataclass(frozen=True, slots=True)
class Restrictions:
    """What a plan may not do."""

    uniform_layers: bool = False
    one_recompute: bool = False
    uniform_degrees: bool = False

    def __bool__(self) -> bool:
        return self.uniform_layers or self.one_recompute


def search_restricted(
    problem: Problem,
    restrictions: Restrictions,
    *,
    planner: str = "exact",
    backend: str = "megatron",
    top: int = 3,
    time_limit_s: float | None = None,
    progress: Progress | None = None,
    started: float | None = None,
) -> SearchResult:
    """The fastest plan that keeps the restrictions."""
    began = time.perf_counter() if started is None else started

    def exact(uniform: bool = False) -> SearchResult:
        return search_exact(
            problem,
            planner=planner,
            backend=backend,
            top=top,
            time_limit_s=time_limit_s,
            uniform=uniform,
            progress=progress,
            started=began,
        )

    if restrictions.uniform_layers and restrictions.one_recompute:
        return exact(uniform=True)
    if restrictions.uniform_layers:
        return equal_layers(problem, planner=planner, backend=backend, time_limit_s=time_limit_s, started=began)
    if restrictions.one_recompute:
        # block recomputation of fewer than all layers, the same on all stages: with equal layers only
        found = one_recompute(problem, planner=planner, backend=backend, time_limit_s=time_limit_s, started=began)
        return _unproven(fastest(exact(uniform=True), found))
    return exact()


def _unproven(result: SearchResult) -> SearchResult:
    """Not every plan that keeps the restriction was looked at: no certificate."""
    if result.estimate is None or result.report is None:
        return result
    estimate = msgspec.structs.replace(result.estimate, lower_bound_s=0.0)
    report = msgspec.structs.replace(result.report, status="feasible", gap=0.0)
    ranked = tuple((plan, msgspec.structs.replace(other, lower_bound_s=0.0)) for plan, other in result.ranked)
    return msgspec.structs.replace(result, status="feasible", gap=0.0, estimate=estimate, report=report, ranked=ranked)


def fastest(*results: SearchResult) -> SearchResult:
    """The result with the fastest plan; the first where none has a plan."""
    return min(results, key=lambda result: result.estimate.step_s if result.estimate else np.inf)


def one_recompute(
    problem: Problem,
    *,
    planner: str = "exact",
    backend: str = "megatron",
    entries: tuple[str, ...] = ("none", "selective", "full"),
    time_limit_s: float | None = None,
    started: float | None = None,
) -> SearchResult:
    """The fastest plan whose stages all recompute the same: nothing, one selective set, or all layers in full.

    ``entries``: granularities to try. Layers are free.
    """
    began = time.perf_counter() if started is None else started
    menu = problem.tables[0].menu if problem.tables else ()
    results = []
    for number, entry in enumerate(menu):
        if entry.granularity not in entries or not problem.allowed[number]:
            continue
        full = entry.granularity == "full"
        tables = tuple(_all_layers(table) for table in problem.tables) if full else problem.tables
        only = tuple(other == (0 if full else number) for other in range(len(menu)))
        chosen = replace(problem, tables=tables, allowed=only)
        result = search_exact(chosen, planner=planner, backend=backend, top=1, time_limit_s=time_limit_s, started=began)
        results.append(_in_full(problem, result) if full and result.plan else result)
    if not results:
        return search_exact(problem, planner=planner, backend=backend, top=1, time_limit_s=time_limit_s)
    best = fastest(*results)
    if best.report is not None:
        report = msgspec.structs.replace(best.report, wall_s=time.perf_counter() - began)
        best = msgspec.structs.replace(best, report=report)
    return best


def _all_layers(table: StageTable) -> StageTable:
    """The table with "none" standing for full recomputation of every layer."""
    changed: dict[str, FloatArray] = {}
    for name in ("recompute_RCK", "activation_RCK", "transient_RCK"):
        values: FloatArray = getattr(table, name).copy()
        values[0] = values[-1]
        changed[name] = values
    return replace(table, **changed)  # type: ignore[arg-type]


def _in_full(problem: Problem, result: SearchResult) -> SearchResult:
    """The result with what "none" stood for written out."""
    assert result.plan is not None
    stages = tuple(
        msgspec.structs.replace(
            stage,
            recompute=Recompute(
                granularity="full", method="block", num_layers=max(count for _, count in stage.virtual_layers)
            ),
        )
        for stage in result.plan.stages
    )
    plan = msgspec.structs.replace(result.plan, stages=stages)
    estimate = evaluate(problem.job, problem.cluster, plan)
    return msgspec.structs.replace(result, plan=plan, estimate=estimate, ranked=((plan, estimate),))


# ---------------------------------------------------------------- equal layers, recomputation per stage


def equal_layers(
    problem: Problem,
    *,
    planner: str = "exact",
    backend: str = "megatron",
    time_limit_s: float | None = None,
    started: float | None = None,
) -> SearchResult:
    """The fastest plan with as many layers on every stage, each with the cheapest recomputation that fits.

    Every grid point has one split: they are priced in the order of a bound, the work of the slowest
    stage without recomputation times the microbatches, until no bound is below the best.
    """
    began = time.perf_counter() if started is None else started
    points, bound_G, complete = _points(problem)
    order = np.argsort(bound_G, kind="stable")
    best: tuple[float, Setting, Solution] | None = None
    below, cut, first = np.inf, False, 0
    while first < len(order) and bound_G[order[first]] < below and not cut:
        batch = order[first : first + CHUNK]
        first += CHUNK
        for vpp in sorted(set(points.vpp_G[batch].tolist())):
            group = batch[points.vpp_G[batch] == vpp]
            for setting, solution in _solve(problem, settings_of(problem, points.take(group)), below):
                if solution.step_s < below:
                    below, best = solution.step_s, (solution.step_s, setting, solution)
        cut = time_limit_s is not None and time.perf_counter() - began > time_limit_s
    wall = time.perf_counter() - began
    if best is None:
        reasons = ("no plan with equal layers fits",)
        report = SearchReport(status="infeasible", wall_s=wall, considered=len(order), reasons=reasons)
        return SearchResult(status="infeasible", plan=None, estimate=None, report=report)
    _, setting, solution = best
    plan: Plan = make_plan(problem, setting, solution.layers, solution.choices, planner, backend)
    estimate = evaluate(problem.job, problem.cluster, plan)
    report = SearchReport(
        status="feasible" if cut or not complete else "optimal",
        gap=max(0.0, 1.0 - float(bound_G[order[first]]) / estimate.step_s) if cut and first < len(order) else 0.0,
        wall_s=wall,
        considered=len(order),
    )
    ranked = ((plan, estimate),)
    return SearchResult(
        status=report.status, plan=plan, estimate=estimate, ranked=ranked, gap=report.gap, report=report
    )


def _points(problem: Problem) -> tuple[Points, FloatArray, bool]:
    """Every grid point whose stages can hold equal layers, and its bound; False: there were too many to list."""
    space, layers, options = problem.space, problem.job.model.num_layers, problem.space.options
    lightest_PK = [(table.forward_CK + table.backward_CK).min(axis=0) for table in problem.tables]
    rows: list[tuple[int, int, int, tuple[int, ...]]] = []
    bounds: list[float] = []
    vectors: dict[int, list[tuple[int, ...]]] = {}
    complete = True
    microbatches_K, sizes = problem.microbatches_K.tolist(), options.devices_K.tolist()
    with np.errstate(divide="ignore", invalid="ignore"):
        possible = np.flatnonzero(option_bounds(problem)[1]).tolist() if len(options) else []
    for k in possible:
        many = microbatches_K[k]
        if sizes[k] not in vectors:
            none = np.zeros(len(problem.tables), np.int64)
            found = count_vectors(space.most_KP[k], space.step_KP[k], none, layers, MOST_COUNTS)
            complete = complete and found is not None
            vectors[sizes[k]] = [] if found is None else [tuple(v) for v in found.tolist() if layers % sum(v) == 0]
        for counts in vectors[sizes[k]]:
            pp = sum(counts)
            if not problem.pins.allow("pp", pp) or not _nodes_allowed(problem, counts, sizes[k]):
                continue
            used = tuple(p for p, n in enumerate(counts) if n)
            bound = many * layers // pp * max(float(lightest_PK[p][k]) for p in used)
            for vpp in _equal_vpp(problem, pp, many):
                for number in space.orders_of(used):
                    rows.append((k, number, vpp, counts))
                    bounds.append(bound)
    option, order, vpp_G = (np.asarray([row[i] for row in rows], np.int64) for i in range(3))
    stages = np.asarray([row[3] for row in rows], np.int64).reshape(len(rows), len(problem.cluster.pools))
    return Points(option, stages, order, vpp_G), np.asarray(bounds), complete


def _nodes_allowed(problem: Problem, counts: tuple[int, ...], size: int) -> bool:
    pools = zip(problem.cluster.pools, counts, strict=True)
    return all(problem.pins.allow_nodes(pool.name, -(-n * size // pool.devices_per_node)) for pool, n in pools)


def _equal_vpp(problem: Problem, pp: int, microbatches: int) -> Iterator[int]:
    for vpp in legal_vpp(problem.job, pp, microbatches):
        if problem.job.model.num_layers % (pp * vpp) == 0 and problem.pins.allow("vpp", vpp):
            yield vpp


def _solve(problem: Problem, settings: list[Setting], below: float) -> Iterator[tuple[Setting, Solution]]:
    """The step of every setting that fits (with virtual stages the better of incomparable recomputations)."""
    layers, vpp = problem.job.model.num_layers, settings[0].vpp
    chunks = [np.asarray(chunk_layers((layers // s.pp,) * s.pp, vpp), np.int64) for s in settings]
    point = np.repeat(np.arange(len(settings)), [s.pp for s in settings])
    stage = np.concatenate([np.arange(s.pp) for s in settings])
    rows = np.concatenate(chunks)
    # per stage the entries that fit; with virtual stages there may be a few
    entries: dict[tuple[int, int], list[tuple[FloatArray, FloatArray, float, float, tuple[int, int]]]] = {}
    costs = price_rows(problem, settings, point, stage, rows[:, :, 0], rows[:, :, 1])
    for e in np.flatnonzero(costs.fits_X).tolist():
        choice = (int(costs.choice_X[e]), int(costs.block_X[e]))
        times = costs.forward_XV[e], costs.backward_XV[e], float(costs.sync_X[e]), float(costs.optimizer_X[e])
        row = int(costs.row_X[e])
        entries.setdefault((int(point[row]), int(stage[row])), []).append((*times, choice))
    for g, setting in enumerate(settings):
        per_stage = [entries.get((g, j), []) for j in range(setting.pp)]
        if not all(per_stage):
            continue
        per_stage = [sorted(found, key=lambda e: float(e[0].sum() + e[1].sum())) for found in per_stage]
        for pick in islice(product(*per_stage), MOST_CHOICES):
            forward, backward = (np.asarray([[e[i] for e in pick]]) for i in (0, 1))
            sync, after = np.asarray([[e[2] for e in pick]]), max(e[3] for e in pick)
            if setting.microbatches * float((forward + backward)[0].sum(axis=1).max()) + after >= below:
                continue
            step = float(score(setting, forward, backward, sync)[0]) + after
            yield setting, Solution(step, (layers // setting.pp,) * setting.pp, tuple(e[4] for e in pick))
