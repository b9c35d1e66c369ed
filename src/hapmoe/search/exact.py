"""The exact search: cheapest bound first, every point whose bound beats the best plan is solved.

It ends with a certificate: no plan of the space is faster under the model (gap 0), or, cut by a time
limit, the fraction by which one could still be.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import numpy as np

from hapmoe.cost import evaluate
from hapmoe.options import FloatArray, IntArray
from hapmoe.plan import Estimate, Plan, SearchReport, SearchResult
from hapmoe.search.bounds import point_bounds, quick_bounds
from hapmoe.search.entries import Setting, price_entries, prune, setting_of
from hapmoe.search.misses import nearest_misses
from hapmoe.search.problem import Point, Problem, make_plan
from hapmoe.search.space import legal_vpp
from hapmoe.search.split import Solution, best_equal, best_split

__all__ = ["Progress", "search_exact"]

Progress = Callable[[int, int, float, float], None]
"""progress(grid points settled, grid points, best step, lower bound)."""

FIRST_CHUNK, MOST_CHUNK = 128, 2048
"""Placement-option pairs that are expanded at once, in order of their quick bound: few until there is
an incumbent to cut with, then more and more."""


@dataclass(slots=True)
class _State:
    """What the search knows so far."""

    found: list[tuple[float, Point, Solution]] = field(default_factory=list)
    best: float = np.inf
    open_bound: float = np.inf
    """Lowest bound of the points that could not be searched to the end."""
    solved: int = 0


def search_exact(
    problem: Problem,
    *,
    planner: str = "exact",
    backend: str = "megatron",
    top: int = 3,
    time_limit_s: float | None = None,
    uniform: bool = False,
    progress: Progress | None = None,
    started: float | None = None,
) -> SearchResult:
    """The fastest plan of the problem's space, certified.

    ``uniform``: all stages hold the same number of layers and recompute the same. Interruption (KeyboardInterrupt)
    counts as a time limit once a plan is in hand.
    """
    began = time.perf_counter() if started is None else started
    grid = problem.grid
    pruned: Counter[str] = Counter(problem.space.dropped)
    if not len(grid.option_G):
        return _infeasible(problem, pruned, began)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        quick_G, possible_G = quick_bounds(problem)
        pruned["memory"] += int((~possible_G).sum())
        order = np.flatnonzero(possible_G)
        order = order[np.argsort(quick_G[order], kind="stable")]
        state = _State()
        cut = False
        settled, size = 0, FIRST_CHUNK
        try:
            while settled < len(order):
                chunk = order[settled : settled + size]
                size = min(2 * size, MOST_CHUNK)
                if quick_G[chunk[0]] >= state.best:
                    break
                chunk = chunk[quick_G[chunk] < state.best]
                _search_chunk(problem, state, chunk, quick_G, pruned, uniform, began, time_limit_s)
                settled += len(chunk)
                if progress:
                    progress(settled, len(order), state.best, float(quick_G[chunk[-1]]))
                if time_limit_s is not None and time.perf_counter() - began > time_limit_s:
                    cut = settled < len(order)
                    break
        except (_OutOfTimeError, KeyboardInterrupt) as stop:
            if isinstance(stop, KeyboardInterrupt) and not state.found:
                raise
            cut = True
    if not state.found:
        return _infeasible(problem, pruned, began, cut=cut)
    pruned["bound"] += len(order) - settled
    bound = min(state.best, state.open_bound)
    if cut and settled < len(order):
        bound = min(bound, float(quick_G[order[settled]]))
    if not problem.space.complete:
        bound = min(bound, float(quick_G[order[0]]))
    if top > 1 and not uniform and not cut:
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            _runners_up(problem, state, order, quick_G, top)
    return _result(problem, state, pruned, bound, began, planner, backend, top)


class _OutOfTimeError(Exception):
    """The time limit passed inside a chunk."""


def _expand(problem: Problem, chunk: IntArray) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Placement, option, vpp and row of every grid point of a chunk."""
    grid, placements = problem.grid, problem.space.placements
    rows, vpps = [], []
    cache: dict[tuple[int, int], list[int]] = {}
    for row in chunk.tolist():
        key = (placements[grid.placement_G[row]].pp, int(grid.microbatches_G[row]))
        if key not in cache:
            cache[key] = [v for v in legal_vpp(problem.job, *key) if problem.pins.allow("vpp", v)]
        rows += [row] * len(cache[key])
        vpps += cache[key]
    row_G = np.asarray(rows, np.int64)
    return grid.placement_G[row_G], grid.option_G[row_G], np.asarray(vpps, np.int64), row_G


def _search_chunk(
    problem: Problem,
    state: _State,
    chunk: IntArray,
    quick_G: FloatArray,
    pruned: Counter[str],
    uniform: bool,
    began: float,
    time_limit_s: float | None,
) -> None:
    placement, option, vpp, row = _expand(problem, chunk)
    if not len(row):
        return
    bound, high_GJ = point_bounds(problem, placement, option, vpp, quick_G[row], state.best)
    pruned["memory"] += int(np.isinf(bound).sum())
    pruned["bound"] += int((np.isfinite(bound) & (bound >= state.best)).sum())
    order = np.argsort(bound, kind="stable")
    order = order[bound[order] < state.best]
    settings = {int(g): setting_of(problem, Point(int(placement[g]), int(option[g]), int(vpp[g]))) for g in order}
    first = 0
    while first < len(order):
        # Without a good incumbent everything looks open: start with a few points, then take many at once.
        size = 4 if not np.isfinite(state.best) else BATCH
        batch = order[first : first + size]
        first += size
        batch = batch[bound[batch] < state.best]
        for vpps in sorted(set(vpp[batch].tolist())):
            group = batch[vpp[batch] == vpps]
            mine = [settings[g] for g in group.tolist()]
            if uniform:
                if found := best_equal(problem, mine, state.best):
                    _keep(state, *found)
                _check_time(began, time_limit_s)
            else:
                _solve_group(problem, state, mine, bound[group], high_GJ[group], began, time_limit_s)


BATCH = 192
"""Grid points whose stages are priced together."""


def _solve_group(
    problem: Problem,
    state: _State,
    settings: list[Setting],
    bound_G: FloatArray,
    high_GJ: IntArray,
    began: float,
    time_limit_s: float | None,
) -> None:
    """Solve grid points of one vpp, those with the lowest bound first."""
    if not settings:
        return
    width = max(setting.pp for setting in settings)
    pp_G = np.asarray([setting.pp for setting in settings])
    real_GJ = np.arange(width) < pp_G[:, None]
    layers, vpp = problem.job.model.num_layers, settings[0].point.vpp
    most_G = layers - (pp_G - 1) * vpp
    high_GJ = np.where(real_GJ, np.minimum(high_GJ[:, :width], most_G[:, None]), 0)
    low_GJ = np.where(real_GJ, np.maximum(vpp, layers - (high_GJ.sum(axis=1, keepdims=True) - high_GJ)), 1)
    entries = price_entries(problem, settings, low_GJ, high_GJ)
    entries, better_G = prune(problem, settings, entries, state.best)
    bound_G = np.maximum(bound_G, better_G)
    begin = np.searchsorted(entries.point_E, np.arange(len(settings)))
    end = np.searchsorted(entries.point_E, np.arange(len(settings)), side="right")
    for g in np.argsort(bound_G, kind="stable").tolist():
        if bound_G[g] >= state.best or begin[g] == end[g]:
            continue
        mine = entries.take(slice(int(begin[g]), int(end[g])))
        solution, complete = best_split(problem, settings[g], mine, state.best, float(bound_G[g]))
        if not complete:
            state.open_bound = min(state.open_bound, float(bound_G[g]))
        _keep(state, settings[g], solution)
        _check_time(began, time_limit_s)


def _keep(state: _State, setting: Setting, solution: Solution | None) -> None:
    state.solved += 1
    if solution is not None and solution.step_s < state.best:
        state.best = solution.step_s
        state.found.append((solution.step_s, setting.point, solution))


def _check_time(began: float, time_limit_s: float | None) -> None:
    if time_limit_s is not None and time.perf_counter() - began > time_limit_s:
        raise _OutOfTimeError


RUNNERS_UP = 24
"""Grid points looked at for the next-best plans, and by how much slower they may be."""
SLOWER = 1.3


def _runners_up(problem: Problem, state: _State, order: IntArray, quick_G: FloatArray, most: int) -> None:
    """Add plans that use other degrees or places than those found, for the user to choose from.

    They are the best of the points with the lowest bounds, not certified to be the second best.
    """
    rows = order[quick_G[order] < SLOWER * state.best][: 8 * RUNNERS_UP]
    placement, option, vpp, row = _expand(problem, rows)
    seen = {_kind(problem, point) for _, point, _ in state.found}
    if not len(row) or len(seen) >= most:
        return
    ceiling = SLOWER * state.best
    bound, high_GJ = point_bounds(problem, placement, option, vpp, quick_G[row], ceiling)
    tried = 0
    for g in np.argsort(bound, kind="stable").tolist():
        point = Point(int(placement[g]), int(option[g]), int(vpp[g]))
        if bound[g] >= ceiling or tried >= RUNNERS_UP:
            break
        if _kind(problem, point) in seen:
            continue
        tried += 1
        other = _State(best=ceiling)
        setting = setting_of(problem, point)
        _solve_group(problem, other, [setting], bound[[g]], high_GJ[[g]], 0.0, None)
        state.found += other.found


def _kind(problem: Problem, point: Point) -> tuple[object, ...]:
    """What makes a plan another one in a user's eyes: places and degrees."""
    options, k = problem.space.options, point.option
    degrees = (options.tp_K[k], options.cp_K[k], options.ep_K[k], options.etp_K[k], options.dp_K[k])
    place = problem.space.placements[point.placement]
    return place.pools, place.stages, *(int(value) for value in degrees)


def _result(
    problem: Problem,
    state: _State,
    pruned: Counter[str],
    bound: float,
    began: float,
    planner: str,
    backend: str,
    top: int,
) -> SearchResult:
    ranked: list[tuple[Plan, Estimate]] = []
    kinds: set[tuple[object, ...]] = set()
    for _, point, solution in sorted(state.found, key=lambda entry: entry[0]):
        if len(ranked) < top and _kind(problem, point) not in kinds:
            kinds.add(_kind(problem, point))
            plan = make_plan(problem, point, solution.layers, solution.choices, planner, backend)
            ranked.append((plan, evaluate(problem.job, problem.cluster, plan)))
    plan, estimate = ranked[0]
    bound = min(bound, estimate.step_s)
    gap = (estimate.step_s - bound) / estimate.step_s
    report = SearchReport(
        status="optimal" if gap <= 0.0 and problem.space.complete else "feasible",
        gap=gap,
        wall_s=time.perf_counter() - began,
        considered=len(problem.grid.option_G),
        pruned={name: count for name, count in sorted(pruned.items()) if count},
    )
    ranked = [(plan, msgspec.structs.replace(estimate, lower_bound_s=bound)) for plan, estimate in ranked]
    return SearchResult(
        status=report.status, plan=ranked[0][0], estimate=ranked[0][1], ranked=tuple(ranked), gap=gap, report=report
    )


def _infeasible(problem: Problem, pruned: Counter[str], began: float, cut: bool = False) -> SearchResult:
    reasons = ("the time limit passed before a plan was found",) if cut else nearest_misses(problem)
    report = SearchReport(
        status="infeasible",
        wall_s=time.perf_counter() - began,
        considered=len(problem.grid.option_G),
        pruned={name: count for name, count in sorted(pruned.items()) if count},
        reasons=reasons,
    )
    return SearchResult(status="infeasible", plan=None, estimate=None, report=report)
