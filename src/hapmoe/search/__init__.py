"""Planners: a job and a cluster in, ranked plans with a certificate out."""

from __future__ import annotations

import time
from collections.abc import Iterable

from hapmoe.backends import capabilities
from hapmoe.cluster import Cluster
from hapmoe.errors import InputError
from hapmoe.job import JobSpec
from hapmoe.plan import Recompute, SearchResult
from hapmoe.pricing import recompute_menu
from hapmoe.search.exact import Progress, search_exact
from hapmoe.search.pins import parse_pins
from hapmoe.search.problem import Problem, pose

__all__ = ["PLANNERS", "Progress", "search"]


PLANNERS = ("exact", "uniform")
"""What ``--planner`` takes. ``uniform`` is Megatron as tuned by hand: one set of degrees, equal layers,
one recomputation for all stages; a restriction of the same search, scored by the same oracle."""


def search(
    job: JobSpec,
    cluster: Cluster,
    *,
    planner: str = "exact",
    backend: str = "megatron",
    settings: Iterable[str] = (),
    top: int = 3,
    time_limit_s: float | None = None,
    progress: Progress | None = None,
    problem: Problem | None = None,
) -> SearchResult:
    """The fastest plan that ``backend`` can express. ``problem`` saves pricing when it was posed before."""
    began = time.perf_counter()
    if planner not in PLANNERS:
        raise InputError(f"no planner {planner!r}", where="--planner", hint=f"one of {', '.join(PLANNERS)}")
    if job.training.global_batch_size < 1:
        raise InputError(
            "the global batch size is not known: it would change with the plan",
            where="global_batch_size",
            hint="give --global-batch-size",
        )
    if problem is None:
        problem = pose_for(job, cluster, backend, settings)
    return search_exact(
        problem,
        planner=planner,
        backend=backend,
        top=top,
        time_limit_s=time_limit_s,
        uniform=planner == "uniform",
        progress=progress,
        started=began,
    )


def pose_for(
    job: JobSpec,
    cluster: Cluster,
    backend: str = "megatron",
    settings: Iterable[str] = (),
    menu: tuple[Recompute, ...] | None = None,
) -> Problem:
    """The space of ``job`` on ``cluster`` under the capabilities of ``backend``, priced.

    ``menu``: recomputation choices per layer, "none" first and "full" last; None: the back end's.
    """
    menu = menu or recompute_menu(job, tuple(capabilities(backend).recompute_modules))
    pins = parse_pins(settings, [pool.name for pool in cluster.pools])
    return pose(job, cluster, menu, pins)
