"""Which collectives to measure on a number of nodes: groups of each shape that training may form, by size."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["COLLECTIVES", "Shape", "partition", "shapes_of", "sizes_up_to"]

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")


@dataclass(frozen=True, slots=True)
class Shape:
    """Groups of ``ranks`` members, ``ranks_per_node`` of them on each node that they touch."""

    link: str
    ranks: int
    ranks_per_node: int


def shapes_of(nodes: int, per_node: int) -> tuple[Shape, ...]:
    """Powers of two (and everything) inside a node; between nodes with one member or all of each node.

    >>> [(s.link, s.ranks, s.ranks_per_node) for s in shapes_of(2, 4)]
    [('node', 2, 2), ('node', 4, 4), ('network', 2, 1), ('network', 8, 4)]
    """
    inside = sorted({2**power for power in range(1, per_node.bit_length())} | {per_node})
    found = [Shape("node", n, n) for n in inside if 1 < n <= per_node and per_node % n == 0]
    across = sorted({2**power for power in range(1, nodes.bit_length())} | {nodes})
    for many in across:
        if 1 < many <= nodes and nodes % many == 0:
            found += [Shape("network", many * q, q) for q in sorted({1, per_node})]
    return tuple(found)


def partition(shape: Shape, nodes: int, per_node: int) -> tuple[tuple[int, ...], ...]:
    """All ranks in groups of one shape, as training has them: every group talks at the same time.

    >>> partition(Shape("network", 2, 1), 2, 2)
    ((0, 2), (1, 3))
    """
    q = shape.ranks_per_node
    together = shape.ranks // q
    groups = []
    for first in range(0, nodes, together):
        for at in range(0, per_node, q):
            groups.append(
                tuple(node * per_node + at + one for node in range(first, first + together) for one in range(q))
            )
    return tuple(groups)


def sizes_up_to(most: int) -> tuple[int, ...]:
    """4 KiB to ``most`` bytes in factors of four: between them time is a line in log-log."""
    return tuple(4**power for power in range(6, 16) if 4**power <= most)
