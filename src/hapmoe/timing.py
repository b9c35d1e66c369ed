"""Seconds of the operations of one layer, with what hides a message taken off it.

Legend: K option, O operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hapmoe.calibrated import calibrated
from hapmoe.cluster import Pool
from hapmoe.comm import Group, collective_with_source, group_of
from hapmoe.efficiency import Efficiency, attention_seconds, efficiency_of, gemm_seconds
from hapmoe.job import JobSpec
from hapmoe.kernels import attention_ratio, gemm_ratio, traffic_ratio
from hapmoe.measured import Measurements
from hapmoe.options import FloatArray, IntArray, LayerClass
from hapmoe.shapes import Op, Shapes

__all__ = ["NEWEST", "Timed", "host_s", "time_ops", "with_host"]

NEWEST = 2026.5
"""Date of the software whose rates the tables hold: the newest published results that they were fitted on."""


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
    sources: tuple[IntArray | None, IntArray | None, IntArray | None] = (None, None, None)
    """Where forward, dgrad and wgrad come from (``tables.lookup.SOURCES``); None: from the model."""


def _precision(job: JobSpec, op: Op) -> str:
    training = job.training
    if op.kind not in ("gemm", "grouped_gemm"):
        return training.precision
    if op.precision:
        return training.precision if op.precision == "bf16" else op.precision
    return "fp4" if training.fp4 else "fp8" if training.fp8_recipe else training.precision


def _sustained(job: JobSpec, efficiency: Efficiency) -> float:
    """Clocks follow the power of the whole step: an FP8 job keeps its bf16 kernels faster too."""
    training = job.training
    return efficiency.sustained["fp4" if training.fp4 else "fp8" if training.fp8_recipe else "bf16"]


def _aged(job: JobSpec, efficiency: Efficiency) -> float:
    """Rate of older software against today's: kernels got faster from one release to the next."""
    date = job.training.software_date
    years = min(max(NEWEST - date, 0.0), 3.0) if date else 0.0
    return float(efficiency.calibration["age_per_year_calibration"] ** -years)


def _time_gemms(
    efficiency: Efficiency, job: JobSpec, ops: Sequence[Op], count: int, tables: Measurements | None
) -> dict[int, Timed]:
    """All GEMMs of a layer at once: stacked by precision and kind, three passes each."""
    done: dict[int, Timed] = {}
    clocks = _sustained(job, efficiency) * _aged(job, efficiency)
    fine = efficiency.calibration["fp8_fine_scaling_calibration"]
    fine = fine if job.training.fp8_recipe in ("mxfp8", "blockwise") else 1.0
    sets: dict[tuple[str, bool], list[int]] = {}
    for index, op in enumerate(ops):
        if op.kind in ("gemm", "grouped_gemm"):
            # without grouped kernels experts run one after another, each at the rate of a GEMM of its own
            grouped = op.kind == "grouped_gemm" and job.training.grouped_gemm
            sets.setdefault((_precision(job, op), grouped), []).append(index)
    for (precision, grouped), indices in sets.items():
        shape = (4, len(indices), count)
        stack = np.empty(shape)
        for row, index in enumerate(indices):
            op = ops[index]
            stack[0, row], stack[1, row], stack[2, row], stack[3, row] = op.m_K, op.n_K, op.k_K, op.groups_K
        m_OK, n_OK, k_OK, groups_OK = stack
        peak = "fp8" if precision == "fp4" and "fp4" not in efficiency.peak else precision
        low = peak in ("fp8", "fp4")
        factor = efficiency.grouped["fp8" if low else "bf16"] if grouped else 1.0
        factor *= fine if low else 1.0
        back = factor * efficiency.gemm_backward
        launch = efficiency.gemm["bf16"].launch_s
        passes, sources = [], []
        for shapes_OK, rate in (
            ((m_OK, n_OK, k_OK), factor),
            ((m_OK, k_OK, n_OK), back),
            ((n_OK, k_OK, m_OK), back),
        ):
            ratio_OK: FloatArray | float = 1.0
            source_OK = None
            if tables is not None:
                asked = np.stack([*shapes_OK, groups_OK])
                found = gemm_ratio(
                    tables, efficiency, asked, grouped=grouped, precision=precision, peak=peak, factor=factor
                )
                if found is not None:
                    (ratio_OK, source_OK), rate = found, factor  # each pass was measured at its own shape
            time_OK, bound_OK = gemm_seconds(
                efficiency, *shapes_OK, groups_K=groups_OK, precision=peak, factor=rate, sustained=clocks
            )
            # the launch, added below, is part of what was measured
            passes.append((time_OK * ratio_OK + (ratio_OK - 1.0) * launch, bound_OK))
            sources.append(source_OK)
        (forward_OK, bound_OK), (dgrad_OK, _), (wgrad_OK, _) = passes
        if low:
            # quantize the input (forward) and the output gradient (backward): read 2 bytes, write 2 x 1
            each = 4.0 / (efficiency.memory_bytes_per_s * efficiency.e_elementwise)
            each *= efficiency.calibration["fp8_quantize_calibration"]
            forward_OK = forward_OK + groups_OK * m_OK * k_OK * each
            dgrad_OK = dgrad_OK + groups_OK * m_OK * n_OK * each
        for row, index in enumerate(indices):
            launches_K = launch * ops[index].launches_K
            done[index] = Timed(
                ops[index],
                forward_OK[row] + launches_K,
                dgrad_OK[row] + launches_K,
                wgrad_OK[row] + launches_K,
                forward_OK[row],
                bound_OK[row],
                _of_row(sources, row),
            )
    return done


def _of_row(sources: Sequence[IntArray | None], row: int) -> tuple[IntArray | None, IntArray | None, IntArray | None]:
    forward, dgrad, wgrad = (None if source_OK is None else source_OK[row] for source_OK in sources)
    return forward, dgrad, wgrad


Messages = dict[tuple[str, str, bytes], tuple[FloatArray, IntArray]]
"""Seconds and sources of messages already timed for these options: layers send many of one size."""


def time_ops(pool: Pool, shapes: Shapes, ops: Sequence[Op], known: Messages | None = None) -> tuple[Timed, ...]:
    """Seconds of every operation, messages with what hides them taken off.

    ``known`` is shared between the calls for one pool and one set of options.
    """
    job, options = shapes.job, shapes.options
    efficiency = efficiency_of(pool.device)
    count = len(options)
    zero_K = np.zeros(count)
    tables = pool.tables
    done = _time_gemms(efficiency, job, ops, count, tables)
    bandwidth = efficiency.memory_bytes_per_s * efficiency.e_elementwise
    permute = efficiency.memory_bytes_per_s * efficiency.e_permute
    always_K = np.ones(count)
    # sums of branches' gradients, casts, copies at the dispatcher's edge: passes of MoE layers that are not listed
    unlisted = any(op.kind == "grouped_gemm" for op in ops)
    passes = efficiency.calibration["moe_elementwise_calibration"] if unlisted else 1.0
    for index, op in enumerate(ops):
        if op.kind == "attention":
            flops_K, queries_K, heads_K = op.flops_K + zero_K, op.m_K + zero_K, op.groups_K + zero_K
            precision, clocks = job.training.precision, _sustained(job, efficiency) * _aged(job, efficiency)
            clocks *= efficiency.calibration["attention_calibration"]
            forward_K = attention_seconds(
                efficiency, flops_K, queries_K, heads_K, precision=precision, sustained=clocks
            )
            backward_K = attention_seconds(
                efficiency,
                op.backward * flops_K,
                queries_K,
                heads_K,
                precision=precision,
                backward=True,
                sustained=clocks,
            )
            if not job.training.flash_attention:
                traffic_K = op.bytes_K / bandwidth
                forward_K, backward_K = forward_K + traffic_K, backward_K + 2 * traffic_K
            sources: list[IntArray | None] = [None, None]
            if tables is not None and job.training.flash_attention:
                asked = np.stack([queries_K, 2.0 * op.n_K + zero_K, op.k_K + zero_K, _values(op, zero_K), heads_K])
                for way, time_K in enumerate((forward_K, backward_K)):
                    found = attention_ratio(
                        tables, efficiency, asked, precision=precision, backward=bool(way), work=op.backward
                    )
                    if found is not None:
                        time_K *= found[0]
                        sources[way] = found[1]
            done[index] = Timed(op, forward_K, backward_K, zero_K, forward_K, zero_K, (sources[0], sources[1], None))
        elif op.kind == "elementwise":
            rate = permute if op.part == "dispatch" else bandwidth / passes
            traffic_K = op.bytes_K * (1.0 / rate) + zero_K
            launch_K = efficiency.launch_s * op.launches_K
            forward_K, backward_K = traffic_K + launch_K, traffic_K * op.backward + launch_K
            sources = [None, None]
            if tables is not None:
                name = "permute" if op.part == "dispatch" else "norm" if op.name.endswith("norm") else "copy"
                for way, (time_K, work) in enumerate(((forward_K, 1.0), (backward_K, op.backward))):
                    found = traffic_ratio(
                        tables, efficiency, name, job.training.precision, rate, work * (op.bytes_K + zero_K)
                    )
                    if found is not None:
                        time_K *= found[0]
                        sources[way] = found[1]
            done[index] = Timed(op, forward_K, backward_K, zero_K, traffic_K, always_K, (sources[0], sources[1], None))
    _time_messages(pool, shapes, ops, done, efficiency, {} if known is None else known)
    return tuple(done[index] for index in range(len(ops)))


def _values(op: Op, zero_K: FloatArray) -> FloatArray:
    """Width of the values of an attention: its FLOPs are 2 (k + v) for each query, key and head."""
    return np.asarray(op.flops_K / (2.0 * op.m_K * op.n_K * op.groups_K) - op.k_K + zero_K)


def _time_messages(
    pool: Pool, shapes: Shapes, ops: Sequence[Op], done: dict[int, Timed], efficiency: Efficiency, known: Messages
) -> None:
    by_name = {timed.op.name: timed for timed in done.values()}
    compute = [timed for timed in done.values()]
    skew_K = 1.0 + efficiency.calibration["imbalance_a2a_calibration"] * (shapes.imbalance_K - 1.0)
    groups: dict[str, Group] = {}
    zero_K = np.zeros(len(shapes.options))
    # ranks do not arrive together, and kernels that run beside take their share of the links
    slowdown = efficiency.calibration["collective_slowdown_calibration"]
    slowdown *= calibrated(pool.tables, shapes.job, "communication")
    for index, op in enumerate(ops):
        if op.kind != "message":
            continue
        bytes_K = op.bytes_K + zero_K
        key = (op.axis, op.collective, bytes_K.tobytes())
        if key not in known:
            if op.axis not in groups:
                groups[op.axis] = group_of(pool, shapes.options, op.axis)
            sent_K = bytes_K * skew_K if op.axis in ("ep", "tp_ep") else bytes_K
            alone_K, source_K = collective_with_source(
                pool, groups[op.axis], op.collective, sent_K, distinct=shapes.distinct
            )
            known[key] = slowdown * alone_K, source_K
        seconds_K, source_K = known[key]
        exposed_K = seconds_K
        for name, which in op.behind:
            if which == "layer":
                # another microbatch's layer hides the four messages of a pass together
                back = op.phase == "backward"
                parts = [timed.dgrad_K + timed.wgrad_K if back else timed.forward_K for timed in compute]
                sharing = sum(other.behind == op.behind and other.phase == op.phase for other in ops)
                cover_K = np.sum(parts, axis=0) / sharing
            else:
                partner = by_name[name]
                cover_K = {"forward": partner.forward_K, "dgrad": partner.dgrad_K, "wgrad": partner.wgrad_K}[which]
            least = efficiency.calibration[op.least]
            exposed_K = np.maximum(seconds_K * least, seconds_K - cover_K)
        from_table = None if pool.tables is None else source_K
        done[index] = Timed(op, exposed_K, zero_K, zero_K, seconds_K, zero_K, (from_table, None, None))


def with_host(seconds_K: FloatArray, issue_K: FloatArray, waits: float) -> FloatArray:
    """Seconds of a layer's pass whose kernels the host takes ``issue_K`` seconds to issue.

    The longer of the two, and the share ``waits`` of the shorter: what one of them waits for the other.
    """
    return np.asarray(np.maximum(seconds_K, issue_K) + waits * np.minimum(seconds_K, issue_K))


def host_s(shapes: Shapes, efficiency: Efficiency, layer_class: LayerClass) -> tuple[FloatArray, float]:
    """What the host costs a layer's forward pass: (seconds to issue its kernels, share of them that is exposed).

    A dense layer's kernels are issued while earlier ones run. An MoE layer has more of them, and some for
    each expert of the rank. There the host waits for token counts before it can issue the experts, and the
    device runs dry meanwhile (moe/token_dispatcher.py: the device-to-host synchronisation points); HybridEP
    keeps the counts on the device. Backward takes host_backward_calibration times as long to issue. CUDA
    graphs take the captured part away.
    """
    calibration, training, moe = efficiency.calibration, shapes.job.training, shapes.job.model.moe
    left = {"none": 1.0, "layers": calibration["host_graph_share_calibration"], "full": 0.0}[training.cuda_graphs]
    dense_K = np.full(len(shapes.options), calibration["host_dense_s_calibration"])
    if not layer_class.moe or moe is None:
        return left * dense_K, 0.0
    hybrid = training.dispatcher == "flex" and training.flex_backend == "hybridep"
    share = calibration["host_hybridep_calibration"] if hybrid else 1.0
    experts_K = calibration["host_expert_s_calibration"] * moe.num_experts / shapes.ep_K
    issue_K = dense_K + share * (calibration["host_moe_s_calibration"] + experts_K)
    return left * issue_K, calibration["host_exposed_calibration"]
