"""The work of one layer: named operations of one microbatch on one rank, with shapes, FLOPs and bytes.

Every operation carries arrays of length K (one entry per option), so 10,000 ways to run a stage cost
about as much to describe as one. Array suffix: K option.
"""

from __future__ import annotations

import numpy as np

from hapmoe.counting import (
    count_params,
    embedding_params,
    head_params,
    layer_params,
    layers_by_class,
    model_flops_per_step,
    mtp_params,
    padded_vocab_K,
)
from hapmoe.job import JobSpec
from hapmoe.options import LayerClass, Options
from hapmoe.plan import Recompute
from hapmoe.shapes import (
    Op,
    Shapes,
    Value,
    column,
    gemm,
    message,
    norm,
    residual,
    row,
    uses_sequence_parallel,
)

__all__ = [
    "Op",
    "Shapes",
    "count_params",
    "embedding_ops",
    "embedding_params",
    "hardware_flops",
    "head_ops",
    "head_params",
    "layer_classes",
    "layer_ops",
    "layer_params",
    "model_flops_per_step",
    "mtp_ops",
    "mtp_params",
    "padded_vocab_K",
    "project_ops",
    "uses_sequence_parallel",
]


def layer_classes(job: JobSpec) -> tuple[LayerClass, ...]:
    """The kinds of decoder layers of a model, in order of first appearance."""
    return tuple(layers_by_class(job.model))


def layer_ops(shapes: Shapes, layer_class: LayerClass) -> tuple[Op, ...]:
    """Forward operations of one decoder layer, and its messages of both passes.

    Source: megatron/core/transformer/transformer_layer.py and the modules it calls; TP messages
    tensor_parallel/layers.py (LinearWithGradAccumulationAndAsyncCommunication).
    """
    attention = _mla_ops if shapes.job.model.mla else _gqa_ops
    mlp = _moe_ops(shapes) if layer_class.moe else _mlp_ops(shapes)
    return (*attention(shapes, layer_class), *mlp)


def _gqa_ops(shapes: Shapes, layer_class: LayerClass) -> tuple[Op, ...]:
    model, size = shapes.job.model, shapes.bytes
    tokens_K, tp_K = shapes.tokens_K, shapes.tp_K
    query = float(model.num_heads * model.head_dim)
    key_value = 2.0 * model.num_kv_heads * model.head_dim
    # TE fuses the input norm into the QKV projection: only a separate norm can be recomputed
    fused = shapes.job.training.transformer_engine
    qkv = gemm("qkv", "attention", tokens_K, (query + key_value) / tp_K, model.hidden, size)
    proj = gemm("proj", "attention", tokens_K, model.hidden, query / tp_K, size)
    ops = [
        norm("input_norm", shapes, model.hidden, shapes.shard_K, () if fused else ("layernorm",)),
        *column(shapes, qkv, model.hidden),
        qkv,
    ]
    if bool(np.any(tp_K > model.num_kv_heads)):
        # attention.py:1851: with fewer KV heads than tp ranks the whole QKV output is gathered
        size_K = np.where(tp_K > model.num_kv_heads, tokens_K * ((query + key_value) * size), 0.0)
        ops.append(message("qkv_whole", qkv, "all_gather", size_K, "tp", "forward"))
        ops.append(message("qkv_whole_grad", qkv, "reduce_scatter", size_K, "tp", "backward"))
    if model.qk_layernorm:
        ops.append(norm("qk_norm", shapes, query + key_value / 2, tokens_K / tp_K))
    if not model.learned_positions:
        ops.append(
            Op(
                "rope",
                "elementwise",
                "attention",
                bytes_K=2 * size * (query + key_value / 2) * tokens_K / tp_K,
                backward=1.0,
            )
        )
    ops += _core_attention(shapes, layer_class, model.head_dim, model.head_dim, model.num_kv_heads)
    return (*ops, proj, *row(shapes, proj, model.hidden), residual("attention_residual", shapes))


def _mla_ops(shapes: Shapes, layer_class: LayerClass) -> tuple[Op, ...]:
    """Multi-latent attention: the down projections are not divided by tp, they see T/tp tokens.

    The up projections gather their latent inputs (q_lora, kv_lora wide), and the rotary key.
    Source: megatron/core/transformer/multi_latent_attention.py (qkv_up_proj_and_rope_apply).
    """
    model, size = shapes.job.model, shapes.bytes
    mla = model.mla
    assert mla is not None
    tokens_K, shard_K, tp_K = shapes.tokens_K, shapes.shard_K, shapes.tp_K
    heads, qk = float(model.num_heads), float(mla.qk_nope + mla.qk_rope)
    up = ("mla_up_proj",)
    ops = [norm("input_norm", shapes, model.hidden, shard_K, ("layernorm",))]
    if mla.q_lora is None:
        q_up = gemm("q_proj", "attention", tokens_K, heads * qk / tp_K, model.hidden, size)
        ops += [*column(shapes, q_up, model.hidden), q_up]
    else:
        q_up = gemm("q_up", "attention", tokens_K, heads * qk / tp_K, mla.q_lora, size, modules=up)
        ops += [
            gemm("q_down", "attention", shard_K, mla.q_lora, model.hidden, size),
            norm("q_norm", shapes, mla.q_lora, shard_K, up),
            *column(shapes, q_up, mla.q_lora),
            q_up,
        ]
    kv_up = gemm("kv_up", "attention", tokens_K, heads * (mla.qk_nope + mla.v) / tp_K, mla.kv_lora, size, modules=up)
    proj = gemm("proj", "attention", tokens_K, model.hidden, heads * mla.v / tp_K, size)
    kv_down = gemm("kv_down", "attention", shard_K, mla.kv_lora + mla.qk_rope, model.hidden, size)
    rope_bytes_K = tokens_K * (mla.qk_rope * size)
    ops += [
        kv_down,
        message("rope_key", kv_down, "all_gather", rope_bytes_K, "tp", "forward"),
        message("rope_key_grad", kv_down, "reduce_scatter", rope_bytes_K, "tp", "backward"),
        norm("kv_norm", shapes, mla.kv_lora, shard_K, up),
        *column(shapes, kv_up, mla.kv_lora),
        kv_up,
        # rotate, then assemble q and k from their two parts: everything is read and written once
        Op(
            "rope",
            "elementwise",
            "attention",
            up,
            bytes_K=2 * size * heads * (2 * qk + mla.v) * tokens_K / tp_K,
            backward=1.0,
        ),
    ]
    ops += _core_attention(shapes, layer_class, qk, mla.v, model.num_heads)
    return (*ops, proj, *row(shapes, proj, model.hidden), residual("attention_residual", shapes))


def _core_attention(shapes: Shapes, layer_class: LayerClass, qk: float, v: float, kv_heads: int) -> list[Op]:
    """Causal attention and its context-parallel exchange.

    FLOPs are those of the causal half (what a flash kernel computes); a sliding window of w keys
    leaves w(S - w/2) of S^2/2 pairs. Without flash attention all S^2 pairs are computed.
    """
    job, size = shapes.job, shapes.bytes
    model, training = job.model, job.training
    seq = float(training.seq_len)
    pairs = seq * seq / 2 if training.flash_attention else seq * seq
    if layer_class.window and model.attention_window and training.flash_attention:
        window = min(float(model.attention_window), seq)
        pairs = window * seq - window * window / 2
    heads_K = model.num_heads / shapes.tp_K
    kv_heads_K = np.maximum(kv_heads / shapes.tp_K, 1.0)
    sequences_K = shapes.tokens_K * shapes.cp_K / seq
    flops_K = 2.0 * (qk + v) * pairs * heads_K * sequences_K / shapes.cp_K
    bytes_K = size * shapes.tokens_K * (heads_K * (qk + v) + kv_heads_K * (qk + v))
    if not training.flash_attention:
        # scores written, softmax reads and writes, the product reads: 4 passes over S x S. Without the fused
        # kernel scale, mask, fp32 softmax, cast and dropout each read and write them: about 30 (layers profiled
        # on A100-40G, GH200, V100 take 90 over both passes: eth-easl/sailor profiles, OPT-350M, tp 1)
        passes = 4 if training.softmax_fusion else 30
        bytes_K = bytes_K + passes * size * seq * seq * heads_K * sequences_K / shapes.cp_K
    core = Op(
        "core_attention",
        "attention",
        "attention",
        ("core_attn",),
        m_K=seq / shapes.cp_K,
        n_K=flops_K / (2.0 * (qk + v) * heads_K * shapes.tokens_K),
        k_K=qk,
        groups_K=heads_K * sequences_K,
        flops_K=flops_K,
        bytes_K=bytes_K,
        # a fused kernel computes the scores again
        backward=2.5 if training.flash_attention else 2.0,
    )
    ops = [core]
    if bool(np.any(shapes.cp_K > 1)):
        kv_bytes_K = size * shapes.tokens_K * kv_heads_K * (qk + v)
        if "a2a" in training.cp_comm_type:
            whole_K = size * shapes.tokens_K * ((heads_K + kv_heads_K) * (qk + v))
            ops.append(message("cp_exchange", core, "all_to_all", whole_K, "cp", "forward"))
            ops.append(message("cp_exchange_grad", core, "all_to_all", whole_K, "cp", "backward"))
        elif training.cp_comm_type == "all_gather":
            gathered_K = kv_bytes_K * shapes.cp_K
            ops.append(message("cp_kv", core, "all_gather", gathered_K, "cp", "forward"))
            ops.append(message("cp_kv_again", core, "all_gather", gathered_K, "cp", "backward"))
            ops.append(message("cp_kv_grad", core, "reduce_scatter", gathered_K, "cp", "backward"))
        else:
            # the ring passes K and V on cp - 1 times; backward also passes their gradients
            hidden = ("core_attention", "forward"), ("core_attention", "dgrad")
            ops.append(message("cp_ring", core, "ring", kv_bytes_K * shapes.cp_K, "cp", "forward", hidden[0]))
            ops.append(message("cp_ring_grad", core, "ring", 2 * kv_bytes_K * shapes.cp_K, "cp", "backward", hidden[1]))
    return ops


def _mlp_ops(shapes: Shapes) -> tuple[Op, ...]:
    model = shapes.job.model
    fused = shapes.job.training.transformer_engine
    before = norm("mlp_norm", shapes, model.hidden, shapes.shard_K, () if fused else ("layernorm",))
    ops = _two_gemms(shapes, "fc", "mlp", model.ffn_hidden, ("mlp",))
    return (before, *ops, residual("mlp_residual", shapes))


def _two_gemms(shapes: Shapes, name: str, part: str, width: float, modules: tuple[str, ...]) -> tuple[Op, ...]:
    """A dense MLP of ``width`` divided by tp: projection in, activation, projection out."""
    model, size = shapes.job.model, shapes.bytes
    gates = 2.0 if model.gated else 1.0
    first = gemm(f"{name}1", part, shapes.tokens_K, gates * width / shapes.tp_K, model.hidden, size, modules=modules)
    second = gemm(f"{name}2", part, shapes.tokens_K, model.hidden, width / shapes.tp_K, size, modules=modules)
    act_K = size * (gates + 1) * width * shapes.tokens_K / shapes.tp_K
    act = Op(f"{name}_act", "elementwise", part, modules, bytes_K=act_K, backward=(2 * gates + 1) / (gates + 1))
    return (*column(shapes, first, model.hidden), first, act, second, *row(shapes, second, model.hidden))


def _moe_ops(shapes: Shapes) -> tuple[Op, ...]:
    """Router, dispatch, experts, combine, shared expert.

    Source: megatron/core/transformer/moe/{moe_layer,token_dispatcher,experts,shared_experts}.py.
    """
    job, size = shapes.job, shapes.bytes
    model, training = job.model, job.training
    moe = model.moe
    assert moe is not None
    hidden = float(moe.latent_hidden or model.hidden)
    again = ("moe",)
    shard_K = shapes.shard_K
    rows_K = shapes.expert_tokens_K
    ops = [
        norm("mlp_norm", shapes, model.hidden, shard_K, ("layernorm",)),
        gemm(
            "router",
            "router",
            shard_K,
            moe.num_experts,
            model.hidden,
            size,
            modules=again,
            # compute-type inputs, fp32 result (moe_utils.py: router_gating_linear)
            precision="bf16",
        ),
        # scores, top-k, probabilities, map, auxiliary loss: about six passes over tokens x experts
        Op(
            "top_k",
            "elementwise",
            "router",
            again,
            bytes_K=6 * 4.0 * moe.num_experts * shard_K,
            backward=1.0,
            launches_K=6.0,
        ),
    ]
    if moe.latent_hidden:
        ops.append(gemm("latent_in", "experts", shard_K, hidden, model.hidden, size, modules=again))
    ops += _dispatch_ops(shapes, hidden)
    local_K = moe.num_experts / shapes.ep_K
    gates = 2.0 if model.gated else 1.0
    each_K = rows_K / local_K
    width_K = moe.ffn_hidden / shapes.etp_K
    grouped = training.grouped_gemm
    for name, n_K, k_K in (("expert_fc1", gates * width_K, hidden), ("expert_fc2", hidden, width_K)):
        ops.append(
            Op(
                name,
                "grouped_gemm",
                "experts",
                again,
                m_K=each_K,
                n_K=n_K,
                k_K=k_K,
                groups_K=local_K,
                flops_K=2.0 * rows_K * n_K * k_K,
                bytes_K=size * (rows_K * (n_K + k_K) + local_K * n_K * k_K),
                launches_K=1.0 if grouped else local_K,
            )
        )
        if name == "expert_fc1":
            act_K = size * (gates + 1) * width_K * rows_K
            ops.append(
                Op(
                    "expert_act",
                    "elementwise",
                    "experts",
                    ("moe", "moe_act"),
                    bytes_K=act_K,
                    backward=(2 * gates + 1) / (gates + 1),
                    launches_K=1.0 if grouped else local_K,
                )
            )
    if model.linear_bias:
        # each expert's bias is added to its rows one expert at a time and the rows joined again: read and write
        # twice for either projection (experts.py: TEGroupedMLP._apply_bias); backward sums its gradient
        bias_K = 4 * size * rows_K * (gates * width_K + hidden)
        ops.append(Op("expert_bias", "elementwise", "experts", again, bytes_K=bias_K, backward=1.5, launches_K=local_K))
    if moe.latent_hidden:
        ops.append(gemm("latent_out", "experts", shard_K, model.hidden, hidden, size, modules=again))
    if moe.shared_ffn_hidden:
        ops += _two_gemms(shapes, "shared", "shared", moe.shared_ffn_hidden, ("moe", "shared_experts"))
    return (*ops, residual("mlp_residual", shapes))


def _dispatch_ops(shapes: Shapes, hidden: float) -> list[Op]:
    """Permutations and messages between router and experts, both ways and both passes."""
    training, size = shapes.job.training, shapes.bytes
    moe = shapes.job.model.moe
    assert moe is not None
    again = ("moe",)
    sent_K = shapes.routed_K * (hidden * size)
    received_K = shapes.expert_tokens_K * (hidden * size)
    shard_bytes_K = shapes.shard_K * (hidden * size)
    # unfused permutation builds indices and masks in separate kernels (moe_utils.py: permute)
    launches = 2.0 if training.permute_fusion else 8.0
    near = Op("", "message", "dispatch", again)
    ops: list[Op] = []
    shared = training.shared_expert_overlap and bool(moe.shared_ffn_hidden)

    def both(name: str, collective: str, bytes_K: Value, axis: str) -> None:
        """A message forward, and its dual backward; hidden by another microbatch or the shared expert."""
        dual = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather"}.get(collective, collective)
        first = "shared1" if name.startswith("dispatch") else "shared2"
        least = "moe_overlap_exposed_calibration"
        another = ("*", "layer") if training.overlap_moe_comm else None
        forward = another or ((first, "forward") if shared else None)
        backward = another or ((first, "dgrad") if shared else None)
        ops.append(message(name, near, collective, bytes_K, axis, "forward", forward, least))
        ops.append(message(f"{name}_grad", near, dual, bytes_K, axis, "backward", backward, least))

    def move(name: str, bytes_K: Value) -> None:
        ops.append(Op(name, "elementwise", "dispatch", again, bytes_K=bytes_K, backward=1.0, launches_K=launches))

    if training.dispatcher == "allgather":
        group_K = shapes.etp_K * shapes.ep_K
        gathered_K = shard_bytes_K * group_K
        # the routing map (a byte an expert) and the probabilities of all tokens travel too, each by itself
        experts_K = shapes.shard_K * group_K * moe.num_experts
        wide = 4.0 if training.router_dtype == "fp32" else size
        both("dispatch", "all_gather", gathered_K, "tp_ep")
        both("dispatch_probabilities", "all_gather", experts_K * wide, "tp_ep")
        ops.append(message("dispatch_map", near, "all_gather", experts_K, "tp_ep", "forward"))
        move("permute", gathered_K / np.maximum(group_K, 1.0) + 2 * received_K)
        move("unpermute", 2 * received_K + gathered_K)
        # added up in the type of the probabilities
        both("combine", "reduce_scatter", gathered_K * (wide / size), "tp_ep")
    elif training.dispatcher == "flex":
        # a token goes once to every rank that holds one of its experts
        distinct_K = shapes.distinct(np.maximum(shapes.ep_K * shapes.etp_K, 1.0))
        both("dispatch", "flex_dispatch", shard_bytes_K, "tp_ep")
        move("permute", shard_bytes_K * distinct_K + received_K)
        move("unpermute", received_K + shard_bytes_K * distinct_K)
        both("combine", "flex_combine", shard_bytes_K, "tp_ep")
    else:
        move("permute", shard_bytes_K + sent_K)
        both("dispatch", "all_to_all", sent_K, "ep")
        both("dispatch_etp", "all_gather", received_K, "etp")
        # with several experts and sources per rank the rows are sorted by expert once more
        sort_K = np.where((shapes.ep_K > 1) & (moe.num_experts / shapes.ep_K > 1), 2.0, 0.0)
        move("sort_by_expert", sort_K * 2 * received_K)
        both("combine_etp", "reduce_scatter", received_K, "etp")
        both("combine", "all_to_all", sent_K, "ep")
        move("unpermute", shard_bytes_K + sent_K)
    return ops


def embedding_ops(shapes: Shapes) -> tuple[Op, ...]:
    """Lookup of T tokens in a vocabulary divided by tp, and the reduction of its partial rows."""
    model = shapes.job.model
    size_K = shapes.tokens_K * (model.hidden * shapes.bytes)
    lookup = Op("embedding", "elementwise", "embedding", bytes_K=2 * size_K, backward=2.0, launches_K=3.0)
    collective, dual = ("reduce_scatter", "all_gather") if shapes.sequence_parallel else ("all_reduce", "")
    if model.learned_positions:
        collective = "all_reduce"  # positions are added to whole rows (language_model_embedding.py:60)
    ops = [lookup, message("embedding_output", lookup, collective, size_K, "tp", "forward")]
    if dual:
        ops.append(message("embedding_output_grad", lookup, dual, size_K, "tp", "backward"))
    return tuple(ops)


def head_ops(shapes: Shapes) -> tuple[Op, ...]:
    """Final norm, logits over the padded vocabulary, cross entropy in fp32."""
    model = shapes.job.model
    vocab_K = padded_vocab_K(model, shapes.options) / shapes.tp_K
    # the output layer stays out of FP8 (fp8 covers the decoder block only)
    logits = gemm("logits", "head", shapes.tokens_K, vocab_K, model.hidden, shapes.bytes, precision="bf16")
    # to fp32, maximum, exponent, sum, target: about five passes of 4 bytes; fused about two
    passes = 2.0 if shapes.job.training.cross_entropy_fusion else 5.0
    loss = Op(
        "loss", "elementwise", "head", bytes_K=passes * 4.0 * shapes.tokens_K * vocab_K, backward=0.6, launches_K=10.0
    )
    return (
        norm("final_norm", shapes, model.hidden, shapes.shard_K),
        *column(shapes, logits, model.hidden),
        logits,
        loss,
    )


def project_ops(shapes: Shapes) -> tuple[Op, ...]:
    """What an MTP layer adds to a decoder layer and a head: two norms, and a projection 2h -> h.

    Source: megatron/core/transformer/multi_token_prediction.py (MultiTokenPredictionLayer).
    """
    hidden = float(shapes.job.model.hidden)
    # eh_proj is column-parallel and its output is gathered again
    project = gemm("eh_proj", "mtp", shapes.tokens_K, hidden / shapes.tp_K, 2 * hidden, shapes.bytes)
    norms = norm("mtp_norms", shapes, 2 * hidden, shapes.shard_K)
    output = message(
        "eh_proj_output", project, "all_gather", shapes.tokens_K * (hidden * shapes.bytes), "tp", "forward"
    )
    return (norms, *column(shapes, project, 2 * hidden), project, output)


def mtp_ops(shapes: Shapes, layer_class: LayerClass) -> tuple[Op, ...]:
    """One multi-token-prediction layer: projection, a decoder layer, the head."""
    return (*project_ops(shapes), *layer_ops(shapes, layer_class), *head_ops(shapes))


def hardware_flops(job: JobSpec, recompute: Recompute, *, global_batch_size: int = 0, tp: int = 1) -> float:
    """Model FLOPs of one step plus those that every decoder layer does again under ``recompute``."""
    one = np.ones(1, dtype=np.int64)
    shapes = Shapes.of(job, Options(tp_K=one, cp_K=one, ep_K=one, etp_K=one, dp_K=one, mbs_K=one))
    full, modules = recompute.granularity == "full", set(recompute.modules)
    again = 0.0
    for layer_class, count in layers_by_class(job.model).items():
        for op in layer_ops(shapes, layer_class):
            if op.phase == "forward" and (full or modules.intersection(op.modules)):
                again += count * float(np.ravel(op.flops_K)[0])
    sequences = global_batch_size or job.training.global_batch_size
    return model_flops_per_step(job, global_batch_size=global_batch_size, tp=tp) + sequences * again
