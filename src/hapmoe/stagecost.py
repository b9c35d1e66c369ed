"""From layers on a stage to its times and bytes: one formula for the oracle and for the search.

Legend: X rows (one way to fill one stage each), V virtual stages, C layer classes, R menu entries,
Q moments of fullest memory, B counts of recomputed layers. Seconds are of one microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hapmoe.job import JobSpec
from hapmoe.options import FloatArray, IntArray, LayerClass, StageTable
from hapmoe.plan import Recompute

__all__ = ["Costs", "Slots", "class_prefix", "layer_classes", "stage_costs"]


@dataclass(frozen=True, slots=True)
class Slots:
    """X ways to fill a stage: which layers, at which place in the pipeline."""

    start_XV: IntArray
    count_XV: IntArray
    flights_XQV: IntArray
    """Microbatches held per chunk at the fullest moments (``schedule.in_flight``)."""
    first_X: NDArray[np.bool_]
    last_X: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Costs:
    """Times and bytes of X ways to fill a stage, each with the recomputation that is cheapest among those that fit.

    With virtual stages a row may appear more than once: two recomputations, of which one costs more
    in one chunk and the other in another, are both kept.
    """

    row_X: IntArray
    """The row of the slots that each entry belongs to."""
    forward_XV: FloatArray
    backward_XV: FloatArray
    recompute_X: FloatArray
    exposed_comm_X: FloatArray
    sync_X: FloatArray
    """Gradient reduction that sticks out behind the last backward."""
    optimizer_X: FloatArray
    """Optimizer step, and the parameter gather that sticks out."""
    weights_X: FloatArray
    grads_X: FloatArray
    states_X: FloatArray
    activations_X: FloatArray
    workspace_X: FloatArray
    memory_X: FloatArray
    fits_X: NDArray[np.bool_]
    choice_X: IntArray
    """Menu entry; the last ("full") stands for block recomputation of ``block_X`` layers."""
    block_X: IntArray


_Chosen = tuple[IntArray, FloatArray, FloatArray, IntArray, IntArray]
"""Row, extra backward seconds [X, V], held bytes, menu entry and block count of each entry."""


def layer_classes(job: JobSpec) -> tuple[tuple[LayerClass, ...], tuple[int, ...]]:
    """The distinct kinds of decoder layers, and the kind of each layer."""
    model = job.model
    windows = (False,) * model.num_layers
    if model.attention_window is not None:
        windows = model.window_pattern or (True,) * model.num_layers
    kinds = [LayerClass(moe, window) for moe, window in zip(model.moe_pattern, windows, strict=True)]
    classes = tuple(dict.fromkeys(kinds))
    return classes, tuple(classes.index(kind) for kind in kinds)


def class_prefix(job: JobSpec) -> IntArray:
    """[C, layers + 1]: how many of the first l layers are of class c."""
    classes, of_layer = layer_classes(job)
    prefix = np.zeros((len(classes), len(of_layer) + 1), dtype=np.int64)
    for index in range(len(classes)):
        prefix[index, 1:] = np.cumsum(np.asarray(of_layer) == index)
    return prefix


def _per_chunk(n: NDArray[Any], values_CX: FloatArray) -> FloatArray:
    """[X, ..., C] counts times [C, X] values of each row's option -> [X, ...]"""
    rows = values_CX.T.reshape((len(n),) + (1,) * (n.ndim - 2) + (len(values_CX),))
    total: FloatArray = (n * rows).sum(axis=-1)
    return total


def _held(flights_XQV: IntArray, bytes_XV: FloatArray) -> FloatArray:
    """Bytes of activations at the fullest moment. [X, Q, V] x [X, V, ...] -> [X, ...]"""
    if flights_XQV.shape[1:] == (1, 1):
        scaled: FloatArray = flights_XQV[:, 0, 0].reshape((-1,) + (1,) * (bytes_XV.ndim - 2)) * bytes_XV[:, 0]
        return scaled
    held: FloatArray = np.einsum("xqv,xv...->xq...", flights_XQV.astype(np.float64), bytes_XV).max(axis=1)
    return held


def stage_costs(
    job: JobSpec,
    table: StageTable,
    k: IntArray | int,
    slots: Slots,
    prefix_CN: IntArray,
    fixed: Recompute | None = None,
    allowed: Sequence[bool] | None = None,
    every: bool = False,
) -> Costs:
    """Times and bytes of option ``k`` of ``table`` (one, or one per row) for each row of ``slots``.

    Without ``fixed`` every row gets the recomputation with the shortest backward pass among those
    that fit (the paper's minimal feasible recomputation); where none fits, the one with the least
    memory, and ``fits_X`` is False. ``allowed`` masks menu entries. ``every``: each row with every
    recomputation, menu entries first, then blocks of 1, 2, … layers, whether it fits or not.
    """
    training, model = job.training, job.model
    start, count = slots.start_XV, slots.count_XV
    first, last = slots.first_X, slots.last_X
    n_XVC = (prefix_CN[:, start + count] - prefix_CN[:, start]).transpose(1, 2, 0).astype(np.float64)
    n_XC = n_XVC.sum(axis=1)
    k_X: IntArray = np.full(len(start), k) if isinstance(k, int) else k

    def per_row(values_CK: FloatArray) -> FloatArray:
        total: FloatArray = (n_XC * values_CK[:, k_X].T).sum(axis=1)
        return total

    forward = _per_chunk(n_XVC, table.forward_CK[:, k_X])
    backward = _per_chunk(n_XVC, table.backward_CK[:, k_X])
    forward[:, 0] += first * table.embedding_forward_K[k_X]
    backward[:, 0] += first * table.embedding_backward_K[k_X]
    forward[:, -1] += last * (table.head_forward_K[k_X] + model.mtp_layers * table.mtp_forward_K[k_X])
    backward[:, -1] += last * (table.head_backward_K[k_X] + model.mtp_layers * table.mtp_backward_K[k_X])

    dense = per_row(table.dense_params_CK)
    dense += first * table.embedding_params_K[k_X]
    dense += last * (table.head_params_K[k_X] + model.mtp_layers * table.mtp_dense_params_K[k_X])
    if model.tied_embeddings:  # one matrix where one stage is first and last, two copies otherwise
        dense -= (first & last) * (table.embedding_params_K[k_X] - model.learned_positions * model.hidden)
    elif model.mtp_layers:  # MTP embeds tokens on the last stage with a copy of its own
        dense += (last & ~first) * table.embedding_params_K[k_X]
    expert = per_row(table.expert_params_CK) + last * (model.mtp_layers * table.mtp_expert_params_K[k_X])
    weights = table.weight_bytes * (dense + expert)
    grads = table.grad_bytes * (dense + expert)
    states = dense * table.dense_optimizer_bytes_K[k_X] + expert * table.expert_optimizer_bytes_K[k_X]
    workspace = table.workspace_bytes_K[k_X]
    static = weights + grads + states + workspace
    edge_XV = np.zeros_like(forward)
    edge_XV[:, 0] += first * table.embedding_activation_K[k_X]
    once = last * (table.head_activation_K[k_X] + model.mtp_layers * table.mtp_activation_K[k_X])

    row, extra, held, choice, block = _recompute(
        table, k_X, slots, n_XVC, prefix_CN, edge_XV, static + once, fixed, allowed, every
    )
    if len(row) != len(start):
        forward, backward, n_XC, k_X = forward[row], backward[row], n_XC[row], k_X[row]
        dense, expert, static, once = dense[row], expert[row], static[row], once[row]
        weights, grads, states, workspace = weights[row], grads[row], states[row], workspace[row]
    activations = held + once
    memory = static + activations

    layers = np.maximum(n_XC.sum(axis=1), 1)
    overlapped = (layers - 1) / layers
    sync = dense * table.dense_sync_s_K[k_X] + expert * table.expert_sync_s_K[k_X] + table.sync_latency_s_K[k_X]
    if training.overlap_grad_reduce:
        # Buckets leave as the last microbatch's backward passes them; the last bucket has nothing to hide
        # behind. Recomputation is not counted as cover: a stage never gets faster by recomputing more.
        sync = np.maximum(sync - overlapped * backward.sum(axis=1), sync / layers)
    backward = backward + extra
    gather = dense * table.dense_gather_s_K[k_X] + expert * table.expert_gather_s_K[k_X]
    if training.overlap_param_gather:
        gather = np.maximum(gather - overlapped * forward.sum(axis=1), gather / layers)
    optimizer = dense * table.optimizer_s_K[k_X] + expert * table.expert_optimizer_s_K[k_X] + gather + table.step_s
    return Costs(
        row_X=row,
        forward_XV=forward,
        backward_XV=backward,
        recompute_X=extra.sum(axis=1),
        exposed_comm_X=per_row(table.exposed_comm_CK),
        sync_X=sync,
        optimizer_X=optimizer,
        weights_X=weights,
        grads_X=grads,
        states_X=states,
        activations_X=activations,
        workspace_X=workspace,
        memory_X=memory,
        fits_X=memory <= table.memory_limit_bytes,
        choice_X=choice,
        block_X=block,
    )


def _recompute(
    table: StageTable,
    k: IntArray,
    slots: Slots,
    n_XVC: FloatArray,
    prefix_CN: IntArray,
    edge_XV: FloatArray,
    other_X: FloatArray,
    fixed: Recompute | None,
    allowed: Sequence[bool] | None,
    every: bool,
) -> _Chosen:
    """The recomputation of each row: fixed, or the cheapest that fits (see ``Costs``)."""
    present_XC = n_XVC.sum(axis=1) > 0
    rows = np.arange(len(n_XVC))
    if fixed is not None and fixed.granularity == "full":
        if fixed.method == "uniform":
            return _uniform(table, k, slots, n_XVC, edge_XV, max(fixed.num_layers, 1))
        block = np.full(len(n_XVC), fixed.num_layers)
        time_XBV, bytes_XB = _blocks(table, k, slots, n_XVC, prefix_CN, edge_XV, np.asarray([fixed.num_layers]))
        return rows, time_XBV[:, 0], bytes_XB[:, 0], np.full(len(n_XVC), len(table.menu) - 1), block

    plain = len(table.menu) - 1  # every entry but the last, which is "full"
    # einsum, not matmul: no BLAS threads for such small sums, and the same digits on any machine
    time_XVR = np.einsum("xvc,rcx->xvr", n_XVC, table.recompute_RCK[:plain, :, k])
    bytes_XVR = np.einsum("xvc,rcx->xvr", n_XVC, table.activation_RCK[:plain, :, k]) + edge_XV[:, :, None]
    transient_XRC = table.transient_RCK[:plain, :, k].transpose(2, 0, 1)
    transient_XR = np.where(present_XC[:, None, :], transient_XRC, 0.0).max(axis=2)
    held_XR = _held(slots.flights_XQV, bytes_XVR) + transient_XR
    if fixed is not None:
        entry = table.menu.index(fixed)
        return (
            rows,
            time_XVR[:, :, entry],
            held_XR[:, entry],
            np.full(len(n_XVC), entry),
            np.zeros(len(n_XVC), np.int64),
        )

    if every:
        counts_B = np.arange(1, int(slots.count_XV.max(initial=1)) + 1)
        time_XBV, bytes_XB = _blocks(table, k, slots, n_XVC, prefix_CN, edge_XV, counts_B)
        time_XOV = np.concatenate([time_XVR.transpose(0, 2, 1), time_XBV], axis=1)
        many = time_XOV.shape[1]
        option = np.tile(np.arange(many), len(n_XVC))
        return (
            np.repeat(rows, many),
            time_XOV.reshape(-1, time_XOV.shape[2]),
            np.concatenate([held_XR, bytes_XB], axis=1).ravel(),
            np.minimum(option, plain),
            np.maximum(option - plain + 1, 0),
        )

    use = np.asarray(allowed if allowed is not None else (True,) * len(table.menu))
    limit = table.memory_limit_bytes - other_X
    cost_XR = np.where(use[None, :plain] & (held_XR <= limit[:, None]), time_XVR.sum(axis=1), np.inf)
    choice = cost_XR.argmin(axis=1)
    best = cost_XR[rows, choice]
    extra = time_XVR[rows, :, choice]
    held = held_XR[rows, choice]
    block = np.zeros(len(n_XVC), np.int64)
    # Block recomputation is worth a look wherever something must be recomputed.
    tight = np.flatnonzero(best > 0) if use[plain] else np.empty(0, np.int64)
    if len(tight):
        counts_B = np.arange(1, int(slots.count_XV[tight].max(initial=0)) + 1)
        part = Slots(
            slots.start_XV[tight],
            slots.count_XV[tight],
            slots.flights_XQV[tight],
            slots.first_X[tight],
            slots.last_X[tight],
        )
        time_XBV, bytes_XB = _blocks(table, k[tight], part, n_XVC[tight], prefix_CN, edge_XV[tight], counts_B)
        cost_XB = np.where(bytes_XB <= limit[tight, None], time_XBV.sum(axis=2), np.inf)
        at = cost_XB.argmin(axis=1)
        found = cost_XB[np.arange(len(tight)), at]
        hopeless = np.isinf(found) & np.isinf(best[tight])
        at = np.where(hopeless, bytes_XB.argmin(axis=1), at)
        better = (found < best[tight]) | hopeless
        where, at = tight[better], at[better]
        extra[where] = time_XBV[better, at]
        held[where] = bytes_XB[better, at]
        choice[where] = plain
        block[where] = counts_B[at]
        # Chunks of the same layers rank all choices alike; only others can leave two of them incomparable.
        counts = slots.count_XV[tight]
        mixed = (counts.max(axis=1) > counts.min(axis=1)) | (len(prefix_CN) > 1)
        if time_XVR.shape[1] > 1 and mixed.any():
            uneven = tight[mixed]
            at_row, option = _incomparable(
                np.concatenate([time_XVR[uneven].transpose(0, 2, 1), time_XBV[mixed]], axis=1),
                np.concatenate([np.isfinite(cost_XR[uneven]), np.isfinite(cost_XB[mixed])], axis=1),
                np.where(choice[uneven] == plain, plain + block[uneven] - 1, choice[uneven]),
            )
            is_block = option >= plain
            which = np.where(is_block, option - plain, 0)
            plain_entry = np.minimum(option, plain - 1)
            in_blocks = np.flatnonzero(mixed)[at_row]
            add_time = np.where(is_block[:, None], time_XBV[in_blocks, which], time_XVR[uneven[at_row], :, plain_entry])
            add_held = np.where(is_block, bytes_XB[in_blocks, which], held_XR[uneven[at_row], plain_entry])
            rows = np.concatenate([rows, uneven[at_row]])
            extra, held = np.concatenate([extra, add_time]), np.concatenate([held, add_held])
            choice = np.concatenate([choice, np.where(is_block, plain, option)])
            block = np.concatenate([block, np.where(is_block, counts_B[which], 0)])
    return rows, extra, held, choice, block


def _incomparable(time_XOV: FloatArray, fits_XO: NDArray[np.bool_], chosen_X: IntArray) -> tuple[IntArray, IntArray]:
    """(row, option) of what fits and is beaten by no other option in every chunk, the chosen one left out."""
    time_XOV = np.where(fits_XO[:, :, None], time_XOV, np.inf)
    mine, other = time_XOV[:, :, None, :], time_XOV[:, None, :, :]
    no_worse = (other <= mine).all(axis=3)
    better = no_worse & ((other < mine).any(axis=3) | np.tri(time_XOV.shape[1], k=-1, dtype=bool)[None])
    keep = fits_XO & ~better.any(axis=2)
    keep[np.arange(len(chosen_X)), chosen_X] = False
    row, option = np.nonzero(keep)
    return row, option


def _blocks(
    table: StageTable,
    k: IntArray,
    slots: Slots,
    n_XVC: FloatArray,
    prefix_CN: IntArray,
    edge_XV: FloatArray,
    counts_B: IntArray,
) -> tuple[FloatArray, FloatArray]:
    """Seconds [X, B, V] and held bytes [X, B] when the first B layers of each chunk are recomputed."""
    full, start = len(table.menu) - 1, slots.start_XV
    until_XBV = start[:, None, :] + np.minimum(counts_B[None, :, None], slots.count_XV[:, None, :])
    done_XBVC = (prefix_CN[:, until_XBV] - prefix_CN[:, start][:, :, None, :]).transpose(1, 2, 3, 0)
    kept_XBVC = n_XVC[:, None] - done_XBVC
    bytes_XBV = (
        _per_chunk(done_XBVC, table.activation_RCK[full][:, k])
        + _per_chunk(kept_XBVC, table.activation_RCK[0][:, k])
        + edge_XV[:, None, :]
    )
    held = _held(slots.flights_XQV, bytes_XBV.transpose(0, 2, 1))
    transient = np.maximum(
        np.where(done_XBVC.sum(axis=2) > 0, table.transient_RCK[full][:, k].T[:, None, :], 0.0),
        np.where(kept_XBVC.sum(axis=2) > 0, table.transient_RCK[0][:, k].T[:, None, :], 0.0),
    ).max(axis=2)
    return _per_chunk(done_XBVC, table.recompute_RCK[full][:, k]), held + transient


def _uniform(
    table: StageTable, k: IntArray, slots: Slots, n_XVC: FloatArray, edge_XV: FloatArray, unit: int
) -> _Chosen:
    """Full recomputation in units of ``unit`` layers: one input is kept per unit, one unit is rebuilt at a time."""
    full = len(table.menu) - 1
    count = np.maximum(slots.count_XV, 1)
    kept_XV = _per_chunk(n_XVC, table.activation_RCK[full][:, k]) * (-(-slots.count_XV // unit) / count) + edge_XV
    present_XC = n_XVC.sum(axis=1) > 0
    rebuilt_CX = table.transient_RCK[full][:, k] + (unit - 1) * table.activation_RCK[0][:, k]
    transient = np.where(present_XC, rebuilt_CX.T, 0.0).max(axis=1)
    rows = len(n_XVC)
    held = _held(slots.flights_XQV, kept_XV) + transient
    return (
        np.arange(rows),
        _per_chunk(n_XVC, table.recompute_RCK[full][:, k]),
        held,
        np.full(rows, full),
        np.full(rows, unit),
    )
