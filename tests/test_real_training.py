"""Emitted launchers train real Megatron-Core: the real torchrun, gloo, and losses equal to one rank's.

A few plans here; ``python -m bench.real`` has more of them, and resumes under another plan.
"""

from __future__ import annotations

from functools import cache

import pytest
from bench.lab import BLOCK, MOE, Case, Run, block, run
from bench.real import compare_with_reference

from hapmoe.plan import Recompute


@cache
def one_rank() -> Run:
    return run(Case("one rank"))


CASES = (
    # Two pools: two nodes that start by themselves and meet at the static rendezvous.
    Case("two kinds, uneven, per-stage recomputation", (3, 1), recompute=(BLOCK, MOE), pools=("fast", "slow")),
    Case("tp2 ep2 allgather", tp=2, ep=2, flags={"--moe-token-dispatcher-type": "allgather"}),
    Case("pp2 vpp2 ep2, uneven", (3, 1), vpp=2, dp=2, ep=2, recompute=(block(1), Recompute())),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_losses_layers_and_parameters(case: Case) -> None:
    found = run(case)
    assert sorted(found.losses) == [1, 2, 3]
    outcome = compare_with_reference(found, one_rank())
    assert outcome.layers_as_planned and outcome.parameters_as_counted
    assert outcome.loss_error < 1e-5 and outcome.norm_error < 1e-4
    settings = [rows[0]["recompute"] for rows in found.rows("start")]
    for stage in found.plan.stages:
        first, count = stage.first_rank, stage.num_devices
        granularity = None if stage.recompute.granularity == "none" else stage.recompute.granularity
        assert [one[0] for one in settings[first : first + count]] == [granularity] * count


def test_it_learns() -> None:
    losses = list(run(Case("longer", flags={"--train-iters": "16"})).losses.values())
    assert sum(losses[-4:]) / 4 < sum(losses[:4]) / 4 - 0.1
