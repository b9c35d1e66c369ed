"""Grid points, many at once: bounded, and where that leaves them open their best splits found.

Array legend: G grid points, J stages.
"""

from __future__ import annotations

import numpy as np

from hapmoe.options import FloatArray, IntArray
from hapmoe.search.entries import price_entries, prune
from hapmoe.search.points import Points
from hapmoe.search.problem import Problem, Setting, settings_of
from hapmoe.search.reach import point_bounds
from hapmoe.search.split import best_equal, best_split
from hapmoe.search.state import State, keep, pause

__all__ = ["solve_group", "solve_points"]


def solve_points(problem: Problem, state: State, points: Points, floor_G: FloatArray) -> None:
    """Bound and, where that leaves them open, solve grid points; the best goes into ``state``."""
    low = np.flatnonzero(floor_G < state.best)
    if state.uniform:
        low = low[problem.job.model.num_layers % (points.pp_G * points.vpp_G)[low] == 0]
    if not len(low):
        return
    points, floor_G = points.take(low), floor_G[low]
    bound, high = point_bounds(problem, points, floor_G, state.best)
    state.pruned["memory"] += int(np.isinf(bound).sum())
    state.pruned["bound"] += int((np.isfinite(bound) & (bound >= state.best)).sum())
    order = np.argsort(bound, kind="stable")
    order = order[bound[order] < state.best]
    first = 0
    while first < len(order):
        # Without a good incumbent everything looks open: start with a few points, then take many at once.
        size = 4 if not np.isfinite(state.best) and not state.uniform else state.batch
        batch = order[first : first + size]
        first += size
        batch = batch[bound[batch] < state.best]
        for vpp in sorted(set(points.vpp_G[batch].tolist())):
            group = batch[points.vpp_G[batch] == vpp]
            settings = settings_of(problem, points.take(group))
            mine = state.may(problem, settings)
            if not mine:
                continue
            group, settings = group[mine], [settings[number] for number in mine]
            if state.uniform:
                if found := best_equal(problem, settings, state.best):
                    keep(state, *found)
            else:
                solve_group(problem, state, settings, bound[group], [high[g] for g in group.tolist()])
            pause(state)


def solve_group(
    problem: Problem,
    state: State,
    settings: list[Setting],
    bound_G: FloatArray,
    high: list[IntArray],
    quick: bool = False,
) -> None:
    """Solve grid points of one vpp, those with the lowest bound first (``quick``: see ``best_split``)."""
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
        solution, left_open = best_split(problem, settings[g], mine, state.best, float(bound_G[g]), quick)
        if not quick:
            state.open_bound = min(state.open_bound, left_open)
        if solution is not None:
            keep(state, settings[g], solution)
        pause(state)
