"""Could stages in such numbers hold the model at all within a given step, in any order of pools?

Array legend: K options, G options with stage counts, P pools.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hapmoe.options import FloatArray, IntArray, StageTable
from hapmoe.search.bounds import EPS, heavy_class, tails_s
from hapmoe.search.problem import Problem

__all__ = ["capacity_bounds", "counts_suffice", "pool_holds"]

PIECES = 4
"""Parts of the stages of a pool."""
HALVINGS = 8
"""Steps of the bisection: to within 1/256 of the ratio of its ends."""


def capacity_bounds(problem: Problem, option_K: IntArray, low_K: FloatArray, ceiling: float) -> FloatArray:
    """[K] bound of options over all their placements, between ``low_K`` (known bounds) and ``ceiling``:
    the largest step found in which not even all their stages could hold the model.

    More stages never hold less here, so that all stages of all pools stand for every number of them.
    """
    stages_KP = np.minimum(problem.space.most_KP[option_K], problem.job.model.num_layers)
    stages = _Stages.of(problem, option_K, stages_KP, np.zeros(len(option_K), np.int64))
    high = ceiling if np.isfinite(ceiling) else float(low_K.max(initial=1.0)) * 64.0
    enough = stages.suffice(np.full(len(option_K), high))
    low = np.where(enough, low_K, np.maximum(low_K, high))
    some = np.flatnonzero(enough & (low_K < high))
    if not len(some):
        return low
    stages, low_S, high_S = stages.take(some), low[some], np.full(len(some), high)
    for _ in range(HALVINGS):
        middle = np.sqrt(low_S * high_S)
        enough = stages.suffice(middle)
        high_S, low_S = np.where(enough, middle, high_S), np.where(enough, low_S, middle)
    low[some] = low_S
    return low


def counts_suffice(
    problem: Problem, option_G: IntArray, stages_GP: IntArray, vpp_G: IntArray, step_s: float | FloatArray
) -> NDArray[np.bool_]:
    """[G] could stages in such numbers hold the model within ``step_s``, in any order of pools?

    ``vpp_G``: virtual stages; 0 stands for any number of them. Every pool is taken to stand first for
    the stages that are waited for, and last for the microbatches in flight (vpp 1 holds no more than any
    other); transfers, embedding and head are left out.
    """
    step_G = np.broadcast_to(np.asarray(step_s, dtype=np.float64), (len(option_G),))
    return _Stages.of(problem, option_G, stages_GP, vpp_G).suffice(step_G)


@dataclass(frozen=True, slots=True)
class _Stages:
    """Stages in some numbers, to be asked what they hold within one step after the other."""

    layers: int
    pools: tuple[_Pool, ...]
    pp_G: IntArray
    flat_G: NDArray[np.bool_]
    whole_G: FloatArray
    """All layers on the fastest pool."""
    layer_GP: FloatArray
    """Seconds of a layer on each pool, the fastest first."""
    order_GP: IntArray
    """The pools in that order."""

    @classmethod
    def of(cls, problem: Problem, option_G: IntArray, stages_GP: IntArray, vpp_G: IntArray) -> _Stages:
        which, k = np.unique(option_G, return_inverse=True)
        k = k.ravel()
        tables = [table.take(which) for table in problem.tables]
        layer_GP = np.stack([_layer_s(problem, t)[k] for t in tables], axis=1)
        microbatches_G = problem.microbatches_K[option_G].astype(np.float64)
        _, layers = heavy_class(problem)
        pp_G = stages_GP.sum(axis=1)
        speed_GP = np.where(stages_GP > 0, layer_GP, np.inf)
        order = np.argsort(speed_GP, axis=1, kind="stable")
        pools = (_Pool.of(problem, t, k, stages_GP[:, p], pp_G, vpp_G, microbatches_G) for p, t in enumerate(tables))
        each = np.take_along_axis(layer_GP, order, axis=1)
        return cls(layers, tuple(pools), pp_G, vpp_G == 1, layers * speed_GP.min(axis=1), each, order)

    def take(self, which: IntArray) -> _Stages:
        """Only these."""
        pools = tuple(pool.take(which) for pool in self.pools)
        layer, order = self.layer_GP[which], self.order_GP[which]
        return _Stages(self.layers, pools, self.pp_G[which], self.flat_G[which], self.whole_G[which], layer, order)

    def suffice(self, step_G: FloatArray) -> NDArray[np.bool_]:
        """[G] do they hold the model within such a step?"""
        enough = np.zeros(len(step_G), bool)
        whole_G = self.whole_G
        for last in (False, True):
            held_GP = np.stack([pool.holds(step_G, whole_G, self.flat_G, self.pp_G) for pool in self.pools], axis=1)
            enough = held_GP.sum(axis=1) >= self.layers
            if last or not enough.any():
                break
            # the fastest pools hold as much as they can: so long does one microbatch take there and back
            many = np.take_along_axis(held_GP, self.order_GP, axis=1)
            share = np.clip(self.layers - (np.cumsum(many, axis=1) - many), 0.0, many)
            whole_G = np.maximum(whole_G, (share * self.layer_GP).sum(axis=1))
        return np.asarray(enough)


def pool_holds(problem: Problem, pool: int, option_G: IntArray, stages_G: IntArray, step_s: float) -> FloatArray:
    """[G] the most layers of the heavy class that so many stages of one pool hold within ``step_s``,
    whatever stands beside them, with any number of virtual stages."""
    none, any_vpp = np.zeros(len(option_G)), np.zeros(len(option_G), np.int64)
    microbatches_G = problem.microbatches_K[option_G].astype(np.float64)
    held = _Pool.of(problem, problem.tables[pool], option_G, stages_G, stages_G, any_vpp, microbatches_G)
    return held.holds(np.full(len(option_G), step_s), none, any_vpp == 1, stages_G)


def _layer_s(problem: Problem, table: StageTable) -> FloatArray:
    """[K] seconds of a layer of the heavy class, there and back."""
    heavy, _ = heavy_class(problem)
    seconds: FloatArray = table.forward_CK[heavy] + table.backward_CK[heavy]
    return seconds


@dataclass(frozen=True, slots=True)
class _Pool:
    """What the stages of one pool can hold, in pieces of stages of which each is as lucky as its luckiest.

    Suffix Q: pieces, R: menu entries.
    """

    number_GQ: IntArray
    ahead_GQ: FloatArray
    """Least seconds of the pool's own stages ahead, there and back."""
    lead_GQ: FloatArray
    """The same, there only."""
    fits_RGQ: FloatArray
    slow_RG1: FloatArray
    """Seconds of a layer, there and back, with recomputation; of "full" without."""
    slope_GQ: FloatArray
    """Of "full": seconds of a layer beyond what fits without, and seconds spared for those that do."""
    relief_GQ: FloatArray
    sync_G1: FloatArray
    after_G1: FloatArray
    """Tails of a layer (``bounds.tails_s``)."""
    forward_G1: FloatArray
    microbatches_G1: FloatArray

    @classmethod
    def of(
        cls,
        problem: Problem,
        t: StageTable,
        k: IntArray,
        stages_G: IntArray,
        pp_G: IntArray,
        vpp_G: IntArray,
        microbatches_G: FloatArray,
    ) -> _Pool:
        heavy, _ = heavy_class(problem)
        menu = [r for r in range(len(t.menu)) if problem.allowed[r] or r in (0, len(t.menu) - 1)]
        number = (stages_G[:, None] + np.arange(PIECES)) // PIECES
        behind = np.cumsum(number, axis=1) - number
        vpp = np.maximum(vpp_G, 1)[:, None]
        group = problem.job.training.microbatch_group_size or pp_G[:, None]
        chunks = np.where(vpp == 1, behind + 1, 2 * behind + (vpp - 1) * group + 1)
        flight = np.minimum(chunks, microbatches_G[:, None] * vpp) / vpp
        time = _layer_s(problem, t)[k][:, None]
        dense, expert = t.dense_params_CK[heavy], t.expert_params_CK[heavy]
        static_K = (t.weight_bytes + t.grad_bytes) * (dense + expert)
        static_K = static_K + dense * t.dense_optimizer_bytes_K + expert * t.expert_optimizer_bytes_K
        static = static_K[k][:, None]
        act = flight * t.activation_RCK[menu, heavy][:, k, None]
        extra = t.recompute_RCK[menu, heavy][:, k, None]
        transient = t.transient_RCK[menu, heavy][:, k, None]
        transient[-1] = np.minimum(transient[-1], transient[0])
        # chunks may be uneven, see ``reach``; there also what "full" does
        free = (t.memory_limit_bytes_K - t.workspace_bytes_K)[k][:, None] - transient
        free = free + np.concatenate([act[:-1], act[:1]]) * (vpp - 1)
        saved = np.maximum(act[0] - act[-1], 1e-30)
        slow = time + extra
        slow[-1] = time
        if not problem.allowed[0]:
            slow[0] = np.inf
        light = (t.forward_CK + t.backward_CK).min(axis=0)[k][:, None]
        before = np.maximum(stages_G[:, None] - behind - number, 0)
        sync, after = (tail[heavy, k][:, None] for tail in tails_s(problem, t))
        return cls(
            number_GQ=number,
            ahead_GQ=before * light,
            lead_GQ=before * t.forward_CK.min(axis=0)[k][:, None],
            sync_G1=sync,
            after_G1=after,
            fits_RGQ=free / (static + act),
            slow_RG1=slow,
            slope_GQ=time + extra[-1] * (static + act[0]) / saved,
            relief_GQ=extra[-1] * free[-1] / saved,
            forward_G1=t.forward_CK[heavy, k][:, None],
            microbatches_G1=microbatches_G[:, None],
        )

    def take(self, which: IntArray) -> _Pool:
        """Only these."""
        columns = {name: getattr(self, name) for name in self.__slots__}
        return _Pool(**{n: v[:, which] if n in ("fits_RGQ", "slow_RG1") else v[which] for n, v in columns.items()})

    def holds(self, step_G: FloatArray, whole_G: FloatArray, flat_G: NDArray[np.bool_], pp_G: IntArray) -> FloatArray:
        """[G] layers that the pool can hold within a step of which ``whole_G`` passes there and back."""
        step, many = step_G[:, None] * (1 + EPS), self.microbatches_G1
        passes, steep = many * self.slow_RG1 + self.after_G1, many * self.slope_GQ + self.after_G1
        fits, full = self.fits_RGQ, np.full_like(self.slope_GQ, np.inf)
        # until the way back to the first stage, and until its own gradient reduction
        for ahead, tail in ((self.ahead_GQ, 0.0), (self.lead_GQ, self.sync_G1)):
            fits = np.minimum(fits, (step - ahead) / (passes + tail))
            full = np.minimum(full, (step - ahead + many * self.relief_GQ) / (steep + tail))
        # B2 of a stage: M - 1 times its work and a round trip, less the forwards that it may have done before
        early = np.minimum(pp_G[:, None] - 1, many - 1) * self.forward_G1
        trip = step - whole_G[:, None]
        rest = (many - 1) * self.slow_RG1 - early + self.after_G1
        by_trip = np.where(rest > 0, trip / np.where(rest > 0, rest, 1.0), np.inf)
        steep = (many - 1) * self.slope_GQ - early + self.after_G1
        full_by_trip = (trip + (many - 1) * self.relief_GQ) / np.where(steep > 0, steep, 1.0)
        flat = flat_G[:, None]
        fits = np.where(flat, np.minimum(fits, by_trip), fits)
        full = np.where(flat & (rest[-1] > 0), np.minimum(full, full_by_trip), full)
        fits[-1] = np.minimum(fits[-1], full)
        most = np.floor(np.nan_to_num(fits.max(axis=0), nan=0.0, posinf=0.0, neginf=0.0) * (1 + EPS))
        return np.asarray((self.number_GQ * np.maximum(most, 0.0)).sum(axis=1))
