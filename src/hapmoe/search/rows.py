"""Rows of small whole numbers told apart, faster than by sorting rows."""

from __future__ import annotations

import numpy as np

from hapmoe.options import IntArray

__all__ = ["distinct_rows"]

MOST = 2**62
"""Keys stay below it."""


def distinct_rows(rows_XN: IntArray) -> tuple[IntArray, IntArray]:
    """The distinct rows in ascending order, and for every row which of them it is; numbers are not negative.

    A row becomes one number, digit by digit; where that would be too large its rank takes its place.
    """
    key, size = np.zeros(len(rows_XN), np.int64), 1
    for column in rows_XN.T:
        many = int(column.max(initial=0)) + 1
        if size * many >= MOST:
            seen, key = np.unique(key, return_inverse=True)
            size = len(seen)
        key, size = key.ravel() * many + column, size * many
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    return rows_XN[first], inverse.ravel()
