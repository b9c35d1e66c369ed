"""What forks of Megatron-LM mean where their names or their defaults differ: Megatron-DeepSpeed, MegaBlocks,
MindSpeed, Pai-Megatron-Patch, and the Megatron-LLM of EPFL.

Their flags that a planner reads stand among the others in :mod:`hapmoe.script.flags`. Here stand the defaults that
their presence changes, what makes a model one that is not modelled, and what is left out of the estimate.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

__all__ = ["MEGATRON", "NOTED", "REFUSED_IN_FORKS", "Dialect", "dialect_of"]


@dataclass(frozen=True, slots=True)
class Dialect:
    """Defaults of one parser, where Megatron-LM's own differ from it."""

    name: str = ""
    marks: frozenset[str] = frozenset()
    """Flags that only this fork knows."""
    top_k: int = 2
    every: int = 1
    """Experts stand in every so-manieth layer, counted from 1."""
    capacity: float | None = None
    one_expert_is_dense: bool = False
    no_capacity: float | None = None
    """The capacity factor that means none."""


def _names(text: str) -> frozenset[str]:
    return frozenset(f"--{name}" for name in text.split())


MEGATRON = Dialect()
_DEEPSPEED = Dialect(
    # megatron/arguments.py and get_num_experts_per_layer in megatron/model/transformer.py of Megatron-DeepSpeed
    name="Megatron-DeepSpeed",
    marks=_names("""
        deepspeed deepspeed_config deepspeed-config zero-stage moe-expert-parallel-size topk expert-interval mlp-type
        moe-train-capacity-factor moe-eval-capacity-factor moe-min-capacity create-moe-param-group
        disable-moe-token-dropping deepspeed-activation-checkpointing ds-sequence-parallel-size no-pipeline-parallel
        enable-expert-tensor-parallelism moe-loss-coeff use-tutel
    """),
    top_k=1,
    every=2,
    capacity=1.0,
    one_expert_is_dense=True,
)
_MEGABLOCKS = Dialect(
    # megatron/arguments.py of stanford-futuredata/Megatron-LM, the fork that MegaBlocks is run with
    name="MegaBlocks",
    marks=_names("""
        moe-num-experts moe-top-k moe-capacity-factor moe-loss-weight moe-lbl-in-fp32 moe-expert-model-parallelism
        moe-weight-parallelism moe-use-megatron-switch
    """),
    top_k=1,
    no_capacity=0.0,
)


def dialect_of(names: Collection[str]) -> Dialect:
    """Whose arguments these are, by the flags that only a fork knows.

    >>> dialect_of(["--num-layers", "--moe-expert-parallel-size"]).name
    'Megatron-DeepSpeed'
    """
    given = {name.replace("_", "-") for name in names} | set(names)
    for dialect in (_DEEPSPEED, _MEGABLOCKS):
        if given & dialect.marks:
            return dialect
    return MEGATRON


_SPARSE = "attention over chosen tokens (sparse attention) is not modelled"
_LINEAR = "linear attention is not modelled"
_HYBRID = "hybrid (Mamba) models are not modelled"
_SHARED = "layers that share keys and values are not modelled"
_ADAPTER = "low-rank adapters train a few weights only, which is not modelled"
_TEACHER = "distillation runs a second model, which is not modelled"
_FROZEN = "frozen layers are not modelled"

REFUSED_IN_FORKS: dict[str, str] = {
    "--full-attention-interval": _LINEAR,
    "--enable-dsa-indexer": _SPARSE,
    "--index-n-heads": _SPARSE,
    "--index-head-dim": _SPARSE,
    "--o-lora-rank": _SPARSE,
    "--kv-compress": _SPARSE,
    "--use-moba-attn": _SPARSE,
    "--use-sparse-flash-attn": _SPARSE,
    "--interleave-sliding-window": "a sliding window in every second layer is given as --window-attn-skip-freq",
    "--mamba-d-conv": _HYBRID,
    "--mamba-d-ssm": _HYBRID,
    "--mamba-expand": _HYBRID,
    "--cla-share-factor": _SHARED,
    "--share-kvstates": _SHARED,
    "--num-zero-experts": "experts that do nothing are not modelled",
    "--n-hash-layers": "hash-routed layers are not modelled",
    "--num-experts-switch": "Switch layers beside the experts are not modelled",
    "--lora-r": _ADAPTER,
    "--lora-target-modules": _ADAPTER,
    "--lora-rank": _ADAPTER,
    "--num-layers-teacher": _TEACHER,
    "--hidden-size-teacher": _TEACHER,
    "--num-experts-teacher": _TEACHER,
    "--use-engram": "engram tables are not modelled",
    "--enable-hyper-connections": "hyper-connections (several residual streams) are not modelled",
    "--block-lm": "the GLM model of 2022 is not modelled",
    "--num-layers-to-build": "--num-layers counts layers that are not built; give the true layers",
    "--layers-to-drop": "pruning is not training",
    "--freeze-all-layers": _FROZEN,
    "--freeze-transformer": _FROZEN,
    "--freeze-llm": _FROZEN,
    "--freeze-LM": _FROZEN,
    "--attention-output-gate": "gated attention output (another projection per layer) is not modelled",
}
"""Flags that make the answer meaningless, and why."""

_BIAS = "a few biases are left out of the parameter count"
_NORM = "a norm more or less per layer is left out of the parameter count"
_SCHEDULE = "its pipeline schedule is estimated as one-forward-one-backward"

NOTED: dict[str, str] = {
    "--add-output-layer-bias": _BIAS,
    "--add-dense-bias": _BIAS,
    "--skip-bias-add": _BIAS,
    "--disable-bias-linear-fc": _BIAS,
    "--disable-bias-attn-fc": _BIAS,
    "--no-post-layer-norm": _NORM,
    "--post-norm": _NORM,
    "--post-layer-norm": _NORM,
    "--no-mlp-layernorm": _NORM,
    "--no-final-layernorm": _NORM,
    "--embed-layernorm": _NORM,
    "--input-embeds-norm": _NORM,
    "--parallel-attn": _NORM,
    "--parallel-layernorm": _NORM,
    "--shared-expert-gate": "the gate of the shared expert is left out of the parameter count",
    "--moe-shared-expert-gate": "the gate of the shared expert is left out of the parameter count",
    "--mtp-use-repeated-layer": "every MTP layer is counted with weights of its own",
    "--extra-vocab-size": "Pai adds it to the tokenizer's vocabulary: give the sum with --vocab-size",
    "--enable-zero-bubble": _SCHEDULE,
    "--zero-bubble-v-schedule": _SCHEDULE,
    "--enable-zb-runtime": _SCHEDULE,
    "--enable-zbh1-pipeline": _SCHEDULE,
    "--enable-seq1f1b": _SCHEDULE,
    "--schedules-method": _SCHEDULE,
    "--enable-vocab-parallel": _SCHEDULE,
    "--allow-padding-num-layers": "layers that only fill up a stage are not counted",
    "--swap-attention": "activations kept in host memory are counted as kept on the device",
    "--context-parallel-algo": "context parallelism is estimated as Megatron's own",
    "--moe-expert-model-parallelism": "MegaBlocks spreads experts over the data-parallel ranks",
}
"""Flags whose effect is left out, and what that is."""
