"""Collectives by size and group, in a job of torch.distributed, as rows of a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hapmoe.alone.acts import names_of, timed
from hapmoe.alone.groups import Shape
from hapmoe.alone.machine import Machine
from hapmoe.alone.spread import spread
from hapmoe.measured import Collective

__all__ = ["measure_group", "wanted"]


def wanted(shape: Shape, sizes: Sequence[int], link: str = "") -> tuple[Collective, ...]:
    """The keys that one shape of group has."""
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
        for name in names_of(shape, link)
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
    """Each key's row, or the key and why it could not be measured: ``acts.timed``."""
    import msgspec

    pairs = [(key.collective, key.bytes) for key in keys]
    for key, (found, said) in zip(keys, timed(machine, shape, nodes, per_node, pairs, share_s, timeout_s), strict=True):
        yield (msgspec.structs.replace(key, run=run, **spread(found)) if found else key), said
