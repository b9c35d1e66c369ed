"""Fits the calibrations of data/efficiency.yaml on whole training steps.

    python -m bench.fit_calibration --rows FILE [--rows FILE] [--write]

One value per device kind and precision (sustained), one per effect (everything else), all models of
family megatron at once; never per row or per model. Rows of one (model, accelerator) share one vote
(square root of their number). Method: Gauss-Newton on log(predicted / stated) over the logarithms of
the parameters, weights that make the loss the sum of absolute errors, a row's pull cut where it is
off by more than a factor 1.6 (it measures something else), and a pull of every parameter towards where it
started, worth as much as ``PRIOR`` says. The same derivatives give the error on left-out groups:
``without`` fits again with a group's rows taken away, in the linear model.
"""

from __future__ import annotations

import argparse
import re
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from bench.fit_efficiency import DATA
from bench.rows import Case, Skip, case_of, group_of, load, stated_step_s
from hapmoe import comm, efficiency
from hapmoe.cost import step_s
from hapmoe.errors import HapmoeError
from hapmoe.workload import model_flops_per_step

Array = NDArray[np.float64]

KINDS = ("v100", "t4", "a100", "h100", "b200", "b300", "gb200", "gb300", "mi355x", "ascend910b", "max1550")
EFFECTS = {
    # calibration: (lowest, highest) value that its meaning allows
    "grouped_gemm_bf16_calibration": (0.4, 1.0),
    "grouped_gemm_fp8_calibration": (0.4, 1.0),
    "moe_elementwise_calibration": (1.0, 3.0),
    "step_s_calibration": (5e-3, 0.2),
    "fp8_fine_scaling_calibration": (0.7, 1.0),
    "fp8_quantize_calibration": (0.7, 4.0),
    "host_dense_s_calibration": (5e-5, 2e-3),
    "host_moe_s_calibration": (1e-4, 8e-3),
    "host_expert_s_calibration": (1e-6, 3e-4),
    "host_hybridep_calibration": (0.05, 1.0),
    "host_exposed_calibration": (0.01, 1.0),
    "host_backward_calibration": (0.8, 2.5),
    "host_graph_share_calibration": (0.02, 1.0),
    "attention_calibration": (0.6, 1.6),
    "tp_overlap_exposed_calibration": (0.05, 0.95),
    "moe_overlap_exposed_calibration": (0.05, 0.95),
    "age_per_year_calibration": (1.0, 1.3),
}
PRIOR = 0.4
"""One standard deviation of a parameter around its start, in its logarithm."""
CUT = 0.5


@dataclass(frozen=True, slots=True)
class Parameter:
    """A number in a table, with its bounds and the rows that it can move."""

    name: str
    table: dict[str, Any]
    key: str
    low: float
    high: float
    touches: Callable[[Case], bool]

    @property
    def value(self) -> float:
        return float(self.table[self.key])


@dataclass(frozen=True, slots=True)
class Row:
    """A published step that can be predicted."""

    row: dict[str, Any]
    case: Case
    stated_s: float

    @property
    def group(self) -> tuple[str, str]:
        return group_of(self.row)


def rows_of(rows: list[dict[str, Any]]) -> list[Row]:
    """The rows of family megatron that can be translated."""
    found = []
    for row in rows:
        if row.get("family") != "megatron":
            continue
        try:
            case = case_of(row)
        except (Skip, HapmoeError):
            continue
        stated = stated_step_s(row, model_flops_per_step(case.job))
        if stated:
            found.append(Row(row, case, stated))
    return found


def parameters(rows: list[Row]) -> list[Parameter]:
    """Everything the fit may change: the effects, and sustained rates of the kinds that have rows."""
    tables = efficiency._tables()
    found = []
    for name, (low, high) in EFFECTS.items():
        if name in tables["calibration"]:
            found.append(Parameter(name, tables["calibration"][name], "value", low, high, _touches(name)))
    common = tables["common"]
    found.append(Parameter("permute e_memory", common["permute"], "e_memory", 0.2, 0.8, _has_experts))
    found.append(Parameter("elementwise e_memory", common["elementwise"], "e_memory", 0.2, 0.9, lambda case: True))
    efa = comm._tables()["network_kinds"]["efa"]["flex"]
    found.append(Parameter("efa flex per_node_s", efa, "per_node_s", 4e-6, 2e-3, _flex_on_efa))
    used = Counter((_lender(row.case), _precision(row.case)) for row in rows)
    for kind in KINDS:
        for precision in ("bf16", "fp8", "fp4"):
            if used[kind, precision]:
                table = tables["rows"][kind].setdefault("sustained_calibration", {})
                table.setdefault(precision, 0.85)

                def touches(case: Case, kind: str = kind, precision: str = precision) -> bool:
                    return (_lender(case), _precision(case)) == (kind, precision)

                found.append(Parameter(f"sustained {kind} {precision}", table, precision, 0.3, 1.1, touches))
    return found


def _flex_on_efa(case: Case) -> bool:
    return case.job.training.dispatcher == "flex" and case.cluster.pools[0].network.kind == "efa"


def _has_experts(case: Case) -> bool:
    return case.job.model.moe is not None


def _touches(name: str) -> Callable[[Case], bool]:
    """Which cases an effect can move: saves evaluating the others."""
    if re.search(r"moe|grouped|host_hybridep|host_ex", name):
        return _has_experts
    if name.startswith("fp8"):
        return lambda case: case.job.training.fp8_recipe is not None
    if name.startswith("tp_overlap"):
        return lambda case: case.job.training.tp_comm_overlap
    if name.startswith("age"):
        return lambda case: case.job.training.software_date is not None
    return lambda case: True


def _lender(case: Case) -> str:
    """The kind whose sustained rate a case uses."""
    rows = efficiency._tables()["rows"]
    name = case.cluster.pools[0].device.efficiency or "default"
    while name in rows and "sustained_calibration" not in rows[name] and "borrow" in rows[name]:
        name = rows[name]["borrow"]
    return str(name)


def _precision(case: Case) -> str:
    training = case.job.training
    return "fp4" if training.fp4 else "fp8" if training.fp8_recipe else "bf16"


def log_ratios(rows: list[Row], chosen: NDArray[np.bool_] | None = None) -> Array:
    """log(predicted / stated) of the chosen rows (nan elsewhere); equal cases are evaluated once."""
    efficiency._efficiency.cache_clear()
    comm._fabric.cache_clear()
    comm.network_of.cache_clear()
    known: dict[Any, float] = {}
    result = np.full(len(rows), np.nan)
    for index, row in enumerate(rows):
        if chosen is None or chosen[index]:
            key = row.case.key
            if key not in known:
                known[key] = step_s(row.case.job, row.case.cluster, row.case.plan)
            result[index] = np.log(known[key] / row.stated_s)
    return result


def derivatives(rows: list[Row], found: list[Parameter], now: Array) -> Array:
    """[rows, parameters]: change of log_ratios by the logarithm of each parameter."""
    columns = []
    for parameter in found:
        chosen = np.asarray([parameter.touches(row.case) for row in rows])
        old = parameter.value
        step = 0.03 if old * 1.03 <= parameter.high else -0.03
        parameter.table[parameter.key] = old * np.exp(step)
        moved = log_ratios(rows, chosen)
        parameter.table[parameter.key] = old
        columns.append(np.where(chosen, (moved - now) / step, 0.0))
    return np.stack(columns, axis=1)


def votes(rows: list[Row]) -> Array:
    """Rows of one model on one accelerator share a vote that grows with the root of their number.

    Rows that their collector flags (noise, a set-up made to compare back ends) have a tenth of one.
    """
    sizes = Counter(row.group for row in rows)
    return np.asarray([sizes[row.group] ** -0.5 * (0.1 if row.row.get("flags") else 1.0) for row in rows])


def without(residual: Array, slope: Array, weight: Array, start: Array, low: Array, high: Array) -> Array:
    """Change of the parameters' logarithms that a robust linear fit asks for.

    ``start`` (logarithms, relative to now) is what the prior pulls to; ``low`` and ``high`` bound the change.
    """
    change = np.zeros(slope.shape[1])
    for _ in range(30):
        error = residual + slope @ change
        size = np.abs(error)
        pull = weight / np.maximum(size, 0.03) * np.where(size > CUT, (CUT / size) ** 2, 1.0)
        normal = slope.T @ (slope * pull[:, None]) + np.eye(len(change)) * PRIOR**-2
        wanted = -slope.T @ (pull * residual) + start * PRIOR**-2
        step = np.linalg.solve(normal, wanted) - change
        change = np.clip(change + np.clip(step, -0.3, 0.3), low, high)
    return change


def thinned(rows: list[Row], most: int = 5) -> list[Row]:
    """At most so many different cases of a group, spread over it: the others repeat what these say."""
    groups: dict[tuple[str, str], dict[bytes, Row]] = defaultdict(dict)
    for row in rows:
        groups[row.group].setdefault(row.case.key, row)
    chosen = []
    for cases in groups.values():
        ordered = list(cases.values())
        chosen += [ordered[int(at)] for at in np.linspace(0, len(ordered) - 1, min(most, len(ordered)))]
    return chosen


def fit(rows: list[Row], rounds: int, save: Callable[[], None]) -> tuple[list[Parameter], Array, Array]:
    """Fits in place; the parameters, the last residuals and their derivatives.

    The problem is nearly linear in these logarithms: derivatives serve three steps.
    """
    found, weight = parameters(rows), votes(rows)
    begun = np.log([parameter.value for parameter in found])
    now, slope = log_ratios(rows), np.zeros((0, 0))
    print(f"{len(rows)} rows: {_line(now)}", flush=True)
    for step in range(3 * rounds):
        slope = derivatives(rows, found, now) if step % 3 == 0 else slope
        at = np.log([parameter.value for parameter in found])
        low = np.log([parameter.low for parameter in found]) - at
        high = np.log([parameter.high for parameter in found]) - at
        change = without(now, slope, weight, begun - at, np.maximum(low, -0.7), np.minimum(high, 0.7))
        for parameter, place, by in zip(found, at, change, strict=True):
            parameter.table[parameter.key] = float(f"{np.exp(place + by):.3g}")
        now = log_ratios(rows)
        print(_line(now), flush=True)
        save()
    return found, now, slope


def _line(residual: Array) -> str:
    size = np.abs(np.expm1(residual))
    return f"median error {np.median(size):.1%}, 90th percentile {np.percentile(size, 90):.1%}"


def left_out(rows: list[Row], found: list[Parameter], now: Array, slope: Array) -> Array:
    """log(predicted / stated) of each row with the parameters that a fit without its group would have."""
    weight = votes(rows)
    at = np.log([parameter.value for parameter in found])
    low = np.log([parameter.low for parameter in found]) - at
    high = np.log([parameter.high for parameter in found]) - at
    groups = [row.group for row in rows]
    result = now.copy()
    zero = np.zeros(len(found))
    base = without(now, slope, weight, zero, low, high)
    for group in dict.fromkeys(groups):
        mine = np.asarray([other == group for other in groups])
        change = without(now[~mine], slope[~mine], weight[~mine], zero, low, high) - base
        result[mine] = now[mine] + slope[mine] @ change
    return result


def sign(found: list[Parameter], rows: list[Row], now: Array, held_out: Array) -> None:
    """Writes what the values rest on beside them."""
    size, unseen = np.abs(np.expm1(now)), np.abs(np.expm1(held_out))
    text = f"bench/fit_calibration.py on {len(rows)} published training steps; median error {np.median(size):.1%}"
    text += f", {np.median(unseen):.1%} on groups left out of the fit"
    for parameter in found:
        key = "source" if parameter.key == "value" else f"{parameter.key}_source"
        bound = parameter.value in (parameter.low, parameter.high)
        parameter.table[key] = text + (f"; ON ITS BOUND {parameter.value:g}" if bound else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, action="append", required=True)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--write", action="store_true", help="update src/hapmoe/data")
    arguments = parser.parse_args()
    rows = thinned(rows_of(load(arguments.rows)))

    def save() -> None:
        if arguments.write:
            (DATA / "efficiency.yaml").write_text(yaml.safe_dump(efficiency._tables(), sort_keys=False, width=120))

    found, now, slope = fit(rows, arguments.rounds, save)
    held_out = left_out(rows, found, now, slope)
    print(f"left out: {_line(held_out)}")
    moe = np.asarray([bool(row.row["arch"].get("experts")) for row in rows])
    print(f"left out, MoE: {_line(held_out[moe])}; dense: {_line(held_out[~moe])}")
    for parameter in found:
        print(f"  {parameter.name:44} {parameter.value}")
    sign(found, rows, now, held_out)
    save()


if __name__ == "__main__":
    main()
