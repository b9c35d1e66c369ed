"""``hapmoe compare`` on a terminal: who finds what, and what each restriction costs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hapmoe.cluster import Cluster
from hapmoe.compare import Compared, Row
from hapmoe.job import JobSpec
from hapmoe.terminal import cell, item, make_table, say
from hapmoe.units import format_seconds
from hapmoe.wording import describe_job, describe_pools, describe_slowdown, format_percent

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["render_comparison"]


def render_comparison(compared: Compared, job: JobSpec, cluster: Cluster) -> RenderableType:
    """Both tables, then the reasons of planners without a plan."""
    from rich.console import Group

    best = compared.best_s
    parts: list[RenderableType] = [say(describe_job(job), style="bold"), say(f"on {describe_pools(cluster)}"), ""]
    parts += [_show_rows(compared, best), ""]
    parts += [item(f"{row.planner}: {row.what}") for row in compared.rows]
    if excuses := [row for row in compared.rows if row.reason]:
        parts += ["", say("Remarks", style="bold")]
        parts += [item(f"{row.planner}: {row.reason}") for row in excuses]
    if compared.losses and best:
        parts += ["", _show_losses(compared, best), _explain(compared, best)]
    return Group(*parts)


def _show_rows(compared: Compared, best: float | None) -> RenderableType:
    table = make_table("planner", "step", "slower", "it believed", "MFU", "peak memory", "search")
    for column in table.columns[1:]:
        column.justify = "right"
        column.no_wrap = True
    table.columns[0].no_wrap = True
    for row in compared.rows:
        step = format_seconds(row.step_s) if row.step_s else "no plan"
        if row.status == "cost only":
            step = f"({step})"
        slower = describe_slowdown(best, row.step_s) if best and row.step_s and row.planner != "exact" else "-"
        table.add_row(
            cell(row.planner, style="bold" if row.planner == "exact" else "none"),
            step,
            slower,
            _belief(row),
            format_percent(row.mfu) if row.mfu else "-",
            f"{row.memory_bytes / 2**30:.1f} GiB" if row.memory_bytes else "-",
            format_seconds(row.wall_s) if row.wall_s else "-",
        )
    return table


def _belief(row: Row) -> str:
    if row.believed_s is None:
        return "-"
    if row.step_s and abs(row.believed_s / row.step_s - 1) < 5e-4:
        return "same"
    return format_seconds(row.believed_s)


def _show_losses(compared: Compared, best: float) -> RenderableType:
    table = make_table("the exact search restricted to", "step", "longer")
    for column in table.columns[1:]:
        column.justify = "right"
        column.no_wrap = True
    for loss in compared.losses:
        step = format_seconds(loss.step_s) if loss.step_s else "nothing fits"
        table.add_row(cell(loss.name), step, describe_slowdown(best, loss.step_s) if loss.step_s else "-")
    return table


def _explain(compared: Compared, best: float) -> RenderableType:
    """One sentence: the freedom that the best plan can least do without."""
    single = [loss for loss in compared.losses if not loss.name.startswith("both")]
    costly = [loss for loss in single if loss.step_s and loss.step_s > best * 1.0005]
    if stuck := [loss.name for loss in compared.losses if loss.step_s is None]:
        return say(f"Nothing fits with {stuck[0]}.")
    if not costly:
        return say("No single restriction costs anything here: the best plan is a uniform one.")
    worst = max(costly, key=lambda loss: loss.step_s or 0.0)
    change = describe_slowdown(best, worst.step_s or best).lstrip("+")
    return say(f"What matters most here: with {worst.name} a step takes {change} longer.")
