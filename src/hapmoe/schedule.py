"""Pipeline timelines: what 1F1B and interleaved 1F1B really do, event by event.

Semantics (Megatron-Core ``pipeline_parallel/schedules.py``):

* 1F1B without interleaving runs with p2p overlap switched off: a transfer occupies sender and
  receiver, starts when both are ready, and ``send_forward_recv_backward`` on one side is one
  exchange with ``send_backward_recv_forward`` on the other.
* Interleaved (vpp > 1) overlaps p2p: a transfer is a delay only. The wrap from the last stage to
  the first is a link of its own.

Times are seconds; stages, microbatches and virtual stages count from 0. The engines work on
floats and, element by element, on numpy arrays (many pipelines of one shape at once): pass
``maximum=numpy.maximum``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

__all__ = [
    "Event",
    "Timeline",
    "in_flight",
    "interleaved_ends",
    "microbatch_groups",
    "one_f_one_b_ends",
    "timeline_of",
    "warmup_microbatches",
]

Kind = Literal["forward", "backward", "send", "recv", "grad_sync", "optimizer"]
Note = Callable[[Kind, int, int, int, float, float], None]
"""note(kind, stage, microbatch, chunk, start_s, end_s)"""


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that a stage does. A ``send`` is listed on the sending side only."""

    stage: int
    kind: Kind
    microbatch: int
    chunk: int
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """Every event of one step, by start time."""

    pp: int
    vpp: int
    num_microbatches: int
    events: tuple[Event, ...]
    end_s: float


LOOK = 8
"""Rounds after which it is looked at whether they repeat."""


def one_f_one_b_ends(
    forward: Sequence[Any],
    backward: Sequence[Any],
    send: Sequence[Any],
    num_microbatches: int,
    *,
    maximum: Callable[[Any, Any], Any] = max,
    note: Note | None = None,
) -> list[Any]:
    """End of the last backward of each stage under 1F1B with blocking transfers.

    ``forward``, ``backward``: per stage; ``send``: per boundary, ``len(forward) - 1`` entries.

    Stage i runs w = min(pp-1-i, M) warm-up forwards. With D_i[k] the arrival of forward k at stage
    i+1 and X_i[j] the j-th exchange between i and i+1 (forward w+j down, backward j up):

        D_i[k] = max(clock_i + f_i, clock_{i+1}) + s_i
        X_i[j] = max(X_{i-1}[j-1] + f_i, X_{i+1}[j] + b_{i+1}) + s_i

    >>> one_f_one_b_ends([1.0, 1.0], [2.0, 2.0], [0.0], 4)
    [15.0, 13.0]
    """
    pp, last = len(forward), len(forward) - 1
    warmup = [min(last - i, num_microbatches) for i in range(pp)]
    clock: list[Any] = [forward[0] * 0.0] * pp
    for k in range(warmup[0]):
        for i in range(last):
            if k >= warmup[i]:
                break
            ready = clock[i] + forward[i]
            done = maximum(ready, clock[i + 1]) + send[i]
            if note:
                note("forward", i, k, 0, clock[i], ready)
                note("send", i, k, 0, done - send[i], done)
            clock[i] = clock[i + 1] = done
    ends: list[Any] = clock
    before: list[Any] = []
    skipped = 0
    for j in range(num_microbatches):
        # As long as every stage has forwards left, a round is a maximum of clocks plus constants: once all
        # clocks moved on by the same time, they do in every such round to come.
        rounds = num_microbatches - max(warmup[0], 1) - j
        if before and rounds > 0:
            moved = clock[0] - before[0]
            if _alike([now - then for now, then in zip(clock, before, strict=True)], moved):
                clock = [now + rounds * moved for now in clock]
                skipped = rounds
        before = []
        if skipped:
            skipped -= 1
            continue
        if note is None and j % LOOK == 0:
            before = list(clock)
        # The last stage turns around at once: forward and backward of the same microbatch.
        turned = clock[last] + forward[last]
        done = turned + backward[last]
        if note:
            note("forward", last, j, 0, clock[last], turned)
            note("backward", last, j, 0, turned, done)
        clock[last] = done
        final = j == num_microbatches - 1
        ends = list(clock) if final else ends
        for i in range(last - 1, -1, -1):
            steady = warmup[i] + j < num_microbatches
            ready = clock[i] + forward[i] if steady else clock[i]
            met = maximum(ready, clock[i + 1]) + send[i]
            if note:
                if steady:
                    note("forward", i, warmup[i] + j, 0, clock[i], ready)
                    note("send", i, warmup[i] + j, 0, met - send[i], met)
                note("send", i + 1, j, 0, met - send[i], met)
                note("backward", i, j, 0, met, met + backward[i])
            clock[i + 1] = met
            clock[i] = met + backward[i]
            if final:
                ends[i] = clock[i]
    return ends


def _alike(moved: list[Any], by: Any) -> bool:
    """Did all clocks (of all pipelines looked at side by side) move by the same time?"""
    for one in moved:
        drift = abs(one - by) > 1e-11 * by
        if drift if isinstance(drift, bool) else drift.any():
            return False
    return True


def microbatch_groups(num_microbatches: int, vpp: int, group: int) -> list[tuple[int, int]]:
    """(microbatch, chunk) in the order of forwards (schedules.py ``get_schedule_table``)."""
    return [
        (microbatch, chunk)
        for start in range(0, num_microbatches, group)
        for chunk in range(vpp)
        for microbatch in range(start, min(start + group, num_microbatches))
    ]


def warmup_microbatches(pp: int, stage: int, vpp: int, total: int, group: int, extra: int = 0) -> int:
    """Forwards before the first backward (schedules.py ``get_pp_rank_microbatches``).

    ``total`` counts chunks: microbatches * vpp. ``extra``: 1 with EP all-to-all overlap.
    """
    return min(total, (pp - stage - 1) * 2 + (vpp - 1) * group + extra)


@lru_cache(maxsize=4096)
def _stage_order(
    pp: int, stage: int, vpp: int, num_microbatches: int, group: int, extra: int
) -> list[tuple[bool, int, int]]:
    """(is backward, chunk, microbatch) in the order in which one stage runs them."""
    table = microbatch_groups(num_microbatches, vpp, group)
    warmup = warmup_microbatches(pp, stage, vpp, len(table), group, extra)
    order = [(False, chunk, microbatch) for microbatch, chunk in table[:warmup]]
    for k, (microbatch, chunk) in enumerate(table[warmup:]):
        order.append((False, chunk, microbatch))
        back_microbatch, back_chunk = table[k]
        order.append((True, vpp - 1 - back_chunk, back_microbatch))
    order += [(True, vpp - 1 - chunk, microbatch) for microbatch, chunk in table[len(table) - warmup :]]
    return order


@lru_cache(maxsize=256)
def _interleaved_program(
    pp: int, vpp: int, num_microbatches: int, group: int, extra: int
) -> tuple[tuple[int, int, int, int, int], ...]:
    """Operations in an order in which each finds its dependency done.

    Entries: (stage, duration index, operation, dependency or -1, link of the dependency or -1).
    Durations: forward of (stage, chunk) at stage*vpp+chunk, backward behind all forwards.
    """
    orders = [_stage_order(pp, stage, vpp, num_microbatches, group, extra) for stage in range(pp)]
    size = pp * vpp * num_microbatches

    def index(back: bool, stage: int, chunk: int, microbatch: int) -> int:
        return (size if back else 0) + (stage * vpp + chunk) * num_microbatches + microbatch

    def dependency(back: bool, stage: int, chunk: int, microbatch: int) -> tuple[int, int]:
        if not back:
            if stage:
                return index(False, stage - 1, chunk, microbatch), stage - 1
            return (index(False, pp - 1, chunk - 1, microbatch), pp - 1) if chunk else (-1, -1)
        if stage < pp - 1:
            return index(True, stage + 1, chunk, microbatch), stage
        # The last chunk's backward follows its own forward, which the stage's order already gives.
        return (index(True, 0, chunk + 1, microbatch), pp - 1) if chunk < vpp - 1 else (-1, -1)

    done = bytearray(2 * size)
    at = [0] * pp
    program: list[tuple[int, int, int, int, int]] = []
    moved = True
    while moved:
        moved = False
        for stage, order in enumerate(orders):
            position = at[stage]
            while position < len(order):
                back, chunk, microbatch = order[position]
                needs, link = dependency(back, stage, chunk, microbatch)
                if needs >= 0 and not done[needs]:
                    break
                operation = index(back, stage, chunk, microbatch)
                done[operation] = 1
                duration = (pp * vpp if back else 0) + stage * vpp + chunk
                program.append((stage, duration, operation, needs, link))
                position += 1
            moved = moved or position > at[stage]
            at[stage] = position
    assert len(program) == 2 * size, "the interleaved schedule deadlocks"
    return tuple(program)


def interleaved_ends(
    forward: Sequence[Sequence[Any]],
    backward: Sequence[Sequence[Any]],
    send: Sequence[Any],
    num_microbatches: int,
    group: int,
    *,
    extra: int = 0,
    maximum: Callable[[Any, Any], Any] = max,
    note: Note | None = None,
) -> list[Any]:
    """End of the last backward of each stage under interleaved 1F1B with overlapped transfers.

    ``forward[stage][chunk]``; ``send``: pp entries, the last is the wrap from last to first stage.
    ``group``: microbatch group size per virtual stage (Megatron's default: pp).

    Long runs are not played to the end: once every operation of some groups in a row comes a fixed
    time after the same one of the group before, all later groups do too (a start is a maximum of ends
    plus constants, over operations at most ``reach`` groups back), so the rest is that time per group.
    """
    pp, vpp = len(forward), len(forward[0])
    reach = -(-warmup_microbatches(pp, 0, vpp, num_microbatches * vpp, group, extra) // (group * vpp)) + 1
    groups, played = num_microbatches // group, 2 * reach + 3
    if note is None and num_microbatches % group == 0:
        while played * 3 < groups * 2:
            clock, end = _play(forward, backward, send, played * group, group, extra, maximum, None)
            period = _period(end, pp, vpp, played, group, reach)
            if period is not None:
                rest = (groups - played) * period
                return [finish + rest for finish in clock]
            played *= 3
    return _play(forward, backward, send, num_microbatches, group, extra, maximum, note)[0]


def _period(end: list[Any], pp: int, vpp: int, groups: int, group: int, reach: int) -> Any:
    """Seconds from one group to the next if the last ``reach + 1`` of them repeat, else None.

    Backward passes are looked at ``reach`` groups earlier: the later ones run in the cool-down.
    """
    microbatches = groups * group
    size = pp * vpp * microbatches
    period = end[microbatches - 1] - end[microbatches - 1 - group]
    for back, until in ((0, microbatches), (size, microbatches - reach * group)):
        for row in range(back, back + size, microbatches):
            for at in range(row + until - (reach + 1) * group, row + until):
                drift = abs(end[at] - end[at - group] - period) > 1e-11 * period
                if drift if isinstance(drift, bool) else drift.any():
                    return None
    return period


def _play(
    forward: Sequence[Sequence[Any]],
    backward: Sequence[Sequence[Any]],
    send: Sequence[Any],
    num_microbatches: int,
    group: int,
    extra: int,
    maximum: Callable[[Any, Any], Any],
    note: Note | None,
) -> tuple[list[Any], list[Any]]:
    """Clock of every stage at the end, and the end of every operation."""
    pp, vpp = len(forward), len(forward[0])
    durations = [value for row in forward for value in row] + [value for row in backward for value in row]
    size = pp * vpp * num_microbatches
    zero = durations[0] * 0.0
    end: list[Any] = [zero] * (2 * size)
    clock: list[Any] = [zero] * pp
    for stage, duration, operation, needs, link in _interleaved_program(pp, vpp, num_microbatches, group, extra):
        start = clock[stage]
        if needs >= 0:
            start = maximum(start, end[needs] + send[link])
        finish = start + durations[duration]
        clock[stage] = end[operation] = finish
        if note:
            back, rest = divmod(operation, size)
            microbatch = rest % num_microbatches
            chunk = rest // num_microbatches % vpp
            note("backward" if back else "forward", stage, microbatch, chunk, start, finish)
            down = not back and (stage < pp - 1 or chunk < vpp - 1)
            up = back and (stage > 0 or chunk > 0)
            if down or up:
                took = send[stage if down else stage - 1]  # index -1 is the wrap, as it should be
                note("send", stage, microbatch, chunk, finish, finish + took)
    return clock, end


@lru_cache(maxsize=4096)
def in_flight(
    pp: int, vpp: int, stage: int, num_microbatches: int, group: int, extra: int = 0
) -> tuple[tuple[int, ...], ...]:
    """How many microbatches of each chunk a stage holds at its fullest moments.

    Without interleaving one vector, (min(M, pp - stage),). With it, every vector that no other
    exceeds in all chunks: the memory peak is at one of them, whatever the chunks weigh.

    >>> in_flight(4, 1, 1, 16, 4)
    ((3,),)
    """
    if vpp == 1:
        return ((min(num_microbatches, pp - stage),),)
    # From the end of warm-up on, every forward brings the stage to the same number of held chunks and
    # the next backward takes one away, in a pattern that repeats with the groups: one period shows all.
    total = num_microbatches * vpp
    warmup = warmup_microbatches(pp, stage, vpp, total, group, extra)
    enough = min(num_microbatches, group * (-(-(warmup + group * vpp + 1) // (group * vpp)) + 1))
    table = microbatch_groups(enough, vpp, group)
    held = [0] * vpp
    for _, chunk in table[:warmup]:
        held[chunk] += 1
    if warmup == total:
        return (tuple(held),)
    seen: dict[tuple[int, ...], None] = {}
    for k in range(min(group * vpp, len(table) - warmup)):
        held[table[warmup + k][1]] += 1
        seen[tuple(held)] = None
        held[vpp - 1 - table[k][1]] -= 1
    return tuple(seen)


def timeline_of(
    forward: Sequence[Sequence[float]],
    backward: Sequence[Sequence[float]],
    send: Sequence[float],
    num_microbatches: int,
    group: int,
    *,
    extra: int = 0,
    grad_sync: Sequence[float] = (),
    optimizer_s: float = 0.0,
) -> Timeline:
    """All events of one step: the pipeline, exposed gradient sync, then the optimizer.

    Shapes as in ``interleaved_ends``. The global gradient norm is a barrier over all stages before
    the optimizer.
    """
    pp, vpp = len(forward), len(forward[0])
    events: list[Event] = []

    def note(kind: Kind, stage: int, microbatch: int, chunk: int, start: float, end: float) -> None:
        events.append(Event(stage, kind, microbatch, chunk, start, end))

    if vpp == 1:
        ends = one_f_one_b_ends(
            [row[0] for row in forward], [row[0] for row in backward], send, num_microbatches, note=note
        )
    else:
        ends = interleaved_ends(forward, backward, send, num_microbatches, group, extra=extra, note=note)
    synced = []
    for stage, end in enumerate(ends):
        wait = grad_sync[stage] if grad_sync else 0.0
        if wait:
            events.append(Event(stage, "grad_sync", 0, 0, end, end + wait))
        synced.append(end + wait)
    barrier = max(synced)
    if optimizer_s:
        events += [Event(stage, "optimizer", 0, 0, barrier, barrier + optimizer_s) for stage in range(pp)]
    events.sort(key=lambda event: (event.start_s, event.stage))
    return Timeline(pp, vpp, num_microbatches, tuple(events), barrier + optimizer_s)
