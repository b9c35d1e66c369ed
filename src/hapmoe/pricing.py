"""Prices every way to run a stage on one pool: the table that search and oracle share.

Legend: K option, R recomputation menu entry, C layer class.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hapmoe import memory
from hapmoe.cluster import Pool
from hapmoe.comm import collective_s, group_of
from hapmoe.counting import last_class, layers_by_class, param_gathers_K
from hapmoe.efficiency import Efficiency, efficiency_of
from hapmoe.job import JobSpec
from hapmoe.options import FloatArray, LayerClass, Options, StageTable
from hapmoe.plan import Recompute
from hapmoe.timing import Messages, Timed, host_s, time_ops
from hapmoe.workload import (
    Op,
    Shapes,
    embedding_ops,
    embedding_params,
    head_ops,
    head_params,
    layer_ops,
    layer_params,
    mtp_params,
    project_ops,
)

__all__ = ["Line", "explain", "price", "recompute_menu", "source_share"]

SELECTIVE = (
    ("core_attn",),
    ("moe_act",),
    ("layernorm",),
    ("mla_up_proj",),
    ("mlp",),
    ("shared_experts",),
    ("moe",),
    ("core_attn", "moe_act"),
    ("layernorm", "moe_act"),
    ("mla_up_proj", "moe_act", "layernorm"),
    ("mla_up_proj", "mlp"),
    ("mla_up_proj", "mlp", "moe_act", "layernorm"),
    ("layernorm", "moe"),
)


def recompute_menu(job: JobSpec, backend: Sequence[str] | None = None) -> tuple[Recompute, ...]:
    """The recomputation choices that a job may take: "none" first, "full" last.

    ``backend``: module names that the backend's version accepts; None: all of them.

    Source: megatron/core/transformer/transformer_config.py:1959-2032 (which module needs what).
    """
    model, training = job.model, job.training
    moe = model.moe
    legal = {"core_attn", "layernorm"}
    if not all(model.moe_pattern):
        legal.add("mlp")
    if moe is not None:
        if not training.overlap_moe_comm:
            legal.add("moe")
        if training.grouped_gemm:
            legal.add("moe_act")
        if moe.shared_ffn_hidden and not training.shared_expert_overlap:
            legal.add("shared_experts")
    if model.mla is not None:
        legal.add("mla_up_proj")
    if training.fp8_recipe == "delayed":
        legal -= {"moe_act", "layernorm"}
    if backend is not None:
        legal &= set(backend)
    chosen = [Recompute(granularity="selective", modules=entry) for entry in SELECTIVE if set(entry) <= legal]
    full = Recompute(granularity="full", method="block", num_layers=1)
    return (Recompute(), *chosen, full)


@dataclass(frozen=True, slots=True)
class Sums:
    """Seconds of one block of operations."""

    forward_K: FloatArray
    backward_K: FloatArray
    exposed_K: FloatArray


def _sum(timed: Sequence[Timed], count: int) -> Sums:
    forward_K, backward_K, exposed_K = np.zeros(count), np.zeros(count), np.zeros(count)
    for entry in timed:
        if entry.op.kind == "message":
            exposed_K += entry.forward_K
            if entry.op.phase == "forward":
                forward_K += entry.forward_K
            else:
                backward_K += entry.forward_K
        else:
            forward_K += entry.forward_K
            backward_K += entry.dgrad_K
            backward_K += entry.wgrad_K
    return Sums(forward_K, backward_K, exposed_K)


def _again(timed: Sequence[Timed], sums: Sums, menu: Sequence[Recompute]) -> FloatArray:
    """Seconds that each recomputation choice adds to a layer's backward pass. Shape [R, K]."""
    forward = [entry for entry in timed if entry.op.phase == "forward"]
    chosen = [[float(bool(set(entry.modules).intersection(part.op.modules))) for part in forward] for entry in menu]
    seconds_RK = np.asarray(chosen) @ np.stack([part.forward_K for part in forward])
    for row, entry in enumerate(menu):
        if entry.granularity == "full":
            seconds_RK[row] = sums.forward_K
    return np.asarray(seconds_RK)


def price(job: JobSpec, pool: Pool, options: Options, menu: Sequence[Recompute] | None = None) -> StageTable:
    """Times and bytes of K options on the devices of one pool. Meaning of every field: ``StageTable``."""
    menu = tuple(menu) if menu is not None else recompute_menu(job)
    shapes, count, model = Shapes.of(job, options), len(options), job.model
    efficiency = efficiency_of(pool.device)
    classes, known = tuple(layers_by_class(model)), Messages()
    sums, again, kept, transient, params = [], [], [], [], []
    for layer_class in classes:
        timed = time_ops(pool, shapes, layer_ops(shapes, layer_class), known)
        total = _sum(timed, count)
        floor_s, wait_s = host_s(job, efficiency, layer_class)
        back = efficiency.calibration["host_backward_calibration"]
        sums.append(
            Sums(
                np.maximum(total.forward_K, floor_s) + wait_s,
                np.maximum(total.backward_K, back * floor_s) + back * wait_s,
                total.exposed_K,
            )
        )
        again.append(_again(timed, sums[-1], menu))
        kept.append(memory.activation_bytes(memory.layer_tensors(shapes, layer_class), menu))
        transient.append(memory.transient_bytes(shapes, layer_class, kept[-1]))
        params.append(layer_params(job, options, layer_class))
    embedding = _sum(time_ops(pool, shapes, embedding_ops(shapes), known), count)
    head = _sum(time_ops(pool, shapes, head_ops(shapes), known), count)
    zero_K = np.zeros(count)
    mtp, mtp_kept_K, mtp_dense_K, mtp_expert_K = Sums(zero_K, zero_K, zero_K), zero_K, zero_K, zero_K
    if model.mtp_layers:
        inner = classes.index(last_class(model))
        project = _sum(time_ops(pool, shapes, project_ops(shapes), known), count)
        parts = (project, sums[inner], head)
        mtp = Sums(
            np.sum([part.forward_K for part in parts], axis=0),
            np.sum([part.backward_K for part in parts], axis=0),
            np.sum([part.exposed_K for part in parts], axis=0),
        )
        mtp_kept_K = memory.mtp_bytes(shapes, kept[inner][0])
        mtp_dense_K, mtp_expert_K = mtp_params(job, options, classes[inner])
    sync = _Sync.of(job, pool, options)
    return StageTable(
        options=options,
        classes=classes,
        menu=menu,
        forward_CK=np.stack([part.forward_K for part in sums]),
        backward_CK=np.stack([part.backward_K for part in sums]),
        exposed_comm_CK=np.stack([part.exposed_K for part in sums]),
        recompute_RCK=np.stack(again, axis=1),
        activation_RCK=np.stack(kept, axis=1),
        transient_RCK=np.stack(transient, axis=1),
        embedding_forward_K=embedding.forward_K,
        embedding_backward_K=embedding.backward_K,
        embedding_activation_K=memory.embedding_bytes(shapes),
        head_forward_K=head.forward_K,
        head_backward_K=head.backward_K,
        head_activation_K=memory.head_bytes(shapes),
        mtp_forward_K=mtp.forward_K,
        mtp_backward_K=mtp.backward_K,
        mtp_activation_K=mtp_kept_K,
        dense_params_CK=np.stack([dense_K for dense_K, _ in params]),
        expert_params_CK=np.stack([expert_K for _, expert_K in params]),
        embedding_params_K=embedding_params(job, options),
        head_params_K=head_params(job, options),
        mtp_dense_params_K=mtp_dense_K,
        mtp_expert_params_K=mtp_expert_K,
        weight_bytes=memory.weight_bytes(job),
        grad_bytes=job.training.grad_bytes,
        dense_optimizer_bytes_K=memory.optimizer_bytes(job, (options.dp_K * options.cp_K).astype(np.float64)),
        expert_optimizer_bytes_K=memory.optimizer_bytes(job, options.edp_K.astype(np.float64)),
        dense_sync_s_K=sync.dense_K,
        expert_sync_s_K=sync.expert_K,
        dense_gather_s_K=sync.dense_gather_K,
        expert_gather_s_K=sync.expert_gather_K,
        sync_latency_s_K=sync.latency_K + efficiency.calibration["step_s_calibration"],
        optimizer_s_K=_optimizer_s(job, efficiency, (options.dp_K * options.cp_K).astype(np.float64)),
        expert_optimizer_s_K=_optimizer_s(job, efficiency, options.edp_K.astype(np.float64)),
        workspace_bytes_K=memory.workspace_bytes(pool, options),
        memory_limit_bytes=memory.memory_limit_bytes(pool),
    )


@dataclass(frozen=True, slots=True)
class _Sync:
    """Seconds per parameter of gradient reduction and parameter gather, dense and expert."""

    dense_K: FloatArray
    expert_K: FloatArray
    dense_gather_K: FloatArray
    expert_gather_K: FloatArray
    latency_K: FloatArray

    @classmethod
    def of(cls, job: JobSpec, pool: Pool, options: Options) -> _Sync:
        training, count = job.training, len(options)
        distributed = training.distributed_optimizer
        # buckets of 40 M parameters (distributed_data_parallel_config.py: max(40e6, 1e6 * dp))
        bucket = 40e6
        result: list[FloatArray] = []
        latency_K = np.zeros(count)
        for axis in ("dp", "edp"):
            group = group_of(pool, options, axis)
            collective = "reduce_scatter" if distributed else "all_reduce"
            reduce_K = collective_s(pool, group, collective, np.full(count, bucket * training.grad_reduce_bytes))
            latency_K = latency_K + collective_s(pool, group, collective, np.ones(count))
            result.append(reduce_K / bucket)
            gather_K = np.zeros(count)
            if distributed:
                size = 1.0 if training.fp8_param_gather else 2.0 if training.precision != "fp32" else 4.0
                gather_K = collective_s(pool, group, "all_gather", np.full(count, bucket * size)) / bucket
                gather_K = gather_K * param_gathers_K(job, options)
            result.append(gather_K)
        return cls(result[0], result[2], result[1], result[3], latency_K)


def _optimizer_s(job: JobSpec, efficiency: Efficiency, shards_K: FloatArray) -> FloatArray:
    """Seconds per parameter of one optimizer step: it is bound by memory.

    Adam reads gradient, master and moments, writes master, moments and the weight (about 30 bytes
    per parameter of the shard); zeroing the gradient buffer writes all of it.
    """
    training = job.training
    states = training.main_params_bytes + training.exp_avg_bytes + training.exp_avg_sq_bytes
    traffic = training.main_grads_bytes + 2 * states + 2.0
    rate = efficiency.memory_bytes_per_s * efficiency.e_elementwise
    shards_K = shards_K if training.distributed_optimizer else np.ones(len(shards_K))
    device = 1.0 - training.optimizer_offload_fraction
    seconds_K = device * traffic / rate / shards_K + training.grad_bytes / rate
    if training.optimizer_offload_fraction:
        # gradients down, weights up over PCIe, Adam in host memory: ASSUMED 25 GB/s per device
        seconds_K = seconds_K + training.optimizer_offload_fraction * (6.0 + traffic) / 25e9 / shards_K
    return np.asarray(seconds_K)


@dataclass(frozen=True, slots=True)
class Line:
    """One operation of a layer in ``predict --explain``."""

    block: str
    name: str
    forward_s: float
    backward_s: float
    bound: str
    """compute, memory, network, latency or host."""
    source: str


def explain(job: JobSpec, pool: Pool, options: Options) -> tuple[Line, ...]:
    """Every operation of each layer class, embedding and head, for the first option."""
    shapes = Shapes.of(job, options)
    efficiency = efficiency_of(pool.device)
    origin = "assumed" if efficiency.assumed else "roofline"
    lines: list[Line] = []
    blocks: list[tuple[str, tuple[Op, ...], LayerClass | None]] = []
    for kind in layers_by_class(job.model):
        name = f"{'moe' if kind.moe else 'dense'} layer{' (window)' if kind.window else ''}"
        blocks.append((name, layer_ops(shapes, kind), kind))
    blocks += [("embedding", embedding_ops(shapes), None), ("head", head_ops(shapes), None)]
    if job.model.mtp_layers:
        blocks.append(("mtp projection", project_ops(shapes), None))
    for block, ops, layer_class in blocks:
        forward_s = backward_s = 0.0
        for timed in time_ops(pool, shapes, ops):
            line = _line(block, timed, origin)
            forward_s, backward_s = forward_s + line.forward_s, backward_s + line.backward_s
            if line.forward_s or line.backward_s:
                lines.append(line)
        if layer_class is not None:
            floor_s, wait_s = host_s(job, efficiency, layer_class)
            back = efficiency.calibration["host_backward_calibration"]
            wait = (
                max(floor_s - forward_s, 0.0) + wait_s,
                max(back * floor_s - backward_s, 0.0) + back * wait_s,
            )
            if any(wait):
                lines.append(Line(block, "host", *wait, "host", origin))
    return tuple(lines)


def _line(block: str, timed: Timed, origin: str) -> Line:
    op, forward_s = timed.op, float(timed.forward_K[0])
    backward_s = float(timed.dgrad_K[0] + timed.wgrad_K[0])
    if op.kind == "message":
        small = float(np.ravel(op.bytes_K)[0]) < 1e6
        forward_s, backward_s = (forward_s, 0.0) if op.phase == "forward" else (0.0, forward_s)
        bound = "latency" if small else "network"
    elif float(timed.full_K[0]) < 0.5 * forward_s:
        bound = "latency"
    else:
        bound = "memory" if float(timed.memory_bound_K[0]) else "compute"
    return Line(block, op.name, forward_s, backward_s, bound, origin)


def source_share(job: JobSpec, pool: Pool) -> dict[str, float]:
    """Shares of a stage's time by where the numbers come from.

    Without measured tables everything is a roofline with published efficiency curves, or assumed
    where the kind has no rows of its own.
    """
    names = ("measured", "interpolated", "extrapolated", "roofline", "assumed")
    chosen = "assumed" if efficiency_of(pool.device).assumed else "roofline"
    return {name: float(name == chosen) for name in names}
