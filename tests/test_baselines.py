"""Other planners, each on a case small enough to work out by hand, and their order on random worlds."""

from __future__ import annotations

import json
import random
from itertools import islice, pairwise

import builders
import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from small_worlds import all_plans, random_cluster, random_job, tighten

from hapmoe.cli import cli
from hapmoe.cluster import Cluster
from hapmoe.compare import compare_planners, to_document
from hapmoe.cost import evaluate
from hapmoe.errors import InputError
from hapmoe.job import JobSpec
from hapmoe.plan import Plan
from hapmoe.pricing import recompute_menu
from hapmoe.rules import check
from hapmoe.search import COST_ONLY, PLANNERS, Restrictions, pose_for, search, split_settings
from hapmoe.search.baselines import believe_equal_devices
from hapmoe.search.disaggregated import hetermoe_style, zebra_s
from hapmoe.search.hsdp import paper_iteration_s
from hapmoe.search.misses import HELP
from hapmoe.search.restricted import search_restricted

FAST, SLOW = 3e14, 1e14


def two_kinds(each: int = 4, slow_gib: int = 80) -> Cluster:
    """One node of each of two kinds, one three times as fast as the other."""
    fast = builders.device("fast", peak_flop_per_s={"bf16": FAST, "fp32": FAST / 8})
    slow = builders.device("slow", peak_flop_per_s={"bf16": SLOW, "fp32": SLOW / 8}, memory_bytes=slow_gib * 2**30)
    pools = (builders.pool("fast", 1, each, device=fast), builders.pool("slow", 1, each, device=slow))
    return builders.cluster(*pools, links=(("fast", "slow"),))


def big(job: JobSpec) -> JobSpec:
    """Layers that are large enough for compute to decide."""
    moe = job.model.moe and msgspec.structs.replace(job.model.moe, ffn_hidden=8192)
    return builders.with_model(job, hidden=2048, head_dim=128, ffn_hidden=8192, moe=moe)


def layers_by_pool(plan: Plan) -> dict[str, int]:
    found: dict[str, int] = {}
    for stage in plan.stages:
        found[stage.pool] = found.get(stage.pool, 0) + stage.num_layers
    return found


# ---------------------------------------------------------------- hs-dp


def test_paper_iteration_by_hand() -> None:
    # f = 1, 2; f + b = 3, 5; M = 6. Stage 1 is the slowest: T_edge 8, T_middle (1 + 2) + (6 - 1 - 1) * 5
    got = paper_iteration_s(
        np.array([[1.0, 2.0]]), np.array([[3.0, 5.0]]), np.array([6]), np.array([[0.5, 0.25]]), np.array([[0.1, 0.2]])
    )
    assert got[0] == pytest.approx(8 + 3 + 20 + 0.5 + 0.2)


def test_hsdp_balances_layers_as_the_paper_says() -> None:
    """w N is 6 and 2 of 8 layers; with delta 0.2 only 5, 6, 7 and 2 are allowed: 6 and 2 add up to 8."""
    found = search(big(builders.job()), two_kinds(), planner="hs-dp", settings=("pp=2", "fast.nodes=1", "slow.nodes=1"))
    assert found.plan is not None and found.estimate is not None and found.report is not None
    assert layers_by_pool(found.plan) == {"fast": 6, "slow": 2}
    stages, estimate, plan = found.plan.stages, found.estimate, found.plan
    work = [stage.forward_s + stage.backward_s for stage in estimate.stages]
    slowest = work.index(max(work))
    believed = sum(work) + sum(stage.forward_s for stage in estimate.stages[: slowest + 1])
    believed += (plan.num_microbatches - slowest - 1) * max(work)
    believed += max(stage.grad_sync_s for stage in estimate.stages) + estimate.optimizer_s
    assert found.report.believed_step_s == pytest.approx(believed)
    assert found.status == "feasible" and not check(builders.job(), two_kinds(), found.plan)
    assert {stage.num_devices for stage in stages} == {4}


def test_hsdp_options() -> None:
    job, cluster, both = big(builders.job()), two_kinds(), ("fast.nodes=1", "slow.nodes=1")
    none = search(job, cluster, planner="hs-dp", settings=(*both, "eta=0"))
    assert none.plan is None and none.report is not None and none.report.pruned["communication between kinds"] > 0
    wide = search(job, cluster, planner="hs-dp", settings=(*both, "delta=0.9", "pp=2"))
    tight = search(job, cluster, planner="hs-dp", settings=(*both, "delta=0", "pp=2"))
    assert wide.report and tight.report and wide.report.believed_step_s <= tight.report.believed_step_s
    assert split_settings("hs-dp", ("delta=0.3", "tp=1")) == ({"delta": 0.3}, ("tp=1",))
    with pytest.raises(InputError, match="not a number"):
        search(job, cluster, planner="hs-dp", settings=("eta=much",))
    with pytest.raises(InputError, match="no key 'delta'"):
        search(job, cluster, settings=("delta=0.3",))


# ---------------------------------------------------------------- baselines


def test_alpa_takes_devices_for_alike() -> None:
    cluster, job = two_kinds(slow_gib=64), big(builders.job())
    alike = believe_equal_devices(cluster)
    assert {pool.device.peak_flop_per_s["bf16"] for pool in alike.pools} == {SLOW}
    assert {pool.device.memory_bytes for pool in alike.pools} == {64 * 2**30}
    assert [pool.device.name for pool in alike.pools] == ["fast", "slow"]
    found = search(job, cluster, planner="alpa", settings=("pp=2",))
    assert found.plan is not None and found.estimate is not None and found.report is not None
    # equal devices: equal layers but for what embedding and head weigh; in truth the slow one sets the pace
    assert abs(layers_by_pool(found.plan)["fast"] - 4) <= 1
    again = search(job, alike, settings=("pp=2", "cp=1", "vpp=1", "recompute=none", "fast.nodes=1", "slow.nodes=1"))
    assert again.estimate is not None and found.report.believed_step_s == pytest.approx(again.estimate.step_s)
    assert found.estimate.step_s == pytest.approx(evaluate(job, cluster, found.plan).step_s)


def test_alpa_may_not_fit() -> None:
    """It goes by the least memory, and rates do not matter to memory: here what it chooses fits in truth."""
    found = search(big(builders.job()), two_kinds(slow_gib=40), planner="alpa")
    assert found.estimate is not None and found.estimate.fits


def test_metis_knows_kinds_but_no_experts() -> None:
    found = search(big(builders.job()), two_kinds(), planner="metis", settings=("pp=2",))
    assert found.plan is not None
    counts = layers_by_pool(found.plan)
    assert counts["fast"] > counts["slow"]
    for stage in found.plan.stages:
        assert (stage.ep, stage.etp, stage.cp) == (1, stage.tp, 1)
        assert stage.recompute.granularity == "none"
    assert found.plan.num_devices == 8


def test_metis_style_fixes_experts_as_on_one_kind() -> None:
    job, cluster = big(builders.job()), two_kinds()
    found = search(job, cluster, planner="metis-style")
    assert found.plan is not None and found.estimate is not None
    only_fast = believe_equal_devices(cluster, cluster.pools[0].device)
    pinned = ("vpp=1", "fast.nodes=1", "slow.nodes=1")
    best = search_restricted(pose_for(job, only_fast, settings=pinned), Restrictions(one_recompute=True), top=1)
    assert best.plan is not None
    assert {(s.ep, s.etp) for s in found.plan.stages} == {(best.plan.stages[0].ep, best.plan.stages[0].etp)}
    assert found.report is not None and found.report.believed_step_s == pytest.approx(found.estimate.step_s)


def test_deepspeed_moe_spreads_experts_and_searches_no_pipeline() -> None:
    cluster = builders.cluster(builders.pool(nodes=1))
    found = search(big(builders.job()), cluster, planner="deepspeed-moe")
    assert found.plan is not None
    (stage,) = found.plan.stages
    assert (stage.ep, stage.etp, stage.num_devices) == (8, 1, 8)
    mixed = search(big(builders.job()), two_kinds(), planner="deepspeed-moe").plan
    assert mixed is not None and [stage.num_layers for stage in mixed.stages] == [4, 4]
    assert {stage.ep for stage in mixed.stages} == {4}


def test_tutel_chooses_expert_degrees_only() -> None:
    job, cluster = big(builders.job()), builders.cluster(builders.pool(nodes=1))
    found = search(job, cluster, planner="tutel")
    assert found.plan is not None and found.estimate is not None
    (stage,) = found.plan.stages
    assert (stage.tp, stage.cp, stage.dp) == (1, 1, 8)
    every = [
        search(job, cluster, planner="uniform", settings=(f"ep={ep}", f"etp={etp}", "tp=1", "cp=1", "pp=1")).estimate
        for ep, etp in ((1, 1), (2, 1), (4, 1), (8, 1), (2, 2), (2, 4), (4, 2))
    ]
    assert found.estimate.step_s == pytest.approx(min(estimate.step_s for estimate in every if estimate))


def test_moe_systems_refuse_dense_models() -> None:
    for name in ("deepspeed-moe", "tutel"):
        found = search(builders.job(moe=None), two_kinds(), planner=name)
        assert found.plan is None and found.report is not None and "experts" in found.report.reasons[0]


def test_disaggregation_by_hand() -> None:
    # 2 layers, 3 microbatches, attention 1, experts 2, link 0.5: experts run 3 * 2 * 2, the zebra fills in 2
    assert zebra_s(2, 3, 1.0, 2.0, 0.5) == 14.0
    assert zebra_s(2, 3, 1.0, 2.0, 5.0) == pytest.approx(3 * 2 * 5 + 1 + 10 + 2 - 5)
    assert hetermoe_style(builders.job(moe=None), two_kinds()).note
    found = hetermoe_style(big(builders.job()), two_kinds())
    assert not found.note and {found.attention, found.experts} == {"fast", "slow"}
    fast_link = msgspec.structs.replace(two_kinds().links[0], bytes_per_s=1e12)
    closer = msgspec.structs.replace(two_kinds(), links=(fast_link,))
    better = hetermoe_style(big(builders.job()), closer)
    assert better.step_s < found.step_s and better.moved <= found.moved
    with pytest.raises(InputError, match="cost but no plan"):
        search(big(builders.job()), two_kinds(), planner="hetermoe-style")


# ---------------------------------------------------------------- restrictions, and the order of planners


@pytest.mark.parametrize("seed", range(6))
def test_equal_layers_against_brute_force(seed: int) -> None:
    rng = random.Random(900 + seed)
    job = builders.with_training(random_job(rng, 4), global_batch_size=4)
    cluster, menu = random_cluster(rng, 4), recompute_menu(job)[:1] + recompute_menu(job)[-1:]
    keep = {"cp": {1}, "mbs": {1, 2}, "vpp": {1, 2}}
    plans = [
        plan
        for plan in islice(all_plans(job, cluster, menu, keep), 6000)
        if len({stage.num_layers for stage in plan.stages}) == 1 and not check(job, cluster, plan)
    ]
    assert plans
    cache: dict[tuple[object, ...], object] = {}
    estimates = [evaluate(job, cluster, plan, cache) for plan in plans]
    if seed % 2:
        cluster, cache = tighten(rng, cluster, estimates), {}
        estimates = [evaluate(job, cluster, plan, cache) for plan in plans]
    steps = [estimate.step_s for estimate in estimates if estimate.fits]
    pins = ("cp=1", "mbs=1,2", "vpp=1,2")
    problem = pose_for(job, cluster, settings=pins, menu=menu)
    found = search_restricted(problem, Restrictions(uniform_layers=True), top=1)
    if not steps:
        assert found.plan is None
        return
    assert found.estimate is not None and found.estimate.step_s == pytest.approx(min(steps), rel=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_nobody_beats_exact(seed: int) -> None:
    rng = random.Random(seed)
    job, cluster = random_job(rng, rng.randint(3, 6)), random_cluster(rng, 8)
    steps = {}
    for name in PLANNERS:
        found = search(job, cluster, planner=name, top=1)
        if found.plan is not None and found.estimate is not None:
            assert found.estimate.fits and not check(job, cluster, found.plan), name
            assert found.estimate.step_s == pytest.approx(evaluate(job, cluster, found.plan).step_s)
            steps[name] = found.estimate.step_s
    best = steps.pop("exact")
    problem = pose_for(job, cluster)
    chain = [best]
    for restrictions in (Restrictions(one_recompute=True), Restrictions(True, True)):
        found = search_restricted(problem, restrictions, top=1)
        chain.append(found.estimate.step_s if found.estimate else float("inf"))
    layers = search_restricted(problem, Restrictions(uniform_layers=True), top=1).estimate
    assert all(a <= b * (1 + 1e-9) for a, b in pairwise(chain))
    assert layers is None or best <= layers.step_s * (1 + 1e-9) <= chain[-1] * (1 + 2e-9)
    assert all(step >= best * (1 - 1e-9) for step in steps.values()), steps


def test_restrictions_are_kept() -> None:
    job, cluster = big(builders.job()), two_kinds()
    equal = search(job, cluster, restrictions=Restrictions(uniform_layers=True)).plan
    assert equal is not None and len({stage.num_layers for stage in equal.stages}) == 1
    same = search(job, cluster, restrictions=Restrictions(one_recompute=True)).plan
    assert same is not None and len({stage.recompute for stage in same.stages}) == 1
    with pytest.raises(InputError, match="takes no restrictions"):
        search(job, cluster, planner="alpa", restrictions=Restrictions(uniform_layers=True))


# ---------------------------------------------------------------- compare, and reasons


def test_compare() -> None:
    job, cluster = big(builders.job()), two_kinds()
    compared = compare_planners(job, cluster)
    assert [row.planner for row in compared.rows] == [*PLANNERS, *COST_ONLY]
    assert compared.best_s is not None
    for row in compared.rows:
        if row.step_s is not None and row.planner not in COST_ONLY:
            assert row.step_s >= compared.best_s * (1 - 1e-9)
    assert all(loss.step_s is None or loss.step_s >= compared.best_s * (1 - 1e-9) for loss in compared.losses)
    document = json.loads(json.dumps(to_document(compared)))
    assert document["planners"][0]["slower_than_exact"] == 0 and len(document["restrictions"]) == 8
    with pytest.raises(InputError, match="no planner 'best'"):
        compare_planners(job, cluster, ["best"])


def test_compare_command() -> None:
    arguments = ["compare", "examples/mixtral-s.sh", "--cluster", "examples/clusters/32-1.yaml", "--planners", "alpa"]
    shown = CliRunner().invoke(cli, arguments, standalone_mode=False)
    assert shown.exception is None and shown.return_value == 0
    text = " ".join(shown.output.split())
    assert "alpa" in text and "equal layers on all stages" in text and "What matters most here" in text


@pytest.mark.parametrize("pools", [1, 2])
def test_reasons_name_the_miss_the_rule_and_the_help(pools: int) -> None:
    """6 experts on 4 devices: 4 of them could share the experts, but 6 do not divide by 4. A stage on each pool."""
    job = big(builders.job(moe=6))
    moe = msgspec.structs.replace(job.model.moe, ffn_hidden=16383 * 3)  # odd: etp 2 and 4 do not divide it
    job = builders.with_training(builders.with_model(job, moe=moe), distributed_optimizer=False)
    one = builders.pool(nodes=1, devices_per_node=4, memory_reserve_bytes=0)
    alike = [msgspec.structs.replace(one, name=f"pool{number}") for number in range(pools)]

    def with_memory(share: float) -> Cluster:
        kept = int(one.device.memory_bytes * (1 - share))
        return builders.cluster(*(msgspec.structs.replace(pool, memory_reserve_bytes=kept) for pool in alike))

    seen: set[str] = set()
    for share in np.linspace(0.1, 1.0, 10):
        found = search(job, with_memory(float(share)), settings=(f"pp={pools}",))
        if found.report is not None and found.plan is None:
            reasons = found.report.reasons
            assert "lacks" in reasons[0]
            seen |= {"rule"} if any("6 experts do not divide by it" in reason for reason in reasons) else set()
            seen |= {"more nodes"} if any(r.startswith(HELP) and "nodes of a100" in r for r in reasons) else set()
            seen |= {"optimizer"} if any(r.startswith(HELP) and "optimizer" in r for r in reasons) else set()
            seen |= {"pins"} if any(r.startswith(HELP) and "--set" in r for r in reasons) else set()
    assert {"rule", "optimizer"} <= seen, seen
