"""Options that another of the same pool is never worse than: what may be left out without losing the best plan.

Option a covers option b if a stage run as a takes no longer and holds no more than one run as b,
whatever its layers, place and recomputation. Times and bytes of a stage are sums of columns of its
table, and the timeline never gets shorter where something gets longer; but two terms shrink when a
pass grows: gradient reduction hides behind the last backward, the weight gather behind the first
forward. There a must hide its own wholly behind at most all but one layer, or have no more left over.
Without virtual stages a reduction needs no such test: the last thing a stage does is a backward, which
ends as much earlier as it is shorter.

Array legend: K options, D columns, C layer classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product

import numpy as np
from numpy.typing import NDArray

from hapmoe.boundary import boundary_s
from hapmoe.options import FloatArray, IntArray, StageTable
from hapmoe.search.problem import Problem

__all__ = ["Covers", "covered_by"]

TOLERANCE = 1 + 1e-12
"""Of two options that differ by rounding either may stand for the other."""


class Covers:
    """Which combinations of options, one per pool, another one covers: at each pool the same option or
    one that covers it, and transfers between pools that take no longer."""

    def __init__(self, problem: Problem) -> None:
        options, pins = problem.space.options, problem.pins
        self.problem = problem
        # what crosses pools depends on how a microbatch is cut, not on experts
        columns = (options.tp_K, options.cp_K, options.dp_K, options.mbs_K)
        _, first, kind = np.unique(np.stack(columns, axis=1), axis=0, return_index=True, return_inverse=True)
        self.first, self.kind_K = first, kind.ravel()
        self.crossings: dict[tuple[int, int], dict[tuple[int, int], float]] = {}
        interleaved = problem.job.training.overlap_p2p and any(pins.allow("vpp", v) for v in range(2, 65))
        groups = np.stack([options.devices_K, options.mbs_K * options.dp_K], axis=1)
        _, group_K = np.unique(groups, axis=0, return_inverse=True)
        self.cover_PK = np.tile(np.arange(len(options)), (len(problem.tables), 1))
        for pool in range(len(problem.tables)):
            here = np.flatnonzero(problem.space.most_KP[:, pool] > 0)
            order = here[np.argsort(group_K.ravel()[here], kind="stable")]
            for members in np.split(order, np.flatnonzero(np.diff(group_K.ravel()[order])) + 1):
                if len(members):
                    self.cover_PK[pool, members] = covered_by(problem, pool, members, interleaved)

    def covered(self, option_GP: IntArray, used: Sequence[int]) -> NDArray[np.bool_]:
        """[G] is there a combination of the same pools and sizes that is never worse?"""
        cover_GP = np.stack([self.cover_PK[p, option_GP[:, p]] for p in range(option_GP.shape[1])], axis=1)
        found = np.zeros(len(option_GP), bool)
        now = {pair: self._crossing_s(pair, option_GP) for pair in combinations(used, 2)}
        for replaced in product((False, True), repeat=len(used)):
            changed = np.array(option_GP)
            mine = [p for p, yes in zip(used, replaced, strict=True) if yes]
            changed[:, mine] = cover_GP[:, mine]
            better = np.asarray((changed != option_GP).any(axis=1) & ~found)
            for pair, time in now.items():
                rows = np.flatnonzero(better)
                better[rows] = self._crossing_s(pair, changed[rows]) <= time[rows] * TOLERANCE
            found = np.logical_or(found, better)
        return found

    def _crossing_s(self, pair: tuple[int, int], option_GP: IntArray) -> FloatArray:
        """[G] seconds from a stage of one pool to one of the other."""
        kinds, which = np.unique(self.kind_K[option_GP[:, pair]], axis=0, return_inverse=True)
        known = self.crossings.setdefault(pair, {})
        missing = np.asarray([key for key in map(tuple, kinds.tolist()) if key not in known], np.int64)
        if len(missing):
            problem = self.problem
            ends = [problem.space.options.take(self.first[missing[:, end]]) for end in (0, 1)]
            first, second = (problem.cluster.pools[p] for p in pair)
            times = boundary_s(problem.job, problem.cluster, first, second, ends[0], False, ends[1])
            known.update(zip(map(tuple, missing.tolist()), times.tolist(), strict=True))
        return np.asarray([known[key] for key in map(tuple, kinds.tolist())])[which.ravel()]


def covered_by(problem: Problem, pool: int, option_K: IntArray, interleaved: bool) -> IntArray:
    """For each of some options of one pool, all of one size and number of sequences: the one that
    covers it and is itself covered by none, or itself. ``interleaved``: plans may have virtual stages."""
    table, training = problem.tables[pool], problem.job.training
    no_worse = _no_worse(_columns(problem, pool, option_K))
    if training.overlap_grad_reduce and interleaved:
        hidden, left = _hidden(table, option_K, problem.job.model.mtp_layers, "sync", "backward")
        no_worse = np.logical_and(no_worse, hidden[:, None] | _no_worse(left))
    if training.overlap_param_gather:
        hidden, left = _hidden(table, option_K, problem.job.model.mtp_layers, "gather", "forward")
        no_worse = np.logical_and(no_worse, hidden[:, None] | _no_worse(left))
    number = np.arange(len(option_K))
    better = no_worse & (~no_worse.T | (number[:, None] < number[None, :]))
    free = ~np.any(better, axis=0)
    work = (table.forward_CK + table.backward_CK).sum(axis=0)[option_K]
    rank = np.where(better & free[:, None], work[:, None], np.inf)
    best = rank.argmin(axis=0)
    return np.asarray(option_K[np.where(np.isfinite(rank[best, number]), best, number)])


def _no_worse(columns_KD: FloatArray) -> NDArray[np.bool_]:
    """[K, K] is no column of the first larger than the second's?"""
    slack = np.abs(columns_KD) * (TOLERANCE - 1)
    return np.asarray(np.all(columns_KD[:, None, :] <= (columns_KD + slack)[None, :, :], axis=2), bool)


def _columns(problem: Problem, pool: int, option_K: IntArray) -> FloatArray:
    """[K, D] everything that a stage's times and bytes are sums of."""
    table, sends, mtp = problem.tables[pool], problem.sends, problem.job.model.mtp_layers
    each = table.weight_bytes + table.grad_bytes
    dense_bytes, expert_bytes = each + table.dense_optimizer_bytes_K, each + table.expert_optimizer_bytes_K
    rows = [
        *table.forward_CK,
        *table.backward_CK,
        *table.recompute_RCK.reshape(-1, table.recompute_RCK.shape[-1]),
        *table.activation_RCK.reshape(-1, table.activation_RCK.shape[-1]),
        *table.transient_RCK.reshape(-1, table.transient_RCK.shape[-1]),
        table.embedding_forward_K,
        table.embedding_backward_K,
        table.embedding_activation_K,
        table.head_forward_K,
        table.head_backward_K,
        table.head_activation_K,
        *(table.dense_params_CK * dense_bytes + table.expert_params_CK * expert_bytes),
        table.embedding_params_K * dense_bytes,
        table.head_params_K * dense_bytes,
        table.workspace_bytes_K,
        *(table.dense_params_CK * table.dense_sync_s_K + table.expert_params_CK * table.expert_sync_s_K),
        table.embedding_params_K * table.dense_sync_s_K,
        table.head_params_K * table.dense_sync_s_K,
        table.sync_latency_s_K,
        *(table.dense_params_CK * table.dense_gather_s_K + table.expert_params_CK * table.expert_gather_s_K),
        table.embedding_params_K * table.dense_gather_s_K,
        table.head_params_K * table.dense_gather_s_K,
        *(table.dense_params_CK * table.optimizer_s_K + table.expert_params_CK * table.expert_optimizer_s_K),
        table.embedding_params_K * table.optimizer_s_K,
        table.head_params_K * table.optimizer_s_K,
        sends.near_PK[pool],
        sends.far_PK[pool],
    ]
    if mtp:
        dense, expert = table.mtp_dense_params_K, table.mtp_expert_params_K
        rows += [
            table.mtp_forward_K,
            table.mtp_backward_K,
            table.mtp_activation_K,
            dense * dense_bytes + expert * expert_bytes,
            dense * table.dense_sync_s_K + expert * table.expert_sync_s_K,
            dense * table.dense_gather_s_K + expert * table.expert_gather_s_K,
            dense * table.optimizer_s_K + expert * table.expert_optimizer_s_K,
        ]
    return np.stack([row[option_K] for row in rows], axis=1)


def _hidden(
    table: StageTable, option_K: IntArray, mtp: int, what: str, behind: str
) -> tuple[NDArray[np.bool_], FloatArray]:
    """[K] is what goes on beside a pass shorter than the pass, less one of two layers or more? And
    [K, D] per column what sticks out of it.

    With x layers of at most s seconds beside passes of at least b each, and e seconds for the ends,
    (x - 1)/x of the pass hide all but 1/x of it if s + e/x <= b; x = 1 hides nothing in any option.
    """
    dense, expert = getattr(table, f"dense_{what}_s_K"), getattr(table, f"expert_{what}_s_K")
    passes: FloatArray = getattr(table, f"{behind}_CK")[:, option_K]
    layers = (table.dense_params_CK * dense + table.expert_params_CK * expert)[:, option_K]
    latency = table.sync_latency_s_K if what == "sync" else np.zeros(len(dense))
    extra = [table.embedding_params_K * dense, table.head_params_K * dense, latency]
    covers = [getattr(table, f"embedding_{behind}_K"), getattr(table, f"head_{behind}_K"), np.zeros(len(dense))]
    if mtp:
        extra.append(mtp * (table.mtp_dense_params_K * dense + table.mtp_expert_params_K * expert))
        extra.append(table.embedding_params_K * dense)  # the last stage's copy
        covers += [mtp * getattr(table, f"mtp_{behind}_K"), np.zeros(len(dense))]
    ends = sum(values[option_K] for values in extra)
    hidden = layers.max(axis=0) + ends / 2.0 <= passes.min(axis=0)
    left = [*(layers - passes), *((a - b)[option_K] for a, b in zip(extra, covers, strict=True))]
    return hidden, np.stack(left, axis=1)
