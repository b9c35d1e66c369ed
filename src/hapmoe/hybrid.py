"""``--hybrid-layer-pattern`` of models that are Transformers: every attention layer with the MLP or experts behind it.

Megatron's HybridModel counts attention and MLP as layers of their own: ``*E*-|*E*E`` are four decoder layers
on two pipeline stages, the second of them dense. Patterns with Mamba (M), gated delta nets (G) or sparse
attention (D) are other models. Source: megatron/core/models/hybrid/hybrid_layer_allocation.py:14-70 and
docs/user-guide/hybrid-model-migration.md (d98e8a64); ``|`` and ``/`` from Megatron-Core 0.17.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from hapmoe.job import JobSpec

__all__ = ["FLAGS", "Hybrid", "pattern_of", "read_hybrid"]

FLAGS = ("--hybrid-layer-pattern", "--hybrid-override-pattern")
"""Since 0.17, and before (still read, with a warning)."""


@dataclass(frozen=True, slots=True)
class Hybrid:
    """A pattern in decoder layers."""

    attention: str
    """``*``, or ``+`` for multi-latent attention (from 0.19)."""
    experts: tuple[bool, ...]
    """Per decoder layer: experts (E), or a dense MLP (-)?"""
    mtp: tuple[bool, ...]
    """The same per MTP layer."""

    def text(self, counts: tuple[int, ...]) -> str:
        """The pattern with segments of so many decoder layers each, in pipeline order.

        >>> Hybrid("*", (True, False, True), (True,)).text((2, 1))
        '*E*-|*E/*E'
        """
        layers = [self._layer(experts) for experts in self.experts]
        segments, first = [], 0
        for count in counts:
            segments.append("".join(layers[first : first + count]))
            first += count
        return "/".join(["|".join(segments), *(self._layer(experts) for experts in self.mtp)])

    def _layer(self, experts: bool) -> str:
        return self.attention + ("E" if experts else "-")


def read_hybrid(text: str) -> Hybrid | None:
    """The pattern as decoder layers; None where it is something else than a Transformer."""
    main, *mtp = text.split("/")
    letters = main.replace("|", "")
    kinds = {letter for letter in letters + "".join(mtp) if letter not in "-E"}
    if len(kinds) != 1 or not kinds <= {"*", "+"} or any(len(part) != 2 for part in mtp):
        return None
    parts = (letters, *mtp)
    if not letters or not all(re.fullmatch(r"([*+][-E])+", part) for part in parts):
        return None
    rows = [tuple(letter == "E" for letter in part[1::2]) for part in parts]
    return Hybrid(kinds.pop(), rows[0], tuple(row[0] for row in rows[1:]))


def pattern_of(job: JobSpec) -> str | None:
    """The job's pattern, by the last of its flags; None: no HybridModel."""
    found = None
    words = [argument.text or "" for argument in job.argv]
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in FLAGS:
            found = value if equals else "".join(words[index + 1 : index + 2])
    return found
