"""Other people's planners, as a restriction of our space and a belief about the cluster.

Each poses the job as its original would see it (believed cluster, pinned degrees), searches that with
the same kernel, and has its plan scored by the same oracle on the true cluster; what it expected is
kept as ``report.believed_step_s``. A plan that does not fit in truth is no plan: the report says what
is missing. All of them use every device, as the originals do.

What is common to all and better than the originals: they know this model's real times (the originals
profile), the exact pipeline timeline instead of "sum + (M − 1) max", and the best microbatch size.
What is common and less: one set of degrees for all stages (what Megatron can run), where Alpa and
Metis may give every stage its own mesh.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from hapmoe.cluster import Cluster, Device, Link
from hapmoe.cost import evaluate
from hapmoe.job import JobSpec
from hapmoe.plan import Estimate, Plan, SearchReport, SearchResult
from hapmoe.search.exact import search_exact
from hapmoe.search.problem import Problem
from hapmoe.search.restricted import fastest, one_recompute
from hapmoe.search.space import divisors
from hapmoe.units import format_bytes

__all__ = ["BASELINES", "Case", "believe_equal_devices", "search_baseline"]

Pose = Callable[[JobSpec, Cluster, tuple[str, ...]], Problem]
"""The space of a job on a (believed) cluster under more ``--set`` pins."""


@dataclass(frozen=True, slots=True)
class Case:
    """What a baseline gets: the truth, and the means to pose a problem."""

    job: JobSpec
    cluster: Cluster
    pose: Pose
    name: str
    backend: str
    deadline: float = float("inf")
    """On ``time.perf_counter``."""

    @property
    def time_left_s(self) -> float | None:
        return None if self.deadline == float("inf") else max(self.deadline - time.perf_counter(), 0.01)

    @property
    def all_devices(self) -> tuple[str, ...]:
        return tuple(f"{pool.name}.nodes={pool.nodes}" for pool in self.cluster.pools)

    def one_recompute(self, problem: Problem, *entries: str) -> SearchResult:
        """Recomputation as a switch for the whole job: the first of ``entries`` with which a plan fits."""
        result = None
        for entry in entries:
            result = one_recompute(
                problem, planner=self.name, backend=self.backend, entries=(entry,), time_limit_s=self.time_left_s
            )
            if result.plan is not None:
                break
        assert result is not None
        return result


def believe_equal_devices(cluster: Cluster, like: Device | None = None) -> Cluster:
    """The cluster with all devices alike: as ``like``, or with the slowest kind's rates and the least memory of all.

    Links between pools are believed to be like the slowest network of the nodes.
    """
    slowest = min((pool.device for pool in cluster.pools), key=_speed)
    memory = min(pool.device.memory_bytes for pool in cluster.pools)
    device = like or msgspec.structs.replace(slowest, memory_bytes=memory)
    reserves = [pool.memory_reserve_bytes for pool in cluster.pools if pool.memory_reserve_bytes is not None]
    reserve = max(reserves) if reserves else None
    network = min((pool.network for pool in cluster.pools), key=lambda network: network.node_bytes_per_s)
    pools = []
    for pool in cluster.pools:
        # who may be neighbours does not change with what is believed of rates
        named = msgspec.structs.replace(device, name=pool.device.name, vendor=pool.device.vendor, ccl=pool.device.ccl)
        pools.append(msgspec.structs.replace(pool, device=named, network=network, memory_reserve_bytes=reserve))
    links = []
    names = [pool.name for pool in cluster.pools]
    for index, a in enumerate(names):
        for b in names[index + 1 :]:
            if link := cluster.link(a, b):
                links.append(_like_nodes(link, network.node_bytes_per_s, network.latency_s))
    return msgspec.structs.replace(cluster, pools=tuple(pools), links=tuple(links))


def _speed(device: Device) -> float:
    peak = device.peak_flop_per_s
    return peak.get("bf16") or peak.get("fp16") or max(peak.values())


def _like_nodes(link: Link, bytes_per_s: float, latency_s: float) -> Link:
    return msgspec.structs.replace(link, bytes_per_s=bytes_per_s, latency_s=latency_s)


def _alpa(case: Case) -> SearchResult:
    """Alpa (OSDI'22, arXiv:2201.12023; alpa/pipeline_parallel/stage_construction.py).

    Keeps: an optimal partition of layers into stages under one cost per stage (its ``dp_impl``
    minimises the sum of stage times plus (M − 1) times the slowest), submeshes that are equal parts
    of a node or whole nodes (``get_submesh_choices``), data and operator parallelism inside a stage,
    experts sharded as one more tensor axis, 1F1B memory (``max_n_succ_stages``), all devices used,
    rematerialisation as one switch. It takes all hosts for alike: so are devices and links here.
    Drops: its intra-operator ILP and per-stage logical meshes; context parallelism and virtual stages
    are not in it.
    """
    problem = case.pose(case.job, believe_equal_devices(case.cluster), ("cp=1", "vpp=1", *case.all_devices))
    return case.one_recompute(problem, "none", "full")


def _metis(case: Case) -> SearchResult:
    """Metis (USENIX ATC'24; SamsungLabs/Metis, read for its ideas only).

    Keeps: profiles per kind, orders of kinds (``node_sequence``), stages that start data parallel and
    trade it for tensor parallelism, layers balanced by stage speed and memory, all devices used, no
    recomputation in its tables (one switch here, when nothing fits without). It knows dense layers
    only: an MoE layer is one that tensor parallelism splits, its experts held by every data-parallel
    rank (ep 1, etp = tp).
    Drops: per-stage (dp, tp), mixed kinds inside a stage with uneven batches, its limit on the
    permutations tried, and that its code reads the bandwidth inside nodes for that between them.
    """
    problem = case.pose(case.job, case.cluster, ("ep=1", "cp=1", "vpp=1", *case.all_devices))
    return case.one_recompute(problem, "none", "full")


def _metis_style(case: Case) -> SearchResult:
    """Metis-style (the HAPMoE paper's own baseline, arXiv:2609.39350, section "Baselines").

    Keeps: pipeline, data, tensor and context parallelism and the layer split searched over kinds; EP
    and TPE fixed to the best homogeneous choice: that of the fastest plan on as many devices that are
    all of one kind of the cluster, whichever kind that is. One recomputation for all stages.
    Drops: nothing that the paper says of it.
    """
    pins: tuple[str, ...] = ("vpp=1", *case.all_devices)
    if case.job.model.moe is not None:
        kinds = {pool.device.name: pool.device for pool in case.cluster.pools}
        alike = [case.pose(case.job, believe_equal_devices(case.cluster, kind), pins) for kind in kinds.values()]
        best = fastest(*(case.one_recompute(problem, "none", "selective", "full") for problem in alike))
        if best.plan is None:
            return best
        stage = best.plan.stages[0]
        pins = (*pins, f"ep={stage.ep}", f"etp={stage.etp}")
    problem = case.pose(case.job, case.cluster, pins)
    return one_recompute(problem, planner=case.name, backend=case.backend, time_limit_s=case.time_left_s)


def _deepspeed_moe(case: Case) -> SearchResult:
    """DeepSpeed-MoE (arXiv:2201.05596; deepspeed/utils/groups.py, ``_create_expert_and_data_parallel``).

    Keeps: experts spread over as many data-parallel ranks as divide their number (``ep_size``), whole
    experts (etp 1), tensor slicing of the dense part, the job's ZeRO optimizer, equal layers, one
    recomputation. No search over pipelines: the fewest stages that use all devices and fit.
    Drops: ZeRO-2/3 (the job's sharding stays), its own kernels and hierarchical all-to-all.
    """
    experts = case.job.model.moe.num_experts if case.job.model.moe else 1
    for pp in _stage_counts(case):
        for ep in reversed(divisors(experts)):
            pins = (f"pp={pp}", f"ep={ep}", *(("etp=1",) if experts > 1 else ()), "cp=1", "vpp=1", *case.all_devices)
            result = _uniform(case, pins)
            if result.plan is not None:
                return result
    return _uniform(case, ("cp=1", "vpp=1", *case.all_devices))


def _tutel(case: Case) -> SearchResult:
    """Tutel (MLSys'23, arXiv:2206.03382; microsoft/tutel, tutel/impls/moe_layer.py).

    Keeps: a library for the MoE layer that switches between expert and expert-tensor parallelism for
    the best time of the layer (``adaptive_r``; alike layers choose alike), the rest data parallel
    (tp 1), equal layers, one recomputation. No global strategy: the fewest stages that fit.
    Drops: switching at run time with the load, its 2D all-to-all and its pipelining of it.
    """
    for pp in _stage_counts(case):
        result = _uniform(case, (f"pp={pp}", "tp=1", "cp=1", "vpp=1", *case.all_devices))
        if result.plan is not None:
            return result
    return _uniform(case, ("tp=1", "cp=1", "vpp=1", *case.all_devices))


def _stage_counts(case: Case) -> Iterable[int]:
    """Numbers of equal stages that all devices of the cluster can form, few first."""
    sizes = set()
    for size in range(1, case.cluster.num_devices + 1):
        pools = case.cluster.pools
        if all(
            pool.devices_per_node % size == 0 or (size % pool.devices_per_node == 0 and pool.num_devices % size == 0)
            for pool in pools
        ):
            sizes.add(case.cluster.num_devices // size)
    return [pp for pp in sorted(sizes) if pp <= case.job.model.num_layers]


def _uniform(case: Case, pins: tuple[str, ...]) -> SearchResult:
    problem = case.pose(case.job, case.cluster, pins)
    return search_exact(
        problem, planner=case.name, backend=case.backend, top=1, uniform=True, time_limit_s=case.time_left_s
    )


BASELINES: dict[str, Callable[[Case], SearchResult]] = {
    "alpa": _alpa,
    "metis": _metis,
    "metis-style": _metis_style,
    "deepspeed-moe": _deepspeed_moe,
    "tutel": _tutel,
}

MOE_ONLY = ("deepspeed-moe", "tutel")


def search_baseline(case: Case, *, started: float | None = None) -> SearchResult:
    """The baseline's plan under its belief, scored in truth."""
    began = time.perf_counter() if started is None else started
    if case.name in MOE_ONLY and case.job.model.moe is None:
        report = SearchReport(status="infeasible", reasons=(f"{case.name} is for models with experts",))
        return SearchResult(status="infeasible", plan=None, estimate=None, report=report)
    result = BASELINES[case.name](case)
    return _in_truth(case, result, began)


def _in_truth(case: Case, result: SearchResult, began: float) -> SearchResult:
    wall = time.perf_counter() - began
    before = result.report or SearchReport(status="infeasible")
    if result.plan is None or result.estimate is None:
        return msgspec.structs.replace(result, report=msgspec.structs.replace(before, wall_s=wall))
    plan = msgspec.structs.replace(result.plan, planner=case.name)
    estimate = evaluate(case.job, case.cluster, plan)
    report = msgspec.structs.replace(
        before, status="feasible", gap=0.0, wall_s=wall, believed_step_s=result.estimate.step_s
    )
    if not estimate.fits:
        report = msgspec.structs.replace(report, status="infeasible", reasons=(_shortage(case, plan, estimate),))
        return SearchResult(status="infeasible", plan=None, estimate=None, report=report)
    return SearchResult(status="feasible", plan=plan, estimate=estimate, ranked=((plan, estimate),), report=report)


def _shortage(case: Case, plan: Plan, estimate: Estimate) -> str:
    over = [stage.memory_bytes - stage.memory_limit_bytes for stage in estimate.stages]
    worst = max(range(len(over)), key=over.__getitem__)
    return (
        f"the plan that {case.name} chose does not fit: stage {worst} ({plan.stages[worst].pool}) lacks "
        f"{format_bytes(over[worst])} per device"
    )
