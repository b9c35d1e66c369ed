"""``hapmoe profile compute`` and ``profile collectives``: kernels and collectives alone, by torch."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from hapmoe.cli_options import SCRIPT, for_version, read_job, together

if TYPE_CHECKING:
    from hapmoe.alone.machine import Machine
    from hapmoe.measured import Run, Table

__all__ = ["collectives", "compute"]

measures = together(
    click.option(
        "--tables", "folder", default="hapmoe-tables", metavar="DIR", help="Where figures go.", show_default=True
    ),
    click.option("--device", "type_", metavar="TYPE", help="cuda, npu or cpu; the accelerator unless given."),
    click.option("--kind", metavar="NAME", help="The device's name in cluster files, if the driver's is not known."),
    click.option("--again", is_flag=True, help="Measure what is there already too."),
    click.option("--dry-run", is_flag=True, help="Say what would be measured, and stop."),
)


@click.command(context_settings=SCRIPT)
@click.argument("script", required=False)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@measures
@click.option(
    "--precision", default="bf16", metavar="P", help="Of the grid: bf16, fp16, fp32 or fp8.", show_default=True
)
@click.option("--env", "-e", "env", multiple=True, metavar="K=V", help="Environment variable for the script.")
@click.option("--vocab-size", type=click.IntRange(min=1), metavar="N", help="Vocabulary, where the script has none.")
@click.option(
    "--time-limit", default=300.0, type=click.FloatRange(min=1), metavar="S", help="Seconds in all.", show_default=True
)
@for_version
def compute(
    script: str | None,
    args: tuple[str, ...],
    folder: str,
    type_: str | None,
    kind: str | None,
    again: bool,
    dry_run: bool,
    precision: str,
    time_limit: float,
    megatron_version: str | None,
    **reading: Any,
) -> int:
    """Time kernels on one device: those that SCRIPT's layers need at any degrees, or a standard grid.

    GEMM, grouped GEMM, attention, norm, permutation, copy, Adam. What DIR has already is left out.
    """
    import time

    from hapmoe import catalog, tables
    from hapmoe.alone import compute as kernels
    from hapmoe.alone.machine import find_machine
    from hapmoe.alone.shapes import expected_s, grid, of_job
    from hapmoe.units import format_seconds

    job = (
        read_job(script, args, megatron_version, global_batch_size=None, imbalance=None, **reading) if script else None
    )
    keys = of_job(job) if job else grid(_precision(precision))
    machine = find_machine(type_)
    table, run = _table(machine, "compute", kind)
    todo = keys if again else _missing(folder, table, keys)
    device = next(
        iter(catalog.reported_as(machine.name)),
        catalog.find_device("cpu" if machine.type == "cpu" else "a100-80g-sxm")[0],
    )
    about = expected_s(device, todo)
    share_s = min(0.5, max(0.05, time_limit / max(len(todo), 1)))
    # three calls to warm up, one to see how long it takes, at least five that count
    last = {row: max(10 * about[row], min(share_s, 0.5)) for row in todo}
    chosen = [row for row in sorted(todo, key=lambda row: about[row]) if last[row] <= time_limit / 4]
    counts = (
        f"{len(keys)} kernels, {len(keys) - len(todo)} known, {len(todo) - len(chosen)} too long for the time limit"
    )
    lasting = format_seconds(min(sum(last[row] for row in chosen), time_limit))
    click.echo(f"{machine.name}: {counts}, {len(chosen)} to measure in about {lasting}")
    if dry_run:
        return 0
    began, done, refused = time.perf_counter(), [], {}
    try:
        for index, row in enumerate(chosen):
            left = time_limit - (time.perf_counter() - began)
            if left < last[row]:
                click.echo(f"Time limit: {len(chosen) - index} kernels left; the same command goes on.")
                break
            _progress(index, len(chosen), row.op, began)
            found = kernels.measure(machine, row, run.id, share_s=share_s)
            if isinstance(found, str):
                refused[found] = row.op
                continue
            done.append(found)
            if len(done) % 20 == 0:
                _save(folder, table, run, done)
    finally:
        if done:
            _save(folder, table, run, done)
    _said(refused)
    click.echo(f"{len(done)} figures in {folder}/{tables.file_name(table)}")
    return 0 if done or not chosen else 1


@click.command()
@measures
@click.option(
    "--ranks", type=click.IntRange(min=2), metavar="N", help="Processes on this node; one a device unless given."
)
@click.option("--max-bytes", default="1 GiB", metavar="SIZE", help="Largest message.", show_default=True)
@click.option("--between", metavar="POOL,POOL", help="Two nodes of these pools: measure sends between them.")
@click.option("--backend", metavar="NAME", help="torch.distributed's: nccl, hccl, gloo.")
@click.option(
    "--timeout",
    default=120,
    type=click.IntRange(min=1),
    metavar="S",
    help="A collective may hang so long.",
    show_default=True,
)
def collectives(
    folder: str,
    type_: str | None,
    kind: str | None,
    again: bool,
    dry_run: bool,
    ranks: int | None,
    max_bytes: str,
    between: str | None,
    backend: str | None,
    timeout: int,
) -> int:
    """Time collectives by size and group, on this node or, under torchrun, on all nodes of a job.

    `torchrun --nnodes 2 --nproc-per-node 8 … -m hapmoe profile collectives` measures between nodes too. Every
    group of a shape talks at the same time, as in training. What DIR has already is left out.
    """
    import os

    from hapmoe.alone.machine import find_machine, processors
    from hapmoe.units import parse_bytes

    most = parse_bytes(max_bytes, "--max-bytes")
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        from hapmoe.alone.worker import work

        return work(
            folder,
            type_=type_,
            kind=kind,
            again=again,
            most=most,
            link=_link(between),
            backend=backend,
            timeout_s=timeout,
        )
    machine = find_machine(type_)
    many = ranks or (machine.devices.device_count() if machine.devices is not None else processors())
    if many < 2:
        click.echo(f"{machine.name}: one device makes no group; --ranks sets another number")
        return 1
    if dry_run:
        from hapmoe.alone.collectives import wanted
        from hapmoe.alone.groups import shapes_of, sizes_up_to

        keys = [key for shape in shapes_of(1, many) for key in wanted(shape, sizes_up_to(most))]
        table, _ = _table(machine, "collectives", kind)
        todo = keys if again else _missing(folder, table, keys)
        click.echo(f"{machine.name}: {len(keys)} collectives on {many} ranks, {len(keys) - len(todo)} known")
        return 0
    return _torchrun(many, folder)


def _precision(name: str) -> str:
    from hapmoe.errors import InputError

    if name not in ("bf16", "fp16", "fp32", "fp8"):
        raise InputError(f"no precision {name!r}", where="--precision", hint="bf16, fp16, fp32 or fp8")
    return name


def _link(between: str | None) -> str:
    from hapmoe.errors import InputError

    if between is None:
        return ""
    pools = sorted(name.strip() for name in between.split(",") if name.strip())
    if len(pools) != 2:
        raise InputError(f"{between!r} does not name two pools", where="--between", hint="--between h800,ascend")
    return "--".join(pools)


def _table(machine: Machine, table_kind: str, kind: str | None) -> tuple[Table, Run]:
    from hapmoe.alone.worker import table_of

    return table_of(machine, table_kind, kind)


def _missing(folder: str, table: Table, keys: Any) -> tuple[Any, ...]:
    from hapmoe.alone.worker import missing_of

    return missing_of(folder, table, keys)


def _save(folder: str, table: Table, run: Run, rows: list[Any]) -> None:
    import msgspec

    from hapmoe import tables

    tables.save(folder, msgspec.structs.replace(table, runs=(run,), rows=tuple(rows)))


def _progress(index: int, total: int, what: str, began: float) -> None:
    """One line on a terminal that is written over."""
    import time

    from hapmoe.units import format_seconds

    if sys.stderr.isatty():
        left = (time.perf_counter() - began) / max(index, 1) * (total - index)
        click.echo(f"\r{index}/{total} {what}, {format_seconds(left)} left      ", err=True, nl=False)
        if index == total - 1:
            click.echo("\r" + " " * 60 + "\r", err=True, nl=False)


def _said(refused: dict[str, str]) -> None:
    for why, what in list(refused.items())[:5]:
        click.echo(f"Not measured: {what}: {why}")


def _torchrun(ranks: int, folder: str) -> int:
    """This command again, on every device of the node; what it measures it saves as it goes."""
    import os
    import subprocess

    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["--no-python", sys.executable, "-m", "hapmoe", *sys.argv[1:]]
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    done = subprocess.run(command, env=os.environ | threads, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        click.echo(f"Stopped: {_why(done.stderr)}.")
        if os.path.isdir(folder):
            click.echo(f"What was measured until then is in {folder}/; the same command goes on from there.")
    return 1 if done.returncode else 0


def _why(errors: str) -> str:
    """What torchrun's report says of the first rank that failed."""
    import re

    told = re.search(r"^(?:\[\w+\]:)?\s*(?:\w+\.)*(\w*Error: .+)$", errors.replace("ChildFailedError: ", ""), re.M)
    root = errors.rpartition("Root Cause")[2]
    rank = re.search(r"^\s*rank\s*:\s*(\d+)", root, re.M)
    code = re.search(r"^\s*exitcode\s*:\s*(-?\d+)", root, re.M)
    place = f"rank {rank[1]} ended with code {code[1]}" if rank and code else "a rank failed"
    return f"{place}: {told[1][:160]}" if told else place
