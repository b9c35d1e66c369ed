"""What the exact search knows so far, and when it has to stop."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from hapmoe.search.problem import Problem, Setting
from hapmoe.search.split import Solution

__all__ = ["NO_TIME", "TOO_MANY", "UNPROVEN", "OutOfTimeError", "Progress", "State", "keep", "pause"]


NO_TIME = "the time limit passed before a plan was found"
"""The reason of a search that was cut with empty hands."""
TOO_MANY = "no plan was found among the splits that could be listed, and there are more"
"""The reason where nothing was found but not everything was looked at."""
UNPROVEN = (NO_TIME, TOO_MANY)
"""After these a plan may exist."""

Progress = Callable[[int, int, float, float], None]
"""progress(options settled, options, best step, lower bound)."""


@dataclass(slots=True)
class State:
    """What the search knows so far."""

    uniform: bool = False
    legal: Callable[[Problem, Setting], bool] | None = None
    """What a back end asks beyond the rules of the space; None: nothing."""
    batch: int = 192
    """Grid points whose stages are priced together."""
    deadline: float = np.inf
    found: list[tuple[float, Setting, Solution]] = field(default_factory=list)
    best: float = np.inf
    open_bound: float = np.inf
    """Lowest bound of what could not be searched to the end."""
    pruned: Counter[str] = field(default_factory=Counter)
    progress: Progress | None = None
    settled: int = 0
    total: int = 0
    """Options settled so far, and all of them."""
    bound: float = 0.0
    """Nothing that is still to be looked at is faster."""

    def may(self, problem: Problem, settings: list[Setting]) -> list[int]:
        """Numbers of the grid points that the back end's own rules let through."""
        legal = self.legal
        return [g for g, setting in enumerate(settings) if legal is None or legal(problem, setting)]

    def lower_bound(self) -> float:
        """What the step of the best plan of the space cannot be below."""
        return min(self.bound, self.open_bound, self.best)


class OutOfTimeError(Exception):
    """The time limit passed."""


def keep(state: State, setting: Setting, solution: Solution) -> None:
    """Note a solution if it is the best so far."""
    if solution.step_s < state.best:
        state.best = solution.step_s
        state.found.append((solution.step_s, setting, solution))


def pause(state: State) -> None:
    """Between two pieces of work: tell how far the search is, stop once the time limit has passed."""
    if state.progress:
        state.progress(state.settled, state.total, state.best if state.found else np.inf, state.lower_bound())
    if time.perf_counter() > state.deadline:
        raise OutOfTimeError
