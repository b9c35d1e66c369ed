"""The report: one HTML file that works offline, on paper and without JavaScript.

``render`` is pure: the same values give the same text. Everything that is drawn is computed here and
in ``charts`` and ``meshes``; the template only places it. Autoescape is on, since model and pool
names come from other people's files, and the page's content policy allows no network and no script
but ours (by its hash).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from hapmoe.cluster import Cluster
from hapmoe.job import JobSpec
from hapmoe.plan import Estimate, Plan, SearchReport, SearchResult, StageEstimate, Violation
from hapmoe.resolve import resolve
from hapmoe.units import format_bytes, format_seconds
from hapmoe.wording import (
    DEGREES,
    clean,
    describe_certificate,
    describe_difference,
    describe_layers,
    describe_misfits,
    describe_nodes,
    describe_pools,
    describe_ranks,
    describe_recompute,
    describe_slowdown,
    describe_sources,
    describe_speedup,
    describe_workload,
    format_percent,
    list_alternatives,
    list_caveats,
)

if TYPE_CHECKING:
    from hapmoe.report.charts import Stack
    from hapmoe.schedule import Timeline
    from hapmoe.summary import Comparison

__all__ = ["render"]

_MEMORY = ("weights", "grads", "optimizer", "activations", "workspace")
_STEP = ("computation", "exposed communication", "gradient sync", "optimizer", "waiting")


@dataclass(frozen=True)
class _Figure:
    """One headline figure; ``value`` is the plan's own number, for whoever reads the page by program."""

    field: str
    label: str
    text: str
    value: float
    note: str = ""


def render(
    result_or_plan: SearchResult | Plan,
    job: JobSpec,
    cluster: Cluster,
    timeline: Timeline | None = None,
    comparisons: Sequence[Comparison] = (),
    *,
    violations: Sequence[Violation] = (),
    commands: Sequence[str] = (),
) -> str:
    """The whole page as text.

    A plan must carry its estimate. ``commands`` are the exact command lines that made the plan and
    that run it.
    """
    import jinja2

    folder = Path(__file__).parent
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder), autoescape=True, undefined=jinja2.StrictUndefined
    )
    environment.trim_blocks = environment.lstrip_blocks = True
    environment.filters |= {
        "bytes": format_bytes,
        "clean": clean,
        "percent": format_percent,
        "seconds": lambda value: format_seconds(value) if value else "none",
        "width": lambda fraction: f"{fraction * 100:.3f}".rstrip("0").rstrip(".") + "%",
    }
    script = (folder / "report.js").read_text(encoding="utf-8")
    values = _collect(result_or_plan, job, cluster, timeline, comparisons, violations)
    return environment.get_template("report.html.j2").render(
        values, commands=commands, script=script, script_hash=_hash_script(script)
    )


def _hash_script(script: str) -> str:
    """The script's hash as a Content-Security-Policy source."""
    from base64 import b64encode
    from hashlib import sha256

    return f"sha256-{b64encode(sha256(script.encode()).digest()).decode()}"


def _collect(
    result_or_plan: SearchResult | Plan,
    job: JobSpec,
    cluster: Cluster,
    timeline: Timeline | None,
    comparisons: Sequence[Comparison],
    violations: Sequence[Violation],
) -> dict[str, Any]:
    from hapmoe.report.charts import lay_out_timeline
    from hapmoe.report.meshes import describe_meshes

    result = _as_result(result_or_plan)
    assert result.plan is not None and result.estimate is not None
    plan, estimate, search = resolve(job, cluster, result.plan), result.estimate, result.report
    alternatives = list_alternatives(result, job, cluster)
    return {
        "title": clean(job.name),
        "subtitle": describe_workload(job),
        "hardware": describe_pools(cluster),
        "plan": plan,
        "estimate": estimate,
        "search": search,
        "certificate": describe_certificate(estimate, search) if search else "not searched: estimated as given",
        "figures": _list_figures(plan, estimate),
        "stages": _list_stages(plan, estimate),
        "degrees": DEGREES,
        "misfits": describe_misfits(plan, estimate),
        "violations": violations,
        "meshes": describe_meshes(
            plan, {pool.name: pool.devices_per_node for pool in cluster.pools}, moe=job.model.moe is not None
        ),
        "gantt": lay_out_timeline(timeline) if timeline else None,
        "timeline": timeline,
        "operations": _stack_operations(estimate),
        "step": _stack_step(plan, estimate),
        "memory": _stack_memory(estimate),
        "breakdown": _list_operations(estimate),
        "alternatives": [
            (index, cost, describe_slowdown(estimate.step_s, cost.step_s), describe_difference(plan, other))
            for index, (other, cost) in enumerate(alternatives, start=2)
        ],
        "comparisons": [
            (other, describe_speedup(estimate.step_s, other.step_s) if other.step_s else "not comparable")
            for other in comparisons
        ],
        "pruned": sorted(search.pruned.items(), key=lambda pair: -pair[1]) if search else [],
        "sources": sorted(estimate.source_share.items(), key=lambda pair: -pair[1]),
        "sources_sentence": describe_sources(estimate.source_share),
        "caveats": list_caveats(plan, estimate, job, cluster),
        "hashes": _list_hashes(plan, job, cluster),
    }


def _as_result(result_or_plan: SearchResult | Plan) -> SearchResult:
    """A plan read from a file as the result it came from: alternatives and search are inside it."""
    if isinstance(result_or_plan, SearchResult):
        if result_or_plan.plan is None or result_or_plan.estimate is None:
            raise ValueError("an infeasible result has no report")
        if result_or_plan.report:
            return result_or_plan
        found = result_or_plan.plan.search or SearchReport(status=result_or_plan.status, gap=result_or_plan.gap)
        return msgspec.structs.replace(result_or_plan, report=found)
    plan = result_or_plan
    if plan.estimate is None:
        raise ValueError("the plan carries no estimate: evaluate it first")
    ranked = tuple((other, other.estimate) for other in (plan, *plan.alternatives) if other.estimate)
    status = plan.search.status if plan.search else "feasible"
    return SearchResult(status=status, plan=plan, estimate=plan.estimate, ranked=ranked, report=plan.search)


def _list_figures(plan: Plan, estimate: Estimate) -> list[_Figure]:
    fullest = max(estimate.stages, key=lambda cost: cost.memory_bytes / max(cost.memory_limit_bytes, 1))
    filled = fullest.memory_bytes / max(fullest.memory_limit_bytes, 1)
    device = estimate.tflop_per_s_per_device
    hardware = estimate.hardware_tflop_per_s_per_device
    ideal = f"at best {format_seconds(estimate.ideal_s)}" if estimate.ideal_s else ""
    bound = f"proven bound {format_seconds(estimate.lower_bound_s)}" if estimate.lower_bound_s else ideal
    recomputed = f"{hardware:.0f} with recomputation" if hardware > device else "model FLOPs"
    return [
        _Figure("step_s", "step time", format_seconds(estimate.step_s), estimate.step_s, bound),
        _Figure("tokens_per_s", "tokens per second", f"{estimate.tokens_per_s:,.0f}", estimate.tokens_per_s, "in all"),
        _Figure("tflop_per_s_per_device", "TFLOP/s per device", f"{device:.0f}", device, recomputed),
        _Figure("mfu", "MFU", format_percent(estimate.mfu), estimate.mfu, "of the dense peak"),
        _Figure(
            "bubble_fraction", "bubble", format_percent(estimate.bubble_fraction), estimate.bubble_fraction, "waiting"
        ),
        _Figure(
            "exposed_comm_fraction",
            "exposed communication",
            format_percent(estimate.exposed_comm_fraction),
            estimate.exposed_comm_fraction,
            "inside stages",
        ),
        _Figure("memory", "fullest device", format_percent(filled), filled, format_bytes(fullest.memory_bytes)),
        _Figure("num_devices", "devices used", f"{plan.num_devices:,}", plan.num_devices, f"{plan.pp} stages"),
    ]


def _list_stages(plan: Plan, estimate: Estimate) -> list[dict[str, Any]]:
    return [
        {
            "index": index,
            "stage": stage,
            "cost": cost,
            "where": describe_nodes(stage),
            "ranks": describe_ranks(stage),
            "layers": describe_layers(plan, index),
            "recompute": describe_recompute(stage.recompute),
            "filled": cost.memory_bytes / max(cost.memory_limit_bytes, 1),
        }
        for index, (stage, cost) in enumerate(zip(plan.stages, estimate.stages, strict=True))
    ]


def _stack_operations(estimate: Estimate) -> Stack:
    """Seconds of one microbatch by operation; forward and backward where no breakdown was made."""
    from hapmoe.report.charts import stack_rows

    rows = [cost.breakdown or {"forward": cost.forward_s, "backward": cost.backward_s} for cost in estimate.stages]
    return stack_rows([{clean(name): value for name, value in row.items()} for row in rows], keep=9)


def _stack_step(plan: Plan, estimate: Estimate) -> Stack:
    """Where each stage's time goes in one step; what is left over is waiting for other stages."""
    from hapmoe.report.charts import stack_rows

    def split(cost: StageEstimate) -> dict[str, float]:
        busy = cost.busy_s or plan.num_microbatches * (cost.forward_s + cost.backward_s)
        exposed = min(plan.num_microbatches * cost.exposed_comm_s, busy)
        optimizer = cost.optimizer_s or estimate.optimizer_s
        waiting = estimate.step_s - busy - cost.grad_sync_s - optimizer
        return dict(zip(_STEP, (busy - exposed, exposed, cost.grad_sync_s, optimizer, max(waiting, 0.0)), strict=True))

    return stack_rows([split(cost) for cost in estimate.stages], order=_STEP)


def _stack_memory(estimate: Estimate) -> Stack:
    from hapmoe.report.charts import stack_rows

    rows = [{name: getattr(cost.memory, name) for name in _MEMORY} for cost in estimate.stages]
    return stack_rows(rows, order=_MEMORY, limits=[cost.memory_limit_bytes for cost in estimate.stages])


def _list_operations(estimate: Estimate) -> list[tuple[str, float, float, int]]:
    """(operation, mean seconds per stage and microbatch, share, stage with most of it), largest first."""
    sums: dict[str, list[float]] = {}
    for index, cost in enumerate(estimate.stages):
        for name, value in cost.breakdown.items():
            sums.setdefault(clean(name), [0.0] * len(estimate.stages))[index] += value
    total = sum(map(sum, sums.values())) or 1.0
    rows = [
        (name, sum(values) / len(values), sum(values) / total, values.index(max(values)))
        for name, values in sums.items()
    ]
    return sorted(rows, key=lambda row: -row[1])


def _list_hashes(plan: Plan, job: JobSpec, cluster: Cluster) -> list[tuple[str, str]]:
    hashes = {"job_sha256": job.sha256, "cluster_sha256": cluster.sha256} | plan.inputs
    return [(clean(name), clean(value)) for name, value in hashes.items() if value]
