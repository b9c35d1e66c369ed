"""Models and options that several tests of the cost model share."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from hapmoe.catalog import find_device
from hapmoe.cluster import Network, Pool
from hapmoe.job import JobSpec, Present, Training
from hapmoe.model import Mla, ModelSpec, Moe
from hapmoe.options import Options

LLAMA2_7B = ModelSpec(
    num_layers=32, hidden=4096, num_heads=32, num_kv_heads=32, head_dim=128, ffn_hidden=11008, vocab_size=32000
)
LLAMA2_13B = ModelSpec(
    num_layers=40, hidden=5120, num_heads=40, num_kv_heads=40, head_dim=128, ffn_hidden=13824, vocab_size=32000
)
MIXTRAL_8X7B = ModelSpec(
    num_layers=32,
    hidden=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    ffn_hidden=14336,
    vocab_size=32000,
    moe=Moe(num_experts=8, top_k=2, ffn_hidden=14336, pattern=(True,) * 32),
)
QWEN3_30B = ModelSpec(
    num_layers=48,
    hidden=2048,
    num_heads=32,
    num_kv_heads=4,
    head_dim=128,
    ffn_hidden=6144,
    vocab_size=151936,
    qk_layernorm=True,
    moe=Moe(num_experts=128, top_k=8, ffn_hidden=768, pattern=(True,) * 48),
)
DEEPSEEK_V3 = ModelSpec(
    num_layers=61,
    hidden=7168,
    num_heads=128,
    num_kv_heads=128,
    head_dim=128,
    ffn_hidden=18432,
    vocab_size=129280,
    qk_layernorm=True,
    mla=Mla(q_lora=1536, kv_lora=512, qk_nope=128, qk_rope=64, v=128),
    moe=Moe(num_experts=256, top_k=8, ffn_hidden=2048, shared_ffn_hidden=2048, pattern=(False,) * 3 + (True,) * 58),
    mtp_layers=1,
)
GPT3_175B = ModelSpec(
    num_layers=96,
    hidden=12288,
    num_heads=96,
    num_kv_heads=96,
    head_dim=128,
    ffn_hidden=49152,
    gated=False,
    vocab_size=51200,
    tied_embeddings=True,
    learned_positions=2048,
    linear_bias=True,
    layernorm_bias=True,
)


def job_of(model: ModelSpec, *, present: Present | None = None, **training: Any) -> JobSpec:
    """A job with the settings of a current MoE recipe, changed by ``training``."""
    settings: dict[str, Any] = {
        "seq_len": 4096,
        "global_batch_size": 256,
        "distributed_optimizer": True,
        "dispatcher": "alltoall",
        "grouped_gemm": True,
    }
    return JobSpec(
        name="test",
        model=model,
        training=Training(**(settings | training)),
        present=present or Present(),
        entry="pretrain_gpt.py",
    )


def options_of(**degrees: int | list[int]) -> Options:
    """Options from scalars and lists of equal length; what is not given is 1."""
    length = max((len(value) for value in degrees.values() if isinstance(value, list)), default=1)
    columns = {}
    for name in ("tp", "cp", "ep", "etp", "dp", "mbs"):
        value = degrees.get(name, 1)
        columns[f"{name}_K"] = np.asarray(value if isinstance(value, list) else [value] * length, dtype=np.int64)
    return Options(**columns)


def pool_of(device: str, nodes: int = 1, **changes: Any) -> Pool:
    """Nodes of a catalogue kind with its usual network."""
    kind, _ = find_device(device)
    network = Network(
        nics_per_node=kind.nics_per_node, nic_bytes_per_s=kind.nic_bytes_per_s, latency_s=kind.nic_latency_s
    )
    pool = Pool(name="pool", device=kind, nodes=nodes, devices_per_node=kind.devices_per_node, network=network)
    return msgspec.structs.replace(pool, **changes)
