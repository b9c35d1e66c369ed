"""What a routing profile says: how unevenly experts are loaded, and whether that has changed.

A row counts what each expert got of one microbatch. Rank r of an expert-parallel group of ep holds
experts [r E/ep, (r+1) E/ep); its load over the mean is the imbalance rho, and a profile gives it for
every ep that divides the experts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import pi, sqrt
from pathlib import Path

import msgspec

from hapmoe import tables
from hapmoe.errors import InputError
from hapmoe.job import JobSpec
from hapmoe.logs.routing import trace_table
from hapmoe.measured import Routing, Run

__all__ = ["DRIFT", "Drift", "drift", "imbalance", "imbalances", "load_routing", "with_routing"]

DRIFT = 0.05
"""ASSUMED threshold of ``Drift.moved``: one token in twenty goes to another expert than before."""


def imbalance(rows: Iterable[Routing], ep: int) -> float:
    """rho(ep) = ep * (load of the fullest rank) / (all load): the mean over microbatches and layers of it.

    The mean of the maximum, not the maximum of the mean: every microbatch waits for its own slowest
    rank. 1 for ep = 1, and where nothing was routed. Source: docs/routing.md.
    """
    values = []
    for row in rows:
        total = sum(row.tokens)
        if total:
            each = len(row.tokens) // ep
            values.append(ep * max(sum(row.tokens[r * each : (r + 1) * each]) for r in range(ep)) / total)
    return sum(values) / len(values) if values else 1.0


def imbalances(rows: Sequence[Routing]) -> tuple[tuple[int, float], ...]:
    """rho of every ep that divides the experts."""
    experts = len(rows[0].tokens)
    return tuple((ep, imbalance(rows, ep)) for ep in range(1, experts + 1) if experts % ep == 0)


def load_routing(path: str | Path) -> tuple[Routing, ...]:
    """The rows of a routing table, a folder that holds one, or a trace of JSON lines."""
    path = Path(path)
    if path.is_dir():
        found = [table for table in tables.load(path) if table.kind == "routing"]
    elif path.suffix == ".jsonl":
        found = [trace_table(path, Run(date=""))]
    else:
        found = [tables.read(path)]
    rows = tuple(row for table in found for row in tables.newest(table) if isinstance(row, Routing))
    if not rows:
        hint = "a routing table, a folder with one, or JSON lines; hapmoe tables import makes one"
        raise InputError("holds no routing profile", where=str(path), hint=hint)
    if len({len(row.tokens) for row in rows}) > 1:
        raise InputError("profiles of different numbers of experts in one", where=str(path))
    return rows


def with_routing(job: JobSpec, path: str | Path) -> JobSpec:
    """The job with the expert load of a profile. InputError where it is of another number of experts."""
    rows = load_routing(path)
    experts = job.model.moe.num_experts if job.model.moe else 0
    if len(rows[0].tokens) != experts:
        raise InputError(f"{len(rows[0].tokens)} experts, the job has {experts}", where=str(path))
    found = imbalances(rows)
    layers = len({row.layer for row in rows})
    said = ", ".join(f"{rho:.2f} at ep {ep}" for ep, rho in found if ep > 1)
    note = f"experts' load by the routing profile of {layers} layers and {len(rows)} microbatches: {said}"
    training = msgspec.structs.replace(job.training, imbalance_by_ep=found)
    return msgspec.structs.replace(job, training=training, notes=(*job.notes, note))


@dataclass(frozen=True, slots=True)
class Drift:
    """How far the load of one layer has moved between two profiles."""

    layer: int
    moved: float
    """Share of tokens that went to other experts: half the sum of |p_e - q_e| (total variation)."""
    noise: float
    """What sampling alone would make of it, if tokens were drawn one by one."""
    rho: tuple[float, float]
    """Imbalance at the asked ep, before and after."""

    def beyond(self, threshold: float) -> bool:
        """More than the threshold, and not explained by few tokens."""
        return self.moved > threshold and self.moved > 2.0 * self.noise


def drift(before: Sequence[Routing], after: Sequence[Routing], ep: int = 1) -> tuple[Drift, ...]:
    """Layer by layer, of those that both profiles have. InputError where they have none in common."""
    old, new = _by_layer(before), _by_layer(after)
    if not old.keys() & new.keys() or len(before[0].tokens) != len(after[0].tokens):
        raise InputError("the two profiles have no layer in common", where="routing")
    found = []
    for layer in sorted(old.keys() & new.keys()):
        p, q = _shares(old[layer]), _shares(new[layer])
        n, m = (max(sum(sum(row.tokens) for row in rows), 1) for rows in (old[layer], new[layer]))
        moved = sum(abs(a - b) for a, b in zip(p, q, strict=True)) / 2
        # |difference| of two frequencies with the same p is on average sqrt(2/pi) of its deviation
        both = [(a + b) / 2 for a, b in zip(p, q, strict=True)]
        noise = sum(sqrt(2 / pi * one * (1 - one) * (1 / n + 1 / m)) for one in both) / 2
        rho = imbalance(old[layer], ep), imbalance(new[layer], ep)
        found.append(Drift(layer, moved, noise, rho))
    return tuple(found)


def _by_layer(rows: Iterable[Routing]) -> dict[int, list[Routing]]:
    found = defaultdict(list)
    for row in rows:
        found[row.layer].append(row)
    return found


def _shares(rows: Sequence[Routing]) -> list[float]:
    total = max(sum(sum(row.tokens) for row in rows), 1)
    return [sum(counts) / total for counts in zip(*(row.tokens for row in rows), strict=True)]
