"""The array types between pricing and search: one entry per way to run a stage.

Legend of array suffixes: K option, R recomputation menu entry, C layer class.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hapmoe.plan import Recompute

__all__ = ["FloatArray", "IntArray", "LayerClass", "Options", "StageTable", "side_by_side"]

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Options:
    """K ways to run a stage. All arrays have length K."""

    tp_K: IntArray
    cp_K: IntArray
    ep_K: IntArray
    etp_K: IntArray
    dp_K: IntArray
    mbs_K: IntArray
    """Sequences per microbatch and pipeline replica."""

    @property
    def devices_K(self) -> IntArray:
        return self.tp_K * self.cp_K * self.dp_K

    @property
    def edp_K(self) -> IntArray:
        return self.devices_K // (self.etp_K * self.ep_K)

    def take(self, which: IntArray) -> Options:
        """Some of them, in the order given."""
        return Options(*(getattr(self, name)[which] for name in self.__slots__))

    def __len__(self) -> int:
        return len(self.tp_K)


@dataclass(frozen=True, slots=True)
class LayerClass:
    """Decoder layers that cost the same: their kind."""

    moe: bool
    window: bool


@dataclass(frozen=True, slots=True)
class StageTable:
    """Times and bytes of K options on the devices of one pool.

    Seconds are of one microbatch on one rank (the slowest of its group); bytes are of the fullest
    rank. A layer's forward time is ``forward_CK``; its backward time without recomputation is
    ``backward_CK``; choosing menu entry r for it adds ``recompute_RCK[r]`` to the backward time and
    makes it keep ``activation_RCK[r]`` bytes per microbatch in flight.
    """

    options: Options
    classes: tuple[LayerClass, ...]
    menu: tuple[Recompute, ...]
    """Entry 0 is "none", the last "full" (per layer; block counts are the caller's)."""

    forward_CK: FloatArray
    backward_CK: FloatArray
    exposed_comm_CK: FloatArray
    """Communication inside forward + backward that nothing hides."""
    recompute_RCK: FloatArray
    activation_RCK: FloatArray
    transient_RCK: FloatArray
    """Bytes that exist only while one layer is being run or recomputed (its working set)."""

    embedding_forward_K: FloatArray
    embedding_backward_K: FloatArray
    embedding_activation_K: FloatArray
    head_forward_K: FloatArray
    """Final norm, logits and loss."""
    head_backward_K: FloatArray
    head_activation_K: FloatArray
    """Logits, their fp32 copy and gradient: of one microbatch (the last stage holds one in flight)."""
    mtp_forward_K: FloatArray
    """One MTP layer with its projection, its share of the head included."""
    mtp_backward_K: FloatArray
    mtp_activation_K: FloatArray

    dense_params_CK: FloatArray
    """Parameters per rank that are replicated over dp*cp."""
    expert_params_CK: FloatArray
    """Parameters per rank that are replicated over edp."""
    embedding_params_K: FloatArray
    head_params_K: FloatArray
    mtp_dense_params_K: FloatArray
    mtp_expert_params_K: FloatArray

    weight_bytes: float
    """Per parameter."""
    grad_bytes: float
    dense_optimizer_bytes_K: FloatArray
    """Per dense parameter, sharded as the job says."""
    expert_optimizer_bytes_K: FloatArray
    dense_sync_s_K: FloatArray
    """Seconds per dense parameter to reduce its gradient over dp*cp."""
    expert_sync_s_K: FloatArray
    dense_gather_s_K: FloatArray
    """Seconds per dense parameter to gather the updated weights (distributed optimizer)."""
    expert_gather_s_K: FloatArray
    sync_latency_s_K: FloatArray
    """Fixed seconds of one reduction and gather (latency of the groups)."""
    optimizer_s_K: FloatArray
    """Seconds per parameter held of the optimizer step, dense (divide by the shard is included)."""
    expert_optimizer_s_K: FloatArray
    step_s_K: FloatArray
    """Seconds that every step takes beside its work: norms, flags, data, logging, kernels launched one by one."""

    workspace_bytes_K: FloatArray
    """Communication buffers, allocator slack, framework context."""
    memory_limit_bytes_K: FloatArray
    """Device bytes minus reserve."""

    def take(self, which: IntArray) -> StageTable:
        """The same table with only these options."""
        options = Options(*(getattr(self.options, name)[which] for name in Options.__slots__))
        rows = {
            name: value[..., which]
            for name in self.__slots__
            if name[-1] == "K" and (value := getattr(self, name)) is not None
        }
        return replace(self, options=options, **rows)


def side_by_side(tables: Sequence[StageTable]) -> StageTable:
    """The tables of P pools over the same K options as one: column p * K + k is option k on pool p."""
    first = tables[0]
    options = Options(*(np.tile(getattr(first.options, name), len(tables)) for name in Options.__slots__))
    columns: dict[str, Any] = {
        name: np.concatenate([getattr(table, name) for table in tables], axis=-1)
        for name in StageTable.__slots__
        if name[-1] == "K"
    }
    return replace(first, options=options, **columns)
