"""The commands that measure: profile."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hapmoe.cli_options import SCRIPT, as_json, for_version, read_job, reads_script, show, takes_cluster

if TYPE_CHECKING:
    from hapmoe.cluster import Cluster, Pool
    from hapmoe.job import JobSpec
    from hapmoe.profiling.folder import PoolProfile
    from hapmoe.profiling.sends import Sends

__all__ = ["profile"]


class _OrScript(click.Group):
    """A group whose commands may be left out: anything else is a script."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in {*self.commands, "-h", "--help"}:
            args = ["script", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_OrScript, context_settings={"help_option_names": ["-h", "--help"]})
def profile() -> None:
    """Measure: SCRIPT's own layers in short runs of it, or kernels and collectives alone.

    `hapmoe profile train.sh --cluster cluster.yaml`
    """


@profile.command("script", context_settings=SCRIPT)
@reads_script
@takes_cluster
@click.option("--here", metavar="POOL", help="This machine is a node of POOL: measure its part now.")
@click.option("--out", default="hapmoe-profile", metavar="DIR", help="Where runs and results are.", show_default=True)
@click.option("--tables", default="hapmoe-tables", metavar="DIR", help="Where figures go.", show_default=True)
@click.option("--options", "options_file", metavar="FILE", help="Partitions, accounts, variables: launch options.")
@click.option("--time-limit", default=1800.0, type=click.FloatRange(min=1), metavar="S", help="Seconds per pool.")
@click.option("--timeout", default=600, type=click.IntRange(min=1), metavar="S", help="Seconds per run.")
@click.option("--dry-run", is_flag=True, help="Show the runs and stop.")
@for_version
@as_json
def profile_script(
    script: str,
    args: tuple[str, ...],
    cluster_file: str,
    here: str | None,
    out: str,
    tables: str,
    options_file: str | None,
    time_limit: float,
    timeout: int,
    dry_run: bool,
    megatron_version: str | None,
    as_json: bool,
    **reading: Any,
) -> int:
    """Measure SCRIPT's layers on each pool in a few short runs (the default of `hapmoe profile`).

    Writes a folder per pool with all its runs, runs it with --here, and puts whatever results are there into
    tables. Give the same command again after an interruption, or when results were brought back.
    """
    from hapmoe.clusterfile import load_cluster
    from hapmoe.launch.options import load_options
    from hapmoe.profiling.sends import between

    cluster = load_cluster(cluster_file)
    job = read_job(script, args, megatron_version, **reading)
    options = load_options(options_file) if options_file else None
    if here is not None:
        cluster.pool(here)
    failed = False
    document: list[dict[str, Any]] = []
    for pool in cluster.pools:
        folder = Path(out) / pool.name
        profile = _prepared(job, cluster, pool, folder, time_limit, timeout, options, dry_run)
        if not as_json:
            show(_render(profile, folder))
        if here == pool.name and not dry_run:
            failed |= _run(folder) != 0
        document.append(_told(profile, folder))
        if dry_run:
            continue
        written = _collected(job, cluster, pool, folder, profile, tables)
        if not as_json:
            click.echo(_next(profile, folder, written, tables))
    for name, pool, sends in between(cluster):
        folder = Path(out) / "_between" / name
        done = not dry_run and _between(name, pool, sends, folder, timeout, tables)
        document.append(
            {"between": sends.link or pool.name, "folder": str(folder), "state": "done" if done else "to do"}
        )
        if not as_json:
            click.echo(_told_between(name, sends, folder, done, tables))
    if as_json:
        import json

        click.echo(json.dumps(document, indent=1))
    return 1 if failed else 0


def _prepared(
    job: JobSpec,
    cluster: Cluster,
    pool: Pool,
    folder: Path,
    limit_s: float,
    timeout_s: int,
    options: Any,
    dry_run: bool,
) -> PoolProfile:
    """The folder's own profile, if it is of this job; else a new one."""
    from hapmoe.errors import InputError
    from hapmoe.profiling.folder import load_profile, pool_files, same_subject, write_profile
    from hapmoe.profiling.runs import choose_runs

    known = load_profile(folder)
    if known is not None:
        if not same_subject(known, job, pool):
            raise InputError(
                "holds the profile of another job or device", where=str(folder), hint="choose another --out"
            )
        return known
    chosen = choose_runs(job, cluster, pool, budget_s=limit_s)
    command = f"hapmoe profile {Path(job.script).name}" if job.script else "hapmoe profile"
    profile, files = pool_files(job, cluster, pool, chosen, timeout_s=timeout_s, options=options, command=command)
    if not dry_run:
        write_profile(folder, files)
    return profile


def _run(folder: Path) -> int:
    """profile.sh, whose progress goes to standard error; KeyboardInterrupt when it was interrupted."""
    import subprocess

    process = subprocess.Popen(["bash", str(folder / "profile.sh")], stdout=sys.stderr)
    try:
        code = process.wait()
    except KeyboardInterrupt:
        process.wait()  # the terminal has told it too; it ends its run first
        raise
    if code == 130:
        raise KeyboardInterrupt
    return code


def _collected(
    job: JobSpec, cluster: Cluster, pool: Pool, folder: Path, profile: PoolProfile, tables: str
) -> tuple[Path, ...]:
    from hapmoe import tables as store
    from hapmoe.profiling.collect import collect
    from hapmoe.profiling.sends import collected

    alone = collected(folder, pool, profile.command)
    found = (*collect(job, cluster, pool, folder, profile), *((alone,) if alone else ()))
    return store.save(tables, *found) if found else ()


def _between(name: str, pool: Pool, sends: Sends, folder: Path, timeout_s: int, tables: str) -> bool:
    """Writes the folder of a job on two nodes where it is not there; is what it measured in tables now?"""
    from hapmoe import tables as store
    from hapmoe.profiling.folder import write_profile
    from hapmoe.profiling.sends import between_files, collected

    if not (folder / "measure.sh").is_file():
        write_profile(folder, between_files(name, pool, sends, timeout_s))
    found = collected(folder, pool, "hapmoe profile")
    if found is not None:
        store.save(tables, found)
    return found is not None


def _told_between(name: str, sends: Sends, folder: Path, done: bool, tables: str) -> str:
    from hapmoe.units import format_seconds

    what = (
        f"sends between {sends.link.replace('--', ' and ')}" if sends.link else f"collectives between nodes of {name}"
    )
    if done:
        return f"{what}: in {tables}/"
    about = format_seconds(sends.expected_s)
    return f"{what}: start {folder}/measure.sh on two such nodes at once, about {about}, and bring results/ back"


def _told(profile: PoolProfile, folder: Path) -> dict[str, Any]:
    import msgspec

    from hapmoe.profiling.folder import state

    runs = [
        {**msgspec.to_builtins(run), "name": run.name, "ranks": run.ranks, "state": state(folder, run)}
        for run in profile.all_runs
    ]
    return {
        "pool": profile.pool,
        "device": profile.device,
        "folder": str(folder),
        "runs": runs,
        "left_out": profile.left_out,
    }


def _render(profile: PoolProfile, folder: Path) -> Any:
    """The runs of a pool, their time, and what was left out."""
    from rich.console import Group

    from hapmoe.profiling.folder import state
    from hapmoe.terminal import cell, make_table, say
    from hapmoe.units import format_seconds

    states = {run.name: state(folder, run) for run in profile.all_runs}
    left_s = sum(run.expected_s for run in profile.all_runs if states[run.name] != "done")
    table = make_table("run", "ranks", "layers", "micro-batch", "about", "")
    for run in profile.runs:
        layers = ", ".join(
            f"{count} {name}"
            for name, count in (("dense", run.layers.dense), ("MoE", run.layers.moe), ("MTP", run.layers.mtp))
            if count
        )
        told = "" if states[run.name] == "to do" else states[run.name]
        table.add_row(
            cell(run.name),
            f"1 of {run.ranks}" if run.single else str(run.ranks),
            layers,
            str(run.micro_batch_size),
            format_seconds(run.expected_s),
            told,
        )
    if (sends := profile.sends) is not None:
        told = "" if states[sends.name] == "to do" else states[sends.name]
        table.add_row(cell(sends.name), str(sends.ranks), "", "", format_seconds(sends.expected_s), told)
    title = f"{profile.pool} ({profile.device}): {len(profile.all_runs)} runs on one node, "
    title += f"about {format_seconds(left_s)} to go"
    rest = [cell(f"  left out: {number} degrees, {why}", "dim") for why, number in profile.left_out.items()]
    return Group(say(title, style="bold"), table, *rest)


def _next(profile: PoolProfile, folder: Path, written: tuple[Path, ...], tables: str) -> str:
    from hapmoe.profiling.folder import state

    done = sum(state(folder, run) == "done" for run in profile.all_runs)
    lines = [f"{profile.pool}: {done} of {len(profile.all_runs)} runs are in {tables}/"] if written else []
    if done < len(profile.all_runs):
        lines.append(
            f"{profile.pool}: start {folder}/profile.sh (or sbatch {folder}/profile.sbatch) on a node of it, "
            "bring results/ back, and give this command again; on such a node --here does both"
        )
    return "\n".join(lines)
