"""Geometry of the report's charts: numbers in, positions out. The template draws them as SVG.

Horizontal positions are fractions of the chart's width, so that a chart scales without distortion.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hapmoe.units import format_seconds

if TYPE_CHECKING:
    from hapmoe.schedule import Event, Timeline

__all__ = ["Bar", "Gantt", "Part", "Stack", "Window", "lay_out_timeline", "stack_rows"]

_WIDTH = 100_000
"""Integer units across the timeline: short numbers in the file, far finer than a pixel."""
_SHOWN_BARS = 4_000
"""Bars with a hover title; beyond, each stage's bars become one shape per kind."""
_GAP = 0.035
"""Share of the width for the mark of an omitted stretch."""
_LABELLED = 0.014
"""A bar at least this wide, as a share of the chart, gets its microbatch number."""


@dataclass(frozen=True)
class Bar:
    """One event: integer position in ``_WIDTH`` units."""

    x: int
    width: int
    kind: str
    title: str
    label: str
    chunk: int


@dataclass(frozen=True)
class Window:
    """A stretch of time that is drawn, at [x, x + width] of the chart."""

    start_s: float
    end_s: float
    x: float
    width: float
    ticks: tuple[tuple[float, str], ...]


@dataclass(frozen=True)
class Gantt:
    """The timeline, ready to draw."""

    units: int
    rows: tuple[tuple[Bar, ...], ...]
    shapes: tuple[tuple[tuple[str, str], ...], ...]
    """Per stage (kind, SVG path): transfers, and everything else when there is too much to title."""
    windows: tuple[Window, ...]
    omitted: str
    """What the mark between the windows stands for; empty: nothing is left out."""
    kinds: tuple[str, ...]
    shaded: bool
    """Later virtual stages are drawn darker."""


@dataclass(frozen=True)
class Part:
    """One segment of a stacked bar: fractions of the chart's width."""

    name: str
    x: float
    width: float
    value: float
    color: int


@dataclass(frozen=True)
class Stack:
    """Stacked bars on one scale, one row per stage."""

    names: tuple[str, ...]
    rows: tuple[tuple[Part, ...], ...]
    totals: tuple[float, ...]
    scale: float
    """The value at the right end."""
    limits: tuple[float, ...]
    """Per row, the limit as a fraction of the width; empty: none."""


def stack_rows(
    rows: Sequence[Mapping[str, float]], *, limits: Sequence[float] = (), keep: int = 8, order: Sequence[str] = ()
) -> Stack:
    """Stack named values per row. Beyond ``keep`` names the smallest are summed as ``other``.

    ``order`` fixes the names' order; otherwise the largest over all rows come first.
    """
    sums: dict[str, float] = {}
    for row in rows:
        for name, value in row.items():
            sums[name] = sums.get(name, 0.0) + value
    ranked = [name for name in order if sums.get(name)] or sorted(
        (name for name in sums if sums[name] > 0), key=lambda name: -sums[name]
    )
    names = ranked if len(ranked) <= keep else ranked[: keep - 1]
    totals = [sum(max(value, 0.0) for value in row.values()) for row in rows]
    scale = max([*totals, *limits, 0.0]) * 1.02 or 1.0
    drawn = []
    for row, total in zip(rows, totals, strict=True):
        values = [(name, max(row.get(name, 0.0), 0.0)) for name in names]
        if len(names) < len(ranked):
            values.append(("other", max(total - sum(value for _, value in values), 0.0)))
        x, parts = 0.0, []
        for color, (name, value) in enumerate(values):
            if value > 0:
                parts.append(Part(name, x / scale, value / scale, value, color))
            x += value
        drawn.append(tuple(parts))
    shown = (*names, "other") if len(names) < len(ranked) else tuple(names)
    return Stack(shown, tuple(drawn), tuple(totals), scale, tuple(limit / scale for limit in limits))


def lay_out_timeline(timeline: Timeline) -> Gantt:
    """All events where they are few; else warm-up with one steady period, and the cool-down."""
    windows, omitted = _choose_windows(timeline)
    kinds = tuple(
        kind
        for kind in ("forward", "backward", "send", "recv", "grad_sync", "optimizer")
        if any(event.kind == kind for event in timeline.events)
    )
    placed = [_place(event, windows) for event in timeline.events]
    shown = [(event, spot) for event, spot in zip(timeline.events, placed, strict=True) if spot is not None]
    titled = sum(event.kind not in ("send", "recv") for event, _ in shown) <= _SHOWN_BARS
    rows: list[list[Bar]] = [[] for _ in range(timeline.pp)]
    shapes: list[dict[str, list[str]]] = [{} for _ in range(timeline.pp)]
    for event, (x, width) in shown:
        if event.kind in ("send", "recv") or not titled:
            top, height = (14, 6) if event.kind in ("send", "recv") else (2, 16)
            path = f"M{x} {top}h{width}v{height}h-{width}z"
            shapes[event.stage].setdefault(event.kind, []).append(path)
        else:
            rows[event.stage].append(_make_bar(event, x, width, timeline.vpp))
    return Gantt(
        units=_WIDTH,
        rows=tuple(tuple(row) for row in rows),
        shapes=tuple(tuple((kind, "".join(paths)) for kind, paths in row.items()) for row in shapes),
        windows=windows,
        omitted=omitted,
        kinds=kinds,
        shaded=titled and timeline.vpp > 1,
    )


def _make_bar(event: Event, x: int, width: int, vpp: int) -> Bar:
    name = event.kind.replace("_", " ")
    if event.kind in ("forward", "backward"):
        name += f" {event.microbatch}" + (f", virtual stage {event.chunk}" if vpp > 1 else "")
    span = f"{format_seconds(event.end_s - event.start_s)} from {format_seconds(event.start_s)}"
    numbered = event.kind in ("forward", "backward") and width >= _LABELLED * _WIDTH
    return Bar(x, width, event.kind, f"{name}: {span}", str(event.microbatch) if numbered else "", event.chunk)


def _place(event: Event, windows: Sequence[Window]) -> tuple[int, int] | None:
    """(x, width) in integer units, clipped to the window that shows it; None: not shown."""
    for window in windows:
        start, end = max(event.start_s, window.start_s), min(event.end_s, window.end_s)
        if end > start:
            scale = window.width / (window.end_s - window.start_s)
            x = round((window.x + (start - window.start_s) * scale) * _WIDTH)
            return x, max(1, round((window.x + (end - window.start_s) * scale) * _WIDTH) - x)
    return None


def _choose_windows(timeline: Timeline) -> tuple[tuple[Window, ...], str]:
    """The whole step, or its two ends around a steady stretch that only repeats.

    The first window ends one period after stage 0 has begun its backward passes: a period is
    ``pp`` microbatches, after which 1F1B (and interleaved groups of ``pp``) repeats itself.
    """
    whole = (_window(0.0, timeline.end_s, 0.0, 1.0),)
    backward = sorted(e.end_s for e in timeline.events if e.kind == "backward" and e.stage == 0 and e.chunk == 0)
    forward = sorted(e.start_s for e in timeline.events if e.kind == "forward" and e.stage == 0)
    period = max(timeline.pp, 4)
    if len(backward) < 4 * period or not forward:
        return whole, ""
    first_end, last_start = backward[period], backward[-period]
    last_start = min(last_start, forward[-1])
    if last_start - first_end < 0.25 * timeline.end_s:
        return whole, ""
    left = sum(first_end < end <= last_start for end in backward)
    spans = (first_end, timeline.end_s - last_start)
    share = [(1 - _GAP) * span / sum(spans) for span in spans]
    windows = (
        _window(0.0, first_end, 0.0, share[0]),
        _window(last_start, timeline.end_s, share[0] + _GAP, share[1]),
    )
    return windows, f"{format_seconds(last_start - first_end)} with {left} microbatches left out: they only repeat"


def _window(start_s: float, end_s: float, x: float, width: float) -> Window:
    step = _tick_step((end_s - start_s) / max(1, round(width * 9)))
    first = -(-start_s // step)
    count = int((end_s - first * step) // step) + 1 if end_s > start_s else 0
    scale = width / (end_s - start_s) if end_s > start_s else 0.0
    at = [(first + index) * step for index in range(max(count, 0))]
    return Window(start_s, end_s, x, width, tuple((x + (t - start_s) * scale, _format_tick(t, step)) for t in at))


def _tick_step(least: float) -> float:
    """The next of 1, 2, 5 x 10^n at or above ``least``."""
    if least <= 0:
        return 1.0
    power = 10.0 ** _floor_log10(least)
    return next(power * digit for digit in (1, 2, 5, 10) if power * digit >= least * 0.999)


def _floor_log10(value: float) -> int:
    from math import floor, log10

    return floor(log10(value))


def _format_tick(value: float, step: float) -> str:
    """Seconds with as many decimals as the step needs, in one unit along the axis."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if step >= size * 0.05:
            decimals = max(0, -_floor_log10(step / size * 1.0001))
            return f"{value / size:,.{decimals}f} {unit}"
    return f"{value * 1e9:,.0f} ns"
