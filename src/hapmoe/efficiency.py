"""Seconds of an operation on a device: a roofline with measured efficiency curves.

A GEMM of m x n x k takes as long as one of (m+m0) x (n+m0) x (k+k0) at the kind's best rate would:
small dimensions waste tiles, pipelines and the last wave of blocks, and this padding is the smooth,
few-parameter form of it. It is bounded below by its memory traffic.

    seconds = max(2 (m+m0)(n+m0)(k+k0) / (peak e_max), bytes / (bandwidth e_memory)) + launch_s

Source of every curve: data/efficiency.yaml (bench/fit_efficiency.py). Array suffix: K option.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any, cast

import numpy as np
import yaml
from numpy.typing import NDArray

from hapmoe.cluster import Device
from hapmoe.errors import DataMissing
from hapmoe.options import FloatArray

__all__ = [
    "AttentionCurve",
    "Efficiency",
    "GemmCurve",
    "attention_seconds",
    "efficiency_of",
    "gemm_seconds",
    "load_yaml",
]


@dataclass(frozen=True, slots=True)
class GemmCurve:
    """How near the peak a GEMM comes on one kind, and what it adds to small dimensions."""

    e_max: float
    m0: float
    k0: float
    launch_s: float
    e_memory: float
    note: str


@dataclass(frozen=True, slots=True)
class AttentionCurve:
    """seconds = FLOP / (peak e_max) (1 + s0/S) (1 + p0 / tiles) + launch_s, tiles of 128 queries."""

    e_max: float
    s0: float
    p0: float
    launch_s: float
    note: str


@dataclass(frozen=True, slots=True)
class Efficiency:
    """All curves of one device kind, ready to use (absolute rates)."""

    gemm: dict[str, GemmCurve]
    """By precision: bf16 (fp16 and fp32 use its shape), fp8."""
    attention: AttentionCurve
    peak: dict[str, float]
    memory_bytes_per_s: float
    grouped: dict[str, float]
    gemm_backward: float
    attention_backward: float
    e_elementwise: float
    e_permute: float
    launch_s: float
    calibration: dict[str, float]
    sustained: dict[str, float]
    """What a whole training step holds of the rates of short kernel benchmarks (clocks under power limits)."""
    assumed: bool
    """The row itself is borrowed or assumed, not fitted on the kind's own measurements."""

    def peak_of(self, precision: str) -> float:
        """Dense peak; bf16 falls to fp16 where a kind has no bf16 units (V100, T4)."""
        for name in (precision, *{"bf16": ("fp16", "fp32"), "fp16": ("bf16", "fp32")}.get(precision, ())):
            if name in self.peak:
                return self.peak[name]
        raise DataMissing(f"no {precision} peak for this device; it has {', '.join(sorted(self.peak))}")


def load_yaml(name: str) -> dict[str, Any]:
    """A table of the package's data folder."""
    text = resources.files("hapmoe").joinpath("data").joinpath(name).read_text(encoding="utf-8")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return cast("dict[str, Any]", yaml.load(text, loader))


@lru_cache(maxsize=1)
def _tables() -> dict[str, Any]:
    return load_yaml("efficiency.yaml")


def _row(name: str) -> dict[str, Any]:
    rows = _tables()["rows"]
    row = dict(rows.get(name, {}))
    while "borrow" in row:
        lender = dict(rows[row.pop("borrow")])
        row = lender | {"borrowed": True} | row
    default = dict(rows["default"])
    row["sustained_calibration"] = default.get("sustained_calibration", {}) | row.get("sustained_calibration", {})
    return default | row


def efficiency_of(device: Device) -> Efficiency:
    """The curves of a device: its row of data/efficiency.yaml, or the declared substitute."""
    return _efficiency(
        device.efficiency or "default", tuple(sorted(device.peak_flop_per_s.items())), device.memory_bytes_per_s
    )


@lru_cache(maxsize=64)
def _efficiency(name: str, peak: tuple[tuple[str, float], ...], memory_bytes_per_s: float) -> Efficiency:
    row, common = _row(name), _tables()["common"]

    def gemm(curve: dict[str, Any]) -> GemmCurve:
        keys = ("e_max", "m0", "k0", "launch_s", "e_memory")
        return GemmCurve(**{key: float(curve[key]) for key in keys}, note=str(curve.get("note", "")))

    attention = row["attention"]
    curves = {"bf16": gemm(row["gemm_bf16"])}
    curves["fp8"] = gemm(row["gemm_fp8"]) if "gemm_fp8" in row else curves["bf16"]
    return Efficiency(
        gemm=curves,
        attention=AttentionCurve(
            **{key: float(attention[key]) for key in ("e_max", "s0", "p0", "launch_s")},
            note=str(attention.get("note", "")),
        ),
        peak=dict(peak),
        memory_bytes_per_s=memory_bytes_per_s,
        grouped={
            key: float(_tables()["calibration"][f"grouped_gemm_{key}_calibration"]["value"]) for key in ("bf16", "fp8")
        },
        gemm_backward=float(common["gemm_backward"]["factor"]),
        attention_backward=float(common["attention_backward"]["factor"]),
        e_elementwise=float(common["elementwise"]["e_memory"]),
        e_permute=float(common["permute"]["e_memory"]),
        launch_s=float(common["elementwise"]["launch_s"]),
        calibration={key: float(entry["value"]) for key, entry in _tables()["calibration"].items()},
        sustained={key: float(row.get("sustained_calibration", {}).get(key, 1.0)) for key in ("bf16", "fp8", "fp4")},
        assumed=bool(row.get("borrowed")) or "fitted" not in str(row["gemm_bf16"].get("note", "")),
    )


def gemm_seconds(
    efficiency: Efficiency,
    m_K: FloatArray,
    n_K: FloatArray,
    k_K: FloatArray,
    *,
    groups_K: FloatArray | float = 1.0,
    precision: str = "bf16",
    factor: float = 1.0,
    sustained: float | None = None,
) -> tuple[FloatArray, NDArray[np.bool_]]:
    """Seconds of GEMMs, and which are bound by memory; without launch overhead.

    Shapes: any that broadcast. ``m_K`` is per group. ``factor`` scales the best rate (grouped
    kernels, backward passes), and so does ``sustained`` (None: that of the precision).
    """
    low = precision in ("fp8", "fp4")
    curve = efficiency.gemm["fp8" if low else "bf16"]
    rate = efficiency.peak_of(precision) * curve.e_max * factor
    rate *= efficiency.sustained[precision if low else "bf16"] if sustained is None else sustained
    compute_K = (2.0 / rate) * groups_K * (m_K + curve.m0) * (n_K + curve.m0) * (k_K + curve.k0)
    size = 4.0 if precision == "fp32" else 1.0 if low else 2.0
    traffic_K = groups_K * (k_K * (m_K + n_K) * size + m_K * n_K * max(size, 2.0))
    memory_K = traffic_K * (1.0 / (efficiency.memory_bytes_per_s * curve.e_memory))
    return np.maximum(compute_K, memory_K), memory_K > compute_K


def attention_seconds(
    efficiency: Efficiency,
    flops_K: FloatArray,
    queries_K: FloatArray,
    heads_K: FloatArray,
    *,
    precision: str = "bf16",
    backward: bool = False,
    sustained: float | None = None,
) -> FloatArray:
    """Seconds of attention kernels; ``flops_K`` are those done (causal half), ``heads_K`` heads times sequences."""
    curve = efficiency.attention
    rate = efficiency.peak_of(precision) * curve.e_max * (efficiency.attention_backward if backward else 1.0)
    rate *= efficiency.sustained["bf16"] if sustained is None else sustained
    tiles_K = heads_K * queries_K / 128.0
    return np.asarray(flops_K / rate * (1.0 + curve.s0 / queries_K) * (1.0 + curve.p0 / tiles_K) + curve.launch_s)
