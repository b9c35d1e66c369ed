"""The commands of the runtime that joins unequal stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from hapmoe.cli_launch import plan_and_job, reads_plan, write_launch
from hapmoe.cli_options import SCRIPT, as_json, for_version, takes_cluster

__all__ = ["runtime"]


@click.group()
def runtime() -> None:
    """Stages with degrees of their own on unmodified Megatron-LM (back end megatron-hetero)."""


@runtime.command(context_settings=SCRIPT)
@reads_plan
@takes_cluster
@click.option("--steps", type=click.IntRange(min=1), default=3, metavar="N", help="To compare.", show_default=True)
@click.option("--out", default="hapmoe-verify", metavar="DIR", help="Launchers, logs, weights.", show_default=True)
@click.option("--force", is_flag=True, help="Replace earlier launchers in DIR.")
@click.option("--write-only", is_flag=True, help="Write the launchers of the three runs and start none.")
@click.option("--logs", nargs=2, metavar="UNIFORM UNEQUAL", help="Compare the output of runs that were made.")
@for_version
@as_json
def verify(
    plan_file: str,
    args: tuple[str, ...],
    script: str | None,
    cluster_file: str,
    steps: int,
    out: str,
    force: bool,
    write_only: bool,
    logs: tuple[str, str] | None,
    megatron_version: str | None,
    as_json: bool,
    **reading: Any,
) -> int:
    """Train a few steps under PLAN and under a uniform plan from the same weights, and compare.

    Host names come from the cluster file; DIR must be on a file system that all hosts share. Exit code 1
    where losses or gradient norms differ by more than rounding.
    """
    import json

    from hapmoe.clusterfile import load_cluster
    from hapmoe.errors import InputError
    from hapmoe.launch.verdict import verdict
    from hapmoe.resolve import resolve
    from hapmoe.verifying import compare_logs, jobs, render_verified, uniform_plan

    cluster = load_cluster(cluster_file)
    plan, job = plan_and_job(plan_file, script, args, "megatron-hetero", megatron_version, "runtime verify", reading)
    if logs is None:
        folder = Path(out).resolve()
        _make_room(folder / "weights", force=force)
        plan, uniform = resolve(job, cluster, plan), uniform_plan(job, cluster)
        made = jobs(job, uniform, plan, str(folder / "weights"), steps)
        for name, one in made.items():
            chosen = plan if name == "unequal" else uniform
            possible, reason = verdict(one, cluster, chosen)
            if not possible:
                raise InputError(f"cannot be launched: {reason}", where=plan_file)
            write_launch(one, cluster, chosen, "torchrun", None, str(folder / name), force, quiet=True)
        if write_only:
            click.echo(f"{folder}: run start, then uniform and unequal, keep their output; then --logs")
            return 0
        for name in made:
            _start(folder, name)
        logs = str(folder / "uniform.log"), str(folder / "unequal.log")
    texts = [Path(log).read_text(encoding="utf-8", errors="replace") for log in logs]
    found = compare_logs(texts[0], texts[1], job.training.precision)
    if as_json:
        document = {"same": found.good, "loss_error": found.loss_error, "norm_error": found.norm_error}
        click.echo(json.dumps({**document, "steps": found.steps}, indent=1))
    else:
        click.echo(render_verified(found))
    return 0 if found.good else 1


def _make_room(weights: Path, *, force: bool) -> None:
    """Weights of an earlier verification go with --force only."""
    import shutil

    from hapmoe.errors import InputError

    if weights.exists() and not force:
        raise InputError("holds weights of an earlier run", where=str(weights), hint="--force removes them")
    shutil.rmtree(weights, ignore_errors=True)


def _start(folder: Path, name: str) -> None:
    """Run one launcher; its output goes to a file beside it."""
    import subprocess

    from hapmoe.errors import InputError

    log = folder / f"{name}.log"
    click.echo(f"{name}: {folder / name / 'launch.sh'} > {log}", err=True)
    with log.open("wb") as stream:
        code = subprocess.run([folder / name / "launch.sh"], stdout=stream, stderr=stream, check=False).returncode
    if code:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["no output"]
        told = [line for line in lines if "hapmoe" in line or "Error: " in line] or lines[-1:]
        raise InputError(f"the {name} run ended with exit code {code}: {told[0].strip()}", where=str(log))
