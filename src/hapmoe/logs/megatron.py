"""Megatron's own log: what every step took, its timers, and the memory that ranks reported.

Formats, as the code of each version prints them (megatron/training/training.py: training_log;
core/timers.py; training/utils: report_memory): iteration lines with and without a time stamp (since
0.9), with ``current/average`` times (AMD's Primus) or ``key=value`` (Megatron-DeepSpeed); timers as
maximum, (minimum, maximum) or all ranks; memory in MB of 2^20 bytes, since 0.16 with the device's whole
use. Prefixes of launchers (``[default0]:``, ``3:``) stay out of the way.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from hapmoe.errors import InputError

__all__ = ["Iteration", "MegatronLog", "Reported", "read_log"]


@dataclass(frozen=True, slots=True)
class Iteration:
    """One line of the log; the time is the mean over the steps since the line before."""

    number: int
    step_s: float
    tflop_per_s_per_device: float | None = None
    global_batch_size: int | None = None
    skipped: int = 0


@dataclass(frozen=True, slots=True)
class Reported:
    """Memory of one rank, bytes."""

    rank: int
    after: int
    """Steps done when it was reported."""
    allocated: float
    max_allocated: float
    max_reserved: float
    device: float | None = None
    """All of the device's memory in use, by the driver."""


@dataclass(frozen=True, slots=True)
class MegatronLog:
    """All that one log says of time and memory."""

    iterations: tuple[Iteration, ...]
    timers: dict[str, tuple[float, ...]]
    """Seconds per step on the slowest rank, by the timer's name: one entry per time it was logged."""
    memory: tuple[Reported, ...]
    by_rank: dict[str, dict[int, tuple[float, ...]]]
    """Seconds per step of each rank, by the timer's name (``--timing-log-option all``)."""

    @property
    def steady(self) -> tuple[Iteration, ...]:
        """Without the first line (kernels are compiled, buffers made) and without skipped steps."""
        first = min((one.number for one in self.iterations), default=0)
        later = tuple(one for one in self.iterations if one.number > first and not one.skipped)
        return later or self.iterations


_NUMBER = r"([0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)"
_ITERATION = re.compile(r"\biteration[ =:]\s*(\d+)\s*/\s*(\d+)\s*\|(.*)")
_ELAPSED = re.compile(rf"elapsed[ _]time[ _]per[ _]iteration(?: \(ms\):|_ms=)\s*{_NUMBER}(?:/{_NUMBER})?")
_TFLOPS = re.compile(rf"(?:throughput per GPU \(TFLOP/s/GPU\):|\bTFLOPs:|\[LM\]-?TFLOPs=)\s*{_NUMBER}")
_BATCH = re.compile(r"gl(?:ob|bo)al[ _]batch[ _]size[:=]\s*(\d+)")
_SKIPPED = re.compile(r"number[ _]of[ _](?:skipped|nan)[ _]iterations[:=]\s*(\d+)")
_TIMERS = re.compile(r"(?:\(min, max\) |max )?times? across ranks \(ms\):")
_TIMER = re.compile(rf"^\S*\s{{2,}}([\w-]+) \.*:\s*(?:\(\s*{_NUMBER}\s*,\s*{_NUMBER}\s*\)|{_NUMBER})\s*$")
_NAME = re.compile(r"^\S*\s{2,}([\w-]+):\s*$")
_RANK_TIME = re.compile(rf"^\S*\s+rank\s+(\d+):\s*{_NUMBER}\s*$")
_MEMORY = re.compile(
    rf"\[Rank (\d+)\] \(after (\d+) iterations\) memory \(MB\) \| allocated: {_NUMBER} \| max allocated: {_NUMBER}"
    rf" \| reserved: {_NUMBER} \| max reserved: {_NUMBER}(?: \| total device memory used: {_NUMBER})?"
)
_MB = 2.0**20


def read_log(text: str, where: str = "log") -> MegatronLog:
    """All iteration lines, timers and memory reports of a log. InputError where there is not one iteration."""
    iterations = tuple(_iterations(text))
    if not iterations:
        hint = 'lines like " iteration 10/ 100 | … elapsed time per iteration (ms): 812.3 |"'
        raise InputError("no iterations of Megatron in it", where=where, hint=hint)
    memory = tuple(
        Reported(
            int(found[1]),
            int(found[2]),
            float(found[3]) * _MB,
            float(found[4]) * _MB,
            float(found[6]) * _MB,
            float(found[7]) * _MB if found[7] else None,
        )
        for found in _MEMORY.finditer(text)
    )
    timers, by_rank = _timers(text)
    return MegatronLog(iterations, timers, memory, by_rank)


def _iterations(text: str) -> Iterator[Iteration]:
    for found in _ITERATION.finditer(text):
        rest = found[3]
        elapsed = _ELAPSED.search(rest)
        if elapsed is None or float(elapsed[1]) <= 0:
            continue
        flops, batch = _TFLOPS.search(rest), _BATCH.search(rest)
        yield Iteration(
            int(found[1]),
            float(elapsed[1]) / 1e3,
            float(flops[1]) if flops else None,
            int(batch[1]) if batch else None,
            sum(int(count) for count in _SKIPPED.findall(rest)),
        )


def _timers(text: str) -> tuple[dict[str, tuple[float, ...]], dict[str, dict[int, tuple[float, ...]]]]:
    """Blocks of timers: seconds of the slowest rank of each, and of every rank where all are printed."""
    found: dict[str, list[float]] = {}
    by_rank: dict[str, dict[int, list[float]]] = {}
    inside, name = False, ""
    for line in text.splitlines():
        if _TIMERS.search(line):
            inside, name = True, ""
        elif not inside:
            continue
        elif match := _TIMER.match(line):
            found.setdefault(match[1], []).append(float(match[3] or match[4]) / 1e3)
        elif match := _NAME.match(line):
            name = match[1]
            found.setdefault(name, []).append(0.0)
        elif (match := _RANK_TIME.match(line)) and name:
            seconds = float(match[2]) / 1e3
            found[name][-1] = max(found[name][-1], seconds)
            by_rank.setdefault(name, {}).setdefault(int(match[1]), []).append(seconds)
        else:
            inside = False
    of_ranks = {key: {rank: tuple(each) for rank, each in ranks.items()} for key, ranks in by_rank.items()}
    return {key: tuple(values) for key, values in found.items()}, of_ranks
