"""Cost, energy and the plans with less of something: against every legal plan of small clusters."""

from __future__ import annotations

import random
from itertools import islice
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from small_worlds import all_plans, random_cluster, random_job

from hapmoe.cli import cli
from hapmoe.cluster import Cluster
from hapmoe.cost import evaluate
from hapmoe.errors import InputError
from hapmoe.job import JobSpec
from hapmoe.plan import Estimate, Plan
from hapmoe.planfile import load_plan
from hapmoe.pricing import recompute_menu
from hapmoe.rules import check
from hapmoe.search import Restrictions, pose_for, search, seeker_for
from hapmoe.search.pareto import MEMORY, fewer_devices, less_memory, peak_bytes
from hapmoe.search.problem import Problem

EXAMPLES = Path(__file__).parents[1] / "examples"
MOST_PLANS = 500
Row = tuple[Plan, Estimate]


def priced(rng: random.Random, cluster: Cluster) -> Cluster:
    """Prices and powers that make one pool dear: nodes are then left out."""
    pools = tuple(
        msgspec.structs.replace(pool, price_per_device_hour=rng.choice([0.5, 2.0, 6.0]), power_w=rng.choice([300, 900]))
        for pool in cluster.pools
    )
    return msgspec.structs.replace(cluster, pools=pools)


def spaces(first: int, many: int) -> list[tuple[int, JobSpec, Cluster, Problem, list[Row]]]:
    """Small spaces with at least one plan that fits, all their legal plans judged."""
    found = []
    seed = first
    while len(found) < many:
        rng = random.Random(seed)
        job, cluster = random_job(rng, rng.choice([2, 3, 4, 6])), priced(rng, random_cluster(rng, 4))
        keep = {"mbs": {1}, "vpp": {1, 2}, "cp": {1}}
        menu = (recompute_menu(job)[0], recompute_menu(job)[-1])
        plans = list(islice(all_plans(job, cluster, menu, keep), MOST_PLANS + 1))
        seed += 1
        if len(plans) > MOST_PLANS:
            continue
        plans = [p for p in plans if (p.vpp == 1 or job.training.overlap_p2p) and not check(job, cluster, p)]
        cache: dict = {}
        rows = [(plan, estimate) for plan in plans if (estimate := evaluate(job, cluster, plan, cache)).fits]
        if rows:
            settings = [f"{key}={','.join(map(str, sorted(values)))}" for key, values in keep.items()]
            found.append((seed - 1, job, cluster, pose_for(job, cluster, settings=settings, menu=menu), rows))
    return found


@pytest.fixture(scope="module")
def worlds() -> list[tuple[int, JobSpec, Cluster, Problem, list[Row]]]:
    return spaces(0, 6)


def used(plan: Plan, cluster: Cluster) -> dict[str, int]:
    counts = dict.fromkeys((pool.name for pool in cluster.pools), 0)
    for stage in plan.stages:
        counts[stage.pool] += stage.tp * stage.cp * stage.dp
    return counts


def test_least_cost_and_energy_are_those_of_all_plans(worlds: list) -> None:
    idle = 0
    for seed, job, cluster, problem, rows in worlds:
        for objective in ("cost", "energy"):
            rates = {
                pool.name: pool.price_per_device_hour / 3600 if objective == "cost" else pool.power_w
                for pool in cluster.pools
            }
            values = [
                estimate.step_s * sum(count * rates[name] for name, count in used(plan, cluster).items())
                for plan, estimate in rows
            ]
            result = search(job, cluster, problem=problem, objective=objective)
            assert result.plan is not None and result.estimate is not None
            assert result.status == "optimal" and result.gap == 0.0, seed
            tokens = job.training.global_batch_size * job.training.seq_len
            shown = result.estimate.price_per_million_tokens / 1e6 if objective == "cost" else 0.0
            shown = (shown or result.estimate.joule_per_token) * tokens
            assert shown == pytest.approx(min(values), rel=1e-9), (seed, objective, result.plan)
            idle += result.plan.num_devices < cluster.num_devices
    assert idle  # leaving devices out is what it is about


def test_fewer_devices_are_the_front_of_all_plans(worlds: list) -> None:
    """Per number of devices the least step; those that more devices do not beat, up to ten times the best."""
    for seed, job, cluster, problem, rows in worlds:
        result = search(job, cluster, problem=problem)
        assert result.plan is not None and result.estimate is not None
        seeker = seeker_for(job, cluster, "megatron", started=0.0)
        shown = fewer_devices(problem, (result.plan, result.estimate), seeker)
        least: dict[int, float] = {}
        for plan, estimate in rows:
            count = sum(used(plan, cluster).values())
            least[count] = min(least.get(count, float("inf")), estimate.step_s)
        front, below = {}, 10 * result.estimate.step_s
        for count in sorted(least):
            if count < result.plan.num_devices and least[count] < below:
                front[count] = below = least[count]
        got = {plan.num_devices: estimate.step_s for plan, estimate in shown}
        assert got == pytest.approx(front, rel=1e-9), seed


def test_less_memory_is_the_fastest_within_it(worlds: list) -> None:
    for seed, job, cluster, problem, rows in worlds:
        result = search(job, cluster, problem=problem)
        assert result.plan is not None and result.estimate is not None
        seeker = seeker_for(job, cluster, "megatron", started=0.0)
        shown = less_memory(problem, (result.plan, result.estimate), seeker)
        peak = peak_bytes(result.estimate)
        expected: list[tuple[float, float]] = []  # step, and the peak of any plan that reaches it
        for part in MEMORY:
            within = [(e.step_s, peak_bytes(e)) for _, e in rows if peak_bytes(e) <= part * peak]
            if not within:
                break
            step = min(within)[0]
            if not expected or step > expected[-1][0] * (1 + 1e-9):
                expected.append((step, min(p for s, p in within if s <= step * (1 + 1e-9))))
        steps = [estimate.step_s for _, estimate in shown]
        assert sorted(set(steps)) == steps and steps == pytest.approx([s for s, _ in expected], rel=1e-9), seed


def test_what_is_missing_is_named() -> None:
    rng = random.Random(1)
    job, cluster = random_job(rng, 2), random_cluster(rng, 4)
    with pytest.raises(InputError) as error:
        search(job, cluster, objective="cost")
    assert error.value.where == "pools[0].price_per_device_hour" and "2.5" in error.value.hint
    with pytest.raises(InputError, match="without restrictions"):
        search(job, priced(rng, cluster), objective="cost", restrictions=Restrictions(uniform_layers=True))
    with pytest.raises(InputError, match="no objective 'price'"):
        search(job, cluster, objective="price")


def test_command_line_shows_what_was_minimized(tmp_path: Path) -> None:
    """H100 has a rated power in the catalogue; a price it has not."""
    script, cluster = str(EXAMPLES / "qwen3-30b-a3b.sh"), str(EXAMPLES / "clusters" / "h100.yaml")
    pins = [word for pin in ("mbs=1", "vpp=1", "cp=1", "tp=2", "etp=1", "ep=8") for word in ("--set", pin)]
    common = ["plan", script, "--cluster", cluster, "--out", str(tmp_path / "out"), *pins]
    refused = CliRunner().invoke(cli, [*common, "--objective", "cost"])
    assert isinstance(refused.exception, InputError)
    done = CliRunner().invoke(cli, [*common, "--objective", "energy", "--pareto"])
    assert done.exit_code == 0, done.output
    assert "Minimized: the energy of a token" in " ".join(done.output.split())
    plan = load_plan(str(tmp_path / "out" / "plan.json"))
    assert plan.search is not None and plan.search.objective == "energy" and plan.estimate is not None
    assert all(other.estimate is not None and other.estimate.step_s > 0 for other in plan.pareto)
    # 700 W each: hapmoe devices h100-80g-sxm
    assert plan.estimate.power_w == 700 * plan.num_devices
