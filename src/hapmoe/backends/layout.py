"""The text of ``--pipeline-model-parallel-layout``: ``'Et*5|t*9|t*9|t*9L'``.

``E`` embedding, ``t`` decoder layer, ``m`` MTP layer, ``L`` loss, ``|`` next stage. Stages come chunk
by chunk: virtual stage 0 of every pipeline rank, then 1. Source: Megatron-Core
transformer/pipeline_parallel_layer_layout.py:283-330 (d98e8a64); megatron-core >= 0.13.
"""

from __future__ import annotations

import re

from hapmoe.errors import InputError
from hapmoe.plan import Plan

__all__ = ["layout_string", "parse_layout"]

_GROUP = re.compile(r"\(([^)]+)\)\*(\d+)")
_REPEAT = re.compile(r"(.)\*(\d+)")


def layout_string(plan: Plan, mtp: int) -> str:
    """The layout of a resolved plan whose model has ``mtp`` MTP layers (on the last stage).

    Only ``t*n`` is used, never parentheses: their repetition swallows the bar that ends a stage.
    """
    chunks = [stage.virtual_layers[chunk][1] for chunk in range(plan.vpp) for stage in plan.stages]
    words = ["" if count == 0 else "t" if count == 1 else f"t*{count}" for count in chunks]
    words[0] = "E" + words[0]
    words[-1] += "m" * mtp + "L"
    return "|".join(words)


def parse_layout(text: str) -> tuple[str, ...]:
    """The letters of each stage, in pipeline order. InputError for anything but E, t, m, L and |.

    >>> parse_layout("Et*2|(tt|)*2tL")
    ('Ett', 'tt', 'tt', 'tL')
    """
    unrolled = text.replace(",", "")
    for pattern in (_GROUP, _REPEAT):
        unrolled = pattern.sub(lambda match: match[1] * int(match[2]), unrolled)
    if wrong := sorted(set(unrolled) - set("EtmL|")):
        raise InputError(
            f"{wrong[0]!r} in layout {text!r}",
            where="--pipeline-model-parallel-layout",
            hint="E, t, m, L and | only; quotes and spaces are not allowed",
        )
    return tuple(unrolled.split("|"))
