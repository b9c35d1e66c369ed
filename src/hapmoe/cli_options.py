"""What several commands share: options, reading a script, printing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from hapmoe.cluster import Cluster
    from hapmoe.job import JobSpec

__all__ = [
    "SCRIPT",
    "as_json",
    "environment",
    "for_version",
    "read_cluster",
    "read_job",
    "reads_script",
    "show",
    "takes_cluster",
    "takes_routing",
    "takes_tables",
    "together",
]

# Options of the script stand behind SCRIPT and are handed on; ours may stand anywhere before "--".
SCRIPT = {"ignore_unknown_options": True}


def together(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Several click options as one decorator."""

    def decorate(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


reads_script = together(
    click.argument("script"),
    click.argument("args", nargs=-1, type=click.UNPROCESSED),
    click.option("--env", "-e", "env", multiple=True, metavar="K=V", help="Environment variable for the script."),
    click.option(
        "--vocab-size", type=click.IntRange(min=1), metavar="N", help="Vocabulary, where the script has none."
    ),
    click.option("--global-batch-size", type=click.IntRange(min=1), metavar="N", help="Sequences per step, likewise."),
    click.option(
        "--imbalance", type=click.FloatRange(min=1.0), metavar="X", help="Hottest rank's share of tokens over the mean."
    ),
)

takes_cluster = click.option("--cluster", "cluster_file", required=True, metavar="FILE", help="cluster.yaml")
takes_tables = click.option(
    "--tables", "table_folders", multiple=True, metavar="DIR", help="Measured tables, in place of the model's figures."
)
takes_routing = click.option("--routing", metavar="FILE", help="Tokens per expert as they were: the experts' load.")
as_json = click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
for_version = click.option("--megatron-version", metavar="V", help="Megatron-Core that will run the plan, e.g. 0.16.1.")


def read_cluster(cluster_file: str, table_folders: tuple[str, ...] = ()) -> Cluster:
    """The cluster of a file, with the measurements of some folders of tables."""
    from hapmoe.clusterfile import load_cluster

    cluster = load_cluster(cluster_file)
    if not table_folders:
        return cluster
    from hapmoe import tables

    return tables.attach(cluster, [table for folder in table_folders for table in tables.load(folder)])


def read_job(script: str, args: tuple[str, ...], megatron_version: str | None, **reading: Any) -> JobSpec:
    """The job of a script, for a version of Megatron-Core where one is given."""
    import re

    import msgspec

    from hapmoe.errors import InputError
    from hapmoe.extract import extract as read

    routing = reading.pop("routing", None)
    reading["env"] = environment(reading["env"])
    if megatron_version and not re.match(r"(core_)?[vr]?\d+\.\d+", megatron_version):
        raise InputError(f"not a version: {megatron_version!r}", where="--megatron-version", hint="such as 0.16.1")
    job = read(script, args, **reading)
    if megatron_version:
        training = msgspec.structs.replace(job.training, megatron_version=megatron_version)
        job = msgspec.structs.replace(job, training=training)
    if routing:
        from hapmoe.routing import with_routing

        job = with_routing(job, routing)
    return job


def environment(pairs: tuple[str, ...]) -> dict[str, str]:
    """``--env NAME=VALUE`` pairs by name."""
    from hapmoe.errors import InputError

    env = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.isidentifier():
            raise InputError("not NAME=VALUE", where=f"--env {name}", hint="for example --env NNODES=4")
        env[name] = value
    return env


def show(renderable: Any) -> None:
    """Print what rich renders, at the width of the terminal."""
    from rich.console import Console

    console = Console(highlight=False)
    with console.capture() as captured:  # rich itself would exit with 1 when the reader goes away
        console.print(renderable)
    sys.stdout.write(captured.get())
