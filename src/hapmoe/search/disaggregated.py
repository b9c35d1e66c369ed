"""``hetermoe-style``: attention on one kind of device, experts on another. A cost, not a plan.

HeterMoE (arXiv:2504.03871) keeps attention on the newer devices and gives the older ones expert
modules only; *zebra parallelism* lets both work on different microbatches at once, and *asymmetric
expert assignment* moves some experts back to the attention side until both take equally long. No back
end here can run that, so this module only says what it would take:

    forward  = M max(N A + edge, N X, N E) + (A + 2 X + E − max)        and the same backward

A, E: one layer's attention and expert part of one microbatch on its own devices; X: its dispatch over
the link between the kinds (combine goes the other way at the same time); N layers, M microbatches; the
bracket is the filling of the zebra. x of E experts on the attention side: A grows by x/E of the expert
part at that kind's speed, E and X shrink by it. The best orientation, microbatch size and x are taken.

Keeps: disaggregation, overlap, uneven experts, no pipeline, no tensor or context parallelism, no
global search. Drops: its profiling, gather-and-squeeze between adjacent layers, imperfect overlap.
It is optimistic, and outside of our space: it is shown beside the planners, not among them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from hapmoe import memory
from hapmoe.cluster import Cluster, Pool
from hapmoe.counting import layers_by_class
from hapmoe.job import JobSpec
from hapmoe.options import LayerClass, Options
from hapmoe.plan import Recompute
from hapmoe.pricing import price
from hapmoe.search.space import divisors
from hapmoe.shapes import Shapes
from hapmoe.timing import time_ops
from hapmoe.units import DTYPE_BYTES
from hapmoe.workload import layer_ops

__all__ = ["Disaggregated", "hetermoe_style", "zebra_s"]


@dataclass(frozen=True, slots=True)
class Disaggregated:
    """The best disaggregation, or why there is none (``step_s`` infinite)."""

    step_s: float
    attention: str = ""
    experts: str = ""
    moved: int = 0
    """Experts on the attention side."""
    micro_batch_size: int = 0
    memory_bytes: float = 0.0
    wall_s: float = 0.0
    note: str = ""


@dataclass(frozen=True, slots=True)
class _Side:
    """One kind's times of one layer and microbatch (forward, backward), its seconds after the passes and its bytes.

    What the experts take is for all of them: a side that holds a share takes that share.
    """

    attention: tuple[float, float]
    experts: tuple[float, float]
    edge: tuple[float, float]
    dense_sync_s: float
    expert_sync_s: float
    dense_bytes: float
    expert_bytes: float
    expert_activations: float
    limit: float


def zebra_s(layers: int, microbatches: int, attention: float, experts: float, link: float, edge: float = 0.0) -> float:
    """One pass of all microbatches.

    >>> zebra_s(2, 3, attention=1.0, experts=2.0, link=0.5)
    14.0
    """
    longest = max(attention, experts, link)
    steady = microbatches * max(layers * attention + edge, layers * experts, layers * link)
    return steady + attention + 2 * link + experts - longest


def hetermoe_style(job: JobSpec, cluster: Cluster) -> Disaggregated:
    """What the best disaggregation of two pools would take."""
    began = time.perf_counter()
    best = Disaggregated(np.inf, note="needs two pools joined by a link, and a model whose layers all have experts")
    moe = job.model.moe
    if moe is None or not all(moe.pattern):
        return best
    fits = False
    for candidate in _candidates(job, cluster):
        fits = True
        if candidate.step_s < best.step_s:
            best = candidate
    if not fits and len(cluster.pools) > 1:
        best = Disaggregated(np.inf, note="attention or experts do not fit on their devices")
    return replace(best, wall_s=time.perf_counter() - began)


def _candidates(job: JobSpec, cluster: Cluster) -> Iterator[Disaggregated]:
    moe, batch = job.model.moe, job.training.global_batch_size
    assert moe is not None
    for near in cluster.pools:
        for far in cluster.pools:
            link = cluster.link(near.name, far.name) if near is not far else None
            if link is None or batch % near.num_devices:
                continue
            width = min(near.nodes, far.nodes) * link.bytes_per_s
            for size in divisors(batch // near.num_devices)[:4]:
                for full in (False, True):
                    yield from _assign(job, near, far, width, size, full)


def _assign(job: JobSpec, near: Pool, far: Pool, width: float, size: int, full: bool) -> Iterator[Disaggregated]:
    """Every number of experts on the attention side that fits."""
    moe, layers = job.model.moe, job.model.num_layers
    assert moe is not None
    tokens = float(near.num_devices * size * job.training.seq_len)
    link = tokens * moe.top_k * job.model.hidden * DTYPE_BYTES[job.training.precision] / width
    microbatches = job.training.global_batch_size // (near.num_devices * size)
    ours, theirs = _side(job, near, size, full), _side(job, far, size, full)
    scale = near.num_devices / far.num_devices  # the experts' devices see the tokens of all attention devices
    for moved in range(moe.num_experts):
        share = moved / moe.num_experts
        held = ours.dense_bytes + share * (ours.expert_bytes + ours.expert_activations)
        held_far = (1.0 - share) * (theirs.expert_bytes + scale * theirs.expert_activations)
        if held > ours.limit or held_far > theirs.limit:
            continue
        step = max(ours.dense_sync_s + share * ours.expert_sync_s, (1.0 - share) * theirs.expert_sync_s)
        for way in (0, 1):
            attention = ours.attention[way] + share * ours.experts[way]
            expert = (1.0 - share) * scale * theirs.experts[way]
            step += zebra_s(layers, microbatches, attention, expert, (1.0 - share) * link, ours.edge[way])
        yield Disaggregated(step, near.name, far.name, moved, size, max(held, held_far))


def _side(job: JobSpec, pool: Pool, size: int, full: bool) -> _Side:
    """Data parallel over all devices of a pool, experts over as many of them as divide their number."""
    moe, layers = job.model.moe, job.model.num_layers
    assert moe is not None
    devices = pool.num_devices
    ep = max(d for d in divisors(moe.num_experts) if devices % d == 0)
    options = Options(*(np.asarray([value], np.int64) for value in (1, 1, ep, 1, devices, size)))
    menu = (Recompute(), Recompute(granularity="full", method="block", num_layers=1))
    table, shapes = price(job, pool, options, menu), Shapes.of(job, options)
    kind: LayerClass = next(iter(layers_by_class(job.model)))
    parts = {"attention": [0.0, 0.0], "experts": [0.0, 0.0]}
    for timed in time_ops(pool, shapes, layer_ops(shapes, kind)):
        if timed.op.kind == "message":
            continue
        part = parts["experts" if timed.op.part == "experts" else "attention"]
        forward = float(timed.forward_K[0])
        part[0] += forward
        part[1] += float(timed.dgrad_K[0] + timed.wgrad_K[0]) + (forward if full else 0.0)
    attention_bytes = expert_bytes = 0.0
    for tensor in memory.layer_tensors(shapes, kind):
        if tensor.layer_input or (not full and "moe" not in tensor.freed_by):
            attention_bytes += float(tensor.bytes_K[0])
        elif not full:
            expert_bytes += float(tensor.bytes_K[0])

    def first(name: str) -> float:
        return float(np.ravel(getattr(table, name))[0])

    dense = layers * first("dense_params_CK") + first("embedding_params_K") + first("head_params_K")
    expert = layers * first("expert_params_CK")
    each = table.weight_bytes + table.grad_bytes
    # two microbatches are under way at once: the least that lets both sides work
    dense_bytes = dense * (each + first("dense_optimizer_bytes_K")) + 2 * layers * attention_bytes
    return _Side(
        attention=(parts["attention"][0], parts["attention"][1]),
        experts=(parts["experts"][0], parts["experts"][1]),
        edge=(
            first("embedding_forward_K") + first("head_forward_K"),
            first("embedding_backward_K") + first("head_backward_K"),
        ),
        dense_sync_s=dense * (first("dense_sync_s_K") + first("optimizer_s_K") + first("dense_gather_s_K")),
        expert_sync_s=expert * (first("expert_sync_s_K") + first("expert_optimizer_s_K") + first("expert_gather_s_K")),
        dense_bytes=dense_bytes + first("workspace_bytes_K") + first("head_activation_K"),
        expert_bytes=expert * (each + first("expert_optimizer_bytes_K")),
        expert_activations=2 * layers * expert_bytes,
        limit=first("memory_limit_bytes_K"),
    )
