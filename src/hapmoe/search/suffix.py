"""What the stages from j on cost at the least, for every number of layers they still have to take.

Three tables by backward recursion over the stages, [J+1, N+1]; row j, column r: stages j and later
share r layers (infinite: they cannot).

    sum      least total work
    busy     least of max over i >= j of (work of first chunks and transfers of j..i-1) + M work_i + held_i   (B1, Bv)
    turn     least of max over i >= j of (M - 1) P_i - falling_i f_i                                          (B2)

They know that the layers must add up, which a bound stage by stage does not. Array legend: J stages,
N layers, E entries of a stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hapmoe.options import FloatArray
from hapmoe.search.bounds import blocked_s
from hapmoe.search.entries import Entries
from hapmoe.search.problem import Setting

__all__ = ["Floors", "floors_of"]


@dataclass(frozen=True, slots=True)
class Floors:
    """The three tables, and per stage and entry what they are made of."""

    sum_JN: FloatArray
    busy_JN: FloatArray
    turn_JN: FloatArray
    first: tuple[FloatArray, ...]
    """Work of the first chunk and the transfers to the right, there and back."""
    busy: tuple[FloatArray, ...]
    turn: tuple[FloatArray, ...]
    trips_s: float
    """All transfers of one microbatch, there and back."""

    def least(self, layers: int, flat: bool) -> float:
        """A bound on the end of the pipeline for any split of ``layers``."""
        busy = float(self.busy_JN[0, layers])
        if not flat:
            return busy
        return max(busy, float(self.sum_JN[0, layers] + self.turn_JN[0, layers]) + self.trips_s)


def floors_of(setting: Setting, stages: Sequence[Entries], layers: int) -> Floors:
    """The tables for one grid point."""
    pp, microbatches = setting.pp, setting.microbatches
    send = np.append(setting.send_J[: pp - 1], 0.0)
    right = send if setting.flat else np.zeros(pp)
    left = np.concatenate([[0.0], right[:-1]])
    ahead = pp - 1 - np.arange(pp)
    held = blocked_s(ahead, right, left, microbatches)
    falling = np.minimum(ahead, microbatches - 1)
    sums, busiest, turns = (np.full((pp + 1, layers + 1), np.inf) for _ in range(3))
    sums[pp, 0] = 0.0
    busiest[pp, 0] = turns[pp, 0] = -np.inf
    firsts, busys, turnings = [], [], []
    for j in range(pp - 1, -1, -1):
        stage = stages[j]
        first = stage.forward_EV[:, 0] + stage.backward_EV[:, 0] + 2.0 * send[j]
        busy = microbatches * stage.work_E + held[j]
        period = stage.work_E + right[j] + left[j]
        turn = (microbatches - 1) * period - falling[j] * stage.forward_EV[:, 0]
        for e, count in enumerate(stage.layers_E.tolist()):
            if count > layers:
                continue
            here = slice(count, layers + 1)
            rest = slice(0, layers + 1 - count)
            np.minimum(sums[j, here], stage.work_E[e] + sums[j + 1, rest], out=sums[j, here])
            later = np.where(
                np.isfinite(sums[j + 1, rest]), np.maximum(busy[e], first[e] + busiest[j + 1, rest]), np.inf
            )
            np.minimum(busiest[j, here], later, out=busiest[j, here])
            later = np.where(np.isfinite(sums[j + 1, rest]), np.maximum(turn[e], turns[j + 1, rest]), np.inf)
            np.minimum(turns[j, here], later, out=turns[j, here])
        firsts.append(first)
        busys.append(busy)
        turnings.append(turn)
    return Floors(
        sums,
        busiest,
        turns,
        tuple(firsts[::-1]),
        tuple(busys[::-1]),
        tuple(turnings[::-1]),
        2.0 * float(send.sum()),
    )
