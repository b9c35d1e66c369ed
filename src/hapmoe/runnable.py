"""Search results held to what a back end really runs.

The search knows upstream Megatron's rules; what a back end lacks beyond them becomes pins (no
interleaving, no context parallelism), and what cannot be pinned (FlagScale's envelope) picks the
first ranked plan that is legal.
"""

from __future__ import annotations

import msgspec

from hapmoe import backends
from hapmoe.cluster import Cluster
from hapmoe.hybrid import pattern_of
from hapmoe.job import JobSpec
from hapmoe.plan import SearchResult
from hapmoe.rules import check

__all__ = ["LOOK_AT", "back_end_settings", "legal_first", "needs_look"]

LOOK_AT = 32
"""Ranked plans among which one inside the envelope is looked for."""


def back_end_settings(job: JobSpec, backend: str) -> tuple[str, ...]:
    """``--set`` values that follow from a back end's capabilities for this job."""
    capability = backends.capabilities(backend)
    interleaves = capability.vpp and not _splits_evenly(job)
    return (*(() if interleaves else ("vpp=1",)), *(() if capability.cp else ("cp=1",)))


def _splits_evenly(job: JobSpec) -> bool:
    """A HybridModel before bars in its pattern (0.17): one even split, not interleaved."""
    version = job.training.megatron_version
    return pattern_of(job) is not None and version is not None and backends.version_tuple(version) < (0, 17, 0)


def needs_look(job: JobSpec, backend: str) -> bool:
    """Are there rules of this back end and version that the search does not know?"""
    capability = backends.capabilities(backend)
    return (
        capability.envelope
        or capability.equal_stages
        or _splits_evenly(job)
        or (bool(capability.module) and not capability.uneven(job.training.megatron_version))
    )


def legal_first(
    job: JobSpec, cluster: Cluster, result: SearchResult, top: int, otherwise: SearchResult | None = None
) -> SearchResult:
    """The result with its best legal plan in front and at most ``top`` ranked; as it is where none is
    legal (then the launcher says why), or where the best one is. ``otherwise``: a plainer search (equal
    layers) whose plans stand behind.

    A plan that moved up is not proven to be the best legal one: status "feasible", with the gap to the
    bound of the whole space.
    """
    rows = (*result.ranked, *(otherwise.ranked if otherwise is not None else ()))
    legal = tuple(row for row in rows if not check(job, cluster, row[0]))
    if not legal or legal[0][0] == result.plan:
        return msgspec.structs.replace(result, ranked=(legal or result.ranked)[:top])
    plan, estimate = legal[0]
    best = result.estimate.step_s if result.estimate is not None else estimate.step_s
    bound = min(estimate.lower_bound_s or best, best)
    gap = (estimate.step_s - bound) / estimate.step_s
    report = result.report and msgspec.structs.replace(result.report, status="feasible", gap=gap)
    return msgspec.structs.replace(
        result, plan=plan, estimate=estimate, ranked=legal[:top], status="feasible", gap=gap, report=report
    )
