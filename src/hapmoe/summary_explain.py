"""Where a predicted step goes, on a terminal: ``hapmoe predict --explain``.

rich is imported inside functions, so that importing this module costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hapmoe.cluster import Cluster
from hapmoe.cost import operations
from hapmoe.job import JobSpec
from hapmoe.plan import Estimate, Plan
from hapmoe.pricing import Line
from hapmoe.terminal import cell, make_table, say
from hapmoe.units import format_seconds
from hapmoe.wording import format_percent

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["parts_of_step", "render_explanation"]

_LEAST = 0.002
"""Operations below this share of the step are added up in one row."""


def parts_of_step(plan: Plan, estimate: Estimate, lines: Sequence[tuple[int, Line]], stage: int) -> dict[str, float]:
    """Seconds of the step on one stage, by what they are for; they add up to the step.

    ``lines``: what the stage does for a microbatch (``cost.operations``).
    """
    cost, microbatches = estimate.stages[stage], plan.num_microbatches
    passes = cost.forward_s + cost.backward_s
    host = sum(times * (line.forward_s + line.backward_s) for times, line in lines if line.bound == "host")
    sending = cost.busy_s - microbatches * passes - cost.grad_sync_s - cost.optimizer_s
    found = {
        "compute": microbatches * (passes - cost.recompute_s - cost.exposed_comm_s - host),
        "recomputation": microbatches * cost.recompute_s,
        "messages that nothing hides": microbatches * cost.exposed_comm_s,
        "the host issues kernels": microbatches * host,
        "sends between stages": sending,
        "waiting for other stages": estimate.step_s - cost.busy_s,
        "gradient reduction behind the last backward": cost.grad_sync_s,
        "optimizer and parameter gather": cost.optimizer_s,
    }
    return {name: seconds for name, seconds in found.items() if seconds > 1e-9}


def render_explanation(plan: Plan, estimate: Estimate, job: JobSpec, cluster: Cluster) -> RenderableType:
    """The step of the busiest stage, down to each operation: seconds, what is hidden, what bounds it, from where."""
    from rich.console import Group

    busy = [cost.busy_s for cost in estimate.stages]
    stage = busy.index(max(busy))
    lines = operations(job, cluster, plan, stage)
    where = f"on stage {stage}, the busiest" if plan.pp > 1 else "on every device"
    table = make_table("part", "seconds", "share")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, seconds in parts_of_step(plan, estimate, lines, stage).items():
        table.add_row(cell(name), format_seconds(seconds), format_percent(seconds / estimate.step_s))
    heading = f"Where the {format_seconds(estimate.step_s)} go {where}"
    one = f"One microbatch of {plan.num_microbatches:,} there, in order of time"
    return Group(
        say(heading, style="bold"),
        table,
        "",
        say(one, style="bold"),
        *_show_lines(lines, plan.num_microbatches / estimate.step_s),
    )


def _show_lines(lines: Sequence[tuple[int, Line]], per_second: float) -> list[RenderableType]:
    """``per_second``: share of the step that one second of a microbatch makes."""
    sources = {name for _, line in lines for name in line.sources}
    headings = ("operation", "times", "forward", "backward", "hidden", "of step", "bound by")
    table = make_table(*headings, *(("source",) if len(sources) > 1 else ()))
    for column in table.columns[1:6]:
        column.justify = "right"
        column.no_wrap = True
    ordered = sorted(lines, key=lambda entry: -entry[0] * (entry[1].forward_s + entry[1].backward_s))
    small = 0.0
    for times, line in ordered:
        share = times * (line.forward_s + line.backward_s) * per_second
        if share < _LEAST:
            small += share
            continue
        row = [
            cell(f"{line.block.replace(' layer', '')}: {line.name.replace('_', ' ')}"),
            cell(str(times)),
            *(
                cell(format_seconds(value) if value else "")
                for value in (line.forward_s, line.backward_s, line.hidden_s)
            ),
            cell(format_percent(share)),
            cell(line.bound),
        ]
        if len(sources) > 1:
            row.append(cell(", ".join(sorted(line.sources, key=lambda name: -line.sources[name]))))
        table.add_row(*row)
    if small:
        table.add_row("all others", "", "", "", "", format_percent(small))
    legend = "hidden: what other work covers, beside the seconds shown"
    if len(sources) == 1:
        legend += f"; source of all figures: {sources.pop()}"
    return [table, say(legend, style="dim")]
