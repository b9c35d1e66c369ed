"""The space of plans, written down: how a stage may be run, how many stages a pool may hold.

A stage is whole nodes of one pool, or an equal part of one node; stages of one pool are neighbours
in the pipeline; the nodes of a pool are used from the first on, and some may be left out. Upstream
Megatron wants equal degrees on all stages, hence equal device counts. Every stage holds at least
one decoder layer per virtual stage; the virtual stages of a stage differ by at most one layer, the
fuller ones last. Recomputation of a stage: none, one of the selective sets of the back end, or the
first k layers of each virtual stage in full.

A grid point is an option (degrees and microbatch size), a number of stages per pool, an order of the
pools in use, and a number of virtual stages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations, pairwise, permutations

import numpy as np
from numpy.typing import NDArray

from hapmoe.cluster import Cluster
from hapmoe.job import JobSpec
from hapmoe.options import IntArray, Options
from hapmoe.search.pins import Pins

__all__ = ["Space", "build_space", "count_points", "count_vectors", "divisors", "legal_vpp", "may_interleave"]


@dataclass(frozen=True, slots=True)
class Space:
    """Options and where they can stand. Array legend: K option, P pool."""

    options: Options
    most_KP: IntArray
    """The most stages of an option's size that a pool can hold."""
    step_KP: IntArray
    """Stages come in so many at once: those of one whole node."""
    orders: tuple[tuple[int, ...], ...]
    """Every order of every set of pools whose neighbours a link joins."""
    dropped: Mapping[str, int]
    """Options that a rule forbids, by rule."""

    def take(self, which: IntArray) -> Space:
        """The same space with only these options."""
        columns = [getattr(self.options, name)[which] for name in Options.__slots__]
        return Space(Options(*columns), self.most_KP[which], self.step_KP[which], self.orders, self.dropped)

    def orders_of(self, used: tuple[int, ...]) -> list[int]:
        """Numbers of the orders that use just these pools."""
        return [
            number for number, order in enumerate(self.orders) if len(order) == len(used) and set(order) == set(used)
        ]


def divisors(number: int) -> list[int]:
    """All divisors, ascending.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


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


def _sizes(cluster: Cluster) -> list[int]:
    """Devices that a stage can have: equal parts of a node, or whole nodes, of some pool."""
    parts = {size for pool in cluster.pools for size in divisors(pool.devices_per_node)}
    whole = {pool.devices_per_node * nodes for pool in cluster.pools for nodes in range(1, pool.nodes + 1)}
    return sorted(parts | whole)


def build_space(job: JobSpec, cluster: Cluster, pins: Pins) -> Space:
    """Everything that the rules of upstream Megatron and the pins allow for this job on this cluster."""
    batch = job.training.global_batch_size
    rows: list[tuple[int, int, int, int, int, int]] = []
    dropped: Counter[str] = Counter()
    for size in _sizes(cluster):
        for tp, cp, dp in _attention_degrees(job, size, dropped):
            if batch % dp:
                dropped["global batch not divisible by dp"] += 1
                continue
            batches = divisors(batch // dp)
            for ep, etp in _expert_degrees(job, size, tp, dropped):
                rows += [(tp, cp, ep, etp, dp, mbs) for mbs in batches]
    columns = np.asarray(rows, dtype=np.int64).reshape(len(rows), 6).T
    options = Options(*columns)
    options = Options(*columns[:, pins.allow_options(options)])
    size_K = options.devices_K
    most_KP, step_KP = (np.zeros((len(options), len(cluster.pools)), np.int64) for _ in range(2))
    for p, pool in enumerate(cluster.pools):
        each = pool.devices_per_node
        whole, part = size_K % each == 0, each % np.maximum(size_K, 1) == 0
        step_KP[:, p] = np.where(part, each // np.maximum(size_K, 1), 1)
        most_KP[:, p] = np.where(whole, pool.nodes * each // size_K, np.where(part, pool.nodes * step_KP[:, p], 0))
    return Space(options, most_KP, step_KP, _orders(cluster, pins), dict(dropped))


def _orders(cluster: Cluster, pins: Pins) -> tuple[tuple[int, ...], ...]:
    names = [pool.name for pool in cluster.pools]
    found = []
    for many in range(1, len(names) + 1):
        for used in combinations(range(len(names)), many):
            for order in permutations(used):
                in_order = tuple(names[p] for p in order)
                if pins.allow_order(in_order) and all(cluster.link(a, b) for a, b in pairwise(in_order)):
                    found.append(order)
    return tuple(found)


def count_points(space: Space, layers: int) -> int:
    """Grid points of the space, virtual stages not counted: options times stage counts times orders.

    Stage counts per pool add up to at most ``layers``; their number is a product of polynomials.
    """
    options = space.options
    sizes, first, many = np.unique(options.devices_K, return_index=True, return_counts=True)
    total = 0
    for k, number in zip(first.tolist(), many.tolist(), strict=True):
        if not len(sizes):
            break
        for used in {tuple(sorted(order)) for order in space.orders}:
            ways = np.ones(1)
            for p in used:
                steps = np.zeros(layers + 1)
                steps[space.step_KP[k, p] : min(layers, space.most_KP[k, p]) + 1 : space.step_KP[k, p]] = 1.0
                ways = np.convolve(ways, steps)[: layers + 1]
            total += number * int(ways.sum()) * len(space.orders_of(used))
    return total


def count_vectors(most_P: IntArray, step_P: IntArray, low_P: IntArray, layers: int, limit: int) -> IntArray | None:
    """[S, P] numbers of stages per pool from ``low`` to ``most``, in whole steps, not all 0 and at most
    ``layers`` in all; None where there are more than ``limit``."""
    axes = []
    for most, step, low in zip(most_P.tolist(), step_P.tolist(), low_P.tolist(), strict=True):
        begin = -(-low // step) * step if most else 0
        axes.append(np.arange(begin, min(most, layers) + 1, max(step, 1)))
    if float(np.prod([float(len(axis)) for axis in axes])) > 50 * limit:
        return None
    vectors = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, len(axes))
    total = vectors.sum(axis=1)
    vectors = vectors[(total > 0) & (total <= layers)]
    return vectors if len(vectors) <= limit else None


def may_interleave(job: JobSpec, pp: IntArray, num_microbatches: IntArray) -> NDArray[np.bool_]:
    """Does Megatron accept more than one virtual stage (schedules.py:1168, 1180; arguments.py:1002)?

    Without p2p overlap interleaving is another schedule, which is not modelled.
    """
    group = np.asarray(job.training.microbatch_group_size or pp)
    rest = num_microbatches % group
    legal = (pp > 1) & (pp <= group) & (group <= num_microbatches) & ((rest == 0) | (rest >= pp))
    return np.asarray(legal & (2 * pp <= job.model.num_layers) & bool(job.training.overlap_p2p))


def legal_vpp(job: JobSpec, pp: int, num_microbatches: int) -> list[int]:
    """Virtual stages that a pipeline can have."""
    if pp == 1:
        return [1]
    possible = may_interleave(job, np.asarray(pp), np.asarray(num_microbatches))
    many = list(range(2, job.model.num_layers // pp + 1)) if possible else []
    return many if job.training.overlap_moe_comm else [1, *many]
