"""Every way to fill every stage of many grid points, priced in one go, and what the bounds leave of it.

An entry is one stage of one grid point with one number of layers (and, with virtual stages, one of
several incomparable recomputations). Where all layers cost the same, entries are exact; else they
stand for the lightest run of layers the stage could hold, and candidates are priced again.

Array legend: E entries, G grid points, J stages (padded), V virtual stages, Q fullest moments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hapmoe.options import FloatArray, IntArray
from hapmoe.schedule import in_flight
from hapmoe.search.bounds import EPS, blocked_s
from hapmoe.search.problem import Problem, Setting
from hapmoe.search.rows import distinct_rows
from hapmoe.stagecost import Costs, Slots, stage_costs

__all__ = ["Entries", "price_entries", "price_rows", "prune"]

MOST_RUNS = 12
"""Different runs of layers that one stage may hold, priced each; beyond it a weaker bound stands in."""


@dataclass(frozen=True, slots=True)
class Entries:
    """Sorted by grid point and stage."""

    point_E: IntArray
    stage_E: IntArray
    layers_E: IntArray
    forward_EV: FloatArray
    backward_EV: FloatArray
    work_E: FloatArray
    sync_E: FloatArray
    optimizer_E: FloatArray
    choice_E: IntArray
    block_E: IntArray

    def take(self, which: IntArray | NDArray[np.bool_] | slice) -> Entries:
        return Entries(*(getattr(self, name)[which] for name in self.__slots__))


def price_rows(
    problem: Problem,
    settings: Sequence[Setting],
    point_X: IntArray,
    stage_X: IntArray,
    start_XV: IntArray,
    count_XV: IntArray,
    every: bool = False,
) -> Costs:
    """Costs of rows. All settings share vpp. ``every``: see ``stage_costs``."""
    width = max(setting.pp for setting in settings)
    pool_GJ = np.asarray([[*s.pool_J, *[0] * (width - s.pp)] for s in settings], np.int64)
    last_G = np.asarray([s.pp - 1 for s in settings], np.int64)
    option_G = np.asarray([s.option for s in settings], np.int64)
    flights_XQV = _flights(settings, width)[point_X, stage_X]
    slots = Slots(start_XV, count_XV, flights_XQV, stage_X == 0, stage_X == last_G[point_X])
    column_X = problem.column(pool_GJ[point_X, stage_X], option_G[point_X])
    return stage_costs(
        problem.job, problem.whole, column_X, slots, problem.prefix_CN, allowed=problem.allowed, every=every
    )


def _flights(settings: Sequence[Setting], width: int) -> IntArray:
    """[G, J, Q, V]"""
    kinds: dict[tuple[int, ...], int] = {}
    kind_G = [kinds.setdefault((s.pp, s.vpp, s.microbatches, s.group, s.extra), len(kinds)) for s in settings]
    rows = [
        [in_flight(pp, vpp, min(j, pp - 1), microbatches, group, extra) for j in range(width)]
        for pp, vpp, microbatches, group, extra in kinds
    ]
    deepest = max(len(vectors) for row in rows for vectors in row)
    return np.asarray([[[*v, *[v[-1]] * (deepest - len(v))] for v in row] for row in rows], np.int64)[kind_G]


def price_entries(problem: Problem, settings: Sequence[Setting], low_GJ: IntArray, high_GJ: IntArray) -> Entries:
    """All entries with ``low`` to ``high`` layers per stage. All settings share vpp."""
    vpp = settings[0].vpp
    many_GJ = np.maximum(high_GJ - low_GJ + 1, 0)
    width = low_GJ.shape[1]
    flat = np.repeat(np.arange(many_GJ.size), many_GJ.ravel())
    offset = np.arange(len(flat)) - np.repeat(np.cumsum(many_GJ.ravel()) - many_GJ.ravel(), many_GJ.ravel())
    point, stage = flat // width, flat % width
    layers = low_GJ.ravel()[flat] + offset
    count_XV = (layers[:, None] + np.arange(vpp)) // vpp
    relaxed = np.zeros(len(point), bool)
    start_XV = np.zeros_like(count_XV)
    if len(problem.prefix_CN) > 1:
        row, start_XV, relaxed = _runs(problem, settings, point, stage, count_XV)
        point, stage, layers, count_XV = point[row], stage[row], layers[row], count_XV[row]
    if not len(point):
        none, nothing = np.zeros(0, np.int64), np.zeros(0)
        chunks = np.zeros((0, vpp))
        return Entries(none, none, none, chunks, chunks, nothing, nothing, nothing, none, none)
    costs = price_rows(problem, settings, point, stage, start_XV, count_XV)
    keep = np.flatnonzero(costs.fits_X | relaxed[costs.row_X])
    row = costs.row_X[keep]
    # A relaxed entry leaves recomputation out of its times: block it may be, but never less work.
    loose = relaxed[row]
    spared = np.where(loose, costs.recompute_X[keep], 0.0)
    forward, backward = costs.forward_XV[keep], costs.backward_XV[keep]
    columns: tuple[NDArray[Any], ...] = (
        point[row],
        stage[row],
        layers[row],
        forward,
        np.where(loose[:, None], np.maximum(backward - spared[:, None], 0.0), backward),
        forward.sum(axis=1) + backward.sum(axis=1) - spared,
        np.where(loose, 0.0, costs.sync_X[keep]),
        np.where(loose, 0.0, costs.optimizer_X[keep]),
        costs.choice_X[keep],
        costs.block_X[keep],
    )
    order = np.lexsort((columns[2], columns[1], columns[0]))
    entries = Entries(*(column[order] for column in columns))
    return entries if len(problem.prefix_CN) == 1 else _lightest(entries, width, int(high_GJ.max()) + 1)


def _lightest(entries: Entries, width: int, most: int) -> Entries:
    """One entry per point, stage and number of layers: the least of every column over its runs of layers."""
    key = (entries.point_E * width + entries.stage_E) * most + entries.layers_E
    first = np.flatnonzero(np.concatenate([[True], key[1:] != key[:-1]])) if len(key) else np.zeros(0, np.int64)
    if len(first) == len(key):
        return entries
    least = entries.take(first)
    columns = {
        name: np.minimum.reduceat(getattr(entries, name), first, axis=0)
        for name in ("forward_EV", "backward_EV", "work_E", "sync_E", "optimizer_E")
    }
    return Entries(*(columns.get(name, getattr(least, name)) for name in Entries.__slots__))


def _runs(
    problem: Problem, settings: Sequence[Setting], point_X: IntArray, stage_X: IntArray, count_XV: IntArray
) -> tuple[IntArray, IntArray, NDArray[np.bool_]]:
    """Every distinct run of layers that a stage could hold: (row it belongs to, starts [., V], relaxed).

    Chunk c of stage i comes after at least c * pp + i layers and before as many as chunks follow.
    A row is relaxed where there are too many combinations: then only the lightest run of each chunk
    is priced, and recomputation and memory are left out of it.
    """
    vpp = count_XV.shape[1]
    prefix = problem.prefix_CN
    pattern = np.diff(prefix, axis=1).argmax(axis=0).astype(np.uint8).tobytes()
    # Rows with the same pipeline shape, stage and layers hold the same runs: find them once.
    pp_G = np.asarray([setting.pp for setting in settings], np.int64)
    keys = np.concatenate([pp_G[point_X][:, None], stage_X[:, None], count_XV], axis=1)
    kinds, kind_X = distinct_rows(keys)
    starts_of: list[tuple[int, ...]] = []
    begin, many = np.zeros(len(kinds), np.int64), np.zeros(len(kinds), np.int64)
    for kind, (pp, stage, *counts) in enumerate(kinds.tolist()):
        options = [_distinct(pattern, pp * vpp, chunk * pp + stage, count) for chunk, count in enumerate(counts)]
        begin[kind] = len(starts_of)
        if prod(map(len, options)) <= MOST_RUNS:
            starts_of += product(*options)
        many[kind] = len(starts_of) - begin[kind]
    number = np.maximum(many[kind_X], 1)
    row = np.repeat(np.arange(len(kind_X)), number)
    offset = np.arange(len(row)) - np.repeat(np.cumsum(number) - number, number)
    relaxed = many[kind_X][row] == 0
    all_starts = np.asarray(starts_of or [(0,) * vpp], np.int64)
    start_XV = all_starts[np.minimum(begin[kind_X][row] + offset, len(all_starts) - 1)]
    for at in np.flatnonzero(relaxed).tolist():
        setting, stage = settings[point_X[row[at]]], int(stage_X[row[at]])
        table = problem.tables[setting.pool_J[stage]]
        weights = (table.forward_CK + table.backward_CK)[:, setting.option]
        for chunk, count in enumerate(count_XV[row[at]].tolist()):
            starts = np.asarray(_distinct(pattern, setting.pp * vpp, chunk * setting.pp + stage, count))
            work = (weights[:, None] * (prefix[:, starts + count] - prefix[:, starts])).sum(axis=0)
            start_XV[at, chunk] = starts[int(work.argmin())]
    return row, start_XV, relaxed


@lru_cache(maxsize=65536)
def _distinct(pattern: bytes, places: int, place: int, count: int) -> tuple[int, ...]:
    """Where ``count`` layers can start that are a stage's chunk at ``place`` of ``places``: one start for each
    different run of classes (``pattern``: the class of every layer)."""
    latest = 0 if place == 0 else len(pattern) - count - (places - 1 - place)
    earliest = len(pattern) - count if place == places - 1 else place
    starts: dict[bytes, int] = {}
    for start in range(earliest, max(latest, earliest) + 1):
        starts.setdefault(pattern[start : start + count], start)
    return tuple(starts.values())


def prune(problem: Problem, settings: Sequence[Setting], entries: Entries, below: float) -> tuple[Entries, FloatArray]:
    """Entries that a split with a step below ``below`` could use, and a bound [G] (infinite: no split).

    An entry falls when its own stage would be too slow (B1 with the least that earlier stages need,
    B2 with the least work of all others), or when the other stages cannot make up the layer count.
    """
    layers = problem.job.model.num_layers
    count, width = len(settings), max(setting.pp for setting in settings)
    pp_G = np.asarray([s.pp for s in settings])
    position = np.arange(width)
    real_GJ = position < pp_G[:, None]
    flat_G = np.asarray([s.flat for s in settings])
    microbatches_G = np.asarray([float(s.microbatches) for s in settings])
    send_GJ = np.zeros((count, width))
    for row, s in enumerate(settings):
        send_GJ[row, : s.pp - 1] = s.send_J[: s.pp - 1]
    left_GJ = np.concatenate([np.zeros((count, 1)), send_GJ[:, :-1]], axis=1)
    ahead_GJ = np.maximum(pp_G[:, None] - 1 - position, 0)
    held_GJ = np.where(flat_G[:, None], blocked_s(ahead_GJ, send_GJ, left_GJ, microbatches_G[:, None]), 0.0)
    for _ in range(2):
        g, j = entries.point_E, entries.stage_E
        first_work = entries.forward_EV[:, 0] + entries.backward_EV[:, 0]
        at = (g, j)
        least_first, least_work, least_optimizer = (np.full((count, width), np.inf) for _ in range(3))
        np.minimum.at(least_first, at, first_work)
        np.minimum.at(least_work, at, entries.work_E)
        np.minimum.at(least_optimizer, at, entries.optimizer_E)
        dead_G = (np.isinf(least_work) & real_GJ).any(axis=1)
        optimizer_G = np.where(real_GJ, least_optimizer, 0.0).max(axis=1)
        before = np.where(real_GJ, least_first, 0.0) + 2.0 * send_GJ
        prefix_GJ = np.cumsum(before, axis=1) - before
        whole_G = np.where(real_GJ, least_work, 0.0).sum(axis=1) + 2.0 * send_GJ.sum(axis=1)
        busy = prefix_GJ[at] + microbatches_G[g] * entries.work_E + held_GJ[at]
        trip = whole_G[g] - least_work[at] + entries.work_E
        again = microbatches_G[g] - 1
        trip = trip + again * (entries.backward_EV[:, 0] + send_GJ[at] + left_GJ[at])
        trip = trip + (again - np.minimum(ahead_GJ[at], again)) * entries.forward_EV[:, 0]
        trip = np.where(flat_G[g], trip, 0.0)
        bound_E = np.maximum(busy, trip) + optimizer_G[g]
        low, high = np.full((count, width), 10**9), np.zeros((count, width), np.int64)
        alive = (bound_E <= below * (1 + EPS)) & ~dead_G[g]
        np.minimum.at(low, (g[alive], j[alive]), entries.layers_E[alive])
        np.maximum.at(high, (g[alive], j[alive]), entries.layers_E[alive])
        missing_G = ((low > layers) & real_GJ).any(axis=1)
        low = np.where(real_GJ, low, 0)
        total_low, total_high = low.sum(axis=1), high.sum(axis=1)
        dead_G = dead_G | missing_G | (total_low > layers) | (total_high < layers)
        alive &= ~dead_G[g]
        alive &= entries.layers_E + (total_low - np.minimum(low.sum(axis=1), total_low))[g] >= 0
        reach_high = total_high[g] - high[at] + entries.layers_E >= layers
        reach_low = total_low[g] - low[at] + entries.layers_E <= layers
        alive &= reach_high & reach_low
        bound_GJ = np.full((count, width), np.inf)
        np.minimum.at(bound_GJ, (g[alive], j[alive]), bound_E[alive])
        point_bound_G = np.where(real_GJ, bound_GJ, 0.0).max(axis=1)
        entries = entries.take(alive)
    return entries, np.where(dead_G, np.inf, point_bound_G)
