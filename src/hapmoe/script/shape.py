"""Settings -> ModelSpec, with Megatron's own defaults where a flag is absent (arguments.py:1327-1651)."""

from __future__ import annotations

from collections.abc import Collection

from hapmoe.errors import InputError, Unsupported
from hapmoe.hybrid import Hybrid, read_hybrid
from hapmoe.model import Mla, ModelSpec, Moe
from hapmoe.script.forks import MEGATRON, Dialect
from hapmoe.script.layer_pattern import every_nth, read_pattern
from hapmoe.script.noop import kept, noop_layers
from hapmoe.script.settings import Reading

__all__ = ["read_model"]

_NEEDED = {
    "num_layers": "--num-layers",
    "hidden_size": "--hidden-size",
    "num_attention_heads": "--num-attention-heads",
    "seq_length": "--seq-length",
}
_USUAL_VOCABULARY = {"GPT2BPETokenizer": 50257, "Llama2Tokenizer": 32000}
_TIKTOKEN_VOCABULARY = 2**17
"""Megatron's own when --vocab-size is absent (training/tokenizer/tokenizer.py:691)."""


def read_model(reading: Reading, *, vocab_size: int | None = None, dialect: Dialect = MEGATRON) -> ModelSpec:
    """The model's shape. ``vocab_size`` is the user's and beats the script's; ``dialect`` says whose defaults hold.

    Raises InputError when the arguments do not hold the shape, or contradict themselves.
    """
    hybrid = _hybrid(reading)
    _need(reading, *(("num_layers",) if hybrid else ()))
    layers = len(hybrid.experts) if hybrid else reading.integer_or("num_layers", 0, "model.num_layers")
    noops = noop_layers(reading)
    hidden = reading.integer_or("hidden_size", 0, "model.hidden")
    heads = reading.integer_or("num_attention_heads", 0, "model.num_heads")
    gated = reading.switch("swiglu", "model.gated") or reading.switch("quick_geglu") or reading.given("glu_activation")
    ffn = _ffn(reading, hidden)
    linear_bias = reading.switch("add_bias_linear", "model.linear_bias", default=True)
    window, window_pattern = _window(reading, layers)
    vocabulary, padded = _vocabulary(reading, vocab_size)
    return ModelSpec(
        num_layers=layers - len(noops),
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=_kv_heads(reading, heads),
        head_dim=_head_dim(reading, hidden, heads),
        ffn_hidden=ffn,
        gated=gated,
        vocab_size=vocabulary,
        padded_vocab_size=padded,
        vocab_divisor=reading.integer_or("make_vocab_size_divisible_by", 128, "model.vocab_divisor"),
        tied_embeddings=not reading.switch("untie_embeddings_and_output_weights", "model.tied_embeddings"),
        learned_positions=_learned_positions(reading),
        linear_bias=linear_bias,
        # Megatron keeps the two in step (arguments.py:1610).
        qkv_bias=linear_bias or reading.switch("add_qkv_bias", "model.qkv_bias"),
        qk_layernorm=reading.switch("qk_layernorm", "model.qk_layernorm"),
        layernorm_bias=_layernorm_bias(reading),
        attention_window=window,
        window_pattern=kept(window_pattern, noops),
        mla=_mla(reading),
        moe=_moe(reading, layers, ffn, dialect, hybrid.experts if hybrid else None, noops),
        mtp_layers=(len(hybrid.mtp) if hybrid else 0) or reading.integer_or("mtp_num_layers", 0, "model.mtp_layers"),
    )


def _hybrid(reading: Reading) -> Hybrid | None:
    """A HybridModel that is a Transformer; its pattern overrides --num-layers (arguments.py:797)."""
    text = reading.word("hybrid_layer_pattern", "model.num_layers")
    if text is None and not reading.switch("is_hybrid_model"):
        return None
    found = read_hybrid(text) if text is not None else None
    if found is None:
        place = reading.place("hybrid_layer_pattern" if text is not None else "is_hybrid_model")
        raise Unsupported(f"{place}: hybrid (Mamba) models are not modelled, only attention with MLP or experts behind")
    return found


def _layernorm_bias(reading: Reading) -> bool:
    kind = reading.word("normalization", "model.layernorm_bias") or "LayerNorm"
    return kind.lower() == "layernorm" and not reading.switch("rms_norm")


def _need(reading: Reading, *known: str) -> None:
    missing = [flag for key, flag in _NEEDED.items() if not reading.given(key) and key not in known]
    if missing:
        stored = reading.switch("use_checkpoint_args")
        source = " (the checkpoint that --use-checkpoint-args reads holds it)" if stored else ""
        raise InputError(
            f"the training arguments do not say {', '.join(missing)}{source}",
            where=reading.where,
            hint="give them in the script, as its arguments, or through its variables with --env NAME=VALUE",
        )
    for key in (*_NEEDED, "ffn_hidden_size", "kv_channels"):
        if reading.given(key) and reading.integer_or(key, 1) < 1:
            raise InputError(f"{reading.place(key)}: {reading.integer(key)} is not a size", where=reading.where)


def _ffn(reading: Reading, hidden: int) -> int:
    # Only --swiglu asks for the smaller width; --quick-geglu keeps 4h (arguments.py:1323-1329).
    if reading.switch("swiglu") and reading.given("multiple_of") and not reading.given("ffn_hidden_size"):
        multiple = reading.integer_or("multiple_of", 1, "model.ffn_hidden")
        if multiple < 1:
            raise InputError(f"{reading.place('multiple_of')} is {multiple}", hint="give 1 or more")
        width = int(int(4 * hidden * 2 / 3) * (reading.number("hidden_dim_multiplier") or 1.0))
        return -(-width // multiple) * multiple
    if reading.switch("swiglu"):
        return reading.integer_or(
            "ffn_hidden_size",
            int((4 * hidden * 2 / 3) / 64) * 64,
            "model.ffn_hidden",
            "default (8/3 of the hidden size, a multiple of 64)",
        )
    return reading.integer_or("ffn_hidden_size", 4 * hidden, "model.ffn_hidden", "default (4 x hidden size)")


def _head_dim(reading: Reading, hidden: int, heads: int) -> int:
    given = reading.integer("kv_channels", "model.head_dim", "default (hidden size / heads)")
    if given is None and hidden % heads:
        raise InputError(
            f"--hidden-size {hidden} is not a multiple of --num-attention-heads {heads}",
            where=reading.place("num_attention_heads"),
            hint="give --kv-channels",
        )
    return given or hidden // heads


def _kv_heads(reading: Reading, heads: int) -> int:
    direct = reading.integer("num_key_value_heads", "model.num_kv_heads", "default (one per head)")
    if direct is not None:
        return direct
    if reading.word("attention_head_type") == "multiquery":
        reading.origin["model.num_kv_heads"] = reading.place("attention_head_type")
        return 1
    if reading.switch("group_query_attention"):
        return reading.integer_or("num_query_groups", 1, "model.num_kv_heads")
    if reading.given("num_query_groups"):
        reading.notes.append(
            f"{reading.place('num_query_groups')} has no effect without --group-query-attention: "
            f"Megatron trains {heads} key/value heads"
        )
    return heads


def _learned_positions(reading: Reading) -> int:
    kind = reading.word("position_embedding_type", "model.learned_positions") or "learned_absolute"
    if reading.switch("use_rotary_position_embeddings"):
        kind = "rope"
    longest = reading.integer("max_position_embeddings")
    if longest is None:
        reading.notes.append("--max-position-embeddings is absent; Megatron stops without it (arguments.py:1318)")
    if kind != "learned_absolute" or not reading.switch("add_position_embedding", default=True):
        return 0
    return longest if longest is not None else reading.integer_or("seq_length", 0)


def _vocabulary(reading: Reading, option: int | None) -> tuple[int, int | None]:
    """Tokens, and the padded size where it is fixed."""
    into = "model.vocab_size"
    if option is not None:
        reading.origin[into] = "option --vocab-size"
        return option, None
    tokenizer = reading.word("tokenizer_type")
    size = reading.integer("vocab_size", into, "not given")
    padded = reading.integer("padded_vocab_size", "model.padded_vocab_size")
    if size is None and padded is not None:
        reading.origin[into] = reading.place("padded_vocab_size")
        size = padded
    if size is None and tokenizer == "TikTokenizer":
        reading.origin[into] = "default (TikTokenizer)"
        size = _TIKTOKEN_VOCABULARY
    if size is None:
        usual = _USUAL_VOCABULARY.get(tokenizer or "")
        reading.notes.append(
            "the size of the vocabulary is not in the arguments (Megatron asks the tokenizer): embedding, output layer "
            "and loss are left out of parameters, memory and time until it is given with --vocab-size"
            + (f"; the usual vocabulary of {tokenizer} has {usual}" if usual else "")
        )
        return 0, None
    if tokenizer == "NullTokenizer" and padded is None:
        reading.notes.append(f"Megatron-Core before 0.18 adds one token to {reading.place('vocab_size')}")
    elif tokenizer not in (None, "NullTokenizer", "TikTokenizer", "NullMultimodalTokenizer") and padded is None:
        place = reading.place("vocab_size")
        reading.notes.append(f"Megatron asks its {tokenizer} for the vocabulary; {place} is believed here")
    if padded is None and not reading.switch("pad_vocab_size", default=True):
        padded = size
    return size, padded


def _window(reading: Reading, layers: int) -> tuple[int | None, tuple[bool, ...]]:
    """Window in tokens, the own one included, and which layers use it (core/transformer/utils.py:531-543)."""
    text = reading.word("window_size", "model.attention_window")
    if text is None:
        return reading.integer("sliding_window", "model.attention_window"), ()
    try:
        left = int(text.strip("()").split(",")[0])
    except ValueError:
        raise InputError(f"{reading.place('window_size')}: {text!r} is not two numbers", hint="e.g. 127,0") from None
    if left < 0:
        return None, ()
    skip = _pattern(reading, "window_attn_skip_freq", layers)
    if skip is None:
        return left + 1, ()
    if isinstance(skip, int):
        return left + 1, tuple((layer + 1) % skip != 0 for layer in range(layers))
    return left + 1, tuple(bool(entry) for entry in skip)


def _pattern(reading: Reading, key: str, layers: int, into: str = "") -> int | tuple[int, ...] | None:
    text = reading.word(key, into)
    if text is None:
        return None
    setting = reading.settings[key]
    value = read_pattern(text, flag=setting.name, where=setting.where)
    if isinstance(value, int):
        value = abs(value)  # a remainder is 0 for the same layers
    if value == 0:
        raise InputError(f"{setting.name} is 0", where=setting.where, hint="give a number from 1 on, or a list")
    if isinstance(value, tuple) and len(value) != layers:
        raise InputError(
            f"{setting.name} {text} lists {len(value)} layers, --num-layers is {layers}", where=setting.where
        )
    if isinstance(value, tuple) and not set(value) <= {0, 1}:
        raise InputError(f"{setting.name} {text} has entries other than 0 and 1", where=setting.where)
    return value


def _mla(reading: Reading) -> Mla | None:
    if not reading.switch("multi_latent_attention", "model.mla"):
        return None
    if reading.switch("group_query_attention"):
        raise InputError(
            "--multi-latent-attention and --group-query-attention exclude each other (arguments.py:1974)",
            where=reading.place("group_query_attention"),
        )
    return Mla(
        q_lora=reading.integer("q_lora_rank", "model.mla.q_lora"),
        kv_lora=reading.integer_or("kv_lora_rank", 32, "model.mla.kv_lora"),
        qk_nope=reading.integer_or("qk_head_dim", 128, "model.mla.qk_nope"),
        qk_rope=reading.integer_or("qk_pos_emb_head_dim", 64, "model.mla.qk_rope"),
        v=reading.integer_or("v_head_dim", 128, "model.mla.v"),
    )


def _moe(
    reading: Reading,
    layers: int,
    ffn: int,
    dialect: Dialect,
    hybrid: tuple[bool, ...] | None = None,
    noops: Collection[int] = (),
) -> Moe | None:
    experts = set(reading.integers("num_experts"))
    reading.integer("num_experts", "model.moe.num_experts")
    if len(experts) > 1:
        raise Unsupported(f"{reading.place('num_experts')}: layers with different numbers of experts are not modelled")
    count = experts.pop() if experts else 0
    if count == 0 and hybrid is not None and any(hybrid):
        raise InputError("the pattern has layers with experts (E), and --num-experts is absent", where=reading.where)
    if count == 0:  # 0 means none (arguments.py:1649)
        return None
    if count == 1 and dialect.one_expert_is_dense:
        return None
    if hybrid is not None and not any(hybrid):
        return None
    if (reading.word("mlp_type") or "standard") != "standard":
        raise Unsupported(f"{reading.place('mlp_type')}: a dense MLP beside the experts is not modelled")
    if dialect.name:
        reading.notes.append(
            f"read as arguments of {dialect.name}: top-{dialect.top_k} routing and experts in every "
            f"{'layer' if dialect.every == 1 else '2nd layer'} where they do not say otherwise"
        )
    expert_ffn = reading.integer_or("moe_ffn_hidden_size", ffn, "model.moe.ffn_hidden", "default (the dense width)")
    capacity = reading.number("moe_expert_capacity_factor", "model.moe.capacity_factor")
    capacity = dialect.capacity if capacity is None else capacity
    if capacity == dialect.no_capacity or not reading.switch("moe_token_dropping", default=True):
        capacity = None
    return Moe(
        num_experts=count,
        top_k=reading.integer_or("moe_router_topk", dialect.top_k, "model.moe.top_k"),
        ffn_hidden=expert_ffn,
        shared_ffn_hidden=_shared(reading, expert_ffn),
        router_groups=reading.integer_or("moe_router_num_groups", 0, "model.moe.router_groups"),
        group_top_k=reading.integer_or("moe_router_group_topk", 0, "model.moe.group_top_k"),
        pattern=hybrid or kept(_moe_pattern(reading, layers, dialect), noops),
        # A negative factor means none (transformer_config.py:1837).
        capacity_factor=None if capacity is None or capacity < 0 else capacity,
        pad_to_capacity=reading.switch("moe_pad_expert_input_to_capacity", "model.moe.pad_to_capacity"),
        latent_hidden=reading.integer("moe_latent_size", "model.moe.latent_hidden"),
    )


def _shared(reading: Reading, expert_ffn: int) -> int:
    into = "model.moe.shared_ffn_hidden"
    width = reading.integer("moe_shared_expert_intermediate_size", into)
    if width is not None or not reading.given("n_shared_experts"):
        return width or 0
    return reading.integer_or("n_shared_experts", 0, into) * expert_ffn  # forks count shared experts


def _moe_pattern(reading: Reading, layers: int, dialect: Dialect) -> tuple[bool, ...]:
    into = "model.moe.pattern"
    if reading.given("expert_interval") or dialect.every > 1:  # counts layers from 1, unlike --moe-layer-freq
        every = reading.integer_or("expert_interval", dialect.every, into)
        if every < 1:
            raise InputError(f"{reading.place('expert_interval')} is {every}", hint="give 1 or more")
        return tuple((layer + 1) % every == 0 for layer in range(layers))
    value = _pattern(reading, "moe_layer_freq", layers, into)
    if isinstance(value, tuple):
        return tuple(bool(entry) for entry in value)
    pattern = every_nth(value or 1, layers)
    dense = reading.integer("first_k_dense_replace", into if value is None else "")
    return tuple(expert and layer >= (dense or 0) for layer, expert in enumerate(pattern))
