"""A hand-written plan with its gaps filled: what a zero or an empty field stands for.

Every reader of plans (rules, back ends, launchers) starts here, so that a plan of a few lines and
a planner's full one mean the same.
"""

from __future__ import annotations

import msgspec

from hapmoe.cluster import Cluster
from hapmoe.job import JobSpec
from hapmoe.plan import Plan, Stage

__all__ = ["chunk_layers", "resolve"]


def resolve(job: JobSpec, cluster: Cluster, plan: Plan) -> Plan:
    """The same plan with device kinds, device counts, ranks, nodes, layers and batch written out.

    Only what is absent is filled, never corrected: ``rules.check`` judges what is there. A plan
    that was resolved before comes back equal.
    """
    stages = _fill_layers(job, plan, _fill_placement(cluster, plan))
    first = stages[0] if stages else None
    per_step = plan.micro_batch_size * first.dp if first else 0
    global_batch = plan.global_batch_size or job.training.global_batch_size or plan.num_microbatches * per_step
    microbatches = plan.num_microbatches or (global_batch // per_step if per_step > 0 else 0)
    return msgspec.structs.replace(plan, stages=stages, global_batch_size=global_batch, num_microbatches=microbatches)


def chunk_layers(stage_layers: tuple[int, ...], vpp: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Per stage, ``vpp`` pairs (first layer, count) that share its layers as evenly as can be.

    The model runs through chunk 0 of all stages, then chunk 1 (Megatron's interleaved order). A
    remainder goes to the later chunks, because the first one of the first stage holds the embedding.

    >>> chunk_layers((5, 9), 2)
    (((0, 2), (6, 3)), ((2, 4), (9, 5)))
    """
    sizes = [[(layers + chunk) // vpp for chunk in range(vpp)] for layers in stage_layers]
    first, chunks = 0, [[(0, 0)] * vpp for _ in stage_layers]
    for chunk in range(vpp):
        for stage, size in enumerate(sizes):
            chunks[stage][chunk] = (first, size[chunk])
            first += size[chunk]
    return tuple(tuple(row) for row in chunks)


def _fill_placement(cluster: Cluster, plan: Plan) -> tuple[Stage, ...]:
    """Device kinds, device counts, ranks and nodes; nodes are handed out in pool order."""
    pools = {pool.name: pool for pool in cluster.pools}
    taken = dict.fromkeys(pools, 0)  # devices of each pool given to earlier stages
    ranks_given = any(stage.first_rank for stage in plan.stages)
    nodes_given = any(stage.nodes for stage in plan.stages)
    stages, rank = [], 0
    for stage in plan.stages:
        count = stage.num_devices or stage.tp * stage.cp * stage.dp
        nodes, device, pool = stage.nodes, stage.device, pools.get(stage.pool)
        if pool is not None:
            device = device or pool.device.name
            begin = taken[stage.pool]
            taken[stage.pool] += count
            if not nodes_given and count > 0:
                nodes = tuple(range(begin // pool.devices_per_node, -(-(begin + count) // pool.devices_per_node)))
        stages.append(
            msgspec.structs.replace(
                stage,
                device=device,
                num_devices=count,
                nodes=nodes,
                first_rank=stage.first_rank if ranks_given else rank,
                micro_batch_size=stage.micro_batch_size or plan.micro_batch_size,
            )
        )
        rank += count
    return tuple(stages)


def _fill_layers(job: JobSpec, plan: Plan, stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
    """Virtual layers and the MTP layers, which belong to the last stage."""
    if plan.vpp >= 1 and not any(stage.virtual_layers for stage in stages):
        chunks = chunk_layers(tuple(stage.num_layers for stage in stages), plan.vpp)
        firsts_given = any(stage.first_layer for stage in stages)
        stages = tuple(
            msgspec.structs.replace(
                stage, virtual_layers=rows, first_layer=stage.first_layer if firsts_given else rows[0][0]
            )
            for stage, rows in zip(stages, chunks, strict=True)
        )
    if stages and job.model.mtp_layers and not any(stage.mtp_layers for stage in stages):
        last = msgspec.structs.replace(stages[-1], mtp_layers=job.model.mtp_layers)
        stages = (*stages[:-1], last)
    return stages
