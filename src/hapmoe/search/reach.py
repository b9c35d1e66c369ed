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
from hapmoe.search.bounds import EPS, blocked_s, heavy_class, optimizer_s, tails_s
from hapmoe.search.points import Points, sends_of, stage_pools
from hapmoe.search.problem import Problem

__all__ = ["point_bounds"]

CUTS = ((8, 1), (16, 4))
"""Up to so many stages every stage is a part of its own, and how many parts per pool there are beyond that, first and
last stage apart: at first, and for what that leaves open. Then every stage is one."""
AGAIN = 2
"""How often what the stages can hold is made smaller by what the others must hold."""
HALVINGS, HALVINGS_BLIND = 6, 9
"""Steps of the bisection below a ceiling, and of that of ratios without one."""
TOGETHER = 2048
"""Grid points looked at together: what they take in memory."""


def point_bounds(
    problem: Problem, points: Points, floor_G: FloatArray, ceiling: float
) -> tuple[FloatArray, list[IntArray]]:
    """[G] lower bound of each grid point with its order, vpp and memory; infinite where nothing fits.

    Also, per point, the most layers of each of its stages that a step of ``ceiling`` allows.
    """
    bound_G = np.zeros(len(points))
    high: list[IntArray] = []
    for begin in range(0, len(points), TOGETHER):
        some = slice(begin, begin + TOGETHER)
        which, option = np.unique(points.option_G[some], return_inverse=True)
        part = Points(option.ravel(), points.stages_GP[some], points.order_G[some], points.vpp_G[some])
        bound_G[some], reached = _finer(problem.take(which), part, floor_G[some], ceiling)
        high += reached
    return bound_G, high


def _finer(problem: Problem, points: Points, floor_G: FloatArray, ceiling: float) -> tuple[FloatArray, list[IntArray]]:
    """The same in parts that become finer as long as a point stays open, down to single stages."""
    pp_G, (fine, pieces) = points.pp_G, CUTS[0]
    bound_G, high = _bounds_of(problem, points, floor_G, ceiling, fine, pieces)
    longest = int(pp_G.max())
    for finer, pieces in (*CUTS[1:], (longest, 1)):
        again = np.flatnonzero((pp_G > fine) & (bound_G < ceiling))
        if len(again):
            bound_G[again], better = _bounds_of(problem, points.take(again), bound_G[again], ceiling, finer, pieces)
            for at, row in zip(again.tolist(), better, strict=True):
                high[at] = row
        fine = max(fine, finer)
    return bound_G, high


def _bounds_of(
    problem: Problem, points: Points, floor_G: FloatArray, ceiling: float, fine: int, pieces: int
) -> tuple[FloatArray, list[IntArray]]:
    parts = _parts(problem, points, fine, pieces)
    low = np.maximum(floor_G, _chain_bound(problem, points, parts))
    limited = np.isfinite(ceiling)
    most = ceiling if limited else float(max(1.0, low.max())) * 64.0
    reach = _reach(parts, np.full(len(low), most))
    hopeless = ~_enough(parts, reach)
    bound = np.where(hopeless, ceiling if limited else np.inf, np.minimum(low, most))
    hopeful = np.flatnonzero(~hopeless & (points.pp_G <= fine))  # the others are looked at again
    if len(hopeful):
        some = parts.take(hopeful)
        low, high = np.maximum(bound[hopeful], 1e-9 * most), np.full(len(hopeful), most)
        for _ in range(HALVINGS if limited else HALVINGS_BLIND):
            middle = 0.5 * (low + high) if limited else np.sqrt(low * high)
            enough = _enough(some, _reach(some, middle))
            high, low = np.where(enough, middle, high), np.where(enough, low, middle)
        bound[hopeful] = low
    most_GS = np.where(parts.count_GS > 0, reach, 0).astype(np.int64) + parts.others_GS
    return bound, [np.repeat(row, many) for row, many in zip(most_GS, parts.count_GS, strict=True)]


@dataclass(frozen=True, slots=True)
class _Parts:
    """What a number of layers of the heavy class costs on the stages of each part. [G, S] or [R, G, S]."""

    layers: int
    pp_G1: IntArray
    """[G, 1]"""
    microbatches_G: FloatArray
    vpp_G: IntArray
    group_G: IntArray
    begin_GS: IntArray
    count_GS: IntArray
    others_GS: IntArray
    """Layers of other classes that a stage may hold on top, those that stand where it can."""
    forward_GS: FloatArray
    backward_GS: FloatArray
    fits_RGS: FloatArray
    """Layers that memory allows with each menu entry."""
    busy_RGS: FloatArray
    own_RGS: FloatArray
    trip_RGS: FloatArray
    """Layers per second of B1, of B1 until the stage's own optimizer step, and of B2 that is left for them; of
    the last entry ("full") those beyond what fits without, with the next two seconds more."""
    busy_relief_GS: FloatArray
    trip_relief_GS: FloatArray
    use_trip_GS: NDArray[np.bool_]
    busy_other_GS: FloatArray
    own_other_GS: FloatArray
    trip_other_GS: FloatArray
    """Seconds of these that do not depend on layers: transfers, embedding, head and loss."""
    sends_G: FloatArray
    """All transfers of one microbatch, one way, without the wrap."""
    wrap_G: FloatArray
    most_GS: IntArray
    """Warm-up forwards of the part's first stage, the most."""
    optimizer_G: FloatArray
    ahead_GS: FloatArray
    lead_GS: FloatArray
    """Seconds of one layer, the cheapest of any class and stage, for every stage ahead of a part: there and back,
    and there only."""
    ahead_layer_GS: FloatArray
    lead_layer_GS: FloatArray
    """The same of one layer that the first chunks ahead of a part hold."""
    by_speed_GS: IntArray
    """Parts, those with the fastest layers first."""

    def take(self, which: IntArray) -> _Parts:
        picked: dict[str, Any] = {}
        for name in self.__slots__:
            value = getattr(self, name)
            if isinstance(value, np.ndarray):
                picked[name] = value[:, which] if name.endswith("_RGS") else value[which]
        return replace(self, **picked)


def _cut(pool_GJ: IntArray, fine: int, pieces: int) -> tuple[IntArray, IntArray]:
    """First stage and number of stages of every part; empty parts have none."""
    count, pp = pool_GJ.shape
    if pp <= fine:
        return np.tile(np.arange(pp), (count, 1)), np.ones((count, pp), np.int64)
    # runs of one pool between the first and the last stage
    inner = pool_GJ[:, 1:-1]
    change = np.concatenate([np.zeros((count, 1), np.int64), np.cumsum(inner[:, 1:] != inner[:, :-1], axis=1)], axis=1)
    runs = int(change.max()) + 1
    length_GW = (change[:, :, None] == np.arange(runs)).sum(axis=1)
    piece_GWQ = (length_GW[:, :, None] + np.arange(pieces)) // pieces
    one = np.ones((count, 1), np.int64)
    number_GS = np.concatenate([one, piece_GWQ.reshape(count, -1), one], axis=1)
    return np.cumsum(number_GS, axis=1) - number_GS, number_GS


@dataclass(frozen=True, slots=True)
class _Places:
    """Where the parts stand; shorter pipelines are filled up with empty parts at the end."""

    begin_GS: IntArray
    count_GS: IntArray
    pool_GS: IntArray
    right_GS: FloatArray
    left_GS: FloatArray
    before_GS: FloatArray
    sends_G: FloatArray
    wrap_G: FloatArray


def _places(problem: Problem, points: Points, fine: int, pieces: int) -> _Places:
    """The parts of every point, found for all points of one number of stages at once."""
    pp_G = points.pp_G
    least_near = np.minimum(problem.sends.near_PK, problem.sends.far_PK)
    found: list[tuple[IntArray, list[NDArray[Any]]]] = []
    for pp in sorted(set(pp_G.tolist())):
        of = np.flatnonzero(pp_G == pp)
        mine = points.take(of)
        pool_GJ, place_GJ = stage_pools(mine, problem.space.orders)
        send_GJ = sends_of(mine, pool_GJ, place_GJ, problem.sends)
        begin, number = _cut(pool_GJ, fine, pieces)
        at = np.minimum(begin, pp - 1)
        pool_GS = np.take_along_axis(pool_GJ, at, axis=1)
        zero = np.zeros((len(of), 1))
        right_GJ = np.concatenate([send_GJ[:, :-1], zero], axis=1)
        left_GJ = np.concatenate([zero, send_GJ[:, :-1]], axis=1)
        near = least_near[pool_GS, mine.option_G[:, None]]
        right = np.where(number == 1, np.take_along_axis(right_GJ, at, axis=1), near)
        left = np.where(number == 1, np.take_along_axis(left_GJ, at, axis=1), near)
        before = np.take_along_axis(np.cumsum(2.0 * right_GJ, axis=1) - 2.0 * right_GJ, at, axis=1)
        found.append((of, [begin, number, pool_GS, right, left, before, right_GJ.sum(axis=1), send_GJ[:, -1]]))
    width = max(columns[0].shape[1] for _, columns in found)
    joined: list[NDArray[Any]] = []
    for name, first in zip(_Places.__slots__, found[0][1], strict=True):
        shape = (len(pp_G), width) if first.ndim == 2 else (len(pp_G),)
        joined.append(np.zeros(shape, first.dtype))
        for of, columns in found:
            value = columns[_Places.__slots__.index(name)]
            if first.ndim == 1:
                joined[-1][of] = value
                continue
            many = value.shape[1]
            joined[-1][of, :many] = value
            # empty parts stand where the last stage does
            joined[-1][of, many:] = 0 if name == "count_GS" else value[:, -1:] + (1 if name == "begin_GS" else 0)
    return _Places(*joined)


def _parts(problem: Problem, points: Points, fine: int, pieces: int) -> _Parts:
    tables, model, options = problem.tables, problem.job.model, problem.space.options
    heavy, layers = heavy_class(problem)
    places = _places(problem, points, fine, pieces)
    begin, number, pool_GS = places.begin_GS, places.count_GS, places.pool_GS
    pp_G1 = points.pp_G[:, None]
    end = np.minimum(begin + np.maximum(number, 1) - 1, pp_G1 - 1)
    at = np.minimum(begin, pp_G1 - 1)
    k = points.option_G[:, None]
    first, last = at == 0, end == pp_G1 - 1
    # every stage ahead of one and behind it has a layer at least
    other_N = np.arange(model.num_layers + 1) - problem.prefix_CN[heavy]
    behind = np.maximum(model.num_layers - (pp_G1 - 1 - end), at)

    def pick(values: list[FloatArray]) -> FloatArray:
        return np.asarray(np.stack(values)[pool_GS, k])

    def pick_menu(values: list[FloatArray]) -> FloatArray:
        return np.asarray(np.stack(values, axis=1)[:, pool_GS, k])

    mtp = model.mtp_layers
    transient = pick_menu([t.transient_RCK[:, heavy] for t in tables])
    transient[-1] = np.minimum(transient[-1], transient[0])
    vpp = points.vpp_G[:, None]
    microbatches = problem.microbatches_K[points.option_G].astype(np.float64)
    rounds = microbatches[:, None]
    group = np.full(len(points), problem.job.training.microbatch_group_size or 0)
    group = np.where(group > 0, group, points.pp_G)
    fewest, most = pp_G1 - 1 - end, pp_G1 - 1 - at
    held = np.where(vpp == 1, fewest + 1, 2 * fewest + (vpp - 1) * group[:, None] + 1)
    held = np.minimum(held, rounds * vpp) / vpp
    act = held * pick_menu([t.activation_RCK[:, heavy] for t in tables])

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
    limit = pick([t.memory_limit_bytes_K - t.workspace_bytes_K for t in tables])
    once = last * pick([t.head_activation_K + mtp * t.mtp_activation_K for t in tables])
    # chunks differ by one layer and the fuller hold less: n layers weigh at least like n - (vpp - 1) even ones
    room = (limit - edges - once) - transient + act * (vpp - 1)
    forbidden = ~np.asarray(problem.allowed)
    if forbidden[0] and not forbidden[-1]:
        forbidden = np.concatenate([[False], forbidden[1:]])  # recomputing every layer in full stays possible
    room[forbidden] = -np.inf
    static = rank_bytes([t.dense_params_CK[heavy] for t in tables], [t.expert_params_CK[heavy] for t in tables])
    extra = pick_menu([t.recompute_RCK[:, heavy] for t in tables])
    forward, backward = (pick([getattr(t, name)[heavy] for t in tables]) for name in ("forward_CK", "backward_CK"))
    light = pick([(t.forward_CK + t.backward_CK).min(axis=0) for t in tables])
    light_forward = pick([t.forward_CK.min(axis=0) for t in tables])
    per_layer = forward + backward
    # k >= alpha n - beta of n layers must be recomputed in full for the rest to fit
    saved = np.maximum(act[0] - act[-1], 1e-30)
    relief = np.nan_to_num(extra[-1] * room[-1] / saved, nan=-np.inf, posinf=np.inf, neginf=-np.inf)
    fits = room / (static + act) * (1 + EPS)
    extra[-1] *= (static + act[0]) / saved
    layer_s = per_layer + extra
    early = np.minimum(most, rounds - 1)
    falling = early * forward
    base_forward = first * pick([t.embedding_forward_K for t in tables])
    base_forward += last * pick([t.head_forward_K + mtp * t.mtp_forward_K for t in tables])
    base = first * pick([t.embedding_backward_K for t in tables])
    base += last * pick([t.head_backward_K + mtp * t.mtp_backward_K for t in tables]) + base_forward
    # every stage before this one holds a layer in its first chunk, the first one the embedding too
    embedding = np.where(most < pp_G1 - 1, base[:, :1], 0.0)
    held_s = np.where(vpp == 1, blocked_s(fewest, places.right_GS, places.left_GS, rounds), 0.0)
    ends = base[:, :1] + np.where(pp_G1 > 1, base[:, -1:], 0.0) + 2.0 * places.sends_G[:, None]
    trip_other = ends + (rounds - 1) * (places.right_GS + places.left_GS + base) - early * base_forward
    # the same without the way back, and with what sticks out behind the stage's last backward pass; the tails of
    # embedding and head are at least what one pass of theirs might hide of those of layers (``tails_s``)
    tails = [tails_s(problem, t) for t in tables]
    sync, after = pick([sync[heavy] for sync, _ in tails]), pick([after[heavy] for _, after in tails])
    embedding_forward = np.where(most < pp_G1 - 1, base_forward[:, :1], 0.0)
    own_other = 0.5 * places.before_GS + embedding_forward + held_s + (rounds - 1) * base
    return _Parts(
        layers=layers,
        pp_G1=pp_G1,
        microbatches_G=microbatches,
        vpp_G=points.vpp_G,
        group_G=group,
        begin_GS=begin,
        count_GS=number,
        others_GS=np.where(number > 0, other_N[behind] - other_N[at], 0),
        forward_GS=forward,
        backward_GS=backward,
        by_speed_GS=np.argsort(np.where(number > 0, per_layer, np.inf), axis=1, kind="stable"),
        fits_RGS=fits,
        busy_RGS=1.0 / (rounds * layer_s),
        own_RGS=1.0 / (rounds * layer_s + sync + after),
        trip_RGS=1.0 / ((rounds - 1) * layer_s - falling),
        busy_relief_GS=rounds * relief,
        trip_relief_GS=(rounds - 1) * relief,
        use_trip_GS=(vpp == 1) & ((rounds - 1) * per_layer > falling),
        busy_other_GS=places.before_GS + embedding + held_s + rounds * base,
        own_other_GS=own_other,
        trip_other_GS=trip_other,
        sends_G=places.sends_G,
        wrap_G=places.wrap_G,
        most_GS=most,
        optimizer_G=pick([optimizer_s(problem, p) for p in range(len(tables))]).min(axis=1) / points.pp_G
        + min(float(t.step_s_K.min()) for t in tables),
        ahead_GS=at * light.min(axis=1, keepdims=True),
        lead_GS=at * light_forward.min(axis=1, keepdims=True),
        ahead_layer_GS=_cheapest_ahead(np.where(vpp > 1, light, per_layer), number),
        lead_layer_GS=_cheapest_ahead(np.where(vpp > 1, light_forward, forward), number),
    )


def _cheapest_ahead(seconds_GS: FloatArray, count_GS: IntArray) -> FloatArray:
    """[G, S] the least of the parts ahead of each; 0 where there are none. A first chunk may be of other classes
    than the rest of its stage."""
    used = np.where(count_GS > 0, seconds_GS, np.inf)
    ahead = np.concatenate([np.full((len(used), 1), np.inf), used[:, :-1]], axis=1)
    least = np.minimum.accumulate(ahead, axis=1)
    return np.where(np.isfinite(least), least, 0.0)


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
    up = np.maximum(0.0, layers - (layers + others + a.pp_G1[:, 0] * (vpp - 1)) / vpp) * forward
    down = np.maximum(0.0, layers - (layers + others) / vpp) * backward
    forth = rounds * ((vpp - 1) * links + up) + layers * backward + (vpp - 1) * links
    back = layers * forward + (vpp - 1) * links + rounds * ((vpp - 1) * links + down)
    return np.where(a.vpp_G > 1, np.maximum(forth, back), 0.0)


def _enough(a: _Parts, reach_GS: FloatArray) -> NDArray[np.bool_]:
    """[G] do the stages hold the model, and each a layer in every virtual stage?"""
    filled = (reach_GS + a.others_GS >= a.vpp_G[:, None]) | (a.count_GS == 0)
    return np.asarray(((reach_GS * a.count_GS).sum(axis=1) >= a.layers) & filled.all(axis=1))


def _reach(a: _Parts, step_G: FloatArray) -> FloatArray:
    """[G, S] the most layers (of the heavy class) of one stage of each part within a step.

    What the stages can hold at the most says what the others must hold at the least, and with it how
    long the stages ahead of a part take, and all together: a first answer is made smaller with these.
    """
    none = np.zeros_like(a.forward_GS)
    whole = a.layers * (a.forward_GS + a.backward_GS).min(axis=1, keepdims=True)
    layers = _holds(a, step_G, none, whole)
    for _ in range(AGAIN):
        layers = _holds(a, step_G, *_shares(a, layers, whole))
    return layers


def _shares(a: _Parts, layers_GS: FloatArray, whole_G: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Least layers in the (first chunks of) stages ahead of each part, and least seconds of all layers (``whole_G``:
    as known already), if no stage holds more than ``layers_GS``."""
    per_layer = a.forward_GS + a.backward_GS
    held = layers_GS * a.count_GS
    before = np.cumsum(held, axis=1) - held
    # at least so many layers of the heavy class stand ahead of a part: what it and those behind it cannot hold
    needed = a.layers - (held.sum(axis=1, keepdims=True) - before)
    used = np.where(a.count_GS > 0, per_layer, np.inf)
    position, vpp = a.pp_G1 - 1 - a.most_GS, a.vpp_G[:, None]
    first = (needed - position * (vpp - 1)) / vpp  # chunks differ by one layer, the first is the smallest
    order = a.by_speed_GS
    fast, many = np.take_along_axis(used, order, axis=1), np.take_along_axis(held, order, axis=1)
    share = np.clip(a.layers - (np.cumsum(many, axis=1) - many), 0.0, many)
    whole = (share * np.where(share > 0, fast, 0.0)).sum(axis=1, keepdims=True)
    return np.maximum(first, 0.0), np.maximum(whole_G, whole)


def _holds(a: _Parts, step_G: FloatArray, first_GS: FloatArray, whole_G: FloatArray) -> FloatArray:
    """[G, S] the most layers of one stage, if first chunks ahead hold so many layers and all take no less than is
    given."""
    step = (step_G * (1 + EPS))[:, None]
    time = step - a.optimizer_G[:, None]
    busy = time - np.maximum(first_GS * a.ahead_layer_GS, a.ahead_GS) - a.busy_other_GS
    own = step - np.maximum(first_GS * a.lead_layer_GS, a.lead_GS) - a.own_other_GS
    trip = time - whole_G - a.trip_other_GS
    most = np.minimum(np.minimum(a.fits_RGS, busy * a.busy_RGS), own * a.own_RGS)
    full = np.minimum(a.fits_RGS[-1], (busy + a.busy_relief_GS) * a.busy_RGS[-1])
    full = np.minimum(full, (own + a.busy_relief_GS) * a.own_RGS[-1])
    # below the point where full recomputation starts the plain time holds
    full = np.minimum(full, np.minimum(busy * a.busy_RGS[0], own * a.own_RGS[0]))
    by_trip = trip * a.trip_RGS
    by_trip[-1] = (trip + a.trip_relief_GS) * a.trip_RGS[-1]
    most[-1] = full
    most = np.where(a.use_trip_GS, np.minimum(most, by_trip), most)
    layers = np.floor(most.max(axis=0) * (1 + EPS))
    return np.clip(np.where(np.isfinite(layers), layers, 0.0), 0.0, a.layers)
