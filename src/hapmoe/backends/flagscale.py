"""A plan as arguments of FlagScale's heterogeneous mode: a process mesh per kind.

Pinned: FlagScale v0.9.0, or Megatron-LM-FL v0.1.0+megatron0.15.0rc7 with its FlagScale. Later forks
ignore the layer split (Megatron-LM-FL from v0.2.0, commit ecb5dfade). Flags:
flagscale/backends/Megatron-LM/megatron/training/arguments.py.patch:612-629; what they mean:
flagscale/train/arguments.py:85-225. Recomputation is given per rank, as upstream.
"""

from __future__ import annotations

from hapmoe.backends.megatron import OWNED, has_flag, keep_users, recompute_arguments
from hapmoe.backends.meshes import meshes
from hapmoe.backends.transports import cannot_join
from hapmoe.cluster import Cluster
from hapmoe.job import Argument, JobSpec
from hapmoe.plan import Plan
from hapmoe.shapes import uses_sequence_parallel

__all__ = ["OWNS", "launchable", "mesh_arguments", "program", "sequence_parallel", "stage_arguments"]

OWNS: dict[str, int | None] = {
    **OWNED,
    "--enable-hetero": 0,
    "--hetero-process-meshes": None,
    "--hetero-device-types": None,
    "--hetero-current-device-type": 1,
    "--hetero-pipeline-layer-split": None,
    "--hetero-use-cpu-communication": 0,
    "--expert-tensor-parallel-size-per-process-mesh": None,
    "--use-partial-reduce-for-shared-embedding": 0,
    "--recompute-granularity-per-stage-micro-batch": None,
    "--recompute-method-per-stage-micro-batch": None,
    "--recompute-num-layers-per-stage-micro-batch": None,
    "--distributed-backend": 1,
}
"""Arguments that the plan decides; see ``megatron.OWNED``."""


def stage_arguments(
    job: JobSpec, plan: Plan, cluster: Cluster
) -> tuple[tuple[Argument, ...], tuple[tuple[str, ...], ...]]:
    """The arguments of all ranks, and per stage its mesh's device type and its recomputation."""
    kept = keep_users(job.argv, OWNS)
    words = mesh_arguments(job, plan, cluster)
    if not has_flag(kept, "--global-batch-size"):
        words += ("--global-batch-size", str(plan.global_batch_size))
    common = (*kept, *(Argument(text=word, owner="plan", source="", where="plan") for word in words))
    types = {
        stage: mesh.name(index)
        for index, mesh in enumerate(meshes(job, plan, patched=plan.backend.endswith("patched")))
        for stage in range(mesh.first, mesh.first + mesh.pp)
    }
    return common, tuple(
        ("--hetero-current-device-type", types[index], *recompute_arguments(stage.recompute))
        for index, stage in enumerate(plan.stages)
    )


def program(job: JobSpec) -> str:
    """FlagScale's own training program, from its folder; a script that starts one of them keeps it."""
    return job.entry if "flagscale/" in job.entry else "flagscale/train/train_gpt.py"


def mesh_arguments(job: JobSpec, plan: Plan, cluster: Cluster) -> tuple[str, ...]:
    """What the plan decides for all ranks, in a fixed order, without the batch size."""
    found = meshes(job, plan, patched=plan.backend.endswith("patched"))
    first = found[0].stage
    words = [
        *("--tensor-model-parallel-size", str(first.tp)),
        *("--pipeline-model-parallel-size", str(plan.pp)),
        *("--context-parallel-size", "1"),
    ]
    if job.model.moe is not None:
        words += ["--expert-model-parallel-size", str(first.ep), "--expert-tensor-parallel-size", str(first.etp)]
    if sequence_parallel(job, plan):
        words.append("--sequence-parallel")
    words += ["--micro-batch-size", str(plan.micro_batch_size), "--enable-hetero", "--hetero-process-meshes"]
    words += [str(number) for mesh in found for number in mesh.words]
    words += ["--hetero-device-types", *(mesh.name(index) for index, mesh in enumerate(found))]
    words += ["--hetero-pipeline-layer-split", *(str(stage.num_layers) for stage in plan.stages)]
    if job.model.moe is not None:
        words += ["--expert-tensor-parallel-size-per-process-mesh", *(str(mesh.stage.etp) for mesh in found)]
    if job.model.tied_embeddings and job.training.distributed_optimizer and first.dp != found[-1].stage.dp:
        words.append("--use-partial-reduce-for-shared-embedding")
    return tuple(words + _joining(cluster, plan))


def _joining(cluster: Cluster, plan: Plan) -> list[str]:
    """The library of groups across meshes: their own where all have one, FlagCX, or Gloo through host
    memory (then all boundaries take it: the world's group has one back end, train/arguments.py:55-61)."""
    transports = set()
    for before, after in zip(plan.stages, plan.stages[1:], strict=False):
        link = cluster.link(before.pool, after.pool) if before.pool != after.pool else None
        if link is not None and cluster.pool(before.pool).device.ccl != cluster.pool(after.pool).device.ccl:
            transports.add(link.transport)
    if "gloo" in transports:
        return ["--distributed-backend", "nccl", "--hetero-use-cpu-communication"]
    return ["--distributed-backend", "flagcx" if transports else "nccl"]


def sequence_parallel(job: JobSpec, plan: Plan) -> bool:
    """On where any mesh has TP > 1, as upstream; FlagScale drops it for meshes with TP = 1."""
    return uses_sequence_parallel(job) and any(stage.tp > 1 for stage in plan.stages)


def launchable(job: JobSpec, cluster: Cluster, plan: Plan) -> tuple[bool, str]:
    """Can FlagScale start the plan, and if not, why (one line)?"""
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
