"""The same job planned by several planners, scored by one oracle, and what each restriction costs.

Every row is evaluated on the true cluster by ``cost.evaluate``; what a planner expected of its own
plan stands beside it. The second table takes one freedom at a time from the exact search: what the
best plan loses without it is why ours is faster than planners that lack it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from hapmoe.cluster import Cluster
from hapmoe.errors import InputError
from hapmoe.job import JobSpec
from hapmoe.plan import Plan, SearchResult
from hapmoe.search import COST_ONLY, PLANNERS, Restrictions, pose_for, search, split_settings
from hapmoe.search.restricted import search_restricted

__all__ = ["Compared", "Loss", "Row", "compare_planners", "note_on_terminal", "to_document"]

Note = Callable[[str], None]
"""Told what is being worked on."""


@dataclass(frozen=True, slots=True)
class Row:
    """One planner's answer."""

    planner: str
    what: str
    step_s: float | None
    """Evaluated; None: no plan, ``reason`` says why."""
    believed_s: float | None
    memory_bytes: float | None
    """Of the fullest rank."""
    memory_share: float | None
    """Of its limit, on the stage where that is highest."""
    mfu: float | None
    tokens_per_s: float | None
    wall_s: float
    status: str
    reason: str = ""
    plan: Plan | None = None


@dataclass(frozen=True, slots=True)
class Loss:
    """The exact search without one of its freedoms."""

    name: str
    step_s: float | None
    """None: nothing fits without it."""


@dataclass(frozen=True, slots=True)
class Compared:
    """Both tables; ``rows`` in the order asked for."""

    rows: tuple[Row, ...]
    losses: tuple[Loss, ...]

    @property
    def best_s(self) -> float | None:
        """The exact search's step."""
        return next((row.step_s for row in self.rows if row.planner == "exact"), None)


def compare_planners(
    job: JobSpec,
    cluster: Cluster,
    planners: Sequence[str] = (),
    *,
    backend: str = "megatron",
    settings: Iterable[str] = (),
    time_limit_s: float | None = None,
    losses: bool = True,
    note: Note = lambda _: None,
) -> Compared:
    """Plan with each of ``planners`` (all when empty; ``exact`` is always among them)."""
    known = (*PLANNERS, *COST_ONLY)
    chosen = tuple(dict.fromkeys(("exact", *planners))) if planners else known
    if unknown := [name for name in chosen if name not in known]:
        raise InputError(f"no planner {unknown[0]!r}", where="--planners", hint=f"of {', '.join(known)}")
    settings = tuple(settings)
    pins = split_settings("hs-dp", settings)[1]
    rows: list[Row] = []
    results: dict[str, SearchResult] = {}
    for name in chosen:
        note(name)
        if name in COST_ONLY:
            rows.append(_cost_only(job, cluster))
            continue
        own = settings if name == "hs-dp" else pins
        result = search(job, cluster, planner=name, backend=backend, settings=own, top=1, time_limit_s=time_limit_s)
        results[name] = result
        rows.append(_row(name, result))
    ours = results["exact"]
    if not losses or ours.plan is None:
        return Compared(tuple(rows), ())
    return Compared(tuple(rows), tuple(_losses(job, cluster, backend, pins, ours, results.get("uniform"), note)))


def _row(name: str, result: SearchResult) -> Row:
    report, plan, estimate = result.report, result.plan, result.estimate
    wall = report.wall_s if report else 0.0
    if plan is None or estimate is None:
        reason = report.reasons[0] if report and report.reasons else "nothing fits"
        believed = report.believed_step_s or None if report else None
        return Row(name, PLANNERS[name], None, believed, None, None, None, None, wall, result.status, reason)
    shares = [stage.memory_bytes / stage.memory_limit_bytes for stage in estimate.stages]
    return Row(
        name,
        PLANNERS[name],
        estimate.step_s,
        (report.believed_step_s if report else 0.0) or estimate.step_s,
        max(stage.memory_bytes for stage in estimate.stages),
        max(shares),
        estimate.mfu,
        estimate.tokens_per_s,
        wall,
        result.status,
        plan=plan,
    )


def _cost_only(job: JobSpec, cluster: Cluster) -> Row:
    from hapmoe.search.disaggregated import hetermoe_style
    from hapmoe.workload import model_flops_per_step

    (name, what), *_ = COST_ONLY.items()
    found = hetermoe_style(job, cluster)
    if found.note:
        return Row(name, what, None, None, None, None, None, None, found.wall_s, "infeasible", found.note)
    tokens = job.training.global_batch_size * job.training.seq_len
    used = [pool for pool in cluster.pools if pool.name in (found.attention, found.experts)]
    peak = sum(pool.num_devices * pool.device.peak_flop_per_s.get(job.training.precision, 0.0) for pool in used)
    mfu = model_flops_per_step(job) / found.step_s / peak if peak else None
    reason = f"attention on {found.attention}, experts on {found.experts}, {found.moved} of them on {found.attention}"
    return Row(
        name,
        what,
        found.step_s,
        found.step_s,
        found.memory_bytes,
        None,
        mfu,
        tokens / found.step_s,
        found.wall_s,
        "cost only",
        reason,
    )


def _losses(
    job: JobSpec,
    cluster: Cluster,
    backend: str,
    pins: tuple[str, ...],
    ours: SearchResult,
    uniform: SearchResult | None,
    note: Note,
) -> list[Loss]:
    """One freedom at a time taken away; those that the best plan makes no use of cost nothing."""
    problem = pose_for(job, cluster, backend, pins)
    found = []

    def without(name: str, result: SearchResult) -> None:
        found.append(Loss(name, result.estimate.step_s if result.estimate else None))

    for name, restrictions in (
        ("equal layers on all stages", Restrictions(uniform_layers=True)),
        ("one recomputation for all stages", Restrictions(one_recompute=True)),
    ):
        note(name)
        without(name, search_restricted(problem, restrictions, backend=backend, top=1))
    note("pins")
    if uniform is None:
        uniform = search(job, cluster, planner="uniform", backend=backend, settings=pins, top=1, problem=problem)
    without("both of these (uniform)", uniform)
    if job.model.moe is not None and uniform.plan is not None:
        stage = uniform.plan.stages[0]
        name = f"expert degrees of the best uniform plan (ep {stage.ep}, etp {stage.etp})"
        without(name, _pinned(job, cluster, backend, (*pins, f"ep={stage.ep}", f"etp={stage.etp}")))
    assert ours.plan is not None
    for name, more in (
        ("no virtual stages", ("vpp=1",)),
        ("no tensor or context parallelism", ("tp=1", "cp=1")),
        ("one sequence per microbatch", ("mbs=1",)),
        ("every node used", tuple(f"{pool.name}.nodes={pool.nodes}" for pool in cluster.pools)),
    ):
        if _keeps(ours.plan, cluster, more):
            found.append(Loss(name, ours.estimate.step_s if ours.estimate else None))
        else:
            without(name, _pinned(job, cluster, backend, (*pins, *more)))
    return found


def _keeps(plan: Plan, cluster: Cluster, pins: tuple[str, ...]) -> bool:
    """Does the best plan keep these pins anyway? Then it is also the best of those that do."""
    first, used = plan.stages[0], plan.num_devices
    values = {"vpp": plan.vpp, "tp": first.tp, "cp": first.cp, "mbs": plan.micro_batch_size}
    if pins and ".nodes=" in pins[0]:
        return used == cluster.num_devices
    return all(str(values[key]) == value for key, value in (pin.split("=") for pin in pins))


def _pinned(job: JobSpec, cluster: Cluster, backend: str, pins: tuple[str, ...]) -> SearchResult:
    return search(job, cluster, backend=backend, settings=pins, top=1)


@contextmanager
def note_on_terminal() -> Iterator[Note]:
    """Shows what is being worked on, on one line of stderr that goes away; silent where that is no terminal."""
    shown = sys.stderr.isatty()

    def note(what: str) -> None:
        if shown:
            print(f"\r{what:<60.60}", end="", file=sys.stderr, flush=True)

    try:
        yield note
    finally:
        if shown:
            print("\r" + " " * 60 + "\r", end="", file=sys.stderr, flush=True)


def to_document(compared: Compared) -> dict[str, Any]:
    """For ``--json``."""
    best = compared.best_s
    rows = []
    for row in compared.rows:
        entry = {name: getattr(row, name) for name in Row.__slots__ if name != "plan"}
        entry["slower_than_exact"] = row.step_s / best - 1 if row.step_s and best else None
        entry["stages"] = msgspec.to_builtins(row.plan.stages) if row.plan else []
        rows.append(entry)
    losses = [
        {"without": loss.name, "step_s": loss.step_s, "loss": loss.step_s / best - 1 if loss.step_s and best else None}
        for loss in compared.losses
    ]
    return {"schema": 1, "planners": rows, "restrictions": losses}
