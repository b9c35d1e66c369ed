"""Activation bytes against the published formula, and what recomputation frees."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from shapes_of import DEEPSEEK_V3, GPT3_175B, MIXTRAL_8X7B, job_of, options_of, pool_of

from hapmoe import memory
from hapmoe.job import Present
from hapmoe.options import LayerClass
from hapmoe.plan import Recompute
from hapmoe.pricing import price, recompute_menu
from hapmoe.workload import Shapes

DENSE, MOE = LayerClass(moe=False, window=False), LayerClass(moe=True, window=False)


@pytest.mark.parametrize(("tp", "mbs"), [(1, 1), (8, 1), (8, 4)])
def test_korthikanti_with_sequence_parallelism(tp: int, mbs: int) -> None:
    # arXiv 2205.05198, eq. (4): sbh/t (34 + 5as/h); ours has no hidden dropout: two masks less
    job = job_of(GPT3_175B, seq_len=2048, flash_attention=False, transformer_engine=False)
    tensors = memory.layer_tensors(Shapes.of(job, options_of(tp=tp, mbs=mbs)), DENSE)
    seq, hidden, heads = 2048, 12288, 96
    expected = seq * mbs * hidden / tp * (34 - 2 + 5 * heads * seq / hidden)
    # eq. (6): selective recomputation of attention leaves 34 sbh/t; full keeps the layer's input, sharded
    attention = Recompute(granularity="selective", modules=("core_attn",))
    kept_RK = memory.activation_bytes(tensors, (Recompute(), attention, Recompute(granularity="full")))
    unit = seq * mbs * hidden / tp
    assert kept_RK[:, 0].tolist() == pytest.approx([expected, 32 * unit, 2 * unit])


def test_korthikanti_without_sequence_parallelism() -> None:
    # eq. (2): sbh (10 + 24/t + 5as/(ht)), two masks less
    job = job_of(GPT3_175B, present=Present(tp=8), seq_len=2048, flash_attention=False, transformer_engine=False)
    tensors = memory.layer_tensors(Shapes.of(job, options_of(tp=8)), DENSE)
    expected = 2048 * 12288 * (10 - 2 + 24 / 8 + 5 * 96 * 2048 / (12288 * 8))
    assert float(memory.activation_bytes(tensors, (Recompute(),))[0, 0]) == pytest.approx(expected)


def test_experts_keep_the_routed_copies() -> None:
    job = job_of(MIXTRAL_8X7B, imbalance=1.25)
    tensors = {t.name: float(t.bytes_K[0]) for t in memory.layer_tensors(Shapes.of(job, options_of(ep=8, dp=8)), MOE)}
    rows = 1.25 * 4096 * 2
    assert tensors["expert_in"] == rows * 4096 * 2
    assert tensors["expert_fc1_out"] == rows * 2 * 14336 * 2
    assert tensors["expert_fc_act_out"] == rows * 14336 * 2


def test_every_recomputation_frees_something_and_full_frees_most() -> None:
    job = job_of(DEEPSEEK_V3)
    table = price(job, pool_of("h100-80g-sxm", 8), options_of(tp=2, ep=8, dp=4))
    assert table.menu[0] == Recompute() and table.menu[-1].granularity == "full"
    kept_RC = table.activation_RCK[:, :, 0]
    assert (kept_RC[1:] <= kept_RC[0]).all() and (kept_RC[1:] < kept_RC[0]).any(axis=1).all()
    assert kept_RC[-1].tolist() == kept_RC.min(axis=0).tolist()
    # keeping less costs time, except nothing
    assert (table.recompute_RCK[1:, :, 0].max(axis=1) > 0).all()
    assert (table.recompute_RCK[-1, :, 0] <= table.forward_CK[:, 0] + 1e-12).all()


def test_menu_is_what_megatron_allows() -> None:
    def modules(**changes: object) -> set[str]:
        return {name for entry in recompute_menu(job_of(DEEPSEEK_V3, **changes)) for name in entry.modules}

    assert {"moe_act", "mla_up_proj", "shared_experts", "mlp", "moe"} <= modules()
    assert "moe_act" not in modules(grouped_gemm=False)
    assert "shared_experts" not in modules(shared_expert_overlap=True)
    assert "moe" not in modules(overlap_moe_comm=True)
    assert not {"moe_act", "layernorm"} & modules(fp8_recipe="delayed")


def test_bytes_per_parameter() -> None:
    # ZeRO (arXiv 1910.02054): 2 + 4 (fp32 gradients here) + 12 bytes; the 12 over the shards
    job = job_of(MIXTRAL_8X7B)
    assert memory.weight_bytes(job) == 2
    assert memory.optimizer_bytes(job, np.array([1.0, 8.0])).tolist() == [12.0, 1.5]
    replicated = job_of(MIXTRAL_8X7B, distributed_optimizer=False)
    assert memory.optimizer_bytes(replicated, np.array([8.0])).tolist() == [12.0]
    aware = job_of(MIXTRAL_8X7B, precision_aware_optimizer=True, exp_avg_bytes=2, exp_avg_sq_bytes=2)
    assert memory.optimizer_bytes(aware, np.array([1.0])).tolist() == [8.0]
    assert memory.optimizer_bytes(job_of(MIXTRAL_8X7B, grad_bytes=2), np.array([1.0])).tolist() == [16.0]


def test_mla_keeps_full_width_down_projections() -> None:
    shapes = Shapes.of(job_of(DEEPSEEK_V3), options_of(tp=[1, 4]))
    tensors = {t.name: t.bytes_K.tolist() for t in memory.layer_tensors(shapes, DENSE)}
    assert tensors["kv_latent"] == [4096 * 576 * 2, 1024 * 576 * 2]
    assert tensors["query"] == [4096 * 128 * 192 * 2, 4096 * 32 * 192 * 2]


def test_logits_dominate_the_last_stage() -> None:
    model = msgspec.structs.replace(MIXTRAL_8X7B, padded_vocab_size=32000)
    head = float(memory.head_bytes(Shapes.of(job_of(model), options_of(tp=2)))[0])
    assert head == pytest.approx(4096 * 16000 * 6, rel=0.15)
