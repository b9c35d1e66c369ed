"""Measured pieces of training steps: what a layer, the embedding or the head takes against the model.

A row times a sum of pieces (``measured.Piece``): one layer, or all of a stage. For each configuration
that was measured the sums are taken apart by least squares; other configurations get the ratio of
their neighbours. Compute only: messages are taken off the rows, and priced by themselves.

Legend: R rows of one configuration, B blocks, K options.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np

from hapmoe.job import JobSpec
from hapmoe.measured import Measurements, Piece
from hapmoe.options import FloatArray, IntArray, Options
from hapmoe.tables.keys import shape_key
from hapmoe.tables.lookup import EXTRAPOLATED, INTERPOLATED, MEASURED, weights_among

__all__ = ["BLOCKS", "Modelled", "PieceRatio", "optimizer_ratio", "piece_ratios"]

BLOCKS: Final = ("dense", "moe", "embedding", "head", "mtp")
Modelled = dict[str, tuple[FloatArray, FloatArray]]
"""Forward and backward compute seconds [K] by block."""
_CLOCKS = ("device", "cpu", "wall")
_RIDGE = 1e-4  # of what the rows say of a block: it decides only what they do not tell apart
_DEGREES = 4  # of a place: tp, cp, ep, etp come first
_LEAST = 0.01  # noise may make a small block negative; it takes some time


@dataclass(frozen=True, slots=True)
class PieceRatio:
    """Measured over modelled compute of one block, and where it comes from (``tables.lookup.SOURCES``)."""

    forward_K: FloatArray
    backward_K: FloatArray
    source_K: IntArray


def piece_ratios(
    job: JobSpec, tables: Measurements, options: Options, model: Callable[[JobSpec, Options], Modelled]
) -> dict[str, PieceRatio]:
    """For every block that was measured on layers of this job's shapes; empty where none was.

    ``model`` prices the blocks of a configuration without tables of pieces.
    """
    rows = _usable(job, tables)
    if not rows:
        return {}
    points: dict[tuple[int, ...], list[Piece]] = {}
    for row in rows:
        points.setdefault(_place(row), []).append(row)
    solved = [_solve(job, place, group, model) for place, group in points.items()]
    seq_K = np.full(len(options), job.training.seq_len)
    asked = (options.tp_K, options.cp_K, options.ep_K, options.etp_K, options.mbs_K, seq_K)
    asked_KD = np.stack(asked, axis=1).astype(np.float64)
    found = {}
    for index, block in enumerate(BLOCKS):
        have = [(place, entry) for place, entry in zip(points, solved, strict=True) if not np.isnan(entry[0][index])]
        if not have:
            continue
        weight_KR, source_K = _weights(np.array([place for place, _ in have], dtype=np.float64), asked_KD)
        forward_R, backward_R, source_R = (np.array([entry[part][index] for _, entry in have]) for part in range(3))
        found[block] = PieceRatio(
            np.exp2(weight_KR @ np.log2(forward_R)),
            np.exp2(weight_KR @ np.log2(backward_R)),
            np.maximum(source_K, source_R[weight_KR.argmax(axis=1)].astype(np.int64)),
        )
    return found


def _weights(points_RD: FloatArray, asked_KD: FloatArray) -> tuple[FloatArray, IntArray]:
    """As ``weights_among``; what lies between measurements of its own degrees, by these alone.

    Degrees change what a layer runs (which messages, what is permuted), the micro-batch size and the
    sequence only how many rows of it. Beyond them the other degrees tell how time follows the rows.
    """
    weight_KR, source_K = weights_among(points_RD, asked_KD)
    for degrees in np.unique(points_RD[:, :_DEGREES], axis=0):
        same_R = (points_RD[:, :_DEGREES] == degrees).all(axis=1)
        same_K = (asked_KD[:, :_DEGREES] == degrees).all(axis=1)
        if same_K.any():
            own_KR, own_K = weights_among(points_RD[same_R], asked_KD[same_K])
            between_K = np.flatnonzero(same_K)[own_K != EXTRAPOLATED]
            weight_KR[between_K] = 0.0
            weight_KR[np.ix_(between_K, same_R)] = own_KR[own_K != EXTRAPOLATED]
            source_K[between_K] = own_K[own_K != EXTRAPOLATED]
    return weight_KR, source_K


def _usable(job: JobSpec, tables: Measurements) -> list[Piece]:
    """Rows of this job's layers without recomputation, all by the best clock that there is."""
    key = shape_key(job)
    rows = [
        row
        for row in tables.pieces
        if row.model == key and row.recompute == "none" and row.phase in ("forward", "backward")
    ]
    clock = next((name for name in _CLOCKS if any(row.clock == name for row in rows)), "")
    return [row for row in rows if row.clock == clock and row.median_s > row.comm_s]


def _place(row: Piece) -> tuple[int, ...]:
    return row.tp, row.cp, row.ep, row.etp, row.micro_batch_size, row.seq_len


def _counts(row: Piece) -> tuple[int, ...]:
    return row.dense_layers, row.moe_layers, row.embedding, row.head, row.mtp_layers


_Solved = tuple[FloatArray, FloatArray, IntArray]


def _solve(
    job: JobSpec, place: tuple[int, ...], rows: list[Piece], model: Callable[[JobSpec, Options], Modelled]
) -> _Solved:
    """Ratios [B] forward and backward (nan: not in any row), and sources [B], of one configuration."""
    tp, cp, ep, etp, mbs, seq = place
    at = msgspec.structs.replace(job, training=msgspec.structs.replace(job.training, seq_len=seq))
    dp = max(ep * etp // (tp * cp), 1)
    options = Options(*(np.array([value], dtype=np.int64) for value in (tp, cp, ep, etp, dp, mbs)))
    modelled = model(at, options)
    parts = []
    source_B = np.full(len(BLOCKS), MEASURED)
    for way, phase in enumerate(("forward", "backward")):
        mine = [row for row in rows if row.phase == phase]
        each_B = np.array([float(modelled[block][way][0]) if block in modelled else 0.0 for block in BLOCKS])
        work_RB = np.array([_counts(row) for row in mine], dtype=np.float64).reshape(-1, len(BLOCKS)) * each_B
        mine_s = np.array([row.median_s - row.comm_s for row in mine])
        keep = work_RB.sum(axis=1) > 0
        work_RB, mine_s = work_RB[keep], mine_s[keep]
        ratio_B = np.full(len(BLOCKS), np.nan)
        present = (work_RB > 0).any(axis=0)
        if present.any():
            common = mine_s.sum() / work_RB.sum()
            share_RB = common * work_RB[:, present] / mine_s[:, None]  # relative errors count alike
            normal = share_RB.T @ share_RB
            pull_B = _RIDGE * np.diag(normal)  # towards one ratio for all blocks
            damped = normal + np.diag(pull_B)
            relative = np.linalg.solve(damped, share_RB.T @ np.ones(len(mine_s)) + pull_B)
            ratio_B[present] = common * np.maximum(relative, _LEAST)
            told_apart = np.diag(np.linalg.solve(damped, normal)) > 0.9
            source_B[np.flatnonzero(present)[~told_apart]] = INTERPOLATED
        parts.append(ratio_B)
    forward_B, backward_B = parts
    # a run that times one way only says it of the other too
    source_B = np.where(np.isnan(forward_B) | np.isnan(backward_B), INTERPOLATED, source_B)
    forward_B, backward_B = (
        np.where(np.isnan(forward_B), backward_B, forward_B),
        np.where(np.isnan(backward_B), forward_B, backward_B),
    )
    return forward_B, backward_B, source_B


def optimizer_ratio(job: JobSpec, tables: Measurements, seconds: Callable[[float], float]) -> float | None:
    """Measured optimizer steps over the model's, the median of all; ``seconds(shards)`` is one parameter's."""
    key, ratios = shape_key(job), []
    for row in tables.pieces:
        if row.model == key and row.phase == "optimizer" and row.params:
            ranks = row.tp * row.cp * row.dp
            dense = (row.params - row.expert_params) * seconds(float(row.cp * row.dp))
            expert = row.expert_params * seconds(max(ranks / (row.ep * row.etp), 1.0))
            ratios.append((row.median_s - row.comm_s) / (dense + expert))
    return float(np.median(ratios)) if ratios else None
