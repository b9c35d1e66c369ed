"""A Hugging Face ``config.json`` as Megatron-LM's flags: the shape of the model, with a training's usual options.

The file says nothing of a training: the sequence length has to be given behind it, and what is added here (precision,
optimizer, dispatcher) can be given otherwise there, since the last occurrence of a flag counts. Shapes follow the
models' own code (transformers, modeling_*.py) and NVIDIA's conversion recipes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from hapmoe.errors import InputError, Unsupported
from hapmoe.script.values import Invocation, Token

from .build import appended, invocation

__all__ = ["FAMILIES", "is_hugging_face", "read_hugging_face"]

_DENSE = ("llama", "mistral", "qwen2", "qwen3")
_MLA = ("deepseek_v2", "deepseek_v3", "kimi_k2")
FAMILIES = (*_DENSE, "mixtral", "qwen2_moe", "qwen3_moe", *_MLA, "gpt_oss", "olmoe", "glm4_moe")
"""``model_type`` of the models that are read."""

_HIDES_TEXT = ("vision_config", "audio_config", "thinker_config")


def is_hugging_face(config: Any) -> bool:
    """Is it a Hugging Face ``config.json``: an object that names its model type?"""
    return isinstance(config, dict) and isinstance(config.get("model_type"), str)


def read_hugging_face(config: dict[str, Any], path: Path, args: Sequence[str], env: Mapping[str, str]) -> Invocation:
    """The training of the model, with ``args`` as further arguments.

    Raises InputError for a file that lacks or contradicts something, Unsupported for other families of models.
    """
    del env
    return invocation(path, [*_Flags(config, str(path), args).tokens(), *appended(args)])


class _Flags:
    """The flags of one configuration, each with the key it came from."""

    def __init__(self, config: dict[str, Any], name: str, args: Sequence[str]) -> None:
        self.config, self.name, self.given = config, name, args
        self.out: list[Token] = []
        self.kind = str(config["model_type"])
        if self.kind not in FAMILIES or any(key in config for key in _HIDES_TEXT):
            raise Unsupported(f"{name}: models of type {self.kind!r} are not read; known are {', '.join(FAMILIES)}")

    def tokens(self) -> list[Token]:
        self.attention()
        self.body()
        if self.experts():
            self.moe()
        if self.config.get("num_nextn_predict_layers"):
            self.value("--mtp-num-layers", "num_nextn_predict_layers")
        self.training()
        return self.out

    # -- reading and writing --------------------------------------------------------------------------------------

    def number(self, *keys: str) -> int:
        """The first of ``keys`` that is there, as a positive whole number."""
        for key in keys:
            value = self.config.get(key)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise InputError(f"{key} is {value!r}, not a whole number", where=self.name)
            return value
        raise InputError(f"{keys[0]} is missing", where=self.name, hint="is it the model's own config.json?")

    def switch(self, flag: str, key: str) -> None:
        self.out.append(Token(flag, where=f"{self.name}: {key}"))

    def value(self, flag: str, key: str, value: object = None) -> None:
        said = self.number(key) if value is None else value
        where = f"{self.name}: {key}"
        self.out += [Token(flag, where=where), Token(str(said), where=where)]

    def usual(self, *words: str) -> None:
        self.out += [Token(each, where="assumed for a config.json") for each in words]

    # -- the parts of a model -------------------------------------------------------------------------------------

    def body(self) -> None:
        self.value("--num-layers", "num_hidden_layers")
        self.value("--hidden-size", "hidden_size")
        width = "intermediate_size"
        if self.kind in ("qwen3_moe", "olmoe") and self.config.get(width) is None:
            width = "moe_intermediate_size"
        self.value("--ffn-hidden-size", width)
        self.value("--max-position-embeddings", "max_position_embeddings")
        self.switch("--swiglu", "hidden_act")
        if self.config.get("hidden_act", "silu") not in ("silu", "swish"):
            raise Unsupported(f"{self.name}: hidden_act {self.config['hidden_act']!r} is not read")
        self.usual("--normalization", "RMSNorm", "--position-embedding-type", "rope", "--no-position-embedding")
        if not self.config.get("tie_word_embeddings", False):
            self.switch("--untie-embeddings-and-output-weights", "tie_word_embeddings")
        self.value("--vocab-size", "vocab_size")
        self.value("--make-vocab-size-divisible-by", "vocab_size", 1)
        if self.kind == "gpt_oss":
            return  # every linear layer has a bias, the experts' too
        self.usual("--disable-bias-linear")
        if self.config.get("mlp_bias"):
            raise Unsupported(f"{self.name}: mlp_bias without a bias of attention is not modelled")

    def attention(self) -> None:
        heads = self.number("num_attention_heads")
        self.value("--num-attention-heads", "num_attention_heads")
        if self.kind in _MLA:
            self.switch("--multi-latent-attention", "kv_lora_rank")
            if self.config.get("q_lora_rank") is not None:
                self.value("--q-lora-rank", "q_lora_rank")
            self.value("--kv-lora-rank", "kv_lora_rank")
            self.value("--qk-head-dim", "qk_nope_head_dim")
            self.value("--qk-pos-emb-head-dim", "qk_rope_head_dim")
            self.value("--v-head-dim", "v_head_dim")
            self.usual("--qk-layernorm")
            return
        groups = self.number("num_key_value_heads", "num_attention_heads")
        if groups != heads:
            self.switch("--group-query-attention", "num_key_value_heads")
            self.value("--num-query-groups", "num_key_value_heads")
        if self.config.get("head_dim") is not None:
            self.value("--kv-channels", "head_dim")
        if self.kind in ("qwen2", "qwen2_moe") or (self.config.get("attention_bias") and self.kind != "gpt_oss"):
            if self.kind == "llama":
                raise Unsupported(f"{self.name}: attention_bias of this family also biases the output projection")
            self.switch("--add-qkv-bias", "attention_bias")
        if self.kind in ("qwen3", "qwen3_moe", "olmoe") or self.config.get("use_qk_norm"):
            self.switch("--qk-layernorm", "use_qk_norm")
        self.window()

    def window(self) -> None:
        width = self.config.get("sliding_window")
        if not isinstance(width, int) or isinstance(width, bool) or self.config.get("use_sliding_window") is False:
            return
        kinds = self.config.get("layer_types")
        self.value("--window-size", "sliding_window", f"{width - 1},0")
        if isinstance(kinds, list) and "full_attention" in kinds:
            if len(kinds) != self.number("num_hidden_layers"):
                raise InputError("layer_types does not name every layer", where=self.name)
            pattern = _runs([int(each == "sliding_attention") for each in kinds])
            self.value("--window-attn-skip-freq", "layer_types", pattern)
        elif self.kind == "gpt_oss":  # without layer_types every second layer, the first one included
            layers = self.number("num_hidden_layers")
            self.value("--window-attn-skip-freq", "layer_types", _runs([1 - place % 2 for place in range(layers)]))

    def experts(self) -> int:
        if self.kind in _DENSE:
            return 0
        return self.number("n_routed_experts", "num_local_experts", "num_experts")

    def moe(self) -> None:
        key = next(key for key in ("n_routed_experts", "num_local_experts", "num_experts") if self.config.get(key))
        self.value("--num-experts", key)
        self.value("--moe-router-topk", "num_experts_per_tok")
        if (self.config.get("n_group") or 1) > 1 and self.config.get("topk_group"):
            self.value("--moe-router-num-groups", "n_group")
            self.value("--moe-router-group-topk", "topk_group")
        if self.config.get("moe_intermediate_size") is not None:
            self.value("--moe-ffn-hidden-size", "moe_intermediate_size")
        shared = self.config.get("n_shared_experts")
        if self.config.get("shared_expert_intermediate_size"):
            self.value("--moe-shared-expert-intermediate-size", "shared_expert_intermediate_size")
            self.switch("--moe-shared-expert-gate", "shared_expert_intermediate_size")
        elif shared:
            width = self.number("n_shared_experts") * self.number("moe_intermediate_size")
            self.value("--moe-shared-expert-intermediate-size", "n_shared_experts", width)
        self.pattern()
        self.usual("--moe-grouped-gemm", "--moe-token-dispatcher-type", "alltoall")

    def pattern(self) -> None:
        """Which layers hold experts, when not all do."""
        layers = self.number("num_hidden_layers")
        dense = self.config.get("first_k_dense_replace") or 0
        every = self.config.get("moe_layer_freq") or self.config.get("decoder_sparse_step") or 1
        only = self.config.get("mlp_only_layers") or []
        if not all(isinstance(each, int) for each in (dense, every, *only)):
            raise InputError("the layers with experts are not given as numbers", where=self.name)
        from_one = "decoder_sparse_step" in self.config
        moe = [int(place >= dense and place not in only and (place + from_one) % every == 0) for place in range(layers)]
        if not all(moe):
            key = "first_k_dense_replace" if dense else "decoder_sparse_step"
            self.value("--moe-layer-freq", key, _runs(moe))

    def training(self) -> None:
        dtype = self.config.get("torch_dtype", self.config.get("dtype", "bfloat16"))
        if not {"--fp16", "--bf16"} & set(self.given):  # they exclude each other
            self.usual("--fp16" if dtype == "float16" else "--bf16")
        self.usual("--use-distributed-optimizer")


def _runs(entries: list[int]) -> str:
    """``[0]*3+[1]*58``: one number per layer as Megatron reads it."""
    return "+".join(f"[{value}]*{len(list(run))}" for value, run in groupby(entries))
