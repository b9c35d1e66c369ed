"""The training flags that mean something to a planner, as a table.

One :class:`Flag` is one meaning: today's name first, then the names it had in older releases and
has in forks. How many words any *other* flag takes stands in :mod:`hapmoe.script.arity`.
Names, arities and defaults are those of Megatron-LM main at d98e8a64 (2026-08-22),
megatron/training/arguments.py and megatron/training/argument_utils.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hapmoe.script.arity import ARITY, Arity
from hapmoe.script.forks import REFUSED_IN_FORKS

__all__ = ["BY_NAME", "FLAGS", "HETERO", "REFUSED", "REJECTED", "Flag", "arity_of", "find_flag"]


@dataclass(frozen=True, slots=True)
class Flag:
    """One setting. ``key`` is Megatron's attribute; several rows may write one key."""

    key: str
    names: tuple[str, ...]
    kind: Literal["int", "float", "str", "set", "unset"] = "str"
    """``set`` and ``unset``: present means True or False."""
    arity: Arity = 1
    choices: tuple[str, ...] = ()
    plan: bool = False
    """The plan decides it: dropped from the arguments and emitted anew."""


def _value(kind: Literal["int", "float", "str"], names: str, arity: Arity = 1, choices: str = "") -> Flag:
    first, *others = names.split()
    return Flag(_key(first), (f"--{first}", *(f"--{name}" for name in others)), kind, arity, tuple(choices.split()))


def _int(names: str) -> Flag:
    return _value("int", names)


def _float(names: str) -> Flag:
    return _value("float", names)


def _str(names: str, choices: str = "", arity: Arity = 1) -> Flag:
    return _value("str", names, arity, choices)


def _set(names: str, key: str = "") -> Flag:
    words = names.split()
    return Flag(key or _key(words[0]), tuple(f"--{name}" for name in words), "set", 0)


def _unset(names: str, key: str) -> Flag:
    return Flag(key, tuple(f"--{name}" for name in names.split()), "unset", 0)


def _key(name: str) -> str:
    return name.replace("-", "_")


def _plan(*flags: Flag) -> tuple[Flag, ...]:
    return tuple(Flag(flag.key, flag.names, flag.kind, flag.arity, flag.choices, plan=True) for flag in flags)


FLAGS: tuple[Flag, ...] = (
    # Shape.
    _int("num-layers"),
    _int("hidden-size"),
    _int("num-attention-heads"),
    _int("ffn-hidden-size intermediate-size"),
    _int("multiple-of"),  # FlagScale: the default width of the MLP is rounded up to it
    _float("hidden-dim-multiplier"),
    _int("kv-channels"),
    _int("num-query-groups"),
    _set("group-query-attention"),
    _int("num-key-value-heads num-attention-heads-kv n-head-kv"),  # forks: needs no second flag
    _str("attention-head-type", "multihead multiquery"),  # BigCode
    _int("seq-length"),
    _int("max-position-embeddings"),
    _set("swiglu"),
    _set("quick-geglu geglu", "quick_geglu"),
    _str("glu-activation"),  # BigScience, EPFL
    _set("untie-embeddings-and-output-weights no-tie-embed-logits"),
    _str("position-embedding-type"),
    _set("use-rotary-position-embeddings"),
    _unset("no-position-embedding", "add_position_embedding"),
    _str("normalization"),
    _set("use-rms-norm rms-norm", "rms_norm"),
    _unset("disable-bias-linear", "add_bias_linear"),
    _set("add-qkv-bias"),
    _set("qk-layernorm"),
    _str("window-size"),
    _str("window-attn-skip-freq"),
    _int("sliding-window sliding-window-size"),  # forks: the tokens, not (left, right)
    _int("mtp-num-layers num-nextn-predict-layers"),
    # Vocabulary.
    _int("vocab-size"),
    _int("padded-vocab-size"),
    _int("make-vocab-size-divisible-by"),
    _unset("no-pad-vocab-size disable-pad-vocab-size", "pad_vocab_size"),
    _str("tokenizer-type"),
    # Multi-latent attention.
    _set("multi-latent-attention multi-head-latent-attention", "multi_latent_attention"),
    _int("q-lora-rank"),
    _int("kv-lora-rank"),
    _int("qk-head-dim qk-nope-head-dim"),
    _int("qk-pos-emb-head-dim qk-rope-head-dim"),
    _int("v-head-dim"),
    # Experts.
    Flag("num_experts", ("--num-experts", "--moe-num-experts"), "int", "+"),  # Megatron-DeepSpeed: a list
    _int("moe-router-topk topk moe-top-k moe-topk"),
    _int("moe-ffn-hidden-size moe-intermediate-size"),
    _str("moe-layer-freq"),
    _int("moe-shared-expert-intermediate-size shared-expert-intermediate-size shared-moe-ffn-hidden-size"),
    _int("n-shared-experts num-shared-experts"),
    _int("first-k-dense-replace"),
    _int("expert-interval"),  # Megatron-DeepSpeed
    _str("mlp-type"),
    _unset("disable-moe-token-dropping", "moe_token_dropping"),
    _float("moe-expert-capacity-factor moe-capacity-factor moe-train-capacity-factor"),
    _set("moe-pad-expert-input-to-capacity"),
    _int("moe-router-num-groups"),
    _int("moe-router-group-topk"),
    _int("moe-latent-size"),
    _set("moe-grouped-gemm"),
    _str("moe-token-dispatcher-type", "allgather alltoall alltoall_seq flex"),
    _str("moe-flex-dispatcher-backend", "deepep hybridep ncclep"),
    _set("moe-enable-deepep"),
    _str("moe-router-dtype"),
    _set("moe-permute-fusion"),
    _set("moe-shared-expert-overlap"),
    _set("overlap-moe-expert-parallel-comm"),
    _set("delay-wgrad-compute"),
    _unset("no-masked-softmax-fusion", "masked_softmax_fusion"),
    _set("enable-cuda-graph"),
    _set("external-cuda-graph"),
    _str("cuda-graph-impl"),
    _str("cuda-graph-scope", arity="+"),
    # Batch.
    _int("global-batch-size"),
    _str("rampup-batch-size", arity=3),
    _str("step-batch-size-schedule"),
    _set("use-checkpoint-args"),
    # Precision and optimizer.
    _set("bf16"),
    _set("fp16"),
    _str("fp8-format", "e4m3 hybrid"),
    _set("fp8-hybrid"),
    _set("fp8-e4m3"),
    _str("fp8-recipe", "tensorwise delayed mxfp8 blockwise custom"),
    _set("fp8-param-gather"),
    _str("fp4-format"),
    _str("optimizer"),
    _set("use-distributed-optimizer"),
    _int("zero-stage"),  # Megatron-DeepSpeed
    _set("use-precision-aware-optimizer"),
    _str("main-params-dtype", "fp32 fp16"),
    _str("main-grads-dtype", "fp32 bf16"),
    _str("exp-avg-dtype", "fp32 fp16 bf16 fp8"),
    _str("exp-avg-sq-dtype", "fp32 fp16 bf16 fp8"),
    _set("optimizer-cpu-offload"),
    _float("optimizer-offload-fraction"),
    _set("accumulate-allreduce-grads-in-fp32"),
    _set("grad-reduce-in-bf16"),
    _set("overlap-grad-reduce"),
    _set("overlap-param-gather"),
    _int("num-distributed-optimizer-instances"),
    _set("use-megatron-fsdp use-custom-fsdp", "use_megatron_fsdp"),
    _set("use-torch-fsdp2"),
    # Communication and kernels.
    _set("tp-comm-overlap"),
    _unset("no-overlap-p2p-communication", "overlap_p2p_comm"),
    _set("overlap-p2p-communication", "overlap_p2p_comm"),
    _str("cp-comm-type", arity="+"),
    _str("attention-backend", "flash fused unfused local auto"),
    _set("use-flash-attn use-flash-attn-v2", "use_flash_attn"),
    _str("transformer-impl", "local transformer_engine inference_optimized"),
    _set("cross-entropy-loss-fusion"),
    _set("calculate-per-token-loss"),
    _int("microbatch-group-size-per-virtual-pipeline-stage"),
    _set("is-hybrid-model"),
    _str("schedules-method"),  # MindSpeed
    # What the plan decides.
    *_plan(
        _int("tensor-model-parallel-size model-parallel-size"),
        _int("pipeline-model-parallel-size"),
        _int("context-parallel-size ds-sequence-parallel-size"),
        _int("expert-model-parallel-size moe-expert-parallel-size"),
        _int("expert-tensor-parallel-size"),
        _set("moe-extended-tp"),
        _set("enable-expert-tensor-parallelism"),
        _set("sequence-parallel"),
        _int("micro-batch-size batch-size"),
        _str("pipeline-model-parallel-layout"),
        _str("hybrid-layer-pattern hybrid-override-pattern"),
        _int("decoder-first-pipeline-num-layers"),
        _int("decoder-last-pipeline-num-layers"),
        _int("num-layers-per-virtual-pipeline-stage"),
        _int("num-virtual-stages-per-pipeline-rank"),
        _set("account-for-embedding-in-pipeline-split standalone-embedding-stage"),
        _set("account-for-loss-in-pipeline-split"),
        _set("recompute-activations"),
        _set("checkpoint-activations"),
        _set("moe-layer-recompute"),
        _str("recompute-granularity activations-checkpoint-granularity", "full selective"),
        _str("recompute-method activations-checkpoint-method", "uniform block"),
        _int("recompute-num-layers activations-checkpoint-num-layers checkpoint-num-layers"),
        _str("recompute-modules", "", "*"),
        # Kept, these stop the run or misplace stages as soon as the plan differs from the script.
        _set("distribute-saved-activations distribute-checkpointed-activations"),
        _set("use-tp-pp-dp-mapping"),
        _str("num-layer-list"),  # MindSpeed: layers by stage
        _str("noop-layers"),  # MindSpeed: hapmoe.script.noop
        _set("use-mp-args-from-checkpoint-args"),
        Flag("hierarchical_context_parallel_sizes", ("--hierarchical-context-parallel-sizes",), "int", "+"),
    ),
)

BY_NAME: dict[str, Flag] = {name: flag for flag in FLAGS for name in flag.names}

HETERO = (
    "--enable-hetero",
    "--hetero-process-meshes",
    "--hetero-device-types",
    "--hetero-pipeline-layer-split",
)
"""FlagScale's own description of unlike devices (flagscale/train/arguments.py)."""

REFUSED: dict[str, str] = {
    **REFUSED_IN_FORKS,
    **{name: "the script already is a launch over unlike devices; give the script for one kind" for name in HETERO},
    "--yaml-cfg": "Megatron takes its arguments from a YAML file then; give that file in place of the script",
    "--hybrid-attention-ratio": "hybrid (Mamba) models are not modelled",
    "--encoder-num-layers": "encoder and encoder-decoder models are not modelled",
    "--decoder-num-layers": "encoder and encoder-decoder models are not modelled",
    "--encoder-seq-length": "encoder and encoder-decoder models are not modelled; a decoder takes --seq-length",
    "--decoder-seq-length": "encoder and encoder-decoder models are not modelled",
    "--pipeline-model-parallel-split-rank": "encoder and encoder-decoder models are not modelled",
    "--encoder-tensor-model-parallel-size": "encoder and encoder-decoder models are not modelled",
    "--encoder-pipeline-model-parallel-size": "encoder and encoder-decoder models are not modelled",
    "--retro-add-retriever": "retrieval (Retro) models are not modelled",
    "--vision-pretraining": "vision models are not modelled",
    "--heterogeneous-layers-config-path": "layers that differ in shape are not modelled",
    "--heterogeneous-layers-config-encoded-json": "layers that differ in shape are not modelled",
    "--experimental-attention-variant": "this attention variant is not modelled",
    "--linear-attention-freq": "linear attention is not modelled",
    "--perform-rl-step": "reinforcement learning alternates training and generation, which is not modelled",
}
"""Flags that make the answer meaningless, and why."""

REJECTED: dict[str, str] = {
    "--batch-size": "--micro-batch-size",
    "--model-parallel-size": "--tensor-model-parallel-size",
    "--warmup": "--lr-warmup-fraction",
    "--checkpoint-activations": "--recompute-activations or --recompute-granularity",
}
"""Names that Megatron parses only to refuse them (arguments.py:591-604), and what it wants instead."""


def find_flag(name: str) -> tuple[Flag | None, str]:
    """The flag of this name, and the dashed spelling it was found under.

    Some forks spell with underscores. That is read when Megatron has no such name itself.

    >>> find_flag("--num_layers")[1], find_flag("--num-layer")[0]
    ('--num-layers', None)
    """
    if name in BY_NAME or name in ARITY or "_" not in name:
        return BY_NAME.get(name), name
    dashed = name.replace("_", "-")
    return (BY_NAME[dashed], dashed) if dashed in BY_NAME else (None, name)


def arity_of(name: str) -> Arity | None:
    """How many words follow a flag; None when no release knows it."""
    flag, spelling = find_flag(name)
    return flag.arity if flag else ARITY.get(spelling)
