"""Checkpoints (torch_dist) that any plan can read: one key per layer, one random state per stage, and optimizers
with and without a part for experts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from .mesh import Layout, Refused

__all__ = ["by_kind", "by_layer", "by_stage", "regrouped"]

_MULTIPLIERS = ("wd_mult", "lr_mult", "pre_wd_mult", "pre_lr_mult", "is_decoupled_lr")
"""What Megatron tells groups of parameters apart by, besides is_expert_parallel (optimizer.py,
param_group_identifier_keys; the names with pre_ are NeMo's)."""


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


def by_kind(original: Callable[..., Any]) -> Callable[..., Any]:
    """The stand-in for ``ChainedOptimizer.sharded_state_dict`` before core 0.14: all experts' state has one prefix.

    Upstream puts the number of the optimizer before the keys, if there are two: the second is that of
    experts with ranks of their own (optimizer.py, chained_1). A stage with ep 1 trains its experts with the first.
    """

    def sharded_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        from megatron.core.dist_checkpointing.dict_utils import nested_values
        from megatron.core.dist_checkpointing.mapping import ShardedBase

        found = original(self, *args, **kwargs)
        for entry in nested_values(found) if len(self.chained_optimizers) > 1 else ():
            if isinstance(entry, ShardedBase) and entry.key.startswith("chained_0.") and ".mlp.experts." in entry.key:
                entry.key = f"chained_1.{entry.key.removeprefix('chained_0.')}"
        return found

    return sharded_state_dict


def regrouped(original: Callable[..., None]) -> Callable[..., None]:
    """The stand-in for ``ChainedOptimizer.load_state_dict``: experts that had ranks of their own may lose them.

    The state of a parameter has a key of its own, whatever the plan. What all parameters share (step,
    rates) is kept once per optimizer, and a job has one for experts only if any of its ranks has ep > 1.
    Upstream does not read the optimizer of one kind of job into the other (KeyError 'optimizer', or
    "Expected 2 entries in state dict").
    """

    def load_state_dict(self: Any, state_dict: Any) -> None:
        parts = self.chained_optimizers
        if isinstance(state_dict, dict) and parts:
            numbered = {key: value for key, value in state_dict.items() if isinstance(key, int)}
            alone = {key: value for key, value in state_dict.items() if not isinstance(key, int)}
            if len(parts) == 1 and numbered:  # saved with a part for experts
                state_dict = _shared(parts[0], alone, numbered[0], _groups(numbered.values()))
            elif len(parts) > 1 and alone:  # saved without
                state_dict = {
                    index: _shared(part, numbered.get(index, {}), alone, _groups([alone]))
                    for index, part in enumerate(parts)
                }
            elif len(parts) > 1 and numbered:  # before core 0.14, perhaps by a first rank without experts of its own
                told = [state for state in numbered.values() if "param_groups" in state.get("optimizer", state)]
                state_dict = {
                    index: _shared(part, numbered.get(index, {}), told[0], _groups(told))
                    if part.optimizer and numbered.get(index) not in told
                    else numbered.get(index, {})
                    for index, part in enumerate(parts)
                }
        original(self, state_dict)

    return load_state_dict


def _groups(states: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Groups of parameters of a checkpoint's optimizers."""
    return [group for one in states for group in one.get("optimizer", one)["param_groups"]]


def _shared(optimizer: Any, own: dict[str, Any], saved: dict[str, Any], groups: list[dict[str, Any]]) -> dict[str, Any]:
    """The state of one optimizer: ``own`` parameters, and what the checkpoint has for all of them."""
    if "optimizer" in saved:  # in the distributed and the mixed-precision optimizer a level deeper
        inner = _shared(optimizer, own.get("optimizer", {}), saved["optimizer"], groups)
        return {**saved, **own, "optimizer": inner}
    mine = own.get("param_groups")
    listed = []
    for index, group in enumerate(optimizer.optimizer.param_groups):
        found = _like(group, groups)
        listed.append({**found, "params": mine[index]["params"]} if mine else found)
    result = {**saved, **own, "param_groups": listed}
    if "common_step" in saved.get("state", {}):
        result["state"] = {**own.get("state", {}), "common_step": saved["state"]["common_step"]}
    return result


def _like(group: dict[str, Any], saved: list[dict[str, Any]]) -> dict[str, Any]:
    """What the checkpoint has for a group of this job: one with the same multipliers, of experts if this one is."""
    experts = group.get("is_expert_parallel", False)
    for other in sorted(saved, key=lambda one: one.get("is_expert_parallel", False) != experts):
        if all(other.get(name) == group.get(name) for name in _MULTIPLIERS):
            return {**other, "is_expert_parallel": experts}
    said = ", ".join(f"{name} {group[name]}" for name in _MULTIPLIERS if name in group)
    raise Refused(
        f"the checkpoint has no parameters with {said}; --no-load-optim goes on without the optimizer's state"
    )
