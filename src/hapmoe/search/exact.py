"""The exact search: cheapest bound first, every point whose bound beats the best plan is solved.

Options (degrees and microbatch size) are bounded over all their placements, then over stage counts,
then over orders and virtual stages, then over what the stages can hold; only what all bounds leave
open has its layer splits searched. It ends with a certificate: no plan of the space is faster under
the model (gap 0), or, cut by a time limit, the fraction by which one could still be.
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
from hapmoe.search.bounds import option_bounds
from hapmoe.search.entries import price_entries, prune
from hapmoe.search.expand import expand_counts, expand_orders, fullest_counts
from hapmoe.search.misses import nearest_misses
from hapmoe.search.points import Points
from hapmoe.search.problem import Problem, Setting, make_plan, settings_of
from hapmoe.search.reach import point_bounds
from hapmoe.search.space import count_points
from hapmoe.search.split import Solution, best_equal, best_split

__all__ = ["Progress", "State", "first_plan", "search_exact", "solve_points"]

Progress = Callable[[int, int, float, float], None]
"""progress(options settled, options, best step, lower bound)."""

SEEDS = 24
"""Options that are tried with their fullest stage counts first, for a good plan to cut with (fewer
where pools stand in many orders)."""
TRIALS = (1.2, 1.5, 2.0, 4.0, 16.0, np.inf)
"""How much slower than its lowest bound the first plan may be, one after the other: a ceiling cuts."""
FIRST_CHUNK, MOST_CHUNK = 64, 1024
"""Options whose stage counts are expanded at once: few at first, then more and more."""
ROWS = 1024
"""Stage counts whose orders and virtual stages are expanded at once."""
BATCH = 192
"""Grid points whose stages are priced together."""


@dataclass(slots=True)
class State:
    """What the search knows so far."""

    uniform: bool = False
    deadline: float = np.inf
    found: list[tuple[float, Setting, Solution]] = field(default_factory=list)
    best: float = np.inf
    open_bound: float = np.inf
    """Lowest bound of what could not be searched to the end."""
    pruned: Counter[str] = field(default_factory=Counter)


class _OutOfTimeError(Exception):
    """The time limit passed."""


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

    ``uniform``: all stages hold the same number of layers and recompute the same. Interruption
    (KeyboardInterrupt) counts as a time limit once a plan is in hand.
    """
    began = time.perf_counter() if started is None else started
    state = State(uniform=uniform, deadline=np.inf if time_limit_s is None else began + time_limit_s)
    state.pruned.update(problem.space.dropped)
    if not len(problem.space.options):
        return _infeasible(problem, state, began)
    cut = False
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        bound_K, possible_K = option_bounds(problem)
        state.pruned["memory"] += int((~possible_K).sum())
        order = np.flatnonzero(possible_K)
        order = order[np.argsort(bound_K[order], kind="stable")]
        try:
            if not uniform:
                _seed(problem, state, order, bound_K)
            _search_options(problem, state, order, bound_K, progress)
            if top > 1 and not uniform and state.found:
                _runners_up(problem, state, order[: _seeds(problem)], top)
        except (_OutOfTimeError, KeyboardInterrupt) as stop:
            if isinstance(stop, KeyboardInterrupt) and not state.found:
                raise
            cut = True
    if not state.found:
        return _infeasible(problem, state, began, cut=cut)
    return _result(problem, state, began, planner, backend, top)


def first_plan(problem: Problem, state: State) -> None:
    """Some good plan of the problem, without proof; nothing in ``state`` if none was met."""
    bound_K, possible_K = option_bounds(problem)
    order = np.flatnonzero(possible_K)
    _seed(problem, state, order[np.argsort(bound_K[order], kind="stable")], bound_K)


def _seed(problem: Problem, state: State, order: IntArray, bound_K: FloatArray) -> None:
    """A first plan: options with the lowest bounds, on as many devices as they can use."""
    size = _seeds(problem)
    for begin in range(0, len(order), size):
        option, stages = fullest_counts(problem, order[begin : begin + size])
        if not len(option):
            continue
        points, floor = expand_orders(problem, option, stages, bound_K[option], np.inf)
        if not len(points):
            continue
        bound, _ = point_bounds(problem, points, floor, np.inf)
        if np.isinf(bound).all():
            continue
        for trial in TRIALS:
            state.best = trial * float(bound.min())
            solve_points(problem, state, points, bound)
            if state.found:
                return
        state.best = np.inf


def _seeds(problem: Problem) -> int:
    return max(2, SEEDS * 4 // max(len(problem.space.orders), 4))


def _search_options(
    problem: Problem, state: State, order: IntArray, bound_K: FloatArray, progress: Progress | None
) -> None:
    settled, size = 0, FIRST_CHUNK
    postponed: list[int] = []
    try:
        while settled < len(order) and bound_K[order[settled]] < state.best:
            chunk = order[settled : settled + size]
            size = min(2 * size, MOST_CHUNK)
            option, stages, bound, unlisted = expand_counts(problem, chunk[bound_K[chunk] < state.best], state.best)
            postponed += unlisted
            _search_counts(problem, state, option, stages, bound)
            settled += len(chunk)
            if progress:
                progress(settled, len(order), state.best, float(bound_K[chunk[-1]]))
        # Options with too many stage counts to list: a better plan cuts more of them.
        later = np.asarray([k for k in postponed if bound_K[k] < state.best], np.int64)
        if len(later):
            option, stages, bound, postponed = expand_counts(problem, later, state.best)
            _search_counts(problem, state, option, stages, bound)
    finally:
        for k in postponed:
            state.open_bound = min(state.open_bound, float(bound_K[k]))
        if settled < len(order):
            state.open_bound = min(state.open_bound, float(bound_K[order[settled]]))
            state.pruned["bound"] += len(order) - settled


def _search_counts(
    problem: Problem, state: State, option_G: IntArray, stages_GP: IntArray, bound_G: FloatArray
) -> None:
    """Options with stage counts, lowest bound first."""
    for begin in range(0, len(option_G), ROWS):
        rows = slice(begin, begin + ROWS)
        if bound_G[begin] >= state.best:
            state.pruned["bound"] += len(bound_G) - begin
            return
        points, floor = expand_orders(problem, option_G[rows], stages_GP[rows], bound_G[rows], state.best)
        solve_points(problem, state, points, floor)


def solve_points(problem: Problem, state: State, points: Points, floor_G: FloatArray) -> None:
    """Bound and, where that leaves them open, solve grid points; the best goes into ``state``."""
    keep = np.flatnonzero(floor_G < state.best)
    if state.uniform:
        keep = keep[problem.job.model.num_layers % (points.pp_G * points.vpp_G)[keep] == 0]
    if not len(keep):
        return
    points, floor_G = points.take(keep), floor_G[keep]
    bound, high = point_bounds(problem, points, floor_G, state.best)
    state.pruned["memory"] += int(np.isinf(bound).sum())
    state.pruned["bound"] += int((np.isfinite(bound) & (bound >= state.best)).sum())
    order = np.argsort(bound, kind="stable")
    order = order[bound[order] < state.best]
    first = 0
    while first < len(order):
        # Without a good incumbent everything looks open: start with a few points, then take many at once.
        size = 4 if not np.isfinite(state.best) and not state.uniform else BATCH
        batch = order[first : first + size]
        first += size
        batch = batch[bound[batch] < state.best]
        for vpp in sorted(set(points.vpp_G[batch].tolist())):
            group = batch[points.vpp_G[batch] == vpp]
            settings = settings_of(problem, points.take(group))
            if state.uniform:
                if found := best_equal(problem, settings, state.best):
                    _keep(state, *found)
            else:
                _solve_group(problem, state, settings, bound[group], [high[g] for g in group.tolist()])
            _check_time(state)


def _solve_group(
    problem: Problem, state: State, settings: list[Setting], bound_G: FloatArray, high: list[IntArray]
) -> None:
    """Solve grid points of one vpp, those with the lowest bound first."""
    width = max(setting.pp for setting in settings)
    pp_G = np.asarray([setting.pp for setting in settings])
    real_GJ = np.arange(width) < pp_G[:, None]
    layers, vpp = problem.job.model.num_layers, settings[0].vpp
    high_GJ = np.zeros((len(settings), width), np.int64)
    for g, row in enumerate(high):
        high_GJ[g, : len(row)] = row
    most_G = layers - (pp_G - 1) * vpp
    high_GJ = np.where(real_GJ, np.minimum(high_GJ, most_G[:, None]), 0)
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
        solution, left_open = best_split(problem, settings[g], mine, state.best, float(bound_G[g]))
        state.open_bound = min(state.open_bound, left_open)
        if solution is not None:
            _keep(state, settings[g], solution)
        _check_time(state)


def _keep(state: State, setting: Setting, solution: Solution) -> None:
    if solution.step_s < state.best:
        state.best = solution.step_s
        state.found.append((solution.step_s, setting, solution))


def _check_time(state: State) -> None:
    if time.perf_counter() > state.deadline:
        raise _OutOfTimeError


RUNNERS_UP = 24
"""Grid points looked at for the next-best plans, and by how much slower they may be."""
SLOWER = 1.3


def _runners_up(problem: Problem, state: State, option_K: IntArray, most: int) -> None:
    """Add plans that use other degrees or places than those found, for the user to choose from.

    They are the best of the points with the lowest bounds, not certified to be the second best.
    """
    seen = {_kind(problem, setting) for _, setting, _ in state.found}
    ceiling = SLOWER * state.best
    option, stages = fullest_counts(problem, option_K)
    points, floor = expand_orders(problem, option, stages, np.zeros(len(option)), ceiling)
    if len(seen) >= most or not len(points):
        return
    bound, high = point_bounds(problem, points, floor, ceiling)
    tried = 0
    for g in np.argsort(bound, kind="stable").tolist():
        if bound[g] >= ceiling or tried >= RUNNERS_UP:
            break
        setting = settings_of(problem, points.take(np.asarray([g])))[0]
        if _kind(problem, setting) in seen:
            continue
        tried += 1
        other = State(best=ceiling, deadline=state.deadline)
        _solve_group(problem, other, [setting], bound[[g]], [high[g]])
        state.found += other.found


def _kind(problem: Problem, setting: Setting) -> tuple[object, ...]:
    """What makes a plan another one in a user's eyes: places and degrees."""
    options, k = problem.space.options, setting.option
    degrees = (options.tp_K[k], options.cp_K[k], options.ep_K[k], options.etp_K[k], options.dp_K[k])
    return setting.pool_J, *(int(value) for value in degrees)


def _result(problem: Problem, state: State, began: float, planner: str, backend: str, top: int) -> SearchResult:
    ranked: list[tuple[Plan, Estimate]] = []
    kinds: set[tuple[object, ...]] = set()
    for _, setting, solution in sorted(state.found, key=lambda entry: entry[0]):
        if len(ranked) < top and _kind(problem, setting) not in kinds:
            kinds.add(_kind(problem, setting))
            plan = make_plan(problem, setting, solution.layers, solution.choices, planner, backend)
            ranked.append((plan, evaluate(problem.job, problem.cluster, plan)))
    step = ranked[0][1].step_s
    bound = min(step, state.open_bound)
    gap = (step - bound) / step
    report = SearchReport(
        status="optimal" if gap <= 0.0 else "feasible",
        gap=gap,
        wall_s=time.perf_counter() - began,
        considered=count_points(problem.space, problem.job.model.num_layers),
        pruned={name: count for name, count in sorted(state.pruned.items()) if count},
    )
    ranked = [(plan, msgspec.structs.replace(estimate, lower_bound_s=bound)) for plan, estimate in ranked]
    return SearchResult(
        status=report.status, plan=ranked[0][0], estimate=ranked[0][1], ranked=tuple(ranked), gap=gap, report=report
    )


def _infeasible(problem: Problem, state: State, began: float, cut: bool = False) -> SearchResult:
    wall_s = time.perf_counter() - began  # the search itself; looking for what would help comes after it
    reasons = ("the time limit passed before a plan was found",) if cut else nearest_misses(problem)
    report = SearchReport(
        status="infeasible",
        wall_s=wall_s,
        considered=count_points(problem.space, problem.job.model.num_layers),
        pruned={name: count for name, count in sorted(state.pruned.items()) if count},
        reasons=reasons,
    )
    return SearchResult(status="infeasible", plan=None, estimate=None, report=report)
