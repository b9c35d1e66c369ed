"""Degrees of its own for each pool: the exact search over combinations of options, one per pool.

Stages of one pool run alike; a microbatch holds the same sequences everywhere (dp * mbs), so the pools
of a plan have options of one such number. A leaf is an option of a pool with a number of stages; a
combination is a leaf for each pool in use. For a step of T seconds a leaf holds a most number of
layers, by time and by memory; combinations whose leaves together do not hold the model within the best
step known are never formed. Those left stand as options of a problem of their own, with each pool's
columns side by side: the bounds and the split search are those of ``exact``.

Array legend: L leaves, G combinations, P pools, K options.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from hapmoe.boundary import boundary_s
from hapmoe.options import FloatArray, IntArray
from hapmoe.plan import Plan
from hapmoe.search.bounds import count_bounds, heavy_class
from hapmoe.search.capacity import pool_holds
from hapmoe.search.dominance import Covers
from hapmoe.search.expand import expand_orders
from hapmoe.search.points import Sends
from hapmoe.search.problem import Problem, make_plan
from hapmoe.search.solve import solve_points
from hapmoe.search.space import Space
from hapmoe.search.state import OutOfTimeError, Progress, State

__all__ = ["Mixed", "search_degrees"]

MOST_ROWS = 2_000_000
"""Combinations of one number of sequences per microbatch that are formed; beyond it they stay open (the gap
says so)."""
FIRST_CHUNK, MOST_CHUNK = 128, 4096
"""Combinations that are priced and solved at once: few at first, for a good plan to cut with."""
CEILINGS = (1.1, 1.3, 2.0, 8.0, np.inf)
"""How much slower than the lowest bound the best plan may be, where none is known: a ceiling cuts."""


@dataclass(slots=True)
class Mixed:
    """What the search over combinations found."""

    plans: list[tuple[float, Plan]]
    """Step and plan, each better than those before it."""
    open_bound: float
    """Lowest bound of what could not be searched to the end."""
    considered: int
    pruned: Counter[str]
    cut: bool = False
    """The time limit passed, or the user interrupted."""


@dataclass(frozen=True, slots=True)
class _Leaves:
    """Options of one pool with numbers of stages, all with the same sequences per microbatch."""

    pool: int
    option_L: IntArray
    stages_L: IntArray
    rate_L: FloatArray
    """Layers of the heavy class per second of one microbatch."""
    holds_L: FloatArray
    """The most layers of the heavy class within the step that was asked for."""

    def take(self, which: IntArray) -> _Leaves:
        return _Leaves(self.pool, self.option_L[which], self.stages_L[which], self.rate_L[which], self.holds_L[which])


@dataclass(frozen=True, slots=True)
class _Combinations:
    """A leaf per pool in use; pools that are not used have no stages."""

    option_GP: IntArray
    stages_GP: IntArray
    bound_G: FloatArray

    def __len__(self) -> int:
        return len(self.bound_G)

    def take(self, which: IntArray | slice) -> _Combinations:
        return _Combinations(self.option_GP[which], self.stages_GP[which], self.bound_G[which])


def search_degrees(
    problem: Problem, state: State, *, planner: str, backend: str, progress: Progress | None = None
) -> Mixed:
    """The fastest plan whose pools differ in degrees, if it beats ``state.best``.

    ``state`` brings the best step known, the deadline and the back end's own rules.
    """
    mixed = Mixed([], np.inf, 0, Counter())
    lowest = _lowest_bound(problem)
    if not np.isfinite(lowest):
        return mixed
    known = state.best
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        for ceiling in CEILINGS if not np.isfinite(known) else (np.inf,):
            state.best = min(known, lowest * ceiling)
            mixed = Mixed([], np.inf, 0, Counter())
            try:
                _search(problem, state, mixed, planner, backend, progress)
            except (OutOfTimeError, KeyboardInterrupt) as stop:
                if isinstance(stop, KeyboardInterrupt) and not mixed.plans and not np.isfinite(known):
                    raise
                mixed.cut = True
            mixed.open_bound = min(mixed.open_bound, state.open_bound)
            if mixed.plans or mixed.cut:
                break
    return mixed


def _search(
    problem: Problem, state: State, mixed: Mixed, planner: str, backend: str, progress: Progress | None
) -> None:
    rows = _formed(problem, state, mixed)
    rows = rows.take(np.argsort(rows.bound_G, kind="stable"))
    mixed.considered = len(rows)
    done, size = 0, FIRST_CHUNK
    try:
        while done < len(rows) and rows.bound_G[done] < state.best:
            chunk = rows.take(slice(done, done + size))
            chunk = chunk.take(np.flatnonzero(chunk.bound_G < state.best))
            _solve(problem, state, mixed, chunk, planner, backend)
            done, size = done + size, min(2 * size, MOST_CHUNK)
            if progress:
                at = float(rows.bound_G[min(done, len(rows) - 1)])
                progress(min(done, len(rows)), len(rows), state.best, at)
    finally:
        if done < len(rows):
            mixed.open_bound = min(mixed.open_bound, float(rows.bound_G[done]))
            mixed.pruned["bound"] += len(rows) - done


def _solve(problem: Problem, state: State, mixed: Mixed, chunk: _Combinations, planner: str, backend: str) -> None:
    """Bounds, then orders of pools and virtual stages, then splits of some combinations."""
    side = _side_by_side(problem, chunk)
    option = np.arange(len(chunk))
    bound = np.maximum(chunk.bound_G, count_bounds(side, option, chunk.stages_GP))
    keep = np.flatnonzero(bound < state.best)
    keep = keep[np.argsort(bound[keep], kind="stable")]
    mixed.pruned["bound"] += len(chunk) - len(keep)
    if not len(keep):
        return
    points, floor = expand_orders(side, keep, chunk.stages_GP[keep], bound[keep], state.best)
    seen = len(state.found)
    try:
        solve_points(side, state, points, floor)
    finally:
        for step, setting, solution in state.found[seen:]:
            plan = make_plan(side, setting, solution.layers, solution.choices, planner, backend)
            mixed.plans.append((step, plan))
        del state.found[seen:]
        mixed.pruned.update(state.pruned)
        state.pruned.clear()


# ---------------------------------------------------------------- combinations


def _lowest_bound(problem: Problem) -> float:
    """M times the layers over the highest rate of all pools together, over the numbers of sequences."""
    lowest = np.inf
    layers = heavy_class(problem)[1]
    for microbatches, leaves in _groups(problem, np.inf):
        rate = sum(float(leaf.rate_L.max()) for leaf in leaves)
        lowest = min(lowest, microbatches * layers / rate) if rate else lowest
    return lowest


def _groups(problem: Problem, step_s: float) -> Iterator[tuple[int, list[_Leaves]]]:
    """Per number of sequences per microbatch: microbatches in a step, and the leaves of every pool that has some."""
    options = problem.space.options
    sequences_K = options.mbs_K * options.dp_K
    for sequences in np.unique(sequences_K).tolist():
        of = np.flatnonzero(sequences_K == sequences)
        leaves = [_leaves(problem, p, of, step_s) for p in range(len(problem.tables))]
        yield problem.job.training.global_batch_size // sequences, [leaf for leaf in leaves if len(leaf.option_L)]


def _leaves(problem: Problem, pool: int, option_K: IntArray, step_s: float) -> _Leaves:
    space, table = problem.space, problem.tables[pool]
    heavy, layers = heavy_class(problem)
    most, step = space.most_KP[option_K, pool], space.step_KP[option_K, pool]
    many = np.minimum(most, problem.job.model.num_layers) // np.maximum(step, 1)
    option = np.repeat(option_K, many)
    number = np.arange(len(option)) - np.repeat(np.cumsum(many) - many, many) + 1
    stages = number * np.repeat(step, many)
    own = problem.cluster.pools[pool]
    if problem.pins.nodes and len(option):
        nodes = -(-stages * space.options.devices_K[option] // own.devices_per_node)
        fine = np.asarray([problem.pins.allow_nodes(own.name, count) for count in range(own.nodes + 1)])
        option, stages = option[fine[nodes]], stages[fine[nodes]]
    rate = stages / (table.forward_CK[heavy] + table.backward_CK[heavy])[option]
    holds = pool_holds(problem, pool, option, stages, step_s)
    leaves = _Leaves(pool, option, stages, rate, np.minimum(holds, layers))
    return leaves.take(np.flatnonzero(holds > 0))


def _formed(problem: Problem, state: State, mixed: Mixed) -> _Combinations:
    """Every combination of at least two pools and two options whose leaves hold the model within the best step."""
    pools = len(problem.tables)
    parts = [_Combinations(np.zeros((0, pools), np.int64), np.zeros((0, pools), np.int64), np.zeros(0))]
    layers = heavy_class(problem)[1]
    covers = Covers(problem) if state.legal is None else None
    for microbatches, leaves in _groups(problem, state.best):
        for used in (u for many in range(2, len(leaves) + 1) for u in combinations(leaves, many)):
            if not problem.space.orders_of(tuple(leaf.pool for leaf in used)):
                continue
            found = _join(problem, used, layers)
            if found is None:
                rate = sum(float(leaf.rate_L.max()) for leaf in used)
                mixed.open_bound = min(mixed.open_bound, microbatches * layers / rate)
                continue
            option, stages, rate_G = found
            bound = microbatches * layers / rate_G
            rows = _Combinations(option, stages, bound).take(np.flatnonzero(bound < state.best))
            if covers is not None:  # what covers another may break a back end's own rules
                kept = np.flatnonzero(~covers.covered(rows.option_GP, [leaf.pool for leaf in used]))
                mixed.pruned["covered"] += len(rows) - len(kept)
                rows = rows.take(kept)
            parts.append(rows)
    return _Combinations(
        np.concatenate([part.option_GP for part in parts]),
        np.concatenate([part.stages_GP for part in parts]),
        np.concatenate([part.bound_G for part in parts]),
    )


def _join(problem: Problem, used: tuple[_Leaves, ...], layers: int) -> tuple[IntArray, IntArray, FloatArray] | None:
    """Options [G, P], stages [G, P] and rates [G] of the combinations of some pools; None: too many.

    One pool after the other: what is held so far and the most that the others hold must be enough.
    """
    pools = len(problem.tables)
    option, stages = np.zeros((1, pools), np.int64), np.zeros((1, pools), np.int64)
    holds, rate = np.zeros(1), np.zeros(1)
    for number, leaf in enumerate(used):
        others = sum(float(other.holds_L.max()) for other in used[number + 1 :])
        leaf = leaf.take(np.argsort(-leaf.holds_L, kind="stable"))
        enough = np.searchsorted(-leaf.holds_L, -(layers - others - holds), side="right")
        if int(enough.sum()) > MOST_ROWS:
            return None
        row = np.repeat(np.arange(len(enough)), enough)
        column = np.arange(len(row)) - np.repeat(np.cumsum(enough) - enough, enough)
        option, stages = option[row], stages[row]
        option[:, leaf.pool], stages[:, leaf.pool] = leaf.option_L[column], leaf.stages_L[column]
        holds, rate = holds[row] + leaf.holds_L[column], rate[row] + leaf.rate_L[column]
    total = stages.sum(axis=1)
    mine = [leaf.pool for leaf in used]
    differ = (option[:, mine] != option[:, mine[:1]]).any(axis=1)
    keep = differ & (total <= problem.job.model.num_layers)
    if problem.pins.degrees:
        allowed = np.asarray([problem.pins.allow("pp", pp) for pp in range(int(total.max(initial=0)) + 1)])
        keep &= allowed[total]
    return option[keep], stages[keep], rate[keep]


# ---------------------------------------------------------------- a problem whose options are combinations


def _side_by_side(problem: Problem, chunk: _Combinations) -> Problem:
    """The problem whose option g is combination g: each pool's columns are those of its own option."""
    space, options, rows = problem.space, problem.space.options, len(chunk)
    pools = range(len(problem.tables))
    own = tuple(options.take(chunk.option_GP[:, p]) for p in pools)
    used = chunk.stages_GP > 0
    first = chunk.option_GP[np.arange(rows), used.argmax(axis=1)]
    sends = problem.sends
    near = np.stack([sends.near_PK[p, chunk.option_GP[:, p]] for p in pools])
    far = np.stack([sends.far_PK[p, chunk.option_GP[:, p]] for p in pools])
    cross = np.full((len(pools), len(pools), rows), np.inf)
    for p, q in combinations(pools, 2):
        both = np.flatnonzero(used[:, p] & used[:, q])
        if len(both):
            pair = problem.cluster.pools[p], problem.cluster.pools[q]
            ways = own[p].take(both), own[q].take(both)
            cross[p, q, both] = boundary_s(problem.job, problem.cluster, *pair, ways[0], False, ways[1])
            cross[q, p, both] = cross[p, q, both]
    sizes = np.stack([options.devices_K[chunk.option_GP[:, p]] for p in pools])
    at = (chunk.option_GP, np.arange(len(pools)))
    return replace(
        problem,
        space=Space(options.take(first), space.most_KP[at], space.step_KP[at], space.orders, {}),
        tables=tuple(table.take(chunk.option_GP[:, p]) for p, table in enumerate(problem.tables)),
        sends=Sends(near, far, cross, sends.domain_P, sizes),
        own_P=own,
    )
