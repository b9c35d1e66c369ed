"""Bytes of a stage: what a layer keeps for its backward pass, tensor by tensor, and what parameters cost.

The tensors are those that Megatron-Core keeps with Transformer Engine (or without, as the job says);
each names the recomputation modules that free it. Array suffix: K option.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from hapmoe.cluster import Pool
from hapmoe.efficiency import load_yaml
from hapmoe.job import JobSpec
from hapmoe.measured import Measurements
from hapmoe.options import FloatArray, LayerClass, Options
from hapmoe.plan import Recompute
from hapmoe.units import DTYPE_BYTES
from hapmoe.workload import Shapes, padded_vocab_K

__all__ = [
    "Tensor",
    "activation_bytes",
    "embedding_bytes",
    "head_bytes",
    "layer_tensors",
    "memory_limit_bytes",
    "mtp_bytes",
    "optimizer_bytes",
    "transient_bytes",
    "weight_bytes",
    "workspace_bytes",
]


@dataclass(frozen=True, slots=True)
class Tensor:
    """Something kept from forward to backward of one microbatch."""

    name: str
    bytes_K: FloatArray
    freed_by: tuple[str, ...] = ()
    """Recomputation modules that make it again instead. "full" frees all but the layer's input."""
    layer_input: bool = False


def layer_tensors(shapes: Shapes, layer_class: LayerClass) -> tuple[Tensor, ...]:
    """What one decoder layer keeps of one microbatch, in order.

    Source: the saved tensors of megatron/core/transformer and Transformer Engine modules; checked
    against saved_tensors_hooks of megatron-core 0.16.1 on CPU where it runs without TE.
    """
    attention = _mla_tensors if shapes.job.model.mla else _gqa_tensors
    mlp = _moe_tensors(shapes) if layer_class.moe else _mlp_tensors(shapes)
    return (*attention(shapes), *mlp)


def _input_bytes(shapes: Shapes) -> float:
    """Bytes per element of a saved GEMM input: FP8 keeps the quantized copy."""
    training = shapes.job.training
    if training.fp4:
        return 0.5625  # 4 bits and a scale byte per 16 values (NVFP4)
    return 1.0 if training.fp8_recipe else float(shapes.bytes)


def _norm_pair(shapes: Shapes, name: str, separate: bool, freed_by: tuple[str, ...], *, first: bool) -> list[Tensor]:
    """Input of a norm (the residual stream) and its output (the input of the next GEMM)."""
    elements_K = shapes.shard_K * shapes.job.model.hidden
    free = (("layernorm",) if separate else ()) + freed_by
    return [
        Tensor(f"{name}_in", elements_K * shapes.bytes, layer_input=first),
        Tensor(f"{name}_out", elements_K * _input_bytes(shapes), free),
    ]


def _scores(shapes: Shapes, heads_K: FloatArray) -> Tensor:
    """Without a flash kernel: softmax output, dropout mask (1 byte) and output, S x S per head.

    Source: Korthikanti et al., arXiv 2205.05198, section 4.1 (5 a s^2 b bytes).
    """
    seq = float(shapes.job.training.seq_len)
    return Tensor("attention_scores", (2 * shapes.bytes + 1) * heads_K * shapes.tokens_K * seq, ("core_attn",))


def _gqa_tensors(shapes: Shapes) -> list[Tensor]:
    job, size = shapes.job, shapes.bytes
    model = job.model
    heads_K = model.num_heads / shapes.tp_K
    kv_heads_K = np.maximum(model.num_kv_heads / shapes.tp_K, 1.0)
    query_K = shapes.tokens_K * heads_K * model.head_dim
    key_K = shapes.tokens_K * kv_heads_K * model.head_dim
    tensors = _norm_pair(shapes, "input_norm", not job.training.transformer_engine, (), first=True)
    if model.qk_layernorm:
        tensors.append(Tensor("qk_norm_in", (query_K + key_K) * size))
    tensors.append(Tensor("query_key_value", _kept_qkv(shapes, query_K, key_K) * size))
    if job.training.flash_attention:
        tensors.append(Tensor("attention_lse", shapes.tokens_K * heads_K * 4.0, ("core_attn",)))
        tensors.append(Tensor("attention_out", query_K * size))
    else:
        tensors += [_scores(shapes, heads_K), Tensor("attention_out", query_K * size)]
    if _input_bytes(shapes) < size:
        tensors.append(Tensor("proj_in_quantized", query_K * _input_bytes(shapes)))
    return tensors


def _kept_qkv(shapes: Shapes, query_K: FloatArray, key_K: FloatArray) -> FloatArray:
    """Elements of queries, keys and values that attention keeps alive.

    Without a flash kernel keys and values are repeated for every query head. Megatron's own attention
    keeps rotated queries and keys, and the values as a view, which holds the projection's whole output.
    Source: megatron/core/transformer/{attention,dot_product_attention}.py.
    """
    model, training = shapes.job.model, shapes.job.training
    if training.flash_attention:
        return query_K + 2 * key_K
    if model.num_kv_heads < model.num_heads:
        return 3 * query_K
    rotated = not model.learned_positions and not training.transformer_engine
    return query_K + 2 * key_K + (query_K + key_K if rotated else 0.0)


def _mla_tensors(shapes: Shapes) -> list[Tensor]:
    model, size = shapes.job.model, shapes.bytes
    mla = model.mla
    assert mla is not None
    heads_K = model.num_heads / shapes.tp_K
    qk, up = float(mla.qk_nope + mla.qk_rope), ("mla_up_proj",)
    tokens_K, shard_K, stored = shapes.tokens_K, shapes.shard_K, _input_bytes(shapes)
    tensors = _norm_pair(shapes, "input_norm", True, (), first=True)
    if mla.q_lora is not None:
        tensors.append(Tensor("q_latent", shard_K * (mla.q_lora * size)))
        tensors.append(Tensor("q_latent_normed", shard_K * (mla.q_lora * stored), up))
    tensors += [
        Tensor("kv_latent", shard_K * (mla.kv_lora + mla.qk_rope) * size),
        Tensor("kv_latent_normed", shard_K * (mla.kv_lora * stored), up),
        Tensor("query", tokens_K * heads_K * (qk * size), up),
        Tensor("key", tokens_K * heads_K * (qk * size), up),
        Tensor("value", tokens_K * heads_K * (mla.v * size), up),
    ]
    if shapes.job.training.flash_attention:
        tensors.append(Tensor("attention_lse", tokens_K * heads_K * 4.0, ("core_attn",)))
    else:
        tensors.append(_scores(shapes, heads_K))
    tensors.append(Tensor("attention_out", tokens_K * heads_K * (mla.v * size)))
    if stored < size:
        tensors.append(Tensor("proj_in_quantized", tokens_K * heads_K * (mla.v * stored)))
    return tensors


def _mlp_tensors(shapes: Shapes) -> list[Tensor]:
    fused = shapes.job.training.transformer_engine
    # TE runs the norm inside the first projection: recomputing the MLP frees the norm's output too
    tensors = _norm_pair(shapes, "mlp_norm", not fused, ("mlp",) if fused else (), first=False)
    return tensors + _inner(shapes, "fc", shapes.job.model.ffn_hidden / shapes.tp_K, shapes.tokens_K, ("mlp",), ())


def _inner(
    shapes: Shapes, name: str, width_K: FloatArray, rows_K: FloatArray, modules: tuple[str, ...], act: tuple[str, ...]
) -> list[Tensor]:
    """Output of the first projection and of the activation."""
    gates = 2.0 if shapes.job.model.gated else 1.0
    return [
        Tensor(f"{name}1_out", rows_K * width_K * (gates * shapes.bytes), modules),
        Tensor(f"{name}_act_out", rows_K * width_K * _input_bytes(shapes), modules + act),
    ]


def _moe_tensors(shapes: Shapes) -> list[Tensor]:
    job = shapes.job
    moe = job.model.moe
    assert moe is not None
    again = ("moe",)
    rows_K = shapes.expert_tokens_K
    hidden = float(moe.latent_hidden or job.model.hidden)
    tensors = _norm_pair(shapes, "mlp_norm", True, (), first=False)
    # logits, scores and probabilities in fp32, the routing map in bytes; gathered, only the local experts' columns
    map_tokens_K = shapes.shard_K * (shapes.etp_K if job.training.dispatcher == "allgather" else 1.0)
    tensors.append(
        Tensor("router", shapes.shard_K * (moe.num_experts * 8.0) + map_tokens_K * (moe.num_experts * 5.0), again)
    )
    # row numbers of every copy, to undo the permutation
    tensors.append(Tensor("row_map", rows_K * 8.0, again))
    tensors.append(Tensor("expert_in", rows_K * (hidden * _input_bytes(shapes)), again))
    width_K = moe.ffn_hidden / shapes.etp_K
    tensors += _inner(shapes, "expert_fc", width_K, rows_K, again, ("moe_act",))
    if moe.shared_ffn_hidden:
        width_K = moe.shared_ffn_hidden / shapes.tp_K
        tensors += _inner(shapes, "shared_fc", width_K, shapes.tokens_K, ("moe", "shared_experts"), ())
    return tensors


def activation_bytes(tensors: Sequence[Tensor], menu: Sequence[Recompute]) -> FloatArray:
    """Bytes that one layer keeps of one microbatch under each recomputation choice. Shape [R, K]."""
    return kept_mask(tensors, menu) @ np.stack([tensor.bytes_K for tensor in tensors])


def kept_mask(tensors: Sequence[Tensor], menu: Sequence[Recompute]) -> FloatArray:
    """1 where a menu entry keeps a tensor. Shape [R, tensors]."""
    rows = []
    for entry in menu:
        again = set(entry.modules)
        if entry.granularity == "full":
            rows.append([float(tensor.layer_input) for tensor in tensors])
        else:
            rows.append([float(not again.intersection(tensor.freed_by)) for tensor in tensors])
    return np.asarray(rows)


def transient_bytes(shapes: Shapes, layer_class: LayerClass, kept_RK: FloatArray) -> FloatArray:
    """Bytes that exist only while one layer runs backward: what is made again, and gradients.

    Shapes: ``kept_RK`` are ``activation_bytes`` of a menu that begins with "none"; result [R, K].
    Gradients: the largest pair of a tensor's gradient and the next one's; with sequence parallelism
    also the gathered input and its gradient.
    """
    model, size = shapes.job.model, shapes.bytes
    gates = 2.0 if model.gated else 1.0
    whole_K = shapes.tokens_K * (model.hidden * size)
    if layer_class.moe and model.moe is not None:
        rows_K = shapes.expert_tokens_K
        hidden = float(model.moe.latent_hidden or model.hidden)
        width_K = model.moe.ffn_hidden / shapes.etp_K
        gradients_K = rows_K * ((gates + 1) * width_K + 2 * hidden) * size
        if shapes.job.training.dispatcher == "allgather":
            gradients_K = gradients_K + 2 * shapes.shard_K * shapes.etp_K * shapes.ep_K * (hidden * size)
        if model.moe.shared_ffn_hidden:
            gradients_K = gradients_K + shapes.tokens_K * (
                (gates + 1) * model.moe.shared_ffn_hidden * size / shapes.tp_K
            )
    else:
        gradients_K = shapes.tokens_K * ((gates + 1) * model.ffn_hidden * size / shapes.tp_K) + whole_K
    return np.asarray(kept_RK[0] - kept_RK + (gradients_K + whole_K))


def embedding_bytes(shapes: Shapes) -> FloatArray:
    """Kept by the embedding: token numbers; its output is the first layer's input."""
    return shapes.tokens_K * 8.0


def head_bytes(shapes: Shapes) -> FloatArray:
    """Kept or made by final norm, logits and loss of one microbatch.

    Logits in the compute type and in fp32 (softmax takes the latter's place); backward the fp32
    gradient in the softmax's place and one in the compute type: 6 bytes a logit in bf16, both ways;
    fp32 logits are not copied.
    Source: megatron/core/tensor_parallel/cross_entropy.py (VocabParallelCrossEntropy).
    """
    vocab_K = padded_vocab_K(shapes.job.model, shapes.options) / shapes.tp_K
    norm_K = shapes.shard_K * (2.0 * shapes.job.model.hidden * shapes.bytes)
    copy = shapes.bytes if shapes.bytes < 4.0 else 0.0
    return shapes.tokens_K * vocab_K * (4.0 + copy) + norm_K


def mtp_bytes(shapes: Shapes, layer_K: FloatArray) -> FloatArray:
    """Kept by one MTP layer: norms, the 2h-wide input of its projection, the layer, the head's share."""
    hidden = float(shapes.job.model.hidden)
    project_K = shapes.shard_K * (4.0 * hidden * shapes.bytes) + shapes.tokens_K * (hidden * shapes.bytes)
    return layer_K + project_K + head_bytes(shapes)


def weight_bytes(job: JobSpec) -> float:
    """Bytes per parameter of the weights that forward and backward use.

    FP8 keeps two quantized copies (row and column wise): beside the weights, or instead of them
    with fp8_param_gather.
    """
    training = job.training
    stored = float(DTYPE_BYTES[training.precision])
    if training.fp8_recipe is None and not training.fp4:
        return stored
    quantized = 2.0
    return quantized if training.fp8_param_gather else stored + quantized


def optimizer_bytes(job: JobSpec, shards_K: FloatArray) -> FloatArray:
    """Bytes per parameter on a rank of optimizer states, divided over ``shards_K`` ranks if distributed.

    Mixed precision Adam: fp32 master, two moments. A gradient buffer below fp32 needs an fp32 copy
    of the shard. Source: megatron/core/optimizer/distrib_optimizer.py; arXiv 1910.02054 (ZeRO).
    """
    training = job.training
    moments = {"adam": 2, "sgd": 1}.get(training.optimizer, 1)
    main = 0.0 if training.precision == "fp32" else training.main_params_bytes
    each = main + (training.exp_avg_bytes, training.exp_avg_bytes + training.exp_avg_sq_bytes)[moments - 1]
    if training.grad_bytes < training.main_grads_bytes:
        each += training.main_grads_bytes
    each *= 1.0 - training.optimizer_offload_fraction
    if not training.distributed_optimizer:
        return np.full(len(shards_K), each)
    return np.asarray(each / shards_K)


@lru_cache(maxsize=1)
def _table() -> dict[str, Any]:
    return load_yaml("memory.yaml")


def workspace_bytes(pool: Pool, options: Options) -> FloatArray:
    """Framework context and communication buffers: measured, else ASSUMED constants of data/memory.yaml."""
    table = _table()
    if pool.device.vendor == "cpu":
        return np.zeros(len(options))
    if pool.tables is not None and (measured := _beside_tensors(pool.tables)) is not None:
        return np.full(len(options), measured)
    sizes = (options.tp_K, options.cp_K, options.dp_K, options.ep_K, options.etp_K)
    groups_K = sum((size_K > 1).astype(np.float64) for size_K in sizes)
    return np.asarray(table["context_bytes"]["value"] + groups_K * float(table["group_bytes"]["value"]))


@lru_cache(maxsize=64)
def _beside_tensors(tables: Measurements) -> float | None:
    """What devices held beside the framework's tensors at the peak of a step: the median over ranks and runs.

    Context and communication buffers (all in use less reserved) and the allocator's slack (reserved less
    allocated). None where no run tells both.
    """
    marks: dict[tuple[object, ...], dict[str, int]] = {}
    for row in tables.memory:
        place = tuple(getattr(row, name) for name in row.__struct_fields__ if name not in ("mark", "bytes", "samples"))
        marks.setdefault(place, {})[row.mark] = row.bytes
    beside = [
        found["device"] - found["allocated"] for found in marks.values() if {"device", "allocated"} <= found.keys()
    ]
    return float(np.median(beside)) if beside else None


def memory_limit_bytes(pool: Pool) -> float:
    """Device bytes minus the reserve: the pool's, or the default share."""
    memory = pool.device.memory_bytes
    if pool.memory_reserve_bytes is not None:
        return float(memory - pool.memory_reserve_bytes)
    return memory * (1.0 - float(_table()["reserve_fraction"]["value"]))
