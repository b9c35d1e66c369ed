"""Which nodes a plan uses, when that is what is asked: the least cost or energy per token, and what
fewer devices or less memory would take.

A use is a number of nodes of each pool, all of them busy. Its price per second is known before any
plan is, and a bound of its step is total work over the speed of its devices; so uses are searched one
by one, the lowest bound first, each under the step above which it could not win.

Array legend: U uses, P pools, K options.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from operator import eq

import numpy as np

from hapmoe.options import FloatArray, IntArray
from hapmoe.plan import Plan
from hapmoe.search.bounds import heavy_class
from hapmoe.search.degrees import search_degrees
from hapmoe.search.exact import explore
from hapmoe.search.problem import Problem, Setting, make_plan
from hapmoe.search.state import State

__all__ = ["Seeker", "Use", "least_s", "speeds", "uses"]

Legal = Callable[[Problem, Setting], bool]

MOST_USES = 4096
"""Uses that are listed; where there are more, pools are used in powers of two nodes or whole (the gap says
so)."""


@dataclass(frozen=True, slots=True)
class Seeker:
    """How each use is searched."""

    planner: str
    backend: str
    legal: Legal | None
    """What the back end asks beyond the rules of the space."""
    deadline: float
    mixed: bool
    """Pools may differ in degrees."""

    def best(self, problem: Problem, below_s: float) -> tuple[Plan | None, float, bool]:
        """The fastest plan below a step, what nothing of the problem is below (infinite: no other
        plan is below the step), and whether the time limit cut the search."""
        state = State(best=below_s, legal=self.legal, deadline=self.deadline)
        cut = explore(problem, state, top=1)
        plan = None
        if state.found:
            _, setting, solution = state.found[-1]
            plan = make_plan(problem, setting, solution.layers, solution.choices, self.planner, self.backend)
        open_s = state.open_bound
        if self.mixed and not cut:
            other = State(best=state.best, legal=self.legal, deadline=self.deadline, batch=768)
            mixed = search_degrees(problem, other, planner=self.planner, backend=self.backend)
            plan = mixed.plans[-1][1] if mixed.plans else plan
            open_s, cut = min(open_s, mixed.open_bound), mixed.cut
        return plan, open_s, cut


@dataclass(frozen=True, slots=True)
class Use:
    """Numbers of nodes, and what no plan on just these is faster than."""

    nodes: tuple[int, ...]
    devices: int
    floor_s: float

    def narrow(self, problem: Problem) -> Problem:
        """The problem of plans that use just these nodes."""
        sizes = problem.space.options.devices_K
        most, pins = np.array(problem.space.most_KP), list(problem.pins.nodes)
        for p, (pool, nodes) in enumerate(zip(problem.cluster.pools, self.nodes, strict=True)):
            most[:, p] = np.minimum(most[:, p], nodes * pool.devices_per_node // sizes)
            pins.append((pool.name, partial(eq, nodes)))
        narrowed = replace(problem.space, most_KP=most)
        return replace(problem, space=narrowed, pins=replace(problem.pins, nodes=tuple(pins)))


def uses(problem: Problem, mixed: bool) -> tuple[list[Use], bool]:
    """Every use that the pins allow, and whether none was left out."""
    pools, complete = problem.cluster.pools, True
    axes = [[n for n in range(pool.nodes + 1) if problem.pins.allow_nodes(pool.name, n)] for pool in pools]
    if float(np.prod([float(len(axis)) for axis in axes])) > MOST_USES:
        complete = False
        axes = [[n for n in axis if n & (n - 1) == 0 or n == axis[-1]] for axis in axes]
    rows = [row for row in product(*axes) if any(row)]
    if not rows:
        return [], complete
    nodes = np.asarray(rows, np.int64)
    devices = nodes @ np.asarray([pool.devices_per_node for pool in pools])
    floor = least_s(problem, nodes, mixed)
    listed = zip(rows, devices.tolist(), floor.tolist(), strict=True)
    return [Use(row, many, step) for row, many, step in listed if np.isfinite(step)], complete


def least_s(problem: Problem, nodes_UP: IntArray, mixed: bool) -> FloatArray:
    """[U] M times the layers of the heavy class over the speed of all devices of the nodes."""
    layers = heavy_class(problem)[1]
    least = np.full(len(nodes_UP), np.inf)
    with np.errstate(divide="ignore"):
        for microbatches, speed_P in speeds(problem, mixed):
            least = np.minimum(least, microbatches * layers / (nodes_UP @ speed_P))
    return least


def speeds(problem: Problem, mixed: bool) -> Iterator[tuple[int, FloatArray]]:
    """Microbatches, and layers per second of one node of each pool: of every option, or of the best
    options of each number of sequences per microbatch where pools may differ."""
    options, heavy = problem.space.options, heavy_class(problem)[0]
    speed = np.zeros((len(options), len(problem.tables)))
    for p, (pool, table) in enumerate(zip(problem.cluster.pools, problem.tables, strict=True)):
        layer_s = table.forward_CK[heavy] + table.backward_CK[heavy]
        possible = problem.space.most_KP[:, p] > 0
        speed[:, p] = np.where(possible, pool.devices_per_node / options.devices_K / layer_s, 0.0)
    microbatches = problem.microbatches_K
    if not mixed:
        _, first = np.unique(np.column_stack([microbatches, speed]), axis=0, return_index=True)
        yield from ((int(microbatches[k]), speed[k]) for k in first.tolist())
        return
    for count in np.unique(microbatches).tolist():
        yield count, speed[microbatches == count].max(axis=0)
