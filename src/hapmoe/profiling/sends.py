"""Collectives alone, as runs of a profile: on a node of each pool, between its nodes, between pools.

Inside a node they are the last run of the pool's ``profile.sh``. What crosses nodes or pools needs two nodes at once:
a folder ``_between/<pool>`` or ``_between/<a>--<b>`` with ``measure.sh``, which is started on both.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import msgspec

from hapmoe.catalog import reported_as
from hapmoe.cluster import Cluster, Pool
from hapmoe.errors import InputError
from hapmoe.launch.parts import render
from hapmoe.measured import Collective, Run, Table
from hapmoe.profiling.carry import alone_files

__all__ = ["Sends", "between", "between_files", "collected", "inside"]

NAME = "collectives"
"""Of the run and of the folder of its results."""
MOST_BYTES = {"cpu": 2**24}
"""Largest message by vendor: 1 GiB as nccl-tests' usual runs, but gloo takes seconds for that."""
_MOST_BYTES = 2**30
EXPECTED_S = {"cpu": 40.0}
"""ASSUMED: start, and 0.2 s of each of some hundred figures."""
_EXPECTED_S = 90.0


class Sends(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One job of so many ranks that only sends."""

    ranks: int
    most_bytes: int
    expected_s: float
    nodes: int = 1
    link: str = ""
    """``a--b``: a node of each of these pools, one rank each."""
    backend: str = ""
    device: str = ""
    """Type of torch, where it is not the accelerator."""

    @property
    def name(self) -> str:
        return NAME

    @property
    def processes(self) -> int:
        return self.ranks

    @property
    def started(self) -> range:
        return range(self.ranks)


def inside(pool: Pool) -> Sends | None:
    """On one node of the pool; None where it has one device."""
    return _of(pool, pool.devices_per_node) if pool.devices_per_node > 1 else None


def between(cluster: Cluster) -> Iterator[tuple[str, Pool, Sends]]:
    """(name, first pool, job) for the network of each pool of several nodes, and each two pools that may meet."""
    for pool in cluster.pools:
        if pool.nodes > 1:
            yield pool.name, pool, _of(pool, 2 * pool.devices_per_node, nodes=2)
    for one, other in combinations(cluster.pools, 2):
        link = cluster.link(one.name, other.name)
        if link is not None:
            first, second = sorted((one, other), key=lambda pool: pool.name)
            name = f"{first.name}--{second.name}"
            backend = "gloo" if link.transport == "gloo" else ""
            yield name, first, _of(first, 2, nodes=2, link=name, backend=backend)


def between_files(name: str, pool: Pool, sends: Sends, timeout_s: int) -> dict[str, str]:
    """The folder of a job on two nodes."""
    files = {f"alone/{path}": text for path, text in alone_files().items()}
    files["sends.json"] = msgspec.json.format(msgspec.json.encode(sends), indent=1).decode() + "\n"
    ends = sends.link.split("--") if sends.link else [pool.name, pool.name]
    files["measure.sh"] = render("measure.sh.j2", {"sends": sends, "ends": ends, "timeout_s": timeout_s})
    return files


def collected(folder: Path, pool: Pool, command: str) -> Table | None:
    """The table of ``results/collectives`` in a folder; None where nothing came back.

    InputError where it is not what ``alone.carried`` writes.
    """
    path = folder / "results" / NAME / "rank0.jsonl"
    if not path.is_file():
        return None
    try:
        start, *figures, end = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        assert start.pop("event") == "start" and end["event"] == "end"
        run = Run(
            date=start["date"], command=command, clocks=start["clocks"], hosts=start["nodes"], note="run collectives"
        )
        rows = tuple(
            msgspec.convert({**{k: v for k, v in row.items() if k != "event"}, "run": run.id}, Collective)
            for row in figures
        )
        device, software = str(start["device"]), dict(start["software"])
    except (ValueError, KeyError, AssertionError, TypeError, msgspec.ValidationError):
        raise InputError("not what a profile writes", where=str(path), hint="measure again") from None
    if start["type"] == "cpu":
        device = "cpu"
    named = {device, *(kind.name for kind in reported_as(device))}
    kind = "" if pool.device.name in named else pool.device.name
    table = Table(kind="collectives", device=device, device_kind=kind, software=software, runs=(run,), rows=rows)
    return table if rows else None


def _of(pool: Pool, ranks: int, *, nodes: int = 1, link: str = "", backend: str = "") -> Sends:
    vendor = pool.device.vendor
    return Sends(
        ranks=ranks,
        most_bytes=MOST_BYTES.get(vendor, _MOST_BYTES),
        expected_s=EXPECTED_S.get(vendor, _EXPECTED_S),
        nodes=nodes,
        link=link,
        backend=backend,
        device="cpu" if vendor == "cpu" else "",
    )
