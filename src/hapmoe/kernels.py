"""Measured kernels against the model's: by how much a device differs from its curves, shape by shape.

Tables hold kernels run alone. A training step holds less than that (clocks follow power), which the
model knows as ``sustained``; so the ratio is taken against the model of the kernel alone, and scales
the model of the kernel in a step. Array suffixes: K asked-for shape, R measured row.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from hapmoe.efficiency import Efficiency, attention_seconds, gemm_seconds
from hapmoe.measured import Compute, Measurements
from hapmoe.options import FloatArray, IntArray
from hapmoe.tables.lookup import INTERPOLATED, ratio_along, ratio_among
from hapmoe.units import DTYPE_BYTES

__all__ = ["adam_ratio", "attention_ratio", "gemm_ratio", "traffic_ratio"]

Found = tuple[FloatArray, IntArray] | None
"""Ratio (measured over modelled) and source for each K; None: nothing of the sort was measured."""


@lru_cache(maxsize=256)
def _rows(tables: Measurements, op: str, direction: str, precision: str) -> tuple[FloatArray, FloatArray]:
    """[R, 5] m, n, k, v, groups (1 where there is none), and [R] seconds."""
    rows = [row for row in tables.compute if (row.op, row.direction, row.precision) == (op, direction, precision)]
    shapes = [[max(value, 1) for value in (row.m, row.n, row.k, row.v or row.k, row.groups)] for row in rows]
    seconds = [row.median_s for row in rows]
    return np.array(shapes, dtype=np.float64).reshape(-1, 5), np.array(seconds)


def gemm_ratio(
    tables: Measurements,
    efficiency: Efficiency,
    shape_DK: FloatArray,
    *,
    grouped: bool,
    precision: str,
    peak: str,
    factor: float,
) -> Found:
    """For GEMMs of ``shape_DK`` (m, n, k, groups): any direction, each GEMM has its own shape.

    ``precision`` is the rows' word, ``peak`` that of the rate the model takes for it, ``factor`` what
    the model puts on grouped kernels.
    """
    shape_R5, seconds_R = _rows(tables, "grouped_gemm" if grouped else "gemm", "forward", precision)
    if not len(seconds_R):
        return None
    m_R, n_R, k_R, _, groups_R = shape_R5.T
    model_R, _ = gemm_seconds(
        efficiency, m_R, n_R, k_R, groups_K=groups_R, precision=peak, factor=factor, sustained=1.0
    )
    ratio_R = seconds_R / (model_R + efficiency.gemm["bf16"].launch_s)
    asked_KD = np.maximum(shape_DK.reshape(4, -1).T, 1.0)
    ratio_K, source_K = ratio_among(shape_R5[:, [0, 1, 2, 4]], ratio_R, asked_KD)
    return ratio_K.reshape(shape_DK.shape[1:]), source_K.reshape(shape_DK.shape[1:])


def attention_ratio(
    tables: Measurements,
    efficiency: Efficiency,
    shape_DK: FloatArray,
    *,
    precision: str,
    backward: bool,
    work: float,
) -> Found:
    """For causal attention of ``shape_DK`` (queries, keys, qk width, v width, heads times sequences).

    ``work``: backward FLOPs over forward ones.
    """
    shape_R5, seconds_R = _rows(tables, "attention", "backward" if backward else "forward", precision)
    if not len(seconds_R):
        return None
    m_R, n_R, k_R, v_R, groups_R = shape_R5.T
    flops_R = (work if backward else 1.0) * (k_R + v_R) * m_R * n_R * groups_R  # half of 2 (k + v): causal
    model_R = attention_seconds(
        efficiency, flops_R, m_R, groups_R, precision=precision, backward=backward, sustained=1.0
    )
    return ratio_among(shape_R5, seconds_R / model_R, np.maximum(shape_DK.T, 1.0))


def traffic_ratio(
    tables: Measurements, efficiency: Efficiency, op: str, precision: str, rate: float, bytes_K: FloatArray
) -> Found:
    """For element-wise work of ``bytes_K`` in all: a norm or a permutation, or anything at the rate of a copy.

    A copy is not the operation itself: never better than interpolated.
    """
    shape_R5, seconds_R = _rows(tables, op, "forward", precision)
    stands_in = not len(seconds_R)
    if stands_in:
        op, (shape_R5, seconds_R) = "copy", _rows(tables, "copy", "forward", precision)
    if not len(seconds_R):
        return None
    m_R, n_R = shape_R5[:, 0], shape_R5[:, 1]
    traffic_R = 2.0 * m_R if op == "copy" else 2.0 * DTYPE_BYTES[precision] * m_R * n_R
    bytes_K = np.maximum(bytes_K, 1.0)
    model_R, model_K = traffic_R / rate + efficiency.launch_s, bytes_K / rate + efficiency.launch_s
    ratio_K, source_K = ratio_along(traffic_R, seconds_R, model_R, bytes_K, model_K)
    return ratio_K, np.maximum(source_K, INTERPOLATED) if stands_in else source_K


def adam_ratio(tables: Measurements, seconds_per_parameter: float) -> float | None:
    """Measured optimizer steps over the model's: the median over the sizes that were measured."""
    rows = [row for row in tables.compute if isinstance(row, Compute) and row.op == "adam" and row.m]
    return float(np.median([row.median_s / (row.m * seconds_per_parameter) for row in rows])) if rows else None
