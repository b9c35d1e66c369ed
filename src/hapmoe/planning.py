"""The main job in one call: a job and a cluster in, a finished plan with its comparisons out."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from hapmoe import backends
from hapmoe.cluster import Cluster
from hapmoe.cost import evaluate, timeline
from hapmoe.job import JobSpec
from hapmoe.plan import Plan, SearchResult
from hapmoe.planfile import dump_plan
from hapmoe.present import present_plan
from hapmoe.search import Progress, pose_for, search
from hapmoe.summary import Comparison

__all__ = ["Planned", "artefacts", "plan_job"]


@dataclass(frozen=True, slots=True)
class Planned:
    """What ``hapmoe plan`` found: the search's result and what it is held against."""

    result: SearchResult
    comparisons: tuple[Comparison, ...]


def plan_job(
    job: JobSpec,
    cluster: Cluster,
    *,
    planner: str = "exact",
    backend: str = "megatron",
    settings: Iterable[str] = (),
    top: int = 3,
    time_limit_s: float | None = None,
    progress: Progress | None = None,
    compare: bool = True,
) -> Planned:
    """Search, then score the best uniform plan and the script's own degrees with the same oracle."""
    problem = pose_for(job, cluster, backend, settings)
    result = search(
        job,
        cluster,
        planner=planner,
        backend=backend,
        top=top,
        time_limit_s=time_limit_s,
        progress=progress,
        problem=problem,
    )
    if result.plan is None or result.estimate is None:
        return Planned(result, ())
    plan = _finish(job, cluster, result)
    ranked = ((plan, result.estimate), *result.ranked[1:])
    result = msgspec.structs.replace(result, plan=plan, ranked=ranked)
    if not compare:
        return Planned(result, ())
    uniform = search(
        job, cluster, planner="uniform", backend=backend, problem=problem, top=1, time_limit_s=time_limit_s
    )
    step = uniform.estimate.step_s if uniform.estimate else None
    note = "equal layers, one recomputation for all stages" if uniform.estimate else "no uniform plan fits"
    comparisons = (Comparison("best uniform plan", step, note), _own_degrees(job, cluster))
    return Planned(result, comparisons)


def _finish(job: JobSpec, cluster: Cluster, result: SearchResult) -> Plan:
    """The plan with everything that plan.json tells: estimate, certificate, alternatives, inputs."""
    assert result.plan is not None
    plan = result.plan
    launchable, reason = False, f"back end {plan.backend!r} only evaluates plans"
    if backends.capabilities(plan.backend).module:
        launchable, reason = backends.load(plan.backend).launchable(job, cluster, plan)
    return msgspec.structs.replace(
        plan,
        launchable=launchable,
        launch_reason=None if launchable else reason,
        alternatives=tuple(msgspec.structs.replace(other, estimate=estimate) for other, estimate in result.ranked[1:]),
        estimate=result.estimate,
        search=result.report,
        inputs={"job_sha256": job.sha256, "cluster_sha256": cluster.sha256},
    )


def _own_degrees(job: JobSpec, cluster: Cluster) -> Comparison:
    """The script as it stands, with the largest dp that this cluster and the global batch allow."""
    name = "the script's own degrees"
    present = present_plan(job, cluster)
    if present.plan is None or present.violations:
        reason = present.violations[0].message if present.violations else present.note
        return Comparison(name, None, reason)
    estimate = evaluate(job, cluster, present.plan)
    if not estimate.fits:
        return Comparison(name, None, "does not fit into memory on this cluster")
    return Comparison(name, estimate.step_s, present.note)


def artefacts(
    job: JobSpec, cluster: Cluster, planned: Planned, *, target: str = "torchrun", command: Sequence[str] = ()
) -> dict[str, str]:
    """Every file of the output folder: relative path -> text."""
    from hapmoe import launch
    from hapmoe.report import render
    from hapmoe.trace import chrome_trace

    plan = planned.result.plan
    assert plan is not None
    events = timeline(job, cluster, plan)
    files = dict(launch.target(target)(job, cluster, plan, dump_plan(plan)))
    commands = [shlex.join(command), "./launch.sh"] if command else ["./launch.sh"]
    files["report.html"] = render(planned.result, job, cluster, events, planned.comparisons, commands=commands)
    files["trace.json"] = chrome_trace(events, plan)
    return files
