"""Lower bounds on the step, from coarse to fine; what a bound cuts is never looked at again.

With P_j = f_j + b_j + s_{j-1} + s_j (what stage j does per microbatch when transfers block),
w_j = min(pp-1-j, M) its warm-up forwards and W = sum(f + b) + 2 sum(s), the end of 1F1B is at least

    B1_j = sum_{i<j} (f_i + b_i + 2 s_i) + M P_j + w_j s_j + (w_{j-1} - 2) s_{j-1}     stage j never rests
    B2_j = W + (M - 1) P_j - min(w_j, M - 1) f_j                              round trip, then stage j

(paths through the dependency graph of ``schedule.one_f_one_b_ends``; model.md's B1 and B2 with the
blocking transfers counted). With virtual stages, stage j works M (f_j + b_j) between the arrival of
its first microbatch, chunk 0 of the stages before it, and the same way back:

    Bv_j = sum_{i<j} (f_i0 + b_i0 + 2 s_i) + M (f_j + b_j)

and after the forwards of its warm-up it waits for the first backward, which comes when a microbatch has passed all
chunks and, of the last, the stages behind: with F the forwards that come before, z the wrap and L the last chunk

    Bw_j = sum f + v sum s + (v-1) z + sum_{i>j} b_iL + sum_{i>=j} s_i + M (f_j + b_j) - F + sum_{i<j} (b_i0 + s_i)

Array legend: K options, G grid points, P pools, X candidates, J stages, V virtual stages.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from hapmoe.options import FloatArray, IntArray, StageTable
from hapmoe.schedule import microbatch_groups, warmup_microbatches
from hapmoe.search.problem import Problem
from hapmoe.search.space import may_interleave

__all__ = [
    "EPS",
    "blocked_s",
    "count_bounds",
    "early_forwards",
    "head_s",
    "heavy_class",
    "optimizer_s",
    "option_bounds",
    "pipeline_bound",
    "round_s",
    "round_trip_bound",
    "tails_s",
]

EPS = 1e-9
"""Relative slack when a division decides how many layers fit: bounds must not cut by rounding."""


def pipeline_bound(
    forward_XJV: FloatArray,
    backward_XJV: FloatArray,
    send_J: FloatArray,
    microbatches: int,
    sync_XJ: FloatArray | None = None,
    group: int = 0,
    extra: int = 0,
) -> FloatArray:
    """[X] lower bound on the end of all stages' gradient reductions, splits known.

    ``send_J``: per boundary, with virtual stages the wrap last; ``group``, ``extra``: as ``interleaved_ends`` has
    them, 0 stands for a group of pp. ``sync_XJ``: seconds behind each stage's last backward.
    """
    pp, vpp = forward_XJV.shape[1:]
    forward, backward = forward_XJV.sum(axis=2), backward_XJV.sum(axis=2)
    work = forward + backward
    sync = np.zeros((1, pp)) if sync_XJ is None else sync_XJ
    send = np.zeros(pp)
    send[: pp - 1] = send_J[: pp - 1]
    there, back = forward_XJV[:, :, 0] + send, backward_XJV[:, :, 0] + send
    lead = np.cumsum(there, axis=1) - there
    busy = lead + microbatches * work
    # from the end of a stage to that of the reductions of those ahead of it: j and i with all that lies between
    behind = np.cumsum(back, axis=1) - back
    drain = np.maximum.accumulate(sync - behind, axis=1) + behind
    if vpp > 1:
        early_JV = early_forwards(pp, vpp, microbatches, group or pp, extra)
        last = backward_XJV[:, :, -1] + send
        trip = forward.sum(axis=1, keepdims=True) + vpp * send.sum() + (vpp - 1) * send_J[-1]
        trip = trip + last.sum(axis=1, keepdims=True) - np.cumsum(last, axis=1) + send
        trip = trip + (forward_XJV * (microbatches - early_JV)).sum(axis=2) + microbatches * backward
        interleaved: FloatArray = (np.maximum(busy, trip) + drain).max(axis=1)
        return interleaved
    left = np.concatenate([[0.0], send[:-1]])
    ahead = pp - 1 - np.arange(pp)
    busy = busy + blocked_s(ahead, send, left, microbatches)
    # the round trip ends on stage j, so that of the backward passes those of stages ahead of it are not in it
    trip = work.sum(axis=1)[:, None] + 2.0 * send.sum() - behind
    trip = trip + (microbatches - 1) * (work + send + left) - np.minimum(ahead, microbatches - 1) * forward
    return np.asarray((np.maximum(busy, trip) + drain).max(axis=1))


@lru_cache(maxsize=1024)
def early_forwards(pp: int, vpp: int, microbatches: int, group: int, extra: int) -> IntArray:
    """[J, V] forwards of each chunk before a stage's first backward, of all microbatches."""
    total = microbatches * vpp
    ahead = [min(warmup_microbatches(pp, stage, vpp, total, group, extra) + 1, total) for stage in range(pp)]
    until = min(microbatches, (ahead[0] // (group * vpp) + 1) * group)
    chunk = np.asarray([chunk for _, chunk in microbatch_groups(until, vpp, group)])
    return np.stack([np.bincount(chunk[:many], minlength=vpp) for many in ahead])


def blocked_s(
    ahead: IntArray, right: FloatArray, left: FloatArray, microbatches: FloatArray | IntArray | int
) -> FloatArray:
    """Seconds that a stage is held by its transfers (B1), the first from and the last to its left not counted.

    ``ahead``: stages behind it, pp-1-j; ``left`` is 0 for the first stage.
    """
    to_right = (microbatches + np.minimum(ahead, microbatches)) * right
    held: FloatArray = to_right + (microbatches + np.minimum(ahead + 1, microbatches) - 2) * left
    return held


def heavy_class(problem: Problem) -> tuple[int, int]:
    """The class with the most work in all, and how many layers it has: some bounds look at it alone."""
    counts = problem.prefix_CN[:, -1]
    table = problem.tables[0]
    work = (table.forward_CK + table.backward_CK).mean(axis=1) * counts
    heavy = int(work.argmax())
    return heavy, int(counts[heavy])


def tails_s(problem: Problem, t: StageTable) -> tuple[FloatArray, FloatArray]:
    """[C, K] seconds that each layer adds, at the least, to what its stage's gradient reduction sticks out behind
    the last backward pass, and to its stage's optimizer step with the parameter gather.

    A reduction is hidden by one backward pass, a gather by one forward pass at the most, that of embedding and
    head included: with these the tails may be below what they are here by as much. Where the layers of the
    heavy class would be hidden all tails are 0. A layer with its M passes and tails never takes less than nothing.
    """
    training = problem.job.training
    heavy, _ = heavy_class(problem)
    sync = t.dense_params_CK * t.dense_sync_s_K + t.expert_params_CK * t.expert_sync_s_K
    if training.overlap_grad_reduce:
        sync = np.where(sync[heavy] > t.backward_CK[heavy], sync - t.backward_CK, 0.0)
    gather = t.dense_params_CK * t.dense_gather_s_K + t.expert_params_CK * t.expert_gather_s_K
    if training.overlap_param_gather:
        gather = np.where(gather[heavy] > t.forward_CK[heavy], gather - t.forward_CK, 0.0)
    return sync, gather + t.dense_params_CK * t.optimizer_s_K + t.expert_params_CK * t.expert_optimizer_s_K


def round_s(problem: Problem, option_G: IntArray) -> FloatArray:
    """[C, G, P] seconds of a layer there and back, and one M-th of its tails: M times this, summed over its
    layers, is what a stage's step takes at the least."""
    seconds = []
    for t in problem.tables:
        sync, after = tails_s(problem, t)
        whole_CK = t.forward_CK + t.backward_CK + (sync + after) / problem.microbatches_K
        seconds.append(whole_CK[:, option_G])
    return np.stack(seconds, axis=2)


def option_bounds(problem: Problem) -> tuple[FloatArray, NDArray[np.bool_]]:
    """[K] bound over all placements of an option, and whether any could hold the model at all.

    Every pool lends all its stages, as far as there are layers for them, the fastest first.
    """
    space, layers = problem.space, problem.job.model.num_layers
    heavy, _ = heavy_class(problem)
    layer_KP = np.stack([t.forward_CK[heavy] + t.backward_CK[heavy] for t in problem.tables], axis=1)
    order_KP = np.argsort(layer_KP, axis=1)
    most_KP = np.take_along_axis(space.most_KP, order_KP, axis=1)
    before = np.cumsum(most_KP, axis=1) - most_KP
    most_KP = np.clip(layers - before, 0, most_KP)
    stages_KP = np.zeros_like(most_KP)
    np.put_along_axis(stages_KP, order_KP, most_KP, axis=1)
    options_K = np.arange(len(stages_KP))
    bound_K = _work_bound(problem, options_K, stages_KP, whole_layers=False)
    bound_K = np.maximum(bound_K, _length_bounds(problem).min(axis=1))
    possible_K = _memory_can_suffice(problem, options_K, space.most_KP) & (space.most_KP.sum(axis=1) > 0)
    return np.where(stages_KP.sum(axis=1) > 0, bound_K, np.inf), possible_K


def _length_bounds(problem: Problem) -> FloatArray:
    """[K, N] bound of an option on 1 … N stages, the fastest that there are: long pipelines are filled
    and drained long, short ones have fewer devices. Infinite where there are not so many stages."""
    space, layers = problem.space, problem.job.model.num_layers
    heavy, number = heavy_class(problem)
    once_KP = np.stack([t.forward_CK[heavy] + t.backward_CK[heavy] for t in problem.tables], axis=1)
    phi_K = (np.stack([t.forward_CK[heavy] for t in problem.tables], axis=1) / once_KP).max(axis=1)
    place = np.arange(layers)
    microbatches_K1 = problem.microbatches_K[:, None].astype(np.float64)

    def speed_of(layer_KP: FloatArray) -> FloatArray:
        """[K, N] layers per second of the N-th fastest stage, 0 where there are not so many."""
        order_KP = np.argsort(layer_KP, axis=1)
        end_KP = np.cumsum(np.take_along_axis(space.most_KP, order_KP, axis=1), axis=1)
        slot_KN = np.zeros((len(end_KP), layers), np.int64)
        for p in range(end_KP.shape[1]):  # a sum over a short last axis takes several times as long
            slot_KN += place >= end_KP[:, p, None]
        per_KP = np.concatenate(
            [1.0 / np.take_along_axis(layer_KP, order_KP, axis=1), np.zeros((len(order_KP), 1))], axis=1
        )
        return np.asarray(np.take_along_axis(per_KP, slot_KN, axis=1))

    # fill and drain as in ``_fill_bound``, whatever the number of virtual stages
    fill_KN = np.zeros((len(once_KP), layers))
    for light_KP, tail_KP in _fill_terms(problem):
        speed_KN = speed_of(microbatches_K1 * once_KP + tail_KP)
        ahead_KN = np.cumsum(speed_KN * place, axis=1) * light_KP.min(axis=1)[:, None]
        fill_KN = np.maximum(fill_KN, (number + ahead_KN) / np.cumsum(speed_KN, axis=1))
    # B2 of every stage, all counted as first stages; summed as in ``_fill_bound``
    speed_KN = speed_of(once_KP)
    early_KN = np.minimum(place, microbatches_K1 - 1)
    trip_KN = (microbatches_K1 - 1 - early_KN * phi_K[:, None]) / np.cumsum(speed_KN, axis=1)
    trip_KN = number * (once_KP.min(axis=1)[:, None] + trip_KN)
    # where interleaving is legal only the first holds
    interleaved = may_interleave(problem.job, place + 1, problem.microbatches_K[:, None])
    bound_KN = np.where(interleaved, fill_KN, np.maximum(fill_KN, trip_KN))
    return np.where(speed_KN > 0, bound_KN, np.inf)


def _fill_terms(problem: Problem) -> Iterator[tuple[FloatArray, FloatArray]]:
    """Two ways to count what surrounds the M passes of a stage, each [K, P]: seconds of the lightest layer ahead of
    it, there and back, and the tail of a layer of its own in the optimizer step; or there only, and both tails."""
    heavy, _ = heavy_class(problem)
    tails = [tails_s(problem, t) for t in problem.tables]
    after_KP = np.stack([after[heavy] for _, after in tails], axis=1)
    both_KP = after_KP + np.stack([sync[heavy] for sync, _ in tails], axis=1)
    yield np.stack([(t.forward_CK + t.backward_CK).min(axis=0) for t in problem.tables], axis=1), after_KP
    yield np.stack([t.forward_CK.min(axis=0) for t in problem.tables], axis=1), both_KP


def count_bounds(problem: Problem, option_G: IntArray, stages_GP: IntArray) -> FloatArray:
    """[G] bound of an option with so many stages per pool, whatever their order and vpp; infinite
    where memory cannot suffice."""
    bound_G = _work_bound(problem, option_G, stages_GP, whole_layers=True)
    bound_G = np.maximum(bound_G, _fill_bound(problem, option_G, stages_GP))
    return np.where(_memory_can_suffice(problem, option_G, stages_GP), bound_G, np.inf)


def head_s(problem: Problem) -> FloatArray:
    """[K, P] seconds of head, loss and MTP layers, there and back."""
    mtp = problem.job.model.mtp_layers
    return np.stack(
        [t.head_forward_K + t.head_backward_K + mtp * (t.mtp_forward_K + t.mtp_backward_K) for t in problem.tables],
        axis=1,
    )


def _work_bound(problem: Problem, option_G: IntArray, stages_GP: IntArray, *, whole_layers: bool) -> FloatArray:
    """[G] M times the least that the slowest stage can have to do, its tails included.

    Stages of pool p take at most floor(t / c_p) layers in t seconds: the smallest t whose sum of
    stages_p * floor(t / c_p) holds all layers bounds the slowest stage (``whole_layers``); without
    the floor, with all classes, embedding and head, t is total work over total speed.
    """
    tables, k = problem.tables, option_G
    used_GP = stages_GP > 0
    counts = problem.prefix_CN[:, -1]
    class_CGP = round_s(problem, k)
    reference_CG = np.where(used_GP, class_CGP, np.inf).min(axis=2)
    ratio_GP = (class_CGP / reference_CG[:, :, None]).min(axis=0)
    work_G = (counts[:, None] * reference_CG).sum(axis=0) + _cheapest_ends(problem, k, used_GP, ratio_GP)
    slowest_G = work_G / (stages_GP / ratio_GP).sum(axis=1)
    if whole_layers:
        heavy, layers = heavy_class(problem)
        # no stage is empty: the lightest layer on the slowest pool in use
        slowest_G = np.maximum(slowest_G, np.where(used_GP, class_CGP.min(axis=0), 0.0).max(axis=1))
        slowest_G = _whole_layers(slowest_G, class_CGP[heavy], stages_GP, layers)
    params = np.stack([optimizer_s(problem, p) for p in range(len(tables))], axis=1)[k]
    optimizer_G = np.where(used_GP, params, np.inf).min(axis=1) / stages_GP.sum(axis=1)
    optimizer_G += min(float(t.step_s_K.min()) for t in problem.tables)
    # one microbatch passes all layers there and back, however many there are
    once_CGP = np.stack([t.forward_CK + t.backward_CK for t in tables], axis=2)[:, k]
    whole_G = (counts[:, None] * np.where(used_GP, once_CGP, np.inf).min(axis=2)).sum(axis=0)
    bound: FloatArray = np.maximum(problem.microbatches_K[k] * slowest_G, whole_G + optimizer_G)
    return bound


def _whole_layers(slowest_G: FloatArray, layer_GP: FloatArray, stages_GP: IntArray, layers: int) -> FloatArray:
    used_GP = stages_GP > 0
    slowest_G = np.array(slowest_G)
    open_G = np.arange(len(slowest_G))
    for _ in range(64):
        held = np.floor(slowest_G[open_G, None] / layer_GP[open_G] * (1 + EPS)) * used_GP[open_G]
        enough = (stages_GP[open_G] * held).sum(axis=1) >= layers
        open_G, held = open_G[~enough], held[~enough]
        if not len(open_G):
            break
        following = np.where(used_GP[open_G], (held + 1) * layer_GP[open_G], np.inf).min(axis=1)
        slowest_G[open_G] = np.maximum(following, slowest_G[open_G])
    return slowest_G


def _fill_bound(problem: Problem, option_G: IntArray, stages_GP: IntArray) -> FloatArray:
    """[G] bound with the pipeline's fill and drain: stage j works M t_j after and before at least j
    layers of the stages ahead of it, so it holds at most (T - j c) / (M c_p) layers. Or: after at least j
    forward passes, and before its own tails.

    Summed over the stages this gives T; slow pools are taken to stand last, where it costs least.
    """
    heavy, layers = heavy_class(problem)
    k, used_GP = option_G, stages_GP > 0
    once_GP = np.stack([t.forward_CK[heavy] + t.backward_CK[heavy] for t in problem.tables], axis=1)[k]
    bound = np.zeros(len(k))
    for light_KP, tail_KP in _fill_terms(problem):
        light_G = np.where(used_GP, light_KP[k], np.inf).min(axis=1)
        layer_GP = problem.microbatches_K[k][:, None] * once_GP + tail_KP[k]
        order = np.argsort(layer_GP, axis=1)
        layer, stages = np.take_along_axis(layer_GP, order, axis=1), np.take_along_axis(stages_GP, order, axis=1)
        begin = np.cumsum(stages, axis=1) - stages
        places = stages * begin + stages * (stages - 1) / 2
        filled = (layers + (places / layer).sum(axis=1) * light_G) / (stages / layer).sum(axis=1)
        bound = np.maximum(bound, filled)
    return bound


def round_trip_bound(problem: Problem, option_G: IntArray, stages_GP: IntArray) -> FloatArray:
    """[G] bound without virtual stages, in any order of pools: B2 of the slowest stage, wherever it stands.

    One microbatch through all layers and back, then M - 1 more on the slowest stage, less the forwards
    that it may have done before (at most pp - 1, each at most phi of its work).
    """
    k, counts = option_G, problem.prefix_CN[:, -1]
    used_GP = stages_GP > 0
    class_CGP = np.stack([t.forward_CK + t.backward_CK for t in problem.tables], axis=2)[:, k]
    forward_CGP = np.stack([t.forward_CK for t in problem.tables], axis=2)[:, k]
    ends_GP = np.stack(
        [
            (t.head_forward_K + t.embedding_forward_K) / np.maximum(t.head_forward_K + t.head_backward_K, 1e-30)
            for t in problem.tables
        ],
        axis=1,
    )[k]
    phi_G = np.where(used_GP, (forward_CGP / class_CGP).max(axis=0), 0.0).max(axis=1)
    phi_G = np.maximum(phi_G, np.where(used_GP, np.minimum(ends_GP, 1.0), 0.0).max(axis=1))
    heavy, layers = heavy_class(problem)
    least_G = np.where(used_GP, class_CGP.min(axis=0), 0.0).max(axis=1)
    speed_G = (stages_GP / class_CGP[heavy]).sum(axis=1)
    slowest_G = _whole_layers(np.maximum(least_G, layers / speed_G), class_CGP[heavy], stages_GP, layers)
    whole_G = (counts[:, None] * np.where(used_GP, class_CGP, np.inf).min(axis=2)).sum(axis=0)
    microbatches = problem.microbatches_K[k]
    early_G = np.minimum(stages_GP.sum(axis=1) - 1, microbatches - 1)
    bound: FloatArray = whole_G + np.maximum(microbatches - 1 - early_G * phi_G, 0.0) * slowest_G
    return bound


def optimizer_s(problem: Problem, pool: int) -> FloatArray:
    """[K] seconds of the optimizer step, parameter gather included, if one rank of ``pool`` held all layers."""
    t, counts, mtp = problem.tables[pool], problem.prefix_CN[:, -1:], problem.job.model.mtp_layers
    dense = (counts * t.dense_params_CK).sum(axis=0) * t.optimizer_s_K
    plain = dense + (counts * t.expert_params_CK).sum(axis=0) * t.expert_optimizer_s_K
    ends = t.embedding_forward_K + t.head_forward_K + mtp * t.mtp_forward_K  # may hide some of the gather
    total: FloatArray = np.maximum(plain, (counts * tails_s(problem, t)[1]).sum(axis=0) - ends)
    return total


def _cheapest_ends(
    problem: Problem, option_G: IntArray, used_GP: NDArray[np.bool_], ratio_GP: FloatArray
) -> FloatArray:
    """Embedding plus head in the reference pool's seconds, each on the pool where it is cheapest."""
    total = np.zeros(len(option_G))
    embedding = np.stack([t.embedding_forward_K + t.embedding_backward_K for t in problem.tables], axis=1)
    spared_K1 = 1.0 - 1.0 / problem.microbatches_K[:, None]  # one pass may hide what the tails count (``tails_s``)
    for ends in (embedding * spared_K1, head_s(problem) * spared_K1):
        total += np.where(used_GP, ends[option_G] / ratio_GP, np.inf).min(axis=1)
    return total


def _memory_can_suffice(problem: Problem, option_G: IntArray, stages_GP: IntArray) -> NDArray[np.bool_]:
    """[G] False where even with everything recomputed the stages cannot hold the layers."""
    heavy, layers = heavy_class(problem)
    room = np.zeros(len(option_G))
    for index, t in enumerate(problem.tables):
        dense, expert = t.dense_params_CK[heavy], t.expert_params_CK[heavy]
        static_K = (t.weight_bytes + t.grad_bytes) * (dense + expert)
        static_K = static_K + dense * t.dense_optimizer_bytes_K + expert * t.expert_optimizer_bytes_K
        least_K = static_K + t.activation_RCK[:, heavy].min(axis=0)
        free_K = t.memory_limit_bytes_K - t.workspace_bytes_K - t.transient_RCK[:, heavy].min(axis=0)
        held_K = np.floor(np.maximum(free_K, 0.0) / least_K * (1 + EPS))
        room += stages_GP[:, index] * held_K[option_G]
    return np.asarray(room >= layers)
