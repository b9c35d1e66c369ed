"""Random small jobs and clusters, and every legal plan of them: the brute force that judges the search.

The enumeration knows nothing of the search: it goes over plans as data, asks ``rules.check`` which
are legal and ``evaluate`` what they take.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations, permutations, product

import msgspec

from hapmoe.catalog import load_catalog
from hapmoe.cluster import Cluster, Link, Network, Pool
from hapmoe.job import JobSpec, Present, Training
from hapmoe.model import ModelSpec, Moe
from hapmoe.plan import Estimate, Plan, Recompute, Stage
from hapmoe.resolve import chunk_layers

GIB = 2**30


def random_job(rng: random.Random, layers: int) -> JobSpec:
    hidden, heads = rng.choice([(1024, 8), (2048, 16), (4096, 32)])
    pattern = rng.choice(["moe", "moe", "dense", "dense first", "alternating"])
    moe_layers = {
        "moe": (True,) * layers,
        "dense": (False,) * layers,
        "dense first": (False,) + (True,) * (layers - 1),
        "alternating": tuple(index % 2 == 1 for index in range(layers)),
    }[pattern]
    moe = None
    if any(moe_layers):
        moe = Moe(
            num_experts=rng.choice([2, 4, 8]),
            top_k=2,
            ffn_hidden=hidden * 2,
            pattern=moe_layers,
            shared_ffn_hidden=rng.choice([0, 0, hidden]),
        )
    model = ModelSpec(
        num_layers=layers,
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=rng.choice([heads, heads // 4]),
        head_dim=hidden // heads,
        ffn_hidden=hidden * rng.choice([2, 4]),
        vocab_size=rng.choice([1000, 32000]),
        moe=moe,
        tied_embeddings=rng.random() < 0.2,
        mtp_layers=rng.choice([0, 0, 0, 1]),
    )
    overlap = rng.random() < 0.5
    training = Training(
        seq_len=rng.choice([512, 2048]),
        global_batch_size=rng.choice([4, 8, 12]),
        distributed_optimizer=rng.random() < 0.7,
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap and rng.random() < 0.5,
        dispatcher=rng.choice(["allgather", "alltoall"]),
        grouped_gemm=True,
        overlap_p2p=rng.random() < 0.8,
    )
    return JobSpec(name="random", model=model, training=training, present=Present(), entry="pretrain_gpt.py")


def random_cluster(rng: random.Random, devices: int, kinds_wanted: int = 2) -> Cluster:
    catalog = load_catalog()
    kinds = rng.sample(["h800-80g-sxm", "mi300x-192g", "a100-80g-sxm", "ascend-910b", "h20-96g-sxm"], kinds_wanted)
    shapes = [(1, 1), (1, 2), (2, 1), (2, 2), (1, 4), *([(1, 8), (2, 4)] if devices > 8 else [])]
    pools = []
    names = ("fast", "slow", "other")[:kinds_wanted]
    for name, kind in zip(names, kinds, strict=True):
        fitting = [s for s in shapes if s[0] * s[1] <= max(devices // kinds_wanted, 1)]
        nodes, each = rng.choice(fitting)
        pools.append(
            Pool(
                name=name,
                device=catalog[kind],
                nodes=nodes,
                devices_per_node=each,
                network=Network(
                    nics_per_node=each, nic_bytes_per_s=rng.choice([5e9, 50e9]), latency_s=5e-6, source="test"
                ),
            )
        )
    links = tuple(
        Link(between=pair, bytes_per_s=rng.choice([1e9, 12.5e9, 50e9]), latency_s=1e-5, transport="gloo")
        for pair in combinations(names, 2)
    )
    return Cluster(pools=tuple(pools), links=links if rng.random() < 0.9 else ())


def tighten(rng: random.Random, cluster: Cluster, estimates: list[Estimate]) -> Cluster:
    """The cluster with about as much memory as one of the estimated plans (without recomputation) needs."""
    sample = rng.choice(estimates)
    stage = max(sample.stages, key=lambda stage: stage.memory_bytes)
    fixed = stage.memory.workspace
    limit = fixed + rng.uniform(0.7, 1.05) * (stage.memory_bytes - fixed)
    pools = tuple(
        msgspec.structs.replace(
            pool, memory_reserve_bytes=max(0, int(pool.device.memory_bytes - limit * rng.choice([0.97, 1.0, 1.03])))
        )
        for pool in cluster.pools
    )
    return msgspec.structs.replace(cluster, pools=pools)


def compositions(total: int, parts: int, least: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        if total >= least:
            yield (total,)
        return
    for first in range(least, total - least * (parts - 1) + 1):
        for rest in compositions(total - first, parts - 1, least):
            yield (first, *rest)


def _placements(cluster: Cluster) -> Iterator[tuple[int, list[tuple[Pool, tuple[int, ...]]]]]:
    """(devices per stage, [(pool, nodes) per stage])."""
    total = cluster.num_devices
    for size in range(1, total + 1):
        for counts in product(*(range(pool.nodes + 1) for pool in cluster.pools)):
            used = [(pool, nodes) for pool, nodes in zip(cluster.pools, counts, strict=True) if nodes]
            if not used:
                continue
            whole = all(
                (size % pool.devices_per_node == 0 and (nodes * pool.devices_per_node) % size == 0)
                or pool.devices_per_node % size == 0
                for pool, nodes in used
            )
            if not whole:
                continue
            for order in permutations(used):
                stages = []
                for pool, nodes in order:
                    for place in range(nodes * pool.devices_per_node // size):
                        begin = place * size
                        end = begin + size - 1
                        stages.append(
                            (pool, tuple(range(begin // pool.devices_per_node, end // pool.devices_per_node + 1)))
                        )
                yield size, stages


def all_plans(job: JobSpec, cluster: Cluster, menu: tuple[Recompute, ...], keep: dict[str, set[int]]) -> Iterator[Plan]:
    """Every plan of the written-down space; ``keep`` pins degrees. Legality is the caller's to check."""
    batch, layers = job.training.global_batch_size, job.model.num_layers

    def ok(key: str, value: int) -> bool:
        return key not in keep or value in keep[key]

    for size, places in _placements(cluster):
        pp = len(places)
        if not ok("pp", pp):
            continue
        factors = [d for d in range(1, size + 1) if size % d == 0]
        for tp, cp in product(factors, factors):
            if size % (tp * cp) or not ok("tp", tp) or not ok("cp", cp):
                continue
            dp = size // (tp * cp)
            experts = [(1, 1)]
            if job.model.moe:
                experts = [(ep, etp) for ep in factors for etp in factors if size % (ep * etp) == 0]
            for (ep, etp), mbs, vpp in product(experts, range(1, batch + 1), range(1, layers + 1)):
                if batch % (mbs * dp) or not (ok("ep", ep) and ok("etp", etp) and ok("mbs", mbs) and ok("vpp", vpp)):
                    continue
                if pp * vpp > layers:
                    continue
                for split in compositions(layers, pp, vpp):
                    chunks = chunk_layers(split, vpp)
                    per_stage = recompute_choices(menu, chunks)
                    yield from _with_recompute(job, places, (tp, cp, ep, etp, dp), mbs, vpp, split, chunks, per_stage)


def recompute_choices(
    menu: tuple[Recompute, ...], chunks: tuple[tuple[tuple[int, int], ...], ...]
) -> list[list[Recompute]]:
    """What each stage may recompute: every entry, the last one for 1, 2, … layers of its virtual stages."""
    per_stage = []
    for rows in chunks:
        most = max(count for _, count in rows)
        full = (msgspec.structs.replace(menu[-1], num_layers=n) for n in range(1, most + 1))
        per_stage.append([*menu[:-1], *full])
    return per_stage


def _with_recompute(job, places, degrees, mbs, vpp, split, chunks, per_stage) -> Iterator[Plan]:
    tp, cp, ep, etp, dp = degrees
    for choice in product(*per_stage):
        stages = tuple(
            Stage(
                pool=pool.name,
                nodes=nodes,
                num_layers=split[index],
                first_layer=chunks[index][0][0],
                virtual_layers=chunks[index],
                tp=tp,
                cp=cp,
                ep=ep,
                etp=etp,
                dp=dp,
                recompute=choice[index],
                num_devices=tp * cp * dp,
                first_rank=index * tp * cp * dp,
                mtp_layers=job.model.mtp_layers if index == len(places) - 1 else 0,
            )
            for index, (pool, nodes) in enumerate(places)
        )
        yield Plan(stages=stages, micro_batch_size=mbs, vpp=vpp)
