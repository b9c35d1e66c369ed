"""Predictions against measured training runs: which terms are off, and factors that mend them.

Unknown are, for each device kind, the logarithms of factors on compute, communication and optimizer
seconds. They are fitted to the measured step times and timers of the runs by regularised least
squares (Gauss-Newton on ``cost.evaluate`` itself), each factor held near 1 as strongly as the model
deserves; what the runs do not tell stays at 1. Whether it helps is said of runs left out of the fit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

import msgspec
import numpy as np

from hapmoe.cluster import Cluster
from hapmoe.cost import evaluate
from hapmoe.errors import InputError
from hapmoe.job import JobSpec
from hapmoe.logs.megatron import MegatronLog
from hapmoe.measured import Calibration, Measurements, Run, Table
from hapmoe.options import FloatArray, IntArray
from hapmoe.plan import Estimate, Plan
from hapmoe.profiling.probed import MeasuredRank, Span
from hapmoe.resolve import resolve
from hapmoe.tables import shape_key

__all__ = [
    "Calibrated",
    "Compared",
    "Observed",
    "Term",
    "calibrate",
    "compare",
    "observe",
    "observe_probe",
    "tables_of",
    "with_factors",
]

FACTORS: Final = ("compute", "communication", "optimizer")
PRIOR: Final = {"compute": 0.2, "communication": 0.5, "optimizer": 0.5}
"""ASSUMED spread of the logarithm of each factor before anything is measured: compute comes from fitted
kernel curves, the others mostly from data sheets."""
STEP_NOISE: Final = 0.03
"""ASSUMED: how near three factors can bring any step of one model on one kind of device. The spread of a
mean step time from run to run is smaller."""
TIMER_NOISE: Final = 0.06
"""ASSUMED: more, since Megatron's timers synchronise and overlap what the model keeps apart."""
_ROUNDS = 5
_LEFT_OUT = 8  # runs that are left out in turn, at most

Factors = dict[tuple[str, str], float]
"""By device kind and term: factors, or bytes of workspace."""


@dataclass(frozen=True, slots=True)
class Observed:
    """One training run: its plan, and what its log says."""

    name: str
    plan: Plan
    step_s: float
    timers: dict[str, float]
    """Seconds of a step on the slowest rank: those of ``forward-backward`` and ``optimizer``, where logged."""
    memory: dict[int, float]
    """Peak bytes of the fullest rank of each stage: reserved by the allocator."""
    passes: dict[tuple[int, str], float]
    """Seconds of all of a step's forward or backward passes, by stage and ``forward`` or ``backward``."""
    steps: int


@dataclass(frozen=True, slots=True)
class Compared:
    """A term of one run: predicted, measured."""

    run: str
    term: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted / self.measured - 1.0


@dataclass(frozen=True, slots=True)
class Term:
    """A factor as fitted, with what is left uncertain of it."""

    device: str
    term: str
    value: float
    sigma: float
    """Standard deviation of its logarithm; near ``PRIOR``: the runs say nothing of it."""

    @property
    def off(self) -> bool:
        """The model is wrong here by more than 3%, and this is no chance."""
        return abs(float(np.log(self.value))) > max(0.03, 2.0 * self.sigma)


@dataclass(frozen=True, slots=True)
class Calibrated:
    """What runs have taught."""

    terms: tuple[Term, ...]
    workspace: dict[str, float]
    """Bytes by device kind that runs use beyond the prediction; negative: less."""
    before: tuple[Compared, ...]
    after: tuple[Compared, ...]
    left_out: tuple[tuple[float, float], ...]
    """Absolute error of the step time of each run left out in turn: uncalibrated, calibrated on the others."""

    @property
    def held_out(self) -> tuple[float, float] | None:
        """Medians of ``left_out``; None where there was one run."""
        if not self.left_out:
            return None
        before, after = zip(*self.left_out, strict=True)
        return median(before), median(after)


def observe(job: JobSpec, cluster: Cluster, plan: Plan, logs: Sequence[MegatronLog], name: str) -> Observed:
    """What logs of one plan's run say. InputError where they are of another global batch."""
    plan = resolve(job, cluster, plan)
    steady = [one for log in logs for one in log.steady]
    for one in steady:
        if one.global_batch_size not in (None, plan.global_batch_size):
            what = f"a global batch of {one.global_batch_size}, the plan has {plan.global_batch_size}"
            raise InputError(what, where=name, hint="the log of a run of this plan")
    timers: dict[str, float] = {}
    for timer in ("forward-backward", "optimizer"):
        values = [value for log in logs for value in log.timers.get(timer, ())]
        if values:
            timers[timer] = median(values[1:] or values)
    memory: dict[int, float] = {}
    passes: dict[tuple[int, str], float] = {}
    for index, stage in enumerate(plan.stages):
        ranks = range(stage.first_rank, stage.first_rank + stage.num_devices)
        peaks = [one.max_reserved for log in logs for one in log.memory if one.rank in ranks]
        if peaks:
            memory[index] = max(peaks)
        for way in ("forward", "backward"):
            by_rank = [log.by_rank.get(f"{way}-compute", {}) for log in logs]
            slowest = [
                median(values[1:] or values) for each in by_rank for rank, values in each.items() if rank in ranks
            ]
            if slowest:
                passes[index, way] = max(slowest)
    return Observed(name, plan, median(one.step_s for one in steady), timers, memory, passes, len(steady))


def observe_probe(job: JobSpec, cluster: Cluster, plan: Plan, ranks: Sequence[MeasuredRank], name: str) -> Observed:
    """The same of what the probe wrote (``HAPMOE_PROBE``): a step is the slowest rank's, in wall or device time.

    Steps of the probe begin with the first forward pass: loading data and logging are not in them.
    """
    plan = resolve(job, cluster, plan)
    if ranks[0].start.world_size != plan.num_devices:
        what = f"{ranks[0].start.world_size} ranks, the plan has {plan.num_devices}"
        raise InputError(what, where=name, hint="the probe's folder of a run of this plan")
    of_steps = zip(*([step.wall_s or 0.0 for step in one.steady] for one in ranks), strict=False)
    steps = [max(walls) for walls in of_steps]
    optimizer = [median(_total(step.optimizer) for step in one.steady) for one in ranks]
    memory: dict[int, float] = {}
    passes: dict[tuple[int, str], float] = {}
    for index, stage in enumerate(plan.stages):
        mine = ranks[stage.first_rank : stage.first_rank + stage.num_devices]
        passes[index, "forward"] = max(median(_total(step.forward) for step in one.steady) for one in mine)
        passes[index, "backward"] = max(median(_total(step.backward) for step in one.steady) for one in mine)
        if mine[0].start.clock == "device":
            memory[index] = max(
                float(mark.reserved_bytes) for one in mine for step in one.steps for mark in step.memory
            )
    passes = {key: value for key, value in passes.items() if value > 0}
    timers = {"optimizer": max(optimizer)} if max(optimizer) > 0 else {}
    return Observed(name, plan, median(steps), timers, memory, passes, len(steps))


def _total(spans: Sequence[Span]) -> float:
    return sum(span.wall_s or 0.0 for span in spans)


def compare(job: JobSpec, cluster: Cluster, run: Observed) -> tuple[Compared, ...]:
    """Predicted and measured: step, its parts, memory of each stage."""
    estimate = evaluate(job, cluster, run.plan)
    found = [Compared(run.name, "step", estimate.step_s, run.step_s)]
    for term, value in _timed(estimate).items():
        if term in run.timers and value > 0:
            found.append(Compared(run.name, term, value, run.timers[term]))
    for (index, way), measured in run.passes.items():
        stage = estimate.stages[index]
        each_s = stage.forward_s if way == "forward" else stage.backward_s
        found.append(Compared(run.name, f"{way} of stage {index}", run.plan.num_microbatches * each_s, measured))
    for index, measured in run.memory.items():
        found.append(Compared(run.name, f"memory of stage {index}", estimate.stages[index].memory_bytes, measured))
    return tuple(found)


def _timed(estimate: Estimate) -> dict[str, float]:
    """Megatron's timers: ``forward-backward`` ends with the gradients reduced (finalize_model_grads)."""
    return {"forward-backward": estimate.step_s - estimate.optimizer_s, "optimizer": estimate.optimizer_s}


def with_factors(job: JobSpec, cluster: Cluster, factors: Factors) -> Cluster:
    """The cluster with these calibrations in place of any that it has."""
    pools = []
    for pool in cluster.pools:
        rows = tuple(
            Calibration(run="", term=term, model=shape_key(job), value=value, samples=1)
            for (device, term), value in sorted(factors.items())
            if device == pool.device.name
        )
        known = pool.tables or Measurements(sha256="")
        found = msgspec.structs.replace(known, calibration=rows)
        digest = hashlib.sha256((known.sha256 + repr(rows)).encode()).hexdigest()
        pools.append(msgspec.structs.replace(pool, tables=msgspec.structs.replace(found, sha256=digest)))
    return msgspec.structs.replace(cluster, pools=tuple(pools))


def calibrate(job: JobSpec, cluster: Cluster, runs: Sequence[Observed]) -> Calibrated:
    """Factors that the runs ask for, and what they do for runs left out.

    Calibrations that the cluster's tables hold already are put aside: the runs say it anew.
    """
    bare = with_factors(job, cluster, {})
    used = {stage.pool for run in runs for stage in run.plan.stages}
    kinds = sorted({pool.device.name for pool in cluster.pools if pool.name in used})
    names = [(kind, term) for kind in kinds for term in FACTORS]
    fitted = _fit(job, bare, runs, names)
    factors: Factors = {name: float(value) for name, value in zip(names, np.exp(fitted.theta), strict=True)}
    workspace = _workspace(job, with_factors(job, bare, factors), runs)
    whole = with_factors(job, bare, factors | {(kind, "workspace"): value for kind, value in workspace.items()})
    before = tuple(compare(job, bare, run) for run in runs)
    left_out = []
    for index in range(min(len(runs), _LEFT_OUT) if len(runs) > 1 else 0):
        mended = with_factors(job, bare, dict(zip(names, np.exp(fitted.without(index)).tolist(), strict=True)))
        after = compare(job, mended, runs[index])[0].error
        left_out.append((abs(before[index][0].error), abs(after)))
    return Calibrated(
        terms=tuple(Term(*name, factors[name], float(sigma)) for name, sigma in zip(names, fitted.sigma, strict=True)),
        workspace=workspace,
        before=tuple(term for terms in before for term in terms),
        after=tuple(term for run in runs for term in compare(job, whole, run)),
        left_out=tuple(left_out),
    )


@dataclass(frozen=True, slots=True)
class _Fitted:
    """Logarithms of the factors, with the linearised problem around them: R residuals, their slopes, whose they are."""

    theta: FloatArray
    residual_R: FloatArray
    slope_RT: FloatArray
    run_R: IntArray
    """The run of each residual; -1: the prior's."""

    @property
    def sigma(self) -> FloatArray:
        return np.asarray(np.sqrt(np.diag(np.linalg.inv(self.slope_RT.T @ self.slope_RT))))

    def without(self, run: int) -> FloatArray:
        """The logarithms that the other runs ask for: one step from those of all."""
        kept = self.run_R != run
        slope, residual = self.slope_RT[kept], self.residual_R[kept]
        return np.asarray(self.theta - np.linalg.solve(slope.T @ slope, slope.T @ residual))


def _fit(job: JobSpec, bare: Cluster, runs: Sequence[Observed], names: Sequence[tuple[str, str]]) -> _Fitted:
    """Gauss-Newton with a normal prior around 0."""
    prior = np.array([PRIOR[term] for _, term in names])
    theta, owner = np.zeros(len(names)), np.empty(0, np.int64)

    def residuals(theta: FloatArray) -> tuple[FloatArray, IntArray]:
        cluster = with_factors(job, bare, dict(zip(names, np.exp(theta).tolist(), strict=True)))
        found, owner = [], []
        for index, run in enumerate(runs):
            for term in compare(job, cluster, run):
                if not term.term.startswith("memory"):
                    noise = STEP_NOISE if term.term == "step" else TIMER_NOISE
                    found.append(float(np.log(term.predicted / term.measured)) / noise)
                    owner.append(index)
        return np.array([*found, *(theta / prior)]), np.array(owner + [-1] * len(names))

    slope = np.eye(len(names))
    here, owner = residuals(theta)
    for _ in range(_ROUNDS):
        step = 1e-3
        slope = np.stack([(residuals(theta + step * unit)[0] - here) / step for unit in np.eye(len(names))], axis=1)
        move = np.clip(-np.linalg.solve(slope.T @ slope, slope.T @ here), -1.0, 1.0)
        theta = theta + move
        here, owner = residuals(theta)
        if np.abs(move).max() < 1e-2:
            break
    return _Fitted(theta, here, slope, owner)


def _workspace(job: JobSpec, cluster: Cluster, runs: Sequence[Observed]) -> dict[str, float]:
    """Median over stages of measured less predicted bytes, by device kind."""
    found: dict[str, list[float]] = {}
    for run in runs:
        estimate = evaluate(job, cluster, run.plan)
        for index, measured in run.memory.items():
            kind = cluster.pool(run.plan.stages[index].pool).device.name
            found.setdefault(kind, []).append(measured - estimate.stages[index].memory_bytes)
    return {kind: float(median(values)) for kind, values in found.items()}


def tables_of(job: JobSpec, found: Calibrated, runs: int, date: str, command: str) -> tuple[Table, ...]:
    """The calibration as tables, one for each device kind."""
    run = Run(date=date, command=command, note=f"fitted on {runs} runs")
    before, after = found.held_out or (0.0, 0.0)
    tables = []
    for kind in sorted({term.device for term in found.terms}):
        values = {term.term: term.value for term in found.terms if term.device == kind}
        values |= {"workspace": found.workspace[kind]} if kind in found.workspace else {}
        rows = tuple(
            Calibration(
                run=run.id,
                term=term,
                model=shape_key(job),
                value=value,
                samples=runs,
                error_before=before,
                error_after=after,
            )
            for term, value in values.items()
        )
        tables.append(Table(kind="calibration", device=kind, device_kind=kind, runs=(run,), rows=rows))
    return tuple(tables)
