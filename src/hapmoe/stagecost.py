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
    """Sum over classes of counts times values of each row's option. [C, ..., X, V] and [C, X] -> [..., X, V]"""
    total: FloatArray = n[0] * values_CX[0][:, None]
    for number, value in zip(n[1:], values_CX[1:], strict=True):
        total += number * value[:, None]
    return total


def _held(flights_XQV: IntArray, bytes_OXV: FloatArray) -> FloatArray:
    """Bytes of activations at the fullest moment. [X, Q, V] x [O, X, V] -> [O, X]"""
    if flights_XQV.shape[1:] == (1, 1):
        scaled: FloatArray = flights_XQV[:, 0, 0] * bytes_OXV[:, :, 0]
        return scaled
    held: FloatArray = np.einsum("xqv,oxv->qox", flights_XQV.astype(np.float64), bytes_OXV).max(axis=0)
    return held


def _over_chunks(n_CXV: NDArray[Any]) -> NDArray[Any]:
    """[..., V] -> [...], faster than ``sum`` for one chunk."""
    return n_CXV[..., 0] if n_CXV.shape[-1] == 1 else n_CXV.sum(axis=-1)


def _rebuilt(present_CX: NDArray[np.bool_], transient_OCX: FloatArray) -> FloatArray:
    """The largest working set among the classes that are there. [..., C, X] -> [..., X]"""
    largest: FloatArray = np.where(present_CX, transient_OCX, 0.0).max(axis=-2)
    return largest


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
    n_CXV = (prefix_CN[:, start + count] - prefix_CN[:, start]).astype(np.float64)
    n_CX = _over_chunks(n_CXV)
    k_X: IntArray = np.full(len(start), k) if isinstance(k, int) else k

    def per_row(values_CK: FloatArray) -> FloatArray:
        total: FloatArray = _per_chunk(n_CX[..., None], values_CK[:, k_X])[:, 0]
        return total

    forward = _per_chunk(n_CXV, table.forward_CK[:, k_X])
    backward = _per_chunk(n_CXV, table.backward_CK[:, k_X])
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
        table, k_X, slots, n_CXV, prefix_CN, edge_XV, static + once, fixed, allowed, every
    )
    if len(row) != len(start):
        forward, backward, n_CX, k_X = forward[row], backward[row], n_CX[:, row], k_X[row]
        dense, expert, static, once = dense[row], expert[row], static[row], once[row]
        weights, grads, states, workspace = weights[row], grads[row], states[row], workspace[row]
    activations = held + once
    memory = static + activations

    layers = np.maximum(n_CX.sum(axis=0), 1)
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
    optimizer = dense * table.optimizer_s_K[k_X] + expert * table.expert_optimizer_s_K[k_X] + gather
    optimizer += table.step_s_K[k_X]
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
        fits_X=memory <= table.memory_limit_bytes_K[k_X],
        choice_X=choice,
        block_X=block,
    )


def _recompute(
    table: StageTable,
    k: IntArray,
    slots: Slots,
    n_CXV: FloatArray,
    prefix_CN: IntArray,
    edge_XV: FloatArray,
    other_X: FloatArray,
    fixed: Recompute | None,
    allowed: Sequence[bool] | None,
    every: bool,
) -> _Chosen:
    """The recomputation of each row: fixed, or the cheapest that fits (see ``Costs``)."""
    many = n_CXV.shape[1]
    rows = np.arange(many)
    if fixed is not None and fixed.granularity == "full":
        if fixed.method == "uniform":
            return _uniform(table, k, slots, n_CXV, edge_XV, max(fixed.num_layers, 1))
        block = np.full(many, fixed.num_layers)
        time_BXV, bytes_BX = _blocks(table, k, slots, n_CXV, prefix_CN, edge_XV, np.asarray([fixed.num_layers]))
        return rows, time_BXV[0], bytes_BX[0], np.full(many, len(table.menu) - 1), block

    plain = len(table.menu) - 1  # every entry but the last, which is "full"
    only = None if fixed is None else table.menu.index(fixed)
    at = slice(plain) if only is None else slice(only, only + 1)
    time_RXV = _per_entry(n_CXV, table.recompute_RCK[at, :, k])
    bytes_RXV = _per_entry(n_CXV, table.activation_RCK[at, :, k]) + edge_XV
    held_RX = _held(slots.flights_XQV, bytes_RXV) + _rebuilt(_over_chunks(n_CXV) > 0, table.transient_RCK[at, :, k])
    if only is not None:
        return rows, time_RXV[0], held_RX[0], np.full(many, only), np.zeros(many, np.int64)

    if every:
        counts_B = np.arange(1, int(slots.count_XV.max(initial=1)) + 1)
        time_BXV, bytes_BX = _blocks(table, k, slots, n_CXV, prefix_CN, edge_XV, counts_B)
        time_OXV = np.concatenate([time_RXV, time_BXV])
        option = np.tile(np.arange(len(time_OXV)), many)
        return (
            np.repeat(rows, len(time_OXV)),
            time_OXV.swapaxes(0, 1).reshape(-1, time_OXV.shape[2]),
            np.concatenate([held_RX, bytes_BX]).T.ravel(),
            np.minimum(option, plain),
            np.maximum(option - plain + 1, 0),
        )

    use = np.asarray(allowed if allowed is not None else (True,) * len(table.menu))
    limit = table.memory_limit_bytes_K[k] - other_X
    cost_RX = np.where(use[:plain, None] & (held_RX <= limit), _over_chunks(time_RXV), np.inf)
    choice = cost_RX.argmin(axis=0)
    best = cost_RX[choice, rows]
    extra = time_RXV[choice, rows]
    held = held_RX[choice, rows]
    block = np.zeros(many, np.int64)
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
        time_BXV, bytes_BX = _blocks(table, k[tight], part, n_CXV[:, tight], prefix_CN, edge_XV[tight], counts_B)
        cost_BX = np.where(bytes_BX <= limit[tight], _over_chunks(time_BXV), np.inf)
        at_X = cost_BX.argmin(axis=0)
        every_tight = np.arange(len(tight))
        found = cost_BX[at_X, every_tight]
        hopeless = np.isinf(found) & np.isinf(best[tight])
        at_X = np.where(hopeless, bytes_BX.argmin(axis=0), at_X)
        better = np.flatnonzero((found < best[tight]) | hopeless)
        where, at_X = tight[better], at_X[better]
        extra[where] = time_BXV[at_X, better]
        held[where] = bytes_BX[at_X, better]
        choice[where] = plain
        block[where] = counts_B[at_X]
        # Chunks of the same layers rank all choices alike; only others can leave two of them incomparable.
        counts = slots.count_XV[tight]
        mixed = np.flatnonzero((counts.max(axis=1) > counts.min(axis=1)) | (len(prefix_CN) > 1))
        if time_RXV.shape[2] > 1 and len(mixed):
            uneven = tight[mixed]
            at_row, option = _incomparable(
                np.concatenate([time_RXV[:, uneven], time_BXV[:, mixed]]),
                np.isfinite(np.concatenate([cost_RX[:, uneven], cost_BX[:, mixed]])),
                np.where(choice[uneven] == plain, plain + block[uneven] - 1, choice[uneven]),
            )
            is_block = option >= plain
            which = np.where(is_block, option - plain, 0)
            plain_entry = np.minimum(option, plain - 1)
            in_blocks = mixed[at_row]
            add_time = np.where(is_block[:, None], time_BXV[which, in_blocks], time_RXV[plain_entry, uneven[at_row]])
            add_held = np.where(is_block, bytes_BX[which, in_blocks], held_RX[plain_entry, uneven[at_row]])
            rows = np.concatenate([rows, uneven[at_row]])
            extra, held = np.concatenate([extra, add_time]), np.concatenate([held, add_held])
            choice = np.concatenate([choice, np.where(is_block, plain, option)])
            block = np.concatenate([block, np.where(is_block, counts_B[which], 0)])
    return rows, extra, held, choice, block


def _per_entry(n_CXV: FloatArray, values_RCX: FloatArray) -> FloatArray:
    """[R, X, V] of every menu entry. einsum, not matmul: no BLAS threads for such small sums, and the same digits
    on any machine."""
    total: FloatArray = np.einsum("cxv,rcx->rxv", n_CXV, values_RCX)
    return total


def _incomparable(time_OXV: FloatArray, fits_OX: NDArray[np.bool_], chosen_X: IntArray) -> tuple[IntArray, IntArray]:
    """(row, option) of what fits and is beaten by no other option in every chunk, the chosen one left out."""
    many = len(time_OXV)
    no_worse = np.ones((many, many, time_OXV.shape[1]), bool)  # is the first index' option as good as the second's?
    better = np.zeros_like(no_worse) | np.tri(many, k=-1, dtype=bool).T[:, :, None]
    for time_OX in np.where(fits_OX[:, :, None], time_OXV, np.inf).transpose(2, 0, 1):
        no_worse &= time_OX[:, None] <= time_OX[None]
        better |= time_OX[:, None] < time_OX[None]
    keep = fits_OX & ~(no_worse & better).any(axis=0)
    keep[chosen_X, np.arange(len(chosen_X))] = False
    row, option = np.nonzero(keep.T)
    return row, option


def _blocks(
    table: StageTable,
    k: IntArray,
    slots: Slots,
    n_CXV: FloatArray,
    prefix_CN: IntArray,
    edge_XV: FloatArray,
    counts_B: IntArray,
) -> tuple[FloatArray, FloatArray]:
    """Seconds [B, X, V] and held bytes [B, X] when the first B layers of each chunk are recomputed."""
    full, start = len(table.menu) - 1, slots.start_XV
    until_BXV = start + np.minimum(counts_B[:, None, None], slots.count_XV)
    done_CBXV = prefix_CN[:, until_BXV] - prefix_CN[:, start][:, None]
    kept_CBXV = n_CXV[:, None] - done_CBXV
    bytes_BXV = (
        _per_chunk(done_CBXV, table.activation_RCK[full][:, k])
        + _per_chunk(kept_CBXV, table.activation_RCK[0][:, k])
        + edge_XV
    )
    transient = np.maximum(
        _rebuilt((_over_chunks(done_CBXV) > 0).swapaxes(0, 1), table.transient_RCK[full][:, k]),
        _rebuilt((_over_chunks(kept_CBXV) > 0).swapaxes(0, 1), table.transient_RCK[0][:, k]),
    )
    return _per_chunk(done_CBXV, table.recompute_RCK[full][:, k]), _held(slots.flights_XQV, bytes_BXV) + transient


def _uniform(
    table: StageTable, k: IntArray, slots: Slots, n_CXV: FloatArray, edge_XV: FloatArray, unit: int
) -> _Chosen:
    """Full recomputation in units of ``unit`` layers: one input is kept per unit, one unit is rebuilt at a time."""
    full, rows = len(table.menu) - 1, n_CXV.shape[1]
    count = np.maximum(slots.count_XV, 1)
    kept_XV = _per_chunk(n_CXV, table.activation_RCK[full][:, k]) * (-(-slots.count_XV // unit) / count) + edge_XV
    rebuilt_CX = table.transient_RCK[full][:, k] + (unit - 1) * table.activation_RCK[0][:, k]
    held = _held(slots.flights_XQV, kept_XV[None])[0] + _rebuilt(_over_chunks(n_CXV) > 0, rebuilt_CX)
    return (
        np.arange(rows),
        _per_chunk(n_CXV, table.recompute_RCK[full][:, k]),
        held,
        np.full(rows, full),
        np.full(rows, unit),
    )
