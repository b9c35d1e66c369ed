"""Fits the efficiency curves and collective curves on published rows, and writes them as YAML.

    python -m bench.fit_efficiency --truth DIR [--write]

Few parameters per device kind, all rows of a kind at once; the error of every fit is printed and
written beside it. Calibrations (names ending in _calibration) are kept as they stand in the file:
``bench.fit_calibration`` fits those on whole training steps.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from scipy.optimize import least_squares

DATA = Path(__file__).resolve().parents[1] / "src" / "hapmoe" / "data"

# (bf16 FLOP/s, fp8 FLOP/s, memory bytes/s) of the data sheets, dense: what efficiencies are relative to
DEVICES: dict[str, tuple[str, float, float, float]] = {
    "a100": ("A100-80G-SXM", 312e12, 0.0, 2.039e12),
    "h100": ("H100-80G-SXM", 989e12, 1979e12, 3.35e12),
    "h200": ("H200-SXM-141G", 989e12, 1979e12, 4.8e12),
    "h800": ("H800-80G-SXM", 989e12, 1979e12, 3.35e12),
    "b200": ("B200", 2250e12, 4500e12, 7.7e12),
    "b300": ("B300", 2250e12, 4500e12, 7.7e12),
    "gb200": ("GB200", 2450e12, 4900e12, 8.0e12),
    "l40s": ("L40S-48G", 362e12, 724e12, 0.864e12),
    "rtx": ("RTX PRO 6000 Server", 504e12, 1008e12, 1.597e12),
    "mi300x": ("MI300X-192G", 1307e12, 2615e12, 5.3e12),
    "mi355x": ("MI355X", 2300e12, 4600e12, 8.0e12),
}
FP8 = ("FP8", "FP8 block-scaled", "FP8 block-scaled (E4M3, BF16 out)")
FABRICS = {
    "nvlink3": ("NVLink3 (HGX A100)", 300e9),
    "nvlink4": ("NVLink4 (HGX H100)", 450e9),
    "nvlink5": ("NVLink5 (HGX B200)", 900e9),
    "pcie": ("PCIe5 (RTX PRO 6000)", 63e9),
}
COLLECTIVES = {
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_reduce": "all_reduce",
    "alltoall": "all_to_all",
}


def seconds_of(row: dict[str, Any]) -> float:
    if "time_us" in row:
        return float(row["time_us"]) * 1e-6
    if "tflops" in row and "m" in row:
        return float(2.0 * row["m"] * row["n"] * row["k"] / row["tflops"] * 1e-12)
    return 0.0


def fit(
    model: Any, start: list[float], low: list[float], high: list[float], seconds: Any
) -> tuple[list[float], float, float]:
    """Least squares of log ratios, robust to single bad rows: parameters, median and p90 error."""
    result = least_squares(
        lambda x: np.log(model(np.exp(x)) / seconds),
        np.log(start),
        bounds=(np.log(low), np.log(high)),
        loss="soft_l1",
        f_scale=0.1,
    )
    error = np.abs(model(np.exp(result.x)) / seconds - 1)
    return [float(value) for value in np.exp(result.x)], float(np.median(error)), float(np.percentile(error, 90))


def note(rows: list[dict[str, Any]], median: float, p90: float) -> dict[str, Any]:
    sources = sorted({row["source"].split(" ")[0] for row in rows})
    return {
        "note": f"fitted on {len(rows)} published rows, median error {median:.1%}, 90th percentile {p90:.1%}",
        "sources": sources,
    }


def fit_gemm(rows: list[dict[str, Any]], peak: float, memory: float, size: float) -> dict[str, Any] | None:
    rows = [
        row
        for row in rows
        if "m" in row
        and seconds_of(row)
        and "best shape" not in row.get("notes", "")
        and "educational" not in row.get("software", "")
    ]
    if len(rows) < 6:
        return None
    m, n, k = (np.array([float(row[name]) for row in rows]) for name in "mnk")
    seconds = np.array([seconds_of(row) for row in rows])

    def model(x: Any) -> Any:
        e_max, m0, k0, t0, e_memory = x
        compute = 2 * (m + m0) * (n + m0) * (k + k0) / (peak * e_max)
        return np.maximum(compute, (size * (m * k + n * k) + 2 * m * n) / (memory * e_memory)) + t0

    x, median, p90 = fit(
        model, [0.7, 50, 100, 3e-6, 0.8], [0.05, 1, 1, 1e-7, 0.3], [1.05, 600, 2000, 2e-5, 1.0], seconds
    )
    names = ("e_max", "m0", "k0", "launch_s", "e_memory")
    return {name: float(f"{value:.4g}") for name, value in zip(names, x, strict=True)} | note(rows, median, p90)


def fit_attention(rows: list[dict[str, Any]], peak: float) -> dict[str, Any] | None:
    if not rows:
        return None
    batch, seq, heads = (np.array([float(row[name]) for row in rows]) for name in ("batch", "seq", "heads"))
    width = np.array([float(row["head_dim"]) for row in rows])
    seconds = np.array([seconds_of(row) for row in rows])
    flops = 2 * seq * seq * width * heads * batch  # the causal half of 4 S^2 d

    def model(x: Any) -> Any:
        e_max, s0, p0, t0 = x
        return flops / (peak * e_max) * (1 + s0 / seq) * (1 + p0 / (batch * heads * seq / 128)) + t0

    x, median, p90 = fit(model, [0.6, 200, 100, 3e-6], [0.02, 1, 1, 1e-7], [1.0, 8000, 3000, 3e-5], seconds)
    names = ("e_max", "s0", "p0", "launch_s")
    return {name: float(f"{value:.4g}") for name, value in zip(names, x, strict=True)} | note(rows, median, p90)


def fit_collectives(rows: list[dict[str, Any]], link: float) -> dict[str, Any]:
    fitted: dict[str, Any] = {}
    for op, name in COLLECTIVES.items():
        points = [
            (float(size), seconds * 1e-6, float(row["ranks"]))
            for row in rows
            if row["op"] == op and "points_us" in row
            for size, seconds in row["points_us"].items()
        ]
        size, seconds, ranks = (np.array(column) for column in zip(*points, strict=True))
        wire = size * (ranks - 1) / ranks * (2 if op == "all_reduce" else 1)

        def model(x: Any, wire: Any = wire, ranks: Any = ranks) -> Any:
            alpha, per_peer, e_max, half, ramp = x
            return (
                alpha
                + per_peer * (ranks - 1)
                + wire / (link * e_max * ranks / (ranks + half))
                + ramp * np.sqrt(wire) * 1e-9
            )

        low, high = [1e-7, 1e-8, 0.001, 0.001, 1e-4], [1e-4, 1e-4, 1.3, 4, 1e4]
        x, median, p90 = fit(model, [4e-6, 1e-6, 0.8, 0.5, 10], low, high, seconds)
        names = ("alpha_s", "per_peer_s", "e_max", "half_ranks", "ramp")
        fitted[name] = {key: float(f"{value:.4g}") for key, value in zip(names, x, strict=True)}
        chosen = [row for row in rows if row["op"] == op]
        fitted[name] |= note(chosen, median, p90)
        fitted[name]["note"] = fitted[name]["note"].replace(
            "published rows", f"published curves ({len(points)} points)"
        )
    return fitted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--truth", type=Path, required=True, help="folder with kernels.yaml and collectives.yaml")
    parser.add_argument("--write", action="store_true", help="update src/hapmoe/data")
    arguments = parser.parse_args()
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    kernels = yaml.load((arguments.truth / "kernels.yaml").read_text(), loader)
    collectives = yaml.load((arguments.truth / "collectives.yaml").read_text(), loader)
    path = DATA / "efficiency.yaml"
    document = yaml.safe_load(path.read_text())
    for name, (device, bf16, fp8, memory) in DEVICES.items():
        rows = [row for row in kernels if row.get("device") == device]
        kinds = {
            "gemm_bf16": fit_gemm(
                [r for r in rows if r["kind"] == "gemm" and r["dtype"] in ("BF16", "FP16")], bf16, memory, 2
            ),
            "gemm_fp8": fit_gemm([r for r in rows if r["kind"] == "gemm" and r["dtype"] in FP8], fp8, memory, 1)
            if fp8
            else None,
            "attention": fit_attention([r for r in rows if r["kind"] == "attention_fwd_causal"], bf16),
        }
        for kind, curve in kinds.items():
            if curve:
                document["rows"].setdefault(name, {})[kind] = curve
                print(f"{name:8} {kind:10} {curve['note']}  e_max {curve['e_max']}")
    path.write_text(yaml.safe_dump(document, sort_keys=False, width=120)) if arguments.write else None
    path = DATA / "fabrics.yaml"
    document = yaml.safe_load(path.read_text())
    for name, (fabric, link) in FABRICS.items():
        for op, curve in fit_collectives([row for row in collectives if row["fabric"] == fabric], link).items():
            document["fabrics"].setdefault(name, {})[op] = curve
            print(f"{name:8} {op:14} {curve['note']}  e_max {curve['e_max']}")
    path.write_text(yaml.safe_dump(document, sort_keys=False, width=120)) if arguments.write else None


if __name__ == "__main__":
    main()
