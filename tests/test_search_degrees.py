"""Degrees of its own for each pool: the search against every legal plan of small clusters, and what it leaves out."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from itertools import islice, permutations, product

import numpy as np
import pytest
from small_worlds import compositions, random_job, recompute_choices, tighten

from hapmoe.catalog import load_catalog
from hapmoe.cluster import Cluster, Link, Network, Pool
from hapmoe.cost import evaluate
from hapmoe.job import JobSpec
from hapmoe.plan import Plan, Recompute, Stage
from hapmoe.pricing import recompute_menu
from hapmoe.resolve import chunk_layers
from hapmoe.rules import check
from hapmoe.search import Restrictions, pose_for, search

BLOCKS = ((30, 8), (50, 6))
MOST_PLANS = 1500
Run = tuple[Pool, dict[str, int], list[tuple[int, ...]]]
"""A pool, the degrees of its stages, and the nodes of each."""


def random_pools(rng: random.Random) -> Cluster:
    """Two or three kinds, at most 8 devices, all joined."""
    catalog = load_catalog()
    many = rng.choice([2, 2, 3])
    kinds = rng.sample(["h800-80g-sxm", "mi300x-192g", "a100-80g-sxm", "ascend-910b", "h20-96g-sxm"], many)
    pools = []
    for number, kind in enumerate(kinds):
        nodes, each = rng.choice([(1, 1), (1, 2), (2, 1)] if many == 3 else [(1, 1), (1, 2), (1, 4), (2, 2), (2, 1)])
        network = Network(nics_per_node=each, nic_bytes_per_s=rng.choice([5e9, 50e9]), latency_s=5e-6, source="test")
        pools.append(Pool(name=f"p{number}", device=catalog[kind], nodes=nodes, devices_per_node=each, network=network))
    links = tuple(
        Link(between=(a.name, b.name), bytes_per_s=rng.choice([1e9, 12.5e9]), latency_s=1e-5, transport="gloo")
        for number, a in enumerate(pools)
        for b in pools[:number]
    )
    return Cluster(pools=tuple(pools), links=links)


def runs(job: JobSpec, pool: Pool, keep: dict[str, set[int]]) -> Iterator[Run]:
    """Every way to put stages on some nodes of one pool, all with the same degrees."""
    each, moe = pool.devices_per_node, job.model.moe
    for nodes, size in product(range(1, pool.nodes + 1), range(1, pool.num_devices + 1)):
        total = nodes * each
        if total % size or (size % each and each % size):
            continue
        places = [tuple(range(at // each, -(-(at + size) // each))) for at in range(0, total, size)]
        factors = [d for d in range(1, size + 1) if size % d == 0]
        for tp, cp, ep, etp in product(factors, factors, factors if moe else [1], factors if moe else [1]):
            degrees = {"tp": tp, "cp": cp, "ep": ep, "etp": etp}
            if size % (tp * cp) or size % (ep * etp) or any(degrees[k] not in keep[k] for k in degrees if k in keep):
                continue
            for mbs in keep["mbs"]:
                yield pool, {**degrees, "dp": size // (tp * cp), "micro_batch_size": mbs}, places


def all_plans(job: JobSpec, cluster: Cluster, menu: tuple[Recompute, ...], keep: dict[str, set[int]]) -> Iterator[Plan]:
    """Every plan in which the stages of a pool are alike; those of different pools need not be."""
    layers, batch = job.model.num_layers, job.training.global_batch_size
    of_pool = [[None, *runs(job, pool, keep)] for pool in cluster.pools]
    for chosen in product(*of_pool):
        used = [run for run in chosen if run is not None]
        sequences = {run[1]["dp"] * run[1]["micro_batch_size"] for run in used}
        if len(sequences) != 1 or batch % next(iter(sequences)):
            continue
        for order, vpp in product(permutations(used), sorted(keep["vpp"])):
            stages = [(pool, degrees, nodes) for pool, degrees, places in order for nodes in places]
            if len(stages) * vpp > layers or len(stages) not in keep.get("pp", {len(stages)}):
                continue
            for split in compositions(layers, len(stages), vpp):
                chunks = chunk_layers(split, vpp)
                for choice in product(*recompute_choices(menu, chunks)):
                    made = tuple(
                        Stage(
                            pool=pool.name,
                            nodes=nodes,
                            num_layers=split[j],
                            first_layer=chunks[j][0][0],
                            virtual_layers=chunks[j],
                            recompute=choice[j],
                            **degrees,
                        )
                        for j, (pool, degrees, nodes) in enumerate(stages)
                    )
                    yield Plan(stages=made, micro_batch_size=made[0].micro_batch_size, vpp=vpp, backend="any")


def run_space(seed: int) -> str:
    """One random space; the outcome in a word. Fails where search and brute force differ."""
    rng = random.Random(seed)
    job = random_job(rng, rng.choice([2, 3, 3, 4]))
    cluster = random_pools(rng)
    keep = {"mbs": {1, 2, 4}, "vpp": set(rng.choice([(1,), (1, 2), (2,)])), "cp": {1} if rng.random() < 0.5 else {1, 2}}
    if rng.random() < 0.5:
        keep["tp"] = {rng.choice([1, 2])}
    if rng.random() < 0.7:  # so few stages that pools of unequal size lie idle unless their stages differ
        keep["pp"] = {len(cluster.pools)}
    menu = (recompute_menu(job)[0], recompute_menu(job)[-1])
    plans = list(islice(all_plans(job, cluster, menu, keep), MOST_PLANS + 1))
    if len(plans) > MOST_PLANS:
        return "too large"
    plans = [p for p in plans if (p.vpp == 1 or job.training.overlap_p2p) and not check(job, cluster, p)]
    if rng.random() < 0.6 and plans:
        plain = [p for p in plans if all(s.recompute.granularity == "none" for s in p.stages)]
        cluster = tighten(
            rng, cluster, [evaluate(job, cluster, plan) for plan in rng.sample(plain, min(4, len(plain)))]
        )
    cache: dict = {}
    fitting = [(e.step_s, plan) for plan in plans if (e := evaluate(job, cluster, plan, cache)).fits]
    best = min((step for step, _ in fitting), default=float("inf"))
    settings = [f"{key}={','.join(map(str, sorted(values)))}" for key, values in keep.items()]
    problem = pose_for(job, cluster, "any", settings=settings, menu=menu)
    result = search(job, cluster, problem=problem, backend="any")
    if best == float("inf"):
        assert result.status == "infeasible", (seed, result.estimate)
        return "infeasible" if plans else "nothing legal"
    assert result.plan is not None and result.estimate is not None, (seed, best)
    assert not check(job, cluster, result.plan) and result.estimate.fits, seed
    assert result.status == "optimal" and result.gap == 0.0, seed
    assert result.estimate.step_s == pytest.approx(best, rel=1e-9), (seed, result.plan)
    alike = search(job, cluster, problem=problem, backend="any", restrictions=Restrictions(uniform_degrees=True))
    equal = [step for step, plan in fitting if len({shape(stage) for stage in plan.stages}) == 1]
    assert (alike.estimate.step_s if alike.estimate else np.inf) == pytest.approx(min(equal, default=np.inf), rel=1e-9)
    return "unequal" if len({shape(stage) for stage in result.plan.stages}) > 1 else "equal"


def shape(stage: Stage) -> tuple[int, ...]:
    return (stage.tp, stage.cp, stage.ep, stage.etp, stage.dp, stage.micro_batch_size)


@pytest.mark.parametrize(("first", "spaces"), BLOCKS)
def test_equals_brute_force(first: int, spaces: int) -> None:
    """Spaces with at least one legal plan, of random ones from a seed on."""
    outcomes: Counter[str] = Counter()
    seed = first
    while sum(outcomes[name] for name in ("equal", "unequal", "infeasible")) < spaces:
        outcomes[run_space(seed)] += 1
        seed += 1
    assert outcomes["unequal"] >= 1 and outcomes["infeasible"] >= 1, outcomes  # the hard cases are among them
