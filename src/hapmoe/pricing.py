"""Prices every way to run a stage on one pool: the table that search and oracle share.

Legend: K option, R recomputation menu entry, C layer class.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from hapmoe import memory
from hapmoe.calibrated import calibrated
from hapmoe.cluster import Pool
from hapmoe.comm import collective_s, group_of
from hapmoe.counting import last_class, layers_by_class, param_gathers_K
from hapmoe.efficiency import Efficiency, efficiency_of
from hapmoe.job import JobSpec
from hapmoe.kernels import adam_ratio
from hapmoe.options import FloatArray, LayerClass, Options, StageTable
from hapmoe.pieces import BLOCKS, Modelled, PieceRatio, optimizer_ratio, piece_ratios
from hapmoe.plan import Recompute
from hapmoe.tables.lookup import EXTRAPOLATED, SOURCES
from hapmoe.timing import Messages, Timed, host_s, time_ops, with_host
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

__all__ = ["Line", "explain", "price", "recompute_menu", "untold"]

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
    """Messages that nothing hides, of both passes."""
    exposed_forward_K: FloatArray

    def scaled(self, ratio: PieceRatio | None) -> Sums:
        """With compute as it was measured; messages as they are."""
        if ratio is None:
            return self
        exposed_backward_K = self.exposed_K - self.exposed_forward_K
        return Sums(
            ratio.forward_K * (self.forward_K - self.exposed_forward_K) + self.exposed_forward_K,
            ratio.backward_K * (self.backward_K - exposed_backward_K) + exposed_backward_K,
            self.exposed_K,
            self.exposed_forward_K,
        )


def _sum(timed: Sequence[Timed], count: int) -> Sums:
    forward_K, backward_K, exposed_K, ahead_K = np.zeros(count), np.zeros(count), np.zeros(count), np.zeros(count)
    for entry in timed:
        if entry.op.kind == "message":
            exposed_K += entry.forward_K
            if entry.op.phase == "forward":
                forward_K += entry.forward_K
                ahead_K += entry.forward_K
            else:
                backward_K += entry.forward_K
        else:
            forward_K += entry.forward_K
            backward_K += entry.dgrad_K
            backward_K += entry.wgrad_K
    return Sums(forward_K, backward_K, exposed_K, ahead_K)


def _add(*parts: Sums) -> Sums:
    return Sums(
        np.sum([part.forward_K for part in parts], axis=0),
        np.sum([part.backward_K for part in parts], axis=0),
        np.sum([part.exposed_K for part in parts], axis=0),
        np.sum([part.exposed_forward_K for part in parts], axis=0),
    )


def _again(
    timed: Sequence[Timed], sums: Sums, menu: Sequence[Recompute], ratio: PieceRatio | None = None
) -> FloatArray:
    """Seconds that each recomputation choice adds to a layer's backward pass. Shape [R, K]."""
    forward = [entry for entry in timed if entry.op.phase == "forward"]
    chosen = [[float(bool(set(entry.modules).intersection(part.op.modules))) for part in forward] for entry in menu]
    scale_K = 1.0 if ratio is None else ratio.forward_K
    parts = [part.forward_K * (1.0 if part.op.kind == "message" else scale_K) for part in forward]
    seconds_RK = np.asarray(chosen) @ np.stack(parts)
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
    ratios = _piece_ratios(job, pool, options)
    sums, again, kept, transient, params = [], [], [], [], []
    for layer_class in classes:
        timed, total = _layer(pool, shapes, layer_class, known)
        ratio = ratios.get(_block(layer_class))
        sums.append(total.scaled(ratio))
        again.append(_again(timed, sums[-1], menu, ratio))
        kept.append(memory.activation_bytes(memory.layer_tensors(shapes, layer_class), menu))
        transient.append(memory.transient_bytes(shapes, layer_class, kept[-1]))
        params.append(layer_params(job, options, layer_class))
    embedding = _sum(time_ops(pool, shapes, embedding_ops(shapes), known), count).scaled(ratios.get("embedding"))
    head = _sum(time_ops(pool, shapes, head_ops(shapes), known), count)
    zero_K = np.zeros(count)
    mtp, mtp_kept_K, mtp_dense_K, mtp_expert_K = Sums(zero_K, zero_K, zero_K, zero_K), zero_K, zero_K, zero_K
    if model.mtp_layers:
        inner = classes.index(last_class(model))
        project = _sum(time_ops(pool, shapes, project_ops(shapes), known), count)
        mtp = _add(project, _layer(pool, shapes, classes[inner], known)[1], head).scaled(ratios.get("mtp"))
        mtp_kept_K = memory.mtp_bytes(shapes, kept[inner][0])
        mtp_dense_K, mtp_expert_K = mtp_params(job, options, classes[inner])
    head = head.scaled(ratios.get("head"))
    sync = _Sync.of(job, pool, options)
    beside = calibrated(pool.tables, job, "optimizer")
    adam = _optimizer_ratio(job, pool, efficiency) * beside
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
        sync_latency_s_K=sync.latency_K,
        optimizer_s_K=adam * _optimizer_s(job, efficiency, (options.dp_K * options.cp_K).astype(np.float64)),
        expert_optimizer_s_K=adam * _optimizer_s(job, efficiency, options.edp_K.astype(np.float64)),
        step_s_K=np.full(count, beside * efficiency.calibration["step_s_calibration"]),
        workspace_bytes_K=memory.workspace_bytes(pool, options) + calibrated(pool.tables, job, "workspace"),
        memory_limit_bytes_K=np.full(count, memory.memory_limit_bytes(pool)),
    )


def _layer(pool: Pool, shapes: Shapes, layer_class: LayerClass, known: Messages) -> tuple[tuple[Timed, ...], Sums]:
    """The operations of a layer and their sum, with what the host costs."""
    efficiency = efficiency_of(pool.device)
    timed = time_ops(pool, shapes, layer_ops(shapes, layer_class), known)
    total = _sum(timed, len(shapes.options))
    issue_K, waits = host_s(shapes, efficiency, layer_class)
    back = efficiency.calibration["host_backward_calibration"]
    return timed, Sums(
        with_host(total.forward_K, issue_K, waits),
        with_host(total.backward_K, back * issue_K, waits),
        total.exposed_K,
        total.exposed_forward_K,
    )


def _block(layer_class: LayerClass) -> str:
    return "moe" if layer_class.moe else "dense"


def _piece_ratios(job: JobSpec, pool: Pool, options: Options) -> dict[str, PieceRatio]:
    """Where pieces or whole training steps were measured: what blocks take against the sum of their operations."""
    if pool.tables is None:
        return {}
    ratios = {}
    if pool.tables.pieces:
        ratios = piece_ratios(job, pool.tables, options, partial(_compute_s, pool))
    factor = calibrated(pool.tables, job, "compute")
    if factor == 1.0:
        return ratios
    one_K, source_K = np.ones(len(options)), np.full(len(options), EXTRAPOLATED)
    ratios = {block: ratios.get(block, PieceRatio(one_K, one_K, source_K)) for block in BLOCKS}
    return {
        block: PieceRatio(factor * ratio.forward_K, factor * ratio.backward_K, ratio.source_K)
        for block, ratio in ratios.items()
    }


def _compute_s(pool: Pool, job: JobSpec, options: Options) -> Modelled:
    """Compute seconds of each block by its operations, messages left out."""
    shapes, known, model = Shapes.of(job, options), Messages(), job.model
    layers = {kind: _layer(pool, shapes, kind, known)[1] for kind in layers_by_class(model)}
    embedding = _sum(time_ops(pool, shapes, embedding_ops(shapes), known), len(options))
    head = _sum(time_ops(pool, shapes, head_ops(shapes), known), len(options))
    blocks = {"embedding": [(embedding, 1)], "head": [(head, 1)]}
    for kind, number in layers_by_class(model).items():
        blocks.setdefault(_block(kind), []).append((layers[kind], number))
    if model.mtp_layers:
        project = _sum(time_ops(pool, shapes, project_ops(shapes), known), len(options))
        blocks["mtp"] = [(_add(project, layers[last_class(model)], head), 1)]
    result: Modelled = {}
    for block, entries in blocks.items():  # layers of one kind that differ (windows) count as they occur
        total = sum(number for _, number in entries)
        result[block] = (
            np.sum([n * (part.forward_K - part.exposed_forward_K) for part, n in entries], axis=0) / total,
            np.sum([n * (part.backward_K - part.exposed_K + part.exposed_forward_K) for part, n in entries], axis=0)
            / total,
        )
    return result


def _optimizer_ratio(job: JobSpec, pool: Pool, efficiency: Efficiency) -> float:
    """Measured optimizer steps over the model's: those of training, else Adam alone; 1 without either."""
    if pool.tables is None:
        return 1.0

    def seconds(shards: float) -> float:
        return float(_optimizer_s(job, efficiency, np.array([shards]))[0])

    return optimizer_ratio(job, pool.tables, seconds) or adam_ratio(pool.tables, seconds(1.0)) or 1.0


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
        factor = calibrated(pool.tables, job, "communication")
        dense_K, dense_gather_K, expert_K, expert_gather_K = (factor * one for one in result)
        return cls(dense_K, expert_K, dense_gather_K, expert_gather_K, factor * latency_K)


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
    sources: dict[str, float]
    """Seconds by where they come from."""
    alone_s: tuple[float, float] = (0.0, 0.0)
    """Forward and backward by the operations alone, before pieces of training steps scale them."""
    hidden_s: float = 0.0
    """Messages: what other work hides, beside the seconds above, which stick out."""


def explain(job: JobSpec, pool: Pool, options: Options) -> tuple[Line, ...]:
    """Every operation of each layer class, embedding and head, for the first option."""
    shapes = Shapes.of(job, options)
    efficiency = efficiency_of(pool.device)
    ratios = _piece_ratios(job, pool, options)
    lines: list[Line] = []
    blocks: list[tuple[str, str, tuple[Op, ...], LayerClass | None]] = []
    for kind in layers_by_class(job.model):
        name = f"{'moe' if kind.moe else 'dense'} layer{' (window)' if kind.window else ''}"
        blocks.append((name, _block(kind), layer_ops(shapes, kind), kind))
    blocks += [
        ("embedding", "embedding", embedding_ops(shapes), None),
        ("head", "head", head_ops(shapes), None),
    ]
    if job.model.mtp_layers:
        blocks.append(("mtp projection", "mtp", project_ops(shapes), None))
    for block, measured, ops, layer_class in blocks:
        ratio = ratios.get(measured)
        own = [_line(block, timed, untold(pool), ratio) for timed in time_ops(pool, shapes, ops)]
        lines += [line for line in own if line.forward_s or line.backward_s or line.hidden_s]
        if layer_class is not None:
            issue_K, waits = host_s(shapes, efficiency, layer_class)
            back = efficiency.calibration["host_backward_calibration"]
            scale = (1.0, 1.0) if ratio is None else (float(ratio.forward_K[0]), float(ratio.backward_K[0]))
            alone = [np.asarray([sum(line.alone_s[way] for line in own)]) for way in (0, 1)]
            forward_s = scale[0] * float((with_host(alone[0], issue_K[:1], waits) - alone[0])[0])
            backward_s = scale[1] * float((with_host(alone[1], back * issue_K[:1], waits) - alone[1])[0])
            if forward_s or backward_s:
                source = untold(pool) if ratio is None else SOURCES[int(ratio.source_K[0])]
                lines.append(Line(block, "host", forward_s, backward_s, "host", {source: forward_s + backward_s}))
    return tuple(lines)


def _line(block: str, timed: Timed, origin: str, ratio: PieceRatio | None) -> Line:
    op, forward_s = timed.op, float(timed.forward_K[0])
    dgrad_s, wgrad_s = float(timed.dgrad_K[0]), float(timed.wgrad_K[0])
    alone_s = (forward_s, dgrad_s + wgrad_s)
    if op.kind == "message":
        small = float(np.ravel(op.bytes_K)[0]) < 1e6
        alone_s = (forward_s, 0.0) if op.phase == "forward" else (0.0, forward_s)
        bound = "latency" if small else "network"
    elif float(timed.full_K[0]) < 0.5 * forward_s:
        bound = "latency"
    else:
        bound = "memory" if float(timed.memory_bound_K[0]) else "compute"
    if ratio is not None and op.kind != "message":
        both = alone_s[0] * float(ratio.forward_K[0]), alone_s[1] * float(ratio.backward_K[0])
        return Line(block, op.name, *both, bound, {SOURCES[int(ratio.source_K[0])]: sum(both)}, alone_s)
    sources: dict[str, float] = {}
    for seconds, source_K in zip((forward_s, dgrad_s, wgrad_s), timed.sources, strict=True):
        code = SOURCES.index(origin) if source_K is None else int(source_K[0])
        name = origin if SOURCES[code] == "roofline" else SOURCES[code]
        sources[name] = sources.get(name, 0.0) + seconds
    hidden_s = max(float(timed.full_K[0]) - forward_s, 0.0) if op.kind == "message" else 0.0
    return Line(block, op.name, *alone_s, bound, sources, alone_s, hidden_s)


def untold(pool: Pool) -> str:
    """The source of what no table says: a roofline with published curves, or assumed where the kind has none."""
    return "assumed" if efficiency_of(pool.device).assumed else "roofline"
