"""One rank of the job that measures collectives; the first one keeps the table."""

from __future__ import annotations

import datetime
import os
import sys
import time
from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec

from hapmoe import tables
from hapmoe.alone.collectives import measure_group, wanted
from hapmoe.alone.groups import Shape, shapes_of, sizes_up_to
from hapmoe.alone.machine import Machine, find_machine
from hapmoe.errors import InputError
from hapmoe.measured import Row, Run, Table

__all__ = ["missing_of", "table_of", "work"]

R = TypeVar("R", bound=Row)


def table_of(machine: Machine, kind: str, device_kind: str | None) -> tuple[Table, Run]:
    """An empty table of this device and software, and this occasion."""
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    command = " ".join(["hapmoe", *sys.argv[1:]])
    run = Run(date=now, command=command, clocks=machine.clocks, note=machine.note)
    named = device_kind or ("cpu" if machine.type == "cpu" else "")
    return Table(kind=kind, device=machine.name, device_kind=named, software=machine.software), run


def missing_of(folder: str, table: Table, keys: Iterable[R]) -> tuple[R, ...]:
    """Keys that the folder's table of the same device and software does not have."""
    known = tables.load(folder) if os.path.isdir(folder) else ()
    asked = msgspec.structs.replace(table, rows=tuple(keys))
    return tables.missing(known, asked)  # type: ignore[return-value]


def work(
    folder: str,
    *,
    type_: str | None,
    kind: str | None,
    again: bool,
    most: int,
    link: str,
    backend: str | None,
    timeout_s: int,
) -> int:
    """Measure every shape of group that the job's ranks can form. Ends with 0, or 1 where nothing was measured."""
    machine = find_machine(type_)
    dist = machine.torch.distributed
    if machine.devices is not None:
        machine.devices.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group(backend or machine.backend, timeout=datetime.timedelta(seconds=timeout_s))
    try:
        per_node = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
        nodes = dist.get_world_size() // per_node
        if link and nodes != 2:
            raise InputError(f"{nodes} nodes", where="--between", hint="one node of each of the two pools")
        table, run = table_of(machine, "collectives", kind)
        run = msgspec.structs.replace(run, hosts=nodes, note="wall time")
        shapes = (Shape("network", 2, 1),) if link else shapes_of(nodes, per_node)
        return _all(machine, folder, table, run, shapes, nodes, per_node, again, most, link, timeout_s)
    finally:
        dist.destroy_process_group()


def _all(
    machine: Machine,
    folder: str,
    table: Table,
    run: Run,
    shapes: tuple[Shape, ...],
    nodes: int,
    per_node: int,
    again: bool,
    most: int,
    link: str,
    timeout_s: int,
) -> int:
    dist = machine.torch.distributed
    first, count, began = dist.get_rank() == 0, 0, time.perf_counter()
    for index, shape in enumerate(shapes):
        keys: Any = wanted(shape, sizes_up_to(most), link)
        chosen: list[Any] = [(keys if again else missing_of(folder, table, keys), run.id) if first else None]
        dist.broadcast_object_list(chosen)  # all ranks measure what the first one lacks
        keys, run_id = chosen[0]
        rows: list[Any] = []
        refused: dict[str, str] = {}
        last = ""
        for row, said in measure_group(machine, shape, nodes, per_node, keys, run_id, 0.2, timeout_s):
            if first and rows and row.collective != last:  # a rank that dies takes only its own collective along
                tables.save(folder, msgspec.structs.replace(table, runs=(run,), rows=tuple(rows)))
            last = row.collective
            if said:
                refused[row.collective] = said
            else:
                rows.append(row)
        if first and rows:
            tables.save(folder, msgspec.structs.replace(table, runs=(run,), rows=tuple(rows)))
        count += len(rows)
        if first:
            spent = time.perf_counter() - began
            left = spent / (index + 1) * (len(shapes) - index - 1)
            print(
                f"{shape.ranks} ranks, {shape.ranks_per_node} a node: {len(rows)} figures, about {left:.0f} s left",
                flush=True,
            )
            for name, said in refused.items():
                print(f"Not measured: {name}: {said}", flush=True)
    if first:
        print(f"{count} figures in {folder}/{tables.file_name(table)}", flush=True)
    return 0
