"""Which ranks form which group: dense mesh and expert mesh of a stage, as Megatron lays them out.

Both factor the same ranks, first axis fastest (Megatron-Core ``parallel_state.py``,
``RankGenerator`` with order ``tp-cp-ep-dp-pp``; experts have cp = 1):

    dense   rank = first + t + tp * (c + cp * d)
    expert  rank = first + t + etp * (e + ep * x)          x counts replicas, edp of them
"""

from __future__ import annotations

from dataclasses import dataclass

from hapmoe.plan import Plan, Stage
from hapmoe.wording import count_devices, describe_ranks, format_ranges

__all__ = ["Cell", "Group", "Mesh", "StageMeshes", "describe_meshes", "list_groups"]

_SHOWN_RANKS = 64
"""Ranks drawn per mesh; the pattern repeats beyond."""
_SHOWN_GROUPS = 6

_MEANING = {
    "tp": "tensor parallel: each holds a slice of every weight matrix outside the experts",
    "cp": "context parallel: each works on a part of the sequence",
    "dp": "data parallel: replicas of the layers outside the experts; gradients are summed over dp x cp",
    "etp": "expert tensor parallel: each holds a slice of every expert",
    "ep": "expert parallel: each holds a part of the experts; tokens travel here (all-to-all)",
    "edp": "expert data parallel: replicas of the same experts; their gradients are summed here",
}


@dataclass(frozen=True)
class Cell:
    """One rank in a mesh picture."""

    rank: int
    coordinates: str
    """``tp 1, cp 0, dp 2``."""
    color: int
    """Number of the group that colours it, modulo the palette."""


@dataclass(frozen=True)
class Group:
    """All groups along one axis."""

    axis: str
    size: int
    count: int
    meaning: str
    members: tuple[str, ...]
    """The first groups in words, ``0-3``."""
    spans_nodes: int
    """Nodes that the widest group touches."""


@dataclass(frozen=True)
class Mesh:
    """One factoring: rows of ranks by node, and its groups."""

    name: str
    factors: tuple[tuple[str, int], ...]
    color_axis: str
    rows: tuple[tuple[str, tuple[Cell, ...]], ...]
    omitted: int
    """Ranks not drawn."""
    groups: tuple[Group, ...]


@dataclass(frozen=True)
class StageMeshes:
    """Stages that share degrees and pool, explained once on the first of them."""

    stages: tuple[int, ...]
    title: str
    num_devices: int
    dense: Mesh
    expert: Mesh | None
    also: str
    """Where the other stages' ranks begin."""


def list_groups(stage: Stage, axis: str) -> tuple[tuple[int, ...], ...]:
    """The rank groups along ``axis``: tp, cp, dp (dense mesh) or etp, ep, edp (expert mesh).

    >>> stage = Stage(pool="a", num_layers=1, tp=2, dp=2, ep=4)
    >>> list_groups(stage, "dp"), list_groups(stage, "ep")
    (((0, 2), (1, 3)), ((0, 1, 2, 3),))
    """
    sizes = dict(_factors(stage, expert=axis in ("etp", "ep", "edp")))
    inner = 1
    for name, size in sizes.items():
        if name == axis:
            break
        inner *= size
    size, total = sizes[axis], count_devices(stage)
    return tuple(
        tuple(stage.first_rank + outer + offset + index * inner for index in range(size))
        for outer in range(0, total, inner * size)
        for offset in range(inner)
    )


def describe_meshes(plan: Plan, devices_per_node: dict[str, int], *, moe: bool) -> tuple[StageMeshes, ...]:
    """One entry per distinct set of degrees and pool; ``devices_per_node`` by pool name."""
    alike: dict[tuple[object, ...], list[int]] = {}
    for index, stage in enumerate(plan.stages):
        key = (stage.pool, stage.tp, stage.cp, stage.ep, stage.etp, stage.dp, count_devices(stage))
        alike.setdefault(key, []).append(index)
    return tuple(
        _describe_stages(plan, tuple(stages), devices_per_node[plan.stages[stages[0]].pool], moe=moe)
        for stages in alike.values()
    )


def _factors(stage: Stage, *, expert: bool) -> tuple[tuple[str, int], ...]:
    if expert:
        return (("etp", stage.etp), ("ep", stage.ep), ("edp", stage.edp))
    return (("tp", stage.tp), ("cp", stage.cp), ("dp", stage.dp))


def _describe_stages(plan: Plan, stages: tuple[int, ...], per_node: int, *, moe: bool) -> StageMeshes:
    stage = plan.stages[stages[0]]
    others = [f"stage {index}: ranks {describe_ranks(plan.stages[index])}" for index in stages[1:5]]
    more = f" and {len(stages) - 5} more" if len(stages) > 5 else ""
    return StageMeshes(
        stages=stages,
        title=f"Stage{'s' * (len(stages) > 1)} {format_ranges(stages)} on {stage.pool}",
        num_devices=count_devices(stage),
        dense=_describe_mesh(stage, per_node, expert=False),
        expert=_describe_mesh(stage, per_node, expert=True) if moe else None,
        also=f"The same pattern holds for {', '.join(others)}{more}." if others else "",
    )


def _describe_mesh(stage: Stage, per_node: int, *, expert: bool) -> Mesh:
    factors = _factors(stage, expert=expert)
    color_axis = "ep" if expert else "tp"
    color = {rank: number for number, group in enumerate(list_groups(stage, color_axis)) for rank in group}
    total = count_devices(stage)
    cells: dict[int, list[Cell]] = {}
    for local in range(min(total, _SHOWN_RANKS)):
        rank, rest, coordinates = stage.first_rank + local, local, []
        for axis, size in factors:
            coordinates.append(f"{axis} {rest % size}")
            rest //= size
        cells.setdefault(_node_of(stage, local, per_node), []).append(Cell(rank, ", ".join(coordinates), color[rank]))
    return Mesh(
        name="Experts" if expert else "Dense layers and attention",
        factors=factors,
        color_axis=color_axis,
        rows=tuple((f"node {node}", tuple(row)) for node, row in cells.items()),
        omitted=max(0, total - _SHOWN_RANKS),
        groups=tuple(_describe_group(stage, axis, per_node) for axis, _ in factors),
    )


def _node_of(stage: Stage, local: int, per_node: int) -> int:
    """Node within the pool. A stage smaller than a node sits on one; larger ones fill whole nodes."""
    place = local // per_node
    return stage.nodes[place] if place < len(stage.nodes) else place


def _describe_group(stage: Stage, axis: str, per_node: int) -> Group:
    groups = list_groups(stage, axis)
    nodes = max(len({_node_of(stage, rank - stage.first_rank, per_node) for rank in group}) for group in groups)
    return Group(
        axis=axis,
        size=len(groups[0]),
        count=len(groups),
        meaning=_MEANING[axis],
        members=tuple(_format_members(group) for group in groups[:_SHOWN_GROUPS]),
        spans_nodes=nodes,
    )


def _format_members(group: tuple[int, ...]) -> str:
    """``0-3`` for neighbours, ``0, 8, 16 … 56`` for a stride."""
    if len(group) < 3 or group[-1] - group[0] == len(group) - 1:
        return format_ranges(group)
    if len(group) <= 4:
        return ", ".join(map(str, group))
    return f"{group[0]}, {group[1]}, {group[2]} … {group[-1]}"
