"""Collectives over all ranks where no library joins all devices: through host memory, over gloo.

Gradient norm, overflow flags, token counts, logs, barriers and what checkpoints tell each other are
small. Collectives inside of a stage stay with the library of its devices.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from .mesh import HOST, Refused

__all__ = ["redirect"]

_TENSORS: dict[str, tuple[str, ...]] = {
    "all_reduce": ("tensor",),
    "broadcast": ("tensor",),
    "reduce": ("tensor",),
    "all_gather": ("tensor_list", "tensor"),
    "all_gather_into_tensor": ("output_tensor", "input_tensor"),
    "gather": ("tensor", "gather_list"),
    "scatter": ("tensor", "scatter_list"),
    "barrier": (),
    "all_gather_object": (),
    "gather_object": (),
    "broadcast_object_list": (),
    "scatter_object_list": (),
}
"""Call of torch.distributed: its arguments that hold tensors."""

_REFUSED = (
    *("send", "recv", "send_object_list", "recv_object_list", "all_to_all", "all_to_all_single"),
    *("reduce_scatter", "reduce_scatter_tensor", "all_gather_coalesced", "all_reduce_coalesced"),
)
"""Calls that Megatron makes inside of a stage only. isend and irecv stay, which torch compares by identity."""


class _Done:
    """The handle of a collective that is over."""

    def wait(self, *_: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def redirect() -> None:
    """Let torch.distributed carry collectives over all ranks by a group of its own. Collective.

    A program's default group is made by each vendor's own library, which cannot reach the others'
    devices: nothing may be sent over it.
    """
    import torch.distributed as dist

    module: Any = dist
    host = dist.new_group(None, backend=HOST, group_desc="HAPMOE_HOST")
    for name, tensors in _TENSORS.items():
        setattr(module, name, _staged(getattr(dist, name), tensors, host))
    for name in _REFUSED:
        if hasattr(dist, name):
            setattr(module, name, _refused(getattr(dist, name), name))


def _everyone(group: Any) -> bool:
    import torch.distributed as dist

    return group is None or group is dist.group.WORLD


def _staged(original: Callable[..., Any], tensors: tuple[str, ...], host: Any) -> Callable[..., Any]:
    import torch.distributed as dist

    signature = inspect.signature(original)

    def collective(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        given = bound.arguments
        if not _everyone(given.get("group")):
            return original(*args, **kwargs)
        given["group"] = host
        for name in ("device", "device_ids"):  # where to stage objects, which device waits
            given.pop(name, None)
        waits = not given.pop("async_op", False)
        average = given.get("op") == dist.ReduceOp.AVG
        if average:  # gloo has none
            given["op"] = dist.ReduceOp.SUM
        moved = []
        for name in tensors:
            if given.get(name) is not None:
                found = given[name] if isinstance(given[name], list) else [given[name]]
                copies = [_on_host(one) for one in found]
                moved += list(zip(found, copies, strict=True))
                given[name] = copies if isinstance(given[name], list) else copies[0]
        result = original(*bound.args, **bound.kwargs)
        for tensor, copy in moved:
            if average:
                copy.div_(host.size())
            if copy is not tensor:
                tensor.copy_(copy, non_blocking=True)
        return result if waits else _Done()

    return collective


def _on_host(tensor: Any) -> Any:
    """The tensor itself if gloo can send it, or a copy in pinned host memory that is complete."""
    import torch

    if tensor.device.type == "cpu":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)


def _refused(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    signature = inspect.signature(original)

    def collective(*args: Any, **kwargs: Any) -> Any:
        if _everyone(signature.bind(*args, **kwargs).arguments.get("group")):
            raise Refused(f"{name} over all ranks: their devices have no library in common")
        return original(*args, **kwargs)

    return collective
