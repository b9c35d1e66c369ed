"""Checkpoints (torch_dist) that any plan can read: one key per layer, one random state per stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .mesh import Layout

__all__ = ["by_layer", "by_stage"]


def by_layer(original: Callable[..., Any]) -> Callable[..., Any]:
    """The stand-in for ``TransformerBlock.sharded_state_dict``: layers under their own keys.

    Upstream stacks equal layers into one tensor, whose pieces must then all have one shape; stages of
    unequal tp have not. An upstream job reads and writes the same keys when --moe-layer-freq is a
    list, like ([1]*32) (transformer_block.py:827-850).
    """

    def sharded_state_dict(
        self: Any, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> Any:
        return original(self, prefix, sharded_offsets, {**(metadata or {}), "non_homogeneous_layers": True})

    return sharded_state_dict


def by_stage(original: Callable[..., Any], layout: Layout) -> Callable[..., Any]:
    """The stand-in for ``megatron.training.checkpointing.get_rng_state``.

    Upstream keeps the random states as one (pp, tp) grid, which unequal stages do not fill.
    """

    def get_rng_state(*args: Any, **kwargs: Any) -> Any:
        from megatron.core.dist_checkpointing.mapping import ShardedObject

        found = original(*args, **kwargs)
        if not isinstance(found, ShardedObject):
            return found
        return ShardedObject(
            f"{found.key}_stage{layout.mine.index}",
            found.data,
            tuple(found.global_shape[1:]),
            tuple(found.global_offset[1:]),
            replica_id=found.replica_id,
        )

    return get_rng_state
