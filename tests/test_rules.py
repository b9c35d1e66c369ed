"""Each rule: a plan that breaks it, and one like it that keeps all; then Megatron's own verdict."""

from __future__ import annotations

import builders as b
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_oracle import config_refuses, groups, groups_refuse, parallel_state

from hapmoe.backends import capabilities
from hapmoe.cluster import Cluster
from hapmoe.job import Argument, JobSpec
from hapmoe.plan import Plan, Recompute
from hapmoe.present import present_plan
from hapmoe.resolve import resolve
from hapmoe.rules import FORM, RULES, check
from hapmoe.rules.hetero import remarks

JOB = b.job()
DENSE = b.job(moe=None)
NODES = b.cluster()
FULL = Recompute(granularity="full", method="uniform", num_layers=1)
LEGAL = b.plan(dp=8, ep=4)


def modules(*names: str) -> tuple[Recompute, ...]:
    return (Recompute(granularity="selective", modules=names),)


def overlapped() -> JobSpec:
    return b.with_training(b.job(), overlap_moe_comm=True)


def edited(plan: Plan, **changes: object) -> Plan:
    """A resolved plan with fields of its first stage replaced."""
    plan = resolve(JOB, NODES, plan)
    first = msgspec.structs.replace(plan.stages[0], **changes)
    return msgspec.structs.replace(plan, stages=(first, *plan.stages[1:]))


def replaced(plan: Plan, **changes: object) -> Plan:
    return msgspec.structs.replace(plan, **changes)


VPP = b.plan((4, 4), dp=8, ep=4, vpp=2)
MIXED = b.cluster(b.pool("h800"), b.pool("mi300x"))
MIXED_LINKED = b.cluster(b.pool("h800"), b.pool("mi300x"), links=(("h800", "mi300x"),))
MIXED_PLAN = b.plan((4, 4), pools=("h800", "mi300x"), dp=8, ep=4)
OLD = b.cluster(b.pool("v100"))
ONE_CONNECTION = {"CUDA_DEVICE_MAX_CONNECTIONS": Argument(text="1")}
MANY_CONNECTIONS = {"CUDA_DEVICE_MAX_CONNECTIONS": Argument(text="32")}

TWO = b.cluster(b.pool("a100"), b.pool("h800"))
H800 = b.cluster(b.pool("h800", nodes=4))
MLA_68 = b.msgspec.structs.replace(b.mla(), kv_lora=52)  # 52 + 16 rotary = 68
FP8_ENDS = b.with_training(
    b.job(argv="--first-last-layers-bf16 --num-layers-at-start-in-bf16 3 --num-layers-at-end-in-bf16 1"),
    fp8_recipe="tensorwise",
)
SOME_DENSE = b.with_model(
    JOB,
    moe=msgspec.structs.replace(JOB.model.moe, pattern=(False,) * 2 + (True,) * 6),  # type: ignore[type-var]
)
SEQUENCE_LOSS = b.with_training(b.job(argv="--moe-router-load-balancing-type seq_aux_loss"), per_token_loss=True)
FLAGCX_ASCEND = b.cluster(b.pool("h800"), b.pool("ascend"), links=(("h800", "ascend"),), transport="flagcx")


def hetero(*stages: dict[str, int], mixed: int = 1, micro_batch_size: int = 1) -> Plan:
    """FlagScale's: ``mixed`` stages on the A100 nodes, the others on H800; 8 layers."""
    pools = ("a100",) * mixed + ("h800",) * (len(stages) - mixed)
    first = stages[0]["dp"] * stages[0].get("micro_batch_size", micro_batch_size)
    filled = tuple({"micro_batch_size": max(first // stage["dp"], 1), **stage} for stage in stages)
    layers = (8 - 2 * (len(stages) - 1),) + (2,) * (len(stages) - 1)
    made = b.plan(layers, pools=pools, stages=filled, micro_batch_size=micro_batch_size)
    return msgspec.structs.replace(made, backend="flagscale")


def galvatron(plan: Plan) -> Plan:
    return msgspec.structs.replace(plan, backend="galvatron")


GALVATRON = galvatron(b.plan((4, 4), pools=("a100", "h800"), stages=({"dp": 8, "ep": 2}, {"dp": 8, "ep": 8})))
HETERO = hetero({"dp": 8, "ep": 8}, {"dp": 8, "ep": 8})


def with_runtime(*stages: dict[str, int]) -> Plan:
    """The same for upstream with this package's runtime."""
    first = stages[0].get("micro_batch_size", 1)
    return replaced(hetero(*stages, micro_batch_size=first), backend="megatron-hetero")


UNEQUAL = with_runtime({"tp": 2, "dp": 4, "ep": 8, "micro_batch_size": 2}, {"dp": 8, "ep": 8})
ALIKE = with_runtime({"dp": 8, "ep": 8}, {"dp": 8, "ep": 8})

# rule: (job, cluster, plan) that breaks it, (job, cluster, plan) that keeps every rule
CASES: dict[str, tuple[tuple[JobSpec, Cluster, Plan], tuple[JobSpec, Cluster, Plan]]] = {
    "degrees": ((JOB, NODES, b.plan(tp=0)), (JOB, NODES, LEGAL)),
    "pool": ((JOB, NODES, b.plan(pools=("b200",))), (JOB, NODES, LEGAL)),
    "devices": ((JOB, NODES, edited(LEGAL, num_devices=4)), (JOB, NODES, edited(LEGAL))),
    "uniform": (
        (JOB, NODES, b.plan((4, 4), stages=({"dp": 8}, {"dp": 4, "tp": 2, "etp": 2}))),
        (JOB, NODES, replaced(b.plan((4, 4), stages=({"dp": 8}, {"dp": 8, "ep": 8})), backend="any")),
    ),
    "expert-mesh": ((JOB, NODES, b.plan(dp=8, ep=8, etp=2)), (JOB, NODES, b.plan(dp=8, ep=4, etp=2))),
    "experts": ((b.job(moe=12), NODES, b.plan(dp=8, ep=8)), (b.job(moe=16), NODES, b.plan(dp=8, ep=8))),
    "expert-tensor": ((JOB, NODES, b.plan(tp=2, dp=4)), (JOB, NODES, b.plan(tp=2, dp=4, etp=2))),
    "heads": (
        (b.with_model(JOB, num_heads=12, num_kv_heads=12), NODES, b.plan(tp=8, ep=8)),
        (b.with_model(JOB, num_heads=16), NODES, b.plan(tp=8, ep=8)),
    ),
    "query-groups": (
        (b.with_model(JOB, num_heads=24, num_kv_heads=3), NODES, b.plan(tp=8, ep=8)),
        (b.with_model(JOB, num_kv_heads=4), NODES, b.plan(tp=8, ep=8)),
    ),
    "widths": (
        (b.with_model(DENSE, ffn_hidden=1026), NODES, b.plan(tp=4, dp=2)),
        (b.with_model(DENSE, ffn_hidden=1028), NODES, b.plan(tp=4, dp=2)),
    ),
    "expert-bias": (
        (b.with_model(JOB, linear_bias=True), NODES, b.plan(tp=2, dp=4, ep=2, etp=2)),
        (b.with_model(JOB, linear_bias=True), NODES, b.plan(tp=2, dp=4, ep=2)),
    ),
    "context": (
        (b.with_training(JOB, seq_len=4098), NODES, b.plan(cp=2, dp=4)),
        (b.with_training(JOB, seq_len=4100), NODES, b.plan(cp=2, dp=4)),
    ),
    "context-attention": (
        (b.with_training(JOB, transformer_engine=False), NODES, b.plan(cp=2, dp=4)),
        (b.with_training(JOB, transformer_engine=False), NODES, b.plan(dp=8)),
    ),
    "context-heads": (
        (
            b.with_training(b.with_model(JOB, num_heads=6, num_kv_heads=6), cp_comm_type="a2a"),
            NODES,
            b.plan(cp=4, dp=2),
        ),
        (b.with_training(JOB, cp_comm_type="a2a"), NODES, b.plan(cp=4, dp=2)),
    ),
    "sequence": (
        (b.with_training(JOB, seq_len=4098), NODES, b.plan(tp=4, dp=2, ep=4)),
        (b.with_training(b.job(moe=None, tp=2), seq_len=4098), NODES, b.plan(tp=4, dp=2)),
    ),
    "tp-overlap": (
        (b.with_training(JOB, tp_comm_overlap=True), NODES, LEGAL),
        (b.with_training(JOB, tp_comm_overlap=True), NODES, b.plan(tp=2, dp=4, ep=4)),
    ),
    "dispatcher": (
        (b.with_training(JOB, dispatcher="flex"), NODES, b.plan(dp=8)),
        (b.with_training(JOB, dispatcher="flex"), NODES, LEGAL),
    ),
    "expert-overlap": ((overlapped(), NODES, b.plan((4, 4), dp=8, ep=4)), (overlapped(), NODES, VPP)),
    "layers": ((JOB, NODES, b.plan((4, 3), dp=8)), (JOB, NODES, b.plan((5, 3), dp=8))),
    "uneven-layers": (
        (b.with_training(JOB, megatron_version="0.12.1"), NODES, b.plan((5, 3), dp=8)),
        (b.with_training(JOB, megatron_version="core_r0.13.0"), NODES, b.plan((5, 3), dp=8)),
    ),
    "virtual-layers": (
        (JOB, NODES, edited(VPP, virtual_layers=((0, 2), (2, 2)))),
        (JOB, NODES, edited(VPP, virtual_layers=((0, 2), (4, 2)))),
    ),
    "interleaved": (
        (b.with_training(JOB, overlap_p2p=False), NODES, VPP),
        (b.with_training(JOB, overlap_p2p=False), NODES, b.plan((2, 2, 2, 2), dp=8, vpp=2)),
    ),
    "mtp": (
        (b.with_model(JOB, mtp_layers=1), NODES, edited(b.plan((4, 4), dp=8), mtp_layers=1)),
        (b.with_model(JOB, mtp_layers=1), NODES, b.plan((4, 4), dp=8)),
    ),
    "micro-batch": ((JOB, NODES, edited(LEGAL, micro_batch_size=2)), (JOB, NODES, b.plan(dp=8, micro_batch_size=2))),
    "global-batch": (
        (b.with_training(JOB, global_batch_size=60), NODES, b.plan(dp=8)),
        (b.with_training(JOB, global_batch_size=64), NODES, b.plan(dp=8)),
    ),
    "microbatches": (
        (JOB, NODES, replaced(LEGAL, num_microbatches=4)),
        (JOB, NODES, replaced(LEGAL, num_microbatches=8)),
    ),
    "global-batch-kept": (
        (JOB, NODES, replaced(LEGAL, global_batch_size=128)),
        (b.with_training(JOB, global_batch_size=0), NODES, replaced(LEGAL, global_batch_size=128)),
    ),
    "interleaved-batch": ((b.with_training(JOB, global_batch_size=24), NODES, VPP), (JOB, NODES, VPP)),
    "recompute": (
        (JOB, NODES, b.plan(dp=8, recompute=(Recompute(granularity="full"),))),
        (JOB, NODES, b.plan(dp=8, recompute=(FULL,))),
    ),
    "recompute-modules": (
        (b.with_training(JOB, megatron_version="0.13.0"), NODES, b.plan(dp=8, recompute=modules("shared_experts"))),
        (b.with_training(JOB, megatron_version="0.14.0"), NODES, b.plan(dp=8, recompute=modules("shared_experts"))),
    ),
    "recompute-needs": (
        (b.with_training(JOB, grouped_gemm=False), NODES, b.plan(dp=8, recompute=modules("moe_act"))),
        (JOB, NODES, b.plan(dp=8, recompute=modules("moe_act", "mlp"))),
    ),
    "recompute-overlap": (
        (overlapped(), NODES, b.plan((4, 4), dp=8, ep=4, vpp=2, recompute=modules("moe") * 2)),
        (overlapped(), NODES, b.plan((4, 4), dp=8, ep=4, vpp=2, recompute=modules("layernorm") * 2)),
    ),
    "recompute-arguments": (
        (b.job(argv="--cpu-offloading-num-layers 2"), NODES, b.plan(dp=8, recompute=modules("layernorm"))),
        (b.job(argv="--cpu-offloading-num-layers 2"), NODES, b.plan(dp=8)),
    ),
    "recompute-mtp": (
        (b.with_model(JOB, mtp_layers=1), NODES, b.plan(dp=8, recompute=(replaced(FULL, num_layers=2),))),
        (b.with_model(JOB, mtp_layers=1), NODES, b.plan(dp=8, recompute=(FULL,))),
    ),
    "recompute-units": (
        (
            b.with_training(JOB, megatron_version="0.16.1"),
            NODES,
            b.plan(dp=8, recompute=(replaced(FULL, num_layers=3),)),
        ),
        (
            b.with_training(JOB, megatron_version="0.17.0"),
            NODES,
            b.plan(dp=8, recompute=(replaced(FULL, num_layers=3),)),
        ),
    ),
    "device": ((JOB, NODES, edited(LEGAL, device="h800")), (JOB, NODES, edited(LEGAL, device="a100"))),
    "nodes": ((JOB, NODES, edited(b.plan(dp=4), nodes=(0, 1))), (JOB, NODES, edited(b.plan(dp=4), nodes=(3,)))),
    "shared-nodes": (
        (JOB, NODES, b.plan((3, 3, 2), dp=4, stages=({"nodes": (0,)}, {"nodes": (1,)}, {"nodes": (0,)}))),
        (JOB, NODES, b.plan((3, 3, 2), dp=4, stages=({"nodes": (0,)}, {"nodes": (0,)}, {"nodes": (1,)}))),
    ),
    "ranks": (
        (JOB, NODES, b.plan((4, 4), dp=8, stages=({"first_rank": 8}, {"first_rank": 0}))),
        (JOB, NODES, b.plan((4, 4), dp=8, stages=({"first_rank": 0}, {"first_rank": 8}))),
    ),
    "neighbours": ((JOB, MIXED, MIXED_PLAN), (JOB, MIXED_LINKED, MIXED_PLAN)),
    "precision": (
        (b.with_training(JOB, grouped_gemm=False), OLD, b.plan(pools=("v100",), dp=8)),
        (b.with_training(JOB, grouped_gemm=False, precision="fp16"), OLD, b.plan(pools=("v100",), dp=8)),
    ),
    "grouped-gemm": (
        (b.with_training(JOB, precision="fp16"), OLD, b.plan(pools=("v100",), dp=8)),
        (b.with_training(JOB, precision="fp16"), NODES, LEGAL),
    ),
    "use-tp-pp-dp-mapping": (
        (b.job(argv="--use-tp-pp-dp-mapping"), NODES, b.plan((4, 4), dp=8)),
        (b.job(argv="--use-tp-pp-dp-mapping"), NODES, LEGAL),
    ),
    "use-torch-fsdp2": (
        (b.job(argv="--use-torch-fsdp2"), NODES, LEGAL),
        (b.job(argv="--use-torch-fsdp2"), NODES, b.plan(dp=8)),
    ),
    "cpu-offloading-num-layers": (
        (b.job(argv="--cpu-offloading-num-layers 2"), NODES, b.plan((4, 4), dp=8)),
        (b.job(argv="--cpu-offloading-num-layers 2"), NODES, LEGAL),
    ),
    "hybrid": (
        (b.job(argv="--hybrid-layer-pattern M*ME"), NODES, b.plan((4, 4), dp=8)),
        (b.job(argv="--hybrid-layer-pattern *E*E*E*E*E*E*E*E"), NODES, b.plan((5, 3), dp=8)),
    ),
    "hybrid-context-parallel": (
        (b.job(argv="--hybrid-context-parallel"), NODES, b.plan(dp=1, tp=8, etp=8)),
        (b.job(argv="--hybrid-context-parallel"), NODES, LEGAL),
    ),
    "batch-invariant-mode": (
        (b.job(argv="--batch-invariant-mode"), NODES, b.plan(cp=2, dp=4)),
        (b.job(argv="--batch-invariant-mode"), NODES, LEGAL),
    ),
    "enable-mhc-connections": (
        (b.job(argv="--enable-mhc-connections"), NODES, b.plan((4, 4), dp=8)),
        (b.job(argv="--enable-mhc-connections"), NODES, LEGAL),
    ),
    "mla-down-proj-fusion": (
        (b.with_model(b.job(argv="--mla-down-proj-fusion"), mla=MLA_68), NODES, b.plan(tp=8, ep=8)),
        (b.with_model(b.job(argv="--mla-down-proj-fusion"), mla=MLA_68), NODES, b.plan(tp=4, dp=2, ep=8)),
    ),
    "bf16-ends": (
        (FP8_ENDS, H800, b.plan((2, 2, 2, 2), pools=("h800",) * 4, dp=8)),
        (FP8_ENDS, H800, b.plan((4, 4), pools=("h800",) * 2, dp=8)),
    ),
    "torch-dcp": (
        (b.job(argv="--ckpt-format torch_dcp"), NODES, b.plan((4, 4), dp=8)),
        (b.job(argv="--ckpt-format torch_dcp"), NODES, LEGAL),
    ),
    "batch-ramp": (
        (b.job(argv="--rampup-batch-size 12 8 1000"), NODES, LEGAL),
        (b.job(argv="--rampup-batch-size 16 8 1000"), NODES, LEGAL),
    ),
    "evaluation-batch": (
        (b.job(argv="--eval-global-batch-size 20"), NODES, LEGAL),
        (b.job(argv="--eval-global-batch-size 24"), NODES, LEGAL),
    ),
    "overlap-param-gather-with-optimizer-step": (
        (b.job(argv="--overlap-param-gather-with-optimizer-step"), NODES, LEGAL),
        (b.job(argv="--overlap-param-gather-with-optimizer-step"), NODES, VPP),
    ),
    "defer-embedding-wgrad-compute": (
        (b.job(argv="--defer-embedding-wgrad-compute"), NODES, LEGAL),
        (b.job(argv="--defer-embedding-wgrad-compute"), NODES, b.plan((4, 4), dp=8)),
    ),
    "overlap-p2p-communication-warmup-flush": (
        (b.job(argv="--overlap-p2p-communication-warmup-flush"), NODES, LEGAL),
        (b.job(argv="--overlap-p2p-communication-warmup-flush"), NODES, VPP),
    ),
    "tensor-parallel-num-weight-shards": (
        (b.job(argv="--tensor-parallel-num-weight-shards 4"), NODES, b.plan(tp=2, dp=4, ep=4)),
        (b.job(argv="--tensor-parallel-num-weight-shards 2"), NODES, b.plan(tp=2, dp=4, ep=4)),
    ),
    "optimizer-instances": (
        (b.job(argv="--num-distributed-optimizer-instances 4"), NODES, LEGAL),
        (b.job(argv="--num-distributed-optimizer-instances 2"), NODES, LEGAL),
    ),
    "hierarchical-context": (
        (b.job(argv="--hierarchical-context-parallel-sizes 2 4"), NODES, b.plan(cp=4, dp=2)),
        (b.job(argv="--hierarchical-context-parallel-sizes 2 2"), NODES, b.plan(cp=4, dp=2)),
    ),
    "connections": (
        (b.job(env=MANY_CONNECTIONS), NODES, b.plan(tp=2, dp=4, ep=4)),
        (b.job(env=ONE_CONNECTION), NODES, b.plan(tp=2, dp=4, ep=4)),
    ),
    "version": (
        (b.with_training(JOB, megatron_version="core_r0.11.0"), NODES, LEGAL),
        (b.with_training(JOB, megatron_version="0.20.0.dev1"), NODES, LEGAL),
    ),
    "hetero-version": (
        (b.with_training(JOB, megatron_version="0.17.1"), TWO, HETERO),
        (b.with_training(JOB, megatron_version="0.15.0"), TWO, HETERO),
    ),
    "hetero-batch": (
        (b.with_training(JOB, global_batch_size=48), TWO, hetero({"dp": 4, "ep": 2}, {"dp": 8, "ep": 8})),
        (JOB, TWO, hetero({"dp": 4, "ep": 2, "micro_batch_size": 2}, {"dp": 8, "ep": 8}, micro_batch_size=2)),
    ),
    "hetero-sequence": (
        (b.job(moe=None, tp=2), TWO, hetero({"tp": 2, "dp": 4}, {"tp": 1, "dp": 4})),
        (b.job(moe=None, tp=2, sequence_parallel=True), TWO, hetero({"tp": 2, "dp": 4}, {"tp": 1, "dp": 4})),
    ),
    # Two stages before the last mesh: one by one they are wired right, if layers need no number.
    "hetero-pairing": (
        (SOME_DENSE, TWO, hetero(*[{"dp": 4, "ep": 4}] * 3, mixed=2)),
        (JOB, TWO, hetero(*[{"dp": 4, "ep": 4}] * 3, mixed=2)),
    ),
    "hetero-experts": (
        (JOB, TWO, hetero({"dp": 8, "ep": 2}, {"dp": 8, "ep": 8})),
        (JOB, TWO, hetero({"dp": 8, "ep": 4}, {"dp": 8, "ep": 8})),
    ),
    "hetero-offset": ((SOME_DENSE, TWO, HETERO), (JOB, TWO, HETERO)),
    "hetero-ends": (
        (b.with_model(JOB, tied_embeddings=True), TWO, hetero({"dp": 8, "ep": 8}, {"tp": 2, "dp": 4, "ep": 8})),
        (b.with_model(JOB, tied_embeddings=True), TWO, HETERO),
    ),
    "hetero-instances": (
        (b.job(argv="--num-distributed-optimizer-instances 1 --num-distributed-optimizer-instances 2"), TWO, HETERO),
        (b.job(argv="--num-distributed-optimizer-instances 1"), TWO, HETERO),
    ),
    "hetero-checkpoint": (
        (b.job(argv="--ckpt-format torch_dist"), TWO, HETERO),
        (b.job(argv="--ckpt-format torch"), TWO, HETERO),
    ),
    "stages-batch": (
        (JOB, TWO, with_runtime({"dp": 4, "ep": 4, "micro_batch_size": 1}, {"dp": 8, "ep": 8})),
        (JOB, TWO, UNEQUAL),
    ),
    "stages-tied": (
        (b.with_model(JOB, tied_embeddings=True), TWO, UNEQUAL),
        (b.with_model(JOB, tied_embeddings=True), TWO, ALIKE),
    ),
    "stages-mtp": ((b.with_model(JOB, mtp_layers=1), TWO, UNEQUAL), (b.with_model(JOB, mtp_layers=1), TWO, ALIKE)),
    "stages-auxiliary": (
        (SEQUENCE_LOSS, TWO, UNEQUAL),
        (b.with_training(SEQUENCE_LOSS, per_token_loss=False), TWO, UNEQUAL),
    ),
    "stages-instances": (
        (b.job(argv="--num-distributed-optimizer-instances 2"), TWO, UNEQUAL),
        (b.job(argv="--num-distributed-optimizer-instances 1"), TWO, UNEQUAL),
    ),
    "stages-checkpoint": (
        (b.job(argv="--ckpt-format torch"), TWO, UNEQUAL),
        (b.job(argv="--ckpt-format torch_dist"), TWO, UNEQUAL),
    ),
    "stages-flags": (
        (b.job(argv="--variable-seq-lengths"), TWO, UNEQUAL),
        (b.job(argv="--variable-seq-lengths"), TWO, ALIKE),
    ),
    "galvatron-devices": (
        (
            JOB,
            TWO,
            galvatron(b.plan((4, 4), stages=({"dp": 8}, {"dp": 4}), pools=("a100", "h800"), micro_batch_size=2)),
        ),
        (JOB, TWO, GALVATRON),
    ),
    "galvatron-batch": (
        (JOB, TWO, galvatron(b.plan((4, 4), stages=({"dp": 8}, {"tp": 2, "dp": 4, "etp": 2}), pools=("a100", "h800")))),
        (JOB, TWO, GALVATRON),
    ),
    "galvatron-recompute": (
        (JOB, TWO, galvatron(b.plan(dp=8, ep=8, recompute=modules("layernorm")))),
        (JOB, TWO, galvatron(b.plan(dp=8, ep=8, recompute=(FULL,)))),
    ),
    "galvatron-vocabulary": (
        (
            JOB,
            TWO,
            galvatron(
                b.plan(
                    (4, 4),
                    stages=({"dp": 8, "ep": 8}, {"tp": 2, "dp": 4, "ep": 8}),
                    pools=("a100", "h800"),
                    micro_batch_size=1,
                )
            ),
        ),
        (JOB, TWO, GALVATRON),
    ),
    "galvatron-model": ((SOME_DENSE, TWO, GALVATRON), (JOB, TWO, GALVATRON)),
    "transport": (
        (JOB, FLAGCX_ASCEND, replaced(b.plan((4, 4), pools=("h800", "ascend"), dp=8, ep=4), backend="any")),
        (JOB, MIXED_LINKED, MIXED_PLAN),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_rule_is_broken_and_kept(name: str) -> None:
    broken, kept = CASES[name]
    found = check(*broken)
    assert name in {violation.rule for violation in found}
    assert all(violation.source and violation.message for violation in found)
    assert check(*kept) == ()


def test_every_rule_has_a_case() -> None:
    names = [rule.name for rule in (*FORM, *RULES)]
    # No back end of this version takes one recomputation for all.
    assert set(names) - set(CASES) == {"recompute-stages"}
    assert all(rule.why and rule.source for rule in (*FORM, *RULES))


def test_samplers_that_depend_on_dp() -> None:
    """Shuffled buckets per data-parallel rank (data_samplers.py, MegatronPretrainingRandomSampler): tokens of the
    first stage and labels of the last one would be those of different samples."""
    found = check(b.job(argv="--dataloader-type cyclic"), TWO, UNEQUAL)
    assert [one.rule for one in found] == ["stages-flags"] and "dp 4" in found[0].message
    assert not check(b.job(argv="--dataloader-type single"), TWO, UNEQUAL)
    same = with_runtime({"tp": 2, "dp": 4, "ep": 8}, {"dp": 4, "ep": 4})
    assert not [one for one in check(b.job(argv="--dataloader-type cyclic"), TWO, same) if one.rule == "stages-flags"]


def test_auxiliary_loss_of_unequal_replicas_is_remarked() -> None:
    """Megatron averages aux_loss over the tokens of one data-parallel rank (measured: dp 2 differs from dp 1)."""
    weighted = "--moe-router-load-balancing-type {} --moe-aux-loss-coeff 1e-2"
    backend = capabilities("megatron-hetero")
    for kind, plan, many in (("aux_loss", UNEQUAL, 2), ("seq_aux_loss", UNEQUAL, 1), ("aux_loss", ALIKE, 0)):
        job = b.job(argv=weighted.format(kind))
        assert len(remarks(job, TWO, resolve(job, TWO, plan), backend)) == many


def test_resolving_twice_is_resolving_once() -> None:
    for _, (job, cluster, plan) in CASES.values():
        once = resolve(job, cluster, plan)
        assert resolve(job, cluster, once) == once


# What users met in public: the message has both sides with numbers, the hint what to set.


def present(world: int, *, moe: int = 16, **degrees: int) -> tuple[str, str]:
    found = present_plan(b.job(moe=moe, micro_batch_size=1, **degrees), b.cluster(b.pool(nodes=world // 8 or 1)))
    assert found.plan is not None
    return (found.violations[0].message, found.violations[0].hint) if found.violations else ("", "")


def test_expert_tensor_parallelism_that_was_not_given() -> None:
    message, hint = present(8, tp=2, ep=8)
    assert message == "EP·ETP·PP = 8·2·1 = 16 > 8 devices; ETP not given means TP = 2"
    assert hint == "set --expert-tensor-parallel-size 1"
    assert present(8, tp=2, ep=8, etp=1) == ("", "")


def test_expert_parallelism_over_all_tensor_ranks() -> None:
    four = b.cluster(b.pool(devices_per_node=4))
    assert present_plan(b.job(micro_batch_size=1, tp=4, ep=4, etp=1), four).comparable
    unset = present_plan(b.job(micro_batch_size=1, tp=4, ep=4), four)
    assert unset.violations[0].message == "EP·ETP·PP = 4·4·1 = 16 > 4 devices; ETP not given means TP = 4"


def test_expert_groups_do_not_span_stages() -> None:
    message, hint = present(8, pp=2, ep=8)
    assert message == "EP·ETP·PP = 8·1·2 = 16 > 8 devices"
    assert hint == "set --expert-model-parallel-size 4"


@pytest.mark.parametrize("degrees", [{"ep": 16}, {"tp": 4, "cp": 2, "ep": 16, "etp": 1}])
def test_folding_is_legal(degrees: dict[str, int]) -> None:
    found = present_plan(b.job(moe=16, micro_batch_size=1, **degrees), b.cluster(b.pool(nodes=2)))
    assert found.comparable and found.plan is not None and found.plan.stages[0].edp == 1


def test_no_layer_is_lost_in_an_even_split() -> None:
    job = b.with_model(b.job(moe=None, micro_batch_size=1, pp=4), num_layers=30)
    found = present_plan(job, b.cluster())
    assert [v.message for v in found.violations] == ["30 layers do not divide by PP = 4"]
    assert "8/8/7/7" in found.violations[0].hint
    assert found.plan is not None and sum(stage.num_layers for stage in found.plan.stages) == 30
    both = b.with_model(
        b.job(moe=None, micro_batch_size=1, pp=4, account_for_embedding=True, account_for_loss=True), num_layers=30
    )
    counted = present_plan(both, b.cluster())
    assert counted.comparable and [stage.num_layers for stage in counted.plan.stages] == [7, 8, 8, 7]  # type: ignore[union-attr]


def test_first_and_last_stage_with_interleaving() -> None:
    job = b.job(moe=None, micro_batch_size=1, pp=4, vpp=2, first_stage_layers=1, last_stage_layers=3)
    found = present_plan(job, b.cluster())
    assert "does not divide by vpp = 2" in found.violations[0].message
    assert "a layout can split it" in found.violations[0].hint


def test_present_plan_takes_the_largest_dp_that_is_legal() -> None:
    job = b.with_training(b.job(micro_batch_size=1, tp=2, ep=2, etp=1), global_batch_size=24)
    found = present_plan(job, b.cluster(b.pool(nodes=4)))
    assert found.plan is not None and found.plan.stages[0].dp == 12  # 16 divides no batch of 24
    assert found.note == "the script's own degrees with dp 12 on 24 of 32 devices"
    exact = present_plan(job, b.cluster(b.pool(nodes=4)), world_size=8)
    assert exact.plan is not None and exact.plan.stages[0].dp == 4
    odd = present_plan(job, b.cluster(), world_size=9)
    assert odd.plan is None and odd.violations[0].message == "world size 9 does not divide by TP·CP·PP = 2·1·1 = 2"


def test_present_plan_that_does_not_fit() -> None:
    found = present_plan(b.job(tp=8, pp=8, etp=8), b.cluster())
    assert found.plan is None and "not comparable" in found.note


def test_present_layout_and_pools_in_order() -> None:
    job = b.job(micro_batch_size=1, pp=2, layout="Et*2|t*1|t*3|t*2L")
    found = present_plan(job, b.cluster(b.pool("a100"), b.pool("h800")))
    assert found.comparable and found.plan is not None
    assert [(s.pool, s.num_layers, s.virtual_layers) for s in found.plan.stages] == [
        ("a100", 5, ((0, 2), (3, 3))),
        ("h800", 3, ((2, 1), (6, 2))),
    ]


# Megatron's own verdict, on random plans.

SIZE = st.sampled_from([1, 1, 2, 2, 3, 4, 6, 8])


@settings(max_examples=150, deadline=None)
@given(tp=SIZE, cp=SIZE, dp=SIZE, pp=st.sampled_from([1, 2, 3, 4]), ep=SIZE, etp=SIZE)
def test_groups_as_megatron_builds_them(tp: int, cp: int, dp: int, pp: int, ep: int, etp: int) -> None:
    plan = b.plan((1,) * pp, tp=tp, cp=cp, dp=dp, ep=ep, etp=etp)
    ours = [v for v in check(b.job(moe=24), NODES, plan) if v.rule in ("devices", "expert-mesh")]
    world = tp * cp * dp * pp
    theirs = groups_refuse(
        world,
        tensor_model_parallel_size=tp,
        context_parallel_size=cp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
    )
    assert bool(ours) == bool(theirs), (ours, theirs)


@pytest.mark.parametrize(("tp", "cp", "dp", "ep", "etp"), [(2, 1, 4, 4, 1), (4, 2, 1, 8, 1), (1, 1, 6, 3, 2)])
def test_stages_are_consecutive_ranks(tp: int, cp: int, dp: int, ep: int, etp: int) -> None:
    plan = resolve(JOB, NODES, b.plan((2, 2, 2, 2), tp=tp, cp=cp, dp=dp, ep=ep, etp=etp))
    for index, stage in enumerate(plan.stages):
        for rank in range(stage.first_rank, stage.first_rank + stage.num_devices):
            with groups(
                plan.num_devices,
                rank,
                tensor_model_parallel_size=tp,
                context_parallel_size=cp,
                pipeline_model_parallel_size=4,
                expert_model_parallel_size=ep,
                expert_tensor_parallel_size=etp,
            ):
                assert parallel_state.get_pipeline_model_parallel_rank() == index
                assert parallel_state.get_data_parallel_world_size() == stage.dp
                assert parallel_state.get_expert_data_parallel_world_size() == stage.edp


MODULES = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts", "attention")


@settings(max_examples=200, deadline=None)
@given(
    granularity=st.sampled_from(["none", "selective", "full"]),
    names=st.lists(st.sampled_from(MODULES), max_size=3, unique=True),
    method=st.sampled_from([None, "block", "uniform"]),
    num_layers=st.sampled_from([0, 1, 2]),
    grouped=st.booleans(),
    overlap=st.booleans(),
    vpp=st.sampled_from([1, 2]),
    ep=st.sampled_from([1, 4]),
    heads=st.sampled_from([12, 24]),
    kv=st.sampled_from([2, 3, 4]),
    tp=st.sampled_from([1, 2, 8]),
    bias=st.booleans(),
)
def test_configuration_as_megatron_judges_it(
    granularity: str,
    names: list[str],
    method: str | None,
    num_layers: int,
    grouped: bool,
    overlap: bool,
    vpp: int,
    ep: int,
    heads: int,
    kv: int,
    tp: int,
    bias: bool,
) -> None:
    if granularity == "none":  # no arguments at all are emitted for it
        names, method, num_layers = [], None, 0
    if granularity == "full":
        names = []
        num_layers = max(num_layers, 1)  # 0 is refused by us alone: Megatron loops forever
    if overlap:  # "moe" with it is refused from 0.17 (TC:3024); 0.16 takes it, and the schedule goes around the module
        names = [name for name in names if name != "moe"]
    if granularity == "selective":
        method = None  # a method is refused by Megatron's arguments.py:1426, which is not in megatron-core
    recompute = Recompute(granularity=granularity, modules=tuple(names), method=method, num_layers=num_layers)  # type: ignore[arg-type]
    job = b.with_training(b.job(), grouped_gemm=grouped, overlap_moe_comm=overlap)
    job = b.with_model(job, num_heads=heads, num_kv_heads=kv, linear_bias=bias)
    plan = b.plan((4, 4), tp=tp, dp=8, ep=ep, etp=tp, vpp=vpp, recompute=(recompute,) * 2)
    judged = {"heads", "query-groups", "expert-bias", "expert-overlap"}
    judged |= {"recompute", "recompute-modules", "recompute-needs", "recompute-overlap", "recompute-arguments"}
    ours = [v for v in check(job, b.cluster(b.pool(nodes=16)), plan) if v.rule in judged]
    import torch

    theirs = config_refuses(
        num_layers=8,
        hidden_size=48 * 16,
        num_attention_heads=heads,
        num_query_groups=kv,
        num_moe_experts=8,
        moe_ffn_hidden_size=512,
        add_bias_linear=bias,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=tp,
        sequence_parallel=tp > 1,
        moe_token_dispatcher_type="alltoall",
        moe_grouped_gemm=grouped,
        overlap_moe_expert_parallel_comm=overlap,
        recompute_granularity=None if granularity == "none" else granularity,
        recompute_method=method,
        recompute_num_layers=num_layers or None,
        recompute_modules=names or None,
    )
    assert bool(ours) == bool(theirs), (ours, theirs)
