"""What the probe wrote, as values: one ``MeasuredRank`` for each complete ``rank<r>.jsonl``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from hapmoe.errors import InputError

__all__ = ["MeasuredRank", "MeasuredStep", "Sent", "Span", "Tokens", "load_rank", "load_ranks"]


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """How long something took: on the device's stream or the wall clock, and of the process on a CPU."""

    wall_s: float | None = None
    """None: inside of a CUDA graph, where nothing can be timed."""
    cpu_s: float | None = None


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of this rank that one layer's router gave to each expert, by microbatch."""

    layer: int
    """From 0; those of MTP stand behind the decoder's."""
    microbatches: tuple[tuple[int, ...], ...]


class Sent(msgspec.Struct, frozen=True, kw_only=True):
    """Equal calls of one collective in one part of a step."""

    phase: Literal["schedule", "forward", "backward", "optimizer"]
    collective: str
    axis: str
    """The group, as ``volumes.Traffic`` names it."""
    ranks: int
    call_bytes: int
    """What a rank holds: an all-gather's result, a reduce-scatter's input."""
    calls: int
    timed_calls: int
    """Those that the caller waited for."""
    wall_s: float
    """Of the timed calls together, with the wait for the slowest rank."""


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes at a mark of the step: of the device's allocator, or of the whole process on a CPU."""

    mark: Literal["begin", "passes", "step"]
    allocated_bytes: int
    peak_bytes: int
    """Since the process began."""
    reserved_bytes: int
    device_bytes: int = 0
    """All of the device that is in use, by its driver's count: context and communication buffers too; 0: unknown."""


class MeasuredStep(msgspec.Struct, frozen=True, kw_only=True):
    """One step: from its first forward pass to the end of the optimizer."""

    step: int
    wall_s: float | None = None
    cpu_s: float | None = None
    since_last_s: float | None
    """From the end of the step before; None at the first."""
    forward: tuple[Span, ...]
    """One microbatch through one chunk each."""
    backward: tuple[Span, ...]
    optimizer: tuple[Span, ...]
    tokens: tuple[Tokens, ...]
    collectives: tuple[Sent, ...]
    memory: tuple[Memory, ...]


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """Where and how a rank ran."""

    schema: Literal[1]
    rank: int
    world_size: int
    date: str
    """When its first step had ended, ISO 8601 in UTC."""
    host: str
    device: str
    """As its driver names it."""
    clock: Literal["host", "device"]
    versions: dict[str, str]
    degrees: dict[str, int]
    """tp, cp, pp, dp, ep, etp, edp, vpp, and the rank's stage."""


class MeasuredRank(msgspec.Struct, frozen=True, kw_only=True):
    """All that one rank measured."""

    start: Start
    steps: tuple[MeasuredStep, ...]

    @property
    def steady(self) -> tuple[MeasuredStep, ...]:
        """Without the first step, which makes buffers and optimizer states."""
        return self.steps[1:] or self.steps


class _StartLine(Start, frozen=True, kw_only=True, tag_field="event", tag="start"):
    pass


class _StepLine(MeasuredStep, frozen=True, kw_only=True, tag_field="event", tag="step"):
    pass


class _EndLine(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="end"):
    steps: int


_decoder = msgspec.json.Decoder(_StartLine | _StepLine | _EndLine)


def load_rank(path: Path) -> MeasuredRank:
    """Read one file. InputError for one that is not complete or was not written by the probe."""
    where = str(path)
    try:
        lines = [_decoder.decode(line) for line in path.read_bytes().splitlines()]
    except OSError as error:
        raise InputError(error.strerror or str(error), where=where) from None
    except msgspec.MsgspecError as error:
        raise InputError(f"not what the probe writes: {error}", where=where, hint="profile again") from None
    start, steps, end = lines[:1], [line for line in lines if isinstance(line, _StepLine)], lines[-1:]
    if not start or not isinstance(start[0], _StartLine) or not isinstance(end[0], _EndLine) or not steps:
        raise InputError("incomplete: no end line", where=where, hint="the run ended early; profile again")
    return MeasuredRank(start=start[0], steps=tuple(steps))


def load_ranks(folder: Path, started: Sequence[int] | None = None) -> tuple[MeasuredRank, ...]:
    """All ranks of one run that were ``started`` (None: its world), in order. InputError when one is missing."""
    ranks = sorted((load_rank(path) for path in folder.glob("rank*.jsonl")), key=lambda one: one.start.rank)
    if not ranks:
        raise InputError("no rank has measured anything", where=str(folder))
    present = [one.start.rank for one in ranks]
    missing = sorted(set(range(ranks[0].start.world_size) if started is None else started) - set(present))
    if missing:
        raise InputError(
            f"rank {missing[0]} of {ranks[0].start.world_size} has not measured",
            where=str(folder),
            hint="profile again",
        )
    return tuple(ranks)
