"""Collectives against published nccl-tests figures, and where groups sit."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pytest
from shapes_of import QWEN3_30B, job_of, options_of, pool_of
from small_worlds import random_cluster, random_job

from hapmoe.cluster import NETWORK_KINDS, Link, Pool
from hapmoe.comm import Group, collective_s, group_of, send_s
from hapmoe.efficiency import load_yaml
from hapmoe.model import Moe
from hapmoe.pricing import price, recompute_menu
from hapmoe.search.pins import Pins
from hapmoe.search.space import build_space
from hapmoe.shapes import Shapes


def _group(size: int, inside: int) -> Group:
    return Group(*(np.array([float(value)]) for value in (size, inside, size // inside)))


def _busbw(pool: Pool, collective: str, size: int, inside: int, held: float) -> float:
    """Bus bandwidth in GB/s as nccl-tests defines it (PERFORMANCE.md): n-1 of n parts, twice for all_reduce."""
    seconds = float(collective_s(pool, _group(size, inside), collective, np.array([held]))[0])
    return held / seconds * (size - 1) / size * (2 if collective == "all_reduce" else 1) / 1e9


@pytest.mark.parametrize(
    ("device", "collective", "ranks", "published"),
    [
        # nccl-tests at 512 MB inside one node (ai-dynamo/aiconfigurator@095f58a5 systems/data)
        ("h100-80g-sxm", "all_gather", 8, 349.2),
        ("h100-80g-sxm", "reduce_scatter", 4, 324.0),
        ("h100-80g-sxm", "all_reduce", 8, 461.0),
        ("h100-80g-sxm", "all_to_all", 8, 323.3),
        ("a100-80g-sxm", "all_gather", 8, 219.3),
        ("a100-80g-sxm", "all_reduce", 2, 198.7),
        ("b200-180g-sxm", "all_gather", 8, 637.7),
        ("b200-180g-sxm", "all_to_all", 4, 505.8),
        # rccl-tests (Azure ND MI300X), and one link of the mesh between two devices
        ("mi300x-192g", "all_reduce", 8, 315.7),
        ("mi300x-192g", "all_reduce", 2, 47.7),
    ],
)
def test_bus_bandwidth_inside_a_node(device: str, collective: str, ranks: int, published: float) -> None:
    assert _busbw(pool_of(device), collective, ranks, ranks, 512 * 2**20) == pytest.approx(published, rel=0.15)


@pytest.mark.parametrize(
    ("device", "nodes", "published"),
    [("mi325x-256g", 8, 350.8), ("mi300x-192g", 2, 357.5), ("h200-141g-sxm", 16, 369.9), ("b200-180g-sxm", 4, 381.8)],
)
def test_all_reduce_between_nodes_of_eight_400g_nics(device: str, nodes: int, published: float) -> None:
    # rccl-tests and nccl-tests logs at the largest size (hisohara/ai-scripts, AWS, ml-engineering)
    measured = _busbw(pool_of(device, nodes), "all_reduce", 8 * nodes, 8, 8 * 2**30)
    # the mesh's own limit (0.71 of 448 GB/s) is what MI300-class nodes have inside
    assert measured == pytest.approx(published, rel=0.15)


def test_small_messages_cost_their_latency() -> None:
    pool = pool_of("h100-80g-sxm")
    seconds = float(collective_s(pool, _group(8, 8), "all_gather", np.array([512.0]))[0])
    assert seconds == pytest.approx(10.1e-6, rel=0.2)  # aiconfigurator: 10.14 us at 512 B


def test_groups_sit_where_megatron_puts_their_ranks() -> None:
    pool = pool_of("h100-80g-sxm", 4)
    options = options_of(tp=2, cp=2, ep=8, etp=1, dp=8)
    shape = {axis: tuple(float(value[0]) for value in _tuple(group_of(pool, options, axis))) for axis in AXES}
    assert shape["tp"] == (2, 2, 1)
    assert shape["cp"] == (2, 2, 1)
    assert shape["ep"] == (8, 8, 1)
    assert shape["dp"] == (16, 4, 4)  # stride tp: every second of 32 ranks
    assert shape["edp"] == (4, 1, 4)  # stride 8: one per node


AXES = ("tp", "cp", "ep", "dp", "edp")


def _tuple(group: Group) -> tuple[np.ndarray, ...]:
    return group.size_K, group.inside_K, group.nodes_K


def test_a_rack_is_one_scale_up_domain() -> None:
    pool = pool_of("gb200-186g", 16)
    group = group_of(pool, options_of(ep=64, dp=64), "ep")
    assert float(group.nodes_K[0]) == 1


def _on(pool: Pool, kind: str, nics: int, rate: float) -> Pool:
    network = msgspec.structs.replace(pool.network, kind=kind, nics_per_node=nics, nic_bytes_per_s=rate)
    return msgspec.structs.replace(pool, network=network)


@pytest.mark.parametrize(
    ("device", "nics", "ranks", "published"),
    [
        # bytes over seconds of 4096 tokens x 8 experts x 7168 in bf16 (awslabs/awsome-distributed-ai@95b939cdc5b2
        # micro-benchmarks/expert-parallelism/ep-backend-comparison, NCCL at the payload of the EP test)
        ("b300-288g-sxm", 16, 32, 94.0),
        ("b300-288g-sxm", 16, 64, 74.0),
        ("h100-80g-sxm", 8, 64, 40.4),
        ("h100-80g-sxm", 8, 32, 45.1),
    ],
)
def test_all_to_all_on_efa(device: str, nics: int, ranks: int, published: float) -> None:
    pool, held = _on(pool_of(device, ranks // 8), "efa", nics, 50e9), 4096 * 8 * 7168 * 2.0
    seconds = float(collective_s(pool, _group(ranks, 8), "all_to_all", np.array([held]))[0])
    assert held / seconds / 1e9 == pytest.approx(published, rel=0.2)


def test_every_kind_of_network_has_its_figures() -> None:
    assert set(load_yaml("fabrics.yaml")["network_kinds"]) == set(NETWORK_KINDS)


def test_nccl_leaves_most_of_omni_path_unused() -> None:
    # 4 nodes of 4 V100, 4 links of 100 Gb/s: bus bandwidth 10.59 GB/s at 4 GB (bigscience experiments/bandwidth)
    pool = msgspec.structs.replace(_on(pool_of("v100-32g-sxm", 4), "omni-path", 4, 12.5e9), devices_per_node=4)
    assert _busbw(pool, "all_reduce", 16, 4, 4 * 2**30) == pytest.approx(10.59, rel=0.1)


def test_all_to_all_across_nodes_is_bound_by_the_nics() -> None:
    pool = pool_of("h100-80g-sxm", 2)
    held = 256 * 2**20
    seconds = float(collective_s(pool, _group(16, 8), "all_to_all", np.array([held]))[0])
    # 2 nodes, 8 x 400 Gb/s: 46 of 50 GB/s per device (deepseek-ai/DeepEP issue 3) on half the bytes
    assert held * 8 / 16 / seconds / 1e9 == pytest.approx(43, rel=0.15)


def test_flex_sends_a_token_once_per_rank_and_node() -> None:
    pool = pool_of("h800-80g-sxm", 8)
    tokens = np.array([4096 * 7168 * 1.0])  # FP8 dispatch
    shapes = Shapes.of(job_of(QWEN3_30B), options_of())
    inside = float(collective_s(pool, _group(8, 8), "flex_dispatch", tokens, distinct=shapes.distinct)[0])
    spread = float(collective_s(pool, _group(64, 8), "flex_dispatch", tokens, distinct=shapes.distinct)[0])
    assert 0 < inside < spread
    # DeepEP README, 64 ranks: 51 GB/s of RDMA counted over the nodes a token goes to
    distinct = 8 * (1 - (1 - 1 / 8) ** 8)
    assert float(tokens[0]) * distinct / spread / 1e9 == pytest.approx(51, rel=0.2)


@pytest.mark.parametrize(("groups", "chosen"), [(0, 0), (8, 4), (8, 3), (4, 1)])
@pytest.mark.parametrize("places", [2, 4, 8, 32])
def test_places_of_a_tokens_experts_are_those_of_routed_tokens(groups: int, chosen: int, places: int) -> None:
    """Against routing itself: the best groups by the sum of their two best scores, then top-k in them (DeepSeek-V3)."""
    rng = np.random.default_rng(places + groups)
    scores_TE = rng.random((4000, 256))
    if groups:
        best_TG = np.sort(scores_TE.reshape(4000, groups, -1), axis=2)[:, :, -2:].sum(axis=2)
        kept_TG = best_TG >= np.sort(best_TG, axis=1)[:, -chosen][:, None]
        scores_TE = np.where(np.repeat(kept_TG, 256 // groups, axis=1), scores_TE, 0.0)
    place_TK = np.argsort(scores_TE, axis=1)[:, -8:] // (256 // places)
    simulated = np.mean([len(set(row)) for row in place_TK])
    moe = Moe(num_experts=256, top_k=8, ffn_hidden=2048, router_groups=groups, group_top_k=chosen)
    shapes = Shapes.of(job_of(msgspec.structs.replace(QWEN3_30B, moe=moe)), options_of())
    assert float(shapes.distinct(np.array([float(places)]))[0]) == pytest.approx(simulated, rel=0.05)


def test_sends_share_the_nodes_nics_and_gloo_copies_through_the_host() -> None:
    pool = pool_of("h100-80g-sxm", 2)
    held, one, eight = np.array([64e6]), np.array([1.0]), np.array([8.0])
    near = float(send_s(held, eight, pool=pool, same_node_K=np.array([True]))[0])
    far = float(send_s(held, eight, pool=pool, same_node_K=np.array([False]))[0])
    alone = float(send_s(held, one, pool=pool, same_node_K=np.array([False]))[0])
    assert near < far
    assert alone == pytest.approx(far)  # one rank drives one NIC, not the node's eight
    link = Link(between=("a", "b"), bytes_per_s=12.5e9, latency_s=20e-6, transport="nccl")
    shared = float(send_s(held, eight, pool=pool, link=link)[0])
    assert shared == pytest.approx(20e-6 + 8 * 64e6 / (0.85 * 12.5e9))
    relay = Link(between=("a", "b"), bytes_per_s=12.5e9, latency_s=20e-6, transport="gloo")
    assert float(send_s(held, eight, pool=pool, link=relay)[0]) > shared


@pytest.mark.parametrize("seed", range(12))
def test_an_option_costs_among_others_what_it_costs_alone(seed: int) -> None:
    """Operations that only some options have (whole QKV outputs, context parallel rings) cost the others nothing."""
    rng = random.Random(seed)
    job, cluster = random_job(rng, 4), random_cluster(rng, 16)
    job = msgspec.structs.replace(job, model=msgspec.structs.replace(job.model, num_kv_heads=2))
    menu = recompute_menu(job)
    every = build_space(job, cluster, Pins()).options
    together = [price(job, pool, every, menu) for pool in cluster.pools]
    for k in rng.sample(range(len(every)), min(len(every), 20)):
        for pool, table in zip(cluster.pools, together, strict=True):
            alone, among = price(job, pool, every.take(np.array([k])), menu), table.take(np.array([k]))
            for name in ("forward_CK", "backward_CK", "recompute_RCK", "activation_RCK", "dense_sync_s_K"):
                assert getattr(among, name) == pytest.approx(getattr(alone, name), rel=1e-12), (name, k)
