"""Small jobs, clusters and plans, made by hand: what a test does not say is legal and dull."""

from __future__ import annotations

from typing import Any

import msgspec

from hapmoe.cluster import Cluster, Device, Link, Network, Pool
from hapmoe.job import Argument, JobSpec, Present, Training
from hapmoe.model import Mla, ModelSpec, Moe
from hapmoe.plan import Plan, Recompute, Stage

__all__ = ["arguments", "cluster", "device", "job", "mla", "plan", "pool", "with_model", "with_training"]

_RATES = {"fp32": 2e13, "fp16": 3e14, "bf16": 3e14}

_KINDS: dict[str, dict[str, Any]] = {
    "a100": {"peak_flop_per_s": _RATES},
    "h800": {"peak_flop_per_s": {**_RATES, "fp8": 2e15}},
    "b200": {"peak_flop_per_s": {**_RATES, "fp8": 4e15, "fp4": 9e15}},
    "v100": {"peak_flop_per_s": {"fp32": 1.5e13, "fp16": 1.25e14}},
    "mi300x": {"vendor": "amd", "ccl": "rccl", "peak_flop_per_s": {**_RATES, "fp8": 2e15}},
    "ascend": {"vendor": "huawei", "ccl": "hccl", "peak_flop_per_s": _RATES},
}


def device(name: str = "a100", **changes: Any) -> Device:
    """A kind by short name; figures are round, they are not from the catalogue."""
    values: dict[str, Any] = {
        "name": name,
        "vendor": "nvidia",
        "ccl": "nccl",
        "memory_bytes": 80 * 2**30,
        "memory_bytes_per_s": 2e12,
        "devices_per_node": 8,
        "scale_up_bytes_per_s": 3e11,
        "scale_up_latency_s": 5e-6,
        "scale_up_domain": 8,
        "nics_per_node": 8,
        "nic_bytes_per_s": 2.5e10,
        "nic_latency_s": 5e-6,
        "runtime_names": (name,),
    }
    return Device(**{**values, **_KINDS.get(name, {"peak_flop_per_s": _RATES}), **changes})


def pool(name: str = "a100", nodes: int = 1, devices_per_node: int = 8, **changes: Any) -> Pool:
    """A pool called like its device."""
    kind = changes.pop("device", None) or device(name)
    network = Network(nics_per_node=8, nic_bytes_per_s=2.5e10, latency_s=5e-6)
    values = {"name": name, "device": kind, "nodes": nodes, "devices_per_node": devices_per_node, "network": network}
    return Pool(**{**values, **changes})


def cluster(*pools: Pool, links: tuple[tuple[str, str], ...] = (), transport: str = "gloo") -> Cluster:
    """The pools given, with a link over ``transport`` between each pair in ``links``."""
    made = tuple(Link(between=pair, bytes_per_s=1e9, latency_s=2e-5, transport=transport) for pair in links)
    return Cluster(pools=pools or (pool(nodes=4),), links=made)


def job(*, moe: int | None = 8, argv: str = "", env: dict[str, Argument] | None = None, **present: Any) -> JobSpec:
    """8 layers; ``moe`` experts on all of them (None: dense). ``present`` are the script's degrees."""
    layers = 8
    experts = None if moe is None else Moe(num_experts=moe, top_k=2, ffn_hidden=512, pattern=(True,) * layers)
    model = ModelSpec(
        num_layers=layers,
        hidden=256,
        num_heads=16,
        num_kv_heads=16,
        head_dim=16,
        ffn_hidden=1024,
        vocab_size=32000,
        moe=experts,
    )
    training = Training(
        seq_len=4096, global_batch_size=64, distributed_optimizer=True, dispatcher="alltoall", grouped_gemm=True
    )
    return JobSpec(
        name="small",
        model=model,
        training=training,
        present=Present(**present),
        entry="pretrain_gpt.py",
        argv=arguments(argv),
        env=env or {},
    )


def arguments(text: str) -> tuple[Argument, ...]:
    """Words separated by blanks, as the user's; ``$NAME`` and ``$(…)`` words are not known yet."""
    return tuple(
        Argument(text=None, source=word, why="not known before the run")
        if word.startswith("$")
        else Argument(text=word)
        for word in text.split()
    )


def mla() -> Mla:
    return Mla(q_lora=64, kv_lora=64, qk_nope=16, qk_rope=16, v=16)


def with_model(given: JobSpec, **changes: Any) -> JobSpec:
    return msgspec.structs.replace(given, model=msgspec.structs.replace(given.model, **changes))


def with_training(given: JobSpec, **changes: Any) -> JobSpec:
    return msgspec.structs.replace(given, training=msgspec.structs.replace(given.training, **changes))


def plan(
    layers: tuple[int, ...] = (8,),
    *,
    pools: tuple[str, ...] = (),
    recompute: tuple[Recompute, ...] = (),
    micro_batch_size: int = 1,
    vpp: int = 1,
    stages: tuple[dict[str, Any], ...] = (),
    **all_stages: Any,
) -> Plan:
    """Stages that are alike except for what is listed per stage; gaps are left for ``resolve``."""
    made = tuple(
        Stage(
            pool=pools[index] if pools else "a100",
            num_layers=count,
            recompute=recompute[index] if recompute else Recompute(),
            **{**all_stages, **(stages[index] if stages else {})},
        )
        for index, count in enumerate(layers)
    )
    return Plan(stages=made, micro_batch_size=micro_batch_size, vpp=vpp)
