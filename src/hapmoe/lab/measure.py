"""Counts what a step really does: calls and bytes of every collective, and bytes kept for the backward pass."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["Collectives", "Kept"]

GROUPS = {
    # Attribute of parallel_state: axis, as hapmoe names it. The first that is the group counts.
    "_TENSOR_MODEL_PARALLEL_GROUP": "tp",
    "_CONTEXT_PARALLEL_GROUP": "cp",
    "_EXPERT_MODEL_PARALLEL_GROUP": "ep",
    "_EXPERT_TENSOR_PARALLEL_GROUP": "etp",
    "_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": "tp_ep",
    "_TENSOR_AND_CONTEXT_PARALLEL_GROUP": "tp_cp",
    "_DATA_PARALLEL_GROUP_WITH_CP": "dp",
    "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP": "dp",
    "_DATA_PARALLEL_GROUP": "dp",
    "_EXPERT_DATA_PARALLEL_GROUP": "edp",
    "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP": "edp",
    "_PIPELINE_MODEL_PARALLEL_GROUP": "pp",
    "_EMBEDDING_GROUP": "embedding",
    "_POSITION_EMBEDDING_GROUP": "position",
    "_MODEL_PARALLEL_GROUP": "mp",
    "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP": "etp_ep_pp",
    "_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP": "tp_dp_cp",
    "_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": "world",
}
_PAYLOAD = {
    # Function of torch.distributed: (collective, argument whose bytes are those that a rank holds).
    "all_reduce": ("all_reduce", 0, "tensor"),
    "all_gather_into_tensor": ("all_gather", 0, "output_tensor"),
    "_all_gather_base": ("all_gather", 0, "output_tensor"),
    "all_gather": ("all_gather", 0, "tensor_list"),
    "reduce_scatter_tensor": ("reduce_scatter", 1, "input"),
    "_reduce_scatter_base": ("reduce_scatter", 1, "input"),
    "reduce_scatter": ("reduce_scatter", 1, "input_list"),
    "all_to_all_single": ("all_to_all", 1, "input"),
    "broadcast": ("broadcast", 0, "tensor"),
    "isend": ("p2p", 0, "tensor"),
}


def _bytes(value: Any) -> int:
    if isinstance(value, list | tuple):
        return sum(_bytes(one) for one in value)
    return int(value.numel() * value.element_size())


class Collectives:
    """Calls and bytes by (collective, axis, bytes of one call), while counting.

    ``install`` must run after the shim and before megatron is imported: some of its modules bind the
    functions of torch.distributed at import. Groups of one rank are not counted.
    """

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str, int]] = Counter()
        self.counting = False
        self._inside = False

    def install(self) -> None:
        import torch.distributed as dist
        from torch.distributed import distributed_c10d

        for name, (collective, position, keyword) in _PAYLOAD.items():
            if hasattr(dist, name):
                setattr(dist, name, self._wrap(getattr(dist, name), collective, position, keyword))
        distributed_c10d.isend = dist.isend  # P2POp takes no other
        batch = dist.batch_isend_irecv

        @functools.wraps(batch)
        def batch_isend_irecv(operations: Any) -> Any:
            for one in operations:
                if "send" in one.op.__name__:
                    self._count("p2p", one.group, _bytes(one.tensor))
            with self._outermost():
                return batch(operations)

        dist.batch_isend_irecv = batch_isend_irecv  # type: ignore[assignment]

    def _wrap(self, act: Callable[..., Any], collective: str, position: int, keyword: str) -> Callable[..., Any]:
        @functools.wraps(act)
        def call(*args: Any, **kwargs: Any) -> Any:
            payload = args[position] if len(args) > position else kwargs.get(keyword)
            named = (value for value in args if type(value).__name__ == "ProcessGroup")
            self._count(collective, kwargs.get("group", next(named, None)), _bytes(payload))
            with self._outermost():
                return act(*args, **kwargs)

        return call

    @contextlib.contextmanager
    def _outermost(self) -> Iterator[None]:
        """What the shim or torch do inside of a call is that call."""
        before, self._inside = self._inside, True
        try:
            yield
        finally:
            self._inside = before

    def _count(self, collective: str, group: Any, size: int) -> None:
        if not self.counting or self._inside:
            return
        import torch.distributed as dist

        if (dist.get_world_size(group) if group is not None else dist.get_world_size()) > 1:
            # sends between stages may use the world's group for one direction (p2p_communication.py:60)
            axis = "pp" if collective == "p2p" else _axis(group)
            self.counts[collective, axis, size] += 1

    def rows(self) -> list[dict[str, Any]]:
        return [
            {"collective": collective, "axis": axis, "call_bytes": size, "calls": calls}
            for (collective, axis, size), calls in sorted(self.counts.items())
        ]


def _axis(group: Any) -> str:
    from megatron.core import parallel_state

    if group is None:
        return "world"
    for attribute, axis in GROUPS.items():
        if getattr(parallel_state, attribute, None) is group:
            return axis
    return "other"


class Kept:
    """Bytes that autograd keeps from forward to backward, each storage once, by part of the model.

    A part is ``embedding``, ``layer <number>``, ``block`` (inputs of layers that are recomputed as a
    whole), ``mtp`` or ``head``; a tensor that several parts keep counts for the first one. Parameters
    are not activations.
    """

    def __init__(self, chunks: list[Any]) -> None:
        self.rows: list[dict[str, Any]] = []
        self._known = {
            parameter.untyped_storage().data_ptr(): None for chunk in chunks for parameter in chunk.parameters()
        }
        self._tensors: list[Any] = []  # alive, so that no address is used twice
        self._path: list[str] = []
        self._active = False
        for chunk in chunks:
            for name, module in chunk.module.named_modules():
                module.register_forward_pre_hook(functools.partial(self._enter, self._label(module, name)))
                module.register_forward_hook(self._leave, always_call=True)

    @staticmethod
    def _label(module: Any, name: str) -> str:
        number = getattr(module, "layer_number", None)
        if type(module).__name__ in ("TransformerLayer", "MoETransformerLayer") and number:
            return f"{'mtp' if name.startswith('mtp') else f'layer {number - 1}'}"
        return name.rpartition(".")[2] or "model"

    def _enter(self, label: str, *_: Any) -> None:
        self._path.append(label)

    def _leave(self, *_: Any) -> None:
        self._path.pop()

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Record one forward pass."""
        import torch

        def pack(tensor: Any) -> Any:
            address = tensor.untyped_storage().data_ptr()
            if address not in self._known:
                self._known[address] = None
                self._tensors.append(tensor)
                self.rows.append(
                    {
                        "part": self._part(),
                        "module": "/".join(self._path[1:]),
                        "shape": list(tensor.shape),
                        "dtype": str(tensor.dtype).removeprefix("torch."),
                        "bytes": tensor.untyped_storage().nbytes(),
                    }
                )
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
        self._tensors.clear()

    def _part(self) -> str:
        for label in self._path:
            if label.startswith(("layer ", "mtp", "embedding")):
                return label
        return "block" if self._path[-1:] == ["decoder"] else "head"
