"""Fits the calibrations of data/efficiency.yaml and data/fabrics.yaml on whole training steps.

    python -m bench.fit_calibration --rows FILE [--rows FILE] [--write]

One value per device kind and precision (sustained), one per effect (everything else), all models of
family megatron at once; never per row or per model. Rows of one (model, accelerator) share one vote
(square root of their number). Method: coordinate search, dense rows first, on the weighted mean of |log ratio|, each
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
# Dense models fix the rates of kernels and links, MoE models then what only they do.
DENSE = (
    "host_dense_s_calibration",
    "host_backward_calibration",
    "step_s_calibration",
    "tp_overlap_exposed_calibration",
    "async_exposed_calibration",
    "collective_slowdown_calibration",
)
MOE = (
    "grouped_gemm_bf16_calibration",
    "grouped_gemm_fp8_calibration",
    "host_moe_s_calibration",
    "host_graph_share_calibration",
    "moe_overlap_exposed_calibration",
)
LIMITS = {
    "exposed": (0.05, 0.9),
    "grouped": (0.3, 0.95),
    "graph_share": (0.1, 1.0),
    "host_backward": (0.8, 2.0),
    "sustained": (0.5, 1.1),
    "slowdown": (1.0, 1.6),
    "e_memory": (0.2, 0.8),
}


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
        self.chosen = np.ones(len(self.cases), dtype=bool)
        self.fitted: list[tuple[str, dict[str, Any], str]] = []

    def ratios(self) -> Any:
        efficiency._efficiency.cache_clear()
        comm._fabric.cache_clear()
        chosen = [entry for entry, use in zip(self.cases, self.chosen, strict=True) if use]
        return np.array([evaluate(case.job, case.cluster, case.plan).step_s / stated for _, case, stated in chosen])

    def loss(self) -> float:
        error = np.minimum(np.abs(np.log(self.ratios())), 0.5)
        return float((self.weights[self.chosen] * error).sum() / self.weights[self.chosen].sum())

    def parameters(self, moe: bool) -> list[tuple[str, dict[str, Any], str]]:
        """(name, table, key) of what a phase may change."""
        found: list[tuple[str, dict[str, Any], str]] = []
        used = Counter(
            (case.cluster.pools[0].device.efficiency, _precision(case))
            for row, case, _ in self.cases
            if bool(row["arch"].get("experts")) == moe
        )
        for kind in KINDS:
            row = self.tables["rows"][kind].setdefault("sustained_calibration", {})
            borrowers = {kind} | {n for n, r in self.tables["rows"].items() if r.get("borrow") == kind}
            for precision in ("bf16", "fp8", "fp4"):
                rows = sum(used[name, precision] for name in borrowers)
                if rows and precision not in row:
                    row[precision] = 0.85
                    found.append((f"sustained {kind} {precision} ({rows} rows)", row, precision))
                elif rows and not moe:
                    found.append((f"sustained {kind} {precision} ({rows} rows)", row, precision))
        found += [(name, self.tables["calibration"][name], "value") for name in (MOE if moe else DENSE)]
        if moe:
            found.append(("permute e_memory", self.tables["common"]["permute"], "e_memory"))
        return found

    def run(self, steps: tuple[float, ...], *, moe: bool) -> None:
        self.chosen = np.array([bool(row["arch"].get("experts")) == moe for row, _, _ in self.cases])
        parameters = self.parameters(moe)
        self.fitted += parameters
        best = self.loss()
        print(f"{int(self.chosen.sum())} rows, loss {best:.4f}")
        for step in steps:
            for name, place, key in parameters:
                low, high = next((limit for part, limit in LIMITS.items() if part in name), (1e-6, 10.0))
                for factor in (step, 1 / step):
                    improved = False
                    while True:
                        old = place[key]
                        place[key] = min(max(old * factor, low), high)
                        loss = self.loss() if place[key] != old else best
                        if loss >= best - 1e-6:
                            place[key] = old
                            break
                        best, improved = loss, True
                    if improved:
                        break
            print(f"step {step:.3f}, loss {best:.4f}", flush=True)
        for name, place, key in parameters:
            place[key] = float(f"{place[key]:.3g}")
            print(f"  {name:44} {place[key]}")

    def sign(self) -> None:
        """Writes what the values rest on beside them."""
        self.chosen[:] = True
        ratios = self.ratios()
        error = float(np.median(np.abs(ratios - 1)))
        text = f"bench/fit_calibration.py on {len(self.cases)} published training steps"
        text += f"; median error on these same rows {error:.1%}"
        for name, place, key in self.fitted:
            low, high = next((limit for part, limit in LIMITS.items() if part in name), (1e-6, 10.0))
            # a value on its bound says that the bound chose it, not the rows
            place[f"{key}_source" if key in ("bf16", "fp8", "fp4") else "source"] = text + (
                f"; ON ITS BOUND {place[key]}" if place[key] in (low, high) else ""
            )
        print(text)


def _precision(case: Case) -> str:
    training = case.job.training
    return "fp4" if training.fp4 else "fp8" if training.fp8_recipe else "bf16"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, action="append", required=True)
    parser.add_argument("--most", type=int, default=1000, help="rows per model, accelerator, framework and precision")
    parser.add_argument("--phase", choices=["dense", "moe", "both"], default="both")
    parser.add_argument("--write", action="store_true", help="update src/hapmoe/data")
    arguments = parser.parse_args()
    fit = Fit(load(arguments.rows), arguments.most)
    steps = (1.25, 1.12, 1.06, 1.03)
    for moe in (False, True):
        if arguments.phase in ("both", "moe" if moe else "dense"):
            fit.run(steps, moe=moe)
    fit.sign()
    if arguments.write:
        (DATA / "efficiency.yaml").write_text(yaml.safe_dump(efficiency._tables(), sort_keys=False, width=120))
        (DATA / "fabrics.yaml").write_text(yaml.safe_dump(comm._tables(), sort_keys=False, width=120))


if __name__ == "__main__":
    main()
