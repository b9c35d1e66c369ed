"""The commands around launching: render, check, replan."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hapmoe.cli_options import (
    SCRIPT,
    as_json,
    for_version,
    read_cluster,
    read_job,
    show,
    takes_cluster,
    takes_routing,
    takes_tables,
    together,
)

if TYPE_CHECKING:
    from hapmoe.cluster import Cluster
    from hapmoe.job import JobSpec
    from hapmoe.plan import Plan

__all__ = ["check", "plan_and_job", "reads_plan", "render", "replan", "write_launch"]

reads_plan = together(
    click.argument("plan_file", metavar="PLAN"),
    click.argument("args", nargs=-1, type=click.UNPROCESSED),
    click.option("--script", metavar="FILE", help="The training script that the plan is for; ARGS are its own."),
    click.option("--env", "-e", "env", multiple=True, metavar="K=V", help="Environment variable for the script."),
    click.option(
        "--vocab-size", type=click.IntRange(min=1), metavar="N", help="Vocabulary, where the script has none."
    ),
    click.option("--global-batch-size", type=click.IntRange(min=1), metavar="N", help="Sequences per step, likewise."),
    click.option(
        "--imbalance", type=click.FloatRange(min=1.0), metavar="X", help="Hottest rank's share of tokens over the mean."
    ),
)
launches = together(
    click.option("--backend", metavar="B", help="What runs the plan (default: the plan's own)."),
    click.option("--target", default="torchrun", metavar="T", help="What starts it.", show_default=True),
    click.option("--options", metavar="FILE", help="Images, partitions, claims, variables: launch options."),
    click.option("--force", is_flag=True, help="Replace an earlier plan in DIR."),
)


@click.command(context_settings=SCRIPT)
@reads_plan
@takes_cluster
@launches
@click.option("--out", default="hapmoe-plan", metavar="DIR", help="Where the files go.", show_default=True)
@for_version
@as_json
def render(
    plan_file: str,
    args: tuple[str, ...],
    script: str | None,
    cluster_file: str,
    backend: str | None,
    target: str,
    options: str | None,
    force: bool,
    out: str,
    megatron_version: str | None,
    as_json: bool,
    **reading: Any,
) -> int:
    """Write the launch files of PLAN again, for another back end or launcher.

    `hapmoe render hapmoe-plan/plan.json --script train.sh --cluster cluster.yaml --target slurm --out slurm`
    """
    from hapmoe.checking import check_plan, render_check
    from hapmoe.clusterfile import load_cluster

    cluster = load_cluster(cluster_file)
    plan, job = plan_and_job(plan_file, script, args, backend, megatron_version, "render", reading)
    checked = check_plan(job, cluster, plan)
    if as_json:
        import json

        click.echo(json.dumps(checked.document(), indent=1))
    if checked.violations:
        if not as_json:
            click.echo(render_check(checked, job, cluster))
        return 1
    write_launch(job, cluster, checked.plan, target, options, out, force, quiet=as_json)
    if not checked.launchable and not as_json:
        click.echo(f"NOT LAUNCHABLE: {checked.reason}")
    return 0


@click.command(context_settings=SCRIPT)
@reads_plan
@click.option("--cluster", "cluster_file", metavar="FILE", help="cluster.yaml")
@click.option("--hosts", is_flag=True, help="Look at the machines of PLAN's folder too, without training.")
@click.option("--backend", metavar="B", help="Judge for another back end than the plan's.")
@for_version
@as_json
def check(
    plan_file: str,
    args: tuple[str, ...],
    script: str | None,
    cluster_file: str | None,
    hosts: bool,
    backend: str | None,
    megatron_version: str | None,
    as_json: bool,
    **reading: Any,
) -> int:
    """Is PLAN legal and runnable? Every rule with its source, offline; exit code 1 if not.

    With --hosts the launch folder of PLAN is asked as well: are all machines there, in order, with the
    right devices and equal versions, and does every group of ranks answer?
    """
    from hapmoe.checking import check_plan, render_check
    from hapmoe.clusterfile import load_cluster
    from hapmoe.errors import InputError

    if not hosts and (script is None or cluster_file is None):
        raise InputError("needs --script and --cluster", where="check", hint="or --hosts, to look at the machines only")
    good = True
    if script is not None and cluster_file is not None:
        cluster = load_cluster(cluster_file)
        plan, job = plan_and_job(plan_file, script, args, backend, megatron_version, "check", reading)
        checked = check_plan(job, cluster, plan)
        good = checked.good
        if as_json:
            import json

            click.echo(json.dumps(checked.document(), indent=1))
        else:
            click.echo(render_check(checked, job, cluster))
    if hosts and good:
        good = _look_at_hosts(Path(plan_file))
    return 0 if good else 1


@click.command(context_settings=SCRIPT)
@reads_plan
@takes_cluster
@takes_tables
@takes_routing
@click.option("--was", metavar="FILE", help="The routing profile that PLAN was made with: how far it has moved.")
@click.option("--horizon", type=click.IntRange(min=1), metavar="N", help="Steps that are left: does a switch pay back?")
@click.option("--switch-cost", default=600.0, type=click.FloatRange(min=0), metavar="S", help="Seconds it takes (600).")
@launches
@click.option("--set", "settings", multiple=True, metavar="K=V", help="Pin or bound the new plan.")
@click.option("--out", default="hapmoe-resume", metavar="DIR", help="Where the resume goes.", show_default=True)
@click.option("--time-limit", type=click.FloatRange(min=0.0), metavar="S", help="Stop the search after S seconds.")
@for_version
@as_json
def replan(
    plan_file: str,
    args: tuple[str, ...],
    script: str | None,
    cluster_file: str,
    table_folders: tuple[str, ...],
    backend: str | None,
    target: str,
    options: str | None,
    force: bool,
    settings: tuple[str, ...],
    out: str,
    time_limit: float | None,
    was: str | None,
    horizon: int | None,
    switch_cost: float,
    megatron_version: str | None,
    as_json: bool,
    **reading: Any,
) -> int:
    """Plan the rest of a run that trains under PLAN, for the cluster and the experts' load as they are now.

    Says whether the switch pays (within --horizon steps, where given) and whether the checkpoint can be
    loaded, and writes the launcher of the resume; exit code 1 where it cannot be.
    """
    import json

    from hapmoe.planning import plan_job
    from hapmoe.replanning import payback, resume_job, switch
    from hapmoe.units import format_seconds

    cluster = read_cluster(cluster_file, table_folders)
    routing = reading.get("routing")
    old, job = plan_and_job(plan_file, script, args, None, megatron_version, "replan", reading)
    moved = _moved(was, routing, old)
    planned = plan_job(
        job, cluster, backend=backend or old.backend, settings=settings, time_limit_s=time_limit, compare=False
    )
    new, estimate = planned.result.plan, planned.result.estimate
    if new is None or estimate is None:
        reasons = planned.result.report.reasons if planned.result.report else ()
        click.echo("\n".join(["No plan fits this cluster.", *reasons]))
        return 1
    found = switch(job, None, old, cluster, new)
    now_s = _step_now(job, cluster, old)
    gain = payback(now_s, estimate.step_s, switch_cost, horizon)
    if as_json:
        document = {"possible": found.possible, "obstacles": found.obstacles, "before": found.before}
        document |= {"flags": found.flags, "notes": found.notes, "same": found.same}
        document |= {"old_step_s": now_s, "new_step_s": estimate.step_s, "launchable": new.launchable}
        document |= {"pays": gain.pays, "pays_after_steps": gain.after_steps, "moved_layers": moved}
        click.echo(json.dumps(document, indent=1))
    else:
        old_said = format_seconds(now_s) if now_s is not None else "cannot run on this cluster"
        click.echo(f"Step time: the old plan {old_said}, the new one {format_seconds(estimate.step_s)}.")
        if moved is not None:
            click.echo(f"Routing has moved in {len(moved)} layers{f': {moved}' if moved else ''}.")
        click.echo(gain.said)
        for title, lines in (("Cannot resume", found.obstacles), ("First", found.before), ("Note", found.notes)):
            for line in lines:
                click.echo(f"{title}: {line}.")
        click.echo(f"Added arguments: {' '.join(found.flags)}")
    if not found.possible:
        return 1
    write_launch(resume_job(job, found), cluster, new, target, options, out, force, quiet=as_json)
    return 0


def _moved(was: str | None, routing: str | None, old: Plan) -> list[int] | None:
    """Layers whose experts' load is another one now; None: there are not two profiles to compare."""
    from hapmoe.errors import InputError
    from hapmoe.routing import DRIFT, drift, load_routing

    if was is None:
        return None
    if routing is None:
        raise InputError("needs --routing too", where="--was", hint="the profile as it is now")
    found = drift(load_routing(was), load_routing(routing), old.stages[0].ep if old.stages else 1)
    return [one.layer for one in found if one.beyond(DRIFT)]


def plan_and_job(
    plan_file: str,
    script: str | None,
    args: tuple[str, ...],
    backend: str | None,
    version: str | None,
    command: str,
    reading: dict[str, Any],
) -> tuple[Plan, JobSpec]:
    """The plan of a file, for a back end where one is given, and the job of its script."""
    import msgspec

    from hapmoe.backends import capabilities
    from hapmoe.errors import InputError
    from hapmoe.planfile import load_plan

    if script is None:
        hint = f"hapmoe {command} PLAN --script train.sh --cluster cluster.yaml"
        raise InputError("no script", where=command, hint=hint)
    plan = load_plan(plan_file)
    if backend is not None:
        capabilities(backend)
        plan = msgspec.structs.replace(plan, backend=backend)
    return plan, read_job(script, args, version, **reading)


def write_launch(
    job: JobSpec,
    cluster: Cluster,
    plan: Plan,
    target: str,
    options_file: str | None,
    out: str,
    force: bool,
    *,
    quiet: bool = False,
) -> None:
    """Write the launch folder of a plan, launchable or not."""
    import msgspec

    from hapmoe import launch
    from hapmoe.launch.options import load_options
    from hapmoe.launch.verdict import verdict
    from hapmoe.launch.write import write_files
    from hapmoe.planfile import dump_plan

    options = load_options(options_file) if options_file else None
    possible, reason = verdict(job, cluster, plan)
    plan = msgspec.structs.replace(plan, launchable=possible, launch_reason=None if possible else reason)
    files = launch.target(target, plan.backend)(job, cluster, plan, dump_plan(plan), options)
    folder = write_files(out, files, force=force)
    if not quiet:
        show(f"{folder}/ written; in it: {launch.STARTS[target]}")


def _step_now(job: JobSpec, cluster: Cluster, plan: Plan) -> float | None:
    """Seconds of a step of a plan on this cluster; None: it does not run there."""
    from hapmoe.cost import evaluate
    from hapmoe.rules import check as broken

    if broken(job, cluster, plan):
        return None
    estimate = evaluate(job, cluster, plan)
    return estimate.step_s if estimate.fits else None


def _look_at_hosts(plan_file: Path) -> bool:
    """Run the folder's own check on all its hosts; its page goes to standard error."""
    import subprocess

    from hapmoe.errors import InputError

    folder = (plan_file if plan_file.is_dir() else plan_file.parent).resolve()
    if (folder / "launch.sbatch").exists():
        raise InputError(
            "is a Slurm launch", where=str(plan_file), hint="HAPMOE_CHECK=only sbatch launch.sbatch looks at its nodes"
        )
    launcher = folder / "launch.sh"
    if not launcher.exists() or (folder / "jobset.yaml").exists():
        raise InputError("stands in no folder that can look at hosts", where=str(plan_file), hint="target torchrun")
    return subprocess.run([launcher, "--check"], check=False).returncode == 0
