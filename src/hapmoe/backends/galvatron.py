"""A plan as the strategy file of Hetu-Galvatron: degrees, data-parallel type and checkpointing per layer.

Pinned: PKU-DAIR/Hetu-Galvatron cea12ff (2026-06-16, main after v2.4.0, whose file knows no experts). Keys:
galvatron/core/runtime/hybrid_parallel_config.py:20-110, galvatron/utils/config_utils.py:24-45. Stages are
consecutive ranks, as upstream (comm_groups.py, order pp-dp-cp-tp-sp). Galvatron trains models of its own
from a configuration of its own; only the strategy is written here.
"""

from __future__ import annotations

from collections.abc import Iterable

from hapmoe.backends.megatron import keep_users
from hapmoe.cluster import Cluster
from hapmoe.job import Argument, JobSpec
from hapmoe.plan import Plan, Stage

__all__ = ["launchable", "program", "stage_arguments", "strategy"]


def strategy(job: JobSpec, plan: Plan) -> dict[str, object]:
    """The file's content; lists have one entry per decoder layer, in model order, as Galvatron writes them."""
    stages = [stage for stage in plan.stages for _ in range(stage.num_layers)]
    again = [index < _recomputed(stage) for stage in plan.stages for index in range(stage.num_layers)]
    first = plan.stages[0]
    found: dict[str, object] = {
        "pp_deg": plan.pp,
        "tp_sizes_enc": _list(stage.tp for stage in stages),
        "tp_consecutive_flags": _list(1 for _ in stages),
        "cp_sizes_enc": _list(stage.cp for stage in stages),
        # 0: default_dp_type; 1 would be ZeRO-3.
        "dp_types_enc": _list(0 for _ in stages),
        # 0: tp_sizes_enc are tensor parallel (Megatron), not Ulysses.
        "use_sp": _list(0 for _ in stages),
        "checkpoint": _list(int(flag) for flag in again),
        "global_bsz": plan.global_batch_size,
        "chunks": plan.num_microbatches,
        "pp_division": _list(stage.num_layers for stage in plan.stages),
        "pipeline_type": "pipedream_flush",
        "default_dp_type": "zero2" if job.training.distributed_optimizer else "ddp",
        "vtp": first.tp,
        "vsp": 0,
        "vcp": first.cp,
        "vocab_sdp": 0,
    }
    if job.model.moe is not None:
        found["ep_sizes_enc"] = _list(stage.ep for stage in stages)
        found["tp_of_ep_sizes_enc"] = _list(stage.etp for stage in stages)
    return found


def stage_arguments(
    job: JobSpec, plan: Plan, cluster: Cluster
) -> tuple[tuple[Argument, ...], tuple[tuple[str, ...], ...]]:
    """The user's words without what the plan owns, for reading: Galvatron takes no flags of Megatron."""
    return keep_users(job.argv), tuple(() for _ in plan.stages)


def program(job: JobSpec) -> str:
    """Galvatron's own training program."""
    return f"galvatron/models/{'moe' if job.model.moe is not None else 'gpt'}/train_dist.py"


def launchable(job: JobSpec, cluster: Cluster, plan: Plan) -> tuple[bool, str]:
    """Is Galvatron able to join the devices, and if not, why?"""
    libraries = {cluster.pool(stage.pool).device.ccl for stage in plan.stages}
    if libraries - {"nccl"}:
        return False, f"Galvatron runs on NCCL alone, and the plan uses {', '.join(sorted(libraries))}"
    return True, ""


def _recomputed(stage: Stage) -> int:
    """Layers of the stage that are computed again, from its first one."""
    r = stage.recompute
    if r.granularity != "full":
        return 0
    return stage.num_layers if r.method == "uniform" else min(r.num_layers, stage.num_layers)


def _list(values: Iterable[int]) -> str:
    return ",".join(map(str, values))
