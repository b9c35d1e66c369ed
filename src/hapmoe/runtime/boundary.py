"""Activations and gradients between stages whose meshes differ.

Takes the place of Megatron's point-to-point communicator under the unchanged schedules: to them a
stage is one rank of a uniform pipeline. What two ranks both hold of a tensor is one message
(``routes``); the pieces that arrive are put together in place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .mesh import HOST, Layout, Mesh
from .routes import Route, receives, sends

__all__ = ["Boundaries"]

FORWARD, BACKWARD = 1, 2
"""Tags: gloo tells messages of one pair apart by them, NCCL by their order."""


@dataclass(slots=True)
class _Pending:
    """One tensor under way; ``wait`` may be called again and then does nothing."""

    finish: Callable[[], None]
    requests: list[Any] = field(default_factory=list)
    buffers: list[Any] = field(default_factory=list)
    """Alive until the transfer is over."""
    done: bool = False

    def wait(self) -> None:
        if self.done:
            return
        for request in self.requests:
            request.wait()
        self.finish()
        self.done = True
        self.buffers.clear()


class Boundaries:
    """The boundaries of one rank. Counts what it sends: messages and bytes by direction."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.split: tuple[bool, ...] = ()
        """Per stage: is the sequence split over tp? Known before the first step (``checks``)."""
        self.scaled = True
        """False: gradients as they come; for the negative control of the tests only."""
        self.sent: Counter[str] = Counter()
        self._groups: dict[str, Any] = {}

    def open(self) -> None:
        """Make one group for each transport, of all ranks that it may hold, and let every member open it.

        One communicator for all boundaries of a transport: NCCL then sees the sends of a call in one
        order, which two communicators around a ring (interleaving) would not.
        """
        import torch
        import torch.distributed as dist

        layout = self.layout
        for carrier in sorted({layout.carrier(index) for index in range(layout.stages)}):
            members = layout.carried(carrier)
            backend = carrier if carrier in layout.transports else ""
            group = dist.new_group(members, backend=backend or None, group_desc="HAPMOE_BOUNDARY")
            if layout.rank not in members:
                continue
            self._groups[carrier] = group
            device = "cpu" if dist.get_backend(group) == HOST else torch.cuda.current_device()
            dist.all_reduce(torch.zeros(1, device=device), group=group)

    def communicate(
        self,
        *,
        tensor_send_next: Any,
        tensor_send_prev: Any,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Any,
        config: Any,
        wait_on_reqs: bool = True,
    ) -> tuple[Any, Any, Any]:
        """What ``P2PCommunicator._communicate`` does: (tensor of the previous stage, of the next one, handles)."""
        import torch.distributed as dist

        mine, meshes = self.layout.mine, self.layout.meshes
        following, previous = meshes[(mine.index + 1) % len(meshes)], meshes[mine.index - 1]
        operations: list[Any] = []
        owners: list[_Pending] = []
        pending: dict[str, _Pending] = {}
        tensors: dict[str, Any] = {}
        # forward before backward, on both sides
        if tensor_send_next is not None:
            pending["send_next"] = self._send(tensor_send_next, following, FORWARD, operations, owners)
        if tensor_send_prev is not None:
            pending["send_prev"] = self._send(tensor_send_prev, previous, BACKWARD, operations, owners)
        if recv_prev:
            tensors["recv_prev"], pending["recv_prev"] = self._receive(
                tensor_shape, previous, FORWARD, config, operations, owners
            )
        if recv_next:
            tensors["recv_next"], pending["recv_next"] = self._receive(
                tensor_shape, following, BACKWARD, config, operations, owners
            )
        for group in self._groups.values():
            chosen = [(one, owner) for one, owner in zip(operations, owners, strict=True) if one.group is group]
            if not chosen:
                continue
            requests = dist.batch_isend_irecv([one for one, _ in chosen])
            for index, (_, owner) in enumerate(chosen):
                # NCCL gives one request for all of them
                owner.requests.extend([requests[index]] if len(requests) == len(chosen) else requests)
        handles: dict[str, _Pending] | None = pending
        if wait_on_reqs:
            for one in pending.values():
                one.wait()
            handles = None
        return tensors.get("recv_prev"), tensors.get("recv_next"), handles

    def _whole(self, shape: Any) -> tuple[int, int]:
        """(sequence, batch) of the whole microbatch, from what this rank holds of it."""
        mine = self.layout.mine
        return shape[0] * mine.cp * (mine.tp if self.split[mine.index] else 1), shape[1] * mine.dp

    def _send(self, tensor: Any, peer: Mesh, tag: int, operations: list[Any], owners: list[_Pending]) -> _Pending:
        import torch.distributed as dist

        mine, tensor = self.layout.mine, tensor.detach()
        group = self._group_behind(mine if tag == FORWARD else peer)
        split = self.split[mine.index], self.split[peer.index]
        handle = _Pending(_nothing)
        for route in sends(mine, peer, self.layout.local, *self._whole(tensor.shape), split):
            piece = self._outgoing(_piece(tensor, route), group)
            handle.buffers.append(piece)
            operations.append(dist.P2POp(dist.isend, piece, route.peer, group, tag))
            owners.append(handle)
            name = "forward" if tag == FORWARD else "backward"
            self.sent[f"{name}_messages"] += 1
            self.sent[f"{name}_bytes"] += piece.numel() * piece.element_size()
        if handle.buffers and handle.buffers[0].device != tensor.device:
            import torch

            torch.cuda.current_stream().synchronize()  # the copies to the host that _outgoing began
        return handle

    def _receive(
        self, shape: Any, peer: Mesh, tag: int, config: Any, operations: list[Any], owners: list[_Pending]
    ) -> tuple[Any, _Pending]:
        import torch
        import torch.distributed as dist

        mine = self.layout.mine
        tensor = torch.empty(
            tuple(shape), requires_grad=True, device=torch.cuda.current_device(), dtype=config.pipeline_dtype
        )
        whole = tensor.detach()
        group = self._group_behind(peer if tag == FORWARD else mine)
        split = self.split[peer.index], self.split[mine.index]
        staged = dist.get_backend(group) == HOST and whole.device.type != "cpu"
        parts: list[tuple[Route, Any]] = []
        arriving = []
        for route in receives(peer, mine, self.layout.local, *self._whole(shape), split):
            place = _piece(whole, route)
            if route.contiguous and place.is_contiguous() and not staged:
                arriving.append((place, route.peer))
                continue
            device = torch.device("cpu") if staged else whole.device
            buffer = torch.empty(place.shape, dtype=place.dtype, device=device, pin_memory=staged)
            parts.append((route, buffer))
            arriving.append((buffer, route.peer))
        scale = self._scale(peer, config) if tag == BACKWARD else 1.0
        handle = _Pending(lambda: _assemble(whole, parts, scale))
        for buffer, sender in arriving:
            operations.append(dist.P2POp(dist.irecv, buffer, sender, group, tag))
            owners.append(handle)
        return tensor, handle

    def _scale(self, peer: Mesh, config: Any) -> float:
        """What a gradient is multiplied by that comes from ``peer``.

        Every rank's loss is a mean over its own tokens, and Megatron divides gradients by the number
        of (data and context parallel) replicas of the *stage*. So what the peer's ranks hold is its
        replicas times the gradient of the mean over the global batch, and must become ours times it.
        With per-token loss all stages divide by the same number of tokens at the end.
        """
        if config.calculate_per_token_loss or not self.scaled:
            return 1.0
        return self.layout.mine.replicas / peer.replicas

    def _group_behind(self, front: Mesh) -> Any:
        """The group of the boundary behind a stage."""
        return self._groups[self.layout.carrier(front.index)]

    def _outgoing(self, piece: Any, group: Any) -> Any:
        """The piece as it is sent: contiguous, and in pinned host memory where the transport wants it there."""
        import torch
        import torch.distributed as dist

        if dist.get_backend(group) == HOST and piece.device.type != "cpu":
            return torch.empty(piece.shape, dtype=piece.dtype, pin_memory=True).copy_(piece, non_blocking=True)
        return piece.contiguous()


def _nothing() -> None:
    pass


def _piece(tensor: Any, route: Route) -> Any:
    """The part of a tensor that a route names; a view where its rows have no holes."""
    import torch

    first, end = route.batch
    if route.contiguous:
        return tensor[route.rows[0] : route.rows[-1] + 1, first:end]
    return tensor[:, first:end].index_select(0, torch.tensor(route.rows, device=tensor.device))


def _assemble(whole: Any, parts: list[tuple[Route, Any]], scale: float) -> None:
    """Put the pieces that did not arrive in place where they belong."""
    import torch

    for route, buffer in parts:
        first, end = route.batch
        if route.contiguous:
            whole[route.rows[0] : route.rows[-1] + 1, first:end].copy_(buffer, non_blocking=True)
        else:
            rows = torch.tensor(route.rows, device=whole.device)
            whole[:, first:end].index_copy_(0, rows, buffer.to(whole.device, non_blocking=True))
    if scale != 1.0:
        whole.mul_(scale)
