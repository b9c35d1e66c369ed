"""What the probe costs a training: ``python -m bench.probe [--json] [--iterations N]``.

Trainings with the probe, which measures three of their iterations, alternate with trainings without: CPU time per
iteration and rank (not wall time) while it measures and after it has gone, over the CPU time of a fixed piece of
work behind the iteration (``hapmoe.lab.pace``). A machine with other work still shows differences of some percent
between equal trainings. So the bound is given too: all that can remain is wrappers of torch.distributed that
Megatron bound when it was imported; their calls, times what one costs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import timeit
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.lab import Case, Run, run
from hapmoe.probe.collectives import Collectives
from hapmoe.probe.patches import Patches
from hapmoe.profiling.probed import load_ranks

__all__ = ["main"]

STEPS = 3
_SKIPPED = STEPS + 2
"""Iterations that are not compared: those measured, and the first two behind them."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.probe", description=__doc__)
    parser.add_argument("--iterations", type=int, default=40, metavar="N")
    parser.add_argument("--rounds", type=int, default=2, metavar="N", help="trainings of each kind, alternating")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    flags = {"--train-iters": str(options.iterations), "--hidden-size": "128", "--use-distributed-optimizer": None}
    case = Case("ep2 dp2", ep=2, dp=2, flags=flags)
    seconds: dict[tuple[bool, bool], list[float]] = {(probed, late): [] for probed in (0, 1) for late in (0, 1)}
    variables = {"HAPMOE_PROBE_STEPS": str(STEPS), "HAPMOE_LAB_PACE": "1"}
    plain_s: list[float] = []
    with tempfile.TemporaryDirectory(prefix="hapmoe-probe-") as folder:
        for number in range(options.rounds):
            for probed in (False, True):
                out = Path(folder) / str(number) if probed else None
                found = run(case, probe=out, variables=variables, timeout_s=600)
                for late in (False, True):
                    seconds[probed, late] += [row["cpu_s"] / row["pace_s"] for row in _iterations(found, late=late)]
                if not probed:
                    plain_s += [row["cpu_s"] for row in _iterations(found, late=True)]
        calls = sum(row.calls for row in load_ranks(Path(folder) / "0")[0].steps[-1].collectives)
    median = {key: statistics.median(values) for key, values in seconds.items()}
    result = {
        "cpu_s_per_iteration": statistics.median(plain_s),
        "while_measuring": median[True, False] / median[False, False] - 1.0,
        "afterwards": median[True, True] / median[False, True] - 1.0,
        "iterations_compared": len(seconds[True, True]),
        "afterwards_at_most": calls * _pass_on_s() / statistics.median(plain_s),
    }
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        print(f"{result['cpu_s_per_iteration'] * 1e3:.1f} ms CPU an iteration without the probe")
        print(f"while it measures: {result['while_measuring']:+.1%}")
        print(f"afterwards:        {result['afterwards']:+.2%} (medians of {result['iterations_compared']} iterations)")
        print(f"                   at most {result['afterwards_at_most']:.3%}: {calls} calls that are passed on")
    return 0 if result["afterwards_at_most"] < 0.01 else 1


def _pass_on_s() -> float:
    """What a wrapper that is no longer active adds to one call."""
    module = types.SimpleNamespace(act=lambda *_, **__: None)
    bare, collectives, patches = module.act, Collectives(), Patches()
    patches.wrap(module, "act", collectives.wrapper("all_reduce", 0, "tensor"))
    count = 200_000
    wrapped = timeit.timeit(lambda: module.act(0, group=None), number=count)
    return max(0.0, wrapped - timeit.timeit(lambda: bare(0, group=None), number=count)) / count


def _iterations(found: Run, *, late: bool) -> list[dict[str, Any]]:
    """Of the iterations that are measured without the first, or of those behind them."""
    rows = [rows[_SKIPPED:] if late else rows[1:STEPS] for rows in found.rows("iteration")]
    return [row for rank in rows for row in rank]


if __name__ == "__main__":
    sys.exit(main())
