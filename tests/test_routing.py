"""A routing profile changes the load of the experts, the memory and the plan; drift is told from noise."""

from __future__ import annotations

import random
from pathlib import Path

import builders
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hapmoe import tables
from hapmoe.cost import evaluate
from hapmoe.errors import InputError
from hapmoe.measured import Routing, Run, Table
from hapmoe.planning import plan_job
from hapmoe.replanning import payback
from hapmoe.routing import drift, imbalance, imbalances, with_routing

RUN = Run(date="2026-11-30T00:00:00Z")


def row(*tokens: int, layer: int = 0, microbatch: int = 0) -> Routing:
    return Routing(run=RUN.id, layer=layer, microbatch=microbatch, tokens=tokens)


def test_imbalance_by_hand() -> None:
    """4 experts with 40, 20, 10, 30 of 100 tokens. ep 4: 4 * 0.4; ep 2: 2 * max(0.6, 0.4); one rank has it all."""
    rows = [row(40, 20, 10, 30)]
    assert [imbalance(rows, ep) for ep in (1, 2, 4)] == [1.0, 1.2, 1.6]
    # the mean of the maxima: another rank is the fullest in each microbatch, and the mean load is even
    assert imbalance([row(60, 40), row(40, 60)], 2) == pytest.approx(1.2)
    assert imbalances(rows) == ((1, 1.0), (2, 1.2), (4, 1.6))


@given(st.lists(st.lists(st.integers(0, 1000), min_size=8, max_size=8), min_size=1, max_size=4))
def test_imbalance_falls_with_ep_and_is_between_one_and_ep(loads: list[list[int]]) -> None:
    rows = [row(*load, microbatch=index) for index, load in enumerate(loads)]
    found = [rho for _, rho in imbalances(rows)]
    assert found[0] == 1.0 and all(1.0 <= rho <= ep + 1e-9 for ep, rho in imbalances(rows))
    assert found == sorted(found)


def saved(folder: Path, rows: list[Routing]) -> Path:
    tables.save(folder, Table(kind="routing", device="", runs=(RUN,), rows=tuple(rows)))
    return folder


def test_a_profile_changes_time_memory_and_plan(tmp_path: Path) -> None:
    job, cluster, plan = builders.job(), builders.cluster(builders.pool(nodes=1)), builders.plan(ep=8, dp=8)
    hot = [row(8, 1, 1, 1, 1, 1, 1, 2, layer=layer) for layer in range(8)]  # rho(8) = 8 * 8/16 = 4, rho(2) = 2 * 11/16
    skewed = with_routing(job, saved(tmp_path / "hot", hot))
    assert skewed.training.imbalance_by_ep == ((1, 1.0), (2, 1.375), (4, 2.25), (8, 4.0))
    even = with_routing(job, saved(tmp_path / "even", [row(*[2] * 8)]))
    before, after, plain = (evaluate(each, cluster, plan) for each in (even, skewed, job))
    assert before.step_s == pytest.approx(plain.step_s)
    assert after.step_s > before.step_s
    assert after.stages[0].memory.activations > before.stages[0].memory.activations
    # the same load as --imbalance 4 at this ep
    told = evaluate(
        msgspec.structs.replace(job, training=msgspec.structs.replace(job.training, imbalance=4.0)), cluster, plan
    )
    assert told.step_s == pytest.approx(after.step_s)
    assert any("ASSUMED to be evenly loaded" in note for note in plain.assumptions)
    assert not any("ASSUMED to be evenly loaded" in note for note in after.assumptions)
    with pytest.raises(InputError, match="4 experts, the job has 8"):
        with_routing(job, saved(tmp_path / "four", [row(1, 2, 3, 4)]))
    big = builders.with_model(job, moe=msgspec.structs.replace(job.model.moe, ffn_hidden=8192))  # type: ignore[type-var]
    degrees = [
        max(stage.ep for stage in plan_job(each, cluster, compare=False).result.plan.stages)  # type: ignore[union-attr]
        for each in (big, with_routing(big, tmp_path / "hot"))
    ]
    assert degrees[1] <= degrees[0]


def drawn(seed: int, weights: list[float], tokens: int, layer: int = 0) -> list[Routing]:
    chosen = random.Random(seed).choices(range(len(weights)), weights, k=tokens)
    return [row(*(chosen.count(expert) for expert in range(len(weights))), layer=layer)]


def test_drift_is_told_from_sampling_noise() -> None:
    same = [1.0] * 8
    for seed in range(5):
        (few,) = drift(drawn(seed, same, 100), drawn(seed + 50, same, 100))
        assert few.moved == pytest.approx(few.noise, rel=1.0) and not few.beyond(0.05)
    moved = [2.0, *[1.0] * 6, 0.0]  # one expert in eight has taken over another's tokens: 1/8 of them moved
    (found,) = drift(drawn(1, same, 20000), drawn(2, moved, 20000), ep=8)
    assert found.moved == pytest.approx(1 / 8, abs=0.01) and found.beyond(0.05)
    assert found.rho[1] == pytest.approx(2.0, rel=0.05)
    layers = drift([row(5, 5), row(5, 5, layer=1)], [row(5, 5), row(9, 1, layer=1)])
    assert [(one.layer, one.moved) for one in layers] == [(0, 0.0), (1, pytest.approx(0.4))]
    with pytest.raises(InputError, match="no layer in common"):
        drift([row(1, 1)], [row(1, 1, layer=4)])


def test_payback() -> None:
    """600 s for 0.5 s a step: 1,200 steps."""
    assert payback(10.0, 9.5, 600.0).after_steps == 1200
    assert payback(10.0, 9.5, 600.0, 1200).pays and not payback(10.0, 9.5, 600.0, 1199).pays
    assert not payback(10.0, 9.95, 0.0).pays and payback(10.0, 11.0, 600.0).after_steps is None
    assert payback(None, 11.0, 600.0).pays
