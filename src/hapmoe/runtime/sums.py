"""What Megatron sums along the pipeline besides gradients: token counts and the log of auxiliary losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .mesh import Layout

__all__ = ["finalize", "reduce_tracker", "sync_metrics"]


def finalize(original: Callable[..., None], layout: Layout) -> Callable[..., None]:
    """The stand-in for ``finalize_model_grads``.

    With per-token loss, gradients are divided by the tokens of the global batch. Only the last stage
    has counted them, each tp rank the same (upstream: finalize_model_grads.py:480-496).
    """

    def finalize_model_grads(model: list[Any], num_tokens: Any = None, *args: Any, **kwargs: Any) -> None:
        import torch.distributed as dist

        original(model, None, *args, **kwargs)
        if num_tokens is None:
            return
        counts = layout.mine.index == layout.stages - 1 and layout.local % layout.mine.tp == 0
        total = num_tokens.clone() if counts else num_tokens.new_zeros(num_tokens.shape)
        dist.all_reduce(total)
        if total > 0:
            for chunk in model:
                chunk.scale_gradients(1.0 / total)

    return finalize_model_grads


def _add_stages(layout: Layout, values: Any) -> None:
    """The layers of all stages, each the mean of its stage's ranks.

    From core 0.14 on Megatron has averaged over them already, so that all hold the same; before, each data-parallel
    rank has the value of its own sequences only (router.py, ``save_to_aux_losses_tracker`` without ``avg_group``).
    """
    import torch.distributed as dist

    values /= layout.mine.size
    dist.all_reduce(values)


def reduce_tracker(original: Callable[..., None], layout: Layout) -> Callable[..., None]:
    """The stand-in for ``reduce_aux_losses_tracker_across_ranks`` (moe_utils.py:897-956; up to core 0.17).

    Upstream sums losses by layer over the pipeline and then reduces them over the ranks of the stage.
    The second alone is done as it is, the first afterwards.
    """

    def reduce_aux_losses_tracker_across_ranks(track_names: Any = None, *args: Any, **kwargs: Any) -> None:
        from megatron.core import parallel_state
        from megatron.core.transformer.moe import moe_utils

        with parallel_state.get_pipeline_model_parallel_group().left_out():
            original(track_names, *args, **kwargs)
        # core 0.12 keeps the tracker in parallel_state
        holder: Any = moe_utils if hasattr(moe_utils, "get_moe_layer_wise_logging_tracker") else parallel_state
        tracker = holder.get_moe_layer_wise_logging_tracker()
        for name in list(tracker) if track_names is None else track_names:
            _add_stages(layout, tracker[name]["values"])

    return reduce_aux_losses_tracker_across_ranks


def sync_metrics(original: Callable[..., None], layout: Layout) -> Callable[..., None]:
    """The same for ``MoEMetricsTracker._sync_metrics`` of core 0.18 and newer (moe_logging.py)."""

    def _sync_metrics(self: Any, metric_names: Any, *args: Any, **kwargs: Any) -> None:
        from megatron.core import parallel_state

        with parallel_state.get_pipeline_model_parallel_group().left_out():
            original(self, metric_names, *args, **kwargs)
        for name in metric_names:
            if name in self._metrics:
                _add_stages(layout, self._metrics[name].values)

    return _sync_metrics
