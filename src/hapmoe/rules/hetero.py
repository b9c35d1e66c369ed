"""What stages of unequal degrees cannot have on Megatron-Core with ``hapmoe.runtime``. Silent for other back ends,
and for plans with one set of degrees on one vendor's devices.

Found by running Megatron-Core 0.12.0, 0.16.1 and main with such stages against one rank, and by reading where
Megatron divides by a uniform world.
"""

from __future__ import annotations

from collections.abc import Iterator

from hapmoe.backends import Capabilities
from hapmoe.cluster import Cluster
from hapmoe.job import JobSpec
from hapmoe.plan import Plan, Stage
from hapmoe.rules.base import Broken, Context, Rule, degrees

__all__ = ["RULES", "degrees_may_differ", "remarks"]

Found = Iterator[Broken]

_REFUSED = {
    # Flag of the script: what it does to unequal stages.
    "--use-torch-fsdp2": "shards weights over one group of all ranks",
    "--use-megatron-fsdp": "shards weights over one group of all ranks",
    "--use-custom-fsdp": "shards weights over one group of all ranks",
    "--use-tp-pp-dp-mapping": "puts pipeline ranks inside data parallelism",
    "--rampup-batch-size": "changes the sequences per microbatch of all stages by one data-parallel size",
    "--variable-seq-lengths": "exchanges tensor shapes between stages, whose tensors differ",
    "--hierarchical-context-parallel-sizes": "cuts the sequence in another way, which is not verified",
    "--use-ring-exchange-p2p": "needs one rank per stage on its ring",
    "--hybrid-context-parallel": "builds context groups over one data-parallel size",
    "--overlap-moe-expert-parallel-comm": "runs another schedule, which is not verified",
    "--reuse-grad-buf-for-mxfp8-param-ag": "is not verified",
    "--non-persistent-ckpt-type": "saves per rank of a uniform world",
    "--yaml-cfg": "divides the world by one set of degrees",
    "--perform-rl-step": "counts microbatches by one data-parallel size",
}


def _applies(c: Context) -> bool:
    if not c.backend.runtime:
        return False
    libraries = {pool.device.ccl for _, _, pool in c.pools()}
    return len(libraries) > 1 or len({degrees(stage) for stage in c.plan.stages}) > 1


def _batch(c: Context) -> Found:
    if not _applies(c):
        return
    first = c.plan.stages[0]
    total = first.dp * first.micro_batch_size
    for index, stage in enumerate(c.plan.stages):
        if stage.dp * stage.micro_batch_size != total:
            yield Broken(
                f"DP·MBS is {stage.dp}·{stage.micro_batch_size} = {stage.dp * stage.micro_batch_size}, "
                f"on the first stage {total}",
                "a microbatch holds the same sequences on all stages: set micro_batch_size to the product over dp",
                index,
            )


def _tied(c: Context) -> Found:
    if _applies(c) and c.job.model.tied_embeddings and c.plan.pp > 1:
        yield Broken(
            "tied embeddings: first and last stage would train different copies",
            "--untie-embeddings-and-output-weights, or the same degrees on all stages",
        )


def _mtp(c: Context) -> Found:
    if _applies(c) and c.job.model.mtp_layers:
        yield Broken(
            "MTP layers: the last stage's copy of the embedding would train apart from the first stage's",
            "train without MTP layers, or with the same degrees on all stages",
        )


def _auxiliary(c: Context) -> Found:
    kinds = c.flag_values("--moe-router-load-balancing-type") or ("aux_loss",)
    if _applies(c) and c.job.model.moe and c.job.training.per_token_loss and "seq_aux_loss" in kinds:
        yield Broken(
            "seq_aux_loss with --calculate-per-token-loss: its weight would differ between stages",
            "--moe-router-load-balancing-type aux_loss, or remove --calculate-per-token-loss",
        )


def _instances(c: Context) -> Found:
    count = c.flag_int("--num-distributed-optimizer-instances") or 1
    if _applies(c) and count > 1:
        yield Broken(
            f"--num-distributed-optimizer-instances {count}: instances are cut from one data-parallel group of all",
            "remove --num-distributed-optimizer-instances",
        )


def _checkpoint(c: Context) -> Found:
    words = c.flag_values("--ckpt-format")
    if _applies(c) and words and words[0] != "torch_dist":
        yield Broken(
            f"--ckpt-format {words[0]}: only torch_dist keeps one key per layer, whatever the stages",
            "--ckpt-format torch_dist",
        )


def _flags(c: Context) -> Found:
    if not _applies(c):
        return
    for flag, why in _REFUSED.items():
        if c.has_flag(flag):
            yield Broken(f"{flag} {why}", f"remove {flag}, or give all stages the same degrees")
    order = c.flag_values("--dataloader-type") or ("single",)
    first, last = c.plan.stages[0].dp, c.plan.stages[-1].dp
    if order[0] in ("cyclic", "external") and first != last:
        # legacy/data/data_samplers.py: which sample a rank reads depends on dp
        yield Broken(
            f"--dataloader-type {order[0]}: the first stage (dp {first}) reads other samples than the last (dp {last})",
            "--dataloader-type single, or the same dp on the first and the last stage",
        )


_RUN = "runs against one rank on megatron-core 0.16.1"
RULES = (
    Rule("stages-batch", "each stage cuts the same sequences by its own DP", _RUN, _batch),
    Rule(
        "stages-tied",
        "embedding groups span first and last stage",
        "core/distributed/finalize_model_grads.py",
        _tied,
    ),
    Rule(
        "stages-mtp",
        "MTP embeds tokens on the last stage",
        "core/transformer/multi_token_prediction.py",
        _mtp,
    ),
    Rule("stages-auxiliary", "its token count leaves the batch out", "router.py, _apply_seq_aux_loss", _auxiliary),
    Rule("stages-instances", "one optimizer instance", "PS:922", _instances),
    Rule("stages-checkpoint", "checkpoints outlive plans", "transformer_block.py, sharded_state_dict", _checkpoint),
    Rule("stages-flags", "features that count on one mesh for all stages", _RUN, _flags),
)


def remarks(job: JobSpec, cluster: Cluster, plan: Plan, backend: Capabilities) -> tuple[str, ...]:
    """That such plans are experimental, and what one trains as Megatron means it, but not as another plan would."""
    context = Context(job, cluster, plan, backend)
    if not _applies(context):
        return ()
    untried = "EXPERIMENTAL: stages of unequal degrees or vendors were verified on CPU, never on accelerators"
    kinds = context.flag_values("--moe-router-load-balancing-type") or ("aux_loss",)
    weights = context.flag_values("--moe-aux-loss-coeff") or ("0",)
    replicas = {(stage.dp, stage.cp) for stage in plan.stages}
    on = job.model.moe is not None and any(weight.strip("0.") for weight in weights)
    if not (on and len(replicas) > 1 and {"aux_loss", "global_aux_loss"} & set(kinds)):
        return (untried,)
    return (
        untried,
        "aux_loss depends on the tokens of one data-parallel rank (in Megatron too): its strength differs between "
        "stages of unequal dp; seq_aux_loss does not",
    )


def degrees_may_differ(job: JobSpec, cluster: Cluster, backend: Capabilities) -> bool:
    """Do these rules leave the job any plan whose stages differ in degrees?"""
    pool = cluster.pools[0].name
    sizes = ((2, 1), (1, 2))  # dp and micro-batch size of two stages
    stages = tuple(Stage(pool=pool, num_layers=1, num_devices=dp, dp=dp, micro_batch_size=mbs) for dp, mbs in sizes)
    context = Context(job, cluster, Plan(stages=stages, micro_batch_size=1), backend)
    return not any(True for rule in RULES for _ in rule.check(context))
