"""One rank of a job that measures collectives on a machine without hapmoe: ``torchrun … -m hapmoe_alone.carried``.

    HAPMOE_PROBE        folder that gets rank<r>.jsonl: a line "start", one per figure (the first rank's), a line "end"
    HAPMOE_LINK         a--b: the job is a node of each of these pools; without it every group that the ranks can form
    HAPMOE_MAX_BYTES    largest message
    HAPMOE_BACKEND      torch.distributed's; the device's own without it

A file has its name when it is complete.
"""

from __future__ import annotations

import datetime
import json
import os
import time
from pathlib import Path
from typing import Any

from hapmoe.alone.acts import names_of, timed
from hapmoe.alone.groups import Shape, shapes_of, sizes_up_to
from hapmoe.alone.machine import find_machine
from hapmoe.alone.spread import spread

__all__ = ["main"]

SHARE_S = 0.2
"""Of a figure."""
TIMEOUT_S = 120
"""That a rank may not answer."""


def main() -> None:
    """Join the job that the environment describes, time everything, write one file."""
    machine, link = find_machine(os.environ.get("HAPMOE_DEVICE") or None), os.environ.get("HAPMOE_LINK", "")
    dist = machine.torch.distributed
    if machine.devices is not None:
        machine.devices.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = os.environ.get("HAPMOE_BACKEND") or machine.backend
    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=TIMEOUT_S))
    rank, per_node = dist.get_rank(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    nodes = dist.get_world_size() // per_node
    path = Path(os.environ["HAPMOE_PROBE"]) / f"rank{rank}.jsonl"
    with path.with_name(path.name + ".part").open("w", encoding="utf-8") as stream:

        def write(**row: Any) -> None:
            stream.write(json.dumps(row) + "\n")
            stream.flush()

        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        about = {"device": machine.name, "type": machine.type, "software": machine.software, "clocks": machine.clocks}
        write(event="start", date=now, nodes=nodes, **about)
        for shape in (Shape("network", 2, 1),) if link else shapes_of(nodes, per_node):
            sizes = sizes_up_to(int(os.environ["HAPMOE_MAX_BYTES"]))
            keys = [(name, size) for name in names_of(shape, link) for size in sizes]
            results = timed(machine, shape, nodes, per_node, keys, SHARE_S, TIMEOUT_S)
            for (name, size), (found, _) in zip(keys, results, strict=True):
                if found and rank == 0:
                    group = {"link": link or shape.link, "ranks": shape.ranks, "ranks_per_node": shape.ranks_per_node}
                    write(event="figure", collective=name, bytes=size, **group, **spread(found))
        write(event="end")
    path.with_name(path.name + ".part").rename(path)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
