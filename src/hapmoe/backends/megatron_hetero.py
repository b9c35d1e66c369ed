"""A plan as arguments of unmodified Megatron-LM whose stages have degrees of their own.

Each rank gets the degrees and the micro-batch size of its stage; ``hapmoe.runtime`` joins the stages.
Plans with one set of degrees need no runtime: they get the arguments of ``backends.megatron``.
"""

from __future__ import annotations

from math import lcm

from hapmoe.backends import megatron
from hapmoe.backends.megatron import has_flag, keep_users, program, recompute_arguments, split_arguments
from hapmoe.backends.transports import cannot_join
from hapmoe.cluster import Cluster
from hapmoe.job import Argument, JobSpec
from hapmoe.plan import Plan, Stage
from hapmoe.shapes import uses_sequence_parallel

__all__ = ["launchable", "needs_runtime", "program", "stage_arguments", "transports"]


def needs_runtime(cluster: Cluster, plan: Plan) -> bool:
    """Do stages differ in degrees, or their devices in collective library?"""
    libraries = {cluster.pool(stage.pool).device.ccl for stage in plan.stages}
    return len(libraries) > 1 or len({_degrees(stage) for stage in plan.stages}) > 1


def stage_arguments(
    job: JobSpec, plan: Plan, cluster: Cluster
) -> tuple[tuple[Argument, ...], tuple[tuple[str, ...], ...]]:
    """The arguments of all ranks, and per stage its degrees, micro-batch size and recomputation."""
    if not needs_runtime(cluster, plan):
        return megatron.stage_arguments(job, plan, cluster)
    kept = keep_users(job.argv)
    words = ["--pipeline-model-parallel-size", str(plan.pp)]
    words += split_arguments(job, plan)
    if not has_flag(kept, "--global-batch-size"):
        words += ["--global-batch-size", str(plan.global_batch_size)]
    common = (*kept, *(Argument(text=word, owner="plan", source="", where="plan") for word in words))
    return common, tuple((*_of_stage(job, stage), *_vocabulary(job, plan, stage)) for stage in plan.stages)


def _of_stage(job: JobSpec, stage: Stage) -> tuple[str, ...]:
    words = ["--tensor-model-parallel-size", str(stage.tp), "--context-parallel-size", str(stage.cp)]
    if job.model.moe is not None:
        words += ["--expert-model-parallel-size", str(stage.ep), "--expert-tensor-parallel-size", str(stage.etp)]
    if stage.tp > 1 and uses_sequence_parallel(job):
        words.append("--sequence-parallel")
    return (*words, "--micro-batch-size", str(stage.micro_batch_size), *recompute_arguments(stage.recompute))


def _vocabulary(job: JobSpec, plan: Plan, stage: Stage) -> tuple[str, ...]:
    """Megatron pads the vocabulary to a multiple that grows with tp (training/vocab_utils.py:58): with
    this divisor all stages pad it alike."""
    widest = lcm(*(one.tp for one in plan.stages))
    if job.model.padded_vocab_size is not None or widest == stage.tp:
        return ()
    return ("--make-vocab-size-divisible-by", str(job.model.vocab_divisor * widest // stage.tp))


def launchable(job: JobSpec, cluster: Cluster, plan: Plan) -> tuple[bool, str]:
    """Can the stages be joined, and if not, why (one line)?"""
    if not needs_runtime(cluster, plan):
        return megatron.launchable(job, cluster, plan)
    for before, after in zip(plan.stages, plan.stages[1:], strict=False):
        first, second = cluster.pool(before.pool).device, cluster.pool(after.pool).device
        if first.ccl == second.ccl:
            continue
        link = cluster.link(before.pool, after.pool)
        if link is None:
            return False, f"no link joins {before.pool} and {after.pool}"
        if reason := cannot_join(first.ccl, second.ccl, link.transport):
            return False, f"pools {before.pool} and {after.pool}: {reason}"
    return True, ""


def transports(cluster: Cluster, plan: Plan) -> tuple[str, ...]:
    """What carries the boundary behind each stage; empty: the collective library of its two sides.

    The last entry is the way back to the first stage, which interleaving uses.
    """
    found = []
    for before, after in zip(plan.stages, (*plan.stages[1:], plan.stages[0]), strict=True):
        link = cluster.link(before.pool, after.pool) if before.pool != after.pool else None
        alike = cluster.pool(before.pool).device.ccl == cluster.pool(after.pool).device.ccl
        found.append("" if alike or link is None else link.transport)
    return tuple(found)


def _degrees(stage: Stage) -> tuple[int, ...]:
    return (stage.tp, stage.cp, stage.ep, stage.etp, stage.dp, stage.num_devices, stage.micro_batch_size)
