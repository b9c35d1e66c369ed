"""One table as text: provenance in comment lines, then CSV with one long row per figure.

    # hapmoe table 1
    # kind: compute
    # device: NVIDIA H100 80GB HBM3
    # software: {cuda: '12.8', torch: 2.13.0}
    # runs:
    # - {id: 5f0c9a41, date: '2026-11-30T10:48:00Z', command: hapmoe profile compute}
    # sha256: …
    run,op,direction,precision,m,n,k,v,groups,median_s,p10_s,p90_s,samples
    5f0c9a41,gemm,forward,bf16,4096,4096,4096,0,1,0.00021,0.000209,0.000214,50

The checksum covers every other line, so a file that was cut short or changed is not taken for a
table. Rows stand sorted: two tables differ in ``diff`` where their figures do.
"""

from __future__ import annotations

import csv
import hashlib
import io
import re
from typing import Any

import msgspec
import yaml

from hapmoe.errors import InputError
from hapmoe.measured import KINDS, Borrowed, Row, Run, Table

__all__ = ["canonical", "decode", "encode", "file_name"]

FIRST = "# hapmoe table 1"
_SUM = "# sha256: "


def canonical(table: Table) -> Table:
    """The same figures in the one order that files have; equal rows once.

    Where one run has two results for the same key, the one with more samples stays (then the
    smaller), so that merging does not depend on the order.
    """
    best: dict[tuple[object, ...], Row] = {}
    for row in table.rows:
        key = (row.run, row.key)
        if key not in best or _weight(row) > _weight(best[key]):
            best[key] = row
    runs = tuple(sorted(set(table.runs)))
    return msgspec.structs.replace(
        table,
        software=dict(sorted(table.software.items())),
        borrowed=tuple(sorted(set(table.borrowed))),
        runs=runs,
        rows=tuple(sorted(best.values(), key=lambda row: (row.key, row.run))),
    )


def _weight(row: Row) -> tuple[Any, ...]:
    values = tuple(getattr(row, name) for name in row.__struct_fields__ if name in row.VALUES and name != "samples")
    down = tuple(-value if isinstance(value, int | float) else value for value in values)
    return (getattr(row, "samples", 0), *down)


def encode(table: Table) -> str:
    """The table's file. Raises ValueError where a row is not of its kind or names no run of the table."""
    table = canonical(table)
    names = KINDS[table.kind].__struct_fields__
    known = {run.id for run in table.runs}
    head: dict[str, Any] = {"kind": table.kind, "device": table.device}
    if table.device_kind:
        head["device_kind"] = table.device_kind
    head["software"] = table.software
    if table.borrowed:
        head["borrowed"] = [msgspec.to_builtins(entry) for entry in table.borrowed]
    head["runs"] = [{"id": run.id} | msgspec.to_builtins(run) for run in table.runs]
    written = yaml.safe_dump(head, sort_keys=False, width=1000, default_flow_style=None, allow_unicode=True)
    body = io.StringIO()
    writer = csv.writer(body, lineterminator="\n")
    writer.writerow(names)
    for row in table.rows:
        if type(row) is not KINDS[table.kind] or row.run not in known:
            raise ValueError(f"not a row of this table: {row}")
        writer.writerow([_cell(getattr(row, name)) for name in names])
    lines = [FIRST, *(f"# {line}" for line in written.splitlines())]
    rest = body.getvalue()
    return "\n".join(lines) + f"\n{_SUM}{_checksum(lines, rest)}\n{rest}"


def _cell(value: object) -> str:
    return (
        " ".join(map(str, value))
        if isinstance(value, tuple)
        else repr(value)
        if isinstance(value, float)
        else str(value)
    )


def _checksum(lines: list[str], rest: str) -> str:
    return hashlib.sha256(("\n".join(lines) + "\n" + rest).encode()).hexdigest()


def decode(text: str, where: str = "table") -> Table:
    """A table from its file's text. InputError for what is no table, is damaged, or has impossible figures."""
    head, found, rest = text.partition(f"\n{_SUM}")
    if not head.startswith(FIRST + "\n") or not found:
        raise InputError("not a table of measurements", where=where, hint=f'those begin with "{FIRST}"')
    checksum, _, rest = rest.partition("\n")
    lines = head.split("\n")
    if _checksum(lines, rest) != checksum.strip():
        raise InputError(
            "is damaged: its checksum does not fit", where=where, hint="cut short or changed; measure again"
        )
    try:
        stated = yaml.safe_load("\n".join(line.removeprefix("# ") for line in lines[1:]))
        runs = stated.pop("runs")
        for run in runs:
            run.pop("id")
        kind = KINDS[stated["kind"]]
        table = Table(
            runs=tuple(msgspec.convert(runs, list[Run])),
            borrowed=tuple(msgspec.convert(stated.pop("borrowed", []), list[Borrowed])),
            **stated,
        )
        rows = [_row(kind, cells) for cells in csv.DictReader(io.StringIO(rest))]
    except (msgspec.ValidationError, yaml.YAMLError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"not a table that this version reads: {error}", where=where) from None
    known = {run.id for run in table.runs}
    if strange := next((row for row in rows if row.run not in known), None):
        raise InputError(f"a row names the run {strange.run!r}, which is not listed", where=where)
    return msgspec.structs.replace(table, rows=tuple(rows))


def _row(kind: type[Row], cells: dict[str, Any]) -> Row:
    if "tokens" in cells:
        cells["tokens"] = cells["tokens"].split()
    return msgspec.convert(cells, kind, strict=False)


def file_name(table: Table) -> str:
    """``compute-nvidia-h100-80gb-hbm3-1f0a3b5c.csv``: one file per kind, device and software."""
    device = re.sub(r"[^a-z0-9]+", "-", (table.device_kind or table.device).lower()).strip("-")[:60]
    digest = hashlib.sha256(msgspec.json.encode(table.identity)).hexdigest()[:8]
    return "-".join(part for part in (table.kind, device, digest) if part) + ".csv"
