"""Everything that a search looks at, priced once: tables per pool, transfer times, grid points."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from hapmoe.boundary import boundary_s, near, same_node
from hapmoe.cluster import Cluster
from hapmoe.job import JobSpec
from hapmoe.options import FloatArray, IntArray, StageTable
from hapmoe.plan import Plan, Recompute, Stage
from hapmoe.pricing import price
from hapmoe.resolve import chunk_layers
from hapmoe.search.pins import Pins
from hapmoe.search.space import Placement, Space, build_space
from hapmoe.stagecost import class_prefix

__all__ = ["Grid", "Point", "Problem", "make_plan", "pose"]


@dataclass(frozen=True, slots=True)
class Grid:
    """G pairs of a placement and an option of its size; virtual stages are added later."""

    placement_G: IntArray
    option_G: IntArray
    microbatches_G: IntArray
    stages_GP: IntArray
    """Stages per pool of the cluster."""


@dataclass(frozen=True, slots=True)
class Point:
    """One grid point: where the stages stand, how each is run, how many virtual stages."""

    placement: int
    option: int
    vpp: int


@dataclass(frozen=True, slots=True)
class Problem:
    """A job on a cluster, with every option priced on every pool."""

    job: JobSpec
    cluster: Cluster
    space: Space
    tables: tuple[StageTable, ...]
    """Per pool, all over the same options."""
    prefix_CN: IntArray
    grid: Grid
    sends: Mapping[tuple[int, int, bool], FloatArray]
    """Seconds by (sending pool, receiving pool, same node), per option."""
    send_names_PB: tuple[tuple[tuple[int, int, bool], ...], ...]
    """Per placement, the key into ``sends`` of every boundary; the wrap to the first stage last."""
    allowed: tuple[bool, ...]
    """Menu entries that may be chosen."""
    pins: Pins

    def point_sends(self, point: Point) -> list[float]:
        """Seconds per boundary of a point; pp entries, the last is the wrap."""
        return [float(self.sends[key][point.option]) for key in self.send_names_PB[point.placement]]


def pose(
    job: JobSpec,
    cluster: Cluster,
    menu: tuple[Recompute, ...],
    pins: Pins,
    keep: Callable[[Placement], bool] = lambda _: True,
) -> Problem:
    """Enumerate and price the space of ``job`` on ``cluster``."""
    space = build_space(job, cluster)
    options = space.options
    placements = tuple(p for p in space.placements if keep(p) and pins.allow_placement(cluster, p))
    space = Space(placements, options, space.complete, space.dropped)
    tables = tuple(price(job, pool, options, menu) for pool in cluster.pools) if len(options) else ()
    names = tuple(_boundaries(cluster, placement) for placement in placements)
    sends = {
        key: boundary_s(job, cluster, cluster.pools[key[0]], cluster.pools[key[1]], options, key[2])
        for key in sorted({key for keys in names for key in keys})
    }
    allowed = tuple(pins.allow_recompute(entry) for entry in menu)
    return Problem(
        job, cluster, space, tables, class_prefix(job), _grid(job, cluster, space, pins), sends, names, allowed, pins
    )


def _boundaries(cluster: Cluster, placement: Placement) -> tuple[tuple[int, int, bool], ...]:
    keys: list[tuple[int, int, bool]] = []
    for index, (pool, stages) in enumerate(zip(placement.pools, placement.stages, strict=True)):
        keys += [(pool, pool, same_node(cluster.pools[pool], placement.size, place)) for place in range(stages - 1)]
        following = placement.pools[(index + 1) % len(placement.pools)]
        one_node = len(placement.pools) == 1 and near(cluster.pools[pool], 0, placement.nodes[0] - 1)
        keys.append((pool, following, one_node))
    return tuple(keys)


def _grid(job: JobSpec, cluster: Cluster, space: Space, pins: Pins) -> Grid:
    options = space.options
    sizes_K = options.devices_K
    wanted_K = pins.allow_options(options) if len(options) else np.zeros(0, bool)
    parts = []
    for index, placement in enumerate(space.placements):
        chosen = np.flatnonzero(wanted_K & (sizes_K == placement.size))
        stages = np.zeros(len(cluster.pools), np.int64)
        stages[list(placement.pools)] = placement.stages
        parts.append((np.full(len(chosen), index), chosen, np.tile(stages, (len(chosen), 1))))
    if not parts:
        empty = np.zeros(0, np.int64)
        return Grid(empty, empty, empty, np.zeros((0, len(cluster.pools)), np.int64))
    placement_G, option_G, stages_GP = (np.concatenate(column) for column in zip(*parts, strict=True))
    microbatches_G = job.training.global_batch_size // (options.mbs_K * options.dp_K)[option_G]
    return Grid(placement_G, option_G, microbatches_G, stages_GP)


def make_plan(
    problem: Problem,
    point: Point,
    layers: tuple[int, ...],
    choices: tuple[tuple[int, int], ...],
    planner: str,
    backend: str,
) -> Plan:
    """The plan of a solved grid point; ``choices`` are (menu entry, block count) per stage."""
    job, cluster, options = problem.job, problem.cluster, problem.space.options
    placement = problem.space.placements[point.placement]
    menu, k = problem.tables[0].menu, point.option
    chunks = chunk_layers(layers, point.vpp)
    stages: list[Stage] = []
    used = dict.fromkeys(placement.pools, 0)
    for index, pool_index in enumerate(placement.pool_of_stage):
        pool = cluster.pools[pool_index]
        begin = used[pool_index]
        used[pool_index] += placement.size
        entry, block = choices[index]
        full = Recompute(granularity="full", method="block", num_layers=block)
        stages.append(
            Stage(
                pool=pool.name,
                device=pool.device.name,
                nodes=tuple(
                    range(begin // pool.devices_per_node, -(-(begin + placement.size) // pool.devices_per_node))
                ),
                first_rank=index * placement.size,
                num_devices=placement.size,
                micro_batch_size=int(options.mbs_K[k]),
                first_layer=chunks[index][0][0],
                num_layers=layers[index],
                virtual_layers=chunks[index],
                mtp_layers=job.model.mtp_layers if index == placement.pp - 1 else 0,
                tp=int(options.tp_K[k]),
                cp=int(options.cp_K[k]),
                ep=int(options.ep_K[k]),
                etp=int(options.etp_K[k]),
                dp=int(options.dp_K[k]),
                recompute=full if entry == len(menu) - 1 else menu[entry],
            )
        )
    return Plan(
        planner=planner,
        backend=backend,
        micro_batch_size=int(options.mbs_K[k]),
        num_microbatches=job.training.global_batch_size // int(options.mbs_K[k] * options.dp_K[k]),
        global_batch_size=job.training.global_batch_size,
        vpp=point.vpp,
        stages=tuple(stages),
    )
