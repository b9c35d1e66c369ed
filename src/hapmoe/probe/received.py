"""What a rank by itself receives: torch's fake back end leaves its buffers as they were, which may be anything.

Not-a-numbers of old memory end a training (Megatron looks for them in losses and gradients). So what a
stage should have got from its neighbours is noise: activations or gradients as large as a new model's.
It is made when a message is received, between the passes whose times are measured. And a middle stage,
which has no data, hears from nobody that there is something to train.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .patches import Patches

__all__ = ["install", "training"]

DEVIATION = 0.02
"""Standard deviation: that of new weights (megatron/core/transformer/transformer_config.py, init_method_std)."""


def install(patches: Patches) -> None:
    """Before megatron.core is imported, as ``Collectives.install``."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    for name in ("irecv", "recv"):
        patches.wrap(dist, name, _filled)
    patches.put(distributed_c10d, "irecv", dist.irecv)  # P2POp takes no other, and calls it


def training(patches: Patches) -> Callable[[Any], None]:
    """For ``megatron.training.training``: rank 0 tells all others to train (build_train_valid_test_data_loaders)."""

    def told(act: Callable[..., Any], get_args: Callable[[], Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if _alone():
                get_args().do_train = True
            return act(*args, **kwargs)

        return call

    def patch(module: Any) -> None:
        patches.wrap(module, "build_train_valid_test_data_loaders", lambda act: told(act, module.get_args))

    return patch


def _alone() -> bool:
    import torch

    return bool(torch.distributed.get_backend() == "fake")


def _filled(act: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        import torch

        result = act(*args, **kwargs)
        tensor = args[0] if args else kwargs["tensor"]
        if _alone() and tensor.is_floating_point():
            with torch.no_grad():
                tensor.normal_(0.0, DEVIATION)
        return result

    return call
