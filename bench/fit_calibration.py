"""Fits the calibrations of data/efficiency.yaml and data/fabrics.yaml on whole training steps.

    python -m bench.fit_calibration --rows FILE [--rows FILE] [--rounds N] [--write]

One value per device kind and precision (sustained), one per effect (everything else), all models of
family megatron at once; never per row or per model. Rows of one (model, accelerator) share one vote
(square root of their number). Method: coordinate search on the weighted mean of |log ratio|, each
row's cut at 0.5 so that rows that measure something else do not pull.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from bench.accuracy import load
from bench.fit_efficiency import DATA
from bench.rows import Case, Skip, case_of, stated_step_s
from hapmoe import comm, efficiency
from hapmoe.cost import evaluate
from hapmoe.errors import HapmoeError
from hapmoe.workload import model_flops_per_step

KINDS = ("v100", "t4", "a100", "h100", "b200", "b300", "gb200", "mi355x", "ascend910b")
GLOBALS = (
    "grouped_gemm_bf16_calibration",
    "grouped_gemm_fp8_calibration",
    "host_dense_s_calibration",
    "host_moe_s_calibration",
    "host_backward_calibration",
    "step_s_calibration",
    "tp_overlap_exposed_calibration",
    "async_exposed_calibration",
    "moe_overlap_exposed_calibration",
)
LIMITS = {"exposed": (0.02, 0.9), "grouped": (0.3, 1.0), "host_backward": (0.8, 2.5), "sustained": (0.4, 1.1)}


class Fit:
    """Rows with their cases, and the tables being changed."""

    def __init__(self, rows: list[dict[str, Any]], most: int) -> None:
        taken: Counter[tuple[str, ...]] = Counter()
        self.cases: list[tuple[dict[str, Any], Case, float]] = []
        for row in rows:
            if row.get("family") != "megatron" or row.get("flags"):
                continue
            try:
                case = case_of(row)
            except (Skip, HapmoeError):
                continue
            stated = stated_step_s(row, model_flops_per_step(case.job))
            group = (row["model"], str(row["hw"].get("gpu")), str(row["framework"]), str(row.get("precision")))
            taken[group] += 1
            if stated and taken[group] <= most:
                self.cases.append((row, case, stated))
        groups = [(row["model"], row["hw"].get("gpu")) for row, _, _ in self.cases]
        sizes = Counter(groups)
        self.weights = np.array([sizes[group] ** -0.5 for group in groups])
        self.tables = efficiency._tables()

    def ratios(self) -> Any:
        efficiency._efficiency.cache_clear()
        comm._fabric.cache_clear()
        return np.array([evaluate(case.job, case.cluster, case.plan).step_s / stated for _, case, stated in self.cases])

    def loss(self) -> float:
        error = np.minimum(np.abs(np.log(self.ratios())), 0.5)
        return float((self.weights * error).sum() / self.weights.sum())

    def parameters(self) -> list[tuple[str, dict[str, Any], str]]:
        found: list[tuple[str, dict[str, Any], str]] = []
        for kind in KINDS:
            row = self.tables["rows"][kind].setdefault("sustained_calibration", {"bf16": 1.0})
            found.append((f"sustained {kind} bf16", row, "bf16"))
            if "gemm_fp8" in self.tables["rows"][kind]:
                row.setdefault("fp8", 1.0)
                found.append((f"sustained {kind} fp8", row, "fp8"))
        for kind in ("b300", "gb200"):
            row = self.tables["rows"][kind]["sustained_calibration"]
            row.setdefault("fp4", 1.0)
            found.append((f"sustained {kind} fp4", row, "fp4"))
        found += [(name, self.tables["calibration"][name], "value") for name in GLOBALS]
        found.append(("permute e_memory", self.tables["common"]["permute"], "e_memory"))
        found.append(("elementwise e_memory", self.tables["common"]["elementwise"], "e_memory"))
        fabrics = comm._tables()
        found.append(("network all_to_all", fabrics["network"]["all_to_all"], "e_max"))
        found.append(("network ring", fabrics["network"]["ring"], "e_max"))
        found.append(("flex inside", fabrics["flex"], "intra_e_max"))
        found.append(("flex between", fabrics["flex"], "inter_e_max"))
        return found

    def run(self, rounds: int) -> None:
        best = self.loss()
        print(f"{len(self.cases)} rows, loss {best:.4f}")
        step = 1.3
        for turn in range(rounds):
            for name, place, key in self.parameters():
                low, high = next((limit for part, limit in LIMITS.items() if part in name), (1e-6, 10.0))
                if "e_memory" in name or "network" in name or "flex" in name:
                    low, high = 0.2, 1.0
                for factor in (step, 1 / step):
                    while True:
                        old = place[key]
                        new = min(max(old * factor, low), high)
                        if new == old:
                            break
                        place[key] = new
                        loss = self.loss()
                        if loss < best - 1e-6:
                            best = loss
                            continue
                        place[key] = old
                        break
            print(f"round {turn}: step {step:.3f}, loss {best:.4f}", flush=True)
            step = step**0.6
        for name, place, key in self.parameters():
            place[key] = float(f"{place[key]:.3g}")
            print(f"  {name:40} {place[key]}")

    def sign(self) -> None:
        """Writes what the values rest on beside them."""
        ratios = self.ratios()
        text = f"fitted with bench/fit_calibration.py on {len(self.cases)} published training steps, median error {np.median(np.abs(ratios - 1)):.1%}"
        for name in GLOBALS:
            self.tables["calibration"][name]["source"] = text
        for kind in KINDS:
            self.tables["rows"][kind]["sustained_calibration"]["source"] = text
        print(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, action="append", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--most", type=int, default=1000, help="rows per model, accelerator, framework and precision")
    parser.add_argument("--write", action="store_true", help="update src/hapmoe/data")
    arguments = parser.parse_args()
    fit = Fit(load(arguments.rows), arguments.most)
    fit.run(arguments.rounds)
    fit.sign()
    if arguments.write:
        (DATA / "efficiency.yaml").write_text(yaml.safe_dump(efficiency._tables(), sort_keys=False, width=120))
        (DATA / "fabrics.yaml").write_text(yaml.safe_dump(comm._tables(), sort_keys=False, width=120))


if __name__ == "__main__":
    main()
