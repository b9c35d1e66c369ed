"""Random plans, judged by our rules and by Megatron-Core itself, from the arguments that we would emit."""

from __future__ import annotations

import random
import warnings
from dataclasses import dataclass

import builders as b
import torch
from megatron_oracle import config_refuses, groups_refuse, parse

from hapmoe.backends.megatron import stage_arguments
from hapmoe.job import JobSpec
from hapmoe.plan import Plan, Recompute
from hapmoe.resolve import resolve
from hapmoe.rules import FORM, RULES, check

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core.num_microbatches_calculator import ConstantNumMicroBatchesCalculator
    from megatron.core.utils import divide

__all__ = ["BEYOND", "Verdict", "judge", "random_case"]

NODES = b.cluster(b.pool(nodes=1024))

BEYOND = {
    # Rules of ours that Megatron-Core checks elsewhere than in configuration and groups, or not at all.
    "expert-tensor",  # trains with wrong gradients
    "nodes",  # where ranks stand
    "shared-nodes",
    "sequence",  # raised in the forward pass
    "interleaved-batch",  # raised by the schedule
    "experts",  # moe_layer.py:186, when the layer is built (in the configuration from 0.18)
    "recompute-mtp",  # multi_token_prediction.py:1625, in the forward pass
    "global-batch-kept",
}


@dataclass(frozen=True)
class Verdict:
    ours: tuple[str, ...]
    theirs: str

    @property
    def agree(self) -> bool:
        return bool(self.ours) == bool(self.theirs)


def random_case(seed: int) -> tuple[JobSpec, Plan]:
    """A job and a plan for it; about a third are legal."""
    rng = random.Random(seed)
    pick = rng.choice
    moe = pick([None, 8, 8, 12, 16])
    pp = pick([1, 1, 2, 2, 3, 4])
    vpp = pick([1, 1, 2, 3]) if pp > 1 else pick([1, 1, 1, 1, 2])
    layers = rng.randint(pp * vpp, 4 * pp * vpp)
    tp, cp, dp = pick([1, 1, 2, 2, 4, 3]), pick([1, 1, 1, 2]), pick([1, 2, 2, 4, 4, 3])
    ep, etp = (pick([1, 2, 2, 4, 8]), pick([1, 1, 1, tp, 2])) if moe else (1, 1)
    heads = pick([12, 24, 48, 10])
    kv = pick([heads, heads // 2, 5 if heads == 10 else 3])
    job = b.job(moe=moe, argv=f"--num-layers {layers}", tp=2, sequence_parallel=True)
    experts = job.model.moe
    if experts is not None:
        experts = b.msgspec.structs.replace(experts, ffn_hidden=pick([512, 512, 516, 510]), pattern=(True,) * layers)
    job = b.with_model(
        job,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv,
        hidden=48 * heads,
        head_dim=48,
        ffn_hidden=pick([1024, 1536, 1026, 1536]),
        linear_bias=pick([False, False, True]),
        mtp_layers=pick([0, 0, 0, 1]),
        moe=experts,
    )
    job = b.with_training(
        job, seq_len=4096 * 3, global_batch_size=pick([48, 48, 96, 40]), grouped_gemm=pick([True, True, False])
    )
    split = _split(rng, layers, pp)
    if pp > 1 and rng.random() < 0.05:  # one stage needs no layout, so nothing wrong could be emitted
        split = (split[0] + 1, *split[1:])
    recompute = tuple(_recompute(rng) for _ in range(pp))
    return job, b.plan(
        split, tp=tp, cp=cp, dp=dp, ep=ep, etp=etp, vpp=vpp, micro_batch_size=pick([1, 1, 2, 4]), recompute=recompute
    )


def _split(rng: random.Random, layers: int, stages: int) -> tuple[int, ...]:
    cuts = sorted(rng.randint(0, layers) for _ in range(stages - 1))
    return tuple(end - begin for begin, end in zip([0, *cuts], [*cuts, layers], strict=True))


def _recompute(rng: random.Random) -> Recompute:
    granularity = rng.choice(["none", "none", "selective", "full"])
    if granularity == "full":
        return Recompute(granularity="full", method=rng.choice(["block", "uniform"]), num_layers=rng.randint(1, 2))
    if granularity == "selective":
        names = ["core_attn", "layernorm", "mlp", "moe_act", "moe", "mla_up_proj", "attention"]
        return Recompute(granularity="selective", modules=tuple(rng.sample(names, rng.randint(0, 2))))
    return Recompute()


def judge(job: JobSpec, plan: Plan) -> Verdict:
    """Rules that we say are broken, and why Megatron-Core refuses (empty: it does not)."""
    asked = {rule.name for rule in (*FORM, *RULES)} - BEYOND
    ours = tuple(violation.rule for violation in check(job, NODES, plan) if violation.rule in asked)
    return Verdict(ours, _megatron(job, resolve(job, NODES, plan)))


def _megatron(job: JobSpec, plan: Plan) -> str:
    common, per_stage = stage_arguments(job, plan)
    model, moe, world = job.model, job.model.moe, plan.num_devices
    for words in per_stage:
        args = parse([argument.text or "" for argument in common] + list(words))
        tp, etp = args.tensor_model_parallel_size, args.expert_tensor_parallel_size or 1
        sizes = {
            "tensor_model_parallel_size": tp,
            "pipeline_model_parallel_size": args.pipeline_model_parallel_size,
            "context_parallel_size": args.context_parallel_size,
            "expert_model_parallel_size": args.expert_model_parallel_size,
            "expert_tensor_parallel_size": etp,
        }
        virtual = plan.vpp if plan.vpp > 1 else None
        if said := groups_refuse(world, virtual_pipeline_model_parallel_size=virtual, **sizes):
            return said
        try:
            replicas = world // (tp * plan.pp * args.context_parallel_size)
            ConstantNumMicroBatchesCalculator(job.training.global_batch_size, args.micro_batch_size, replicas, False, 1)
            if not all(model.moe_pattern):
                divide(model.ffn_hidden, tp)
            if moe is not None:
                divide(moe.ffn_hidden, etp)
        except AssertionError as error:
            return str(error) or "AssertionError"
        experts = {"num_moe_experts": moe.num_experts, "moe_ffn_hidden_size": moe.ffn_hidden} if moe else {}
        said = config_refuses(
            num_layers=model.num_layers,
            hidden_size=model.hidden,
            num_attention_heads=model.num_heads,
            num_query_groups=model.num_kv_heads,
            add_bias_linear=model.linear_bias,
            mtp_num_layers=model.mtp_layers or None,
            bf16=True,
            params_dtype=torch.bfloat16,
            pipeline_dtype=torch.bfloat16,
            sequence_parallel=args.sequence_parallel,
            moe_token_dispatcher_type="alltoall",
            moe_grouped_gemm=job.training.grouped_gemm,
            pipeline_model_parallel_layout=args.pipeline_model_parallel_layout,
            recompute_granularity=args.recompute_granularity,
            recompute_method=args.recompute_method,
            recompute_num_layers=args.recompute_num_layers,
            recompute_modules=args.recompute_modules,
            **sizes,
            **experts,
        )
        if said:
            return said
    return ""
