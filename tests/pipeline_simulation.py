"""A second opinion on pipeline timelines, written from Megatron's schedules, not from ours.

1F1B: every stage runs the literal list of calls of ``forward_backward_pipelining_without_interleaving``;
a communication call waits for its partner, both leave it together. Interleaved: the order of passes
comes from Megatron-Core's own functions, and start times are relaxed until nothing moves.
"""

from __future__ import annotations

from megatron.core.pipeline_parallel.schedules import get_schedule_table


def one_f_one_b(forward: list[float], backward: list[float], send: list[float], microbatches: int) -> list[float]:
    """End of the last backward of every stage."""
    pp = len(forward)
    programs = [_calls(stage, pp, microbatches) for stage in range(pp)]
    clock, last_backward, at = [0.0] * pp, [0.0] * pp, [0] * pp
    while any(at[stage] < len(programs[stage]) for stage in range(pp)):
        moved = False
        for stage in range(pp):
            if at[stage] == len(programs[stage]):
                continue
            call, *rest = programs[stage][at[stage]]
            if call == "F":
                clock[stage] += forward[stage]
            elif call == "B":
                clock[stage] += backward[stage]
                last_backward[stage] = clock[stage]
            else:
                peer, messages = rest
                if at[peer] == len(programs[peer]) or programs[peer][at[peer]][0] != "talk":
                    continue
                other_peer, other_messages = programs[peer][at[peer]][1:]
                if other_peer != stage or other_messages != messages:
                    continue
                done = max(clock[stage], clock[peer]) + send[min(stage, peer)]
                clock[stage] = clock[peer] = done
                at[peer] += 1
            at[stage] += 1
            moved = True
        assert moved, "deadlock"
    return last_backward


def _calls(stage: int, pp: int, microbatches: int) -> list[tuple]:
    first, last = stage == 0, stage == pp - 1
    warmup = min(pp - stage - 1, microbatches)
    remaining = microbatches - warmup
    left, right = stage - 1, stage + 1
    calls: list[tuple] = []

    def talk(peer: int, *messages: tuple[str, int]) -> None:
        if 0 <= peer < pp:
            calls.append(("talk", peer, frozenset(messages)))

    for k in range(warmup):
        talk(left, ("f", k))
        calls.append(("F",))
        talk(right, ("f", k))
    if remaining:
        talk(left, ("f", warmup))
    for k in range(remaining):
        calls.append(("F",))
        if not last:
            talk(right, ("f", warmup + k), ("b", k))
        calls.append(("B",))
        if k == remaining - 1:
            talk(left, ("b", k))
        elif not first:
            talk(left, ("b", k), ("f", warmup + k + 1))
    for k in range(warmup):
        talk(right, ("b", remaining + k))
        calls.append(("B",))
        talk(left, ("b", remaining + k))
    return calls


def interleaved(
    forward: list[list[float]], backward: list[list[float]], send: list[float], microbatches: int, group: int
) -> list[float]:
    """End of the last backward of every stage; transfers are delays, the last one wraps to stage 0."""
    pp, vpp = len(forward), len(forward[0])
    table = get_schedule_table(microbatches, vpp, group)
    orders = []
    for stage in range(pp):
        warmup = min((pp - stage - 1) * 2 + (vpp - 1) * group, len(table))
        order = [("F", chunk, m) for m, chunk in table[:warmup]]
        for k in range(len(table) - warmup):
            m, chunk = table[warmup + k]
            order.append(("F", chunk, m))
            m, chunk = table[k]
            order.append(("B", vpp - 1 - chunk, m))
        order += [("B", vpp - 1 - chunk, m) for m, chunk in table[len(table) - warmup :]]
        orders.append(order)
    end: dict[tuple, float] = {}
    moved = True
    while moved:
        moved = False
        for stage, order in enumerate(orders):
            clock = 0.0
            for kind, chunk, m in order:
                ready = clock
                if kind == "F" and (stage or chunk):
                    source = (stage - 1, chunk) if stage else (pp - 1, chunk - 1)
                    ready = max(ready, end.get(("F", *source, m), 0.0) + send[source[0]])
                elif kind == "B" and stage == pp - 1 and chunk < vpp - 1:
                    ready = max(ready, end.get(("B", 0, chunk + 1, m), 0.0) + send[pp - 1])
                elif kind == "B" and stage < pp - 1:
                    ready = max(ready, end.get(("B", stage + 1, chunk, m), 0.0) + send[stage])
                elif kind == "B":
                    ready = max(ready, end.get(("F", stage, chunk, m), 0.0))
                clock = ready + (forward if kind == "F" else backward)[stage][chunk]
                key = (kind, stage, chunk, m)
                if clock > end.get(key, -1.0) + 1e-12:
                    end[key] = clock
                    moved = True
    return [max(end["B", stage, chunk, m] for chunk in range(vpp) for m in range(microbatches)) for stage in range(pp)]
