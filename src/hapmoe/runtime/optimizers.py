"""Before core 0.14: as many optimizers on ranks without experts of their own as on those with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["everywhere"]


def everywhere(original: Callable[..., Any]) -> Callable[..., Any]:
    """The stand-in for ``get_megatron_optimizer``: if any rank has an optimizer for experts, all have one.

    Without the distributed optimizer each optimizer reduces its part of the gradient norm (and its
    overflow flag) by itself, and the keys of checkpoints number them. A stage with ep 1 has none for
    experts, so it would wait in another reduction than the others. It gets Megatron's own
    optimizer without parameters (core 0.14 and newer make it, optimizer/__init__.py, "moe_param_groups").
    """

    def get_megatron_optimizer(config: Any, model_chunks: list[Any], *args: Any, **kwargs: Any) -> Any:
        import torch.distributed as dist
        from megatron.core import optimizer, parallel_state

        made = original(config, model_chunks, *args, **kwargs)
        counts = [0] * dist.get_world_size()
        dist.all_gather_object(counts, len(made.chained_optimizers))
        if len(made.chained_optimizers) == max(counts):
            return made
        alone = optimizer._get_megatron_optimizer_based_on_param_groups(
            config,
            model_chunks=model_chunks,
            param_groups=[],
            per_model_buffers={},
            model_parallel_group=parallel_state.get_expert_tensor_model_pipeline_parallel_group(),
            data_parallel_group=parallel_state.get_expert_data_parallel_group(),
        )
        alone.sharded_state_dict = _nothing
        alone.load_state_dict = _pass
        return optimizer.ChainedOptimizer([*made.chained_optimizers, alone])

    return get_megatron_optimizer


def _nothing(*_: Any, **__: Any) -> dict[str, Any]:
    return {}


def _pass(*_: Any, **__: Any) -> None:
    pass
