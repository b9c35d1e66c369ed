"""Whole plans: our verdict is Megatron-Core's. Ten times as many: ``python -m bench.rules``."""

from __future__ import annotations

from collections import Counter

from layout_round_trip import round_trip
from plan_verdicts import judge, random_case


def test_200_random_plans_are_judged_as_megatron_judges_them() -> None:
    counts: Counter[bool] = Counter()
    for seed in range(200):
        verdict = judge(*random_case(seed))
        assert verdict.agree, (seed, verdict)
        counts[bool(verdict.ours)] += 1
    assert min(counts.values()) > 50, counts


def test_300_random_layouts_come_back_from_megatrons_parser() -> None:
    assert [said for seed in range(300) if (said := round_trip(seed))] == []
