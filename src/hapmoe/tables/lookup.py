"""Figures for shapes that were measured, lie between measured ones, or beyond them.

All three answer as a ratio, measured over modelled: the model knows how time follows shape, the
measurement how far it is off. At a measured shape the product is the measurement itself; between
two it is interpolated in log space; beyond, the model is scaled by the nearest measurement, never
replaced by a constant. Array suffixes: R measured rows, X what is asked for, D dimensions.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["EXTRAPOLATED", "INTERPOLATED", "MEASURED", "SOURCES", "ratio_along", "ratio_among", "weights_among"]

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

SOURCES: Final = ("measured", "interpolated", "extrapolated", "roofline", "assumed")
"""Where a figure comes from; codes are positions in here."""
MEASURED, INTERPOLATED, EXTRAPOLATED = 0, 1, 2
_SAME = 1e-6  # in log2: the same number, written differently
_NEIGHBOURS = 4
_NEAR = 3.0  # in log2: further than a factor of 8 from anything measured is no longer "between"


def ratio_along(
    x_R: FloatArray, seconds_R: FloatArray, model_R: FloatArray, x_X: FloatArray, model_X: FloatArray
) -> tuple[FloatArray, IntArray]:
    """Ratio and source for one dimension, such as message bytes: time over size is a line in log-log.

    ``x_R`` is positive. Times are made monotone first: a larger message is not faster, whatever noise
    says. Returns arrays of the shape of ``x_X``.

    >>> ratio, source = ratio_along(np.array([1e3, 1e5]), np.array([1., 100.]), np.ones(2), np.array([1e4]), np.ones(1))
    >>> float(ratio[0]), SOURCES[source[0]]
    (10.0, 'interpolated')
    """
    order = np.argsort(x_R, kind="stable")
    at_R, time_R = np.log2(x_R[order]), np.log2(np.maximum.accumulate(seconds_R[order]))
    at_X = np.log2(x_X)
    inside_X = (at_X >= at_R[0] - _SAME) & (at_X <= at_R[-1] + _SAME)
    end_R = time_R - np.log2(model_R[order])
    beyond_X = np.where(at_X < at_R[0], end_R[0], end_R[-1])
    ratio_X = np.where(inside_X, np.interp(at_X, at_R, time_R) - np.log2(model_X), beyond_X)
    exact_X = np.abs(at_R[None, :] - at_X[:, None]).min(axis=1) < _SAME
    source_X = np.where(exact_X, MEASURED, np.where(inside_X, INTERPOLATED, EXTRAPOLATED))
    return np.exp2(ratio_X), source_X


def weights_among(points_RD: FloatArray, asked_XD: FloatArray) -> tuple[FloatArray, IntArray]:
    """How much each measured shape says about each asked one, and the source that this makes.

    All dimensions are positive. The nearest shapes count by the inverse square of their distance in
    log space (Shepard 1968, "A two-dimensional interpolation function for irregularly-spaced data");
    rows [X, R] add up to 1. "Between" means inside the box that the measured shapes span, and no
    further than a factor of 8 from the nearest.
    """
    points_RD = np.log2(points_RD)
    asked, back_X = np.unique(np.log2(asked_XD), axis=0, return_inverse=True)
    away_XR = ((asked[:, None, :] - points_RD[None, :, :]) ** 2).sum(axis=2)
    far = len(points_RD) - min(_NEIGHBOURS, len(points_RD))
    limit_X = np.sort(away_XR, axis=1)[:, -far - 1] if far else np.full(len(asked), np.inf)
    least_X = away_XR.min(axis=1)
    exact_X = least_X < _SAME**2
    weight_XR = np.where(away_XR <= limit_X[:, None], 1.0 / np.maximum(away_XR, _SAME**2), 0.0)
    weight_XR = np.where(exact_X[:, None], (away_XR < _SAME**2).astype(np.float64), weight_XR)
    weight_XR /= weight_XR.sum(axis=1, keepdims=True)
    boxed_X = ((asked >= points_RD.min(axis=0) - _SAME) & (asked <= points_RD.max(axis=0) + _SAME)).all(axis=1)
    between_X = boxed_X & (least_X <= _NEAR**2)
    source_X = np.where(exact_X, MEASURED, np.where(between_X, INTERPOLATED, EXTRAPOLATED))
    back_X = back_X.reshape(-1)
    return weight_XR[back_X], source_X[back_X]


def ratio_among(points_RD: FloatArray, ratio_R: FloatArray, asked_XD: FloatArray) -> tuple[FloatArray, IntArray]:
    """Ratio and source for shapes of several dimensions: logarithms averaged by ``weights_among``."""
    weight_XR, source_X = weights_among(points_RD, asked_XD)
    return np.exp2(weight_XR @ np.log2(ratio_R)), source_X
