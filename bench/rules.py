"""Our verdicts against Megatron-Core's own: ``python -m bench.rules [--plans 2000] [--layouts 3000] [--json]``.

Random plans go through the rules and, as emitted arguments, through Megatron-Core's process groups (on a
fake back end), TransformerConfig and microbatch calculator. Random layouts go through its layout parser
and back. Exit code 1 where a single one disagrees. The tests do a tenth of it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from layout_round_trip import round_trip
from plan_verdicts import judge, random_case


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, default=2000)
    parser.add_argument("--layouts", type=int, default=3000)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    began = time.perf_counter()
    counts = {"legal": 0, "refused": 0}
    differ: list[dict[str, object]] = []
    for seed in range(given.plans):
        verdict = judge(*random_case(seed))
        counts["refused" if verdict.ours else "legal"] += 1
        if not verdict.agree:
            differ.append({"seed": seed, "ours": verdict.ours, "megatron": verdict.theirs})
    wrong = [(seed, said) for seed in range(given.layouts) if (said := round_trip(seed))]
    result = {
        "plans": given.plans,
        **counts,
        "differ": differ,
        "layouts": given.layouts,
        "layouts_wrong": wrong,
        "wall_s": round(time.perf_counter() - began, 1),
    }
    if given.json:
        print(json.dumps(result, indent=1))
    else:
        print(
            f"{given.plans} plans: {counts['legal']} legal, {counts['refused']} refused, {len(differ)} judged otherwise"
        )
        print(f"{given.layouts} layouts: {len(wrong)} come back otherwise from Megatron's parser")
        for line in (*differ[:10], *wrong[:10]):
            print(" ", line)
    return 1 if differ or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
