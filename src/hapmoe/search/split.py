"""The best layer split of one grid point, exactly.

Every stage's cost for every number of layers comes first (with the cheapest recomputation that
fits); then all splits whose bound is below the best step known are listed, stage by stage, pruned
by prefix bounds; the survivors are scored with the exact timeline, cheapest bound first.

Array legend: X candidates, J stages, V virtual stages, L number of layers of a stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import msgspec
import numpy as np
from numpy.typing import NDArray

from hapmoe.options import FloatArray, IntArray
from hapmoe.plan import Recompute
from hapmoe.resolve import chunk_layers
from hapmoe.schedule import in_flight, interleaved_ends, one_f_one_b_ends
from hapmoe.search.bounds import EPS, pipeline_bound
from hapmoe.search.problem import Point, Problem
from hapmoe.stagecost import Costs, Slots, stage_costs

__all__ = ["MOST_SPLITS", "Solution", "solve_point"]

MOST_SPLITS = 200_000
"""Splits of one grid point that are listed at once; beyond it the point stays open (the gap says so)."""

BATCH = 256


@dataclass(frozen=True, slots=True)
class Solution:
    """The best split of a grid point; ``choices`` are (menu entry, block count) per stage."""

    step_s: float
    layers: tuple[int, ...]
    choices: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class _Setting:
    """What stays the same for all splits of a grid point."""

    problem: Problem
    point: Point
    pool_J: tuple[int, ...]
    send_J: FloatArray
    microbatches: int
    group: int
    extra: int

    @property
    def pp(self) -> int:
        return len(self.pool_J)


def solve_point(
    problem: Problem, point: Point, below: float, floor: float, equal_layers: bool = False, equal_recompute: bool = False
) -> tuple[Solution | None, bool]:
    """The best split with a step below ``below``, or None; and whether the search of it was complete.

    ``floor``: a lower bound of this point, from which the window of bounds is widened.
    """
    setting = _setting(problem, point)
    if equal_recompute:
        return _solve_equal(setting, below), True
    layers = problem.job.model.num_layers
    pp, vpp = setting.pp, point.vpp
    if pp * vpp > layers or (equal_layers and layers % (pp * vpp)):
        return None, True
    table = _cost_table(setting, equal_layers)
    window = min(below, max(floor, 0.0) * 1.01 + 1e-12)
    while True:
        splits = _list_splits(setting, table, window)
        if splits is None:
            return None, False
        found = _best_of(setting, table, splits, window) if len(splits) else None
        if found is not None or window >= below:
            return found, True
        window = min(below, window * 1.05) if np.isfinite(window) else below
        if not np.isfinite(below) and window > 64 * max(floor, 1e-9):
            window = below


def _solve_equal(setting: _Setting, below: float) -> Solution | None:
    """Equal layers and one recomputation on all stages: the cheapest that fits everywhere."""
    problem, pp, vpp = setting.problem, setting.pp, setting.point.vpp
    layers = problem.job.model.num_layers
    if layers % (pp * vpp):
        return None
    each = layers // pp
    rows = np.asarray(chunk_layers((each,) * pp, vpp), np.int64)
    stages = np.arange(pp)
    menu = problem.tables[0].menu
    blocks = [msgspec.structs.replace(menu[-1], num_layers=n) for n in range(1, each // vpp + 1)]
    best: Solution | None = None
    for fixed in (*menu[:-1], *blocks):
        if not problem.allowed[-1 if fixed.granularity == "full" else menu.index(fixed)]:
            continue
        forward, backward = np.zeros((1, pp, vpp)), np.zeros((1, pp, vpp))
        sync, optimizer, fits = np.zeros((1, pp)), np.zeros((1, pp)), True
        for at, costs in _price_rows(setting, stages, rows[:, :, 0], rows[:, :, 1], fixed):
            forward[0, at], backward[0, at], sync[0, at] = costs.forward_XV, costs.backward_XV, costs.sync_X
            optimizer[0, at] = costs.optimizer_X
            fits = fits and bool(costs.fits_X.all())
        if not fits:
            continue
        bound = pipeline_bound(forward, backward, setting.send_J, setting.microbatches)[0] + optimizer.max()
        if bound < (best.step_s if best else below):
            step = float(_score(setting, forward, backward, sync)[0] + optimizer.max())
            if step < (best.step_s if best else below):
                entry = len(menu) - 1 if fixed.granularity == "full" else menu.index(fixed)
                choice = (entry, fixed.num_layers)
                best = Solution(step, (each,) * pp, (choice,) * pp)
    return best


def _setting(problem: Problem, point: Point) -> _Setting:
    placement = problem.space.placements[point.placement]
    options, training = problem.space.options, problem.job.training
    per_step = int(options.mbs_K[point.option] * options.dp_K[point.option])
    return _Setting(
        problem,
        point,
        placement.pool_of_stage,
        np.asarray(problem.point_sends(point)),
        training.global_batch_size // per_step,
        training.microbatch_group_size or placement.pp,
        int(training.overlap_moe_comm),
    )


@dataclass(frozen=True, slots=True)
class _Table:
    """Cost of every stage for every number of layers; infinite where it does not fit.

    Exact where all layers cost the same; else of the lightest run of layers that the stage could
    hold, hence a lower bound, and candidates are priced again with their own layers.
    """

    exact: bool
    forward_JLV: FloatArray
    backward_JLV: FloatArray
    sync_JL: FloatArray
    optimizer_JL: FloatArray
    choice_JL: IntArray
    block_JL: IntArray
    work_JL: FloatArray


def _flights(setting: _Setting, stages: IntArray) -> IntArray:
    vectors = [
        in_flight(setting.pp, setting.point.vpp, int(stage), setting.microbatches, setting.group, setting.extra)
        for stage in range(setting.pp)
    ]
    deepest = max(len(rows) for rows in vectors)
    padded = np.asarray([[*rows, *[rows[-1]] * (deepest - len(rows))] for rows in vectors], np.int64)
    return padded[stages]


def _slots(setting: _Setting, stages: IntArray, start_XV: IntArray, count_XV: IntArray) -> Slots:
    return Slots(start_XV, count_XV, _flights(setting, stages), stages == 0, stages == setting.pp - 1)


def _price_rows(
    setting: _Setting, stages: IntArray, start_XV: IntArray, count_XV: IntArray, fixed: Recompute | None = None
) -> list[tuple[IntArray, Costs]]:
    """Costs of rows, pool by pool, with the rows that they belong to."""
    problem, pools = setting.problem, np.asarray(setting.pool_J)
    priced = []
    for pool in dict.fromkeys(setting.pool_J):
        rows = np.flatnonzero(pools[stages] == pool)
        slots = _slots(setting, stages[rows], start_XV[rows], count_XV[rows])
        costs = stage_costs(
            problem.job, problem.tables[pool], setting.point.option, slots, problem.prefix_CN, fixed, problem.allowed
        )
        priced.append((rows, costs))
    return priced


def _cost_table(setting: _Setting, equal_layers: bool) -> _Table:
    problem, pp, vpp = setting.problem, setting.pp, setting.point.vpp
    layers = problem.job.model.num_layers
    exact = len(problem.prefix_CN) == 1
    most = layers - (pp - 1) * vpp
    counts = np.asarray([layers // pp]) if equal_layers else np.arange(vpp, most + 1)
    stages, number = np.repeat(np.arange(pp), len(counts)), np.tile(counts, pp)
    count_XV = (number[:, None] + np.arange(vpp)) // vpp
    relaxed = np.zeros(len(stages), bool)
    start_XV = np.zeros_like(count_XV)
    if not exact:
        row, start_XV, relaxed = _runs(setting, stages, count_XV)
        stages, number, count_XV = stages[row], number[row], count_XV[row]
    shape = (pp, most + 1)
    forward, backward = np.full((*shape, vpp), np.inf), np.full((*shape, vpp), np.inf)
    sync, optimizer = np.full(shape, np.inf), np.full(shape, np.inf)
    choice, block = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    for rows, costs in _price_rows(setting, stages, start_XV, count_XV):
        at = (stages[rows], number[rows])
        fits = costs.fits_X | relaxed[rows]
        chunk_extra = np.where(relaxed[rows], costs.recompute_X, 0.0)[:, None] / vpp
        # minimum.at: several runs of layers may stand for one number of layers
        np.minimum.at(forward, at, np.where(fits[:, None], costs.forward_XV, np.inf))
        np.minimum.at(backward, at, np.where(fits[:, None], costs.backward_XV - chunk_extra, np.inf))
        np.minimum.at(sync, at, np.where(relaxed[rows], 0.0, costs.sync_X))
        np.minimum.at(optimizer, at, np.where(relaxed[rows], 0.0, costs.optimizer_X))
        choice[at], block[at] = costs.choice_X, costs.block_X
    work = forward.sum(axis=2) + backward.sum(axis=2)
    return _Table(exact, forward, backward, sync, optimizer, choice, block, work)


MOST_RUNS = 12
"""Different runs of layers that one stage may hold, priced each; beyond it a weaker bound stands in."""


def _runs(setting: _Setting, stages: IntArray, count_XV: IntArray) -> tuple[IntArray, IntArray, NDArray[np.bool_]]:
    """Every distinct run of layers that a stage could hold: (row it belongs to, starts [., V], relaxed).

    Chunk c of stage i comes after at least c * pp + i layers and before as many as chunks follow.
    A row is relaxed where there are too many combinations: then only the lightest run of each chunk
    is priced, and recomputation and memory are left out of it.
    """
    problem, pp, vpp = setting.problem, setting.pp, setting.point.vpp
    prefix = problem.prefix_CN
    layers = prefix.shape[1] - 1
    pattern = np.diff(prefix, axis=1).argmax(axis=0).astype(np.uint8).tobytes()
    cache: dict[tuple[int, int], list[int]] = {}

    def distinct(place: int, count: int) -> list[int]:
        if (place, count) not in cache:
            latest = 0 if place == 0 else layers - count - (pp * vpp - 1 - place)
            earliest = layers - count if place == pp * vpp - 1 else place
            starts: dict[bytes, int] = {}
            for start in range(earliest, max(latest, earliest) + 1):
                starts.setdefault(pattern[start : start + count], start)
            cache[place, count] = list(starts.values())
        return cache[place, count]

    row_of, starts_of, relaxed = [], [], []
    for row, stage in enumerate(stages):
        options = [distinct(chunk * pp + int(stage), int(count_XV[row, chunk])) for chunk in range(vpp)]
        many = int(np.prod([float(len(starts)) for starts in options])) > MOST_RUNS
        if many:
            table = problem.tables[setting.pool_J[stage]]
            weights = table.forward_CK[:, setting.point.option] + table.backward_CK[:, setting.point.option]
            lightest = []
            for chunk, starts in enumerate(options):
                begin = np.asarray(starts)
                work = weights @ (prefix[:, begin + count_XV[row, chunk]] - prefix[:, begin])
                lightest.append([starts[int(work.argmin())]])
            options = lightest
        for combination in product(*options):
            row_of.append(row)
            starts_of.append(combination)
            relaxed.append(many)
    return np.asarray(row_of, np.int64), np.asarray(starts_of, np.int64), np.asarray(relaxed, bool)


def _list_splits(setting: _Setting, table: _Table, window: float) -> IntArray | None:
    """[X, J] layers per stage of every split whose prefix bounds stay below ``window``; None: too many."""
    pp, vpp, microbatches = setting.pp, setting.point.vpp, setting.microbatches
    layers = setting.problem.job.model.num_layers
    send = setting.send_J
    flat = vpp == 1 and microbatches >= pp
    right = np.append(send[: pp - 1], 0.0) if flat else np.zeros(pp)
    left = np.concatenate([[0.0], right[:-1]])
    warmup = pp - 1.0 - np.arange(pp)
    held = microbatches * (right + left) + warmup * right + np.where(np.arange(pp) > 0, (warmup - 1) * left, 0.0)
    least_optimizer = float(table.optimizer_JL[np.isfinite(table.work_JL)].min(initial=np.inf))
    if not np.isfinite(least_optimizer):
        return np.zeros((0, pp), np.int64)
    limit = (window - least_optimizer) * (1 + EPS)
    work = table.work_JL
    first_work = work if vpp == 1 else table.forward_JLV[:, :, 0] + table.backward_JLV[:, :, 0]
    least_prefix = np.minimum.accumulate(np.where(np.isfinite(work), first_work, np.inf)[:, ::-1], axis=1)[:, ::-1].min(axis=1)
    prefix_floor = np.concatenate([[0.0], np.cumsum(least_prefix + 2.0 * send[:pp])[:-1]])
    if vpp == 1 and microbatches < pp:
        prefix_floor = np.zeros(pp)
    usable = microbatches * work + (prefix_floor + held)[:, None] <= limit
    if flat:
        # round trip: all stages once, then this one for every further microbatch
        floor_all = np.where(np.isfinite(work), work, np.inf).min(axis=1)
        others = max(_least_work(setting, table), float(floor_all.sum())) + 2.0 * send[: pp - 1].sum()
        trip = (microbatches - 1) * (work + (right + left)[:, None]) - warmup[:, None] * table.forward_JLV[:, :, 0]
        usable &= others + trip <= limit
    if not usable.any(axis=1).all():
        return np.zeros((0, pp), np.int64)
    lowest = usable.argmax(axis=1)
    highest = usable.shape[1] - 1 - usable[:, ::-1].argmax(axis=1)
    rest_low = np.concatenate([np.cumsum(lowest[::-1])[::-1][1:], [0]])
    rest_high = np.concatenate([np.cumsum(highest[::-1])[::-1][1:], [0]])
    chosen = np.zeros((1, 0), np.int64)
    used, prefix = np.zeros(1, np.int64), np.zeros(1)
    for stage in range(pp):
        counts = np.flatnonzero(usable[stage])
        total = used[:, None] + counts[None, :]
        fits = (total + rest_low[stage] <= layers) & (total + rest_high[stage] >= layers)
        if not (vpp == 1 and microbatches < pp):
            bound = prefix[:, None] + microbatches * work[stage, counts][None, :] + held[stage]
            fits &= bound <= limit
        row, column = np.nonzero(fits)
        if len(row) > MOST_SPLITS:
            return None
        number = counts[column]
        chosen = np.concatenate([chosen[row], number[:, None]], axis=1)
        used = total[row, column]
        prefix = prefix[row] + first_work[stage, number] + 2.0 * send[stage] * (stage < pp - 1)
    return chosen


def _least_work(setting: _Setting, table: _Table) -> float:
    """At least the sum of all stages' work, from the cheapest work per layer of any stage."""
    counts = np.arange(table.work_JL.shape[1])
    with np.errstate(divide="ignore", invalid="ignore"):
        rate = np.where(np.isfinite(table.work_JL) & (counts > 0), table.work_JL / counts, np.inf).min()
    return float(rate * setting.problem.job.model.num_layers) if np.isfinite(rate) else 0.0


def _best_of(setting: _Setting, table: _Table, splits: IntArray, window: float) -> Solution | None:
    """The best of the listed splits with a step of at most ``window``."""
    pp = setting.pp
    stage = np.arange(pp)
    if table.exact:
        at = (stage[None, :], splits)
        forward, backward = table.forward_JLV[at], table.backward_JLV[at]
        sync, optimizer, choice, block = table.sync_JL[at], table.optimizer_JL[at], table.choice_JL[at], table.block_JL[at]
    else:
        keep, (forward, backward, sync, optimizer, choice, block) = _price_splits(setting, splits)
        splits = splits[keep]
    if not len(splits):
        return None
    after = optimizer.max(axis=1)
    bound = pipeline_bound(forward, backward, setting.send_J, setting.microbatches) + sync[:, 0] + after
    order = np.flatnonzero(bound <= window * (1 + EPS))
    order = order[np.argsort(bound[order], kind="stable")]
    best, best_at = np.inf, -1
    size = 8
    while len(order):
        batch, order = order[:size], order[size:]
        if bound[batch[0]] >= best:
            break
        steps = _score(setting, forward[batch], backward[batch], sync[batch]) + after[batch]
        lowest = int(steps.argmin())
        if steps[lowest] < best:
            best, best_at = float(steps[lowest]), int(batch[lowest])
        size = BATCH
    if best_at < 0 or best > window:
        return None
    choices = tuple(zip(choice[best_at].tolist(), block[best_at].tolist(), strict=True))
    return Solution(best, tuple(splits[best_at].tolist()), choices)


def _price_splits(setting: _Setting, splits: IntArray) -> tuple[IntArray, tuple[FloatArray, ...]]:
    """Costs of splits with the layers that each stage really gets; only splits that fit."""
    pp, vpp = setting.pp, setting.point.vpp
    rows = np.asarray([chunk_layers(tuple(split), vpp) for split in splits.tolist()], np.int64)
    flat = rows.reshape(len(splits) * pp, vpp, 2)
    stages = np.tile(np.arange(pp), len(splits))
    unique, inverse = np.unique(np.concatenate([stages[:, None], flat.reshape(len(flat), -1)], axis=1), axis=0, return_inverse=True)
    inverse = inverse.reshape(-1)
    which = unique[:, 0]
    chunks = unique[:, 1:].reshape(len(unique), vpp, 2)
    forward, backward = np.zeros((len(unique), vpp)), np.zeros((len(unique), vpp))
    sync, optimizer, fits = np.zeros(len(unique)), np.zeros(len(unique)), np.zeros(len(unique), bool)
    choice, block = np.zeros(len(unique), np.int64), np.zeros(len(unique), np.int64)
    for at, costs in _price_rows(setting, which, chunks[:, :, 0], chunks[:, :, 1]):
        forward[at], backward[at], sync[at] = costs.forward_XV, costs.backward_XV, costs.sync_X
        optimizer[at], fits[at], choice[at], block[at] = costs.optimizer_X, costs.fits_X, costs.choice_X, costs.block_X
    shape = (len(splits), pp)
    keep = np.flatnonzero(fits[inverse].reshape(shape).all(axis=1))
    arrays = tuple(
        values[inverse].reshape(*shape, *values.shape[1:])[keep] for values in (forward, backward, sync, optimizer, choice, block)
    )
    return keep, arrays


def _score(setting: _Setting, forward_XJV: FloatArray, backward_XJV: FloatArray, sync_XJ: FloatArray) -> FloatArray:
    """[X] end of the pipeline with gradient sync, on the exact timeline."""
    pp, vpp, count = setting.pp, setting.point.vpp, len(forward_XJV)
    send = setting.send_J.tolist()
    if count <= 24:
        steps = np.zeros(count)
        for x in range(count):
            if vpp == 1:
                ends = one_f_one_b_ends(
                    forward_XJV[x, :, 0].tolist(), backward_XJV[x, :, 0].tolist(), send, setting.microbatches
                )
            else:
                ends = interleaved_ends(
                    forward_XJV[x].tolist(), backward_XJV[x].tolist(), send, setting.microbatches, setting.group, extra=setting.extra
                )
            steps[x] = max(end + wait for end, wait in zip(ends, sync_XJ[x].tolist(), strict=True))
        return steps
    forward = [[forward_XJV[:, j, v] for v in range(vpp)] for j in range(pp)]
    backward = [[backward_XJV[:, j, v] for v in range(vpp)] for j in range(pp)]
    if vpp == 1:
        ends = one_f_one_b_ends(
            [row[0] for row in forward], [row[0] for row in backward], send, setting.microbatches, maximum=np.maximum
        )
    else:
        ends = interleaved_ends(
            forward, backward, send, setting.microbatches, setting.group, extra=setting.extra, maximum=np.maximum
        )
    return np.asarray(np.max([end + sync_XJ[:, j] for j, end in enumerate(ends)], axis=0))
