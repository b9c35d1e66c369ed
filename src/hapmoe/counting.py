"""Exact counts: parameters per rank, parameters of a model, and FLOPs as Megatron counts them.

Array suffix: K option. Parameters are floats because padding and division are exact below 2^53.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from hapmoe.job import JobSpec
from hapmoe.model import ModelSpec
from hapmoe.options import FloatArray, LayerClass, Options

__all__ = [
    "count_params",
    "embedding_params",
    "head_params",
    "layer_params",
    "layers_by_class",
    "model_flops_per_step",
    "mtp_params",
    "padded_vocab_K",
    "param_gathers_K",
]


def layers_by_class(model: ModelSpec) -> dict[LayerClass, int]:
    """How many decoder layers of each class a model has, in order of first appearance."""
    windows = (False,) * model.num_layers
    if model.attention_window is not None:
        windows = model.window_pattern or (True,) * model.num_layers
    return dict(Counter(LayerClass(moe=m, window=w) for m, w in zip(model.moe_pattern, windows, strict=True)))


def padded_vocab_K(model: ModelSpec, options: Options) -> FloatArray:
    """Rows of the padded vocabulary of every option (training/vocab_utils.py:58)."""
    if model.padded_vocab_size is not None:
        return np.full(len(options), float(model.padded_vocab_size))
    multiple_K = float(model.vocab_divisor) * options.tp_K
    return np.asarray(np.ceil(model.vocab_size / multiple_K) * multiple_K)


def _norm_params(model: ModelSpec, width: float) -> float:
    return width * (2 if model.layernorm_bias else 1)


def _attention_params(model: ModelSpec, tp_K: FloatArray) -> FloatArray:
    hidden, bias = float(model.hidden), float(model.linear_bias)
    if model.mla is None:
        query = float(model.num_heads * model.head_dim)
        key_value = 2.0 * model.num_kv_heads * model.head_dim
        # divided by tp even when tp exceeds the KV heads: the output is gathered, not the weight
        # replicated (transformer/attention.py: linear_qkv_out_dim)
        wide_K = (query + key_value) / tp_K
        total_K = wide_K * hidden + (wide_K if model.qkv_bias or model.linear_bias else 0.0)
        total_K = total_K + query / tp_K * hidden + bias * hidden
        if model.qk_layernorm:
            total_K = total_K + 2 * _norm_params(model, model.head_dim)
        return np.asarray(total_K)
    mla = model.mla
    heads, qk = float(model.num_heads), float(mla.qk_nope + mla.qk_rope)
    norms = float(model.qk_layernorm)
    if mla.q_lora is None:
        total_K = hidden * heads * qk / tp_K
    else:
        total_K = mla.q_lora * (hidden + heads * qk / tp_K) + norms * _norm_params(model, mla.q_lora)
    total_K = total_K + hidden * (mla.kv_lora + mla.qk_rope) + norms * _norm_params(model, mla.kv_lora)
    total_K = total_K + mla.kv_lora * heads * (mla.qk_nope + mla.v) / tp_K
    return np.asarray(total_K + heads * mla.v / tp_K * hidden + bias * hidden)


def _mlp_params(model: ModelSpec, width: float, parts_K: FloatArray, bias: bool, hidden: float) -> FloatArray:
    gates = 2.0 if model.gated else 1.0
    total_K = (gates + 1) * width / parts_K * hidden
    if bias:
        total_K = total_K + gates * width / parts_K + hidden
    return np.asarray(total_K)


def layer_params(job: JobSpec, options: Options, layer_class: LayerClass) -> tuple[FloatArray, FloatArray]:
    """Parameters per rank of one decoder layer: (replicated over dp*cp, replicated over edp).

    Norms and the router are replicated over tp, as are the MLA down projections; expert weights are
    divided by ep and etp.

    Source: megatron/core/transformer/{attention,multi_latent_attention,mlp}.py, moe/{router,experts}.py.
    """
    model = job.model
    tp_K = options.tp_K.astype(np.float64)
    hidden = float(model.hidden)
    dense_K = _attention_params(model, tp_K) + 2 * _norm_params(model, hidden)
    if not layer_class.moe:
        return dense_K + _mlp_params(model, model.ffn_hidden, tp_K, model.linear_bias, hidden), np.zeros(len(options))
    moe = model.moe
    assert moe is not None
    dense_K = dense_K + hidden * moe.num_experts
    if moe.shared_ffn_hidden:
        dense_K = dense_K + _mlp_params(model, moe.shared_ffn_hidden, tp_K, model.linear_bias, hidden)
    width = float(moe.latent_hidden or model.hidden)
    if moe.latent_hidden:
        dense_K = dense_K + 2 * hidden * width
    local_K = moe.num_experts / options.ep_K
    expert_K = local_K * _mlp_params(model, moe.ffn_hidden, options.etp_K.astype(np.float64), model.linear_bias, width)
    return dense_K, expert_K


def embedding_params(job: JobSpec, options: Options) -> FloatArray:
    """Parameters per rank of the embedding: the vocabulary is divided by tp."""
    model = job.model
    return padded_vocab_K(model, options) / options.tp_K * model.hidden + float(model.learned_positions * model.hidden)


def head_params(job: JobSpec, options: Options, *, with_embedding: bool = False) -> FloatArray:
    """Parameters per rank of final norm and output layer.

    A tied output layer is a copy of the embedding on another stage (it costs memory there), and
    nothing on the embedding's own stage (``with_embedding``).
    """
    model = job.model
    norm = _norm_params(model, model.hidden)
    if model.tied_embeddings and with_embedding:
        return np.full(len(options), norm)
    return padded_vocab_K(model, options) / options.tp_K * model.hidden + norm


def mtp_params(job: JobSpec, options: Options, layer_class: LayerClass) -> tuple[FloatArray, FloatArray]:
    """Parameters per rank of one MTP layer: norms, projection 2h -> h, a decoder layer."""
    model = job.model
    dense_K, expert_K = layer_params(job, options, layer_class)
    hidden = float(model.hidden)
    return dense_K + 3 * _norm_params(model, hidden) + 2 * hidden * hidden / options.tp_K, expert_K


def param_gathers_K(job: JobSpec, options: Options) -> FloatArray:
    """How often a step gathers all updated weights from the distributed optimizer.

    With expert parallelism dense and expert weights have an optimizer each, and without overlap each
    of the two gathers the weights of both (distrib_optimizer.py:2617: step_with_ready_grads).
    """
    twice = job.training.distributed_optimizer and not job.training.overlap_param_gather
    return np.where(twice & (options.ep_K > 1), 2.0, 1.0)


def _alone() -> Options:
    one = np.ones(1, dtype=np.int64)
    return Options(tp_K=one, cp_K=one, ep_K=one, etp_K=one, dp_K=one, mbs_K=one)


def count_params(model: ModelSpec, *, padded: bool = False, mtp: bool = True) -> int:
    """Parameters of the whole model, without vocabulary padding unless ``padded``.

    >>> count_params(ModelSpec(num_layers=32, hidden=4096, num_heads=32, num_kv_heads=32, head_dim=128,
    ...                        ffn_hidden=11008, vocab_size=32000))  # LLaMA-2 7B
    6738415616
    """
    from hapmoe.job import Present, Training

    if not padded:
        import msgspec

        model = msgspec.structs.replace(model, padded_vocab_size=model.vocab_size)
    job = JobSpec(name="", model=model, training=Training(seq_len=1, global_batch_size=1), present=Present(), entry="")
    options = _alone()
    total = float(embedding_params(job, options)[0] + head_params(job, options, with_embedding=True)[0])
    classes = layers_by_class(model)
    for layer_class, count in classes.items():
        dense_K, expert_K = layer_params(job, options, layer_class)
        total += count * float(dense_K[0] + expert_K[0])
    if mtp and model.mtp_layers:
        dense_K, expert_K = mtp_params(job, options, last_class(model))
        total += model.mtp_layers * float(dense_K[0] + expert_K[0])
    return round(total)


def last_class(model: ModelSpec) -> LayerClass:
    """The class of the last decoder layer, which is also what an MTP layer holds."""
    window = model.attention_window is not None and (not model.window_pattern or model.window_pattern[-1])
    return LayerClass(moe=model.moe_pattern[-1], window=window)


def model_flops_per_step(job: JobSpec, *, global_batch_size: int = 0, tp: int = 1) -> float:
    """FLOPs of one step as Megatron-LM counts them for its TFLOP/s figure.

    Three times the forward GEMMs, the causal half of attention, logits of the padded vocabulary,
    no router, no recomputation; a sliding window is ignored, as Megatron ignores it.

    Source: NVIDIA/Megatron-LM d98e8a64 megatron/training/training.py:1009-1306
    (num_floating_point_operations: transformer_flops).
    """
    model, seq = job.model, float(job.training.seq_len)
    sequences = float(global_batch_size or job.training.global_batch_size)
    hidden, heads = float(model.hidden), float(model.num_heads)
    gates = 3.0 if model.gated else 2.0
    moe_layers = sum(model.moe_pattern)
    dense_layers = model.num_layers - moe_layers
    if model.moe_pattern[-1]:
        moe_layers += model.mtp_layers
    else:
        dense_layers += model.mtp_layers
    layers = model.num_layers + model.mtp_layers
    if model.mla is not None:
        mla, qk = model.mla, float(model.mla.qk_nope + model.mla.qk_rope)
        query = hidden * heads * qk if mla.q_lora is None else mla.q_lora * (hidden + heads * qk + 1)
        per_token = query + mla.kv_lora * (hidden + heads * (mla.qk_nope + mla.v) + 1)
        per_token += hidden * mla.qk_rope + heads * mla.v * hidden
        core = heads * (qk + mla.v) / 2
    else:
        query = float(model.head_dim * model.num_heads)
        per_token = hidden * (query + 2.0 * model.head_dim * model.num_kv_heads) + query * hidden
        core = query
    per_token *= layers
    per_token += hidden * model.ffn_hidden * gates * dense_layers
    if model.moe is not None:
        moe = model.moe
        routed = float(moe.ffn_hidden * moe.top_k) * gates
        if moe.latent_hidden:
            routed = routed * moe.latent_hidden / hidden + 2 * moe.latent_hidden
        per_token += hidden * (routed + moe.shared_ffn_hidden * gates) * moe_layers
    per_token += model.mtp_layers * (3 * hidden + 2 * hidden * hidden)
    per_token += hidden * model.padded_vocab(tp) * (model.mtp_layers + 1)
    return 6.0 * sequences * (seq * per_token + seq * seq * core * layers)
