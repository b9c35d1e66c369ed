"""What the stages from j on cost at the least, for every number of layers they still have to take.

Four tables by backward recursion over the stages, [J+1, N+1]; row j, column r: stages j and later
share r layers (infinite: they cannot).

    sum      least total round trip: work; with virtual stages forward passes and the lighter of the first and last
             chunk's backward pass
    busy     least of max over i >= j of (first chunks and transfers of j..i-1, there and back) + M work_i + held_i
    own      least of max over i >= j of (the same, there only) + M work_i + held_i + sync_i
    turn     least of max over i >= j of (M - 1) P_i - falling_i f_i                                          (B2);
             with virtual stages M work_i less its forwards before the first backward and its round trip's backward

They know that the layers must add up, which a bound stage by stage does not. ``busy``, ``own`` and ``turn``
count the optimizer step of stage i as far as it is longer than ``after_s``. Array legend: J stages,
N layers, E entries of a stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hapmoe.options import FloatArray
from hapmoe.search.bounds import blocked_s, early_forwards
from hapmoe.search.entries import Entries
from hapmoe.search.problem import Setting

__all__ = ["Floors", "floors_of"]


@dataclass(frozen=True, slots=True)
class Floors:
    """The four tables, and per stage and entry what they are made of."""

    sum_JN: FloatArray
    busy_JN: FloatArray
    own_JN: FloatArray
    turn_JN: FloatArray
    there: tuple[FloatArray, ...]
    """Forward pass of the first chunk and the transfer to the right."""
    back: tuple[FloatArray, ...]
    """Backward pass of the first chunk and the transfer from the right."""
    busy: tuple[FloatArray, ...]
    turn: tuple[FloatArray, ...]
    round: tuple[FloatArray, ...]
    """What the entry adds to ``sum``."""
    trips_s: float
    """All transfers of a round trip."""
    after_s: float
    """The longest optimizer step, at the least."""


def floors_of(setting: Setting, stages: Sequence[Entries], layers: int) -> Floors:
    """The tables for one grid point."""
    pp, microbatches = setting.pp, setting.microbatches
    send = np.append(setting.send_J[: pp - 1], 0.0)
    right = send if setting.flat else np.zeros(pp)
    left = np.concatenate([[0.0], right[:-1]])
    ahead = pp - 1 - np.arange(pp)
    held = blocked_s(ahead, right, left, microbatches)
    falling = np.minimum(ahead, microbatches - 1)
    # all chunks there, the last one back; Bv's own round trip, see bounds.md
    trips_s = (setting.vpp + 1) * float(send.sum()) + (setting.vpp - 1) * float(setting.send_J[-1])
    after_s = max(float(stage.optimizer_E.min()) for stage in stages)
    # one column more stands for what cannot be: more layers on a stage than there are
    sums, busiest, owns, turns = (np.full((pp + 1, layers + 2), np.inf) for _ in range(4))
    sums[pp, 0] = 0.0
    busiest[pp, 0] = owns[pp, 0] = turns[pp, 0] = -np.inf
    there, back, busys, turnings, rounds = [], [], [], [], []
    early_JV = early_forwards(pp, setting.vpp, microbatches, setting.group, setting.extra)
    columns = np.arange(layers + 1)
    for j in range(pp - 1, -1, -1):
        stage = stages[j]
        first, last = stage.forward_EV[:, 0] + send[j], stage.backward_EV[:, 0] + send[j]
        longer = np.maximum(stage.optimizer_E - after_s, 0.0)
        busy = microbatches * stage.work_E + held[j] + longer
        # work may be more than forward and backward pass: of entries that stand for several runs each is the least
        if setting.flat:
            trip = stage.work_E
            turn = (microbatches - 1 - falling[j]) * stage.forward_EV[:, 0]
            turn = turn + (microbatches - 1) * (stage.backward_EV[:, 0] + right[j] + left[j]) + longer
        else:
            down = np.minimum(stage.backward_EV[:, 0], stage.backward_EV[:, -1])
            trip = stage.forward_EV.sum(axis=1) + down
            turn = (stage.forward_EV * (microbatches - early_JV[j])).sum(axis=1)
            turn = turn + microbatches * stage.backward_EV.sum(axis=1) - down + longer
        rest = columns - stage.layers_E[:, None]
        rest[rest < 0] = layers + 1
        sums[j, :-1] = (trip[:, None] + sums[j + 1][rest]).min(axis=0)
        busiest[j, :-1] = np.maximum(busy[:, None], (first + last)[:, None] + busiest[j + 1][rest]).min(axis=0)
        owns[j, :-1] = np.maximum((busy + stage.sync_E)[:, None], first[:, None] + owns[j + 1][rest]).min(axis=0)
        turns[j, :-1] = np.maximum(turn[:, None], turns[j + 1][rest]).min(axis=0)
        there.append(first)
        back.append(last)
        busys.append(busy)
        turnings.append(turn)
        rounds.append(trip)
    return Floors(
        sums,
        busiest,
        owns,
        turns,
        tuple(there[::-1]),
        tuple(back[::-1]),
        tuple(busys[::-1]),
        tuple(turnings[::-1]),
        tuple(rounds[::-1]),
        trips_s,
        after_s,
    )
