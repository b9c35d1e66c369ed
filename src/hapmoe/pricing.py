"""Prices every way to run a stage on one pool: the table that search and oracle share.

Legend: K option, R recomputation menu entry, C layer class, O operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hapmoe import memory
from hapmoe.cluster import Pool
from hapmoe.comm import collective_s, group_of
from hapmoe.counting import last_class, layers_by_class
from hapmoe.efficiency import Efficiency, attention_seconds, efficiency_of, gemm_seconds
from hapmoe.job import JobSpec
from hapmoe.options import FloatArray, LayerClass, Options, StageTable
from hapmoe.plan import Recompute
from hapmoe.workload import (
    Op,
    Shapes,
    embedding_ops,
    embedding_params,
    graph_scope,
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
class Timed:
    """An operation and its seconds."""

    op: Op
    forward_K: FloatArray
    """Compute: its forward pass. Messages: the exposed part, of the pass they belong to."""
    dgrad_K: FloatArray
    wgrad_K: FloatArray
    full_K: FloatArray
    """Messages: with nothing hidden."""
    memory_bound_K: FloatArray


def _precision(job: JobSpec, op: Op) -> str:
    training = job.training
    if op.kind not in ("gemm", "grouped_gemm"):
        return training.precision
    if op.precision:
        return training.precision if op.precision == "bf16" else op.precision
    return "fp4" if training.fp4 else "fp8" if training.fp8_recipe else training.precision


def _time_gemms(efficiency: Efficiency, job: JobSpec, ops: Sequence[Op], count: int) -> dict[int, Timed]:
    """All GEMMs of a layer at once: stacked by precision and kind, three passes each."""
    done: dict[int, Timed] = {}
    sets: dict[tuple[str, bool], list[int]] = {}
    for index, op in enumerate(ops):
        if op.kind in ("gemm", "grouped_gemm"):
            sets.setdefault((_precision(job, op), op.kind == "grouped_gemm"), []).append(index)
    for (precision, grouped), indices in sets.items():
        shape = (4, len(indices), count)
        stack = np.empty(shape)
        for row, index in enumerate(indices):
            op = ops[index]
            stack[0, row], stack[1, row], stack[2, row], stack[3, row] = op.m_K, op.n_K, op.k_K, op.groups_K
        m_OK, n_OK, k_OK, groups_OK = stack
        peak = "fp8" if precision == "fp4" and "fp4" not in efficiency.peak else precision
        factor = efficiency.grouped["fp8" if peak in ("fp8", "fp4") else "bf16"] if grouped else 1.0
        back = factor * efficiency.gemm_backward
        forward_OK, bound_OK = gemm_seconds(efficiency, m_OK, n_OK, k_OK, groups_K=groups_OK, precision=peak, factor=factor)
        dgrad_OK, _ = gemm_seconds(efficiency, m_OK, k_OK, n_OK, groups_K=groups_OK, precision=peak, factor=back)
        wgrad_OK, _ = gemm_seconds(efficiency, n_OK, k_OK, m_OK, groups_K=groups_OK, precision=peak, factor=back)
        if peak in ("fp8", "fp4"):
            # quantize the input (forward) and the output gradient (backward): read 2 bytes, write 2 x 1
            each = 4.0 / (efficiency.memory_bytes_per_s * efficiency.e_elementwise)
            forward_OK = forward_OK + groups_OK * m_OK * k_OK * each
            dgrad_OK = dgrad_OK + groups_OK * m_OK * n_OK * each
        launch = efficiency.gemm["bf16"].launch_s
        for row, index in enumerate(indices):
            launches_K = launch * ops[index].launches_K
            done[index] = Timed(
                ops[index],
                forward_OK[row] + launches_K,
                dgrad_OK[row] + launches_K,
                wgrad_OK[row] + launches_K,
                forward_OK[row],
                bound_OK[row],
            )
    return done


def time_ops(pool: Pool, shapes: Shapes, ops: Sequence[Op]) -> tuple[Timed, ...]:
    """Seconds of every operation, messages with what hides them taken off."""
    job, options = shapes.job, shapes.options
    efficiency = efficiency_of(pool.device)
    count = len(options)
    zero_K = np.zeros(count)
    done = _time_gemms(efficiency, job, ops, count)
    bandwidth = efficiency.memory_bytes_per_s * efficiency.e_elementwise
    permute = efficiency.memory_bytes_per_s * efficiency.e_permute
    always_K = np.ones(count)
    for index, op in enumerate(ops):
        if op.kind == "attention":
            flops_K, queries_K, heads_K = op.flops_K + zero_K, op.m_K + zero_K, op.groups_K + zero_K
            precision = job.training.precision
            forward_K = attention_seconds(efficiency, flops_K, queries_K, heads_K, precision=precision)
            backward_K = attention_seconds(
                efficiency, op.backward * flops_K, queries_K, heads_K, precision=precision, backward=True
            )
            if not job.training.flash_attention:
                traffic_K = op.bytes_K / bandwidth
                forward_K, backward_K = forward_K + traffic_K, backward_K + 2 * traffic_K
            done[index] = Timed(op, forward_K, backward_K, zero_K, forward_K, zero_K)
        elif op.kind == "elementwise":
            rate = permute if op.part == "dispatch" else bandwidth
            traffic_K = op.bytes_K * (1.0 / rate) + zero_K
            launch_K = efficiency.launch_s * op.launches_K
            done[index] = Timed(op, traffic_K + launch_K, traffic_K * op.backward + launch_K, zero_K, traffic_K, always_K)
    _time_messages(pool, shapes, ops, done, efficiency)
    return tuple(done[index] for index in range(len(ops)))


def _time_messages(
    pool: Pool, shapes: Shapes, ops: Sequence[Op], done: dict[int, Timed], efficiency: Efficiency
) -> None:
    by_name = {timed.op.name: timed for timed in done.values()}
    compute = [timed for timed in done.values()]
    moe = shapes.job.model.moe
    copies = float(moe.top_k) if moe else 1.0
    skew_K = 1.0 + efficiency.calibration["imbalance_a2a_calibration"] * (shapes.imbalance_K - 1.0)
    groups = {axis: group_of(pool, shapes.options, axis) for axis in {op.axis for op in ops if op.kind == "message"}}
    zero_K = np.zeros(len(shapes.options))
    for index, op in enumerate(ops):
        if op.kind != "message":
            continue
        bytes_K = op.bytes_K + zero_K
        if op.axis in ("ep", "tp_ep"):
            bytes_K = bytes_K * skew_K
        seconds_K = collective_s(pool, groups[op.axis], op.collective, bytes_K, copies=copies)
        exposed_K = seconds_K
        for name, which in op.behind:
            if which == "layer":
                cover_K = sum((timed.dgrad_K + timed.wgrad_K if op.phase == "backward" else timed.forward_K) for timed in compute)
                cover_K = cover_K / max(sum(other.behind == op.behind and other.phase == op.phase for other in ops), 1)
            else:
                partner = by_name[name]
                cover_K = {"forward": partner.forward_K, "dgrad": partner.dgrad_K, "wgrad": partner.wgrad_K}[which]
            least = efficiency.calibration[op.least]
            exposed_K = np.maximum(seconds_K * least, seconds_K - cover_K)
        done[index] = Timed(op, exposed_K, zero_K, zero_K, seconds_K, zero_K)


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


def _again(timed: Sequence[Timed], sums: Sums, recompute: Recompute, count: int) -> tuple[FloatArray, FloatArray]:
    """Seconds and FLOPs that a recomputation choice adds to a layer's backward pass."""
    if recompute.granularity == "full":
        flops_K = np.zeros(count)
        for entry in timed:
            flops_K = flops_K + entry.op.flops_K
        return sums.forward_K, flops_K
    seconds_K, flops_K = np.zeros(count), np.zeros(count)
    modules = set(recompute.modules)
    if modules:
        for entry in timed:
            if entry.op.phase == "forward" and modules & set(entry.op.modules):
                seconds_K = seconds_K + entry.forward_K
                flops_K = flops_K + entry.op.flops_K
    return seconds_K, flops_K


def host_s(job: JobSpec, efficiency: Efficiency, layer_class: LayerClass) -> tuple[float, float]:
    """Seconds that the host needs to issue one layer, forward and backward: a floor under its time.

    CUDA graphs take the captured part away: attention and dense work, or everything.
    """
    calibration = efficiency.calibration
    scope = graph_scope(job)
    dense = 0.0 if scope != "none" else calibration["host_dense_s_calibration"]
    moe = calibration["host_moe_s_calibration"] if layer_class.moe and scope != "full" else 0.0
    return dense + moe, (dense + moe) * calibration["host_backward_calibration"]


def price(job: JobSpec, pool: Pool, options: Options, menu: Sequence[Recompute] | None = None) -> StageTable:
    """Times and bytes of K options on the devices of one pool. Meaning of every field: ``StageTable``."""
    menu = tuple(menu) if menu is not None else recompute_menu(job)
    shapes, count, model = Shapes.of(job, options), len(options), job.model
    efficiency = efficiency_of(pool.device)
    classes = tuple(layers_by_class(model))
    sums, again, kept, transient, params = [], [], [], [], []
    for layer_class in classes:
        timed = time_ops(pool, shapes, layer_ops(shapes, layer_class))
        total = _sum(timed, count)
        forward_s, backward_s = host_s(job, efficiency, layer_class)
        sums.append(
            Sums(np.maximum(total.forward_K, forward_s), np.maximum(total.backward_K, backward_s), total.exposed_K)
        )
        again.append([_again(timed, sums[-1], entry, count) for entry in menu])
        tensors = memory.layer_tensors(shapes, layer_class)
        kept.append([memory.activation_bytes(tensors, entry) for entry in menu])
        transient.append([memory.transient_bytes(shapes, layer_class, tensors, entry) for entry in menu])
        params.append(layer_params(job, options, layer_class))
    embedding = _sum(time_ops(pool, shapes, embedding_ops(shapes)), count)
    head = _sum(time_ops(pool, shapes, head_ops(shapes)), count)
    zero_K = np.zeros(count)
    mtp, mtp_kept_K, mtp_dense_K, mtp_expert_K = Sums(zero_K, zero_K, zero_K), zero_K, zero_K, zero_K
    if model.mtp_layers:
        inner = classes.index(last_class(model))
        project = _sum(time_ops(pool, shapes, project_ops(shapes)), count)
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
        recompute_RCK=np.stack([[row[r][0] for row in again] for r in range(len(menu))]),
        activation_RCK=np.stack([[row[r] for row in kept] for r in range(len(menu))]),
        transient_RCK=np.stack([[row[r] for row in transient] for r in range(len(menu))]),
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
    """compute, memory, network or latency."""
    source: str


def explain(job: JobSpec, pool: Pool, options: Options) -> tuple[Line, ...]:
    """Every operation of each layer class, embedding and head, for the first option."""
    shapes = Shapes.of(job, options)
    efficiency = efficiency_of(pool.device)
    origin = "assumed" if efficiency.assumed else "roofline"
    lines: list[Line] = []
    blocks = [(f"{'moe' if c.moe else 'dense'} layer{' (window)' if c.window else ''}", layer_ops(shapes, c)) for c in layers_by_class(job.model)]
    blocks += [("embedding", embedding_ops(shapes)), ("head", head_ops(shapes))]
    for block, ops in blocks:
        for timed in time_ops(pool, shapes, ops):
            op, forward = timed.op, float(timed.forward_K[0])
            backward = float(timed.dgrad_K[0] + timed.wgrad_K[0])
            if op.kind == "message":
                if not float(timed.full_K[0]):
                    continue
                bound = "network" if float(timed.full_K[0]) > 1e-4 or float(np.ravel(op.bytes_K + np.zeros(1))[0]) > 1e6 else "latency"
                forward, backward = (forward, 0.0) if op.phase == "forward" else (0.0, forward)
            elif float(timed.full_K[0]) < 0.5 * forward:
                bound = "latency"
            else:
                bound = "memory" if float(timed.memory_bound_K[0]) else "compute"
            lines.append(Line(block, op.name, forward, backward, bound, origin))
    return tuple(lines)


def source_share(job: JobSpec, pool: Pool) -> dict[str, float]:
    """Shares of a stage's time by where the numbers come from.

    Without measured tables everything is a roofline with published efficiency curves, or assumed
    where the kind has no rows of its own.
    """
    names = ("measured", "interpolated", "extrapolated", "roofline", "assumed")
    chosen = "assumed" if efficiency_of(pool.device).assumed else "roofline"
    return {name: float(name == chosen) for name in names}
