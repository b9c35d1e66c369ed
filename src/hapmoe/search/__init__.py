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
from hapmoe.search.narrow import MANY, narrow
from hapmoe.search.objective import OBJECTIVES, rates_of, search_objective
from hapmoe.search.per_pool import degrees_may_differ, own_rules, search_per_pool
from hapmoe.search.pins import parse_pins
from hapmoe.search.problem import Problem, price_space
from hapmoe.search.restricted import Restrictions, search_restricted
from hapmoe.search.space import build_space
from hapmoe.search.usage import Seeker

__all__ = [
    "COST_ONLY",
    "OBJECTIVES",
    "PLANNERS",
    "Problem",
    "Progress",
    "Restrictions",
    "pose_for",
    "search",
    "seeker_for",
    "split_settings",
]


PLANNERS = {
    "exact": "certified optimal under the model",
    "uniform": "Megatron as tuned by hand: one set of degrees, equal layers, one recomputation for all stages",
    "hs-dp": "the HAPMoE paper's Algorithm 1; --set delta=0.2, --set eta=2",
    "alpa": "takes all devices for alike",
    "metis": "knows kinds, but dense layers only",
    "metis-style": "pipeline, data, tensor and context parallelism searched, experts as if homogeneous",
    "deepspeed-moe": "expert and data parallel, no pipeline search",
    "tutel": "the best expert degrees per layer, no global strategy",
}
"""What ``--planner`` takes, and what each is. All but ``exact`` restrict the same space or believe
something else about the cluster; the same oracle scores them all."""

COST_ONLY = {"hetermoe-style": "attention on one kind, experts on another: no back end runs it"}
"""Shown by ``hapmoe compare``, with a cost but no plan."""


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
    restrictions: Restrictions | None = None,
    objective: str = "step",
) -> SearchResult:
    """The fastest plan that ``backend`` can express, as ``planner`` sees it.

    ``problem`` saves pricing when it was posed before, with the same ``settings``. ``restrictions`` take
    something from the exact search. ``objective``: see ``OBJECTIVES``; "fastest" is then "cheapest".
    """
    began = time.perf_counter()
    settings = tuple(settings)
    _check(job, planner, restrictions)
    if objective != "step":
        _check_objective(cluster, planner, restrictions, objective)
    own, pins = split_settings(planner, settings)
    if planner not in ("exact", "uniform", "hs-dp"):
        from hapmoe.search.baselines import Case, search_baseline

        def posed(seen: JobSpec, on: Cluster, more: tuple[str, ...]) -> Problem:
            return pose_for(seen, on, backend, (*pins, *more))

        deadline = float("inf") if time_limit_s is None else began + time_limit_s
        return search_baseline(Case(job, cluster, posed, planner, backend, deadline), started=began)
    if problem is None:
        problem = pose_for(job, cluster, backend, pins)
    if planner == "hs-dp":
        from hapmoe.search.hsdp import search_hsdp

        return search_hsdp(problem, **own, backend=backend, top=top, time_limit_s=time_limit_s, started=began)
    if objective != "step":
        seeker = seeker_for(job, cluster, backend, restrictions, time_limit_s, started=began)
        fastest = search(
            job, cluster, backend=backend, problem=problem, restrictions=restrictions, time_limit_s=time_limit_s
        )
        return search_objective(problem, objective, seeker, fastest, top=top, started=began, progress=progress)
    if restrictions:
        return search_restricted(
            problem,
            restrictions,
            backend=backend,
            top=top,
            time_limit_s=time_limit_s,
            progress=progress,
            started=began,
        )
    apart = restrictions is None or not restrictions.uniform_degrees
    if planner == "exact" and apart and degrees_may_differ(job, cluster, backend):
        return search_per_pool(
            problem,
            planner=planner,
            backend=backend,
            top=top,
            time_limit_s=time_limit_s,
            progress=progress,
            started=began,
        )
    return search_exact(
        problem,
        planner=planner,
        backend=backend,
        top=top,
        time_limit_s=time_limit_s,
        uniform=planner == "uniform",
        legal=own_rules(backend),
        progress=progress,
        started=began,
    )


def _check(job: JobSpec, planner: str, restrictions: Restrictions | None) -> None:
    if planner in COST_ONLY:
        hint = "hapmoe compare shows what it would take"
        raise InputError(f"{planner} has a cost but no plan", where="--planner", hint=hint)
    if planner not in PLANNERS:
        raise InputError(f"no planner {planner!r}", where="--planner", hint=f"one of {', '.join(PLANNERS)}")
    if restrictions and planner != "exact":
        raise InputError(f"{planner} takes no restrictions", where="--planner", hint="they are for exact")
    if job.training.global_batch_size < 1:
        raise InputError(
            "the global batch size is not known: it would change with the plan",
            where="global_batch_size",
            hint="give --global-batch-size",
        )


def _check_objective(cluster: Cluster, planner: str, restrictions: Restrictions | None, objective: str) -> None:
    if planner != "exact" or restrictions:
        raise InputError(f"{objective} is minimized by exact alone, without restrictions", where="--objective")
    rates_of(cluster, objective)


def seeker_for(
    job: JobSpec,
    cluster: Cluster,
    backend: str,
    restrictions: Restrictions | None = None,
    time_limit_s: float | None = None,
    *,
    started: float,
) -> Seeker:
    """How plans on some of the nodes are searched for this job and back end."""
    apart = restrictions is None or not restrictions.uniform_degrees
    mixed = apart and degrees_may_differ(job, cluster, backend)
    deadline = float("inf") if time_limit_s is None else started + time_limit_s
    return Seeker("exact", backend, own_rules(backend), deadline, mixed)


OWN = {"hs-dp": ("delta", "eta")}
"""Settings of planners; all others are pins."""


def split_settings(planner: str, settings: tuple[str, ...]) -> tuple[dict[str, float], tuple[str, ...]]:
    """The planner's own settings by name, and the rest."""
    own: dict[str, float] = {}
    pins = []
    for setting in settings:
        key, equals, value = setting.partition("=")
        if key not in OWN.get(planner, ()) or not equals:
            pins.append(setting)
            continue
        try:
            own[key] = float(value)
        except ValueError:
            raise InputError("not a number", where=f"--set {setting}", hint=f"{key}=0.2") from None
        if not 0.0 <= own[key] < float("inf"):
            raise InputError("not a number of 0 or more", where=f"--set {setting}")
    return own, tuple(pins)


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
    menu = menu or recompute_menu(job, capabilities(backend).modules(job.training.megatron_version))
    pins = parse_pins(settings, [pool.name for pool in cluster.pools])
    space = build_space(job, cluster, pins)
    if len(space.options) > MANY:
        space = narrow(job, cluster, space, menu, pins)
    return price_space(job, cluster, space, menu, pins)
