"""Why nothing fits, in sentences: what each constraint kills, what comes nearest, and what would help.

The nearest miss of a grid point is the split of its layers whose fullest stage lacks least, every stage
with the recomputation that holds least. What would help is tried: the same search for the nearest
miss on a job or cluster with one thing changed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from hapmoe.cluster import Cluster
from hapmoe.job import JobSpec
from hapmoe.options import FloatArray, IntArray, Options
from hapmoe.pricing import price
from hapmoe.rules.recompute import cannot_recompute
from hapmoe.schedule import in_flight
from hapmoe.search.counts import sequences, stage_counts
from hapmoe.search.pins import Pins
from hapmoe.search.problem import Problem, price_space
from hapmoe.search.space import build_space
from hapmoe.stagecost import Slots, stage_costs
from hapmoe.units import format_bytes

__all__ = ["HELP", "nearest_misses"]

MOST_LOOKED_AT = 160
MOST_COUNTS = 8
"""Stage counts per stage size."""
MOST_LOOKED_AT_AGAIN = 12
"""Grid points per thing that might help."""

TOGETHER = 8192
"""Stages with numbers of layers that are looked at at once."""

_Point = tuple[tuple[int, ...], int, int]
"""Pool of every stage, option, microbatches."""

HELP = "would help: "
"""How the sentences begin that say what would."""


@dataclass(frozen=True, slots=True)
class _Miss:
    """One grid point and what its fullest stage lacks (0 or less: it fits)."""

    missing: float
    stage: int
    pool_J: tuple[int, ...]
    option: int
    microbatches: int


def nearest_misses(problem: Problem, most: int = 3) -> tuple[str, ...]:
    """Sentences for the report of a search that found nothing."""
    space = problem.space
    if not len(space.options) or not space.orders or not space.most_KP.any():
        lines = [] if space.orders else ["no order of pools keeps the pins and the links between pools"]
        lines += _rules(problem, most)
        return tuple(lines) or ("no combination of degrees is legal on this cluster",)
    misses = sorted(_misses(problem, MOST_LOOKED_AT), key=lambda miss: miss.missing)
    if not misses:
        return ("no stage count is legal on this cluster under the pins",)
    if misses[0].missing <= 0:
        # Memory is not the reason: what is left is the schedule (virtual stages, microbatches) and the pins.
        return (f"{_words(problem, misses[0])} fits into memory, but its schedule or the pins rule it out",)
    lines = [f"{_words(problem, miss)}: {_lacks(problem, miss)}" for miss in _distinct(misses, most)]
    lines += [f"{text} of {_words(problem, misses[0])}" for text in _broken_rules(problem, misses[0])]
    lines += [f"memory: none of {len(space.options):,} legal choices of degrees and microbatch size fits"]
    lines += [HELP + text for text in _helps(problem)]
    return tuple(lines)


def _rules(problem: Problem, most: int) -> list[str]:
    cut = sorted(problem.space.dropped.items(), key=lambda entry: -entry[1])
    total = sum(problem.space.dropped.values()) + len(problem.space.options)
    return [f"{name}: rules out {count:,} choices of degrees ({count / total:.0%})" for name, count in cut[:most]]


def _distinct(misses: list[_Miss], most: int) -> Iterator[_Miss]:
    """The nearest ones that differ in more than the order of stages."""
    seen: set[tuple[int, tuple[int, ...]]] = set()
    for miss in misses:
        key = (miss.option, tuple(sorted(miss.pool_J)))
        if key not in seen and len(seen) < most:
            seen.add(key)
            yield miss


def _words(problem: Problem, miss: _Miss) -> str:
    options, k = problem.space.options, miss.option
    words = f"tp {options.tp_K[k]} cp {options.cp_K[k]} pp {len(miss.pool_J)} dp {options.dp_K[k]}"
    if problem.job.model.moe:
        words += f" ep {options.ep_K[k]} etp {options.etp_K[k]}"
    return f"{words}, microbatch size {options.mbs_K[k]}"


def _lacks(problem: Problem, miss: _Miss) -> str:
    how = "everything recomputed" if problem.allowed[-1] else "recomputing what --set and the script allow"
    pool = problem.cluster.pools[miss.pool_J[miss.stage]].name
    return f"{how}, stage {miss.stage} ({pool}) lacks {format_bytes(miss.missing)} per device"


def _misses(problem: Problem, most: int) -> Iterator[_Miss]:
    """The grid points with the most devices, those that hold least first, each with its best split."""
    options = problem.space.options
    if not len(options) or not problem.space.most_KP.any():
        return
    held_K = _held_at_least(problem)
    microbatches_K = problem.microbatches_K
    rows: list[tuple[int, float, int, int, tuple[int, ...]]] = []
    for size in sorted(set(options.devices_K.tolist())):
        ks = np.flatnonzero(options.devices_K == size)
        ks = ks[np.lexsort((options.mbs_K[ks], held_K[ks]))][:most]
        for counts in sorted(stage_counts(problem, size), key=sum, reverse=True)[:MOST_COUNTS]:
            pp = sum(counts)
            for pool_J in sequences(problem, counts):
                rows += [(-pp * size, float(held_K[k]) / pp, int(options.mbs_K[k]), int(k), pool_J) for k in ks]
    rows.sort()
    points = [(pool_J, k, int(microbatches_K[k])) for _, _, _, k, pool_J in rows[:most]]
    layers, first = problem.job.model.num_layers, 0
    while first < len(points):
        some = points[first : first + max(TOGETHER // (layers * len(points[first][0])), 1)]
        first += len(some)
        for (pool_J, k, microbatches), over_JN in zip(some, _memory(problem, some), strict=True):
            yield _Miss(*_best_split(over_JN, layers), pool_J, k, microbatches)


def _held_at_least(problem: Problem) -> FloatArray:
    """[K] parameters of all layers on one rank, a quick guess at which options come nearest."""
    table, counts = problem.tables[0], problem.prefix_CN[:, -1:]
    each = table.weight_bytes + table.grad_bytes
    dense = table.dense_params_CK * (each + table.dense_optimizer_bytes_K)
    expert = table.expert_params_CK * (each + table.expert_optimizer_bytes_K)
    total: FloatArray = (counts * (dense + expert)).sum(axis=0)
    return total


def _memory(problem: Problem, points: Sequence[_Point]) -> list[FloatArray]:
    """Per point [J, n] bytes above the limit of stage j with n + 1 layers, at the recomputation that holds least."""
    layers = problem.job.model.num_layers
    many = [layers - len(pool_J) + 1 for pool_J, _, _ in points]
    rows: list[IntArray] = []
    for (pool_J, k, microbatches), most in zip(points, many, strict=True):
        pp, count = len(pool_J), np.arange(1, most + 1)
        for stage, pool in enumerate(pool_J):
            start = np.minimum(layers * stage // pp, layers - count) if stage < pp - 1 else layers - count
            ((held,),) = in_flight(pp, 1, stage, microbatches, pp)
            alike = np.full((5, most), [[pool], [k], [held], [stage == 0], [stage == pp - 1]])
            rows.append(np.concatenate([start[None], count[None], alike]))
    start, count, pool_X, k_X, held_X, first, last = np.concatenate(rows, axis=1)
    slots = Slots(start[:, None], count[:, None], held_X[:, None, None], first == 1, last == 1)
    column = problem.column(pool_X, k_X)
    costs = stage_costs(problem.job, problem.whole, column, slots, problem.prefix_CN, allowed=problem.allowed)
    over = np.full(len(start), -np.inf)
    # a row may have several recomputations that fit
    np.maximum.at(over, costs.row_X, costs.memory_X - problem.whole.memory_limit_bytes_K[column[costs.row_X]])
    sizes = [len(pool_J) * most for (pool_J, _, _), most in zip(points, many, strict=True)]
    parts = np.split(over, np.cumsum(sizes)[:-1])
    return [part.reshape(len(pool_J), -1) for part, (pool_J, _, _) in zip(parts, points, strict=True)]


def _best_split(over_JN: FloatArray, layers: int) -> tuple[float, int]:
    """What the fullest stage lacks in the split that lacks least, and which stage that is.

    >>> _best_split(np.array([[-1.0, 3.0], [-2.0, 1.0]]), 3)
    (1.0, 1)
    """
    levels = np.unique(over_JN)

    def enough(at: int) -> bool:
        holds: IntArray = (over_JN <= levels[at]).sum(axis=1)
        return bool((holds > 0).all() and holds.sum() >= layers)

    at = bisect_left(range(len(levels)), True, key=enough)
    if at == len(levels):
        return float("inf"), 0
    return float(levels[at]), int(np.argwhere(over_JN == levels[at])[0, 0])


# ---------------------------------------------------------------- rules that stand in the way


def _broken_rules(problem: Problem, miss: _Miss) -> list[str]:
    """Degrees of the nearest miss doubled (and again) until it would fit, where a rule forbids them."""
    job, options, k = problem.job, problem.space.options, miss.option
    values = {axis: int(getattr(options, f"{axis}_K")[k]) for axis in ("tp", "cp", "ep", "etp", "dp", "mbs")}
    size = values["tp"] * values["cp"] * values["dp"]
    lines = []
    for axis, why in (("ep", _ep_rule), ("etp", _etp_rule), ("tp", _tp_rule)):
        if axis != "tp" and job.model.moe is None:
            continue
        value = values[axis] * 2
        while value <= size:
            changed = values | {axis: value}
            if axis == "tp":
                changed["dp"] = size // value // values["cp"]
            reason = why(job, value)
            whole = changed["dp"] > 0 and size % (changed["ep"] * changed["etp"]) == 0
            if reason and whole and _fits_with(problem, miss, changed):
                lines.append(f"{axis} {value} would fit, but {reason}: instead")
                break
            value *= 2
    return lines


def _ep_rule(job: JobSpec, ep: int) -> str:
    moe = job.model.moe
    return f"{moe.num_experts} experts do not divide by it" if moe and moe.num_experts % ep else ""


def _etp_rule(job: JobSpec, etp: int) -> str:
    moe = job.model.moe
    return f"an expert of width {moe.ffn_hidden} does not divide by it" if moe and moe.ffn_hidden % etp else ""


def _tp_rule(job: JobSpec, tp: int) -> str:
    return f"{job.model.num_heads} attention heads do not divide by it" if job.model.num_heads % tp else ""


def _fits_with(problem: Problem, miss: _Miss, degrees: dict[str, int]) -> bool:
    options = Options(*(np.asarray([degrees[axis]], np.int64) for axis in ("tp", "cp", "ep", "etp", "dp", "mbs")))
    menu = problem.tables[0].menu
    tables = tuple(price(problem.job, pool, options, menu) for pool in problem.cluster.pools)
    (memory,) = _memory(replace(problem, tables=tables), [(miss.pool_J, 0, miss.microbatches)])
    return _best_split(memory, problem.job.model.num_layers)[0] <= 0


# ---------------------------------------------------------------- what would help


def _helps(problem: Problem) -> list[str]:
    """Single changes with which some plan fits; cheap ones first."""
    job, training = problem.job, problem.job.training
    tries: list[tuple[str, Callable[[], Problem]]] = []

    def with_training(**changes: object) -> JobSpec:
        return msgspec.structs.replace(job, training=msgspec.structs.replace(training, **changes))

    menu = problem.tables[0].menu
    everything = tuple(not cannot_recompute(job, entry) for entry in menu)
    if problem.allowed != everything:
        tries.append(("recomputation without the --set bound", lambda: replace(problem, allowed=everything)))
    if problem.pins.degrees or problem.pins.nodes or problem.pins.order:
        tries.append(
            ("no --set pins on degrees, nodes or order", lambda: _posed(problem, pins=_only_menu(problem.pins)))
        )
    if not training.distributed_optimizer:
        name = "optimizer states divided over data parallel ranks (--use-distributed-optimizer)"
        tries.append((name, lambda: _posed(problem, job=with_training(distributed_optimizer=True))))
    if training.optimizer_offload_fraction < 1:
        name = "optimizer states in host memory (--optimizer-cpu-offload)"
        tries.append((name, lambda: _posed(problem, job=with_training(optimizer_offload_fraction=1.0))))
    lines = [name for name, changed in tries if _something_fits(changed())]
    return lines + _more_nodes(problem)


def _more_nodes(problem: Problem) -> list[str]:
    """Per pool, the smallest multiple of its nodes that is enough."""
    lines = []
    for p, pool in enumerate(problem.cluster.pools):
        for factor in (2, 3, 4):
            grown = msgspec.structs.replace(pool, nodes=pool.nodes * factor, hosts=())
            pools = (*problem.cluster.pools[:p], grown, *problem.cluster.pools[p + 1 :])
            cluster = msgspec.structs.replace(problem.cluster, pools=pools)
            if _something_fits(_posed(problem, cluster=cluster)):
                lines.append(f"{grown.nodes} nodes of {pool.name} instead of {pool.nodes}")
                break
    return lines


def _only_menu(pins: Pins) -> Pins:
    return replace(pins, degrees=(), nodes=(), order=())


def _posed(
    problem: Problem, job: JobSpec | None = None, cluster: Cluster | None = None, pins: Pins | None = None
) -> Problem:
    """The same question asked of something else; of every choice of degrees only its smallest microbatch size, which
    holds least."""
    job, cluster, pins = job or problem.job, cluster or problem.cluster, pins or problem.pins
    space = build_space(job, cluster, pins)
    options = space.options
    degrees = np.stack([options.tp_K, options.cp_K, options.ep_K, options.etp_K, options.dp_K, options.mbs_K])
    order = np.lexsort(degrees[::-1])
    changes = (np.diff(degrees[:-1, order], axis=1) != 0).any(axis=0)
    first = np.concatenate([[True], changes])[: len(order)]
    return price_space(job, cluster, space.take(np.sort(order[first])), problem.tables[0].menu, pins)


def _something_fits(problem: Problem) -> bool:
    return any(miss.missing <= 0 for miss in _misses(problem, MOST_LOOKED_AT_AGAIN))
