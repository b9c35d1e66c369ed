"""The Python side: the same verbs as the command line, on values."""

from __future__ import annotations

from collections.abc import Iterable

from hapmoe.cluster import Cluster
from hapmoe.clusterfile import load_cluster
from hapmoe.cost import evaluate, timeline
from hapmoe.extract import extract
from hapmoe.job import JobSpec
from hapmoe.plan import SearchResult
from hapmoe.planfile import load_plan
from hapmoe.rules import check

__all__ = ["check", "evaluate", "extract", "load_cluster", "load_plan", "plan", "timeline"]


def plan(
    job: JobSpec,
    cluster: Cluster,
    *,
    planner: str = "exact",
    backend: str = "megatron",
    settings: Iterable[str] = (),
    top: int = 3,
    time_limit_s: float | None = None,
) -> SearchResult:
    """The fastest plan for ``job`` on ``cluster``, with its estimate and certificate.

    ``settings``: pins as ``--set`` takes them (``"tp=1,2"``). ``status`` is "infeasible" where
    nothing fits (``report.reasons`` says what comes nearest); InputError for what does not read.
    """
    from hapmoe.planning import plan_job

    return plan_job(
        job,
        cluster,
        planner=planner,
        backend=backend,
        settings=settings,
        top=top,
        time_limit_s=time_limit_s,
        compare=False,
    ).result
