"""The commands that look: discover (what devices are here), report and trace (a plan once more)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from hapmoe.cli_launch import reads_plan
from hapmoe.cli_options import SCRIPT, as_json, for_version, read_cluster, read_job, takes_cluster, takes_tables

if TYPE_CHECKING:
    from hapmoe.cluster import Cluster
    from hapmoe.job import JobSpec
    from hapmoe.plan import Plan

__all__ = ["discover", "report", "trace"]


@click.command()
@click.option("--from", "source", metavar="S", help="slurm, kubernetes or here (default: the first with devices).")
@click.option("--out", metavar="FILE", help="Write cluster.yaml there instead of printing it.")
@as_json
def discover(source: str | None, out: str | None, as_json: bool) -> int:
    """Write a cluster.yaml from what is here: Slurm, Kubernetes, or this node's own devices.

    What it could not learn stands in comments. `hapmoe discover --out cluster.yaml`
    """
    from hapmoe.discovery import SOURCES
    from hapmoe.discovery import discover as look
    from hapmoe.errors import InputError
    from hapmoe.wholefile import write_whole

    if source is not None and source not in SOURCES:
        raise InputError(f"no source {source!r}", where="--from", hint=f"one of {', '.join(SOURCES)}")
    found = look((source,) if source else tuple(SOURCES))
    if as_json:
        import json

        click.echo(json.dumps(found.document(), indent=1))
    if found.pools and out:
        write_whole(out, found.yaml(), replace=False)
        if not as_json:
            click.echo(f"{out} written, from {found.answer.source}; look through it")
    elif found.pools and not as_json:
        click.echo(found.yaml(), nl=False)
    elif not as_json:
        click.echo("\n".join((*found.unknown, *found.silent)) or "No devices found.")
    return 0 if found.pools else 1


@click.command(context_settings=SCRIPT)
@reads_plan
@takes_cluster
@takes_tables
@click.option("--out", default="report.html", metavar="FILE", help="Where the report goes.", show_default=True)
@click.option("--force", is_flag=True, help="Replace FILE.")
@for_version
@as_json
def report(plan_file: str, out: str, force: bool, as_json: bool, **reading: Any) -> int:
    """Write the report of PLAN, estimated once more: one HTML file that works offline.

    `hapmoe report hapmoe-plan/plan.json --script train.sh --cluster cluster.yaml`
    """
    from hapmoe.planning import report_of

    job, cluster, plan = _read(plan_file, "report", reading)
    return _write(out, report_of(job, cluster, plan), force, as_json)


@click.command(context_settings=SCRIPT)
@reads_plan
@takes_cluster
@takes_tables
@click.option("--out", default="trace.json", metavar="FILE", help="Where the trace goes.", show_default=True)
@click.option("--force", is_flag=True, help="Replace FILE.")
@for_version
@as_json
def trace(plan_file: str, out: str, force: bool, as_json: bool, **reading: Any) -> int:
    """Write the timeline of a step of PLAN, for ui.perfetto.dev."""
    from hapmoe.planning import trace_of

    job, cluster, plan = _read(plan_file, "trace", reading)
    return _write(out, trace_of(job, cluster, plan), force, as_json)


def _read(plan_file: str, command: str, reading: dict[str, Any]) -> tuple[JobSpec, Cluster, Plan]:
    from hapmoe.errors import InputError
    from hapmoe.planfile import load_plan

    script, args = reading.pop("script"), reading.pop("args")
    if script is None:
        hint = f"hapmoe {command} PLAN --script train.sh --cluster cluster.yaml"
        raise InputError("no script", where=command, hint=hint)
    cluster = read_cluster(reading.pop("cluster_file"), reading.pop("table_folders"))
    plan = load_plan(plan_file)
    return read_job(script, args, **reading), cluster, plan


def _write(out: str, text: str, force: bool, as_json: bool) -> int:
    import json

    from hapmoe.wholefile import write_whole

    path = write_whole(out, text, replace=force)
    click.echo(json.dumps({"written": str(path)}) if as_json else f"{path} written")
    return 0
