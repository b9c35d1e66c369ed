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


@dataclass(frozen=True, slots=True)
class _Program:
    """The operations of all stages in an order in which each finds those that it waits for done.

    Operations are numbered 0 .. 2 * pp * vpp * M - 1: forwards, then backwards, each by stage, chunk, microbatch.
    In the order they stand at 1, 2, ...; at 0 stands the start of the step.
    """

    steps: tuple[tuple[int, int, int, int], ...]
    """(duration, place of the stage's operation before, place of the other dependency or 0, its link). Durations:
    forward of (stage, chunk) at stage * vpp + chunk, backwards behind all forwards."""
    place: tuple[int, ...]
    """Where in the order each operation stands."""
    last: tuple[int, ...]
    """Where the last operation of each stage stands."""


@lru_cache(maxsize=256)
def _interleaved_program(pp: int, vpp: int, num_microbatches: int, group: int, extra: int) -> _Program:
    table = microbatch_groups(num_microbatches, vpp, group)
    total, size = num_microbatches * vpp, pp * vpp * num_microbatches
    forward = [chunk * num_microbatches + microbatch for microbatch, chunk in table]
    backward = [size + (vpp - 1 - chunk) * num_microbatches + microbatch for microbatch, chunk in table]
    orders: list[list[int]] = []
    for stage in range(pp):
        warmup = warmup_microbatches(pp, stage, vpp, total, group, extra)
        order = [0] * (2 * total)
        order[:warmup] = forward[:warmup]
        order[warmup : 2 * total - warmup : 2] = forward[warmup:]
        order[warmup + 1 : 2 * total - warmup : 2] = backward[: total - warmup]
        order[2 * total - warmup :] = backward[total - warmup :]
        orders.append([stage * total + operation for operation in order])
    needs, links = _dependencies(pp, total, num_microbatches)
    place = [0] * (2 * size)
    at, last = [0] * pp, [0] * pp
    steps: list[tuple[int, int, int, int]] = []
    moved = True
    while moved:
        moved = False
        for stage, order in enumerate(orders):
            before = last[stage]
            for position in range(at[stage], 2 * total):
                operation = order[position]
                other = needs[operation]
                if other >= 0 and not place[other]:
                    at[stage] = position
                    break
                ready = place[other] if other >= 0 else 0
                steps.append((operation // num_microbatches, last[stage], ready, links[operation]))
                place[operation] = last[stage] = len(steps)
            else:
                at[stage] = 2 * total
            moved = moved or last[stage] > before
    assert len(steps) == 2 * size, "the interleaved schedule deadlocks"
    return _Program(tuple(steps), tuple(place), tuple(last))


def _dependencies(pp: int, total: int, num_microbatches: int) -> tuple[list[int], list[int]]:
    """What each operation waits for on another stage (-1: nothing), and over which link.

    ``total``: forwards of one stage. A forward waits for that of the stage before, of the first stage for that of
    the last stage's chunk before; a backward the other way round. The last chunk's backward follows its own forward,
    which the stage's order already gives.
    """
    size, nothing = pp * total, [-1] * num_microbatches
    forward = [*nothing, *range(size - total, size - num_microbatches), *range(size - total)]
    backward = [*range(size + total, 2 * size), *range(size + num_microbatches, size + total), *nothing]
    links = [stage for stage in (pp - 1, *range(pp - 1), *range(pp)) for _ in range(total)]
    return forward + backward, links


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
            program = _interleaved_program(pp, vpp, played * group, group, extra)
            end = _play(program, forward, backward, send, maximum)
            period = _period(program, end, pp * vpp, played, group, reach)
            if period is not None:
                rest = (groups - played) * period
                return [end[last] + rest for last in program.last]
            played *= 3
    program = _interleaved_program(pp, vpp, num_microbatches, group, extra)
    end = _play(program, forward, backward, send, maximum)
    if note:
        _tell(program, end, forward, send, maximum, note)
    return [end[last] for last in program.last]


def _play(
    program: _Program,
    forward: Sequence[Sequence[Any]],
    backward: Sequence[Sequence[Any]],
    send: Sequence[Any],
    maximum: Callable[[Any, Any], Any],
) -> list[Any]:
    """End of every operation, by its place in the order."""
    durations = [value for rows in (forward, backward) for row in rows for value in row]
    begin = durations[0] * 0.0
    end = [begin]
    if isinstance(begin, float):  # nearly all of a search's time may pass here: no call per operation
        for duration, before, needs, link in program.steps:
            start, ready = end[before], end[needs] + send[link] if needs else 0.0
            end.append((ready if ready > start else start) + durations[duration])
        return end
    for duration, before, needs, link in program.steps:
        start = maximum(end[before], end[needs] + send[link]) if needs else end[before]
        end.append(start + durations[duration])
    return end


def _period(program: _Program, end: list[Any], chunks: int, groups: int, group: int, reach: int) -> Any:
    """Seconds from one group to the next if the last ``reach + 1`` of them repeat, else None.

    Backward passes are looked at ``reach`` groups earlier: the later ones run in the cool-down.
    ``chunks``: of all stages.
    """
    microbatches = groups * group
    size, looked = chunks * microbatches, (reach + 1) * group
    place = program.place
    period = end[place[microbatches - 1]] - end[place[microbatches - 1 - group]]
    for back, until in ((0, microbatches), (size, microbatches - reach * group)):
        for row in range(back, back + size, microbatches):
            later = place[row + until - looked : row + until]
            earlier = place[row + until - looked - group : row + until - group]
            for now, then in zip(later, earlier, strict=True):
                drift = abs(end[now] - end[then] - period) > 1e-11 * period
                if drift if isinstance(drift, bool) else drift.any():
                    return None
    return period


def _tell(
    program: _Program,
    end: list[Any],
    forward: Sequence[Sequence[Any]],
    send: Sequence[Any],
    maximum: Callable[[Any, Any], Any],
    note: Note,
) -> None:
    """All operations and transfers, in the order of the program."""
    pp, vpp = len(forward), len(forward[0])
    size = len(program.place) // 2
    microbatches = size // (pp * vpp)
    for operation in sorted(range(2 * size), key=program.place.__getitem__):
        at = program.place[operation]
        _, before, needs, link = program.steps[at - 1]
        start = maximum(end[before], end[needs] + send[link]) if needs else end[before]
        back, rest = divmod(operation, size)
        row, microbatch = divmod(rest, microbatches)
        stage, chunk = divmod(row, vpp)
        note("backward" if back else "forward", stage, microbatch, chunk, start, end[at])
        down = not back and (stage < pp - 1 or chunk < vpp - 1)
        up = back and (stage > 0 or chunk > 0)
        if down or up:
            took = send[stage if down else stage - 1]  # index -1 is the wrap, as it should be
            note("send", stage, microbatch, chunk, end[at], end[at] + took)


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
