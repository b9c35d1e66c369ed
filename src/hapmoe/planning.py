"""The main job in one call: a job and a cluster in, a finished plan with its comparisons out."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from hapmoe import backends
from hapmoe.cluster import Cluster
from hapmoe.cost import evaluate, timeline
from hapmoe.job import JobSpec
from hapmoe.launch.verdict import runnable_by, verdict
from hapmoe.plan import Compared, Estimate, Plan, SearchResult
from hapmoe.planfile import dump_plan
from hapmoe.present import present_plan
from hapmoe.rules.hetero import remarks
from hapmoe.runnable import LOOK_AT, back_end_settings, legal_first, needs_look
from hapmoe.search import Problem, Progress, Restrictions, pose_for, search, seeker_for, split_settings
from hapmoe.search.pareto import fewer_devices, less_memory
from hapmoe.search.per_pool import degrees_may_differ
from hapmoe.search.state import NO_TIME
from hapmoe.search.usage import Seeker
from hapmoe.summary import Comparison

UPSTREAM, UNEQUAL = "megatron", "megatron-hetero"

__all__ = ["Planned", "artefacts", "plan_job", "report_of", "trace_of"]


COMPARED_S = 10.0
"""How long the uniform plan of the comparison is looked for at the most, where no time limit is given."""


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
    restrictions: Restrictions | None = None,
    objective: str = "step",
    pareto: bool = False,
) -> Planned:
    """Search, then score the best uniform plan and the script's own degrees with the same oracle.

    ``pareto``: also what fewer devices and less memory would take.
    """
    began = time.perf_counter()
    settings = (*settings, *back_end_settings(job, backend))
    problem = pose_for(job, cluster, backend, split_settings(planner, settings)[1])
    result = search(
        job,
        cluster,
        planner=planner,
        backend=backend,
        settings=settings,
        restrictions=restrictions,
        objective=objective,
        top=max(top, LOOK_AT) if needs_look(job, backend) else top,
        time_limit_s=time_limit_s,
        progress=progress,
        problem=problem,
    )
    if result.plan is None or result.estimate is None:
        return Planned(result, ())
    if needs_look(job, backend):
        even = search(
            job, cluster, planner="uniform", backend=backend, problem=problem, top=1, time_limit_s=time_limit_s
        )
        result = legal_first(job, cluster, result, top, otherwise=even)
        assert result.plan is not None and result.estimate is not None
    if pareto:
        seeker = seeker_for(job, cluster, backend, restrictions, time_limit_s, started=began)
        result = msgspec.structs.replace(result, pareto=_slower(problem, result, seeker))
    plan = _finish(job, cluster, result)
    ranked = ((plan, result.estimate), *result.ranked[1:])
    result = msgspec.structs.replace(result, plan=plan, ranked=ranked)
    if not compare:
        return Planned(result, ())
    try:
        found = _comparisons(job, cluster, problem, backend, settings, time_limit_s)
    except KeyboardInterrupt:  # the plan is in hand; it is told without what it compares to
        return Planned(result, ())
    told = tuple(Compared(name=one.name, step_s=one.step_s, note=one.note or "") for one in found)
    plan = msgspec.structs.replace(plan, comparisons=told)
    return Planned(msgspec.structs.replace(result, plan=plan, ranked=((plan, ranked[0][1]), *ranked[1:])), found)


def _slower(problem: Problem, result: SearchResult, seeker: Seeker) -> tuple[tuple[Plan, Estimate], ...]:
    """The fastest plans on fewer devices, then those with less memory."""
    assert result.plan is not None and result.estimate is not None
    best = result.plan, result.estimate
    return (*fewer_devices(problem, best, seeker), *less_memory(problem, best, seeker))


def _comparisons(
    job: JobSpec,
    cluster: Cluster,
    problem: Problem,
    backend: str,
    settings: tuple[str, ...],
    time_limit_s: float | None,
) -> tuple[Comparison, ...]:
    """The best uniform plan, the script's own degrees and, asked for, other back ends."""
    limit_s = COMPARED_S if time_limit_s is None else time_limit_s
    uniform = search(job, cluster, planner="uniform", backend=backend, problem=problem, top=1, time_limit_s=limit_s)
    step = uniform.estimate.step_s if uniform.estimate else None
    note = "equal layers, one recomputation for all stages" if uniform.estimate else "no uniform plan fits"
    if uniform.gap > 0 or (uniform.report is not None and NO_TIME in uniform.report.reasons):
        note = f"the best found within {limit_s:g} s" if uniform.estimate else f"none found within {limit_s:g} s"
    others: tuple[Comparison, ...] = ()
    if degrees_may_differ(job, cluster, backend):
        same = search(
            job,
            cluster,
            backend=backend,
            problem=problem,
            top=1,
            time_limit_s=time_limit_s,
            restrictions=Restrictions(uniform_degrees=True),
        )
        alike = same.estimate.step_s if same.estimate else None
        others = (Comparison("the same degrees on all stages", alike, "layers and recomputation per stage"),)
    elif backend == UPSTREAM and degrees_may_differ(job, cluster, UNEQUAL):
        # its search takes several times as long as this one: said, not searched
        asked = f"--backend {UNEQUAL} (experimental) tells"
        others = (Comparison("degrees of each pool's own", None, asked, missing="not searched"),)
    if backend == "any":
        others += tuple(_by_back_end(job, cluster, settings, time_limit_s))
    return Comparison("best uniform plan", step, note), _own_degrees(job, cluster), *others


def _finish(job: JobSpec, cluster: Cluster, result: SearchResult) -> Plan:
    """The plan with everything that plan.json tells: estimate, certificate, alternatives, inputs."""
    assert result.plan is not None
    plan = result.plan
    plan = _first_that_runs(job, cluster, plan)
    launchable, reason = verdict(job, cluster, plan)
    said = remarks(job, cluster, plan, backends.capabilities(plan.backend))
    return msgspec.structs.replace(
        plan,
        notes=(*plan.notes, *said),
        launchable=launchable,
        launch_reason=None if launchable else reason,
        pareto=tuple(msgspec.structs.replace(other, estimate=estimate) for other, estimate in result.pareto),
        alternatives=tuple(msgspec.structs.replace(other, estimate=estimate) for other, estimate in result.ranked[1:]),
        estimate=result.estimate,
        search=result.report,
        inputs=_inputs(job, cluster),
    )


def _inputs(job: JobSpec, cluster: Cluster) -> dict[str, str]:
    """What the plan was made from; tables only where there were any."""
    measured = {"tables_sha256": cluster.tables_sha256} if cluster.tables_sha256 else {}
    return {"job_sha256": job.sha256, "cluster_sha256": cluster.sha256} | measured


def _first_that_runs(job: JobSpec, cluster: Cluster, plan: Plan) -> Plan:
    """A plan for any back end, given to the first one that starts it."""
    if backends.capabilities(plan.backend).module:
        return plan
    found = runnable_by(job, cluster, plan).items()
    runs = [name for name, reason in found if not reason and not backends.capabilities(name).own_target]
    return msgspec.structs.replace(plan, backend=runs[0]) if runs else plan


def _by_back_end(
    job: JobSpec, cluster: Cluster, settings: Iterable[str], time_limit_s: float | None
) -> Iterator[Comparison]:
    """What each real back end reaches by itself, beside the union of all."""
    for name, capability in backends.BACKENDS.items():
        if not capability.module or name.endswith("-patched"):
            continue
        own = (*settings, *back_end_settings(job, name))
        found = search(job, cluster, backend=name, settings=own, top=LOOK_AT, time_limit_s=time_limit_s)
        if found.plan is not None:
            found = legal_first(job, cluster, found, 1)
        if found.plan is None or found.estimate is None:
            yield Comparison(f"best plan of {name}", None, "no plan fits")
            continue
        possible, reason = verdict(job, cluster, found.plan)
        yield Comparison(f"best plan of {name}", found.estimate.step_s, "" if possible else f"not launchable: {reason}")


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
    files = dict(launch.target(target, plan.backend)(job, cluster, plan, dump_plan(plan)))
    start = launch.STARTS[target]
    commands = [shlex.join(command), start] if command else [start]
    files["report.html"] = render(planned.result, job, cluster, events, planned.comparisons, commands=commands)
    files["trace.json"] = chrome_trace(events, plan)
    return files


def report_of(job: JobSpec, cluster: Cluster, plan: Plan) -> str:
    """The report of any plan, estimated anew: what it says is of this job on this cluster."""
    from hapmoe.report import render
    from hapmoe.rules import check

    broken = check(job, cluster, plan)
    plan = msgspec.structs.replace(plan, estimate=evaluate(job, cluster, plan))
    return render(plan, job, cluster, timeline(job, cluster, plan), violations=broken)


def trace_of(job: JobSpec, cluster: Cluster, plan: Plan) -> str:
    """The timeline of a step of any plan, as ``trace.chrome_trace`` writes it."""
    from hapmoe.trace import chrome_trace

    return chrome_trace(timeline(job, cluster, plan), plan)
