"""From options to grid points: stage counts per pool, orders of pools, virtual stages.

Array legend: K options, G grid points, P pools.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hapmoe.options import FloatArray, IntArray
from hapmoe.search.bounds import EPS, count_bounds, heavy_class, round_s, round_trip_bound
from hapmoe.search.capacity import counts_suffice, pool_holds
from hapmoe.search.points import Points
from hapmoe.search.problem import Problem
from hapmoe.search.rows import distinct_rows
from hapmoe.search.space import count_vectors, legal_vpp, may_interleave

__all__ = ["distinct", "expand_counts", "expand_orders", "fullest_counts"]

FEW_VECTORS = 3000
"""Stage counts of one size that are listed once for all its options."""
MOST_VECTORS = 100_000
"""Stage counts of one option that are listed; beyond it the option stays open (the gap says so)."""
AT_ONCE = 64
"""Options of which every stage count is looked at, at once: what they take in memory."""
TOGETHER = 32_768
"""Stage counts bounded together: what they take in memory."""


def fullest_counts(problem: Problem, option_K: IntArray) -> tuple[IntArray, IntArray]:
    """A few promising stage counts per option: all pools, and the slowest left out one after the other.

    Returns option [G] and stages [G, P]; where there are fewer layers than stages the fastest pools go first.
    """
    space, layers = problem.space, problem.job.model.num_layers
    heavy, _ = heavy_class(problem)
    layer_KP = np.stack([t.forward_CK[heavy] + t.backward_CK[heavy] for t in problem.tables], axis=1)[option_K]
    order_KP = np.argsort(layer_KP, axis=1)
    most_KP = np.take_along_axis(space.most_KP[option_K], order_KP, axis=1)
    step_KP = np.take_along_axis(space.step_KP[option_K], order_KP, axis=1)
    options, stages = [], []
    for drop in range(most_KP.shape[1]):
        kept = most_KP * (np.arange(most_KP.shape[1]) < most_KP.shape[1] - drop)
        taken = np.zeros_like(kept)
        left = np.full(len(kept), layers)
        for slot in range(kept.shape[1]):
            step = np.maximum(step_KP[:, slot], 1)
            taken[:, slot] = np.minimum(kept[:, slot], left // step * step)
            left = left - taken[:, slot]
        vectors = np.zeros_like(taken)
        np.put_along_axis(vectors, order_KP, taken, axis=1)
        options.append(option_K)
        stages.append(vectors)
    return distinct(problem, np.concatenate(options), np.concatenate(stages))


def expand_counts(
    problem: Problem, option_K: IntArray, best_s: float, even: bool = False
) -> tuple[IntArray, IntArray, FloatArray, list[int]]:
    """All stage counts of some options whose bound is below ``best_s``; ``even``: only those that divide the layers.

    Returns option [G], stages [G, P], their bounds [G] in ascending order, and the options that have
    too many counts to list.
    """
    space, layers = problem.space, problem.job.model.num_layers
    parts = [(np.zeros(0, np.int64), np.zeros((0, len(problem.tables)), np.int64))]
    unlisted: list[int] = []
    usable_KP = _usable_pools(problem, option_K, best_s)
    most_KP = np.where(usable_KP, space.most_KP[option_K], 0)
    kinds, kind_of = distinct_rows(np.concatenate([space.step_KP[option_K], most_KP], axis=1))
    for kind, limits in enumerate(kinds):
        mine = option_K[kind_of == kind]
        step, most = limits[: len(problem.tables)], limits[len(problem.tables) :]
        vectors = count_vectors(most, step, np.zeros_like(most), layers, FEW_VECTORS)
        if vectors is not None:
            vectors = vectors[layers % vectors.sum(axis=1) == 0] if even else vectors
            parts.append(_roomy_enough(problem, mine, vectors, best_s))
            continue
        for k in mine.tolist():
            vectors = count_vectors(most, step, _fewest_stages(problem, k, most, best_s), layers, MOST_VECTORS)
            if vectors is None:
                unlisted.append(k)
            else:
                vectors = vectors[layers % vectors.sum(axis=1) == 0] if even else vectors
                parts.append(_roomy_enough(problem, np.asarray([k]), vectors, best_s))
    option, stages = (np.concatenate(column) for column in zip(*parts, strict=True))
    option, stages = distinct(problem, option, stages, unique=False)
    bound = np.full(len(option), np.inf)
    for begin in range(0, len(option), TOGETHER):
        some = slice(begin, begin + TOGETHER)
        bound[some] = count_bounds(problem, option[some], stages[some])
        low = np.flatnonzero(bound[some] < best_s) + begin
        if np.isfinite(best_s) and len(low):
            several = may_interleave(problem.job, stages[low].sum(axis=1), problem.microbatches_K[option[low]])
            enough = counts_suffice(problem, option[low], stages[low], np.where(several, 0, 1), best_s)
            bound[low[~enough]] = np.inf
    keep = np.flatnonzero(bound < best_s)
    keep = keep[np.argsort(bound[keep], kind="stable")]
    return option[keep], stages[keep], bound[keep], unlisted


def _usable_pools(problem: Problem, option_K: IntArray, best_s: float) -> NDArray[np.bool_]:
    """[K, P] could a stage of this pool with one layer of the lightest class keep below ``best_s``?"""
    light = round_s(problem, option_K).min(axis=0)
    usable: NDArray[np.bool_] = problem.microbatches_K[option_K][:, None] * light * (1 - EPS) <= best_s
    return usable


def _roomy_enough(problem: Problem, option_K: IntArray, vectors: IntArray, best_s: float) -> tuple[IntArray, IntArray]:
    """The pairs of options and stage counts whose pools, each by itself, hold the model within ``best_s``."""
    if not np.isfinite(best_s) or not len(option_K) or not len(vectors):
        row, column = (index.ravel() for index in np.indices((len(option_K), len(vectors))))
        return option_K[row], vectors[column]
    _, layers = heavy_class(problem)
    pairs = []
    for begin in range(0, len(option_K), AT_ONCE):
        some = option_K[begin : begin + AT_ONCE]
        held_KS = np.zeros((len(some), len(vectors)))
        for pool, stages_S in enumerate(vectors.T):
            number, which_S = np.unique(stages_S, return_inverse=True)
            option, stages = np.repeat(some, len(number)), np.tile(number, len(some))
            held = pool_holds(problem, pool, option, stages, best_s).reshape(len(some), -1)
            held_KS += held[:, which_S.ravel()]
        row, column = np.nonzero(held_KS >= layers)
        pairs.append((some[row], vectors[column]))
    option, stages = (np.concatenate(part) for part in zip(*pairs, strict=True))
    return option, stages


def _fewest_stages(problem: Problem, k: int, most: IntArray, best_s: float) -> IntArray:
    """[P] stages of a pool without which the others could not keep below ``best_s``."""
    most = np.minimum(most, problem.job.model.num_layers)
    if not np.isfinite(best_s):
        return np.zeros_like(most)
    heavy, layers = heavy_class(problem)
    layer = round_s(problem, np.asarray([k]))[heavy, 0]
    needed = layers * float(problem.microbatches_K[k]) / best_s
    rate = most / layer
    fewest: IntArray = np.ceil((needed - (rate.sum() - rate)) * layer * (1 - 1e-9)).astype(np.int64)
    return np.clip(fewest, 0, most)


def distinct(
    problem: Problem, option_G: IntArray, stages_GP: IntArray, unique: bool = True
) -> tuple[IntArray, IntArray]:
    """Without repetitions, and only what the pins allow."""
    layers = problem.job.model.num_layers
    total = stages_GP.sum(axis=1)
    keep = (total > 0) & (total <= layers)
    if problem.pins.degrees:
        allowed = np.asarray([problem.pins.allow("pp", pp) for pp in range(layers + 1)])
        keep &= allowed[np.clip(total, 0, layers)]
    if problem.pins.nodes:
        size_G = problem.space.options.devices_K[option_G]
        for p, pool in enumerate(problem.cluster.pools):
            nodes = -(-stages_GP[:, p] * size_G // pool.devices_per_node)
            fine = np.asarray([problem.pins.allow_nodes(pool.name, number) for number in range(pool.nodes + 1)])
            keep &= fine[np.clip(nodes, 0, pool.nodes)]
    option_G, stages_GP = option_G[keep], stages_GP[keep]
    if not unique or not len(option_G):
        return option_G, stages_GP
    rows, _ = distinct_rows(np.concatenate([option_G[:, None], stages_GP], axis=1))
    return rows[:, 0], rows[:, 1:]


def expand_orders(
    problem: Problem, option_G: IntArray, stages_GP: IntArray, bound_G: FloatArray, best_s: float = np.inf
) -> tuple[Points, FloatArray]:
    """Every number of virtual stages and order of some options with stage counts, with bounds, as far
    as these are below ``best_s``."""
    option, stages, vpp, bound = _expand_vpp(problem, option_G, stages_GP, bound_G, best_s)
    orders: dict[tuple[int, ...], list[int]] = {}
    row_of: list[int] = []
    order_of: list[int] = []
    for row, counts in enumerate(stages.tolist()):
        used = tuple(p for p, number in enumerate(counts) if number)
        if used not in orders:
            orders[used] = problem.space.orders_of(used)
        row_of += [row] * len(orders[used])
        order_of += orders[used]
    row_G = np.asarray(row_of, np.int64)
    points = Points(option[row_G], stages[row_G], np.asarray(order_of, np.int64), vpp[row_G])
    return points, bound[row_G]


def _expand_vpp(
    problem: Problem, option_G: IntArray, stages_GP: IntArray, bound_G: FloatArray, best_s: float
) -> tuple[IntArray, IntArray, IntArray, FloatArray]:
    chunks: dict[tuple[int, int], list[int]] = {}
    pp_G, microbatches_G = stages_GP.sum(axis=1), problem.microbatches_K[option_G]
    row_of: list[int] = []
    vpp_of: list[int] = []
    for row, key in enumerate(zip(pp_G.tolist(), microbatches_G.tolist(), strict=True)):
        if key not in chunks:
            chunks[key] = [vpp for vpp in legal_vpp(problem.job, *key) if problem.pins.allow("vpp", vpp)]
        row_of += [row] * len(chunks[key])
        vpp_of += chunks[key]
    row_G, vpp = np.asarray(row_of, np.int64), np.asarray(vpp_of, np.int64)
    option, stages = option_G[row_G], stages_GP[row_G]
    if not np.isfinite(best_s) or not len(row_G):
        return option, stages, vpp, bound_G[row_G]
    bound = np.maximum(bound_G[row_G], np.where(vpp == 1, round_trip_bound(problem, option, stages), 0.0))
    # no virtual stage is empty
    light_GP = np.where(stages > 0, round_s(problem, option).min(axis=0), 0.0)
    bound = np.maximum(bound, problem.microbatches_K[option] * vpp * light_GP.max(axis=1))
    keep = np.flatnonzero(bound < best_s)
    keep = keep[counts_suffice(problem, option[keep], stages[keep], vpp[keep], best_s)]
    return option[keep], stages[keep], vpp[keep], bound[keep]
