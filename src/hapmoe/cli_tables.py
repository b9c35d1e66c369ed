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
        there = ", ".join(sorted({table.device_kind or table.device for table in load(folder)} - {""}))
        hint = f"there are some of {there}" if there else "routing is of no device; profile one first"
        raise InputError(f"no tables of {lender!r}", where=folder, hint=hint)
    save(folder, *chosen)
    click.echo(f"{len(chosen)} tables of {lender} stand in for {borrower}")
    return 0


@tables.command("import")
@click.argument("sources", metavar="FILE...", nargs=-1, required=True)
@click.option("--out", required=True, metavar="DIR", help="The folder of tables that they are added to.")
@click.option("--device", default="", metavar="NAME", help="As its driver names it, where FILE does not say.")
@click.option("--ranks", type=click.IntRange(min=2), metavar="N", help="Ranks, where FILE does not list them.")
@click.option("--nodes", type=click.IntRange(min=1), metavar="N", help="Hosts, likewise.")
@click.option("--experts", type=click.IntRange(min=1), metavar="N", help="Experts of a layer (tokens_per_expert/).")
@click.option("--plan", "plan_file", metavar="FILE", help="The plan that the counted run had, where it had stages.")
@click.option("--date", default="", metavar="DATE", help="When it was measured; the file's own date unless given.")
def import_(
    sources: tuple[str, ...],
    out: str,
    device: str,
    ranks: int | None,
    nodes: int | None,
    experts: int | None,
    plan_file: str | None,
    date: str,
) -> int:
    """Take over what was measured elsewhere: nccl-tests, rccl-tests, Megatron's tokens_per_expert/, traces.

    A Megatron log needs the plan it ran with: `hapmoe calibrate PLAN LOG --tables DIR`.
    """
    import datetime
    from pathlib import Path

    from hapmoe.errors import InputError
    from hapmoe.logs.nccl import is_nccl_tests, nccl_table
    from hapmoe.logs.routing import routing_table, trace_table
    from hapmoe.measured import Run
    from hapmoe.planfile import load_plan
    from hapmoe.tables import save

    found = []
    for source in map(Path, sources):
        try:
            own = datetime.datetime.fromtimestamp(source.stat().st_mtime, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            text = source.read_text(encoding="utf-8", errors="replace") if source.is_file() else ""
        except OSError as error:
            raise InputError(error.strerror or str(error), where=str(source)) from None
        run = Run(date=date or own, command=f"import of {source.name}", note="imported")
        if source.is_dir():
            if experts is None:
                raise InputError("how many experts has a layer?", where=str(source), hint="--experts N")
            found.append(routing_table(source, run, experts, load_plan(plan_file) if plan_file else None))
        elif is_nccl_tests(text):
            found.append(nccl_table(text, run, str(source), device=device, ranks=ranks, nodes=nodes))
        elif source.suffix == ".jsonl":
            found.append(trace_table(source, run))
        else:
            hint = "nccl-tests output, a tokens_per_expert folder or JSON lines; a training log: hapmoe calibrate"
            raise InputError("not known what this is", where=str(source), hint=hint)
    for path in save(out, *found):
        click.echo(str(path))
    return 0


@tables.command()
@click.argument("before")
@click.argument("after")
@click.option("--ep", default=1, type=click.IntRange(min=1), metavar="N", help="Show the imbalance at this degree.")
@click.option("--threshold", type=click.FloatRange(0.0, 1.0), metavar="X", help="Share of tokens that may move (0.05).")
@as_json
def drift(before: str, after: str, ep: int, threshold: float | None, as_json: bool) -> int:
    """How far the load of the experts has moved between two routing profiles; exit code 1 beyond the threshold."""
    import json

    from hapmoe.routing import DRIFT, load_routing
    from hapmoe.routing import drift as measure

    limit = DRIFT if threshold is None else threshold
    found = measure(load_routing(before), load_routing(after), ep)
    beyond = [one.layer for one in found if one.beyond(limit)]
    if as_json:
        layers = [{"layer": d.layer, "moved": d.moved, "noise": d.noise, "rho": d.rho} for d in found]
        click.echo(json.dumps({"threshold": limit, "beyond": beyond, "layers": layers}, indent=1))
        return 1 if beyond else 0
    for one in found:
        mark = "  moved" if one.layer in beyond else ""
        rho = f"rho at ep {ep}: {one.rho[0]:.2f} -> {one.rho[1]:.2f}" if ep > 1 else ""
        click.echo(f"layer {one.layer:3d}: {one.moved:6.1%} of tokens (noise {one.noise:.1%})  {rho}{mark}")
    click.echo(f"{len(beyond)} of {len(found)} layers beyond {limit:.0%}.")
    return 1 if beyond else 0
