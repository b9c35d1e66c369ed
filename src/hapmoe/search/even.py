"""The bound of grid points whose stages all hold equally many layers (``--planner uniform``).

Which layers stand on which stage is known then, and so are the times and bytes of each, up to transfers and the
chunks that microbatches in flight are of.

Array legend: G grid points, P pools, R menu entries, C layer classes, K options, O orders of pools.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hapmoe.options import FloatArray, IntArray
from hapmoe.search.bounds import EPS, head_s
from hapmoe.search.points import Points
from hapmoe.search.problem import Problem

__all__ = ["even_bound"]

PLACES = (0, 1, 3, -1)
"""Stages of a pool that the bound looks at, counted from its first; -1: the last."""


def even_bound(problem: Problem, points: Points) -> FloatArray:
    """[G] bound of grid points whose stages all hold equally many layers and recompute the same: B1, B2 or Bv of
    some stages of each pool, which layers stand where is known; transfers left out. Infinite where one does not fit.

    The number of layers must be a multiple of all chunks.
    """
    k, vpp_G1 = points.option_G, points.vpp_G[:, None]
    whole = problem.whole
    light_K = (whole.forward_CK + whole.backward_CK).min(axis=0)
    pp_G1, many_G1 = points.pp_G[:, None], problem.microbatches_K[k][:, None].astype(np.float64)
    each_GP = problem.job.model.num_layers / pp_G1 * light_K[_columns(problem, k)]  # a stage, at the least
    earlier_GPP = _earlier(problem)[points.order_G]
    first_GP = (earlier_GPP * points.stages_GP[:, None, :]).sum(axis=2)
    last_GP = first_GP + points.stages_GP - 1
    before_GP = (earlier_GPP * (points.stages_GP * each_GP)[:, None, :]).sum(axis=2)
    all_G1 = (points.stages_GP * each_GP).sum(axis=1, keepdims=True)
    bound_RG = np.zeros((len(problem.allowed), len(points)))
    for ahead in PLACES:
        at_GP = np.minimum(first_GP + ahead, last_GP) if ahead >= 0 else last_GP
        stage = _Even.of(problem, points, np.maximum(at_GP, 0))
        lead_GP = before_GP + (at_GP - first_GP) * each_GP
        behind_GP = pp_G1 - 1 - at_GP
        step_RGP = lead_GP / vpp_G1 + many_G1 * stage.work_RGP
        trip_RGP = all_G1 - each_GP + stage.work_RGP + (many_G1 - 1) * stage.work_RGP
        trip_RGP = trip_RGP - np.minimum(behind_GP, many_G1 - 1) * stage.forward_GP
        step_RGP = np.where(vpp_G1 == 1, np.maximum(step_RGP, trip_RGP), step_RGP)
        step_RGP = np.where(stage.fits_RGP, step_RGP, np.inf)
        bound_RG = np.maximum(bound_RG, np.where(points.stages_GP > 0, step_RGP, 0.0).max(axis=2))
    bound: FloatArray = bound_RG[list(problem.allowed)].min(axis=0)
    return bound


def _earlier(problem: Problem) -> NDArray[np.bool_]:
    """[O, P, P] does the second pool stand ahead of the first in this order? Not where one of them is not in it."""
    pools = range(len(problem.tables))
    place = [{pool: at for at, pool in enumerate(order)} for order in problem.space.orders]
    return np.asarray([[[0 <= at.get(q, -1) < at.get(p, -1) for q in pools] for p in pools] for at in place])


def _columns(problem: Problem, option_G: IntArray) -> IntArray:
    """[G, P] column of every pool in ``problem.whole``."""
    return problem.column(np.arange(len(problem.tables)), option_G[:, None])


@dataclass(frozen=True, slots=True)
class _Even:
    """What one stage of each pool does if all stages hold as many layers."""

    forward_GP: FloatArray
    work_RGP: FloatArray
    """There and back, with this recomputation."""
    fits_RGP: NDArray[np.bool_]

    @classmethod
    def of(cls, problem: Problem, points: Points, at_GP: IntArray) -> _Even:
        """``at_GP``: which stage of the pipeline."""
        t, column = problem.whole, _columns(problem, points.option_G)
        pp_G1, vpp_G1 = points.pp_G[:, None], points.vpp_G[:, None]
        size_G1 = problem.job.model.num_layers // (pp_G1 * vpp_G1)
        n_CGP = np.zeros((len(problem.prefix_CN), *at_GP.shape))
        for chunk in range(int(points.vpp_G.max(initial=1))):
            start = np.where(chunk < vpp_G1, (chunk * pp_G1 + at_GP) * size_G1, 0)
            n_CGP += problem.prefix_CN[:, np.where(chunk < vpp_G1, start + size_G1, 0)] - problem.prefix_CN[:, start]
        behind_GP = pp_G1 - 1 - at_GP
        group_G1 = problem.job.training.microbatch_group_size or pp_G1
        held_GP = np.where(vpp_G1 == 1, behind_GP + 1, 2 * behind_GP + (vpp_G1 - 1) * group_G1 + 1)
        held_GP = np.minimum(held_GP, problem.microbatches_K[points.option_G][:, None] * vpp_G1) / vpp_G1
        last_GP = behind_GP == 0
        forward_GP = (n_CGP * t.forward_CK[:, column]).sum(axis=0)
        work_GP = forward_GP + (n_CGP * t.backward_CK[:, column]).sum(axis=0)
        work_GP = work_GP + np.where(last_GP, head_s(problem).T.ravel()[column], 0.0)
        static_CK = (t.weight_bytes + t.grad_bytes) * (t.dense_params_CK + t.expert_params_CK)
        static_CK = static_CK + t.dense_params_CK * t.dense_optimizer_bytes_K
        static_CK = static_CK + t.expert_params_CK * t.expert_optimizer_bytes_K
        other_GP = (n_CGP * static_CK[:, column]).sum(axis=0) + t.workspace_bytes_K[column]
        room_GP = t.memory_limit_bytes_K[column] * (1 + EPS) - other_GP
        work, fits = [], []
        for r in range(len(t.menu)):
            kept, transient, again_GP = t.activation_RCK[r], t.transient_RCK[r], n_CGP * t.recompute_RCK[r][:, column]
            if r == len(t.menu) - 1:  # of a block of layers one per chunk at the least
                again_GP = again_GP / size_G1
                kept = np.minimum(kept, t.activation_RCK[0]) if size_G1.max() > 1 else kept
                transient = np.minimum(transient, t.transient_RCK[0])
            work.append(work_GP + again_GP.sum(axis=0))
            # which chunks the microbatches in flight are of is not known: they may be the lightest
            kept_GP = np.where(
                vpp_G1 == 1, (n_CGP * kept[:, column]).sum(axis=0), n_CGP.sum(axis=0) * kept.min(axis=0)[column]
            )
            fits.append(held_GP * kept_GP + transient.min(axis=0)[column] <= room_GP)
        return cls(forward_GP, np.stack(work), np.stack(fits))
