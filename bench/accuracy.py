"""How far predictions are from published results: ``python -m bench.accuracy [--rows FILE ...] [--json] [--left-out]``.

Rows in the format of throughput.yaml (step time) or memory.yaml (peak memory). Errors are absolute
percentage errors as fractions; "overall" are the rows of family megatron. ``--left-out`` adds what the
calibrations would give on each (model, accelerator) if they had been fitted without it, and a trivial
baseline both ways (minutes: it needs the derivatives of every calibration).
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bench.baseline import baseline
from bench.fit_calibration import derivatives, left_out, log_ratios, parameters, rows_of
from bench.habits import modern
from bench.rows import Skip, case_of, load, stated_step_s
from hapmoe.cost import evaluate
from hapmoe.efficiency import load_yaml
from hapmoe.errors import HapmoeError
from hapmoe.plan import Estimate, StageEstimate
from hapmoe.workload import model_flops_per_step

DRIVER = float(load_yaml("memory.yaml")["device_over_allocated_calibration"]["value"])
MEMORY_KEYS = {
    # result field -> bytes per unit, and whether context and communication buffers are inside
    "max_alloc_bytes": (1.0, False),
    "peak_alloc_bytes": (1.0, False),
    "peak_alloc_gib": (2.0**30, False),
    "peak_alloc_gb": (1e9, False),
    "peak_bytes": (1.0, False),
    "peak_gib": (2.0**30, True),
    "used_gib": (2.0**30, True),
    "used_gb": (2.0**30, True),
}


def predict(row: dict[str, Any]) -> tuple[float, float]:
    """(predicted, stated) step seconds, or bytes for a memory row."""
    case = case_of(row)
    stated = stated_memory(row)
    if stated is None:
        flops = model_flops_per_step(case.job)
        seconds = stated_step_s(row, flops)
        if seconds is None:
            raise Skip("no step time, tokens/s or TFLOP/s stated")
        return evaluate(case.job, case.cluster, case.plan).step_s, seconds
    value, whole, stage = stated
    if str(row.get("which")).startswith("after the first iteration"):
        # the router is still random: no skew yet
        training = msgspec.structs.replace(case.job.training, imbalance=None)
        if training.precision == "fp16":  # the loss scale overflows in the first step, which makes no moments yet
            training = msgspec.structs.replace(training, exp_avg_bytes=0, exp_avg_sq_bytes=0)
        case = replace(case, job=msgspec.structs.replace(case.job, training=training))
    return memory_of(evaluate(case.job, case.cluster, case.plan), whole, stage), value


def of_memory(row: dict[str, Any]) -> bool:
    """Is it a memory row? "nvshmem" in a name does not make it one."""
    return "which" in row or re.search(r"\bmem", row["id"]) is not None


def stated_memory(row: dict[str, Any]) -> tuple[float, bool, str] | None:
    """(bytes, does it include workspace, which stage) of a memory row; None for a throughput row."""
    if not of_memory(row):
        return None
    if row.get("use") == "not for peak error":
        raise Skip("the row says it is not for peak error")
    which = str(row.get("which") or "")
    stage = "last" if which.startswith("last rank") else "first" if "first" in which and "last" not in which else "max"
    for key, (unit, whole) in MEMORY_KEYS.items():
        if row["result"].get(key):
            return float(row["result"][key]) * unit, whole, stage
    by_rank = row["result"].get("max_allocated_mib_by_rank")
    if by_rank:
        return max(float(value) for value in by_rank.values()) * 2**20, False, "max"
    raise Skip("no peak memory stated")


def memory_of(estimate: Estimate, whole: bool, stage: str) -> float:
    def held(entry: StageEstimate) -> float:
        allocated = entry.memory_bytes - entry.memory.workspace
        return allocated * DRIVER + entry.memory.workspace if whole else allocated

    if stage in ("first", "last"):
        return held(estimate.stages[0 if stage == "first" else -1])
    return max(held(entry) for entry in estimate.stages)


def called_out_of_memory(row: dict[str, Any]) -> bool:
    """Does the model say that the row runs out of memory?

    Software before 2023 cannot give cached blocks back: there the driver's reading counts.
    """
    case = case_of(row)
    estimate = evaluate(case.job, case.cluster, case.plan)
    if modern(row):
        return not estimate.fits
    return memory_of(estimate, True, "max") > case.cluster.pools[0].device.memory_bytes


def outcomes(rows: list[dict[str, Any]]) -> dict[str, int]:
    """Of memory rows: how many ran out of memory and were called so, how many ran and were not."""
    counts = {"oom": 0, "oom_called": 0, "ran": 0, "ran_called_oom": 0}
    for row in rows:
        if not of_memory(row):
            continue
        try:
            called = called_out_of_memory(row)
        except (Skip, HapmoeError):
            continue
        kind = "oom" if row["result"].get("oom") else "ran"
        counts[kind] += 1
        counts["oom_called" if kind == "oom" else "ran_called_oom"] += called
    return counts


def kendall_tau(groups: dict[str, list[tuple[float, float]]]) -> float | None:
    """Rank correlation over all pairs inside groups of equal hardware and model; equal predictions count as neither."""
    agree = total = 0
    for pairs in groups.values():
        for i, (p, q) in enumerate(pairs):
            for r, s in pairs[i + 1 :]:
                if q != s:
                    total += 1
                    agree += int(np.sign((p - r) * (q - s)))
    return agree / total if total else None


def alike(row: dict[str, Any]) -> str:
    """Hardware and model: what rank correlation looks inside of."""
    return f"{row['hw'].get('gpu')} {row['hw']['count']} {row['model']}"


def summary(entries: list[tuple[dict[str, Any], float, float]]) -> dict[str, Any]:
    errors = sorted(abs(predicted / stated - 1) for _, predicted, stated in entries)
    if not errors:
        return {"rows": 0}
    groups: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row, predicted, stated in entries:
        tokens = float(row["gbs"]) * float(row["seq"])
        groups[alike(row)].append((predicted / tokens, stated / tokens))
    return {
        "rows": len(errors),
        "median_ape": statistics.median(errors),
        "mean_ape": statistics.fmean(errors),
        "p90_ape": errors[min(len(errors) - 1, int(0.9 * len(errors)))],
        "bias": statistics.median(predicted / stated - 1 for _, predicted, stated in entries),
        "kendall_tau": kendall_tau(groups),
    }


def measure(rows: list[dict[str, Any]]) -> tuple[dict[str, Any], list[tuple[dict[str, Any], float, float]]]:
    """The report, and every row with its predicted and stated value."""
    entries, skipped = [], {}
    for row in rows:
        try:
            predicted, stated = predict(row)
            entries.append((row, predicted, stated))
        except (Skip, HapmoeError) as reason:
            skipped[row["id"]] = str(reason)
    megatron = [entry for entry in entries if entry[0].get("family") == "megatron"]
    families: dict[str, list[tuple[dict[str, Any], float, float]]] = defaultdict(list)
    for entry in entries:
        families[str(entry[0].get("family"))].append(entry)
    report = {
        "overall": summary(megatron) | {"skipped": len(skipped)},
        "moe": summary([entry for entry in megatron if entry[0]["arch"].get("experts")]),
        "families": {name: summary(part) for name, part in sorted(families.items())},
        "skipped": skipped,
        "outcomes": outcomes(rows),
    }
    return report, entries


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, action="append", required=True)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--left-out", action="store_true", help="errors on groups left out of the fit (minutes)")
    parser.add_argument("--by", choices=["gpu", "model", "framework", "source", "row"], help="one more line per group")
    arguments = parser.parse_args()
    report, entries = measure(load(arguments.rows))
    if arguments.json:
        json.dump(report, sys.stdout, indent=1)
        return
    lines = [("overall", report["overall"]), ("moe", report["moe"]), *report["families"].items()]
    if arguments.by:
        groups: dict[str, list[tuple[dict[str, Any], float, float]]] = defaultdict(list)
        for row, predicted, stated in entries:
            name = {"gpu": row["hw"].get("gpu"), "row": row["id"]}.get(arguments.by, row.get(arguments.by))
            groups[str(name)[:44]].append((row, predicted, stated))
        lines += [(name, summary(part)) for name, part in sorted(groups.items())]
    print(f"{'':46}{'rows':>5} {'median':>7} {'p90':>7} {'bias':>7} {'tau':>6}")
    for name, part in lines:
        if part["rows"]:
            tau = "" if part["kendall_tau"] is None else f"{part['kendall_tau']:6.2f}"
            errors = f"{part['median_ape']:7.1%} {part['p90_ape']:7.1%} {part['bias']:+7.1%}"
            print(f"{name:46}{part['rows']:5} {errors} {tau:>6}")
    print(f"{len(report['skipped'])} rows skipped")
    if (found := report["outcomes"])["oom"]:
        print(
            "ran out of memory: {oom_called} of {oom} called so; called so of {ran} that ran: {ran_called_oom}".format(
                **found
            )
        )
    if arguments.left_out:
        show_left_out(arguments.rows)


def show_left_out(paths: list[Path]) -> None:
    """Prints errors on left-out groups beside those of the fit and of the baseline: steps of family megatron."""
    rows = rows_of(load(paths))
    now = log_ratios(rows)
    found = parameters(rows)
    kinds = {
        "model": now,
        "model, group left out": left_out(rows, found, now, derivatives(rows, found, now)),
        "baseline": baseline(rows, left_out=False),
        "baseline, group left out": baseline(rows, left_out=True),
    }
    moe = np.asarray([row.case.job.model.moe is not None for row in rows])
    for name, residual in kinds.items():
        for part, chosen in (("overall", np.ones(len(rows), dtype=bool)), ("moe", moe), ("dense", ~moe)):
            size = np.abs(np.expm1(residual[chosen]))
            groups: dict[str, list[tuple[float, float]]] = defaultdict(list)
            for row, error, mine in zip(rows, residual, chosen, strict=True):
                if mine:
                    stated = row.stated_s / (float(row.row["gbs"]) * float(row.row["seq"]))
                    groups[alike(row.row)].append((stated * float(np.exp(error)), stated))
            errors = f"{np.median(size):7.1%} {np.percentile(size, 90):7.1%}"
            print(f"{name + ', ' + part:46}{len(size):5} {errors} {kendall_tau(groups) or 0.0:15.2f}")


if __name__ == "__main__":
    main()
