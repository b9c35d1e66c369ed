"""``hapmoe tables``: what is in a folder of measurements, and moving it about."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from hapmoe.cli_options import as_json, show

if TYPE_CHECKING:
    from hapmoe.measured import Table

__all__ = ["tables"]


@click.group()
def tables() -> None:
    """List, merge, export and verify measured tables.

    `hapmoe profile` writes them; `hapmoe plan --tables DIR` uses them.
    """


@tables.command("list")
@click.argument("folder", metavar="DIR")
@as_json
def list_(folder: str, as_json: bool) -> int:
    """What DIR holds: kind, device, software, figures, when measured."""
    from hapmoe.tables import load

    found = load(folder)
    if as_json:
        import json

        click.echo(json.dumps([_told(table) for table in found], indent=1))
        return 0
    from rich.table import Table as Grid

    grid = Grid(box=None, pad_edge=False)
    for name in ("kind", "device", "software", "figures", "runs", "last"):
        grid.add_column(name, justify="right" if name in ("figures", "runs") else "left")
    for table in found:
        told = _told(table)
        software = ", ".join(f"{name} {version}" for name, version in told["software"].items())
        grid.add_row(told["kind"], told["device"], software, f"{told['rows']:,}", str(told["runs"]), told["last"][:10])
    show(grid)
    for table in found:
        for loan in table.borrowed:
            click.echo(
                f"{table.kind} of {table.device_kind or table.device} stands in for {loan.device}: {loan.reason}"
            )
    return 0


def _told(table: Table) -> dict[str, Any]:
    from hapmoe.tables import file_name

    return {
        "file": file_name(table),
        "kind": table.kind,
        "device": table.device_kind or table.device,
        "software": table.software,
        "rows": len(table.rows),
        "runs": len(table.runs),
        "last": max((run.date for run in table.runs), default=""),
        "borrowed": [loan.device for loan in table.borrowed],
    }


@tables.command()
@click.argument("sources", metavar="DIR...", nargs=-1, required=True)
@click.option("--out", required=True, metavar="DIR", help="Where all of it goes; what is there stays.")
def merge(sources: tuple[str, ...], out: str) -> int:
    """Put the tables of several folders together, such as one of each pool. Order does not matter."""
    from hapmoe.tables import load, save

    found = [table for folder in sources for table in load(folder)]
    written = save(out, *found)
    click.echo(f"{len(written)} tables in {out}/")
    return 0


@tables.command()
@click.argument("folder", metavar="DIR")
@click.option("--kind", metavar="KIND", help="compute, collectives, pieces, memory or routing; all unless given.")
@click.option("--out", metavar="FILE", help="A file instead of standard output.")
def export(folder: str, kind: str | None, out: str | None) -> int:
    """The figures of DIR as JSON: one object per row, device, software and date with it."""
    import json

    import msgspec

    from hapmoe.errors import InputError
    from hapmoe.measured import KINDS
    from hapmoe.tables import load
    from hapmoe.wholefile import write_whole

    if kind is not None and kind not in KINDS:
        raise InputError(f"no kind {kind!r}", where="--kind", hint=f"one of {', '.join(KINDS)}")
    rows = []
    for table in load(folder):
        dates = {run.id: run.date for run in table.runs}
        where = {"kind": table.kind, "device": table.device_kind or table.device, "software": table.software}
        if kind in (None, table.kind):
            rows += [where | {"date": dates[row.run]} | msgspec.to_builtins(row) for row in table.rows]
    text = "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n"
    if out:
        write_whole(out, text, replace=False)
    else:
        click.echo(text, nl=False)
    return 0


@tables.command()
@click.argument("folder", metavar="DIR")
def verify(folder: str) -> int:
    """Are all tables of DIR whole, and is each in its file? Exit code 1 if not."""
    from pathlib import Path

    from hapmoe.errors import InputError
    from hapmoe.tables import file_name, read

    paths = sorted(Path(folder).glob("*.csv"))
    if not paths:
        raise InputError("holds no tables", where=folder)
    good = True
    for path in paths:
        try:
            said = "" if file_name(read(path)) == path.name else f"{path}: its name should be {file_name(read(path))}"
        except InputError as error:
            said = str(error)
        if said:
            click.echo(said)
            good = False
    if good:
        click.echo(f"{len(paths)} tables are whole.")
    return 0 if good else 1


@tables.command()
@click.argument("folder", metavar="DIR")
@click.option("--from", "lender", required=True, metavar="DEVICE", help="The device that was measured.")
@click.option("--to", "borrower", required=True, metavar="DEVICE", help="The kind of the cluster file that was not.")
@click.option("--kind", metavar="KIND", help="compute, collectives … ; all unless given.")
@click.option(
    "--reason", required=True, metavar="TEXT", help="Why the figures hold for it too; shown with every estimate."
)
def lend(folder: str, lender: str, borrower: str, kind: str | None, reason: str) -> int:
    """Declare that figures of one device stand in for another that has none."""
    import msgspec

    from hapmoe.errors import InputError
    from hapmoe.measured import Borrowed
    from hapmoe.tables import load, save

    entry = Borrowed(device=borrower, reason=reason)
    chosen = [
        msgspec.structs.replace(table, borrowed=(*table.borrowed, entry))
        for table in load(folder)
        if lender in (table.device, table.device_kind) and kind in (None, table.kind)
    ]
    if not chosen:
        there = ", ".join(sorted({table.device_kind or table.device for table in load(folder)}))
        raise InputError(f"no tables of {lender!r}", where=folder, hint=f"there are some of {there}")
    save(folder, *chosen)
    click.echo(f"{len(chosen)} tables of {lender} stand in for {borrower}")
    return 0
