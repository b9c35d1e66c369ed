"""Lower bounds on the step that need no layer split yet, and on one whose split is known.

With P_j = f_j + b_j + s_{j-1} + s_j (what stage j does per microbatch when transfers block),
w_j = pp-1-j its warm-up forwards and W = sum(f + b) + 2 sum(s), the end of 1F1B with M >= pp is at least

    B1_j = sum_{i<j} (f_i + b_i + 2 s_i) + M P_j + w_j s_j + (w_j - 1) s_{j-1}     stage j never rests
    B2_j = W + (M - 1) P_j - w_j f_j                                              round trip, then stage j

(paths through the dependency graph of ``schedule.one_f_one_b_ends``; model.md's B1 and B2 with the
blocking transfers counted). With virtual stages, stage j works M (f_j + b_j) between the arrival of
its first microbatch, chunk 0 of the stages before it, and the same way back:

    Bv_j = sum_{i<j} (f_i0 + b_i0 + 2 s_i) + M (f_j + b_j)

Array legend: G grid points, J stages (padded), R menu entries, X candidates, V virtual stages.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hapmoe.options import FloatArray, IntArray
from hapmoe.search.problem import Problem

__all__ = ["pipeline_bound", "point_bounds", "quick_bounds"]

EPS = 1e-9
"""Relative slack when a division decides how many layers fit: bounds must not cut by rounding."""


def pipeline_bound(
    forward_XJV: FloatArray, backward_XJV: FloatArray, send_J: FloatArray, microbatches: int
) -> FloatArray:
    """[X] lower bound on the end of the last backward of stage 0, splits known.

    ``send_J``: per boundary, at least pp-1 entries.
    """
    pp, vpp = forward_XJV.shape[1:]
    forward, backward = forward_XJV.sum(axis=2), backward_XJV.sum(axis=2)
    work = forward + backward
    if vpp > 1:
        before = forward_XJV[:, :, 0] + backward_XJV[:, :, 0] + 2.0 * send_J[:pp]
        prefix = np.cumsum(before, axis=1) - before
        interleaved: FloatArray = (prefix + microbatches * work).max(axis=1)
        return interleaved
    send = np.zeros(pp)
    send[: pp - 1] = send_J[: pp - 1]
    left = np.concatenate([[0.0], send[:-1]])
    whole = work.sum(axis=1) + 2.0 * send.sum()
    if microbatches < pp:
        return np.asarray(np.maximum(whole, (microbatches * work).max(axis=1)))
    period = work + send + left
    warmup = pp - 1 - np.arange(pp)
    before = work + 2.0 * send
    prefix = np.cumsum(before, axis=1) - before
    inner = np.where(np.arange(pp) > 0, (warmup - 1) * left, 0.0)
    busy = (prefix + microbatches * period + warmup * send + inner).max(axis=1)
    trip = (whole[:, None] + (microbatches - 1) * period - warmup * forward).max(axis=1)
    return np.asarray(np.maximum(busy, trip))


def _heavy_class(problem: Problem) -> tuple[int, int]:
    """The class with the most work in all, and how many layers it has: bounds look at it alone."""
    counts = problem.prefix_CN[:, -1]
    table = problem.tables[0]
    work = (table.forward_CK + table.backward_CK).mean(axis=1) * counts
    heavy = int(work.argmax())
    return heavy, int(counts[heavy])


def quick_bounds(problem: Problem) -> tuple[FloatArray, NDArray[np.bool_]]:
    """[G] lower bound whatever the order of pools and vpp, and whether memory can suffice at all.

    From the work alone: stages of pool p take at most floor(t / c_p) layers in t seconds, so the
    smallest t whose sum of stages_p * floor(t / c_p) holds all layers bounds the slowest stage.
    """
    grid, tables = problem.grid, problem.tables
    k = grid.option_G
    heavy, layers = _heavy_class(problem)
    layer_GP = np.stack([t.forward_CK[heavy] + t.backward_CK[heavy] for t in tables])[:, k].T
    stages_GP = grid.stages_GP
    used_GP = stages_GP > 0

    # The slowest stage, with whole layers.
    speed_G = (stages_GP / layer_GP).sum(axis=1)
    slowest_G = layers / speed_G
    open_G = np.arange(len(k))
    for _ in range(64):
        held = np.floor(slowest_G[open_G, None] / layer_GP[open_G] * (1 + EPS)) * used_GP[open_G]
        enough = (stages_GP[open_G] * held).sum(axis=1) >= layers
        open_G, held = open_G[~enough], held[~enough]
        if not len(open_G):
            break
        following = np.where(used_GP[open_G], (held + 1) * layer_GP[open_G], np.inf).min(axis=1)
        slowest_G[open_G] = np.maximum(following, slowest_G[open_G])

    # The same without whole layers, with all classes and with embedding and head.
    counts = problem.prefix_CN[:, -1]
    class_CGP = np.stack([t.forward_CK + t.backward_CK for t in tables], axis=2)[:, k]
    reference_CG = np.where(used_GP, class_CGP, np.inf).min(axis=2)
    ratio_GP = (class_CGP / reference_CG[:, :, None]).min(axis=0)
    work_G = (counts[:, None] * reference_CG).sum(axis=0) + _cheapest_ends(problem, used_GP, ratio_GP)
    slowest_G = np.maximum(slowest_G, work_G / (stages_GP / ratio_GP).sum(axis=1))
    step_G = grid.microbatches_G * slowest_G

    params = np.stack(
        [
            (counts @ t.dense_params_CK) * t.optimizer_s_K + (counts @ t.expert_params_CK) * t.expert_optimizer_s_K
            for t in tables
        ]
    )[:, k].T
    optimizer_G = np.where(used_GP, params, np.inf).min(axis=1) / stages_GP.sum(axis=1)
    return step_G + optimizer_G, _memory_can_suffice(problem, heavy, layers)


def _cheapest_ends(problem: Problem, used_GP: NDArray[np.bool_], ratio_GP: FloatArray) -> FloatArray:
    """Embedding plus head in the reference pool's seconds, each on the pool where it is cheapest."""
    k, model = problem.grid.option_G, problem.job.model
    total = np.zeros(len(k))
    embedding = np.stack([t.embedding_forward_K + t.embedding_backward_K for t in problem.tables])
    head = np.stack(
        [
            t.head_forward_K + t.head_backward_K + model.mtp_layers * (t.mtp_forward_K + t.mtp_backward_K)
            for t in problem.tables
        ]
    )
    for ends in (embedding, head):
        total += np.where(used_GP, ends[:, k].T / ratio_GP, np.inf).min(axis=1)
    return total


def _memory_can_suffice(problem: Problem, heavy: int, layers: int) -> NDArray[np.bool_]:
    """[G] False where even with everything recomputed the stages cannot hold the layers."""
    grid, k = problem.grid, problem.grid.option_G
    room = np.zeros(len(k))
    for index, t in enumerate(problem.tables):
        dense, expert = t.dense_params_CK[heavy], t.expert_params_CK[heavy]
        static_K = (t.weight_bytes + t.grad_bytes) * (dense + expert)
        static_K = static_K + dense * t.dense_optimizer_bytes_K + expert * t.expert_optimizer_bytes_K
        least_K = static_K + t.activation_RCK[:, heavy].min(axis=0)
        free_K = t.memory_limit_bytes - t.workspace_bytes_K - t.transient_RCK[:, heavy].min(axis=0)
        held_K = np.floor(np.maximum(free_K, 0.0) / least_K * (1 + EPS))
        room += grid.stages_GP[:, index] * held_K[k]
    return np.asarray(room >= layers)


def point_bounds(
    problem: Problem, placement_G: IntArray, option_G: IntArray, vpp_G: IntArray, floor_G: FloatArray, ceiling: float
) -> tuple[FloatArray, IntArray]:
    """[G] lower bound of each grid point with its order, vpp and memory; infinite where nothing fits.

    For a step time t every stage has a most number of layers (time by B1, B2 or Bv; memory by each
    menu entry); where these do not add up to the model, t is too small. Bisection between ``floor_G``
    and ``ceiling`` finds the largest such t, to a fraction of the way. Also [G, J] the most layers of each stage that a
    step of ``ceiling`` allows.
    """
    pp_G = np.asarray([problem.space.placements[p].pp for p in placement_G])
    bound_G, high_GJ = np.zeros(len(pp_G)), np.zeros((len(pp_G), int(pp_G.max())), np.int64)
    for pp in sorted(set(pp_G.tolist())):
        of = np.flatnonzero(pp_G == pp)
        bound_G[of], high_GJ[of, :pp] = _bounds_of(
            problem, placement_G[of], option_G[of], vpp_G[of], floor_G[of], ceiling
        )
    return bound_G, high_GJ


def _bounds_of(
    problem: Problem, placement_G: IntArray, option_G: IntArray, vpp_G: IntArray, floor_G: FloatArray, ceiling: float
) -> tuple[FloatArray, IntArray]:
    """``point_bounds`` of grid points with one number of stages."""
    stage = _stage_arrays(problem, placement_G, option_G, vpp_G)
    low = np.maximum(floor_G, _chain_bound(problem, stage, placement_G, option_G))
    limited = np.isfinite(ceiling)
    most = ceiling if limited else float(max(1.0, low.max())) * 64.0
    reach = _reach(stage, np.full(len(low), most))
    hopeless = reach.sum(axis=1) < stage.layers
    high = np.where(hopeless, np.inf, most)
    for _ in range(6 if limited else 16):
        middle = np.where(hopeless, most, 0.5 * (low + np.minimum(high, most)))
        enough = (_reach(stage, middle).sum(axis=1) >= stage.layers) & ~hopeless
        high = np.where(enough, middle, high)
        low = np.where(enough | hopeless, low, middle)
    # other classes of layers come on top of what the heavy class leaves room for
    others = problem.job.model.num_layers - stage.layers
    bound = np.where(hopeless, ceiling if limited else np.inf, np.minimum(low, most))
    return bound, np.where(stage.real_GJ, reach.astype(np.int64) + others, 0)


def _chain_bound(problem: Problem, a: _StageArrays, placement_G: IntArray, option_G: IntArray) -> FloatArray:
    """[G] bound of interleaved schedules from transfers that stand in a row; 0 without virtual stages.

    The first microbatch of a group of g passes all chunks before the first of the next group enters:
    between its first and last chunk on stage 0 lie vpp-1 rounds through all stages and links, M/g
    times; one backward pass follows. The same holds for the backward passes, after one forward pass.
    """
    links = np.asarray(
        [
            sum(float(problem.sends[key][k]) for key in problem.send_names_PB[p])
            for p, k in zip(placement_G, option_G, strict=True)
        ]
    )
    forward = np.where(a.real_GJ, a.forward_GJ, np.inf).min(axis=1)
    backward = np.where(a.real_GJ, a.backward_GJ, np.inf).min(axis=1)
    layers, vpp, pp = float(a.layers), a.vpp_G.astype(np.float64), a.pp_G.astype(np.float64)
    group = np.where(a.group_G > 0, a.group_G, a.pp_G)
    rounds = np.floor(a.microbatches_G / group)
    others = problem.job.model.num_layers - a.layers  # of lighter classes: they may fill the last chunks
    up = np.maximum(0.0, layers - (layers + others + pp * (vpp - 1)) / vpp) * forward
    down = np.maximum(0.0, layers - (layers + others) / vpp) * backward
    forth = rounds * ((vpp - 1) * links + up) + layers * backward + (vpp - 1) * links
    back = layers * forward + (vpp - 1) * links + rounds * ((vpp - 1) * links + down)
    return np.where(a.vpp_G > 1, np.maximum(forth, back), 0.0)


class _StageArrays:
    """Per grid point and stage, what a number of layers of the heavy class costs. Shapes [G, J] or [G, J, R]."""

    layers: int
    microbatches_G: FloatArray
    pp_G: IntArray
    vpp_G: IntArray
    real_GJ: NDArray[np.bool_]
    forward_GJ: FloatArray
    backward_GJ: FloatArray
    base_forward_GJ: FloatArray
    base_backward_GJ: FloatArray
    extra_GJR: FloatArray
    static_GJ: FloatArray
    act_GJR: FloatArray
    room_GJR: FloatArray
    send_GJ: FloatArray
    left_GJ: FloatArray
    warmup_GJ: FloatArray
    optimizer_G: FloatArray
    group_G: IntArray
    lightest_G: FloatArray
    """The cheapest layer of any class on any stage."""


def _stage_arrays(problem: Problem, placement_G: IntArray, option_G: IntArray, vpp_G: IntArray) -> _StageArrays:
    tables, model = problem.tables, problem.job.model
    heavy, layers = _heavy_class(problem)
    placements = problem.space.placements
    pp_G = np.asarray([placements[p].pp for p in placement_G], np.int64)
    width = int(pp_G.max())
    pool_GJ = np.zeros((len(pp_G), width), np.int64)
    for row, p in enumerate(placement_G):
        pool_GJ[row, : pp_G[row]] = placements[p].pool_of_stage
    position = np.arange(width)
    k_GJ = option_G[:, None]

    def pick(values: list[FloatArray]) -> FloatArray:
        return np.asarray(np.stack(values)[pool_GJ, k_GJ])

    out = _StageArrays()
    out.layers = layers
    out.pp_G, out.vpp_G = pp_G, vpp_G
    options = problem.space.options
    batch = problem.job.training.global_batch_size
    out.microbatches_G = (batch // (options.mbs_K * options.dp_K)[option_G]).astype(np.float64)
    out.real_GJ = position < pp_G[:, None]
    first, last = position == 0, position == pp_G[:, None] - 1
    out.forward_GJ = pick([t.forward_CK[heavy] for t in tables])
    out.backward_GJ = pick([t.backward_CK[heavy] for t in tables])
    mtp = model.mtp_layers
    lightest_GJ = pick([(t.forward_CK + t.backward_CK).min(axis=0) for t in tables])
    out.lightest_G = np.where(out.real_GJ, lightest_GJ, np.inf).min(axis=1)
    out.base_forward_GJ = first * pick([t.embedding_forward_K for t in tables]) + last * pick(
        [t.head_forward_K + mtp * t.mtp_forward_K for t in tables]
    )
    out.base_backward_GJ = first * pick([t.embedding_backward_K for t in tables]) + last * pick(
        [t.head_backward_K + mtp * t.mtp_backward_K for t in tables]
    )
    # Menu entries first, then "full" as block recomputation of a fraction of the layers.
    menu = len(tables[0].menu)
    out.extra_GJR = np.stack([pick([t.recompute_RCK[r, heavy] for t in tables]) for r in range(menu)], axis=2)
    act_GJR = np.stack([pick([t.activation_RCK[r, heavy] for t in tables]) for r in range(menu)], axis=2)
    transient_GJR = np.stack([pick([t.transient_RCK[r, heavy] for t in tables]) for r in range(menu)], axis=2)
    transient_GJR[:, :, -1] = np.minimum(transient_GJR[:, :, -1], transient_GJR[:, :, 0])
    group_G = np.full(len(pp_G), problem.job.training.microbatch_group_size or 0)
    group_G = np.where(group_G > 0, group_G, pp_G)
    out.group_G = group_G
    ahead = np.maximum(pp_G[:, None] - position - 1, 0)
    total = np.where(vpp_G[:, None] == 1, ahead + 1, 2 * ahead + (vpp_G[:, None] - 1) * group_G[:, None] + 1)
    total = np.minimum(total, out.microbatches_G[:, None] * vpp_G[:, None])
    held_GJ = total / vpp_G[:, None]
    out.act_GJR = held_GJ[:, :, None] * act_GJR
    # chunks differ by one layer and the fuller hold less: n layers weigh at least like n - (vpp - 1) even ones
    relief_GJR = out.act_GJR * (vpp_G[:, None, None] - 1)

    def rank_bytes(dense: list[FloatArray], expert: list[FloatArray]) -> FloatArray:
        return pick(
            [
                (t.weight_bytes + t.grad_bytes) * (d + e)
                + d * t.dense_optimizer_bytes_K
                + e * t.expert_optimizer_bytes_K
                for t, d, e in zip(tables, dense, expert, strict=True)
            ]
        )

    none = [np.zeros(len(options)) for _ in tables]
    out.static_GJ = rank_bytes([t.dense_params_CK[heavy] for t in tables], [t.expert_params_CK[heavy] for t in tables])
    edges_GJ = first * rank_bytes([t.embedding_params_K for t in tables], none)
    shared = first & last & model.tied_embeddings
    edges_GJ = edges_GJ + last * ~shared * rank_bytes([t.head_params_K for t in tables], none)
    limit_GJ = np.asarray([t.memory_limit_bytes for t in tables])[pool_GJ] - pick([t.workspace_bytes_K for t in tables])
    once_GJ = last * pick([t.head_activation_K + mtp * t.mtp_activation_K for t in tables])
    out.room_GJR = (limit_GJ - edges_GJ - once_GJ)[:, :, None] - transient_GJR + relief_GJR
    disallowed = ~np.asarray(problem.allowed)
    if disallowed[0] and not disallowed[-1]:
        disallowed = disallowed.copy()  # block recomputation of all layers stays possible
    out.room_GJR[:, :, disallowed] = -np.inf

    send_GJ = np.zeros((len(pp_G), width))
    for row, p in enumerate(placement_G):
        keys = problem.send_names_PB[p]
        send_GJ[row, : len(keys) - 1] = [problem.sends[key][option_G[row]] for key in keys[:-1]]
    out.send_GJ = send_GJ
    out.left_GJ = np.concatenate([np.zeros((len(pp_G), 1)), send_GJ[:, :-1]], axis=1)
    out.warmup_GJ = ahead.astype(np.float64)
    counts = problem.prefix_CN[:, -1]
    params = [
        (counts @ t.dense_params_CK) * t.optimizer_s_K + (counts @ t.expert_params_CK) * t.expert_optimizer_s_K
        for t in tables
    ]
    least = np.where(out.real_GJ, pick(params), np.inf).min(axis=1)
    out.optimizer_G = least / pp_G
    return out


def _reach(a: _StageArrays, step_G: FloatArray) -> FloatArray:
    """[G, J] the most layers (of the heavy class) of each stage within a step."""
    time_G = (step_G - a.optimizer_G) * (1 + EPS)
    microbatches = a.microbatches_G[:, None]
    flat = a.vpp_G[:, None] == 1
    per_layer_GJ = a.forward_GJ + a.backward_GJ
    base_GJ = a.base_forward_GJ + a.base_backward_GJ
    least_GJ = np.where(a.real_GJ, per_layer_GJ, np.inf).min(axis=1, keepdims=True)
    sends_GJ = 2.0 * a.send_GJ
    before_sends = np.cumsum(sends_GJ, axis=1) - sends_GJ
    # every stage holds a layer in its first chunk; the stages before j hold at least one each
    embedding = np.where(np.arange(base_GJ.shape[1]) > 0, base_GJ[:, :1], 0.0)
    prefix_GJ = np.arange(base_GJ.shape[1]) * a.lightest_G[:, None] + before_sends + embedding
    full = a.microbatches_G >= a.pp_G
    held = np.where(flat, microbatches * (a.send_GJ + a.left_GJ) + a.warmup_GJ * a.send_GJ, 0.0)
    held = held + np.where(flat & (np.arange(base_GJ.shape[1]) > 0), (a.warmup_GJ - 1) * a.left_GJ, 0.0)
    held = np.where(full[:, None], held, 0.0)
    prefix_GJ = np.where((full[:, None]) | ~flat, prefix_GJ, 0.0)
    cap_busy = time_G[:, None] - prefix_GJ - held
    whole = a.layers * least_GJ[:, 0] + (base_GJ * a.real_GJ).sum(axis=1) + 2.0 * a.send_GJ.sum(axis=1)
    cap_trip = time_G[:, None] - whole[:, None] - (microbatches - 1) * (a.send_GJ + a.left_GJ)
    trip_base = (microbatches - 1) * base_GJ - a.warmup_GJ * a.base_forward_GJ
    use_trip = flat & full[:, None]

    layers_GJ = np.zeros_like(base_GJ)
    menu = a.extra_GJR.shape[2]
    for r in range(menu):
        extra, act, room = a.extra_GJR[:, :, r], a.act_GJR[:, :, r], a.room_GJR[:, :, r]
        fits = room / (a.static_GJ + act) * (1 + EPS)
        if r < menu - 1:
            busy = (cap_busy - microbatches * base_GJ) / (microbatches * (per_layer_GJ + extra))
            trip = (cap_trip - trip_base) / ((microbatches - 1) * (per_layer_GJ + extra) - a.warmup_GJ * a.forward_GJ)
        else:
            # k >= alpha n - beta of n layers must be recomputed for the rest to fit
            saved = np.maximum(a.act_GJR[:, :, 0] - act, 1e-30)
            alpha = (a.static_GJ + a.act_GJR[:, :, 0]) / saved
            beta = room / saved
            slope = extra * alpha
            relief = extra * beta
            busy = (cap_busy - microbatches * (base_GJ - relief)) / (microbatches * (per_layer_GJ + slope))
            trip = (cap_trip - trip_base + (microbatches - 1) * relief) / (
                (microbatches - 1) * (per_layer_GJ + slope) - a.warmup_GJ * a.forward_GJ
            )
            # below the point where recomputation starts the plain time holds
            plain = (cap_busy - microbatches * base_GJ) / (microbatches * per_layer_GJ)
            busy = np.minimum(busy, plain)
        trip = np.where(use_trip & np.isfinite(trip) & (trip > -1e18), trip, np.inf)
        denominator_ok = (microbatches - 1) * per_layer_GJ > a.warmup_GJ * a.forward_GJ
        trip = np.where(denominator_ok, trip, np.inf)
        most = np.minimum(np.minimum(busy, trip), fits)
        layers_GJ = np.maximum(layers_GJ, np.floor(most * (1 + EPS)))
    return np.where(a.real_GJ, np.minimum(layers_GJ, a.layers), 0.0)
