"""Good plans early, without proof: the better the best plan known, the more every bound cuts.

The options that could be fastest, memory counted, on as many devices as they can use; then other
numbers of stages around the best plan.
"""

from __future__ import annotations

from collections import Counter
from itertools import product

import numpy as np
from numpy.typing import NDArray

from hapmoe.options import FloatArray, IntArray
from hapmoe.search.bounds import heavy_class
from hapmoe.search.capacity import capacity_bounds
from hapmoe.search.expand import distinct, expand_orders, fullest_counts
from hapmoe.search.points import Points
from hapmoe.search.problem import Problem, settings_of
from hapmoe.search.reach import point_bounds
from hapmoe.search.solve import solve_group
from hapmoe.search.space import count_points
from hapmoe.search.state import State, pause

__all__ = ["first_plan"]

SEEDS = 8
"""Options that are tried at once."""
RANKED = 256
"""Options with the lowest bounds whose memory is looked at before the first are tried."""
PARTS = (1, 2, 4)
"""Stages that are tried of each pool: all, every second, every fourth."""
TRIALS = (1.1, 1.25, 1.5, 2.0, 4.0, 16.0, np.inf)
"""How much slower than its lowest bound the first plan may be, one after the other: a ceiling cuts."""
TRIED, SAME = 8, 2
"""Grid points that are tried at once, without and then with virtual stages, and how many of them may
have one option."""
BOUNDED, BOUNDED_BESIDE, TRIED_BESIDE = 96, 8192, 24
"""Grid points of which these are chosen: of few options, and of all that are like the best plan's; and how many of the
latter are tried, one of each option."""
WIDE = 100_000
"""Grid points of a space from which on options like the best plan's are worth a look of their own."""
AWAY = 2
"""How many doublings and halvings of degrees lie between an option and one like it."""
ROUNDS = 8
"""How often the surroundings of the best plan, and other options, are looked at."""


def first_plan(problem: Problem, state: State, order: IntArray, bound_K: FloatArray) -> None:
    """Some good plan of the options in ``order``, by bound; nothing in ``state`` if none was met."""
    wide = count_points(problem.space, problem.job.model.num_layers) > WIDE
    for begin in range(0, len(order), RANKED):
        some = order[begin : begin + RANKED]
        better = capacity_bounds(problem, some, bound_K[some], np.inf)
        ranked = np.argsort(better, kind="stable")
        for at in range(0, len(ranked), SEEDS):
            seeds = ranked[at : at + SEEDS]
            points, low = _likely(problem, some[seeds], better[seeds])
            if np.isfinite(low).any() and _try(problem, state, points, low, wide):
                return
            pause(state)


def _likely(problem: Problem, option_K: IntArray, low_K: FloatArray) -> tuple[Points, FloatArray]:
    """Grid points of some options (with bounds) where the fastest plan may be, and their bounds."""
    option, stages = fullest_counts(problem, option_K)
    step = np.maximum(problem.space.step_KP[option], 1)
    fewer = [stages // (step * part) * step for part in PARTS]
    option, stages = distinct(problem, np.tile(option, len(PARTS)), np.concatenate(fewer))
    known = dict(zip(option_K.tolist(), low_K.tolist(), strict=True))
    floor = np.asarray([known[k] for k in option.tolist()])
    points, floor = expand_orders(problem, option, stages, floor, np.inf)
    quick = _by_speed(problem, points)
    points = points.take(quick)
    low, _ = point_bounds(problem, points, floor[quick], np.inf)
    return points, low


def _try(problem: Problem, state: State, points: Points, low_G: FloatArray, wide: bool) -> bool:
    """Look for a plan among some points, under a ceiling that rises until there is one, then for better ones."""
    known, seen = state.best, set[tuple[int, ...]]()
    for trial in TRIALS:
        state.best = min(known, trial * float(low_G.min()))
        _solve_some(problem, state, points, low_G, set())
        if state.found:
            break
    else:
        state.best = known
        return False
    for _ in range(ROUNDS):
        best = state.best
        _around(problem, state, seen)
        if wide:
            _beside(problem, state, seen)
        _solve_some(problem, state, points, low_G, seen)
        if state.best >= best:
            break
    return True


def _by_speed(problem: Problem, points: Points) -> NDArray[np.bool_]:
    """[G] do the pools stand from slow to fast?"""
    heavy, _ = heavy_class(problem)
    layer_KP = np.stack([t.forward_CK[heavy] + t.backward_CK[heavy] for t in problem.tables], axis=1)
    orders = problem.space.orders
    width = max(len(order) for order in orders)
    table = np.asarray([[*order, *[order[-1]] * (width - len(order))] for order in orders], np.int64)
    speeds = np.take_along_axis(layer_KP[points.option_G], table[points.order_G], axis=1)
    return np.asarray((np.diff(speeds, axis=1) <= 0).all(axis=1))


def _around(problem: Problem, state: State, seen: set[tuple[int, ...]]) -> None:
    """More or fewer stages on each pool than the best plan has, in all orders of pools."""
    moves = np.asarray(list(product((-1, 0, 1), repeat=len(problem.tables))), np.int64)
    _, setting, _ = state.found[-1]
    k = setting.option
    stages = np.asarray(setting.stages_P) + moves * problem.space.step_KP[k]
    stages = stages[((stages >= 0) & (stages <= problem.space.most_KP[k])).all(axis=1)]
    option, stages = distinct(problem, np.full(len(stages), k), stages)
    points, floor = expand_orders(problem, option, stages, np.zeros(len(option)), state.best)
    _solve_some(problem, state, points, floor, seen, same=TRIED)


def _beside(problem: Problem, state: State, seen: set[tuple[int, ...]]) -> None:
    """Options like the best plan's, on the fastest pools and any part of the next."""
    options = problem.space.options
    _, setting, _ = state.found[-1]
    degrees = (options.tp_K, options.cp_K, options.ep_K, options.etp_K, options.dp_K, options.mbs_K)
    away = sum(np.abs(np.log2(degree / degree[setting.option])) for degree in degrees)
    option_K = np.flatnonzero((away > 0) & (away <= AWAY))
    option, stages = _nested(problem, option_K)
    points, floor = expand_orders(problem, option, stages, np.zeros(len(option)), state.best)
    _solve_some(problem, state, points, floor, seen, same=1, most=BOUNDED_BESIDE, tried=TRIED_BESIDE)


def _nested(problem: Problem, option_K: IntArray) -> tuple[IntArray, IntArray]:
    """Options [G] with stages [G, P]: all of the fastest pools, and any number of the slowest that is used."""
    option, full = fullest_counts(problem, option_K)
    heavy, _ = heavy_class(problem)
    layer_GP = np.stack([t.forward_CK[heavy] + t.backward_CK[heavy] for t in problem.tables], axis=1)[option]
    slowest = np.where(full > 0, layer_GP, -np.inf).argmax(axis=1)
    rows = np.arange(len(option))
    step = np.maximum(problem.space.step_KP[option, slowest], 1)
    many = full[rows, slowest] // step
    row = np.repeat(rows, many)
    left_out = np.arange(len(row)) - np.repeat(np.cumsum(many) - many, many)
    stages = full[row]
    stages[np.arange(len(row)), slowest[row]] -= left_out * step[row]
    return distinct(problem, option[row], stages)


def _solve_some(
    problem: Problem,
    state: State,
    points: Points,
    floor_G: FloatArray,
    seen: set[tuple[int, ...]],
    same: int = SAME,
    most: int = BOUNDED,
    tried: int = TRIED,
) -> None:
    """Try the grid points with the lowest bounds below the best step that were not seen, a few of each option."""
    for flat in (True, False):
        low = np.flatnonzero(((points.vpp_G == 1) == flat) & (floor_G < state.best))
        low = low[np.argsort(floor_G[low], kind="stable")]
        low = np.asarray([g for g in low.tolist() if _key(points, g) not in seen][:most], np.int64)
        some = points.take(low)
        bound, high = point_bounds(problem, some, floor_G[low], state.best)
        taken: Counter[int] = Counter()
        chosen: list[int] = []
        for g in np.argsort(bound, kind="stable").tolist():
            if bound[g] >= state.best or len(chosen) == tried:
                break
            k = int(some.option_G[g])
            if taken[k] < same:
                seen.add(_key(some, g))
                taken[k] += 1
                chosen.append(g)
        for vpp in sorted(set(some.vpp_G[chosen].tolist())):
            group = [g for g in chosen if some.vpp_G[g] == vpp and bound[g] < state.best]
            settings = settings_of(problem, some.take(np.asarray(group, np.int64)))
            mine = state.may(problem, settings)
            group, settings = [group[number] for number in mine], [settings[number] for number in mine]
            if settings:
                solve_group(problem, state, settings, bound[group], [high[g] for g in group], quick=True)


def _key(points: Points, g: int) -> tuple[int, ...]:
    """What tells one grid point from another."""
    where = int(points.option_G[g]), int(points.order_G[g]), int(points.vpp_G[g])
    return *where, *points.stages_GP[g].tolist()
