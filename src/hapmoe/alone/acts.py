"""The calls that are timed: every collective of a group, by torch.distributed; the slowest rank's time is the time.

Needs torch and the files beside it, nothing else of hapmoe: a profile carries them to machines that do not have it.
"""

from __future__ import annotations

import datetime
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hapmoe.alone.groups import COLLECTIVES, Shape, partition
from hapmoe.alone.machine import Machine

__all__ = ["names_of", "timed"]

_LOST = re.compile(r"time(d )?out|connection (closed|reset|refused)|broken pipe", re.I)
"""What gloo, NCCL and the store say when somebody does not answer; anything else is about the collective."""


def names_of(shape: Shape, link: str) -> tuple[str, ...]:
    """Collectives of one shape of group: pairs send, larger groups do not; pools only ever send to each other."""
    if link:
        return ("send_recv",) if shape.ranks == 2 else ()
    return COLLECTIVES if shape.ranks == 2 else COLLECTIVES[:-1]


def timed(
    machine: Machine,
    shape: Shape,
    nodes: int,
    per_node: int,
    keys: Sequence[tuple[str, int]],
    share_s: float,
    timeout_s: int,
) -> Iterator[tuple[list[float], str]]:
    """For each (collective, bytes) its timings in seconds, or why there are none. All ranks of a job call it alike.

    RuntimeError (torch.distributed's) when a rank has not answered for ``timeout_s``, or has gone.
    """
    dist = machine.torch.distributed
    mine: Any = None
    for ranks in partition(shape, nodes, per_node):
        group = dist.new_group(list(ranks), timeout=datetime.timedelta(seconds=timeout_s))
        if dist.get_rank() in ranks:
            mine, members = group, ranks
    try:
        for name, size in keys:
            said, found = "", []
            try:
                act = _setup(machine, name, size, shape.ranks, mine, members)
                found = _timings(machine, act, share_s)
            except (RuntimeError, NotImplementedError, ValueError) as error:
                if _LOST.search(str(error)):
                    raise  # a rank that hangs or has gone would cost every further key its time too
                said = str(error).strip().split("\n")[0][:160]
            if name == "send_recv":
                found = [one / 2 for one in found]  # there and back
            yield found, said
    finally:
        dist.destroy_process_group(mine)


def _setup(
    machine: Machine, name: str, size: int, ranks: int, group: Any, members: Sequence[int]
) -> Callable[[], None]:
    torch, dist = machine.torch, machine.torch.distributed
    place = "cpu" if dist.get_backend() == "gloo" else machine.type
    type_ = torch.float32 if place == "cpu" else torch.bfloat16
    count = max(size // type_.itemsize // ranks, 1) * ranks
    whole = torch.zeros(count, dtype=type_, device=place)
    part = torch.zeros(count // ranks, dtype=type_, device=place)
    if name == "all_reduce":
        return lambda: dist.all_reduce(whole, group=group)
    if name == "all_gather":
        return lambda: dist.all_gather_into_tensor(whole, part, group=group)
    if name == "reduce_scatter":
        return lambda: dist.reduce_scatter_tensor(part, whole, group=group)
    if name == "all_to_all":
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
