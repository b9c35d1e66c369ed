"""The oracle: what a plan does in one step. No other module makes a number that a user sees.

``evaluate`` prices each stage's layers with the tables of its pool, lays the microbatches out on
the exact pipeline timeline, and reads time, memory and utilisation off it. It judges any plan: the
search's, a baseline's, a hand-written one; whether the plan is legal is ``rules.check``'s question.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hapmoe.boundary import boundary_s, near
from hapmoe.calibrated import said
from hapmoe.cluster import Cluster, Pool
from hapmoe.errors import InputError
from hapmoe.job import JobSpec
from hapmoe.options import Options, StageTable
from hapmoe.plan import Estimate, MemoryBytes, Plan, Recompute, Stage, StageEstimate
from hapmoe.pricing import Line, explain, price, untold
from hapmoe.resolve import resolve
from hapmoe.schedule import Timeline, in_flight, interleaved_ends, one_f_one_b_ends, timeline_of
from hapmoe.stagecost import Costs, Slots, class_prefix, stage_costs
from hapmoe.tables.lookup import SOURCES
from hapmoe.workload import model_flops_per_step

__all__ = ["evaluate", "operations", "step_s", "timeline"]


Cache = dict[tuple[object, ...], Any]
"""Prices by what they depend on, for many plans of one job on one cluster."""


@dataclass(frozen=True, slots=True)
class _Priced:
    """A plan with every stage's times and bytes, before they are laid on the timeline."""

    plan: Plan
    pools: tuple[Pool, ...]
    tables: tuple[StageTable, ...]
    costs: tuple[Costs, ...]
    send: tuple[float, ...]
    """Per boundary; with virtual stages one more, from the last stage to the first."""
    group: int
    extra: int


def evaluate(job: JobSpec, cluster: Cluster, plan: Plan, cache: Cache | None = None) -> Estimate:
    """What one step of ``plan`` takes: time, memory per stage, utilisation, and what bounds it.

    Raises InputError for a plan that names pools or layers that do not exist, or that has no
    timeline at all. A plan that breaks another of Megatron's rules or does not fit is estimated
    all the same; ``fits`` says the latter.
    ``cache`` (a dict, of one job and one cluster) keeps prices between calls.
    """
    cache = {} if cache is None else cache
    priced = _price_plan(job, cluster, plan, cache)
    plan, costs = priced.plan, priced.costs
    microbatches = plan.num_microbatches
    step = _step_s(priced)
    optimizer = [float(cost.optimizer_X[0]) for cost in costs]
    told = [_breakdown(job, priced, index, cache) for index in range(plan.pp)]
    stages = tuple(_stage_estimate(priced, index, *told[index][:2]) for index in range(plan.pp))
    devices = plan.num_devices
    busy = sum(stage.num_devices * estimate.busy_s for stage, estimate in zip(plan.stages, stages, strict=True))
    model_flops = model_flops_per_step(job)
    peak = sum(stage.num_devices * _peak(job, pool) for stage, pool in zip(plan.stages, priced.pools, strict=True))
    hardware = model_flops * _recompute_factor(stages)
    tokens = plan.global_batch_size * job.training.seq_len
    price = _of_devices(plan, [pool.price_per_device_hour for pool in priced.pools])
    power = _of_devices(plan, [_power_w(pool) for pool in priced.pools])
    exposed = sum(
        stage.num_devices * (microbatches * estimate.exposed_comm_s + estimate.grad_sync_s)
        for stage, estimate in zip(plan.stages, stages, strict=True)
    )
    return Estimate(
        step_s=step,
        tokens_per_s=tokens / step,
        tflop_per_s_per_device=model_flops / step / devices / 1e12,
        mfu=model_flops / step / peak,
        bubble_fraction=max(0.0, 1.0 - busy / (devices * step)),
        ideal_s=_ideal_s(job, cluster, priced, cache),
        hardware_tflop_per_s_per_device=hardware / step / devices / 1e12,
        exposed_comm_fraction=exposed / (devices * step),
        optimizer_s=max(optimizer),
        source_share=_source_share([sources for _, _, sources in told]),
        stages=stages,
        fits=all(bool(cost.fits_X[0]) for cost in costs),
        price_per_hour=price,
        power_w=power,
        price_per_million_tokens=price / 3600.0 * step / tokens * 1e6,
        joule_per_token=power * step / tokens,
        assumptions=_assumptions(job, cluster, priced),
    )


def step_s(job: JobSpec, cluster: Cluster, plan: Plan) -> float:
    """``evaluate(...).step_s`` alone, in a third of the time: for fits of many plans."""
    return _step_s(_price_plan(job, cluster, plan, {}))


def _step_s(priced: _Priced) -> float:
    forward, backward = _chunks(priced.costs)
    microbatches = priced.plan.num_microbatches
    if priced.plan.vpp == 1:
        ends = one_f_one_b_ends([f[0] for f in forward], [b[0] for b in backward], priced.send, microbatches)
    else:
        ends = interleaved_ends(forward, backward, priced.send, microbatches, priced.group, extra=priced.extra)
    last = max(end + float(cost.sync_X[0]) for end, cost in zip(ends, priced.costs, strict=True))
    return float(last + max(float(cost.optimizer_X[0]) for cost in priced.costs))


def timeline(job: JobSpec, cluster: Cluster, plan: Plan) -> Timeline:
    """Every forward, backward, send, gradient sync and optimizer of one step, with start and end."""
    priced = _price_plan(job, cluster, plan, {})
    forward, backward = _chunks(priced.costs)
    return timeline_of(
        forward,
        backward,
        priced.send,
        priced.plan.num_microbatches,
        priced.group,
        extra=priced.extra,
        grad_sync=[float(cost.sync_X[0]) for cost in priced.costs],
        optimizer_s=max(float(cost.optimizer_X[0]) for cost in priced.costs),
    )


def _chunks(costs: Sequence[Costs]) -> tuple[list[list[float]], list[list[float]]]:
    return [cost.forward_XV[0].tolist() for cost in costs], [cost.backward_XV[0].tolist() for cost in costs]


def _price_plan(job: JobSpec, cluster: Cluster, plan: Plan, cache: Cache) -> _Priced:
    plan = resolve(job, cluster, plan)
    if not plan.stages:
        raise InputError("a plan needs at least one stage", where="stages")
    if plan.num_microbatches < 1:
        raise InputError(
            "no microbatches: the global batch is not known or smaller than micro_batch_size * dp",
            where="num_microbatches",
            hint="give global_batch_size",
        )
    pp, vpp = plan.pp, plan.vpp
    group = job.training.microbatch_group_size or pp
    extra = int(job.training.overlap_moe_comm)
    if vpp < 1:
        raise InputError(f"vpp is {vpp}", where="vpp", hint="1 or more")
    if vpp > 1 and (group < pp or plan.num_microbatches < group or 0 < plan.num_microbatches % group < pp):
        raise InputError(
            f"{plan.num_microbatches} microbatches in groups of {group} for {pp} stages cannot be interleaved",
            where="vpp",
            hint="vpp 1 needs no groups",
        )
    prefix = class_prefix(job)
    known = {pool.name: pool for pool in cluster.pools}
    pools, costs, of_stage = [], [], []
    for index, stage in enumerate(plan.stages):
        where = f"stages[{index}]"
        if stage.pool not in known:
            raise InputError(f"no pool {stage.pool!r}", where=f"{where}.pool", hint=f"one of {', '.join(known)}")
        pool = known[stage.pool]
        _check_layers(job, stage, vpp, where)
        _check_degrees(stage, where)
        table = _table(job, pool, stage, stage.recompute, cache)
        rows = np.asarray([stage.virtual_layers], dtype=np.int64)
        flights = np.asarray([in_flight(pp, vpp, index, plan.num_microbatches, group, extra)], dtype=np.int64)
        slots = Slots(rows[:, :, 0], rows[:, :, 1], flights, np.asarray([index == 0]), np.asarray([index == pp - 1]))
        pools.append(pool)
        of_stage.append(table)
        costs.append(stage_costs(job, table, 0, slots, prefix, fixed=stage.recompute))
    return _Priced(
        plan, tuple(pools), tuple(of_stage), tuple(costs), _sends(job, cluster, plan, pools, cache), group, extra
    )


def _check_layers(job: JobSpec, stage: Stage, vpp: int, where: str) -> None:
    if len(stage.virtual_layers) != vpp:
        raise InputError(
            f"{len(stage.virtual_layers)} virtual stages, but vpp is {vpp}", where=f"{where}.virtual_layers"
        )
    for first, count in stage.virtual_layers:
        if first < 0 or count < 0 or first + count > job.model.num_layers:
            raise InputError(
                f"layers {first} to {first + count - 1} of a model of {job.model.num_layers}",
                where=f"{where}.virtual_layers",
            )


def _check_degrees(stage: Stage, where: str) -> None:
    for name in ("tp", "cp", "ep", "etp", "dp", "micro_batch_size", "num_devices"):
        if (value := getattr(stage, name)) < 1:
            raise InputError(f"{name} is {value}", where=f"{where}.{name}", hint="1 or more")
    if stage.num_devices % (stage.etp * stage.ep):
        raise InputError(
            f"etp * ep = {stage.etp * stage.ep} does not divide the stage's {stage.num_devices} devices",
            where=f"{where}.ep",
        )


def _table(job: JobSpec, pool: Pool, stage: Stage, recompute: Recompute, cache: Cache) -> StageTable:
    """The prices of a stage's degrees on the devices of ``pool``."""
    key = ("table", pool.name, _degrees(stage), recompute)
    if key not in cache:
        cache[key] = price(job, pool, _options(stage), _menu(recompute))
    table: StageTable = cache[key]
    return table


def _degrees(stage: Stage) -> tuple[object, ...]:
    return stage.tp, stage.cp, stage.ep, stage.etp, stage.dp, stage.micro_batch_size


def _options(stage: Stage) -> Options:
    columns = (stage.tp, stage.cp, stage.ep, stage.etp, stage.dp, stage.micro_batch_size)
    return Options(*(np.asarray([value], dtype=np.int64) for value in columns))


def _menu(recompute: Recompute) -> tuple[Recompute, ...]:
    """Entry 0 none, last full, as ``StageTable`` wants it; what the stage does in between."""
    none, full = Recompute(), Recompute(granularity="full", method="block", num_layers=1)
    return (none, recompute, full) if recompute.granularity == "selective" else (none, full)


def _sends(job: JobSpec, cluster: Cluster, plan: Plan, pools: Sequence[Pool], cache: Cache) -> tuple[float, ...]:
    stages, sends = plan.stages, []
    pairs = list(zip(range(plan.pp - 1), range(1, plan.pp), strict=True))
    if plan.vpp > 1:
        pairs.append((plan.pp - 1, 0))
    for a, b in pairs:
        nodes = (*stages[a].nodes, *stages[b].nodes)
        inside = stages[a].pool == stages[b].pool and bool(nodes) and near(pools[a], min(nodes), max(nodes))
        key = ("send", pools[a].name, pools[b].name, _degrees(stages[a]), _degrees(stages[b]), inside)
        if key not in cache:
            options, to = _options(stages[a]), _options(stages[b])
            cache[key] = float(boundary_s(job, cluster, pools[a], pools[b], options, inside, to)[0])
        sends.append(cache[key])
    return tuple(sends)


def _peak(job: JobSpec, pool: Pool) -> float:
    """Dense peak in the job's precision; kinds without fp8 or bf16 are measured by what they have."""
    peak = pool.device.peak_flop_per_s
    wanted = "fp4" if job.training.fp4 else "fp8" if job.training.fp8_recipe else job.training.precision
    for name in (wanted, job.training.precision, "bf16", "fp16", "fp32"):
        if name in peak:
            return peak[name]
    return max(peak.values())


def _stage_estimate(priced: _Priced, index: int, breakdown: dict[str, float], bound: str) -> StageEstimate:
    plan, cost, table = priced.plan, priced.costs[index], priced.tables[index]
    forward, backward = float(cost.forward_XV.sum()), float(cost.backward_XV.sum())
    sends = priced.send
    touching = (sends[index - 1] if index else 0.0) + (sends[index] if index < plan.pp - 1 else 0.0)
    occupied = touching if plan.vpp == 1 else 0.0
    busy = plan.num_microbatches * (forward + backward + occupied) + float(cost.sync_X[0]) + float(cost.optimizer_X[0])
    return StageEstimate(
        forward_s=forward,
        backward_s=backward,
        exposed_comm_s=float(cost.exposed_comm_X[0]),
        memory_bytes=float(cost.memory_X[0]),
        memory_limit_bytes=float(table.memory_limit_bytes_K[0]),
        memory=MemoryBytes(
            weights=float(cost.weights_X[0]),
            grads=float(cost.grads_X[0]),
            optimizer=float(cost.states_X[0]),
            activations=float(cost.activations_X[0]),
            workspace=float(cost.workspace_X[0]),
        ),
        send_s=float(sends[index]) if index < len(sends) else 0.0,
        grad_sync_s=float(cost.sync_X[0]),
        optimizer_s=float(cost.optimizer_X[0]),
        recompute_s=float(cost.recompute_X[0]),
        busy_s=busy,
        breakdown=breakdown,
        bound_by=bound,
    )


def _recompute_factor(stages: Sequence[StageEstimate]) -> float:
    """Hardware over model FLOPs: recomputed time is taken at the rate of the forward pass."""
    forward = sum(stage.forward_s for stage in stages)
    return 1.0 + sum(stage.recompute_s for stage in stages) / (3.0 * forward) if forward else 1.0


def _ideal_s(job: JobSpec, cluster: Cluster, priced: _Priced, cache: Cache) -> float:
    """The step if every device of the cluster computed all the time, with nothing exposed.

    Per pool the compute time of all layers at the plan's degrees; pools work at these rates side by side.
    """
    plan = priced.plan
    stage = plan.stages[0]
    prefix = class_prefix(job)[:, -1]
    rate = 0.0
    for pool in cluster.pools:
        table = _table(job, pool, stage, Recompute(), cache)
        layer_s = table.forward_CK[:, 0] + table.backward_CK[:, 0] - table.exposed_comm_CK[:, 0]
        compute = float((prefix * layer_s).sum())
        compute += table.embedding_forward_K[0] + table.embedding_backward_K[0]
        compute += table.head_forward_K[0] + table.head_backward_K[0]
        compute += job.model.mtp_layers * (table.mtp_forward_K[0] + table.mtp_backward_K[0])
        rate += pool.num_devices / stage.num_devices / float(compute)
    return plan.num_microbatches / rate


def _breakdown(
    job: JobSpec, priced: _Priced, index: int, cache: Cache
) -> tuple[dict[str, float], str, dict[str, float]]:
    """Seconds of one microbatch by operation, what most of them are bound by, and seconds by source."""
    seconds: dict[str, float] = {}
    bounds: dict[str, float] = {}
    sources: dict[str, float] = {}
    for times, line in _lines(job, priced, index, cache):
        total = times * (line.forward_s + line.backward_s)
        if total:
            seconds[line.name] = seconds.get(line.name, 0.0) + total
            bounds[line.bound] = bounds.get(line.bound, 0.0) + total
            for name, share in line.sources.items():
                sources[name] = sources.get(name, 0.0) + times * share
    rest = float(_stage_s(priced.costs[index])) - sum(seconds.values())
    recompute = float(priced.costs[index].recompute_X[0])
    if recompute:
        seconds["recomputation"] = recompute
        rest -= recompute
    if rest > 0:
        seconds["framework and launch overhead"] = rest
        # what MTP layers repeat, and what recomputation does again, are of the same sources
    total = _stage_s(priced.costs[index])
    told = sum(sources.values())
    sources = (
        {name: share * total / told for name, share in sources.items()}
        if told
        else {untold(priced.pools[index]): total}
    )
    return seconds, max(bounds, key=lambda name: bounds[name], default=""), sources


def _lines(job: JobSpec, priced: _Priced, index: int, cache: Cache) -> tuple[tuple[int, Line], ...]:
    """Every operation of a stage with how often a microbatch does it."""
    stage, pool, table = priced.plan.stages[index], priced.pools[index], priced.tables[index]
    if ("prefix",) not in cache:
        cache["prefix",] = class_prefix(job)
    prefix = cache["prefix",]
    runs = np.asarray(stage.virtual_layers, dtype=np.int64).reshape(-1, 2)
    counts = (prefix[:, runs.sum(axis=1)] - prefix[:, runs[:, 0]]).sum(axis=1)
    blocks = {_block_name(kind.moe, kind.window): int(n) for kind, n in zip(table.classes, counts, strict=True)}
    last = index == priced.plan.pp - 1
    blocks["embedding"] = int(index == 0)
    blocks["head"] = int(last) * (1 + stage.mtp_layers)
    key = ("lines", pool.name, _degrees(stage))
    if key not in cache:
        cache[key] = explain(job, pool, _options(stage))
    return tuple((blocks[line.block], line) for line in cache[key] if blocks.get(line.block))


def operations(job: JobSpec, cluster: Cluster, plan: Plan, stage: int) -> tuple[tuple[int, Line], ...]:
    """(how often a microbatch does it, the operation) for all that a stage does, in order; recomputation apart."""
    return _lines(job, _price_plan(job, cluster, plan, {}), stage, {})


def _of_devices(plan: Plan, each: Sequence[float | None]) -> float:
    """The sum over all devices used; 0 where it is not known of some."""
    if any(value is None for value in each):
        return 0.0
    return sum(stage.num_devices * (value or 0.0) for stage, value in zip(plan.stages, each, strict=True))


def _power_w(pool: Pool) -> float | None:
    return pool.power_w if pool.power_w is not None else pool.device.power_w


def _stage_s(cost: Costs) -> float:
    """Forward and backward of one microbatch through the whole stage, seconds."""
    return float(cost.forward_XV.sum() + cost.backward_XV.sum())


def _block_name(moe: bool, window: bool) -> str:
    return f"{'moe' if moe else 'dense'} layer{' (window)' if window else ''}"


def _source_share(of_stages: Sequence[dict[str, float]]) -> dict[str, float]:
    """Shares of the stages' time by where its figures come from, operation by operation."""
    total = dict.fromkeys(SOURCES, 0.0)
    for sources in of_stages:
        for name, seconds in sources.items():
            total[name] += seconds
    weight = sum(total.values())
    return {name: seconds / weight for name, seconds in total.items()}


def _assumptions(job: JobSpec, cluster: Cluster, priced: _Priced) -> tuple[str, ...]:
    """What the estimate takes for granted because nobody measured or stated it."""
    notes = []
    if job.model.moe and job.training.imbalance is None and not job.training.imbalance_by_ep:
        notes.append("experts are ASSUMED to be evenly loaded (rho = 1): --imbalance sets another load")
    for pool in {pool.name: pool for pool in priced.pools}.values():
        if pool.device.efficiency_note:
            notes.append(f"{pool.device.name}: {pool.device.efficiency_note}")
        notes += pool.tables.notes if pool.tables else ()
        notes += said(pool.tables, job, pool.device.name)
        if pool.network.source.startswith("ASSUMED"):
            notes.append(f"network of pool {pool.name}: {pool.network.source}")
    for a, b in zip(priced.pools, priced.pools[1:], strict=False):
        link = cluster.link(a.name, b.name) if a.name != b.name else None
        if link is not None and link.source.startswith("ASSUMED"):
            notes.append(f"link {a.name} - {b.name}: {link.source}")
    return tuple(dict.fromkeys(notes))
