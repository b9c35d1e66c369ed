"""What a model has to beat: one achieved rate per device kind, precision and dense or MoE, and the pipeline bubble."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

from bench.fit_calibration import Row
from hapmoe.workload import model_flops_per_step

Array = NDArray[np.float64]


def baseline(rows: list[Row], *, left_out: bool) -> Array:
    """log(predicted / stated) of each row: the rate is the median of its kind, without its own group if ``left_out``.

    A kind without other groups takes the median share of the peak of all kinds in that precision.
    """
    exact: dict[tuple[object, ...], list[tuple[tuple[str, str], float]]] = defaultdict(list)
    wide: dict[tuple[object, ...], list[tuple[tuple[str, str], float]]] = defaultdict(list)
    keys, ideal = [], []
    for row in rows:
        training, plan = row.case.job.training, row.case.plan
        device = row.case.cluster.pools[0].device
        precision = "fp4" if training.fp4 else "fp8" if training.fp8_recipe else "bf16"
        peak = device.peak_flop_per_s.get(precision) or max(device.peak_flop_per_s.values())
        bubble = 1 + (plan.pp - 1) / (plan.vpp * plan.num_microbatches)
        ideal.append(np.log(model_flops_per_step(row.case.job) / plan.num_devices * bubble / peak))
        moe = row.case.job.model.moe is not None
        keys.append(((device.name, precision, moe), (precision, moe)))
        slowness = np.log(row.stated_s) - ideal[-1]
        exact[keys[-1][0]].append((row.group, slowness))
        wide[keys[-1][1]].append((row.group, slowness))
    result = np.zeros(len(rows))
    for index, (row, (narrow, broad)) in enumerate(zip(rows, keys, strict=True)):
        for entries in (exact[narrow], wide[broad]):
            others = [value for group, value in entries if not (left_out and group == row.group)]
            if others:
                result[index] = np.median(others) + ideal[index] - np.log(row.stated_s)
                break
    return result
