"""The space of plans, written down: where stages may stand, and how each may be run.

A stage is whole nodes of one pool, or an equal part of one node; stages of one pool are neighbours
in the pipeline; the nodes of a pool are used from the first on, and some may be left out. Upstream
Megatron wants equal degrees on all stages, hence equal device counts. Every stage holds at least
one decoder layer per virtual stage; the virtual stages of a stage differ by at most one layer, the
fuller ones first. Recomputation of a stage: none, one of the selective sets of the back end, or the
first k layers of each virtual stage in full.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise, permutations, product

import numpy as np

from hapmoe.cluster import Cluster
from hapmoe.job import JobSpec
from hapmoe.options import Options

__all__ = ["Placement", "Space", "build_space", "divisors", "legal_vpp"]

MANY_PLACEMENTS = 4096
"""Above so many node counts of one stage size only powers of two and all nodes are tried."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Pools in pipeline order, and how many of their nodes hold how many stages."""

    size: int
    """Devices per stage."""
    pools: tuple[int, ...]
    nodes: tuple[int, ...]
    stages: tuple[int, ...]

    @property
    def pp(self) -> int:
        return sum(self.stages)

    @property
    def pool_of_stage(self) -> tuple[int, ...]:
        return tuple(pool for pool, count in zip(self.pools, self.stages, strict=True) for _ in range(count))


@dataclass(frozen=True, slots=True)
class Space:
    """All placements and options; a grid point is a placement, an option of its size, and a vpp."""

    placements: tuple[Placement, ...]
    options: Options
    complete: bool
    """False where node counts were thinned out: then no optimum is certified."""
    dropped: Mapping[str, int]
    """Options that a rule forbids, by rule."""


def divisors(number: int) -> list[int]:
    """All divisors, ascending.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def _stages(nodes: int, devices_per_node: int, size: int) -> int | None:
    """Stages of ``size`` devices on so many nodes; None where they do not come out whole."""
    if size >= devices_per_node:
        return (
            nodes * devices_per_node // size
            if size % devices_per_node == 0 and nodes * devices_per_node % size == 0
            else None
        )
    return nodes * (devices_per_node // size) if devices_per_node % size == 0 else None


def _placements(cluster: Cluster, size: int, most_stages: int) -> tuple[list[Placement], bool]:
    choices: list[list[tuple[int, int]]] = []
    for pool in cluster.pools:
        counts = [(nodes, _stages(nodes, pool.devices_per_node, size)) for nodes in range(pool.nodes + 1)]
        choices.append([(nodes, stages) for nodes, stages in counts if stages is not None and stages <= most_stages])
    complete = True
    if np.prod([float(len(choice)) for choice in choices]) > MANY_PLACEMENTS:
        complete = False
        choices = [[c for c in choice if c[1] & (c[1] - 1) == 0 or c == choice[-1]] for choice in choices]
    found = []
    for combination in product(*choices):
        used = [index for index, (_, stages) in enumerate(combination) if stages]
        if not used or sum(stages for _, stages in combination) > most_stages:
            continue
        for order in permutations(used):
            names = [cluster.pools[index].name for index in order]
            if all(cluster.link(a, b) for a, b in pairwise(names)):
                nodes = tuple(combination[index][0] for index in order)
                stages = tuple(combination[index][1] for index in order)
                found.append(Placement(size, order, nodes, stages))
    return found, complete


def _attention_degrees(job: JobSpec, size: int, dropped: Counter[str]) -> Iterator[tuple[int, int, int]]:
    """Legal (tp, cp, dp) of a stage of ``size`` devices (rules and sources: ``rules``)."""
    model, training = job.model, job.training
    for tp in divisors(size):
        kv = model.num_kv_heads if model.mla is None else model.num_heads
        if model.num_heads % tp or (kv % tp and (tp % kv or not training.transformer_engine)):
            dropped["attention heads not divisible by tp"] += 1
            continue
        if model.ffn_hidden % tp and not all(model.moe_pattern):
            dropped["ffn width not divisible by tp"] += 1
            continue
        if model.moe and model.moe.shared_ffn_hidden % tp:
            dropped["shared expert width not divisible by tp"] += 1
            continue
        for cp in divisors(size // tp):
            if cp > 1 and (training.seq_len % (2 * cp) or not training.transformer_engine):
                dropped["sequence not divisible by 2 cp"] += 1
                continue
            if tp > 1 and (training.seq_len // cp) % tp:
                dropped["sequence not divisible by tp"] += 1
                continue
            yield tp, cp, size // tp // cp


def _expert_degrees(job: JobSpec, size: int, tp: int, dropped: Counter[str]) -> Iterator[tuple[int, int]]:
    """Legal (ep, etp) of a stage of ``size`` devices with ``tp``."""
    moe = job.model.moe
    if moe is None:
        yield 1, 1
        return
    for etp in divisors(size):
        if moe.ffn_hidden % etp:
            dropped["expert width not divisible by etp"] += 1
            continue
        if etp > 1 and job.model.linear_bias:
            dropped["linear bias in experts needs etp 1"] += 1
            continue
        for ep in divisors(size // etp):
            if moe.num_experts % ep:
                dropped["experts not divisible by ep"] += 1
            elif ep == 1 and etp != tp:
                dropped["ep 1 needs etp = tp (wrong gradients in Megatron-Core)"] += 1
            elif job.training.dispatcher == "flex" and ep * etp == 1:
                dropped["flex dispatcher needs ep * etp > 1"] += 1
            elif job.training.overlap_moe_comm and ep == 1:
                dropped["EP communication overlap needs ep > 1"] += 1
            else:
                yield ep, etp


def build_space(job: JobSpec, cluster: Cluster) -> Space:
    """Everything that the rules of upstream Megatron allow for this job on this cluster."""
    batch, most_stages = job.training.global_batch_size, job.model.num_layers
    sizes = sorted(
        {
            size
            for pool in cluster.pools
            for size in (
                *divisors(pool.devices_per_node),
                *(pool.devices_per_node * nodes for nodes in range(1, pool.nodes + 1)),
            )
        }
    )
    placements: list[Placement] = []
    rows: list[tuple[int, int, int, int, int, int]] = []
    dropped: Counter[str] = Counter()
    complete = True
    for size in sizes:
        here, whole = _placements(cluster, size, most_stages)
        if not here:
            continue
        before = len(rows)
        for tp, cp, dp in _attention_degrees(job, size, dropped):
            if batch % dp:
                dropped["global batch not divisible by dp"] += 1
                continue
            batches = divisors(batch // dp)
            for ep, etp in _expert_degrees(job, size, tp, dropped):
                rows += [(tp, cp, ep, etp, dp, mbs) for mbs in batches]
        if len(rows) > before:
            placements += here
            complete = complete and whole
    table = np.asarray(rows, dtype=np.int64).reshape(len(rows), 6)
    return Space(tuple(placements), Options(*table.T), complete, dict(dropped))


def legal_vpp(job: JobSpec, pp: int, num_microbatches: int) -> list[int]:
    """Virtual stages that Megatron accepts (schedules.py:1168, 1180; arguments.py:1002).

    Without p2p overlap interleaving is another schedule, which is not modelled: vpp 1 then.
    """
    overlap_moe = job.training.overlap_moe_comm
    if pp == 1:
        return [1]
    group = job.training.microbatch_group_size or pp
    rest = num_microbatches % group
    possible = job.training.overlap_p2p and pp <= group <= num_microbatches and (rest == 0 or rest >= pp)
    many = list(range(2, job.model.num_layers // pp + 1)) if possible else []
    return many if overlap_moe else [1, *many]
