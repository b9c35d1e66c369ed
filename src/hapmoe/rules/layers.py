"""Which layers a stage holds, and when stages may be interleaved."""

from __future__ import annotations

from collections.abc import Iterator

from hapmoe.rules.base import Broken, Context, Rule

__all__ = ["RULES"]

Found = Iterator[Broken]


def _sum(c: Context) -> Found:
    split = [stage.num_layers for stage in c.plan.stages]
    if sum(split) != c.job.model.num_layers:
        yield Broken(
            f"the stages hold {'+'.join(map(str, split))} = {sum(split)} layers, "
            f"the model has {c.job.model.num_layers}",
            f"near-even: {'/'.join(map(str, near_even(c.job.model.num_layers, c.plan.pp)))}",
        )


def near_even(layers: int, stages: int) -> tuple[int, ...]:
    """The split with no two stages more than one layer apart, the larger ones first.

    >>> near_even(30, 4)
    (8, 8, 7, 7)
    """
    return tuple((layers + stages - 1 - stage) // stages for stage in range(stages))


def _uneven(c: Context) -> Found:
    split = [count for stage in c.plan.stages for _, count in stage.virtual_layers]
    if len(set(split)) <= 1:
        return
    shown = "/".join(str(stage.num_layers) for stage in c.plan.stages)
    if not c.backend.uneven_layers:
        yield Broken(f"split {shown}; back end {c.backend.name} splits evenly")
    elif c.before(c.backend.layout_version):
        yield Broken(
            f"split {shown} needs --pipeline-model-parallel-layout, which Megatron-Core "
            f"{c.job.training.megatron_version} does not have",
            f"use {c.backend.layout_version} or newer, or an even split",
        )


def _virtual(c: Context) -> Found:
    plan = c.plan
    if plan.vpp > 1 and not c.backend.vpp:
        yield Broken(f"vpp = {plan.vpp}; back end {c.backend.name} does not interleave", "set vpp to 1")
    counted = True
    for index, stage in enumerate(plan.stages):
        counts = [count for _, count in stage.virtual_layers]
        if len(counts) != plan.vpp:
            counted = False
            yield Broken(f"virtual_layers has {len(counts)} entries, vpp is {plan.vpp}", stage=index)
        elif sum(counts) != stage.num_layers or min(counts) < 0:
            counted = False
            yield Broken(f"virtual stages {counts} do not add up to {stage.num_layers} layers", stage=index)
    if not counted:
        return
    first = 0
    for chunk in range(plan.vpp):
        for index, stage in enumerate(plan.stages):
            given, count = stage.virtual_layers[chunk]
            if given != first:
                yield Broken(
                    f"virtual stage {chunk} starts at layer {given}, but {first} is next in pipeline order",
                    f"layers run through virtual stage 0 of all stages, then 1: start at {first}",
                    index,
                )
                return
            first += count
    for index, stage in enumerate(plan.stages):
        if stage.first_layer != stage.virtual_layers[0][0]:
            yield Broken(
                f"first_layer is {stage.first_layer}, its virtual stage 0 starts at {stage.virtual_layers[0][0]}",
                stage=index,
            )


def _interleaved(c: Context) -> Found:
    if c.plan.vpp == 1:
        return
    if c.plan.pp == 1:
        yield Broken(f"vpp = {c.plan.vpp} with PP = 1", "set vpp to 1")
    elif c.plan.pp == 2 and not c.job.training.overlap_p2p:
        yield Broken(
            f"vpp = {c.plan.vpp} with PP = 2 and --no-overlap-p2p-communication",
            "set vpp to 1, pp above 2, or remove --no-overlap-p2p-communication",
        )


def _mtp(c: Context) -> Found:
    wanted = c.job.model.mtp_layers
    for index, stage in enumerate(c.plan.stages[:-1]):
        if stage.mtp_layers:
            yield Broken(f"{stage.mtp_layers} MTP layers before the last stage", "move them to the last stage", index)
    total = sum(stage.mtp_layers for stage in c.plan.stages)
    if total != wanted:
        yield Broken(f"the plan places {total} MTP layers, the model has {wanted}")


RULES = (
    Rule("layers", "every decoder layer is on exactly one stage", "PL:107", _sum),
    Rule("uneven-layers", "an uneven split needs a layout", "A:997; transformer_block.py:156", _uneven),
    Rule("virtual-layers", "interleaved stages take turns in the model's order", "PL:41; TC:2280", _virtual),
    Rule(
        "interleaved", "the interleaved schedule sends around a ring of stages", "A:1002; A:1006; PS:829", _interleaved
    ),
    Rule(
        "mtp",
        "MTP layers read the last hidden state and share the head",
        "PL:112; PL:129; multi_token_prediction.py:1878",
        _mtp,
    ),
)
