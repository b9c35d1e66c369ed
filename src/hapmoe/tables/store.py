"""A folder of tables: read, added to, merged, checked. One writer at a time; readers never wait.

A file appears or changes by renaming, so that a reader sees the old or the new one. Writers take the
folder's lock (``.lock``), which the system gives back when a process dies, read what is there, and
add to it: what another writer measured meanwhile stays.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from hapmoe.errors import InputError
from hapmoe.measured import Row, Table
from hapmoe.tables.files import canonical, decode, encode, file_name
from hapmoe.wholefile import write_whole

__all__ = ["load", "merge", "missing", "newest", "read", "save"]


def read(path: str | os.PathLike[str]) -> Table:
    """One table file."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(error.strerror or str(error), where=str(path)) from None
    except UnicodeDecodeError:
        raise InputError("not a table of measurements", where=str(path), hint="it is no text") from None
    return decode(text, str(path))


def load(folder: str | os.PathLike[str]) -> tuple[Table, ...]:
    """Every table of a folder, in the order of file names. InputError names the one that is damaged."""
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError("no such folder of tables", where=str(folder), hint="hapmoe profile writes one")
    return tuple(read(path) for path in sorted(folder.glob("*.csv")) if not path.name.startswith("."))


def merge(tables: Iterable[Table]) -> tuple[Table, ...]:
    """Tables of one kind, device and software become one, with every run of each. Order does not matter."""
    found: dict[tuple[object, ...], Table] = {}
    for table in tables:
        known = found.get(table.identity)
        if known is not None:
            table = msgspec.structs.replace(
                table,
                borrowed=known.borrowed + table.borrowed,
                runs=known.runs + table.runs,
                rows=known.rows + table.rows,
            )
        found[table.identity] = table
    return tuple(sorted((canonical(table) for table in found.values()), key=lambda table: table.identity))


def save(folder: str | os.PathLike[str], *tables: Table, wait_s: float = 60.0) -> tuple[Path, ...]:
    """Add tables to a folder, made where there is none; returns the files that hold them.

    Rows that are there already stay, unless the same run has better ones (``files.canonical``).
    InputError where another writer holds the folder for longer than ``wait_s``.
    """
    folder = Path(folder)
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write: {error.strerror or error}", where=str(folder)) from None
    with _locked(folder, wait_s):
        for part in folder.glob(".*.part"):  # of a writer that died; nobody else writes now
            part.unlink(missing_ok=True)
        for table in merge(tables):
            path = folder / file_name(table)
            if path.exists():
                (table,) = merge((read(path), table))
            written.append(write_whole(path, encode(table), replace=True))
    return tuple(written)


@contextlib.contextmanager
def _locked(folder: Path, wait_s: float) -> Iterator[None]:
    try:
        handle = os.open(folder / ".lock", os.O_CREAT | os.O_RDWR, 0o666)
    except OSError as error:
        raise InputError(f"cannot write: {error.strerror or error}", where=str(folder)) from None
    try:
        until = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise InputError("another process is writing tables here", where=str(folder)) from None
                time.sleep(0.02)
        yield
    finally:
        os.close(handle)


def newest(table: Table) -> tuple[Row, ...]:
    """One row for each key: of the latest run that measured it."""
    when = {run.id: (run.date, run.id) for run in table.runs}
    best: dict[tuple[object, ...], Row] = {}
    for row in table.rows:
        if row.key not in best or when[row.run] > when[best[row.key].run]:
            best[row.key] = row
    return tuple(best.values())


def missing(tables: Iterable[Table], like: Table) -> tuple[Row, ...]:
    """The rows of ``like`` whose keys no table with its identity has: what is still to be measured.

    The figures in ``like`` do not matter, its keys do. A key of a run that stopped early counts as
    measured: each row is whole.
    """
    known = {row.key for table in tables if table.identity == like.identity for row in table.rows}
    return tuple(row for row in like.rows if row.key not in known)
