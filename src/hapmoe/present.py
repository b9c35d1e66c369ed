"""The plan that the script itself describes, on a given cluster: what a planner has to beat."""

from __future__ import annotations

from dataclasses import dataclass

from hapmoe.backends.layout import parse_layout
from hapmoe.cluster import Cluster
from hapmoe.errors import InputError
from hapmoe.job import JobSpec, Present
from hapmoe.plan import Plan, Stage, Violation
from hapmoe.resolve import chunk_layers, resolve
from hapmoe.rules import check
from hapmoe.rules.layers import near_even

__all__ = ["PresentPlan", "present_plan"]

Chunks = tuple[tuple[int, ...], ...]
"""Layers per stage and virtual stage."""


@dataclass(frozen=True, slots=True)
class PresentPlan:
    """The script's own configuration. Comparable with a planner's when it is a plan without
    violations; ``note`` says what was read into it, or why there is none."""

    plan: Plan | None
    violations: tuple[Violation, ...] = ()
    note: str = ""

    @property
    def comparable(self) -> bool:
        return self.plan is not None and not self.violations


def present_plan(job: JobSpec, cluster: Cluster, *, world_size: int | None = None) -> PresentPlan:
    """The script's degrees, layer split and recomputation on ``cluster``, pools in the order listed.

    dp is not an argument of Megatron's: it follows from the world size. With ``world_size`` it is
    that; else the largest that fits the cluster, divides the global batch and breaks no rule.
    Where every dp breaks one, the plan with the largest comes back with its violations.
    """
    present = job.present
    chunks, violations = _split(job)
    model_ranks = present.tp * present.cp * len(chunks)
    if world_size is not None:
        if world_size % model_ranks:
            said = (
                f"world size {world_size} does not divide by TP·CP·PP = "
                f"{present.tp}·{present.cp}·{len(chunks)} = {model_ranks}"
            )
            hint = "change the number of devices, or a degree"
            return PresentPlan(None, (*violations, Violation(rule="world", message=said, source="A:432", hint=hint)))
        candidates = [world_size // model_ranks]
    else:
        candidates = list(range(cluster.num_devices // model_ranks, 0, -1)) or [1]
    batch, micro = job.training.global_batch_size, present.micro_batch_size or 1
    dividing = [dp for dp in candidates if batch % (micro * dp) == 0]
    best: PresentPlan | None = None
    for dp in (*dividing, *(dp for dp in candidates if dp not in dividing)):
        if best is not None and dp not in dividing:
            break
        plan = _place(job, cluster, chunks, dp)
        if plan is None:
            continue
        found = PresentPlan(plan, (*violations, *check(job, cluster, plan)), _note(job, cluster, plan))
        if found.comparable:
            return found
        best = best or found
    if best is not None:
        return best
    needs = f"{candidates[0] * model_ranks}" if world_size is not None else f"at least {model_ranks}"
    return PresentPlan(
        None,
        violations,
        f"the script's TP·CP·PP = {present.tp}·{present.cp}·{len(chunks)} needs {needs} devices in stages of "
        f"whole nodes or equal parts of one; the cluster has {cluster.num_devices}: not comparable",
    )


def _note(job: JobSpec, cluster: Cluster, plan: Plan) -> str:
    used = sum(stage.num_devices for stage in plan.stages)
    parts = [f"the script's own degrees with dp {plan.stages[0].dp} on {used} of {cluster.num_devices} devices"]
    if job.present.micro_batch_size is None:
        parts.append("micro-batch size 1 (the script gives none)")
    if not job.training.global_batch_size:
        parts.append(f"global batch {plan.global_batch_size} (the script gives none: MBS·DP)")
    return "; ".join(parts)


def _place(job: JobSpec, cluster: Cluster, chunks: Chunks, dp: int) -> Plan | None:
    """The plan at this dp; None where the stages do not fit the pools."""
    present, vpp = job.present, len(chunks[0])
    devices = present.tp * present.cp * dp
    homes: list[str] = []
    for pool in cluster.pools:
        homes += [pool.name] * _capacity(pool.nodes, pool.devices_per_node, devices)
    if len(homes) < len(chunks):
        return None
    etp = present.etp if present.etp is not None else present.tp
    stages = tuple(
        Stage(
            pool=pool,
            num_layers=sum(counts),
            virtual_layers=rows,
            first_layer=rows[0][0],
            tp=present.tp,
            cp=present.cp,
            ep=present.ep,
            etp=etp if job.model.moe is not None else 1,
            dp=dp,
            recompute=present.recompute,
        )
        for pool, counts, rows in zip(homes, chunks, _first_layers(chunks), strict=False)
    )
    micro = present.micro_batch_size or 1
    batch = job.training.global_batch_size or micro * dp
    plan = Plan(stages=stages, micro_batch_size=micro, vpp=vpp, global_batch_size=batch, planner="script")
    return resolve(job, cluster, plan)


def _capacity(nodes: int, per_node: int, devices: int) -> int:
    """How many stages of ``devices`` a pool holds: of whole nodes, or equal parts of one."""
    if devices % per_node == 0:
        return nodes // (devices // per_node)
    return nodes * (per_node // devices) if per_node % devices == 0 else 0


def _first_layers(chunks: Chunks) -> tuple[tuple[tuple[int, int], ...], ...]:
    """[first layer, count] per stage and virtual stage, in interleaved order."""
    rows: list[list[tuple[int, int]]] = [[] for _ in chunks]
    first = 0
    for chunk in range(len(chunks[0])):
        for stage, counts in enumerate(chunks):
            rows[stage].append((first, counts[chunk]))
            first += counts[chunk]
    return tuple(tuple(row) for row in rows)


def _split(job: JobSpec) -> tuple[Chunks, tuple[Violation, ...]]:
    """Layers per stage and virtual stage as the script asks for them, and what is wrong with that.

    A split that Megatron refuses is replaced by the nearest legal one, so that there is a plan to
    show beside the violation.
    """
    present, layers = job.present, job.model.num_layers
    try:
        if present.layout is not None:
            return _layout(present.layout, present.pp), ()
        if present.first_stage_layers is not None or present.last_stage_layers is not None:
            return _first_last(present, layers), ()
        return _even(present, layers), ()
    except InputError as error:
        split = near_even(layers, present.pp)
        rows = chunk_layers(split, max(present.vpp, 1))
        shown = "/".join(map(str, split))
        hint = f"a layout can split it, for example {shown}"
        violation = Violation(rule="split", message=error.what, source=error.where, hint=hint)
        return tuple(tuple(count for _, count in row) for row in rows), (violation,)


def _layout(text: str, pp: int) -> Chunks:
    stages = parse_layout(text)
    if len(stages) % pp:
        raise InputError(f"the layout has {len(stages)} stages, not a multiple of PP = {pp}", where="A:945; PL:41")
    counts = [letters.count("t") for letters in stages]
    return tuple(tuple(counts[rank::pp]) for rank in range(pp))


def _first_last(present: Present, layers: int) -> Chunks:
    """--decoder-first/last-pipeline-num-layers (TC:2294-2364)."""
    pp, vpp = present.pp, present.vpp
    first, last = present.first_stage_layers, present.last_stage_layers
    ends = (first is not None) + (last is not None)
    middle, ranks = layers - (first or 0) - (last or 0), pp - ends
    if ranks < 0 or (middle == 0) != (ranks == 0) or (ranks and middle % ranks):
        raise InputError(
            f"{middle} layers between the first and last stage, for {max(ranks, 0)} stages", where="TC:2350"
        )
    split = [middle // ranks] * ranks if ranks else []
    split = ([first] if first is not None else []) + split + ([last] if last is not None else [])
    if any(count < 1 for count in split):
        raise InputError(f"split {'/'.join(map(str, split))} has a stage without layers", where="TC:2304; TC:2323")
    if any(count % vpp for count in split):
        raise InputError(
            f"split {'/'.join(map(str, split))} does not divide by vpp = {vpp} on every stage", where="TC:2312; TC:2364"
        )
    return tuple((count // vpp,) * vpp for count in split)


def _even(present: Present, layers: int) -> Chunks:
    """The plain split, with embedding and loss counted as layers where asked (A:997; A:968)."""
    pp, extra = present.pp, present.account_for_embedding + present.account_for_loss
    counted = f"{layers} layers" + (f" + {extra} for embedding and loss" if extra else "")
    if (layers + extra) % pp:
        raise InputError(f"{counted} do not divide by PP = {pp}", where="A:997")
    per_stage = (layers + extra) // pp
    vpp = present.vpp
    if present.layers_per_virtual_stage:
        if per_stage % present.layers_per_virtual_stage:
            raise InputError(
                f"{per_stage} layers of a stage do not divide by {present.layers_per_virtual_stage} "
                "(--num-layers-per-virtual-pipeline-stage)",
                where="A:972",
            )
        vpp = per_stage // present.layers_per_virtual_stage
    if per_stage % vpp:
        raise InputError(f"{per_stage} layers of a stage do not divide by vpp = {vpp}", where="TC:2409")
    rows = [[per_stage // vpp] * vpp for _ in range(pp)]
    rows[0][0] -= present.account_for_embedding
    rows[-1][-1] -= present.account_for_loss
    if rows[0][0] < 0 or rows[-1][-1] < 0:
        raise InputError(f"{counted} leave a stage without layers", where="transformer_block.py:194,201")
    return tuple(tuple(row) for row in rows)
