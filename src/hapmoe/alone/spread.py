"""Many timings as three figures, with those left out that something else disturbed."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import TypedDict

__all__ = ["Spread", "spread"]


class Spread(TypedDict):
    """What the timed rows of a table have in common."""

    median_s: float
    p10_s: float
    p90_s: float
    samples: int


_FAR = 5.0  # scaled median deviations; in normal noise one timing in 1.7 million
_TO_SIGMA = 1.4826  # of a normal distribution: standard deviation over median absolute deviation
_LEAST_DEVIATION = 0.01  # of the median: timers are not finer than that, and equal timings are no reason to drop one


def spread(timings_s: Sequence[float]) -> Spread:
    """Median, 10th and 90th percentile of timings without outliers.

    Outliers are further from the median than five scaled median absolute deviations (Hampel's
    identifier; Leys et al. 2013, "Detecting outliers: do not use standard deviation around the mean, use
    absolute deviation around the median"). Fewer than five timings are all kept.

    >>> spread([1.0, 1.0, 1.02, 0.98, 1.0, 40.0])
    {'median_s': 1.0, 'p10_s': 0.988, 'p90_s': 1.012, 'samples': 5}
    """
    middle = median(timings_s)
    if len(timings_s) >= 5:
        deviation = max(_TO_SIGMA * median(abs(one - middle) for one in timings_s), _LEAST_DEVIATION * middle)
        timings_s = [one for one in timings_s if abs(one - middle) <= _FAR * deviation]
    ordered = sorted(timings_s)
    return {
        "median_s": _six(median(ordered)),
        "p10_s": _six(_quantile(ordered, 0.1)),
        "p90_s": _six(_quantile(ordered, 0.9)),
        "samples": len(ordered),
    }


def _quantile(ordered: Sequence[float], q: float) -> float:
    """Linear between order statistics (numpy's default)."""
    at = q * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


def _six(value: float) -> float:
    """Six significant digits: more than any timer has."""
    return float(f"{value:.6g}")
