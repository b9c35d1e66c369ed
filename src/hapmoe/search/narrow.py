"""Very many options: drop those that cannot win before everything is priced.

With two menu entries (nothing recomputed, everything) pricing is cheap and bounds are the same, since
they ignore recomputation; a plan under that small menu is a plan of the whole space, so its step cuts.
"""

from __future__ import annotations

import numpy as np

from hapmoe.cluster import Cluster
from hapmoe.job import JobSpec
from hapmoe.plan import Recompute
from hapmoe.search.bounds import option_bounds
from hapmoe.search.dive import first_plan
from hapmoe.search.pins import Pins
from hapmoe.search.problem import price_space
from hapmoe.search.space import Space
from hapmoe.search.state import State

__all__ = ["MANY", "narrow"]

MANY = 30_000
"""Options above which it pays."""
CHUNK = 16_384
"""Options priced at once: what they take in memory."""
TRIED = 512
"""Options with the lowest bounds that a first plan is looked for among."""


def narrow(job: JobSpec, cluster: Cluster, space: Space, menu: tuple[Recompute, ...], pins: Pins) -> Space:
    """The same space without the options that memory or a first plan rules out."""
    few = (menu[0], menu[-1])
    bounds, possibles = [], []
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        for begin in range(0, len(space.options), CHUNK):
            part = space.take(np.arange(begin, min(begin + CHUNK, len(space.options))))
            bound_K, possible_K = option_bounds(price_space(job, cluster, part, few, pins))
            bounds.append(bound_K)
            possibles.append(possible_K)
        bound, possible = np.concatenate(bounds), np.concatenate(possibles)
        order = np.flatnonzero(possible)
        order = order[np.argsort(bound[order], kind="stable")]
        state = State()
        for begin in range(0, min(len(order), 16 * TRIED), TRIED):
            problem = price_space(job, cluster, space.take(np.sort(order[begin : begin + TRIED])), few, pins)
            seen_K, fits_K = option_bounds(problem)
            lowest = np.flatnonzero(fits_K)
            first_plan(problem, state, lowest[np.argsort(seen_K[lowest], kind="stable")], seen_K)
            if state.found:
                break
    best = state.best if state.found else np.inf
    return space.take(np.flatnonzero(possible & (bound < best)))
