"""Good plans early, without proof: the better the best plan known, the more every bound cuts.

The options that could be fastest, memory counted, on as many devices as they can use; then other
numbers of stages around the best plan.
"""

from __future__ import annotations

from itertools import product

import numpy as np

from hapmoe.options import FloatArray, IntArray
from hapmoe.search.capacity import capacity_bounds
from hapmoe.search.expand import distinct, expand_orders, fullest_counts
from hapmoe.search.points import Points
from hapmoe.search.problem import Problem, settings_of
from hapmoe.search.reach import point_bounds
from hapmoe.search.solve import solve_group
from hapmoe.search.state import State, pause

__all__ = ["first_plan", "some_options"]

SEEDS = 24
"""Options that are tried with their fullest stage counts at once (fewer where pools stand in many orders)."""
RANKED = 1024
"""Options with the lowest bounds whose memory is looked at before the first are tried."""
TRIALS = (1.1, 1.25, 1.5, 2.0, 4.0, 16.0, np.inf)
"""How much slower than its lowest bound the first plan may be, one after the other: a ceiling cuts."""
TRIED, SAME = 12, 3
"""Grid points that are tried at once, and how many of them may have one option."""
ROUNDS = 4
"""How often the surroundings of the best plan are looked at."""


def first_plan(problem: Problem, state: State, order: IntArray, bound_K: FloatArray) -> None:
    """Some good plan of the options in ``order``, by bound; nothing in ``state`` if none was met."""
    size = some_options(problem)
    for begin in range(0, len(order), RANKED):
        some = order[begin : begin + RANKED]
        better = capacity_bounds(problem, some, bound_K[some], np.inf)
        ranked = some[np.argsort(better, kind="stable")]
        for at in range(0, len(ranked), size):
            option, stages = fullest_counts(problem, ranked[at : at + size])
            if len(option) and _try(problem, state, option, stages):
                _around(problem, state)
                return
            pause(state)


def some_options(problem: Problem) -> int:
    """How many options are tried at once."""
    return max(2, SEEDS * 4 // max(len(problem.space.orders), 4))


def _try(problem: Problem, state: State, option_G: IntArray, stages_GP: IntArray) -> bool:
    """Look for a plan on some options with stage counts, under a ceiling that rises until there is one."""
    points, floor = expand_orders(problem, option_G, stages_GP, np.zeros(len(option_G)), np.inf)
    if not len(points):
        return False
    low, _ = point_bounds(problem, points, floor, np.inf)
    if np.isinf(low).all():
        return False
    known = state.best
    for trial in TRIALS:
        state.best = min(known, trial * float(low.min()))
        _solve_some(problem, state, points, low)
        if state.found:
            return True
    state.best = known
    return False


def _around(problem: Problem, state: State) -> None:
    """More or fewer stages on each pool than the best plan has."""
    moves = np.asarray(list(product((-1, 0, 1), repeat=len(problem.tables))), np.int64)
    for _ in range(ROUNDS):
        best, setting, _ = state.found[-1]
        k = setting.option
        stages = np.asarray(setting.stages_P) + moves * problem.space.step_KP[k]
        stages = stages[((stages >= 0) & (stages <= problem.space.most_KP[k])).all(axis=1)]
        option, stages = distinct(problem, np.full(len(stages), k), stages)
        points, floor = expand_orders(problem, option, stages, np.zeros(len(option)), state.best)
        if len(points):
            _solve_some(problem, state, points, floor)
        if state.best >= best:
            return


def _solve_some(problem: Problem, state: State, points: Points, floor_G: FloatArray) -> None:
    """Try the grid points with the lowest bounds below the best step, a few of each option."""
    bound, high = point_bounds(problem, points, floor_G, state.best)
    taken: dict[int, int] = {}
    chosen: list[int] = []
    for g in np.argsort(bound, kind="stable").tolist():
        k = int(points.option_G[g])
        if bound[g] >= state.best or len(chosen) == TRIED:
            break
        if taken.get(k, 0) < SAME:
            taken[k] = taken.get(k, 0) + 1
            chosen.append(g)
    for vpp in sorted(set(points.vpp_G[chosen].tolist())):
        group = [g for g in chosen if points.vpp_G[g] == vpp]
        settings = settings_of(problem, points.take(np.asarray(group)))
        mine = state.may(problem, settings)
        group, settings = [group[number] for number in mine], [settings[number] for number in mine]
        if settings:
            solve_group(problem, state, settings, bound[group], [high[g] for g in group], quick=True)
