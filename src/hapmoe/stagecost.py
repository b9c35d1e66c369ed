"""From layers on a stage to its times and bytes: one formula for the oracle and for the search.

Legend: X rows (one way to fill one stage each), V virtual stages, C layer classes, R menu entries,
Q moments of fullest memory, B counts of recomputed layers. Seconds are of one microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    """Times and bytes of X ways to fill a stage, each with its cheapest recomputation that fits."""

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
    k: int,
    slots: Slots,
    prefix_CN: IntArray,
    fixed: Recompute | None = None,
    allowed: Sequence[bool] | None = None,
) -> Costs:
    """Times and bytes of option ``k`` of ``table`` for each row of ``slots``.

    Without ``fixed`` every row gets the recomputation with the shortest backward pass among those
    that fit (the paper's minimal feasible recomputation); where none fits, the one with the least
    memory, and ``fits_X`` is False. ``allowed`` masks menu entries.
    """
    training, model = job.training, job.model
    start, count = slots.start_XV, slots.count_XV
    first, last = slots.first_X, slots.last_X
    n_XVC = (prefix_CN[:, start + count] - prefix_CN[:, start]).transpose(1, 2, 0)
    n_XC = n_XVC.sum(axis=1)

    forward = n_XVC @ table.forward_CK[:, k]
    backward = n_XVC @ table.backward_CK[:, k]
    forward[:, 0] += first * table.embedding_forward_K[k]
    backward[:, 0] += first * table.embedding_backward_K[k]
    forward[:, -1] += last * (table.head_forward_K[k] + model.mtp_layers * table.mtp_forward_K[k])
    backward[:, -1] += last * (table.head_backward_K[k] + model.mtp_layers * table.mtp_backward_K[k])

    dense = n_XC @ table.dense_params_CK[:, k]
    dense += first * table.embedding_params_K[k]
    dense += last * (table.head_params_K[k] + model.mtp_layers * table.mtp_dense_params_K[k])
    if model.tied_embeddings:  # one matrix where one stage is first and last, two copies otherwise
        dense -= (first & last) * table.embedding_params_K[k]
    elif model.mtp_layers:  # MTP embeds tokens on the last stage with a copy of its own
        dense += (last & ~first) * table.embedding_params_K[k]
    expert = n_XC @ table.expert_params_CK[:, k] + last * (model.mtp_layers * table.mtp_expert_params_K[k])
    weights = table.weight_bytes * (dense + expert)
    grads = table.grad_bytes * (dense + expert)
    states = dense * table.dense_optimizer_bytes_K[k] + expert * table.expert_optimizer_bytes_K[k]
    workspace = np.full(len(start), table.workspace_bytes_K[k])
    static = weights + grads + states + workspace
    edge_XV = np.zeros_like(forward)
    edge_XV[:, 0] += first * table.embedding_activation_K[k]
    once = last * (table.head_activation_K[k] + model.mtp_layers * table.mtp_activation_K[k])

    extra, held, choice, block = _recompute(
        table, k, slots, n_XVC, prefix_CN, edge_XV, static + once, fixed, allowed
    )
    backward = backward + extra
    activations = held + once
    memory = static + activations

    layers = np.maximum(n_XC.sum(axis=1), 1)
    overlapped = (layers - 1) / layers
    sync = dense * table.dense_sync_s_K[k] + expert * table.expert_sync_s_K[k] + table.sync_latency_s_K[k]
    if training.overlap_grad_reduce:
        # Buckets leave as the last microbatch's backward passes them; the last bucket has nothing to hide behind.
        sync = np.maximum(sync - overlapped * backward.sum(axis=1), sync / layers)
    gather = dense * table.dense_gather_s_K[k] + expert * table.expert_gather_s_K[k]
    if training.overlap_param_gather:
        gather = np.maximum(gather - overlapped * forward.sum(axis=1), gather / layers)
    optimizer = dense * table.optimizer_s_K[k] + expert * table.expert_optimizer_s_K[k] + gather
    return Costs(
        forward_XV=forward,
        backward_XV=backward,
        recompute_X=extra.sum(axis=1),
        exposed_comm_X=n_XC @ table.exposed_comm_CK[:, k],
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
    k: int,
    slots: Slots,
    n_XVC: IntArray,
    prefix_CN: IntArray,
    edge_XV: FloatArray,
    other_X: FloatArray,
    fixed: Recompute | None,
    allowed: Sequence[bool] | None,
) -> tuple[FloatArray, FloatArray, IntArray, IntArray]:
    """Extra backward seconds [X, V], held bytes [X], menu entry [X] and block count [X] of each row."""
    activation_RC, extra_RC = table.activation_RCK[:, :, k], table.recompute_RCK[:, :, k]
    transient_RC = table.transient_RCK[:, :, k]
    present_XC = n_XVC.sum(axis=1) > 0
    rows = np.arange(len(n_XVC))
    if fixed is not None and fixed.granularity == "full":
        if fixed.method == "uniform":
            return _uniform(table, k, slots, n_XVC, edge_XV, max(fixed.num_layers, 1))
        block = np.full(len(n_XVC), fixed.num_layers)
        time_XBV, bytes_XB = _blocks(table, k, slots, n_XVC, prefix_CN, edge_XV, np.asarray([fixed.num_layers]))
        return time_XBV[:, 0], bytes_XB[:, 0], np.full(len(n_XVC), len(table.menu) - 1), block

    plain = len(table.menu) - 1  # every entry but the last, which is "full"
    time_XVR = n_XVC @ extra_RC[:plain].T
    bytes_XVR = n_XVC @ activation_RC[:plain].T + edge_XV[:, :, None]
    transient_XR = np.where(present_XC[:, None, :], transient_RC[None, :plain], 0.0).max(axis=2)
    held_XR = _held(slots.flights_XQV, bytes_XVR) + transient_XR
    if fixed is not None:
        entry = table.menu.index(fixed)
        return time_XVR[:, :, entry], held_XR[:, entry], np.full(len(n_XVC), entry), np.zeros(len(n_XVC), np.int64)

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
            slots.start_XV[tight], slots.count_XV[tight], slots.flights_XQV[tight], slots.first_X[tight], slots.last_X[tight]
        )
        time_XBV, bytes_XB = _blocks(table, k, part, n_XVC[tight], prefix_CN, edge_XV[tight], counts_B)
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
    return extra, held, choice, block


def _blocks(
    table: StageTable,
    k: int,
    slots: Slots,
    n_XVC: IntArray,
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
        done_XBVC @ table.activation_RCK[full, :, k] + kept_XBVC @ table.activation_RCK[0, :, k] + edge_XV[:, None, :]
    )
    held = _held(slots.flights_XQV, bytes_XBV.transpose(0, 2, 1))
    transient = np.maximum(
        np.where(done_XBVC.sum(axis=2) > 0, table.transient_RCK[full, :, k], 0.0),
        np.where(kept_XBVC.sum(axis=2) > 0, table.transient_RCK[0, :, k], 0.0),
    ).max(axis=2)
    return done_XBVC @ table.recompute_RCK[full, :, k], held + transient


def _uniform(
    table: StageTable, k: int, slots: Slots, n_XVC: IntArray, edge_XV: FloatArray, unit: int
) -> tuple[FloatArray, FloatArray, IntArray, IntArray]:
    """Full recomputation in units of ``unit`` layers: one input is kept per unit, one unit is rebuilt at a time."""
    full = len(table.menu) - 1
    count = np.maximum(slots.count_XV, 1)
    kept_XV = (n_XVC @ table.activation_RCK[full, :, k]) * (-(-slots.count_XV // unit) / count) + edge_XV
    present_XC = n_XVC.sum(axis=1) > 0
    rebuilt = table.transient_RCK[full, :, k] + (unit - 1) * table.activation_RCK[0, :, k]
    transient = np.where(present_XC, rebuilt[None, :], 0.0).max(axis=1)
    rows = len(n_XVC)
    held = _held(slots.flights_XQV, kept_XV) + transient
    return n_XVC @ table.recompute_RCK[full, :, k], held, np.full(rows, full), np.full(rows, unit)
