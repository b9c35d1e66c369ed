"""Counts that others published: parameters, FLOPs, tensor-parallel volumes."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import msgspec
import numpy as np
import pytest
from shapes_of import DEEPSEEK_V3, GPT3_175B, LLAMA2_7B, LLAMA2_13B, MIXTRAL_8X7B, QWEN3_30B, job_of, options_of

from hapmoe.counting import count_params, embedding_params, head_params, layer_params, model_flops_per_step
from hapmoe.job import Present
from hapmoe.model import Mla, ModelSpec, Moe
from hapmoe.options import LayerClass
from hapmoe.plan import Recompute
from hapmoe.workload import Op, Shapes, hardware_flops, layer_classes, layer_ops


@pytest.mark.parametrize(
    ("model", "published"),
    [
        # the checkpoints' own sizes: meta-llama/Llama-2-7b-hf and -13b-hf safetensors index
        (LLAMA2_7B, 6_738_415_616),
        (LLAMA2_13B, 13_015_864_320),
        # mistralai/Mixtral-8x7B-v0.1 and Qwen/Qwen3-30B-A3B safetensors index
        (MIXTRAL_8X7B, 46_702_792_704),
        (QWEN3_30B, 30_532_122_624),
    ],
)
def test_parameter_counts_are_those_of_the_checkpoints(model: ModelSpec, published: int) -> None:
    assert count_params(model) == published


def test_deepseek_v3_has_671_billion_parameters_and_14_with_mtp() -> None:
    # arXiv 2412.19437: 671 B main model; the repository: 685 B with the 14 B MTP module, whose
    # embedding and head (2 x 0.93 B) are shared copies
    main = count_params(DEEPSEEK_V3, mtp=False)
    assert main == pytest.approx(671e9, rel=1e-3)
    shared = 2 * 129280 * 7168
    assert count_params(DEEPSEEK_V3) + shared - main == pytest.approx(14e9, rel=0.05)


def test_flops_are_narayanans_formula_with_the_causal_half() -> None:
    # Narayanan et al., arXiv 2104.04473, eq. (3): 96 B s l h^2 (1 + s/6h + V/16lh) with full
    # recomputation (4 passes) and full attention; Megatron counts 3 passes and half the attention now
    job = job_of(GPT3_175B, seq_len=2048, global_batch_size=1536)
    batch, seq, layers, hidden, vocab = 1536, 2048, 96, 12288, 51200
    expected = 72 * batch * seq * layers * hidden**2 * (1 + seq / (12 * hidden) + vocab / (12 * layers * hidden))
    assert model_flops_per_step(job) == pytest.approx(expected, rel=1e-12)


def test_flops_per_token_of_mixtral_are_six_times_active_parameters() -> None:
    job = job_of(MIXTRAL_8X7B, seq_len=128)
    active = 12.9e9 - 32000 * 4096  # published active parameters, less the embedding's lookup
    per_token = model_flops_per_step(job) / (256 * 128)
    assert per_token == pytest.approx(6 * active, rel=0.01)


def test_full_recomputation_does_a_third_more() -> None:
    # Narayanan et al. (arXiv 2104.04473): 4 passes instead of 3 over the layers
    job = job_of(LLAMA2_7B, seq_len=4096)
    layers = model_flops_per_step(job) - 6 * 256 * 4096 * 4096 * 32000
    full = hardware_flops(job, Recompute(granularity="full", method="uniform", num_layers=1))
    assert full - model_flops_per_step(job) == pytest.approx(layers / 3, rel=1e-6)


def _messages(ops: tuple[Op, ...], phase: str) -> list[str]:
    return sorted(op.collective for op in ops if op.kind == "message" and op.axis == "tp" and op.phase == phase)


def test_a_dense_layer_with_sequence_parallelism_sends_what_megatron_sends() -> None:
    shapes = Shapes.of(job_of(LLAMA2_7B), options_of(tp=4))
    ops = layer_ops(shapes, LayerClass(moe=False, window=False))
    assert _messages(ops, "forward") == ["all_gather"] * 2 + ["reduce_scatter"] * 2
    assert _messages(ops, "backward") == ["all_gather"] * 4 + ["reduce_scatter"] * 2
    assert all(float(np.ravel(op.bytes_K)[0]) == 4096 * 4096 * 2 for op in ops if op.axis == "tp")


def test_without_sequence_parallelism_two_all_reduces_each_way() -> None:
    job = job_of(LLAMA2_7B, present=Present(tp=4))
    ops = layer_ops(Shapes.of(job, options_of(tp=4)), LayerClass(moe=False, window=False))
    assert _messages(ops, "forward") == _messages(ops, "backward") == ["all_reduce"] * 2


def test_an_moe_layer_has_the_attention_pair_only_and_four_all_to_alls() -> None:
    ops = layer_ops(Shapes.of(job_of(MIXTRAL_8X7B), options_of(tp=2, ep=4, dp=4)), LayerClass(moe=True, window=False))
    assert _messages(ops, "forward") == ["all_gather", "reduce_scatter"]
    exchanges = [op for op in ops if op.collective == "all_to_all"]
    assert len(exchanges) == 4
    # T/tp * k * H * 2 bytes sent by each rank
    assert all(float(np.ravel(op.bytes_K)[0]) == 4096 / 2 * 2 * 4096 * 2 for op in exchanges)


def test_layer_flops_add_up_to_megatrons_count() -> None:
    for model in (LLAMA2_7B, MIXTRAL_8X7B, DEEPSEEK_V3):
        job = job_of(msgspec.structs.replace(model, mtp_layers=0))
        shapes = Shapes.of(job, options_of())
        classes = layer_classes(job)
        prefix = [sum(model.moe_pattern), model.num_layers - sum(model.moe_pattern)]
        total = 0.0
        for layer_class in classes:
            layer = sum(
                float(np.ravel(op.flops_K)[0]) for op in layer_ops(shapes, layer_class) if op.name not in ("router",)
            )
            total += layer * (prefix[0] if layer_class.moe else prefix[1])
        logits = 2 * 4096 * model.hidden * model.padded_vocab(1)
        assert 3 * 256 * (total + logits) == pytest.approx(model_flops_per_step(job), rel=1e-3)


def test_expert_rows_follow_the_skew_and_capacity_caps_them() -> None:
    options = options_of(ep=[1, 8], dp=8)
    skewed = Shapes.of(job_of(MIXTRAL_8X7B, imbalance=1.5), options)
    assert skewed.expert_tokens_K.tolist() == [8192, 12288]
    assert MIXTRAL_8X7B.moe is not None
    capped = msgspec.structs.replace(
        MIXTRAL_8X7B, moe=msgspec.structs.replace(MIXTRAL_8X7B.moe, capacity_factor=1.25, pad_to_capacity=True)
    )
    # ceil(1.25 * 4096 * 2 / 8) = 1280 slots per expert, all eight sent
    assert Shapes.of(job_of(capped, imbalance=1.5), options).expert_tokens_K.tolist() == [10240, 10240]


MEGATRON = """
import json, sys, torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
torch.cuda.get_device_capability = lambda *a: (9, 0)
torch.cuda.current_device = lambda: "cpu"
torch.cuda.Stream = lambda *a, **k: None
from megatron.core import parallel_state as ps
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
multi_latent_attention.TELinear = type("TELinear", (), {})
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=16)
for tp, ep, etp, moe, mla, groups in json.loads(sys.argv[1]):
    ps.destroy_model_parallel()
    ps.initialize_model_parallel(
        tensor_model_parallel_size=tp, expert_model_parallel_size=ep, expert_tensor_parallel_size=etp,
        create_gloo_process_groups=False,
    )
    keys = dict(
        num_layers=1, hidden_size=64, num_attention_heads=8, ffn_hidden_size=96, tensor_model_parallel_size=tp,
        expert_model_parallel_size=ep, expert_tensor_parallel_size=etp, gated_linear_unit=True, add_bias_linear=False,
        use_cpu_initialization=True, perform_initialization=False, normalization="RMSNorm",
    )
    if moe:
        keys |= dict(num_moe_experts=8, moe_router_topk=2, moe_ffn_hidden_size=48,
                     moe_shared_expert_intermediate_size=32, moe_token_dispatcher_type="alltoall")
    if mla:
        keys |= dict(q_lora_rank=24, kv_lora_rank=16, qk_head_dim=16, qk_pos_emb_head_dim=8, v_head_dim=16,
                     qk_layernorm=True, multi_latent_attention=True, rope_type="rope")
    else:
        keys |= dict(num_query_groups=groups, kv_channels=16)
    config = (MLATransformerConfig if mla else TransformerConfig)(**keys)
    spec = get_gpt_layer_local_spec(num_experts=8 if moe else None, moe_grouped_gemm=False, normalization="RMSNorm",
                                    qk_layernorm=config.qk_layernorm, multi_latent_attention=mla)
    if mla:
        spec.submodules.self_attention.submodules.core_attention = IdentityOp
    with torch.device("meta"):
        model = GPTModel(config, spec, vocab_size=512, max_sequence_length=64,
                         share_embeddings_and_output_weights=False, position_embedding_type="rope")
    print("count", sum(p.numel() for p in model.parameters()))
"""


def test_parameters_per_rank_are_those_of_megatron_core() -> None:
    # (tp, ep, etp, moe, mla, query groups); MLA at tp 1 only: without Transformer Engine Megatron
    # divides the down projections, with it (what is modelled) it does not
    cases = [
        (1, 1, 1, True, False, 4),
        (2, 4, 1, True, False, 4),
        (2, 2, 2, True, False, 4),
        (4, 2, 1, True, False, 4),
        (4, 1, 1, False, False, 2),
        (1, 4, 1, True, True, 8),
    ]
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(MEGATRON), str([list(case) for case in cases]).lower()],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    counts = [int(line.split()[1]) for line in run.stdout.splitlines() if line.startswith("count")]
    assert len(counts) == len(cases), run.stderr[-2000:]
    for (tp, ep, etp, moe, mla, groups), count in zip(cases, counts, strict=True):
        model = ModelSpec(
            num_layers=1,
            hidden=64,
            num_heads=8,
            num_kv_heads=groups,
            head_dim=16,
            ffn_hidden=96,
            vocab_size=512,
            padded_vocab_size=512,
            qk_layernorm=mla,
            mla=Mla(q_lora=24, kv_lora=16, qk_nope=16, qk_rope=8, v=16) if mla else None,
            moe=Moe(num_experts=8, top_k=2, ffn_hidden=48, shared_ffn_hidden=32, pattern=(True,)) if moe else None,
        )
        job, options = job_of(model), options_of(tp=tp, ep=ep, etp=etp, dp=16 // tp)
        dense_K, expert_K = layer_params(job, options, LayerClass(moe=moe, window=False))
        ours = dense_K + expert_K + embedding_params(job, options) + head_params(job, options)
        assert ours.tolist() == [count], (tp, ep, etp, moe, mla, groups)


def test_attention_without_a_fused_kernel_does_twice_its_products_backward() -> None:
    """Against autograd: four products where forward has two; a fused kernel computes the scores once more."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    q, k, v = (torch.randn(2, 64, 16, requires_grad=True) for _ in range(3))
    with FlopCounterMode(display=False) as forward:
        out = torch.softmax(q @ k.transpose(1, 2), dim=-1) @ v
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    shapes = Shapes.of(job_of(LLAMA2_7B, flash_attention=False), options_of())
    core = next(op for op in layer_ops(shapes, LayerClass(moe=False, window=False)) if op.name == "core_attention")
    assert core.backward == backward.get_total_flops() / forward.get_total_flops()
