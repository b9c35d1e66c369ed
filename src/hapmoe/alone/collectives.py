"""Collectives by size and group, in a job of torch.distributed: the slowest rank's time is the time."""

from __future__ import annotations

import datetime
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hapmoe.alone.groups import COLLECTIVES, Shape, partition
from hapmoe.alone.machine import Machine
from hapmoe.alone.spread import spread
from hapmoe.measured import Collective

__all__ = ["measure_group", "wanted"]

_LOST = re.compile(r"time(d )?out|connection (closed|reset|refused)|broken pipe", re.I)
"""What gloo, NCCL and the store say when somebody does not answer; anything else is about the collective."""


def wanted(shape: Shape, sizes: Sequence[int], link: str = "") -> tuple[Collective, ...]:
    """The keys that one shape of group has: pairs send, larger groups do not."""
    names: tuple[str, ...] = COLLECTIVES if shape.ranks == 2 else COLLECTIVES[:-1]
    if link:  # pools only ever send to each other
        names = ("send_recv",) if shape.ranks == 2 else ()
    return tuple(
        Collective(
            run="",
            collective=name,
            link=link or shape.link,
            ranks=shape.ranks,
            ranks_per_node=shape.ranks_per_node,
            bytes=size,
            median_s=1.0,
            p10_s=1.0,
            p90_s=1.0,
            samples=1,
        )
        for name in names
        for size in sizes
    )


def measure_group(
    machine: Machine,
    shape: Shape,
    nodes: int,
    per_node: int,
    keys: Sequence[Collective],
    run: str,
    share_s: float,
    timeout_s: int,
) -> Iterator[tuple[Collective, str]]:
    """Each key's row, or the key and why it could not be measured. Every rank of the job calls this alike.

    RuntimeError (torch.distributed's) when a rank has not answered for ``timeout_s``, or has gone.
    """
    import msgspec

    dist = machine.torch.distributed
    mine: Any = None
    for ranks in partition(shape, nodes, per_node):
        group = dist.new_group(list(ranks), timeout=datetime.timedelta(seconds=timeout_s))
        if dist.get_rank() in ranks:
            mine, members = group, ranks
    try:
        for key in keys:
            said, timed = "", []
            try:
                act = _setup(machine, key, mine, members)
                timed = _timings(machine, act, share_s)
            except (RuntimeError, NotImplementedError, ValueError) as error:
                if _LOST.search(str(error)):
                    raise  # a rank that hangs or has gone would cost every further key its time too
                said = str(error).strip().split("\n")[0][:160]
            if timed and key.collective == "send_recv":
                timed = [one / 2 for one in timed]  # there and back
            yield (msgspec.structs.replace(key, run=run, **spread(timed)) if timed else key), said
    finally:
        dist.destroy_process_group(mine)


def _setup(machine: Machine, key: Collective, group: Any, members: Sequence[int]) -> Callable[[], None]:
    torch, dist = machine.torch, machine.torch.distributed
    place = "cpu" if dist.get_backend() == "gloo" else machine.type
    type_ = torch.float32 if place == "cpu" else torch.bfloat16
    count = max(key.bytes // type_.itemsize // key.ranks, 1) * key.ranks
    whole = torch.zeros(count, dtype=type_, device=place)
    part = torch.zeros(count // key.ranks, dtype=type_, device=place)
    if key.collective == "all_reduce":
        return lambda: dist.all_reduce(whole, group=group)
    if key.collective == "all_gather":
        return lambda: dist.all_gather_into_tensor(whole, part, group=group)
    if key.collective == "reduce_scatter":
        return lambda: dist.reduce_scatter_tensor(part, whole, group=group)
    if key.collective == "all_to_all":
        other = torch.zeros_like(whole)
        return lambda: dist.all_to_all_single(other, whole, group=group)
    peer, first = next(rank for rank in members if rank != dist.get_rank()), dist.get_rank() == min(members)

    def there_and_back() -> None:
        if first:
            dist.send(whole, peer, group=group)
            dist.recv(whole, peer, group=group)
        else:
            dist.recv(whole, peer, group=group)
            dist.send(whole, peer, group=group)

    return there_and_back


def _timings(machine: Machine, act: Callable[[], None], share_s: float) -> list[float]:
    """Seconds of one call on the slowest rank of the job, several times. All ranks take as many."""
    torch, dist = machine.torch, machine.torch.distributed
    place = "cpu" if dist.get_backend() == "gloo" else machine.type

    def slowest(values: list[float]) -> list[float]:
        told = torch.tensor(values, dtype=torch.float64 if place == "cpu" else torch.float32, device=place)
        dist.all_reduce(told, op=dist.ReduceOp.MAX)
        return [float(value) for value in told.tolist()]

    def once(calls: int) -> float:
        machine.wait()
        dist.barrier()
        began = time.perf_counter()
        for _ in range(calls):
            act()
        machine.wait()
        return (time.perf_counter() - began) / calls

    once(2)  # connections are made at first use
    (about_s,) = slowest([once(2)])
    calls = max(1, min(50, round(5e-3 / max(about_s, 1e-6))))
    samples = max(5, min(20, round(share_s / (calls * max(about_s, 1e-6)))))
    return slowest([once(calls) for _ in range(samples)])
