"""Counts what a step really does: calls and bytes of every collective, and bytes kept for the backward pass."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Iterator
from typing import Any

from hapmoe.probe.collectives import Collectives

__all__ = ["Kept", "rows"]


def rows(collectives: Collectives) -> list[dict[str, Any]]:
    """Calls by (collective, axis, bytes of one call) since the last time, whatever part of a step sent them."""
    counts: Counter[tuple[str, str, int]] = Counter()
    for (_, collective, axis, _, size), sent in collectives.take().items():
        counts[collective, axis, size] += sent.calls
    return [
        {"collective": collective, "axis": axis, "call_bytes": size, "calls": calls}
        for (collective, axis, size), calls in sorted(counts.items())
    ]


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
