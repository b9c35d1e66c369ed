"""How many stages each pool holds, written out for the searches that look at every combination."""

from __future__ import annotations

from itertools import product

import numpy as np

from hapmoe.search.problem import Problem

__all__ = ["sequences", "stage_counts"]

MANY = 20_000
"""Above so many combinations only powers of two and all stages of a pool are looked at."""


def stage_counts(problem: Problem, size: int) -> list[tuple[int, ...]]:
    """Stages of ``size`` devices per pool, in whole nodes, at most one per layer, under the pins."""
    space, pins, layers = problem.space, problem.pins, problem.job.model.num_layers
    k = int(np.flatnonzero(space.options.devices_K == size)[0])
    choices = []
    for p, pool in enumerate(problem.cluster.pools):
        most, step = int(space.most_KP[k, p]), max(int(space.step_KP[k, p]), 1)
        counts = range(0, most + 1, step) if most else range(1)
        choices.append([n for n in counts if pins.allow_nodes(pool.name, -(-n * size // pool.devices_per_node))])
    if np.prod([float(len(choice)) for choice in choices]) > MANY:
        choices = [[n for n in choice if n & (n - 1) == 0 or n == choice[-1]] for choice in choices]
    return [c for c in product(*choices) if 0 < sum(c) <= layers and pins.allow("pp", sum(c))]


def sequences(problem: Problem, counts: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Pool of every stage, for every order of the pools that hold some."""
    used = {pool for pool, many in enumerate(counts) if many}
    return [
        tuple(pool for pool in order for _ in range(counts[pool]))
        for order in problem.space.orders
        if set(order) == used and len(order) == len(used)
    ]
