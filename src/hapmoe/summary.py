"""The answer on a terminal: short, in words, readable without colours and at 80 columns.

Every ``render_*`` returns something that ``rich.console.Console.print`` shows; nothing is printed here.
rich is imported inside functions, so that importing this module costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from hapmoe.cluster import Cluster
from hapmoe.job import JobSpec
from hapmoe.plan import Estimate, Plan, SearchReport, SearchResult, StageEstimate, Violation
from hapmoe.resolve import resolve
from hapmoe.summary_inputs import render_devices, render_job
from hapmoe.terminal import cell, item, make_table, say, show_pairs
from hapmoe.units import format_bytes, format_seconds
from hapmoe.wording import (
    DEGREES,
    clean,
    describe_certificate,
    describe_difference,
    describe_job,
    describe_layers,
    describe_misfits,
    describe_nodes,
    describe_objective,
    describe_pools,
    describe_ranks,
    describe_recompute,
    describe_slowdown,
    describe_sources,
    describe_speedup,
    format_percent,
    format_ranges,
    list_alternatives,
    list_caveats,
)

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

__all__ = [
    "Comparison",
    "render_devices",
    "render_estimate",
    "render_infeasible",
    "render_job",
    "render_plan",
]

_GROUP_ABOVE = 8
"""Pipelines longer than this show equal neighbouring stages as one row."""
_BAR_CELLS = 10


@dataclass(frozen=True)
class Comparison:
    """Another way to run the same job, scored by the same oracle."""

    name: str
    """``best uniform plan``, ``the script's own degrees`` …"""
    step_s: float | None
    """None: ``missing`` and ``note`` say why."""
    note: str = ""
    missing: str = "not comparable"


def render_plan(
    result: SearchResult,
    job: JobSpec,
    cluster: Cluster,
    comparisons: Sequence[Comparison] = (),
    elapsed: float = 0.0,
    *,
    written: Sequence[tuple[str, str]] = (),
    next_command: str = "",
) -> RenderableType:
    """The summary of ``hapmoe plan``.

    ``elapsed`` is the whole command's wall time in seconds; ``written`` holds (path, what it is).
    """
    if result.plan is None or result.estimate is None:
        return render_infeasible(result)
    from rich.console import Group

    plan, estimate = resolve(job, cluster, result.plan), result.estimate
    search = result.report or plan.search or SearchReport(status=result.status, gap=result.gap)
    parts: list[RenderableType] = [
        say(describe_job(job), style="bold"),
        say(f"on {describe_pools(cluster)}"),
        "",
        *_show_configuration(plan, estimate, job),
        "",
        _show_search(estimate, search, elapsed),
    ]
    if comparisons:
        parts += ["", _show_comparisons(comparisons, estimate.step_s)]
    if others := list_alternatives(result, job, cluster):
        parts += ["", _show_alternatives(plan, estimate, others)]
    if result.pareto:
        parts += ["", _show_pareto(plan, estimate, result.pareto)]
    parts += _show_caveats(plan, estimate, job, cluster)
    if not plan.launchable:
        reason = plan.launch_reason or f"the {plan.backend} back end cannot express it"
        parts += ["", say(f"Not launchable as it stands: {reason}", style="bold")]
    if written:
        parts += ["", show_pairs("Written", written)]
    if next_command:
        parts += ["", say("Next: ", next_command, style="bold")]
    return Group(*parts)


def render_estimate(
    plan: Plan,
    estimate: Estimate,
    job: JobSpec,
    cluster: Cluster,
    violations: Sequence[Violation] = (),
) -> RenderableType:
    """The summary of ``hapmoe predict``: verdict first, then the figures."""
    from rich.console import Group

    plan = resolve(job, cluster, plan)
    misfits = describe_misfits(plan, estimate)
    parts: list[RenderableType] = [
        say(describe_job(job), style="bold"),
        say(f"on {describe_pools(cluster)}"),
        "",
        _judge(violations, misfits),
    ]
    parts += [_show_violation(violation) for violation in violations]
    parts += [item(line) for line in misfits]
    parts += ["", *_show_configuration(plan, estimate, job)]
    parts += _show_caveats(plan, estimate, job, cluster)
    return Group(*parts)


def render_infeasible(result: SearchResult) -> RenderableType:
    """Why there is no plan: the nearest misses, and what the rules cut off."""
    from rich.console import Group

    report = result.report or SearchReport(status="infeasible")
    took = f" in {format_seconds(report.wall_s)}" if report.wall_s else ""
    parts: list[RenderableType] = [
        say("No plan fits.", style="bold red"),
        say(f"{report.considered:,} configurations considered{took}; none is legal and fits into memory."),
    ]
    from hapmoe.search.misses import HELP

    helps = [reason.removeprefix(HELP) for reason in report.reasons if reason.startswith(HELP)]
    misses = [reason for reason in report.reasons if not reason.startswith(HELP)]
    if misses:
        parts += ["", say("Nearest misses", style="bold"), *(item(reason) for reason in misses)]
    if report.pruned:
        parts += ["", _show_pruned(report)]
    if helps:
        parts += ["", say("What would help, each alone", style="bold"), *(item(text) for text in helps)]
    else:
        usual = "more devices, the distributed optimizer, shorter sequences, or fewer --set options"
        parts += ["", say(f"What usually helps: {usual}.")]
    return Group(*parts)


# ---------------------------------------------------------------- a configuration


def _show_configuration(plan: Plan, estimate: Estimate, job: JobSpec) -> list[RenderableType]:
    shape = [f"{plan.pp} stage{'s' * (plan.pp > 1)}"]
    if plan.vpp > 1:
        shape.append(f"{plan.vpp} virtual stages each")
    shape.append(f"{plan.num_microbatches:,} x microbatch {plan.micro_batch_size}")
    figures = [
        f"{format_seconds(estimate.step_s)} per step",
        f"{estimate.tokens_per_s:,.0f} tokens/s",
        f"{estimate.tflop_per_s_per_device:.0f} TFLOP/s per device",
        f"MFU {format_percent(estimate.mfu)}",
        f"bubble {format_percent(estimate.bubble_fraction)}",
        f"exposed communication {format_percent(estimate.exposed_comm_fraction)}",
    ]
    groups = _group_stages(plan)
    legend = "E embedding, H head and loss" + (", MTP multi-token prediction" if job.model.mtp_layers else "")
    if len(groups) < plan.pp:
        legend += "; of equal stages the fullest and the slowest is shown"
    return [
        say(", ".join(figures[:3]), style="bold green"),
        say(", ".join(figures[3:])),
        say(", ".join(shape)),
        "",
        _show_placement(plan, groups),
        "",
        _show_costs(estimate, groups),
        say(legend, style="dim"),
    ]


def _group_stages(plan: Plan) -> list[list[int]]:
    """Stages by row: each alone, or runs of equal ones in a long pipeline (first and last stay alone)."""
    indices = range(plan.pp)
    if plan.pp <= _GROUP_ABOVE:
        return [[index] for index in indices]

    def look(index: int) -> tuple[object, ...]:
        stage = plan.stages[index]
        end = index if index in (0, plan.pp - 1) else -1
        degrees = tuple(getattr(stage, axis) for axis in DEGREES)
        return (end, stage.pool, degrees, stage.num_layers, stage.mtp_layers, stage.recompute)

    return [list(run) for _, run in groupby(indices, key=look)]


def _show_placement(plan: Plan, groups: Sequence[Sequence[int]]) -> RenderableType:
    table = make_table("stage", "where", "ranks", "layers", *DEGREES, "recompute")
    for column in table.columns[4 : 4 + len(DEGREES)]:
        column.justify = "right"
        column.no_wrap = True
    for group in groups:
        stage = plan.stages[group[0]]
        last = plan.stages[group[-1]]
        place = ", ".join(part for part in (stage.pool, describe_nodes(stage) if len(group) == 1 else "") if part)
        ranks = describe_ranks(stage)
        layers = describe_layers(plan, group[0])
        if len(group) > 1:
            ranks = f"{stage.first_rank}-{describe_ranks(last).split('-')[-1]}"
            layers = f"{stage.num_layers} each"
        elif stage.num_layers > 1 and plan.vpp == 1:
            layers += f" ({stage.num_layers})"
        degrees = (str(getattr(stage, axis)) for axis in DEGREES)
        table.add_row(
            format_ranges(group), cell(place), ranks, layers, *degrees, cell(describe_recompute(stage.recompute))
        )
    return table


def _show_costs(estimate: Estimate, groups: Sequence[Sequence[int]]) -> RenderableType:
    table = make_table("stage", "memory used / limit", "forward", "backward", "exposed", "bound by")
    for column in table.columns[2:5]:
        column.justify = "right"
        column.no_wrap = True
    for group in groups:
        costs = [estimate.stages[index] for index in group]
        fullest = max(costs, key=lambda cost: cost.memory_bytes / max(cost.memory_limit_bytes, 1))
        slowest = max(costs, key=lambda cost: cost.forward_s + cost.backward_s)
        table.add_row(
            format_ranges(group),
            _show_memory(fullest),
            format_seconds(slowest.forward_s),
            format_seconds(slowest.backward_s),
            format_seconds(slowest.exposed_comm_s) if slowest.exposed_comm_s else "none",
            cell(slowest.bound_by or "-"),
        )
    return table


def _show_memory(cost: StageEstimate) -> Text:
    """``########.. 63.0 / 74.0 GiB 86 %``: plain characters, so that it survives every terminal.

    A full bar means full; what does not fit ends in ``!``.
    """
    share = cost.memory_bytes / cost.memory_limit_bytes if cost.memory_limit_bytes else 0.0
    cells = min(_BAR_CELLS, int(share * _BAR_CELLS + 1e-9))
    used, limit = cost.memory_bytes / 2**30, cost.memory_limit_bytes / 2**30
    over = share > 1
    text = cell(f"{'#' * cells}{'.' * (_BAR_CELLS - cells)}", style="red" if over else "green")
    text.append(f" {used:.1f} / {limit:.1f} GiB {share * 100:.0f} %{'!' * over}", style="red" if over else "none")
    return text


# ---------------------------------------------------------------- search, comparisons, caveats


def _show_search(estimate: Estimate, search: SearchReport, elapsed: float) -> RenderableType:
    sentence = describe_certificate(estimate, search)
    parts = [describe_objective(estimate, search), sentence[0].upper() + sentence[1:] + "."]
    if search.considered:
        cut = sorted(search.pruned.items(), key=lambda item: -item[1])
        words = ", ".join(f"{count:,} by {clean(rule)}" for rule, count in cut[:4])
        more = f" and {len(cut) - 4} more rules" if len(cut) > 4 else ""
        parts.append(f"{search.considered:,} configurations considered" + (f"; cut: {words}{more}." if cut else "."))
    if estimate.ideal_s:
        parts.append(f"With nothing exposed and perfect balance a step would take {format_seconds(estimate.ideal_s)}.")
    if elapsed:
        parts.append(f"The command took {format_seconds(elapsed)}.")
    return say(" ".join(part for part in parts if part))


def _show_comparisons(comparisons: Sequence[Comparison], step_s: float) -> RenderableType:
    table = make_table("this plan against", "step", "this plan is", "note")
    table.columns[1].justify = "right"
    for other in comparisons:
        if other.step_s is None:
            table.add_row(cell(other.name), "-", other.missing, cell(other.note))
        else:
            speed = cell(describe_speedup(step_s, other.step_s), style="bold")
            table.add_row(cell(other.name), format_seconds(other.step_s), speed, cell(other.note))
    return table


def _show_alternatives(plan: Plan, estimate: Estimate, others: Sequence[tuple[Plan, Estimate]]) -> RenderableType:
    table = make_table("next best", "step", "longer", "what it does differently")
    for column in table.columns[:3]:
        column.justify = "right"
        column.no_wrap = True
    for rank, (other, cost) in enumerate(others, start=2):
        slower = describe_slowdown(estimate.step_s, cost.step_s)
        table.add_row(str(rank), format_seconds(cost.step_s), slower, describe_difference(plan, other))
    return table


def _show_pareto(plan: Plan, estimate: Estimate, others: Sequence[tuple[Plan, Estimate]]) -> RenderableType:
    table = make_table("with less", "step", "longer", "devices", "fullest device")
    for column in table.columns[1:]:
        column.justify = "right"
    for other, cost in others:
        fewer = other.num_devices < plan.num_devices
        table.add_row(
            "devices" if fewer else "memory",
            format_seconds(cost.step_s),
            describe_slowdown(estimate.step_s, cost.step_s),
            str(other.num_devices),
            format_bytes(max(stage.memory_bytes for stage in cost.stages)),
        )
    return table


def _show_caveats(plan: Plan, estimate: Estimate, job: JobSpec, cluster: Cluster) -> list[RenderableType]:
    lines = list(list_caveats(plan, estimate, job, cluster))
    if sources := describe_sources(estimate.source_share):
        lines.insert(0, f"predicted time: {sources}")
    return ["", say("What this rests on", style="bold"), *(item(line) for line in lines)] if lines else []


def _show_pruned(report: SearchReport) -> RenderableType:
    table = make_table("cut by", "configurations")
    table.columns[1].justify = "right"
    for rule, count in sorted(report.pruned.items(), key=lambda item: -item[1]):
        table.add_row(cell(rule), f"{count:,}")
    return table


def _judge(violations: Sequence[Violation], misfits: Sequence[str]) -> Text:
    if not violations and not misfits:
        return say("Legal, and it fits.", style="bold green")
    problems = []
    if violations:
        problems.append(f"breaks {len(violations)} rule{'s' * (len(violations) > 1)}")
    if misfits:
        problems.append(f"does not fit into memory on {len(misfits)} stage{'s' * (len(misfits) > 1)}")
    sentence = f"This configuration {' and '.join(problems)}:"
    return say(sentence, style="bold red")


def _show_violation(violation: Violation) -> RenderableType:
    place = f"stage {violation.stage}: " if violation.stage is not None else ""
    hint = f"; {violation.hint}" if violation.hint else ""
    return item(f"{place}{violation.message}{hint} [{violation.rule}, {violation.source}]")
