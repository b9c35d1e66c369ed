"""``hs-dp``: the HAPMoE paper's own search, Algorithm 1 (arXiv:2609.39350), to the letter.

    DP[i, j, m] = min over k, h, π of  DP[i−1, k, m'] + T_stage(h, k+1..j, π) + T_comm(h, h', k, j)

the first j layers on the first i stages, m the devices of each kind that are left. Pruned by

1. load balance: n_i within [(1−δ) w N, (1+δ) w N], w the stage's share of the peak compute in use;
2. memory: the minimal feasible recomputation r_i, and no entry where none fits;
3. communication: expert groups stay inside one kind (they do: a stage stands on one pool), and a plan
   falls when a link between kinds takes longer than η times the mean stage compute time.

Among the plans that the recursion ends with, for every π and PP, it takes the one with the least
T_iter of Equations 4 and 5: its own belief, kept beside what the oracle says of the plan:

    T_iter = Σ (f_i + b_i) + Σ_{i ≤ s} f_i + (M − s − 1) max (f_i + b_i) + T_dp-sync + T_opt

s the slowest stage, counted from 0 as everywhere here. (The equations leave the base open. From 1, one
round fewer is counted, T_iter is further from the timeline and its plans are slower.) Neither δ and
rule 3 nor this T_iter and the sums of the recursion are exact: it can miss the optimum, and it proves
nothing.

One π for all stages (what upstream Megatron runs), kinds contiguous along the pipeline, whole nodes;
along one order of kinds and with so many stages of each, m is known from i, so that the recursion
runs over j alone. Array legend: K options of one size, U distinct runs of layers, W layer counts.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from hapmoe.boundary import boundary_s, same_node
from hapmoe.cluster import Pool
from hapmoe.cost import evaluate
from hapmoe.job import JobSpec
from hapmoe.options import FloatArray, IntArray, Options
from hapmoe.plan import Plan, Recompute, SearchReport, SearchResult, Stage
from hapmoe.resolve import resolve
from hapmoe.schedule import in_flight
from hapmoe.search.counts import sequences, stage_counts
from hapmoe.search.misses import nearest_misses
from hapmoe.search.problem import Problem
from hapmoe.search.space import legal_vpp
from hapmoe.search.state import NO_TIME
from hapmoe.stagecost import Costs, Slots, stage_costs

__all__ = ["DELTA", "ETA", "paper_iteration_s", "search_hsdp"]

DELTA, ETA = 0.2, 2.0
"""The paper's δ and η."""


@dataclass(frozen=True, slots=True)
class _Priced:
    """One stage at one place of the pipeline with every run of layers it may hold; infinite: does not fit."""

    low: int
    run_JW: IntArray
    """Run of layers that begins behind layer j with low + w layers; −1: beyond the model."""
    work_KU: FloatArray
    """f + b."""
    forward_KU: FloatArray
    sync_KU: FloatArray
    optimizer_KU: FloatArray
    choice_KU: IntArray
    block_KU: IntArray


@dataclass(frozen=True, slots=True)
class _Found:
    """One plan that the recursion ended with."""

    believed_s: float
    option: int
    pool_J: tuple[int, ...]
    layers: tuple[int, ...]
    choices: tuple[tuple[int, int], ...]


def paper_iteration_s(
    forward: FloatArray, work: FloatArray, microbatches: IntArray, sync: FloatArray, optimizer: FloatArray
) -> FloatArray:
    """[K] T_iter of Equations 4 and 5 from [K, PP] times per stage.

    >>> paper_iteration_s(np.array([[1.0, 1.0]]), np.array([[3.0, 3.0]]), np.array([4]), *np.zeros((2, 1, 2)))
    array([16.])
    """
    slowest = work.argmax(axis=1)
    before = np.cumsum(forward, axis=1)[np.arange(len(work)), slowest]
    rounds = np.maximum(microbatches - slowest - 1, 0)
    edge = work.sum(axis=1)
    total: FloatArray = edge + before + rounds * work.max(axis=1) + sync.max(axis=1) + optimizer.max(axis=1)
    return total


def search_hsdp(
    problem: Problem,
    *,
    delta: float = DELTA,
    eta: float = ETA,
    backend: str = "megatron",
    top: int = 3,
    time_limit_s: float | None = None,
    started: float | None = None,
) -> SearchResult:
    """The plan of Algorithm 1, scored by the oracle; ``report.believed_step_s`` is the algorithm's T_iter."""
    began = time.perf_counter() if started is None else started
    deadline = np.inf if time_limit_s is None else began + time_limit_s
    pruned: Counter[str] = Counter()
    found: list[_Found] = []
    options = problem.space.options
    considered, cut = 0, False
    for size in sorted(set(options.devices_K.tolist())):
        option_K = np.flatnonzero(options.devices_K == size)
        layers = _Layers(problem, option_K, size)
        for counts in stage_counts(problem, size) if problem.pins.allow("vpp", 1) else ():
            for pool_J in sequences(problem, counts):
                if time.perf_counter() > deadline:
                    cut = True
                    break
                considered += len(option_K)
                found += _recurse(layers, pool_J, delta, eta, pruned)
    found.sort(key=lambda plan: plan.believed_s)
    return _result(problem, found, pruned, considered, began, backend, top, cut)


def _peak(job: JobSpec, pool: Pool) -> float:
    """P_h: the dense peak in the job's precision."""
    peak = pool.device.peak_flop_per_s
    wanted = ("fp8" if job.training.fp8_recipe else "", job.training.precision, "bf16", "fp16", "fp32")
    return next((peak[name] for name in wanted if name in peak), max(peak.values()))


class _Layers:
    """Prices of stages of one size, each kept."""

    def __init__(self, problem: Problem, option_K: IntArray, size: int) -> None:
        self.problem, self.option_K, self.size = problem, option_K, size
        options = problem.space.options
        self.options = Options(*(getattr(options, name)[option_K] for name in Options.__slots__))
        self.microbatches_K = problem.job.training.global_batch_size // (self.options.mbs_K * self.options.dp_K)
        kinds = np.diff(problem.prefix_CN, axis=1).argmax(axis=0)
        self.pattern = kinds.astype(np.uint8).tobytes()
        self._stages: dict[tuple[int, ...], _Priced] = {}
        self._sends: dict[tuple[int, int, bool], FloatArray] = {}

    def send_K(self, pool_J: tuple[int, ...], stage: int) -> FloatArray:
        """Seconds of T_comm between ``stage`` and the next."""
        cluster, (a, b) = self.problem.cluster, pool_J[stage : stage + 2]
        near = a == b and same_node(cluster.pools[a], self.size, stage - pool_J.index(a))
        if (a, b, near) not in self._sends:
            pools = cluster.pools
            self._sends[a, b, near] = boundary_s(self.problem.job, cluster, pools[a], pools[b], self.options, near)
        return self._sends[a, b, near]

    def stage(self, pool: int, pp: int, stage: int, low: int, high: int) -> _Priced:
        """A stage of ``low`` to ``high`` layers at place ``stage`` of ``pp``."""
        key = (pool, pp, stage, low, high)
        if key not in self._stages:
            self._stages[key] = self._price(*key)
        return self._stages[key]

    def _price(self, pool: int, pp: int, stage: int, low: int, high: int) -> _Priced:
        problem, total = self.problem, self.problem.job.model.num_layers
        numbers: dict[bytes, int] = {}
        runs: list[tuple[int, int]] = []
        run_JW = np.full((total + 1, high - low + 1), -1, np.int64)
        begins = range(total + 1) if stage else range(1)
        for begin in begins:
            for w, count in enumerate(range(low, high + 1)):
                if begin + count > total or (stage == pp - 1 and begin + count != total):
                    continue
                pattern = self.pattern[begin : begin + count]
                if pattern not in numbers:
                    numbers[pattern] = len(runs)
                    runs.append((begin, count))
                run_JW[begin, w] = numbers[pattern]
        shape = (len(self.option_K), len(runs))
        if not runs:
            empty = np.zeros(shape)
            return _Priced(low, run_JW, empty, empty, empty, empty, empty.astype(int), empty.astype(int))
        start_X = np.tile([begin for begin, _ in runs], shape[0])
        count_X = np.tile([count for _, count in runs], shape[0])
        flight = {m: in_flight(pp, 1, stage, m, pp) for m in set(self.microbatches_K.tolist())}
        flights = np.repeat(np.asarray([flight[m] for m in self.microbatches_K.tolist()], np.int64), shape[1], axis=0)
        rows = len(start_X)
        slots = Slots(
            start_X[:, None], count_X[:, None], flights, np.full(rows, stage == 0), np.full(rows, stage == pp - 1)
        )
        option_X = np.repeat(self.option_K, shape[1])
        costs = stage_costs(
            problem.job, problem.tables[pool], option_X, slots, problem.prefix_CN, allowed=problem.allowed
        )
        return _shaped(costs, low, run_JW, shape)


def _shaped(costs: Costs, low: int, run_JW: IntArray, shape: tuple[int, int]) -> _Priced:
    forward = costs.forward_XV[:, 0].reshape(shape)
    work = np.where(costs.fits_X, costs.forward_XV[:, 0] + costs.backward_XV[:, 0], np.inf).reshape(shape)
    sync, optimizer = costs.sync_X.reshape(shape), costs.optimizer_X.reshape(shape)
    return _Priced(
        low, run_JW, work, forward, sync, optimizer, costs.choice_X.reshape(shape), costs.block_X.reshape(shape)
    )


def _recurse(layers: _Layers, pool_J: tuple[int, ...], delta: float, eta: float, pruned: Counter[str]) -> list[_Found]:
    """The recursion along one sequence of stages: at most one plan per option."""
    problem, pp = layers.problem, len(pool_J)
    total, count = problem.job.model.num_layers, len(layers.option_K)
    peaks = np.asarray([_peak(problem.job, problem.cluster.pools[pool]) for pool in pool_J])
    shares = peaks / peaks.sum() * total
    lows = np.maximum(np.ceil((1 - delta) * shares - 1e-9).astype(int), 1)
    highs = np.minimum(np.floor((1 + delta) * shares + 1e-9).astype(int), total)
    if (lows > highs).any() or lows.sum() > total or highs.sum() < total:
        pruned["load balance"] += count
        return []
    best_KJ = np.full((count, total + 1), np.inf)
    best_KJ[:, 0] = 0.0
    stages, chosen = [], []
    for stage, pool in enumerate(pool_J):
        priced = layers.stage(pool, pp, stage, int(lows[stage]), int(highs[stage]))
        stages.append(priced)
        next_KJ = np.full_like(best_KJ, np.inf)
        pick_KJ = np.zeros(best_KJ.shape, np.int64)
        comm_K = layers.send_K(pool_J, stage - 1) if stage else np.zeros(count)
        for begin, row in enumerate(priced.run_JW):
            for w, run in enumerate(row.tolist()):
                if run < 0 or not np.isfinite(best_KJ[:, begin]).any():
                    continue
                value_K = best_KJ[:, begin] + priced.work_KU[:, run] + comm_K
                end = begin + priced.low + w
                better_K = value_K < next_KJ[:, end]
                next_KJ[better_K, end] = value_K[better_K]
                pick_KJ[better_K, end] = w
        best_KJ = next_KJ
        chosen.append(pick_KJ)
    fits_K = np.isfinite(best_KJ[:, total])
    pruned["memory"] += int((~fits_K).sum())
    return _plans(layers, pool_J, stages, chosen, np.flatnonzero(fits_K), eta, pruned)


def _plans(
    layers: _Layers,
    pool_J: tuple[int, ...],
    stages: list[_Priced],
    chosen: list[IntArray],
    row_K: IntArray,
    eta: float,
    pruned: Counter[str],
) -> list[_Found]:
    """Follow the recursion back, prune by communication, and keep what Equation 4 and 5 like best.

    Of the options of one size only the best few can be wanted; all are priced, a few are written out.
    """
    problem, pp = layers.problem, len(pool_J)
    end_K = np.full(len(row_K), problem.job.model.num_layers)
    shape = (len(row_K), pp)
    runs, counts = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    for stage in range(pp - 1, -1, -1):
        w_K = chosen[stage][row_K, end_K]
        counts[:, stage] = stages[stage].low + w_K
        end_K = end_K - counts[:, stage]
        runs[:, stage] = stages[stage].run_JW[end_K, w_K]

    def of(name: str) -> FloatArray:
        columns = [getattr(priced, name)[row_K, runs[:, stage]] for stage, priced in enumerate(stages)]
        return np.stack(columns, axis=1)

    work = of("work_KU")
    microbatches_K = layers.microbatches_K[row_K]
    believed_K = paper_iteration_s(of("forward_KU"), work, microbatches_K, of("sync_KU"), of("optimizer_KU"))
    alive_K = np.ones(len(row_K), bool)
    for stage, (a, b) in enumerate(pairwise(pool_J)):
        if a != b:
            alive_K &= layers.send_K(pool_J, stage)[row_K] <= eta * work.mean(axis=1)
    pruned["communication between kinds"] += int((~alive_K).sum())
    legal = {m: 1 in legal_vpp(problem.job, pp, m) for m in set(microbatches_K.tolist())}
    alive_K &= np.asarray([legal[m] for m in microbatches_K.tolist()], bool)
    order = np.flatnonzero(alive_K)
    order = order[np.argsort(believed_K[order], kind="stable")][:_KEPT]
    choice, block = of("choice_KU"), of("block_KU")
    return [
        _Found(
            float(believed_K[x]),
            int(layers.option_K[row_K[x]]),
            pool_J,
            tuple(counts[x].tolist()),
            tuple(zip(choice[x].astype(int).tolist(), block[x].astype(int).tolist(), strict=True)),
        )
        for x in order.tolist()
    ]


_KEPT = 8


def _write(problem: Problem, found: _Found, backend: str) -> Plan:
    options, k, menu = problem.space.options, found.option, problem.tables[0].menu
    stages = []
    tp, cp, ep, etp, dp, mbs = (int(getattr(options, name)[k]) for name in Options.__slots__)
    for pool, count, (entry, block) in zip(found.pool_J, found.layers, found.choices, strict=True):
        full = Recompute(granularity="full", method="block", num_layers=block)
        stages.append(
            Stage(
                pool=problem.cluster.pools[pool].name,
                num_layers=count,
                tp=tp,
                cp=cp,
                ep=ep,
                etp=etp,
                dp=dp,
                recompute=full if entry == len(menu) - 1 else menu[entry],
            )
        )
    plan = Plan(planner="hs-dp", backend=backend, micro_batch_size=mbs, stages=tuple(stages))
    return resolve(problem.job, problem.cluster, plan)


def _result(
    problem: Problem,
    found: list[_Found],
    pruned: Counter[str],
    considered: int,
    began: float,
    backend: str,
    top: int,
    cut: bool,
) -> SearchResult:
    counts = {name: many for name, many in sorted(pruned.items()) if many}
    if not found:
        reasons = (NO_TIME,) if cut else nearest_misses(problem)
        if pruned["load balance"] and not cut:
            reasons = (f"load balance (delta) rules out {pruned['load balance']} combinations", *reasons)
        wall = time.perf_counter() - began
        report = SearchReport(status="infeasible", wall_s=wall, considered=considered, pruned=counts, reasons=reasons)
        return SearchResult(status="infeasible", plan=None, estimate=None, report=report)
    plans = [_write(problem, plan, backend) for plan in found[:top]]
    ranked = tuple((plan, evaluate(problem.job, problem.cluster, plan)) for plan in plans)
    report = SearchReport(
        status="feasible",
        wall_s=time.perf_counter() - began,
        considered=considered,
        pruned=counts,
        believed_step_s=found[0].believed_s,
    )
    return SearchResult(status="feasible", plan=ranked[0][0], estimate=ranked[0][1], ranked=ranked, report=report)
