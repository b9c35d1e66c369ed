"""Random splits through Megatron-Core's own layout parser and back."""

from __future__ import annotations

import random
import warnings

import builders as b

from hapmoe.backends.layout import layout_string, parse_layout

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core.transformer.enums import LayerType
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

__all__ = ["round_trip"]


def round_trip(seed: int) -> str:
    """Up to 16 stages, vpp up to 4, MTP: what comes back otherwise; empty: nothing."""
    rng = random.Random(seed)
    stages, vpp, mtp = rng.randint(1, 16), rng.randint(1, 4), rng.choice([0, 0, 1, 2])
    sizes = [[rng.randint(0, 12) for _ in range(vpp)] for _ in range(stages)]
    first, rows = 0, [[(0, 0)] * vpp for _ in range(stages)]
    for chunk in range(vpp):
        for stage in range(stages):
            rows[stage][chunk] = (first, sizes[stage][chunk])
            first += sizes[stage][chunk]
    plan = b.plan(tuple(map(sum, sizes)), vpp=vpp, stages=tuple({"virtual_layers": tuple(row)} for row in rows))
    text = layout_string(plan, mtp)
    try:
        parsed = PipelineParallelLayerLayout(text, stages)
        parsed.validate_layer_layout(first, mtp or None)
    except (AssertionError, ValueError) as error:
        return f"{text}: {error}"
    if [[chunk.count(LayerType.decoder) for chunk in row] for row in parsed.layout] != sizes:
        return f"{text}: other layers"
    if [chunk.count(LayerType.mtp) for chunk in parsed.layout[-1]][-1] != mtp:
        return f"{text}: MTP layers elsewhere"
    if [letters.count("t") for letters in parse_layout(text)] != [row[chunk] for chunk in range(vpp) for row in sizes]:
        return f"{text}: our own parser reads it otherwise"
    return ""
