"""What calibration is worth on published runs: ``python -m bench.calibrate --rows FILE ... [--json]``.

Rows in the format of throughput.yaml. Groups are runs of one model on one cluster with one batch, four
or more of them; in each group every run is left out in turn, the others are fitted (step times only),
and the left-out step is predicted. Errors are absolute, as fractions.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from pathlib import Path

from bench.rows import Case, Skip, case_of, load, stated_step_s
from hapmoe.calibration import Observed, calibrate
from hapmoe.errors import HapmoeError
from hapmoe.resolve import resolve
from hapmoe.tables import shape_key
from hapmoe.workload import model_flops_per_step

MOST = 8  # runs of a group


def groups_of(paths: list[Path]) -> dict[tuple[object, ...], list[tuple[Case, Observed]]]:
    """Runs that differ in their plan only, as a log of their step time would show them."""
    groups: dict[tuple[object, ...], list[tuple[Case, Observed]]] = defaultdict(list)
    for row in load(paths):
        try:
            case = case_of(row)
            step_s = stated_step_s(row, model_flops_per_step(case.job))
            plan = resolve(case.job, case.cluster, case.plan)
        except (Skip, HapmoeError):
            continue
        if step_s:
            pool, training = case.cluster.pools[0], case.job.training
            shape = pool.device.name, pool.nodes, pool.devices_per_node, training.seq_len, training.global_batch_size
            run = Observed(str(row["id"]), plan, step_s, {}, {}, {}, 1)
            groups[shape_key(case.job), case.job.model.num_layers, *shape].append((case, run))
    return {key: runs for key, runs in groups.items() if len(runs) >= 4}


def main() -> None:
    """Print a line per group, and all of them together."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", action="append", type=Path, required=True)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    lines, before, after = [], [], []
    for key, runs in groups_of(options.rows).items():
        case = runs[0][0]
        found = calibrate(case.job, case.cluster, [run for _, run in runs[:MOST]])
        was, now = zip(*found.left_out, strict=True)
        before += was
        after += now
        factors = {term.term: round(term.value, 3) for term in found.terms}
        lines.append(
            {
                "model": key[0],
                "device": case.cluster.pools[0].device.name,
                "devices": case.cluster.num_devices,
                "runs": len(was),
                "before": statistics.median(was),
                "after": statistics.median(now),
                "factors": factors,
            }
        )
        if not options.json:
            line = lines[-1]
            print(
                f"{line['model']:34} {line['device']:16} {line['devices']:5} devices {line['runs']} runs "
                f"{line['before']:6.1%} -> {line['after']:6.1%}  {factors}",
                flush=True,
            )
    better = sum(line["after"] < line["before"] for line in lines)
    whole = {"groups": len(lines), "groups_better": better, "runs": len(before)}
    if before:
        whole |= {"before": statistics.median(before), "after": statistics.median(after)}
    if options.json:
        print(json.dumps(whole | {"rows": lines}, indent=1))
    elif before:
        print(
            f"{len(before)} runs of {len(lines)} groups, each left out: median error {whole['before']:.1%}, calibrated "
            f"{whole['after']:.1%}; better in {better} groups"
        )


if __name__ == "__main__":
    main()
