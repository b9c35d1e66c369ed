"""Grid points, many at once: bounded, and where that leaves them open their best splits found.

Array legend: G grid points, J stages.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hapmoe.options import FloatArray, IntArray
from hapmoe.search.entries import Entries, price_entries, prune
from hapmoe.search.even import even_bound
from hapmoe.search.points import Points
from hapmoe.search.problem import Problem, Setting, settings_of
from hapmoe.search.reach import point_bounds
from hapmoe.search.split import Ready, Solution, best_equal, best_split, ready_for, relaxed_s
from hapmoe.search.state import State, keep, pause

__all__ = ["solve_each", "solve_group", "solve_points"]

SAMPLED, SAMPLED_SAME = 6, 2
"""Grid points that are tried for a better plan before any is solved, and how many of them may have one option."""


def solve_points(
    problem: Problem, state: State, points: Points, floor_G: FloatArray, rest: float | None = None
) -> None:
    """Bound and, where that leaves them open, solve grid points; the best goes into ``state``.

    ``rest``: a lower bound of all that is still to be looked at after these; with it the bound of the
    state keeps up with what is settled. All points are bounded by their entries first, then those that
    this leaves open solved, the most promising ones first.
    """
    low = np.flatnonzero(floor_G < state.best)
    if state.uniform:
        low = low[problem.job.model.num_layers % (points.pp_G * points.vpp_G)[low] == 0]
    if not len(low):
        return
    points, floor_G = points.take(low), floor_G[low]
    if state.uniform:  # best_equal bounds points by itself, and has few splits to look at
        bound, high = np.maximum(floor_G, even_bound(problem, points)), list[IntArray]()
    else:
        bound, high = point_bounds(problem, points, floor_G, state.best)
    state.pruned["memory"] += int(np.isinf(bound).sum())
    state.pruned["bound"] += int((np.isfinite(bound) & (bound >= state.best)).sum())
    order = np.argsort(bound, kind="stable")
    order = order[bound[order] < state.best]
    waiting: list[_Open] = []
    first = sampled = seen = 0
    pace = 1  # batches until the next sample: where none is better they become rare
    while first < len(order):
        if rest is not None:
            lowest = min((point.floor for point in waiting), default=np.inf)
            state.bound = min(rest, float(bound[order[first]]), lowest)
        # Without a good incumbent everything looks open: start with a few points, then take many at once.
        blind = not np.isfinite(state.best) and not state.uniform
        batch = order[first : first + (4 if blind else state.batch)]
        first += len(batch)
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
            elif blind:
                solve_group(problem, state, settings, bound[group], [high[g] for g in group.tolist()])
            else:
                waiting += _glance(problem, state, settings, bound[group], [high[g] for g in group.tolist()])
            pause(state)
        due = first >= sampled + pace * state.batch or first >= len(order)
        if due and len(waiting) - seen > SAMPLED:
            best = state.best
            _sample(problem, state, waiting[seen:])
            sampled, pace = first, 1 if state.best < best else 2 * pace
            seen = len(waiting)
    _solve_all(problem, state, waiting, rest)


def _solve_all(problem: Problem, state: State, waiting: list[_Open], rest: float | None) -> None:
    """Solve what is open, the lowest bound first; what has too many splits to be listed again at the end, where a
    better plan may leave fewer of them."""
    unlisted: list[tuple[_Open, float, float]] = []
    try:
        for point in _lowest_first(state, waiting):
            if rest is not None:
                state.bound = min(rest, point.floor)
            left = _solve(problem, state, point)
            if left < np.inf:
                unlisted.append((point, left, state.best))
            pause(state)
        while unlisted:
            point, left, best = unlisted[-1]
            left = _solve(problem, state, point) if state.best < best else left
            state.open_bound = min(state.open_bound, left)
            unlisted.pop()
            pause(state)
    finally:  # also where time is up
        state.open_bound = min([state.open_bound, *(left for _, left, _ in unlisted)])


def _sample(problem: Problem, state: State, waiting: list[_Open]) -> None:
    """A better plan at some of the grid points, without proof: those with the lowest bounds, not all of one option."""
    taken: Counter[int] = Counter()
    for point in sorted(waiting, key=lambda point: point.floor):
        if point.floor >= state.best or taken.total() == SAMPLED:
            break
        if taken[point.setting.option] < SAMPLED_SAME:
            taken[point.setting.option] += 1
            _solve(problem, state, point, quick=True)


@dataclass(slots=True)
class _Open:
    """A grid point that bounds leave open, its splits ready to be searched."""

    setting: Setting
    ready: Ready
    floor: float
    """A lower bound of its step."""
    tight: bool = False
    """Does it count the relaxed timeline, which takes long?"""


def _tighten(point: _Open) -> None:
    if not point.tight:
        point.floor, point.tight = max(point.floor, relaxed_s(point.setting, point.ready)), True


def _lowest_first(state: State, waiting: list[_Open]) -> Iterator[_Open]:
    """Points below the best step, by their tight bounds; only those are tightened that have to be."""
    heap = [(point.floor, number) for number, point in enumerate(waiting)]
    heapq.heapify(heap)
    while heap:
        floor, number = heapq.heappop(heap)
        if floor >= state.best:
            return
        point = waiting[number]
        _tighten(point)
        if point.floor > floor:
            heapq.heappush(heap, (point.floor, number))
        else:
            yield point


def _glance(
    problem: Problem, state: State, settings: list[Setting], bound_G: FloatArray, high: list[IntArray]
) -> list[_Open]:
    """Grid points of one vpp that their entries leave open."""
    left: list[_Open] = []
    for floor, setting, entries in _priced(problem, state, settings, bound_G, high):
        ready = ready_for(problem, setting, entries, state.best, floor)
        if ready is not None:
            left.append(_Open(setting, ready, ready.floor_s))
        pause(state)
    return left


def solve_group(
    problem: Problem,
    state: State,
    settings: list[Setting],
    bound_G: FloatArray,
    high: list[IntArray],
    quick: bool = False,
) -> None:
    """Solve grid points of one vpp, those with the lowest bound first (``quick``: see ``best_split``)."""
    for floor, setting, entries in _priced(problem, state, settings, bound_G, high):
        ready = ready_for(problem, setting, entries, state.best, floor) if floor < state.best else None
        if ready is not None:
            left = _solve(problem, state, _Open(setting, ready, ready.floor_s), quick)
            state.open_bound = state.open_bound if quick else min(state.open_bound, left)
        pause(state)


def solve_each(
    problem: Problem, settings: list[Setting], bound_G: FloatArray, high: list[IntArray], below: float
) -> list[tuple[float, Setting, Solution]]:
    """A good plan of each of some grid points of one vpp, where there is one below ``below``; without proof."""
    found: list[tuple[float, Setting, Solution]] = []
    for floor, setting, entries in _priced(problem, State(best=below), settings, bound_G, high):
        ready = ready_for(problem, setting, entries, below, floor)
        if ready is None or relaxed_s(setting, ready) >= below:
            continue
        solution, _ = best_split(problem, setting, ready, floor, below, quick=True)
        if solution is not None:
            found.append((solution.step_s, setting, solution))
    return found


def _solve(problem: Problem, state: State, point: _Open, quick: bool = False) -> float:
    """Search its splits; what one that could not be listed may take at the least (infinite: all were)."""
    _tighten(point)
    if point.floor >= state.best:
        return np.inf
    solution, left_open = best_split(problem, point.setting, point.ready, point.floor, state.best, quick)
    if solution is not None:
        keep(state, point.setting, solution)
    return left_open


def _priced(
    problem: Problem, state: State, settings: list[Setting], bound_G: FloatArray, high: list[IntArray]
) -> list[tuple[float, Setting, Entries]]:
    """Bounds and entries of grid points of one vpp, those with the lowest bound first."""
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
    order = [g for g in np.argsort(bound_G, kind="stable").tolist() if bound_G[g] < state.best and begin[g] < end[g]]
    return [(float(bound_G[g]), settings[g], entries.take(slice(int(begin[g]), int(end[g])))) for g in order]
