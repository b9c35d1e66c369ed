"""Which short runs are worth their time: the degrees that a plan may use, at two depths each.

A run needs only as many ranks as its degrees make (the least dp that expert parallelism divides), on
one node. Of degrees that need more one rank runs by itself on one device, where Megatron has a process
group that sends nothing (``--fake-process-group``, since core 0.16); so do a first, a middle and a
last stage, which tell embedding, layers and head apart and hold what stages hold. Where it has none
that is left to the neighbours: tables scale the model with the nearest measured degrees.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec
import numpy as np

from hapmoe.backends import version_tuple
from hapmoe.cluster import Cluster, Pool
from hapmoe.cost import evaluate
from hapmoe.errors import InputError
from hapmoe.job import JobSpec
from hapmoe.plan import Plan, Stage
from hapmoe.pricing import price
from hapmoe.profiling.sends import Sends, inside
from hapmoe.profiling.shorten import Layers, depths, shortened
from hapmoe.resolve import resolve
from hapmoe.rules import check
from hapmoe.search import search
from hapmoe.search.pins import parse_pins
from hapmoe.search.space import build_space
from hapmoe.stagecost import class_prefix

__all__ = ["STAGES", "Chosen", "ProfileRun", "alone", "can_be_single", "choose_runs", "plan_of", "runs_at", "stages_at"]

STEPS = 5
"""Measured steps of a run; the first makes buffers and is left out."""
MICROBATCHES = 4
"""Of a step: enough for a median, few enough to be short."""
WITHIN = 1.5
"""Degrees that need more device time per sequence than this times the best of the pool are not worth a run."""
STAGES = ("first", "middle", "last")
"""Of the plan whose stages run by themselves: one of each kind."""
STARTUP_S = {"cpu": 12.0}
"""ASSUMED seconds from start to the first step by vendor: 12 on CPU (runs of the lab, one or two ranks), else 60."""
_STARTUP_S = 60.0


class ProfileRun(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One short training on one node of a pool."""

    name: str
    tp: int
    cp: int
    ep: int
    etp: int
    dp: int
    micro_batch_size: int
    layers: Layers
    expected_s: float
    """From start to end, before anything was measured."""
    single: bool = False
    """The first rank of ``stage`` runs by itself on one device; what it sends goes nowhere."""
    pp: int = 1
    """More: a stage alone, with ``layers`` of its own and as many in each of those that are not there."""
    stage: int = 0

    @property
    def ranks(self) -> int:
        """Of its world."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def processes(self) -> int:
        """That are started."""
        return 1 if self.single else self.ranks

    @property
    def started(self) -> range:
        """Their ranks. Those of a stage follow each other (Megatron's order tp-cp-ep-dp-pp)."""
        first = self.stage * self.ranks // self.pp
        return range(first, first + self.processes)

    @property
    def global_batch_size(self) -> int:
        return self.micro_batch_size * self.dp * MICROBATCHES


class Chosen(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The runs of one pool, most useful first, and how many degrees were left out and why."""

    runs: tuple[ProfileRun, ...]
    sends: Sends | None = None
    """Collectives alone, behind them."""
    left_out: dict[str, int] = {}


Place = tuple[int, int, int, int, int]
"""tp, cp, ep, etp, micro-batch size."""


def alone(cluster: Cluster, pool: Pool, ranks: int = 1) -> Cluster:
    """One node of the pool, or as many as ``ranks`` would need, and nothing else."""
    nodes = -(-ranks // pool.devices_per_node)
    return msgspec.structs.replace(
        cluster,
        pools=(msgspec.structs.replace(pool, nodes=nodes, hosts=pool.hosts[:1] if nodes == 1 else ()),),
        links=(),
    )


def can_be_single(job: JobSpec) -> bool:
    """Has its Megatron a process group that sends nothing (megatron/training/arguments.py, --fake-process-group)?"""
    version = job.training.megatron_version
    return job.training.dispatcher != "flex" and (version is None or version_tuple(version) >= (0, 16, 0))


def plan_of(job: JobSpec, cluster: Cluster, pool: Pool, run: ProfileRun) -> tuple[JobSpec, Plan]:
    """The shortened job of a run, and its plan: one stage (or several equal ones) without recomputation."""
    short = shortened(job, run.layers, run.global_batch_size, STEPS + 1, stages=run.pp, single=run.single)
    stage = Stage(
        pool=pool.name,
        num_layers=run.layers.decoder,
        tp=run.tp,
        cp=run.cp,
        ep=run.ep,
        etp=run.etp,
        dp=run.dp,
    )
    plan = Plan(stages=(stage,) * run.pp, micro_batch_size=run.micro_batch_size, planner="profile")
    return short, resolve(short, alone(cluster, pool, run.ranks), plan)


def choose_runs(job: JobSpec, cluster: Cluster, pool: Pool, *, budget_s: float) -> Chosen:
    """The runs of a pool that fit into ``budget_s``, those of the likeliest degrees first.

    Likeliest: the script's own, then those of the best plans by the model without tables, then by device
    time per sequence. InputError where no run is possible on a node of the pool.
    """
    runs: list[ProfileRun] = []
    left: dict[str, int] = {}

    def leave(why: str) -> None:
        left[why] = left.get(why, 0) + 1

    sends = inside(pool)
    spent, places = sends.expected_s if sends else 0.0, list(dict.fromkeys(_places(job, cluster, pool)))
    for number, place in enumerate(places):
        single = _ranks(place) > pool.devices_per_node
        if single and not can_be_single(job):
            leave(f"more than the {pool.devices_per_node} devices of a node")
            continue
        made = runs_at(job, cluster, pool, place, single=single)
        if made and not runs and can_be_single(job):
            stages = stages_at(job, cluster, pool, place)
            made += stages if spent + sum(run.expected_s for run in made + stages) <= budget_s else ()
        if not made:
            leave("no legal run, or one that does not fit into memory")
            continue
        spent += sum(run.expected_s for run in made)
        if runs and spent > budget_s:
            left["no time left"] = len(places) - number
            break
        runs += made
    if not runs:
        reasons = ", ".join(left) or "no degrees"
        raise InputError(f"nothing can be measured on one node: {reasons}", where=f"pools.{pool.name}")
    return Chosen(runs=tuple(runs), sends=sends, left_out=left)


def runs_at(
    job: JobSpec, cluster: Cluster, pool: Pool, place: Place, *, single: bool = False
) -> tuple[ProfileRun, ...]:
    """The runs of one set of degrees (tp, cp, ep, etp, micro-batch size); none where one of them is not possible."""
    made: list[ProfileRun] = []
    for layers in depths(job):
        run = _priced(job, cluster, pool, place, layers, single=single)
        if run is None:
            return ()
        made.append(run)
    return tuple(made)


def stages_at(job: JobSpec, cluster: Cluster, pool: Pool, place: Place) -> tuple[ProfileRun, ...]:
    """The shallowest run once more, as each stage of three. The first goes first: it makes a data set's indices,
    which the others read."""
    pp = len(STAGES)
    made = (_priced(job, cluster, pool, place, depths(job)[0], single=True, pp=pp, stage=stage) for stage in range(pp))
    return tuple(run for run in made if run)


def _ranks(place: Place) -> int:
    tp, cp, ep, etp, _ = place
    return math.lcm(tp * cp, ep * etp)


def _places(job: JobSpec, cluster: Cluster, pool: Pool) -> Iterator[Place]:
    present = job.present
    etp = present.etp if present.etp is not None else present.tp
    own = (present.tp, present.cp, present.ep, etp if job.model.moe else 1, present.micro_batch_size or 1)
    yield own
    largest = own[-1]
    if job.training.global_batch_size:
        for plan, _ in search(job, cluster, top=8, time_limit_s=20.0).ranked:
            largest = max(largest, plan.micro_batch_size)
            for stage in plan.stages:
                if stage.pool == pool.name:
                    mbs = stage.micro_batch_size or plan.micro_batch_size
                    yield stage.tp, stage.cp, stage.ep, stage.etp, mbs
    # device time alone does not know that few microbatches leave a pipeline idle
    yield from (place for place in _by_device_time(job, cluster, pool) if place[-1] <= 2 * largest)


def _by_device_time(job: JobSpec, cluster: Cluster, pool: Pool) -> Iterator[Place]:
    """Degrees of the whole space by what a sequence takes on them, up to ``WITHIN`` times the least."""
    options = build_space(job, cluster, parse_pins((), [one.name for one in cluster.pools])).options
    table = price(job, pool, options)
    weight_C = class_prefix(job)[:, -1].astype(np.float64)
    layers_K = weight_C @ (table.forward_CK + table.backward_CK)
    each_K = layers_K * options.tp_K * options.cp_K / options.mbs_K
    for index in np.argsort(each_K, kind="stable"):
        if each_K[index] > WITHIN * each_K.min():
            return
        columns = (options.tp_K, options.cp_K, options.ep_K, options.etp_K, options.mbs_K)
        tp, cp, ep, etp, mbs = (int(column[index]) for column in columns)
        yield tp, cp, ep, etp, mbs


def _priced(
    job: JobSpec,
    cluster: Cluster,
    pool: Pool,
    place: Place,
    layers: Layers,
    *,
    single: bool = False,
    pp: int = 1,
    stage: int = 0,
) -> ProfileRun | None:
    """The run, with the time that it will take; None: a rule forbids it, or it does not fit."""
    tp, cp, ep, etp, mbs = place
    if _ranks(place) % (tp * cp):
        return None
    named = {"tp": tp, "cp": cp, "ep": ep, "etp": etp}
    shown = [f"{name}{value}" for name, value in named.items() if value > 1]
    counted = {"d": layers.dense, "m": layers.moe, "mtp": layers.mtp}
    shown += [f"mbs{mbs}", "".join(f"{name}{count}" for name, count in counted.items() if count)]
    shown += [STAGES[stage]] * (pp > 1) + ["single"] * (single and pp == 1)
    run = ProfileRun(
        name="-".join(shown),
        **named,
        dp=_ranks(place) // (tp * cp),
        micro_batch_size=mbs,
        layers=layers,
        expected_s=0.0,
        single=single,
        pp=pp,
        stage=stage,
    )
    short, plan = plan_of(job, cluster, pool, run)
    here = alone(cluster, pool, run.ranks)
    if check(short, here, plan):
        return None
    estimate = evaluate(short, here, plan)
    if not estimate.fits:
        return None
    startup_s = STARTUP_S.get(pool.device.vendor, _STARTUP_S)
    return msgspec.structs.replace(run, expected_s=round(startup_s + (STEPS + 1) * estimate.step_s, 1))
