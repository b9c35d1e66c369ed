"""The exact search: cheapest bound first, every point whose bound beats the best plan is solved.

Options (degrees and microbatch size) are bounded over all their placements, then over stage counts,
then over orders and virtual stages, then over what the stages can hold; only what all bounds leave
open has its layer splits searched. It ends with a certificate: no plan of the space is faster under
the model (gap 0), or, cut by a time limit, the fraction by which one could still be.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
import numpy as np

from hapmoe.cost import Cache, evaluate
from hapmoe.options import FloatArray, IntArray
from hapmoe.plan import Estimate, Plan, SearchReport, SearchResult
from hapmoe.search.bounds import option_bounds
from hapmoe.search.capacity import capacity_bounds
from hapmoe.search.dive import first_plan
from hapmoe.search.expand import expand_counts, expand_orders, fullest_counts
from hapmoe.search.misses import nearest_misses
from hapmoe.search.problem import Problem, Setting, make_plan, settings_of
from hapmoe.search.reach import point_bounds
from hapmoe.search.solve import solve_each, solve_points
from hapmoe.search.space import count_points
from hapmoe.search.state import NO_TIME, TOO_MANY, OutOfTimeError, Progress, State, pause

__all__ = ["Progress", "explore", "search_exact"]

FIRST_CHUNK, MOST_CHUNK = 64, 1024
"""Options whose stage counts are expanded at once: few at first, then more and more."""
ROWS = 1024
"""Stage counts whose orders and virtual stages are expanded at once."""


def search_exact(
    problem: Problem,
    *,
    planner: str = "exact",
    backend: str = "megatron",
    top: int = 3,
    time_limit_s: float | None = None,
    uniform: bool = False,
    legal: Callable[[Problem, Setting], bool] | None = None,
    progress: Progress | None = None,
    started: float | None = None,
) -> SearchResult:
    """The fastest plan of the problem's space, certified.

    ``uniform``: all stages hold the same number of layers and recompute the same. Interruption
    (KeyboardInterrupt) counts as a time limit once a plan is in hand.
    """
    began = time.perf_counter() if started is None else started
    state = State(uniform=uniform, legal=legal, deadline=np.inf if time_limit_s is None else began + time_limit_s)
    state.progress = progress
    state.pruned.update(problem.space.dropped)
    if not len(problem.space.options):
        return _infeasible(problem, state, began)
    cut = explore(problem, state, top)
    if not state.found:
        return _infeasible(problem, state, began, cut=cut)
    return _result(problem, state, began, planner, backend, top)


def explore(problem: Problem, state: State, top: int = 1) -> bool:
    """Everything below ``state.best`` into ``state.found``; True where the time limit or the user cut it."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        bound_K, possible_K = option_bounds(problem)
        state.pruned["memory"] += int((~possible_K).sum())
        order = np.flatnonzero(possible_K)
        order = order[np.argsort(bound_K[order], kind="stable")]
        state.total = len(order)
        try:
            _search_all(problem, state, order, bound_K, top)
        except (OutOfTimeError, KeyboardInterrupt) as stop:
            if isinstance(stop, KeyboardInterrupt) and not state.found:
                raise
            state.open_bound = state.lower_bound()
            return True
    return False


def _search_all(problem: Problem, state: State, order: IntArray, bound_K: FloatArray, top: int) -> None:
    """The options in ``order``, by bound: a first plan, the proof, the next-best plans."""
    seeds = order
    if len(order):
        state.bound = float(bound_K[order[0]])
    if not state.uniform:
        if np.isinf(state.best):  # else a ceiling is known, and there may be no plan below it
            first_plan(problem, state, order, bound_K)
        order = order[bound_K[order] < state.best]
        bound_K[order] = capacity_bounds(problem, order, bound_K[order], state.best)
        seeds = order = order[np.argsort(bound_K[order], kind="stable")]
    _search_options(problem, state, order, bound_K)
    state.bound = np.inf
    if top > 1 and not state.uniform and state.found:
        _runners_up(problem, state, seeds[:LIKELY], top)


def _search_options(problem: Problem, state: State, order: IntArray, bound_K: FloatArray) -> None:
    size, before = FIRST_CHUNK, state.total - len(order)
    settled, postponed = 0, np.zeros(0, np.int64)
    while settled < len(order) and bound_K[order[settled]] < state.best:
        state.settled = before + settled
        chunk = order[settled : settled + size]
        size = min(2 * size, MOST_CHUNK)
        # those with too many stage counts to list come last
        state.bound = float(min(bound_K[chunk[0]], bound_K[postponed].min(initial=np.inf)))
        option, stages, bound, unlisted = expand_counts(
            problem, chunk[bound_K[chunk] < state.best], state.best, state.uniform
        )
        postponed = np.concatenate([postponed, np.asarray(unlisted, np.int64)])
        settled += len(chunk)
        ahead = bound_K[np.concatenate([order[settled : settled + 1], postponed])]
        _search_counts(problem, state, option, stages, bound, float(ahead.min(initial=np.inf)))
        pause(state)
    state.pruned["bound"] += len(order) - settled
    # a better plan cuts more of their stage counts
    later = postponed[bound_K[postponed] < state.best]
    if len(later):
        state.bound = float(bound_K[later].min())
        option, stages, bound, unlisted = expand_counts(problem, later, state.best, state.uniform)
        left = float(bound_K[unlisted].min(initial=np.inf))
        _search_counts(problem, state, option, stages, bound, left)
        state.open_bound = min(state.open_bound, left)


def _search_counts(
    problem: Problem, state: State, option_G: IntArray, stages_GP: IntArray, bound_G: FloatArray, rest: float
) -> None:
    """Options with stage counts, lowest bound first; ``rest``: a bound of all that comes after them."""
    for begin in range(0, len(option_G), ROWS):
        rows = slice(begin, begin + ROWS)
        if bound_G[begin] >= state.best:
            state.pruned["bound"] += len(bound_G) - begin
            return
        points, floor = expand_orders(problem, option_G[rows], stages_GP[rows], bound_G[rows], state.best)
        later = float(bound_G[begin + ROWS]) if begin + ROWS < len(bound_G) else np.inf
        solve_points(problem, state, points, floor, min(rest, later))


LIKELY = 24
"""Options with the lowest bounds among which the next-best plans are looked for."""
RUNNERS_UP, AT_ONCE = 32, 8
"""Grid points looked at for the next-best plans, and how many at once."""
SLOWER = 1.3
"""By how much slower they may be."""


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
    settings = settings_of(problem, points)
    order = [
        g
        for g in np.argsort(bound, kind="stable").tolist()
        if bound[g] < ceiling and _kind(problem, settings[g]) not in seen
    ]
    steps = dict.fromkeys(seen, state.best)
    for begin in range(0, min(len(order), RUNNERS_UP), AT_ONCE):
        some = order[begin : begin + AT_ONCE]
        some = [some[number] for number in state.may(problem, [settings[g] for g in some])]
        for vpp in sorted({settings[g].vpp for g in some}):
            below = min([ceiling, *sorted(steps.values())[most - 1 : most]])
            group = [g for g in some if settings[g].vpp == vpp and bound[g] < below]
            if not group:
                continue
            mine, reached = [settings[g] for g in group], [high[g] for g in group]
            for step, setting, solution in solve_each(problem, mine, bound[group], reached, below):
                kind = _kind(problem, setting)
                steps[kind] = min(step, steps.get(kind, np.inf))
                state.found.append((step, setting, solution))
            pause(state)


def _kind(problem: Problem, setting: Setting) -> tuple[object, ...]:
    """What makes a plan another one in a user's eyes: places and degrees."""
    options, k = problem.space.options, setting.option
    degrees = (options.tp_K[k], options.cp_K[k], options.ep_K[k], options.etp_K[k], options.dp_K[k])
    return setting.pool_J, *(int(value) for value in degrees)


def _result(problem: Problem, state: State, began: float, planner: str, backend: str, top: int) -> SearchResult:
    ranked: list[tuple[Plan, Estimate]] = []
    kinds: set[tuple[object, ...]] = set()
    prices: Cache = {}
    for _, setting, solution in sorted(state.found, key=lambda entry: entry[0]):
        if len(ranked) < top and _kind(problem, setting) not in kinds:
            kinds.add(_kind(problem, setting))
            plan = make_plan(problem, setting, solution.layers, solution.choices, planner, backend)
            ranked.append((plan, evaluate(problem.job, problem.cluster, plan, prices)))
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
    if cut or np.isfinite(state.open_bound):  # nothing found is not nothing there
        reasons: tuple[str, ...] = (NO_TIME if cut else TOO_MANY,)
    else:
        reasons = nearest_misses(problem)
    report = SearchReport(
        status="infeasible",
        wall_s=wall_s,
        considered=count_points(problem.space, problem.job.model.num_layers),
        pruned={name: count for name, count in sorted(state.pruned.items()) if count},
        reasons=reasons,
    )
    return SearchResult(status="infeasible", plan=None, estimate=None, report=report)
