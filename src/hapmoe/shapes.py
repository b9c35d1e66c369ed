"""One operation as arrays over K options, and what all operations of a job have in common.

Operations are what runs forward; ``pricing`` derives the backward pass (two GEMMs of their own shape
per forward GEMM). Messages carry their direction themselves. Array suffix: K option.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb
from typing import Literal, TypeAlias

import numpy as np

from hapmoe.job import JobSpec
from hapmoe.options import FloatArray, Options
from hapmoe.units import DTYPE_BYTES

__all__ = [
    "Op",
    "Shapes",
    "Value",
    "column",
    "gemm",
    "message",
    "norm",
    "residual",
    "row",
    "uses_sequence_parallel",
]

Kind = Literal["gemm", "grouped_gemm", "attention", "elementwise", "message"]
Phase = Literal["forward", "backward"]
Value: TypeAlias = FloatArray | float


@dataclass(frozen=True, slots=True)
class Op:
    """One operation of one microbatch on one rank.

    Shapes: every value is a K-array or a scalar that holds for all options.
    Units: FLOPs count a multiply-add as two; bytes are device-memory traffic, for messages the
    bytes that a rank holds (``comm`` applies (n-1)/n).
    """

    name: str
    kind: Kind
    part: str
    """attention, mlp, experts, router, dispatch, shared, norm, embedding, head, mtp."""
    modules: tuple[str, ...] = ()
    """Recomputation modules that run it again (full runs every forward operation again)."""
    phase: Phase = "forward"
    m_K: Value = 0.0
    n_K: Value = 0.0
    k_K: Value = 0.0
    groups_K: Value = 1.0
    """Experts of a grouped GEMM; heads times sequences of an attention."""
    flops_K: Value = 0.0
    bytes_K: Value = 0.0
    backward: float = 2.0
    """Backward work over forward work: elementwise bytes or attention FLOPs."""
    launches_K: Value = 1.0
    precision: str = ""
    """"" : the job's compute precision; or bf16/fp32 where a GEMM stays out of FP8."""
    trains_weight: bool = True
    """GEMM: has a weight gradient."""
    collective: str = ""
    """all_gather, reduce_scatter, all_reduce, all_to_all, ring (send_recv of K and V)."""
    axis: str = ""
    """tp, cp, ep, etp, tp_ep: the group that talks."""
    behind: tuple[tuple[str, str], ...] = ()
    """(operation, pass) that hide this message while they last: pass in forward, dgrad, wgrad."""
    least: str = ""
    """Calibration name of the share that stays exposed whatever hides it."""


@dataclass(frozen=True, slots=True)
class Shapes:
    """What all operations of a job's options have in common."""

    job: JobSpec
    options: Options
    tp_K: FloatArray
    cp_K: FloatArray
    ep_K: FloatArray
    etp_K: FloatArray
    tokens_K: FloatArray
    """T = b S / cp: tokens of a microbatch on a rank."""
    shard_K: FloatArray
    """Tokens outside attention and MLP GEMMs: T / tp with sequence parallelism."""
    bytes: float
    """Per activation element."""
    sequence_parallel: bool
    imbalance_K: FloatArray
    """rho of the expert ranks; 1 without expert parallelism."""

    @classmethod
    def of(cls, job: JobSpec, options: Options) -> Shapes:
        tp_K = options.tp_K.astype(np.float64)
        cp_K = options.cp_K.astype(np.float64)
        ep_K = options.ep_K.astype(np.float64)
        etp_K = options.etp_K.astype(np.float64)
        tokens_K = options.mbs_K * (float(job.training.seq_len) / cp_K)
        parallel = uses_sequence_parallel(job)
        return cls(
            job=job,
            options=options,
            tp_K=tp_K,
            cp_K=cp_K,
            ep_K=ep_K,
            etp_K=etp_K,
            tokens_K=tokens_K,
            shard_K=tokens_K / tp_K if parallel else tokens_K,
            bytes=DTYPE_BYTES[job.training.precision],
            sequence_parallel=parallel,
            imbalance_K=_imbalance(job, ep_K),
        )

    def distinct(self, places_K: FloatArray) -> FloatArray:
        """Expected number of different places of a token's experts, spread evenly over ``places_K`` of them.

        With group-limited routing (moe_utils.py: group_limited_topk) all of them are in the few groups with the
        best experts, about as many in each.
        """
        moe = self.job.model.moe
        assert moe is not None
        groups, chosen = moe.router_groups, moe.group_top_k
        if groups < 2 or not 0 < chosen < groups:
            return np.asarray(places_K * (1.0 - (1.0 - 1.0 / places_K) ** moe.top_k))
        result_K = np.empty(len(places_K))
        for places in np.unique(places_K):
            if places >= groups:  # a place is a part of one group
                hit = chosen / groups * (1.0 - (1.0 - groups / places) ** (moe.top_k / chosen))
            else:  # a place holds whole groups: hit unless all that are chosen are elsewhere
                hit = 1.0 - comb(groups - round(groups / places), chosen) / comb(groups, chosen)
            result_K[places_K == places] = places * hit
        return result_K

    @property
    def routed_K(self) -> FloatArray:
        """Token copies that one rank sends to experts: its share times top-k (or the capacity)."""
        moe = self.job.model.moe
        assert moe is not None
        if moe.capacity_factor is not None and moe.pad_to_capacity:
            # capacity is per source rank and expert: ceil(c * tokens * k / E) slots, all of them sent
            slots_K = np.ceil(moe.capacity_factor * self.shard_K * moe.top_k / moe.num_experts)
            return np.asarray(slots_K * moe.num_experts)
        return self.shard_K * moe.top_k

    @property
    def expert_tokens_K(self) -> FloatArray:
        """Rows of the expert GEMMs on the fullest rank, all its experts together."""
        return self.imbalance_K * self.routed_K * self.etp_K


def _imbalance(job: JobSpec, ep_K: FloatArray) -> FloatArray:
    """rho of each option: of the routing profile at its ep (what lies between is interpolated), or one for all."""
    moe, training = job.model.moe, job.training
    if training.imbalance_by_ep:
        known = np.array(sorted(training.imbalance_by_ep), dtype=np.float64)
        rho_K = np.interp(ep_K, known[:, 0], known[:, 1])
    else:
        rho_K = np.where(ep_K > 1, training.imbalance or 1.0, 1.0)
    if moe and moe.capacity_factor is not None:
        most = 1.0 if moe.pad_to_capacity else max(1.0, moe.capacity_factor)
        rho_K = np.minimum(rho_K, most)
    return np.asarray(rho_K)


def uses_sequence_parallel(job: JobSpec) -> bool:
    """Does tp > 1 come with sequence parallelism in the plans of this job?

    MoE training needs it (moe_layer.py:637). A dense script that runs tp > 1 without it keeps its
    way; one that runs tp = 1 says nothing (Megatron drops the flag, arguments.py:1439), and plans
    turn it on.
    """
    return job.model.moe is not None or job.present.sequence_parallel or job.present.tp == 1


def gemm(name: str, part: str, m_K: Value, n_K: Value, k_K: Value, size: float, **more: object) -> Op:
    """A matrix product ``[m, k] x [k, n]`` of elements of ``size`` bytes, forward."""
    flops_K = 2.0 * m_K * n_K * k_K
    bytes_K = size * (m_K * k_K + n_K * k_K + m_K * n_K)
    return Op(name, "gemm", part, m_K=m_K, n_K=n_K, k_K=k_K, flops_K=flops_K, bytes_K=bytes_K, **more)  # type: ignore[arg-type]


def norm(name: str, shapes: Shapes, width: float, tokens_K: Value, modules: tuple[str, ...] = ()) -> Op:
    """A normalisation of ``tokens_K`` rows of ``width``."""
    # forward reads x and writes y; backward reads x and dy, writes dx
    return Op(name, "elementwise", "norm", modules, bytes_K=2 * shapes.bytes * width * tokens_K, backward=1.5)


def residual(name: str, shapes: Shapes, modules: tuple[str, ...] = ()) -> Op:
    """Bias, dropout and the residual sum behind attention or MLP."""
    # bias, dropout, add: two reads, one write; backward is one read and one write (mask or bias)
    return Op(
        name,
        "elementwise",
        "norm",
        modules,
        bytes_K=3 * shapes.bytes * shapes.job.model.hidden * shapes.shard_K,
        backward=0.67,
    )


def column(shapes: Shapes, gemm: Op, width: float) -> tuple[Op, ...]:
    """Messages around a column-parallel GEMM whose input of ``width`` is sharded over tp.

    Backward gathers the input once more for wgrad, behind dgrad; the reduction of the input
    gradient runs behind wgrad (tensor_parallel/layers.py, LinearWithGradAccumulation...backward).
    """
    size_K = shapes.tokens_K * (width * shapes.bytes)
    overlap = shapes.job.training.tp_comm_overlap
    if not shapes.sequence_parallel:
        return (message(f"{gemm.name}_input_grad", gemm, "all_reduce", size_K, "tp", "backward", (gemm.name, "wgrad")),)
    return (
        message(
            f"{gemm.name}_input",
            gemm,
            "all_gather",
            size_K,
            "tp",
            "forward",
            (gemm.name, "forward") if overlap else None,
            least="tp_overlap_exposed_calibration",
        ),
        message(f"{gemm.name}_input_again", gemm, "all_gather", size_K, "tp", "backward", (gemm.name, "dgrad")),
        message(f"{gemm.name}_input_grad", gemm, "reduce_scatter", size_K, "tp", "backward", (gemm.name, "wgrad")),
    )


def row(shapes: Shapes, gemm: Op, width: float) -> tuple[Op, ...]:
    """Messages after a row-parallel GEMM: reduce (scatter) forward, its dual backward."""
    size_K = shapes.tokens_K * (width * shapes.bytes)
    if not shapes.sequence_parallel:
        return (message(f"{gemm.name}_output", gemm, "all_reduce", size_K, "tp", "forward"),)
    overlap = shapes.job.training.tp_comm_overlap
    least = "tp_overlap_exposed_calibration"
    forward = (gemm.name, "forward") if overlap else None
    backward = (gemm.name, "dgrad") if overlap else None
    return (
        message(f"{gemm.name}_output", gemm, "reduce_scatter", size_K, "tp", "forward", forward, least=least),
        message(f"{gemm.name}_output_grad", gemm, "all_gather", size_K, "tp", "backward", backward, least=least),
    )


def message(
    name: str,
    near: Op,
    collective: str,
    bytes_K: Value,
    axis: str,
    phase: Phase,
    behind: tuple[str, str] | None = None,
    least: str = "async_exposed_calibration",
) -> Op:
    """A collective on ``axis`` that belongs to ``near``; ``behind``: the operation that hides it."""
    return Op(
        name,
        "message",
        near.part,
        near.modules,
        phase=phase,
        bytes_K=bytes_K,
        collective=collective,
        axis=axis,
        behind=(behind,) if behind else (),
        least=least,
    )
