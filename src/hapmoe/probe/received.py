"""What a rank by itself receives: torch's fake back end leaves its buffers as they were, which may be anything.

Not-a-numbers of old memory end a training (Megatron looks for them in losses and gradients). So what a
stage should have got from its neighbours is noise: activations or gradients as large as a new model's.
It is made when a message is received, between the passes whose times are measured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .patches import Patches

__all__ = ["install"]

DEVIATION = 0.02
"""Standard deviation: that of new weights (megatron/core/transformer/transformer_config.py, init_method_std)."""


def install(patches: Patches) -> None:
    """Before megatron.core is imported, as ``Collectives.install``."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    for name in ("irecv", "recv"):
        patches.wrap(dist, name, _filled)
    patches.put(distributed_c10d, "irecv", dist.irecv)  # P2POp takes no other, and calls it


def _filled(act: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        import torch

        result = act(*args, **kwargs)
        tensor = args[0] if args else kwargs["tensor"]
        if torch.distributed.get_backend() == "fake" and tensor.is_floating_point():
            with torch.no_grad():
                tensor.normal_(0.0, DEVIATION)
        return result

    return call
