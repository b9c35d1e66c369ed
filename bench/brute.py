"""The search against brute force, at length: ``python -m bench.brute [--instances N] [--first SEED]``.

What ``tests/test_search_brute.py`` does with 300 spaces, with larger ones: 2 or 3 kinds, up to 10 layers
(dense and MoE mixed), up to 16 devices, all degrees, memory tight enough to matter in four of five. Every
plan of a space is judged by ``cost.evaluate``; search and enumeration must agree, and no bound may exceed
the best step of its grid point. Stops at the first that differs, with its seed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

DEVICES, LAYERS, KINDS = (4, 8, 8, 12, 16), (3, 4, 5, 6, 8, 10), (2, 3)
COUNTED = ("equal", "recomputing", "infeasible")
"""Outcomes of spaces that hold a legal plan and few enough to list."""


def main() -> None:
    from test_search_brute import run_space

    parser = argparse.ArgumentParser(prog="python -m bench.brute", description=__doc__.splitlines()[0])
    parser.add_argument("--instances", type=int, default=1000, metavar="N")
    parser.add_argument("--first", type=int, default=0, metavar="SEED")
    options = parser.parse_args()
    outcomes: Counter[str] = Counter()
    seed, began = options.first, time.process_time()
    while sum(outcomes[name] for name in COUNTED) < options.instances:
        outcomes[run_space(seed, DEVICES, LAYERS, KINDS)] += 1
        seed += 1
        if seed % 20 == 0:
            print(f"{sum(outcomes[name] for name in COUNTED)} of {options.instances}", file=sys.stderr, flush=True)
    print(
        f"{options.instances} spaces, search and brute force agree on all: {outcomes['equal']} plans without and "
        f"{outcomes['recomputing']} with recomputation, {outcomes['infeasible']} times nothing fits.\n"
        f"Drawn besides: {outcomes['nothing legal']} without a legal plan, {outcomes['too large']} too large to list. "
        f"{time.process_time() - began:.0f} s CPU, seeds {options.first} to {seed - 1}."
    )


if __name__ == "__main__":
    main()
