"""The bound of a grid point from what its stages can hold: how many layers within a given step.

For a step time t every stage has a most number of layers, by time (B1, B2 or Bv, see ``bounds``) and
by memory (each menu entry). Where these do not add up to the model, t is too small; bisection finds
the largest such t. Long pipelines are looked at in parts: runs of stages of one pool, each judged by
its luckiest stage, which keeps the bound one.

Array legend: G grid points of one pp, S parts, R menu entries, P pools.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hapmoe.options import FloatArray, IntArray
from hapmoe.search.bounds import EPS, blocked_s, heavy_class
from hapmoe.search.points import Points, sends_of, stage_pools
from hapmoe.search.problem import Problem

__all__ = ["counts_suffice", "point_bounds"]

FINE = 16
"""Up to so many stages every stage is a part of its own."""
PIECES = 4
"""Parts per pool beyond that, first and last stage apart."""


def point_bounds(
    problem: Problem, points: Points, floor_G: FloatArray, ceiling: float
) -> tuple[FloatArray, list[IntArray]]:
    """[G] lower bound of each grid point with its order, vpp and memory; infinite where nothing fits.

    Also, per point, the most layers of each of its stages that a step of ``ceiling`` allows.
    """
    bound_G = np.zeros(len(points))
    high: list[IntArray] = [np.zeros(0, np.int64)] * len(points)
    pp_G = points.pp_G
    for pp in sorted(set(pp_G.tolist())):
        of = np.flatnonzero(pp_G == pp)
        bound_G[of], reach = _bounds_of(problem, points.take(of), floor_G[of], ceiling)
        for row, g in enumerate(of.tolist()):
            high[g] = reach[row]
    return bound_G, high


def _bounds_of(problem: Problem, points: Points, floor_G: FloatArray, ceiling: float) -> tuple[FloatArray, IntArray]:
    """``point_bounds`` of grid points with one number of stages."""
    parts = _parts(problem, points)
    low = np.maximum(floor_G, _chain_bound(problem, points, parts))
    limited = np.isfinite(ceiling)
    most = ceiling if limited else float(max(1.0, low.max())) * 64.0
    reach = _reach(parts, np.full(len(low), most))
    hopeless = (reach * parts.count_GS).sum(axis=1) < parts.layers
    bound = np.where(hopeless, ceiling if limited else np.inf, np.minimum(low, most))
    hopeful = np.flatnonzero(~hopeless)
    if len(hopeful):
        some = parts.take(hopeful)
        low, high = bound[hopeful], np.full(len(hopeful), most)
        for _ in range(6 if limited else 16):
            middle = 0.5 * (low + high)
            enough = (_reach(some, middle) * some.count_GS).sum(axis=1) >= some.layers
            high, low = np.where(enough, middle, high), np.where(enough, low, middle)
        bound[hopeful] = low
    # other classes of layers come on top of what the heavy class leaves room for
    others = problem.job.model.num_layers - parts.layers
    stages = np.arange(parts.pp)
    part_of = (stages[None, :, None] >= (parts.begin_GS + parts.count_GS)[:, None, :]).sum(axis=2)
    return bound, np.take_along_axis(reach.astype(np.int64), part_of, axis=1) + others


@dataclass(frozen=True, slots=True)
class _Parts:
    """What a number of layers of the heavy class costs on the stages of each part. [G, S] or [G, S, R]."""

    layers: int
    pp: int
    microbatches_G: FloatArray
    vpp_G: IntArray
    group_G: IntArray
    begin_GS: IntArray
    count_GS: IntArray
    forward_GS: FloatArray
    backward_GS: FloatArray
    base_forward_GS: FloatArray
    base_backward_GS: FloatArray
    extra_GSR: FloatArray
    static_GS: FloatArray
    act_GSR: FloatArray
    room_GSR: FloatArray
    right_GS: FloatArray
    left_GS: FloatArray
    before_GS: FloatArray
    """Transfers, there and back, of the stages before the part."""
    sends_G: FloatArray
    """All transfers of one microbatch, one way, without the wrap."""
    wrap_G: FloatArray
    fewest_GS: IntArray
    """Warm-up forwards of the part's last stage, the fewest."""
    most_GS: IntArray
    optimizer_G: FloatArray
    lightest_G: FloatArray
    """The cheapest layer of any class on any stage."""

    def take(self, which: IntArray) -> _Parts:
        picked: dict[str, Any] = {}
        for name in self.__slots__:
            value = getattr(self, name)
            if isinstance(value, np.ndarray):
                picked[name] = value[which]
        return replace(self, **picked)


def _cut(points: Points, pool_GJ: IntArray) -> tuple[IntArray, IntArray]:
    """First stage and number of stages of every part; empty parts have none."""
    count, pp = pool_GJ.shape
    if pp <= FINE:
        return np.tile(np.arange(pp), (count, 1)), np.ones((count, pp), np.int64)
    # runs of one pool between the first and the last stage
    inner = pool_GJ[:, 1:-1]
    change = np.concatenate([np.zeros((count, 1), np.int64), np.cumsum(inner[:, 1:] != inner[:, :-1], axis=1)], axis=1)
    runs = int(change.max()) + 1
    length_GW = (change[:, :, None] == np.arange(runs)).sum(axis=1)
    piece_GWQ = (length_GW[:, :, None] + np.arange(PIECES)) // PIECES
    one = np.ones((count, 1), np.int64)
    number_GS = np.concatenate([one, piece_GWQ.reshape(count, -1), one], axis=1)
    return np.cumsum(number_GS, axis=1) - number_GS, number_GS


def _parts(problem: Problem, points: Points) -> _Parts:
    tables, model, options = problem.tables, problem.job.model, problem.space.options
    heavy, layers = heavy_class(problem)
    pool_GJ, place_GJ = stage_pools(points, problem.space.orders)
    send_GJ = sends_of(points, pool_GJ, place_GJ, problem.sends, options)
    pp = pool_GJ.shape[1]
    begin, number = _cut(points, pool_GJ)
    end = np.minimum(begin + np.maximum(number, 1) - 1, pp - 1)
    at = np.minimum(begin, pp - 1)
    pool_GS = np.take_along_axis(pool_GJ, at, axis=1)
    k = points.option_G[:, None]
    first, last = at == 0, end == pp - 1

    def pick(values: list[FloatArray]) -> FloatArray:
        return np.asarray(np.stack(values)[pool_GS, k])

    mtp, menu = model.mtp_layers, len(tables[0].menu)
    transient = np.stack([pick([t.transient_RCK[r, heavy] for t in tables]) for r in range(menu)], axis=2)
    transient[:, :, -1] = np.minimum(transient[:, :, -1], transient[:, :, 0])
    vpp = points.vpp_G[:, None]
    microbatches = problem.microbatches_K[points.option_G].astype(np.float64)
    group = np.full(len(points), problem.job.training.microbatch_group_size or pp)
    fewest, most = pp - 1 - end, pp - 1 - at
    held = np.where(vpp == 1, fewest + 1, 2 * fewest + (vpp - 1) * group[:, None] + 1)
    held = np.minimum(held, microbatches[:, None] * vpp) / vpp
    act = np.stack([pick([t.activation_RCK[r, heavy] for t in tables]) for r in range(menu)], axis=2)
    act = held[:, :, None] * act

    def rank_bytes(dense: list[FloatArray], expert: list[FloatArray] | None = None) -> FloatArray:
        sides = zip(tables, dense, expert or [np.zeros(len(options))] * len(tables), strict=True)
        return pick(
            [
                (t.weight_bytes + t.grad_bytes) * (d + e)
                + d * t.dense_optimizer_bytes_K
                + e * t.expert_optimizer_bytes_K
                for t, d, e in sides
            ]
        )

    shared = first & last & model.tied_embeddings
    edges = first * rank_bytes([t.embedding_params_K for t in tables])
    edges = edges + last * ~shared * rank_bytes([t.head_params_K for t in tables])
    limit = np.asarray([t.memory_limit_bytes for t in tables])[pool_GS] - pick([t.workspace_bytes_K for t in tables])
    once = last * pick([t.head_activation_K + mtp * t.mtp_activation_K for t in tables])
    # chunks differ by one layer and the fuller hold less: n layers weigh at least like n - (vpp - 1) even ones
    room = (limit - edges - once)[:, :, None] - transient + act * (vpp[:, :, None] - 1)
    forbidden = ~np.asarray(problem.allowed)
    if forbidden[0] and not forbidden[-1]:
        forbidden = np.concatenate([[False], forbidden[1:]])  # recomputing every layer in full stays possible
    room[:, :, forbidden] = -np.inf
    inside = np.minimum(send_GJ[:, :-1], np.inf) if pp > 1 else np.zeros((len(points), 0))
    right_GJ = np.concatenate([inside, np.zeros((len(points), 1))], axis=1)
    left_GJ = np.concatenate([np.zeros((len(points), 1)), inside], axis=1)
    least_near = np.minimum(problem.sends.near_PK, problem.sends.far_PK)[pool_GS, k]
    single = number == 1
    right = np.where(single, np.take_along_axis(right_GJ, at, axis=1), least_near)
    left = np.where(single, np.take_along_axis(left_GJ, at, axis=1), least_near)
    before = np.take_along_axis(np.cumsum(2.0 * right_GJ, axis=1) - 2.0 * right_GJ, at, axis=1)
    counts = problem.prefix_CN[:, -1:]
    params = [
        (counts * t.dense_params_CK).sum(axis=0) * t.optimizer_s_K
        + (counts * t.expert_params_CK).sum(axis=0) * t.expert_optimizer_s_K
        for t in tables
    ]
    return _Parts(
        layers=layers,
        pp=pp,
        microbatches_G=microbatches,
        vpp_G=points.vpp_G,
        group_G=group,
        begin_GS=begin,
        count_GS=number,
        forward_GS=pick([t.forward_CK[heavy] for t in tables]),
        backward_GS=pick([t.backward_CK[heavy] for t in tables]),
        base_forward_GS=first * pick([t.embedding_forward_K for t in tables])
        + last * pick([t.head_forward_K + mtp * t.mtp_forward_K for t in tables]),
        base_backward_GS=first * pick([t.embedding_backward_K for t in tables])
        + last * pick([t.head_backward_K + mtp * t.mtp_backward_K for t in tables]),
        extra_GSR=np.stack([pick([t.recompute_RCK[r, heavy] for t in tables]) for r in range(menu)], axis=2),
        static_GS=rank_bytes([t.dense_params_CK[heavy] for t in tables], [t.expert_params_CK[heavy] for t in tables]),
        act_GSR=act,
        room_GSR=room,
        right_GS=right,
        left_GS=left,
        before_GS=before,
        sends_G=inside.sum(axis=1),
        wrap_G=send_GJ[:, -1],
        fewest_GS=fewest,
        most_GS=most,
        optimizer_G=pick(params).min(axis=1) / pp,
        lightest_G=pick([(t.forward_CK + t.backward_CK).min(axis=0) for t in tables]).min(axis=1),
    )


def counts_suffice(
    problem: Problem, option_G: IntArray, stages_GP: IntArray, vpp_G: IntArray, step_s: float
) -> NDArray[np.bool_]:
    """[G] could stages in such numbers hold the model within ``step_s``, in any order of pools?

    Every pool is taken to stand last, where a stage holds the fewest microbatches (vpp 1 holds no more
    than any other); pipeline fill, embedding and head are left out.
    """
    pp_G = stages_GP.sum(axis=1)
    group_G = np.full(len(pp_G), problem.job.training.microbatch_group_size or 0)
    group_G = np.where(group_G > 0, group_G, pp_G)
    heavy, layers = heavy_class(problem)
    microbatches = problem.microbatches_K[option_G].astype(np.float64)
    cap = step_s / microbatches * (1 + EPS)
    held_G = np.zeros(len(option_G))
    for p, t in enumerate(problem.tables):
        k = option_G
        time = (t.forward_CK[heavy] + t.backward_CK[heavy])[k]
        dense, expert = t.dense_params_CK[heavy], t.expert_params_CK[heavy]
        static = (t.weight_bytes + t.grad_bytes) * (dense + expert)
        static = (static + dense * t.dense_optimizer_bytes_K + expert * t.expert_optimizer_bytes_K)[k]
        room = t.memory_limit_bytes - t.workspace_bytes_K[k]
        behind = np.zeros(len(k))
        for piece in range(PIECES):
            number = (stages_GP[:, p] + piece) // PIECES
            chunks = np.where(vpp_G == 1, behind + 1, 2 * behind + (vpp_G - 1) * group_G + 1)
            flight = np.minimum(chunks, microbatches * vpp_G) / vpp_G
            most = np.zeros(len(k))
            kept = flight * t.activation_RCK[0, heavy, k]
            for r in range(len(t.menu)):
                if not problem.allowed[r] and r < len(t.menu) - 1:
                    continue
                extra, act = t.recompute_RCK[r, heavy, k], flight * t.activation_RCK[r, heavy, k]
                transient = t.transient_RCK[r, heavy, k]
                if r < len(t.menu) - 1:
                    free = room - transient + act * (vpp_G - 1)  # chunks may be uneven, see ``_parts``
                    fits = np.minimum(free / (static + act), cap / (time + extra))
                else:  # see ``_reach``
                    free = room - np.minimum(transient, t.transient_RCK[0, heavy, k]) + kept * (vpp_G - 1)
                    saved = np.maximum(kept - act, 1e-30)
                    slow = (cap + extra * free / saved) / (time + extra * (static + kept) / saved)
                    fits = np.minimum(np.minimum(free / (static + act), cap / time), slow)
                most = np.maximum(most, np.floor(fits * (1 + EPS)))
            held_G += number * most
            behind = behind + number
    return np.asarray(held_G >= layers)


def _chain_bound(problem: Problem, points: Points, a: _Parts) -> FloatArray:
    """[G] bound of interleaved schedules from transfers that stand in a row; 0 without virtual stages.

    The first microbatch of a group of g passes all chunks before the first of the next group enters:
    between its first and last chunk on stage 0 lie vpp-1 rounds through all stages and links, M/g
    times; one backward pass follows. The same holds for the backward passes, after one forward pass.
    """
    links = a.sends_G + a.wrap_G
    forward, backward = a.forward_GS.min(axis=1), a.backward_GS.min(axis=1)
    layers, vpp = float(a.layers), a.vpp_G.astype(np.float64)
    rounds = np.floor(a.microbatches_G / a.group_G)
    others = problem.job.model.num_layers - a.layers  # of lighter classes: they may fill the last chunks
    up = np.maximum(0.0, layers - (layers + others + a.pp * (vpp - 1)) / vpp) * forward
    down = np.maximum(0.0, layers - (layers + others) / vpp) * backward
    forth = rounds * ((vpp - 1) * links + up) + layers * backward + (vpp - 1) * links
    back = layers * forward + (vpp - 1) * links + rounds * ((vpp - 1) * links + down)
    return np.where(a.vpp_G > 1, np.maximum(forth, back), 0.0)


def _reach(a: _Parts, step_G: FloatArray) -> FloatArray:
    """[G, S] the most layers (of the heavy class) of one stage of each part within a step."""
    time = ((step_G - a.optimizer_G) * (1 + EPS))[:, None]
    microbatches = a.microbatches_G[:, None]
    blocking = a.vpp_G[:, None] == 1
    per_layer = a.forward_GS + a.backward_GS
    base = a.base_forward_GS + a.base_backward_GS
    position = a.pp - 1 - a.most_GS
    # every stage before this one holds a layer in its first chunk, the first one the embedding too
    embedding = np.where(position > 0, base[:, :1], 0.0)
    prefix = position * a.lightest_G[:, None] + a.before_GS + embedding
    held = np.where(blocking, blocked_s(a.fewest_GS, a.right_GS, a.left_GS, microbatches), 0.0)
    cap_busy = time - prefix - held
    least = per_layer.min(axis=1, keepdims=True)
    ends = base[:, :1] + np.where(a.pp > 1, base[:, -1:], 0.0)
    whole = a.layers * least + ends + 2.0 * a.sends_G[:, None]
    cap_trip = time - whole - (microbatches - 1) * (a.right_GS + a.left_GS)
    lost = np.minimum(a.most_GS, microbatches - 1)
    trip_base = (microbatches - 1) * base - lost * a.base_forward_GS
    falling = lost * a.forward_GS
    use_trip = blocking & ((microbatches - 1) * per_layer > falling)
    layers = np.zeros_like(base)
    menu = a.extra_GSR.shape[2]
    for r in range(menu):
        extra, act, room = a.extra_GSR[:, :, r], a.act_GSR[:, :, r], a.room_GSR[:, :, r]
        fits = room / (a.static_GS + act) * (1 + EPS)
        if r < menu - 1:
            busy = (cap_busy - microbatches * base) / (microbatches * (per_layer + extra))
            trip = (cap_trip - trip_base) / ((microbatches - 1) * (per_layer + extra) - falling)
        else:
            # k >= alpha n - beta of n layers must be recomputed for the rest to fit
            saved = np.maximum(a.act_GSR[:, :, 0] - act, 1e-30)
            slope = extra * (a.static_GS + a.act_GSR[:, :, 0]) / saved
            relief = extra * room / saved
            busy = (cap_busy - microbatches * (base - relief)) / (microbatches * (per_layer + slope))
            trip = (cap_trip - trip_base + (microbatches - 1) * relief) / (
                (microbatches - 1) * (per_layer + slope) - falling
            )
            # below the point where recomputation starts the plain time holds
            busy = np.minimum(busy, (cap_busy - microbatches * base) / (microbatches * per_layer))
        most = np.minimum(np.minimum(busy, np.where(use_trip, trip, np.inf)), fits)
        layers = np.maximum(layers, np.floor(most * (1 + EPS)))
    return np.minimum(np.where(np.isfinite(layers), layers, 0.0), a.layers)
