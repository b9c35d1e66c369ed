"""Why nothing fits: the grid points that come nearest, in words."""

from __future__ import annotations

import numpy as np

from hapmoe.plan import Recompute
from hapmoe.schedule import in_flight
from hapmoe.search.expand import expand_orders, fullest_counts
from hapmoe.search.problem import Problem, settings_of
from hapmoe.stagecost import Slots, stage_costs
from hapmoe.units import format_bytes

__all__ = ["nearest_misses"]

MOST_LOOKED_AT = 400
FULL = Recompute(granularity="full", method="block", num_layers=10**6)


def nearest_misses(problem: Problem, most: int = 3) -> tuple[str, ...]:
    """Up to ``most`` sentences: what lacks least, and which rules cut most.

    Looks at even splits with everything recomputed, over the grid points with the most devices.
    """
    space, options = problem.space, problem.space.options
    lines: list[str] = []
    if not len(options) or not space.orders or not space.most_KP.any():
        cut = sorted(space.dropped.items(), key=lambda entry: -entry[1])
        if not space.orders:
            lines.append("no order of pools keeps the pins and the links between pools")
        lines += [f"{name}: rules out {count} choices of degrees" for name, count in cut[:most]]
        return tuple(lines) or ("no combination of degrees is legal on this cluster",)
    option, stages = fullest_counts(problem, np.arange(len(options)))
    points, _ = expand_orders(problem, option, stages, np.zeros(len(option)))
    points = points.take(points.vpp_G == 1)
    used = points.pp_G * options.devices_K[points.option_G]
    order = np.lexsort((options.mbs_K[points.option_G], -used))
    found: list[tuple[float, str]] = []
    for setting in settings_of(problem, points.take(order[:MOST_LOOKED_AT])):
        k = setting.option
        shortage = _worst_stage(problem, setting.pool_J, k, setting.microbatches)
        if shortage is not None:
            missing, stage, pool = shortage
            degrees = f"tp {options.tp_K[k]} cp {options.cp_K[k]} pp {setting.pp} dp {options.dp_K[k]}"
            if problem.job.model.moe:
                degrees += f" ep {options.ep_K[k]} etp {options.etp_K[k]}"
            found.append(
                (
                    missing,
                    f"{degrees}, microbatch size {options.mbs_K[k]}, everything recomputed: stage {stage} ({pool}) "
                    f"lacks {format_bytes(missing)} per device",
                )
            )
    found.sort()
    lines += [text for _, text in found[:most]]
    return tuple(lines)


def _worst_stage(problem: Problem, pools: tuple[int, ...], k: int, microbatches: int) -> tuple[float, int, str] | None:
    pp, layers = len(pools), problem.job.model.num_layers
    edges = [layers * stage // pp for stage in range(pp + 1)]
    worst: tuple[float, int, str] | None = None
    for stage, pool in enumerate(pools):
        flights = np.asarray([in_flight(pp, 1, stage, microbatches, pp)], np.int64)
        slots = Slots(
            np.asarray([[edges[stage]]]),
            np.asarray([[edges[stage + 1] - edges[stage]]]),
            flights,
            np.asarray([stage == 0]),
            np.asarray([stage == pp - 1]),
        )
        costs = stage_costs(problem.job, problem.tables[pool], k, slots, problem.prefix_CN, fixed=FULL)
        missing = float(costs.memory_X[0]) - problem.tables[pool].memory_limit_bytes
        if worst is None or missing > worst[0]:
            worst = (missing, stage, problem.cluster.pools[pool].name)
    return worst if worst is not None and worst[0] > 0 else None
