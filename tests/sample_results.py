"""Hand-made jobs, clusters, plans and timelines for the tests of what is shown to people."""

from __future__ import annotations

import msgspec

from hapmoe.cluster import Cluster, Device, Network, Pool
from hapmoe.job import Argument, JobSpec, Present, Training
from hapmoe.model import ModelSpec, Moe
from hapmoe.plan import Estimate, MemoryBytes, Plan, Recompute, SearchReport, SearchResult, Stage, StageEstimate
from hapmoe.schedule import Timeline, timeline_of

GIB = 2**30


def make_job(name: str = "mixtral-8x7b", layers: int = 32) -> JobSpec:
    return JobSpec(
        name=name,
        model=ModelSpec(
            num_layers=layers,
            hidden=4096,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            ffn_hidden=14336,
            vocab_size=32000,
            moe=Moe(num_experts=8, top_k=2, ffn_hidden=14336, pattern=(True,) * layers),
        ),
        training=Training(seq_len=4096, global_batch_size=256, distributed_optimizer=True),
        present=Present(tp=2, ep=4, pp=4, micro_batch_size=1, world_size=32),
        entry="pretrain_gpt.py",
        argv=(
            Argument(text="--num-layers", owner="plan"),
            Argument(text="32", owner="plan"),
            Argument(text="--lr"),
            Argument(text="1e-4"),
            Argument(text=None, why="a date", source="$(date)", where="train.sh:40"),
        ),
        script="train.sh",
        origin={"model.num_layers": "train.sh:12", "model.hidden": "train.sh:13", "training.seq_len": "default"},
        notes=("imbalance: balanced routing is assumed; --imbalance or --routing says otherwise",),
        sha256="4f" * 32,
    )


def make_device(name: str, vendor: str, gib: int, bf16: float) -> Device:
    return Device(
        name=name,
        vendor=vendor,
        memory_bytes=gib * GIB,
        memory_bytes_per_s=3.35e12,
        peak_flop_per_s={"bf16": bf16, "fp8": 2 * bf16} if vendor == "nvidia" else {"fp16": bf16},
        devices_per_node=8,
        scale_up_bytes_per_s=200e9,
        scale_up_latency_s=2e-6,
        scale_up_domain=8,
        nics_per_node=8,
        nic_bytes_per_s=50e9,
        nic_latency_s=4e-6,
        ccl="nccl",
        efficiency_note="" if vendor == "nvidia" else "curves of a100-80g-sxm",
        sources={"memory_bytes": "https://example.com/datasheet"},
    )


def make_cluster(nodes: int = 2) -> Cluster:
    network = Network(nics_per_node=8, nic_bytes_per_s=50e9, latency_s=4e-6)
    pools = (
        Pool(
            name="h800",
            device=make_device("h800-80g-sxm", "nvidia", 80, 989e12),
            nodes=nodes,
            devices_per_node=8,
            network=network,
        ),
        Pool(
            name="ascend",
            device=make_device("ascend-910b", "huawei", 64, 320e12),
            nodes=nodes,
            devices_per_node=8,
            network=network,
        ),
    )
    return Cluster(pools=pools, readings=("'h800' read as h800-80g-sxm",), sha256="a7" * 32)


BREAKDOWN = {
    "experts": 0.011,
    "attention": 0.006,
    "dispatch": 0.003,
    "combine": 0.003,
    "qkv": 0.004,
    "projection": 0.002,
    "router": 0.001,
    "norm": 0.001,
    "permute": 0.0015,
    "tp communication": 0.0008,
    "recompute": 0.0007,
}


def make_stage_cost(scale: float, used_gib: float, limit_gib: float) -> StageEstimate:
    weights = GIB * 11.5
    return StageEstimate(
        forward_s=0.011 * scale,
        backward_s=0.023 * scale,
        exposed_comm_s=0.004 * scale,
        memory_bytes=used_gib * GIB,
        memory_limit_bytes=limit_gib * GIB,
        memory=MemoryBytes(
            weights=weights,
            grads=GIB * 14,
            optimizer=GIB * 9,
            activations=used_gib * GIB - weights - GIB * 25,
            workspace=GIB * 2,
        ),
        send_s=0.0006,
        grad_sync_s=0.05,
        optimizer_s=0.02,
        busy_s=0.034 * scale * 64,
        breakdown={name: value * scale for name, value in BREAKDOWN.items()},
        bound_by="compute",
    )


def make_stages(pp: int = 4, layers: int = 32) -> tuple[Stage, ...]:
    """Half of the stages on each pool, eight ranks each; the faster pool takes more layers."""
    more = layers // pp + 1
    counts = [more] * (pp // 2) + [layers // pp - 1] * (pp - pp // 2)
    stages, first = [], 0
    for index, count in enumerate(counts):
        fast = index < pp // 2
        stages.append(
            Stage(
                pool="h800" if fast else "ascend",
                device="h800-80g-sxm" if fast else "ascend-910b",
                nodes=(index % (pp // 2),),
                num_layers=count,
                first_layer=first,
                first_rank=8 * index,
                num_devices=8,
                tp=2,
                ep=4,
                dp=4,
                recompute=Recompute() if fast else Recompute(granularity="selective", modules=("core_attn", "moe_act")),
            )
        )
        first += count
    return tuple(stages)


def make_estimate(pp: int = 4, *, used_gib: float = 61.0, step_s: float = 3.21) -> Estimate:
    costs = tuple(
        make_stage_cost(1 + 0.03 * (i % 3), used_gib - 7 * i / pp, 75.0 if i < pp // 2 else 60.0) for i in range(pp)
    )
    return Estimate(
        step_s=step_s,
        tokens_per_s=256 * 4096 / step_s,
        tflop_per_s_per_device=213.4,
        mfu=0.3141,
        bubble_fraction=0.0812,
        lower_bound_s=3.07,
        ideal_s=2.6,
        hardware_tflop_per_s_per_device=231.0,
        exposed_comm_fraction=0.112,
        optimizer_s=0.02,
        source_share={"measured": 0.0, "roofline": 0.97, "assumed": 0.03},
        stages=costs,
        fits=all(cost.memory_bytes <= cost.memory_limit_bytes for cost in costs),
        assumptions=("link h800-ascend: gloo through host memory at 100 Gb/s",),
    )


def make_result(pp: int = 4, microbatches: int = 64, layers: int = 32) -> SearchResult:
    search = SearchReport(
        status="optimal",
        wall_s=0.412,
        considered=120_000,
        pruned={"memory": 5_012, "bound": 114_000, "expert mesh": 12},
    )
    estimate = make_estimate(pp)
    stages = make_stages(pp, layers)
    plan = Plan(
        stages=stages,
        micro_batch_size=1,
        planner="exact",
        num_microbatches=microbatches,
        global_batch_size=256,
        launchable=False,
        launch_reason="megatron cannot join nvidia and huawei devices in one job",
        estimate=estimate,
        search=search,
        inputs={"tables_sha256": "c3" * 32},
    )
    replace = msgspec.structs.replace
    folded = replace(plan, stages=tuple(replace(stage, ep=8) for stage in stages), estimate=None)
    recomputed = replace(
        plan,
        micro_batch_size=2,
        stages=tuple(
            replace(stage, recompute=Recompute(granularity="full", method="block", num_layers=3)) for stage in stages
        ),
    )
    ranked = (
        (plan, estimate),
        (folded, replace(estimate, step_s=3.29)),
        (recomputed, replace(estimate, step_s=3.518)),
    )
    return SearchResult(status="optimal", plan=plan, estimate=estimate, ranked=ranked, report=search)


def make_timeline(pp: int = 4, vpp: int = 1, microbatches: int = 64) -> Timeline:
    scale = [1 + 0.03 * (stage % 3) for stage in range(pp)]
    return timeline_of(
        [[0.011 * s / vpp] * vpp for s in scale],
        [[0.023 * s / vpp] * vpp for s in scale],
        [0.0006] * (pp if vpp > 1 else pp - 1),
        microbatches,
        pp,
        grad_sync=[0.05] * pp,
        optimizer_s=0.02,
    )
