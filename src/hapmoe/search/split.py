"""The best layer split of one grid point, exactly.

All splits whose prefix bounds stay below the best step known are listed, stage by stage; those whose
own bound does too are scored with the exact timeline, cheapest bound first.

Array legend: X candidates, J stages, V virtual stages, E entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hapmoe.options import FloatArray, IntArray
from hapmoe.resolve import chunk_layers
from hapmoe.schedule import interleaved_ends, one_f_one_b_ends
from hapmoe.search.bounds import EPS, pipeline_bound
from hapmoe.search.entries import Entries, price_rows
from hapmoe.search.problem import Problem, Setting
from hapmoe.search.rows import distinct_rows
from hapmoe.search.suffix import Floors, floors_of

__all__ = ["Ready", "Solution", "best_equal", "best_split", "ready_for", "relaxed_s"]

MOST_ENTRIES = 3_000_000
"""Stages of splits of one grid point that are listed at once; beyond it only the best BEAM are followed
and the point stays open (the gap says so)."""

BEAM, QUICK_BEAM = 2000, 48

FEW = 24
"""Up to so many candidates are scored one by one; more are scored side by side in arrays."""

BATCH = 256


@dataclass(frozen=True, slots=True)
class Solution:
    """The best split of a grid point; ``choices`` are (menu entry, block count) per stage."""

    step_s: float
    layers: tuple[int, ...]
    choices: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Ready:
    """A grid point that may have a split: its entries stage by stage, what suffixes of stages cost, a lower bound."""

    stages: tuple[Entries, ...]
    floors: Floors
    floor_s: float


def ready_for(problem: Problem, setting: Setting, entries: Entries, below: float, floor: float) -> Ready | None:
    """What ``best_split`` needs; None where no split can have a step below ``below``.

    ``floor``: a lower bound of this point.
    """
    stages = tuple(entries.take(entries.stage_E == stage) for stage in range(setting.pp))
    if not all(len(stage.layers_E) for stage in stages):
        return None
    layers = problem.job.model.num_layers
    floors = floors_of(setting, stages, layers)
    bound, _ = _extended(setting, stages, floors, layers, _Partial.none(), 0)
    floor = max(floor, float(bound.min()) + floors.after_s)
    return Ready(stages, floors, floor) if floor < below else None


def relaxed_s(setting: Setting, ready: Ready) -> float:
    """The step if every stage took the least of all its entries: no split is faster."""
    forward = np.asarray([[stage.forward_EV.min(axis=0) for stage in ready.stages]])
    backward = np.asarray([[stage.backward_EV.min(axis=0) for stage in ready.stages]])
    sync = np.asarray([[stage.sync_E.min() for stage in ready.stages]])
    return float(score(setting, forward, backward, sync)[0]) + ready.floors.after_s


def best_split(
    problem: Problem, setting: Setting, ready: Ready, floor: float, below: float, quick: bool = False
) -> tuple[Solution | None, float]:
    """The best split with a step below ``below``, or None; and what an unlisted split could still
    take at the least (infinite: all were looked at).

    ``floor``: a lower bound of all of them. ``quick``: a good split without proof.
    """
    layers = problem.job.model.num_layers
    stages, floors = ready.stages, ready.floors
    # A narrow beam first: its best split is the window within which all others are listed.
    splits, complete = _list_splits(setting, stages, floors, layers, below, QUICK_BEAM)
    best = _best_of(problem, setting, stages, splits, below) if len(splits) else None
    if complete or (best is not None and best.step_s <= floor * (1 + EPS)):
        return best, np.inf
    if best is not None:
        best = _climb(problem, setting, stages, best)
    if quick:
        return best, floor
    window = best.step_s if best else below
    splits, complete = _list_splits(setting, stages, floors, layers, window)
    better = _best_of(problem, setting, stages, splits, window) if len(splits) else None
    return better or best, np.inf if complete else floor


def _list_splits(
    setting: Setting, stages: Sequence[Entries], floors: Floors, layers: int, window: float, beam: int = 0
) -> tuple[IntArray, bool]:
    """[X, J] entry per stage of every split whose bounds stay below ``window``; False: only of the
    most promising, there are too many.

    A partial split is bounded by what its stages cost and what the floors say of the rest. ``beam``:
    follow only so many at a time.
    """
    limit = (window - floors.after_s) * (1 + EPS)
    complete = True
    chosen = np.zeros((1, 0), np.int64)
    partial = _Partial.none()
    for index, stage in enumerate(stages):
        bound, left = _extended(setting, stages, floors, layers, partial, index)
        row, column = np.nonzero(np.isfinite(bound) & (bound <= limit))
        most = beam or (BEAM if len(row) * (index + 1) > MOST_ENTRIES else len(row))
        if len(row) > most:
            complete = False
            best = np.argsort(bound[row, column], kind="stable")[:most]
            row, column = row[best], column[best]
        chosen = np.concatenate([chosen[row], column[:, None]], axis=1)
        back = floors.back[index][column]
        partial = _Partial(
            used=layers - left[row, column],
            lead=partial.lead[row] + floors.there[index][column],
            drain=np.maximum(partial.drain[row], stage.sync_E[column]) + back,
            round=partial.round[row] + floors.round[index][column],
            turned=np.maximum(partial.turned[row], floors.turn[index][column]),
        )
    return chosen, complete


@dataclass(frozen=True, slots=True)
class _Partial:
    """X splits of the first stages."""

    used: IntArray
    """Layers."""
    lead: FloatArray
    """Seconds until the next stage has its first microbatch."""
    drain: FloatArray
    """Seconds from the end of the next stage's last backward pass to that of all gradient reductions."""
    round: FloatArray
    turned: FloatArray

    @classmethod
    def none(cls) -> _Partial:
        return cls(np.zeros(1, np.int64), np.zeros(1), np.zeros(1), np.zeros(1), np.full(1, -np.inf))


def _extended(
    setting: Setting, stages: Sequence[Entries], floors: Floors, layers: int, partial: _Partial, index: int
) -> tuple[FloatArray, IntArray]:
    """[X, E] bounds on the end of the gradient reductions if stage ``index`` is entry E, infinite where
    the layers cannot add up; and the layers that are left then."""
    stage = stages[index]
    left = layers - (partial.used[:, None] + stage.layers_E[None, :])
    rest = np.clip(left, 0, layers)
    lead, drain = partial.lead[:, None], np.maximum(partial.drain[:, None], stage.sync_E)
    behind = lead + floors.there[index]
    bound = np.maximum(lead + floors.busy[index] + drain, behind + floors.own_JN[index + 1, rest])
    bound = np.maximum(bound, behind + floors.back[index] + drain + floors.busy_JN[index + 1, rest])
    least = floors.sum_JN[index + 1, rest]
    whole = partial.round[:, None] + floors.round[index] + least + floors.trips_s
    turn = np.maximum(partial.turned[:, None], floors.turn[index])
    bound = np.maximum(bound, whole + np.maximum(turn, floors.turn_JN[index + 1, rest]))
    return np.where((left >= 0) & np.isfinite(least), bound, np.inf), left


@dataclass(frozen=True, slots=True)
class _Candidates:
    """X splits with the costs of their stages."""

    layers_XJ: IntArray
    forward_XJV: FloatArray
    backward_XJV: FloatArray
    sync_XJ: FloatArray
    optimizer_XJ: FloatArray
    choice_XJ: IntArray
    block_XJ: IntArray


def _best_of(
    problem: Problem, setting: Setting, stages: Sequence[Entries], splits: IntArray, window: float
) -> Solution | None:
    """The best of the listed splits with a step of at most ``window``."""
    candidates = _from_entries(stages, splits)
    if len(problem.prefix_CN) == 1:
        return _score_best(setting, candidates, window)
    # Entries only bound the cost of layers that are not all alike: price the real ones, best bound first.
    bound = _bound(setting, candidates)
    order = np.flatnonzero(bound <= window * (1 + EPS))
    order = order[np.argsort(bound[order], kind="stable")]
    best: Solution | None = None
    size = 16
    while len(order) and bound[order[0]] <= window:
        batch, order = order[:size], order[size:]
        size = BATCH
        found = _score_best(setting, _price_splits(problem, setting, candidates.layers_XJ[batch]), window)
        if found is not None:
            best, window = found, found.step_s
    return best


def _climb(problem: Problem, setting: Setting, stages: Sequence[Entries], best: Solution) -> Solution:
    """Move one layer at a time from one stage to another as long as that is faster."""
    known = [set(stage.layers_E.tolist()) for stage in stages]
    while True:
        moved = []
        for giver, taker in permutations(range(setting.pp), 2):
            split = list(best.layers)
            split[giver] -= 1
            split[taker] += 1
            if split[giver] in known[giver] and split[taker] in known[taker]:
                moved.append(split)
        if not moved:
            return best
        splits = np.asarray(moved)
        better = _score_best(setting, _price_splits(problem, setting, splits), best.step_s)
        if better is None or better.step_s >= best.step_s * (1 - EPS):
            return best
        best = better


def _bound(setting: Setting, candidates: _Candidates) -> FloatArray:
    c = candidates
    times = c.forward_XJV, c.backward_XJV, setting.send_J, setting.microbatches, c.sync_XJ
    end = pipeline_bound(*times, setting.group, setting.extra)
    bound: FloatArray = end + c.optimizer_XJ.max(axis=1)
    return bound


def _score_best(setting: Setting, candidates: _Candidates, window: float) -> Solution | None:
    """The best candidate on the exact timeline, if its step is at most ``window``."""
    if not len(candidates.layers_XJ):
        return None
    forward, backward = candidates.forward_XJV, candidates.backward_XJV
    after = candidates.optimizer_XJ.max(axis=1)
    bound = _bound(setting, candidates)
    order = np.flatnonzero(bound <= window * (1 + EPS))
    order = order[np.argsort(bound[order], kind="stable")]
    best, best_at = np.inf, -1
    size = 8
    while len(order):
        batch, order = order[:size], order[size:]
        if bound[batch[0]] >= best:
            break
        steps = score(setting, forward[batch], backward[batch], candidates.sync_XJ[batch]) + after[batch]
        lowest = int(steps.argmin())
        if steps[lowest] < best:
            best, best_at = float(steps[lowest]), int(batch[lowest])
        size = BATCH
    if best_at < 0 or best > window:
        return None
    choices = zip(candidates.choice_XJ[best_at].tolist(), candidates.block_XJ[best_at].tolist(), strict=True)
    return Solution(best, tuple(candidates.layers_XJ[best_at].tolist()), tuple(choices))


def _from_entries(stages: Sequence[Entries], splits: IntArray) -> _Candidates:
    def column(name: str) -> NDArray[Any]:
        return np.stack([getattr(stage, name)[splits[:, j]] for j, stage in enumerate(stages)], axis=1)

    return _Candidates(
        column("layers_E"),
        column("forward_EV"),
        column("backward_EV"),
        column("sync_E"),
        column("optimizer_E"),
        column("choice_E"),
        column("block_E"),
    )


def _price_splits(problem: Problem, setting: Setting, layers_XJ: IntArray) -> _Candidates:
    """Costs of splits with the layers that each stage really gets: only those that fit, one candidate
    for every combination of incomparable recomputations."""
    pp, vpp = setting.pp, setting.vpp
    layers_XJ, _ = distinct_rows(layers_XJ)
    # as ``resolve.chunk_layers``: chunk after chunk, stage after stage
    count_XVJ = (layers_XJ[:, None, :] + np.arange(vpp)[:, None]) // vpp
    flat = count_XVJ.reshape(len(layers_XJ), vpp * pp)
    start_XVJ = (np.cumsum(flat, axis=1) - flat).reshape(count_XVJ.shape)
    stage_XJ = np.tile(np.arange(pp), (len(layers_XJ), 1))
    columns = [stage_XJ[:, None, :], start_XVJ, count_XVJ]
    unique, inverse = distinct_rows(np.concatenate(columns, axis=1).swapaxes(1, 2).reshape(-1, 1 + 2 * vpp))
    nowhere = np.zeros(len(unique), np.int64)
    costs = price_rows(problem, [setting], nowhere, unique[:, 0], unique[:, 1 : 1 + vpp], unique[:, 1 + vpp :])
    fits = np.flatnonzero(costs.fits_X)
    order = fits[np.argsort(costs.row_X[fits], kind="stable")]
    row = costs.row_X[order]
    begin, end = (
        np.searchsorted(row, np.arange(len(unique))),
        np.searchsorted(row, np.arange(len(unique)), side="right"),
    )
    where = inverse.reshape(len(layers_XJ), pp)
    # one stage after the other: every candidate branches into the ways its stage can recompute
    split = np.arange(len(layers_XJ))
    picked = np.zeros((len(layers_XJ), 0), np.int64)
    for stage in range(pp):
        at = where[split, stage]
        many = end[at] - begin[at]
        branch = np.repeat(np.arange(len(split)), many)
        offset = np.arange(len(branch)) - np.repeat(np.cumsum(many) - many, many)
        picked = np.concatenate([picked[branch], (begin[at][branch] + offset)[:, None]], axis=1)
        split = split[branch]
    entry = order[picked]
    return _Candidates(
        layers_XJ[split],
        costs.forward_XV[entry],
        costs.backward_XV[entry],
        costs.sync_X[entry],
        costs.optimizer_X[entry],
        costs.choice_X[entry],
        costs.block_X[entry],
    )


def score(setting: Setting, forward_XJV: FloatArray, backward_XJV: FloatArray, sync_XJ: FloatArray) -> FloatArray:
    """[X] end of the pipeline with gradient sync, on the exact timeline."""
    vpp = setting.vpp
    if len(forward_XJV) > FEW:
        forward = [[forward_XJV[:, j, v] for v in range(vpp)] for j in range(setting.pp)]
        backward = [[backward_XJV[:, j, v] for v in range(vpp)] for j in range(setting.pp)]
        ends = _ends(setting, forward, backward, np.maximum)
        return np.asarray(np.max([end + sync_XJ[:, j] for j, end in enumerate(ends)], axis=0))
    steps = np.zeros(len(forward_XJV))
    for x in range(len(steps)):
        ends = _ends(setting, forward_XJV[x].tolist(), backward_XJV[x].tolist(), max)
        steps[x] = max(end + wait for end, wait in zip(ends, sync_XJ[x].tolist(), strict=True))
    return steps


def _ends(setting: Setting, forward: list[list[Any]], backward: list[list[Any]], maximum: Any) -> list[Any]:
    send = setting.send_J.tolist()
    if setting.vpp == 1:
        flat = [row[0] for row in forward], [row[0] for row in backward]
        return one_f_one_b_ends(*flat, send, setting.microbatches, maximum=maximum)
    return interleaved_ends(
        forward, backward, send, setting.microbatches, setting.group, extra=setting.extra, maximum=maximum
    )


def best_equal(problem: Problem, settings: Sequence[Setting], below: float) -> tuple[Setting, Solution] | None:
    """Of some grid points of one vpp, the best with equal layers and one recomputation on all stages."""
    layers, vpp = problem.job.model.num_layers, settings[0].vpp
    settings = [setting for setting in settings if layers % (setting.pp * vpp) == 0]
    if not settings:
        return None
    chunks = [np.asarray(chunk_layers((layers // s.pp,) * s.pp, vpp), np.int64) for s in settings]
    point = np.repeat(np.arange(len(settings)), [s.pp for s in settings])
    stage = np.concatenate([np.arange(s.pp) for s in settings])
    rows = np.concatenate(chunks)
    plain = len(problem.tables[0].menu) - 1
    options = plain + int(rows[:, :, 1].max())
    shape = (len(rows), options)
    forward, backward = np.zeros((*shape, vpp)), np.zeros((*shape, vpp))
    sync, optimizer, fits = np.zeros(shape), np.zeros(shape), np.zeros(shape, bool)
    costs = price_rows(problem, settings, point, stage, rows[:, :, 0], rows[:, :, 1], every=True)
    at = (costs.row_X, np.where(costs.choice_X == plain, plain + costs.block_X - 1, costs.choice_X))
    forward[at], backward[at], sync[at] = costs.forward_XV, costs.backward_XV, costs.sync_X
    optimizer[at], fits[at] = costs.optimizer_X, costs.fits_X
    allowed = np.asarray([*problem.allowed[:-1], *[problem.allowed[-1]] * (options - plain)])
    best: tuple[Setting, Solution] | None = None
    # All points at once first: where memory suffices, and M times the slowest stage is below the best.
    begin = np.searchsorted(point, np.arange(len(settings)))
    usable_GO = np.logical_and.reduceat(fits, begin, axis=0) & allowed
    slowest_GO = np.maximum.reduceat(forward.sum(axis=2) + backward.sum(axis=2), begin, axis=0)
    busy_GO = np.where(usable_GO, slowest_GO * np.asarray([[s.microbatches] for s in settings]), np.inf)
    for g in np.argsort(busy_GO.min(axis=1), kind="stable").tolist():
        setting = settings[g]
        usable = np.flatnonzero(busy_GO[g] < below)
        if not len(usable):
            continue
        mine = slice(int(begin[g]), int(begin[g]) + setting.pp)
        pick = [values[mine][:, usable].swapaxes(0, 1) for values in (forward, backward, sync, optimizer)]
        after = pick[3].max(axis=1)
        times = pick[0], pick[1], setting.send_J, setting.microbatches
        bound = pipeline_bound(*times, group=setting.group, extra=setting.extra) + pick[2][:, 0] + after
        for x in np.argsort(bound, kind="stable").tolist():
            if bound[x] >= below:
                break
            step = float(score(setting, pick[0][x : x + 1], pick[1][x : x + 1], pick[2][x : x + 1])[0] + after[x])
            if step < below:
                entry = min(int(usable[x]), plain)
                choice = (entry, int(usable[x]) - plain + 1 if entry == plain else 0)
                below, best = (
                    step,
                    (setting, Solution(step, (layers // setting.pp,) * setting.pp, (choice,) * setting.pp)),
                )
    return best
