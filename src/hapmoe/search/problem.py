"""Everything that a search looks at, priced once: tables per pool and transfer times."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from hapmoe.cluster import Cluster
from hapmoe.job import JobSpec
from hapmoe.options import FloatArray, IntArray, Options, StageTable, side_by_side
from hapmoe.plan import Plan, Recompute, Stage
from hapmoe.pricing import price
from hapmoe.resolve import chunk_layers
from hapmoe.rules.recompute import cannot_recompute
from hapmoe.search.pins import Pins
from hapmoe.search.points import Points, Sends, price_sends, sends_of, stage_pools
from hapmoe.search.space import Space, build_space
from hapmoe.stagecost import class_prefix

__all__ = ["Problem", "Setting", "make_plan", "pose", "price_space", "settings_of"]


@dataclass(frozen=True)
class Problem:
    """A job on a cluster, with every option priced on every pool."""

    job: JobSpec
    cluster: Cluster
    space: Space
    tables: tuple[StageTable, ...]
    """Per pool, all over the same options."""
    sends: Sends
    prefix_CN: IntArray
    allowed: tuple[bool, ...]
    """Menu entries that may be chosen."""
    pins: Pins
    own_P: tuple[Options, ...] = ()
    """How the stages of each pool run, where that differs between pools; empty: as the space's options say."""

    def options_of(self, pool: int) -> Options:
        """How the stages of one pool run, option by option."""
        return self.own_P[pool] if self.own_P else self.space.options

    @cached_property
    def whole(self) -> StageTable:
        """The tables of all pools as one, see ``side_by_side``."""
        return side_by_side(self.tables)

    def column(self, pool: IntArray, option: IntArray) -> IntArray:
        """Where in ``whole`` an option stands on a pool."""
        return pool * len(self.tables[0].options) + option

    @property
    def microbatches_K(self) -> IntArray:
        options = self.space.options
        count: IntArray = self.job.training.global_batch_size // (options.mbs_K * options.dp_K)
        return count

    def take(self, which: IntArray) -> Problem:
        """The same problem with only these options."""
        return replace(
            self,
            space=self.space.take(which),
            tables=tuple(table.take(which) for table in self.tables),
            sends=self.sends.take(which),
            own_P=tuple(own.take(which) for own in self.own_P),
        )


@dataclass(frozen=True, slots=True)
class Setting:
    """One grid point, and what stays the same for all its layer splits."""

    option: int
    vpp: int
    stages_P: tuple[int, ...]
    order: int
    pool_J: tuple[int, ...]
    send_J: FloatArray
    """Per boundary; the wrap to the first stage last."""
    microbatches: int
    group: int
    extra: int

    @property
    def pp(self) -> int:
        return len(self.pool_J)

    @property
    def flat(self) -> bool:
        """1F1B without interleaving, whose transfers block."""
        return self.vpp == 1


def price_space(job: JobSpec, cluster: Cluster, space: Space, menu: tuple[Recompute, ...], pins: Pins) -> Problem:
    """Every option of ``space`` priced on every pool."""
    tables = tuple(price(job, pool, space.options, menu) for pool in cluster.pools) if len(space.options) else ()
    sends = price_sends(job, cluster, space.options)
    allowed = tuple(pins.allow_recompute(entry) and not cannot_recompute(job, entry) for entry in menu)
    return Problem(job, cluster, space, tables, sends, class_prefix(job), allowed, pins)


def pose(job: JobSpec, cluster: Cluster, menu: tuple[Recompute, ...], pins: Pins) -> Problem:
    """Enumerate and price the space of ``job`` on ``cluster``."""
    return price_space(job, cluster, build_space(job, cluster, pins), menu, pins)


def settings_of(problem: Problem, points: Points) -> list[Setting]:
    """The settings of some grid points."""
    training = problem.job.training
    settings: list[Setting | None] = [None] * len(points)
    pp_G = points.pp_G
    for pp in sorted(set(pp_G.tolist())):
        of = np.flatnonzero(pp_G == pp)
        mine = points.take(of)
        pool_GJ, place_GJ = stage_pools(mine, problem.space.orders)
        send_GJ = sends_of(mine, pool_GJ, place_GJ, problem.sends)
        microbatches = problem.microbatches_K[mine.option_G].tolist()
        for row, g in enumerate(of.tolist()):
            settings[g] = Setting(
                int(mine.option_G[row]),
                int(mine.vpp_G[row]),
                tuple(mine.stages_GP[row].tolist()),
                int(mine.order_G[row]),
                tuple(pool_GJ[row].tolist()),
                send_GJ[row],
                microbatches[row],
                training.microbatch_group_size or pp,
                int(training.overlap_moe_comm),
            )
    return [setting for setting in settings if setting is not None]


def make_plan(
    problem: Problem,
    setting: Setting,
    layers: tuple[int, ...],
    choices: tuple[tuple[int, int], ...],
    planner: str,
    backend: str,
) -> Plan:
    """The plan of a solved grid point; ``choices`` are (menu entry, block count) per stage."""
    job, cluster = problem.job, problem.cluster
    menu, k = problem.tables[0].menu, setting.option
    chunks = chunk_layers(layers, setting.vpp)
    stages: list[Stage] = []
    used = dict.fromkeys(setting.pool_J, 0)
    for index, pool_index in enumerate(setting.pool_J):
        pool, options = cluster.pools[pool_index], problem.options_of(pool_index)
        size = int(options.devices_K[k])
        begin = used[pool_index]
        used[pool_index] += size
        entry, block = choices[index]
        full = Recompute(granularity="full", method="block", num_layers=block)
        stages.append(
            Stage(
                pool=pool.name,
                device=pool.device.name,
                nodes=tuple(range(begin // pool.devices_per_node, -(-(begin + size) // pool.devices_per_node))),
                first_rank=sum(used.values()) - size,
                num_devices=size,
                micro_batch_size=int(options.mbs_K[k]),
                first_layer=chunks[index][0][0],
                num_layers=layers[index],
                virtual_layers=chunks[index],
                mtp_layers=job.model.mtp_layers if index == setting.pp - 1 else 0,
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
        micro_batch_size=stages[0].micro_batch_size,
        num_microbatches=setting.microbatches,
        global_batch_size=job.training.global_batch_size,
        vpp=setting.vpp,
        stages=tuple(stages),
    )
