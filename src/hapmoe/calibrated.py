"""What whole training steps have said of the cost model's terms, ready to multiply (``hapmoe calibrate``)."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from hapmoe.job import JobSpec
from hapmoe.measured import Calibration, Measurements
from hapmoe.tables.keys import shape_key

__all__ = ["TERMS", "calibrated", "said"]

TERMS = ("compute", "communication", "optimizer", "workspace")


def calibrated(tables: Measurements | None, job: JobSpec, term: str) -> float:
    """The factor on a term's seconds (1 where nothing is known), or the bytes on top of the workspace (0).

    Calibrations by the same model count; where there are none, the mean of those by others on this
    device (of logarithms, for factors).
    """
    if tables is None or not tables.calibration:
        return 0.0 if term == "workspace" else 1.0
    return _value(tables, shape_key(job), term)


@lru_cache(maxsize=256)
def _value(tables: Measurements, model: str, term: str) -> float:
    values = [row.value for row in _chosen(tables, model) if row.term == term]
    if term == "workspace":
        return float(np.mean(values)) if values else 0.0
    return float(np.exp(np.mean(np.log(values)))) if values else 1.0


def _chosen(tables: Measurements, model: str) -> tuple[Calibration, ...]:
    return tuple(row for row in tables.calibration if row.model == model) or tables.calibration


def said(tables: Measurements | None, job: JobSpec, device: str) -> tuple[str, ...]:
    """A line for the estimate's assumptions: what was calibrated, and on how many runs."""
    if tables is None or not tables.calibration:
        return ()
    rows = _chosen(tables, shape_key(job))
    factors = [f"{term} x {_value(tables, shape_key(job), term):.2f}" for term in TERMS[:3]]
    other = "" if rows[0].model == shape_key(job) else " of other models"
    return (f"{device}: calibrated on {max(row.samples for row in rows)} runs{other}: {', '.join(factors)}",)
