"""Gives each pool of a cluster the measurements that concern it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

import msgspec

from hapmoe.catalog import reported_as
from hapmoe.cluster import Cluster, Link, Pool
from hapmoe.errors import InputError
from hapmoe.measured import Calibration, Collective, Compute, Measurements, Memory, Piece, Row, Table
from hapmoe.tables.files import encode
from hapmoe.tables.store import merge

__all__ = ["attach"]

R = TypeVar("R", bound=Row)


def attach(cluster: Cluster, tables: Iterable[Table]) -> Cluster:
    """The cluster with the measurements of ``tables`` on its pools and links.

    A table concerns a pool whose device it names (as the catalogue reads the driver's name, or by
    ``device_kind``), or which it is declared to stand in for. The device's own figures go before
    borrowed ones, later runs before earlier ones. Sends between two pools belong to their link.
    InputError where no pool has any of the tables: they are of other devices.
    """
    tables = [table for table in merge(tables) if table.kind != "routing"]
    pools = tuple(msgspec.structs.replace(pool, tables=_of_pool(pool, tables)) for pool in cluster.pools)
    links = _links(cluster, tables)
    if tables and not any(pool.tables for pool in pools) and not any(link.tables for link in links):
        measured = ", ".join(sorted({table.device_kind or table.device for table in tables}))
        wanted = ", ".join(sorted({pool.device.name for pool in cluster.pools}))
        raise InputError(f"measured on {measured}, but the pools are of {wanted}", where="--tables")
    texts = "".join(encode(table) for table in tables)
    digest = hashlib.sha256(texts.encode()).hexdigest() if tables else ""
    return msgspec.structs.replace(cluster, pools=pools, links=links, tables_sha256=digest)


def _names(table: Table) -> set[str]:
    return (
        {table.device_kind} if table.device_kind else {kind.name for kind in reported_as(table.device)} | {table.device}
    )


def _of_pool(pool: Pool, tables: Sequence[Table]) -> Measurements | None:
    own = [table for table in tables if pool.device.name in _names(table)]
    borrowed, notes = [], []
    for table in tables:
        loan = next((loan for loan in table.borrowed if loan.device == pool.device.name), None)
        if loan is not None and table not in own:
            borrowed.append(table)
            lender = table.device_kind or table.device
            notes.append(f"{pool.device.name}: {table.kind} figures borrowed from {lender}: {loan.reason}")
    return _measurements(own, borrowed, notes, lambda row: "--" not in getattr(row, "link", ""))


def _links(cluster: Cluster, tables: Sequence[Table]) -> tuple[Link, ...]:
    """All links, those between pools with measured sends among them (also where the file states none)."""
    links = {tuple(sorted(link.between)): link for link in cluster.links}
    named = {getattr(row, "link", "") for table in tables for row in table.rows}
    known = {pool.name for pool in cluster.pools}
    for name in sorted(name for name in named if "--" in name):
        a, _, b = name.partition("--")
        link = links.get((a, b)) or (cluster.link(a, b) if {a, b} <= known else None)
        if link is not None:
            found = _measurements(tables, (), (), partial(_crosses, name))
            links[a, b] = msgspec.structs.replace(link, tables=found)
    return tuple(links.values())


def _crosses(name: str, row: Row) -> bool:
    return getattr(row, "link", "") == name


def _measurements(
    own: Sequence[Table], borrowed: Sequence[Table], notes: Sequence[str], wanted: Callable[[Row], bool]
) -> Measurements | None:
    """For each key the row of the device's own latest run, else of the latest borrowed one."""
    best: dict[tuple[object, ...], tuple[tuple[bool, str, str], Row]] = {}
    for table in (*own, *borrowed):
        dates = {run.id: run.date for run in table.runs}
        for row in filter(wanted, table.rows):
            key, rank = (type(row).__name__, *row.key), (table in own, dates[row.run], row.run)
            if key not in best or rank > best[key][0]:
                best[key] = rank, row
    if not best:
        return None
    # a calibration is of the figures that there were: pieces measured after it say the same, better
    pieces = max((rank[1] for rank, row in best.values() if isinstance(row, Piece)), default="")
    rows = [row for rank, row in best.values() if not (isinstance(row, Calibration) and rank[1] < pieces)]

    def of(kind: type[R]) -> tuple[R, ...]:
        return tuple(sorted((row for row in rows if isinstance(row, kind)), key=lambda row: row.key))

    found = Measurements(
        sha256="",
        compute=of(Compute),
        collectives=of(Collective),
        pieces=of(Piece),
        memory=of(Memory),
        calibration=of(Calibration),
        notes=tuple(notes),
    )
    return msgspec.structs.replace(found, sha256=hashlib.sha256(msgspec.json.encode(found)).hexdigest())
