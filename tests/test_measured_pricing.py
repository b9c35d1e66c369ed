"""Measured figures in place of the model's: there as they are, between on a line, beyond by the model."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import builders
import msgspec
import numpy as np
import pytest
from shapes_of import LLAMA2_7B, job_of, options_of

from hapmoe import tables
from hapmoe.catalog import find_device
from hapmoe.cluster import Cluster, Network, Pool
from hapmoe.comm import Group, collective_with_source, send_s
from hapmoe.cost import evaluate
from hapmoe.efficiency import efficiency_of
from hapmoe.errors import InputError
from hapmoe.job import JobSpec
from hapmoe.measured import Borrowed, Calibration, Collective, Compute, Memory, Piece, Row, Run, Table
from hapmoe.options import Options
from hapmoe.pricing import explain, price
from hapmoe.tables.lookup import SOURCES, ratio_among

RUN = Run(date="2026-11-30T10:48:00Z", command="test")
SPREAD = {"p10_s": 1e-9, "p90_s": 1e3, "samples": 9}


def table(kind: str, rows: Sequence[Row], device: str = "a100", **more: Any) -> Table:
    return Table(kind=kind, device_kind=device, device="", runs=(RUN,), rows=tuple(rows), **more)


def collective(name: str, size: int, seconds: float, ranks: int, per_node: int, link: str = "") -> Collective:
    link = link or ("node" if ranks == per_node else "network")
    values = {"ranks": ranks, "ranks_per_node": per_node, "bytes": size, "median_s": seconds, **SPREAD}
    return Collective(run=RUN.id, collective=name, link=link, **values)


def with_tables(*given: Table, pool: Pool | None = None) -> Pool:
    return tables.attach(Cluster(pools=(pool or builders.pool(nodes=16),)), given).pools[0]


def group(size: int, inside: int) -> Group:
    return Group(*(np.array([float(value)]) for value in (size, inside, size / inside)))


def asked(pool: Pool, name: str, size: float, ranks: int, per_node: int) -> tuple[float, str]:
    seconds, source = collective_with_source(pool, group(ranks, per_node), name, np.array([size]))
    return float(seconds[0]), SOURCES[source[0]]


def test_collectives_by_size() -> None:
    pool = with_tables(
        table("collectives", [collective("all_gather", 10**n, 1e-3 * 4 ** (n - 6), 8, 8) for n in (6, 8)])
    )
    assert asked(pool, "all_gather", 1e6, 8, 8) == (pytest.approx(1e-3), "measured")
    assert asked(pool, "all_gather", 1e8, 8, 8) == (pytest.approx(16e-3), "measured")
    # half way between 10^6 and 10^8 in log space: the geometric mean of 1 and 16 ms
    assert asked(pool, "all_gather", 1e7, 8, 8) == (pytest.approx(4e-3), "interpolated")
    bare = msgspec.structs.replace(pool, tables=None)
    far, _ = asked(bare, "all_gather", 1e9, 8, 8)
    end, _ = asked(bare, "all_gather", 1e8, 8, 8)
    assert asked(pool, "all_gather", 1e9, 8, 8) == (pytest.approx(16e-3 * far / end), "extrapolated")
    assert asked(pool, "all_to_all", 1e7, 8, 8) == (asked(bare, "all_to_all", 1e7, 8, 8)[0], "roofline")
    assert asked(pool, "all_gather", 1e7, 16, 8)[1] == "roofline"  # nothing was measured between nodes


def test_noise_does_not_make_larger_messages_faster() -> None:
    noisy = [
        collective("all_reduce", size, seconds, 8, 8) for size, seconds in ((1000, 5e-5), (2000, 3e-5), (4000, 6e-5))
    ]
    pool = with_tables(table("collectives", noisy))
    times = [asked(pool, "all_reduce", size, 8, 8)[0] for size in (1000, 1500, 2000, 3000, 4000)]
    assert all(after >= before * (1 - 1e-9) for before, after in itertools.pairwise(times))


MI325X_ALL_REDUCE_US = {
    # rccl-tests, ROCm 6.4.1, 8 MI325X a node and 8 x 400 Gb/s RoCE; bytes: microseconds by nodes.
    # Source: hisohara/ai-scripts@7b8b1ec290a6 training/01_rccl-smoketest/README.md
    2: {4294967296: 23192, 8589934592: 46123, 17179869184: 91973},
    4: {4294967296: 23904, 8589934592: 47563, 17179869184: 94942},
    8: {4294967296: 24572, 8589934592: 48321, 17179869184: 96405},
}


def test_tables_of_few_nodes_predict_more() -> None:
    """The paper's Appendix D: profiles of 4 nodes predict 16 to within 14%."""
    device = find_device("mi325x")[0]
    pool = builders.pool("mi325x", nodes=8, device=device)
    rows = [
        collective("all_reduce", size, micro * 1e-6, 8 * nodes, 8)
        for nodes in (2, 4)
        for size, micro in MI325X_ALL_REDUCE_US[nodes].items()
    ]
    pool = with_tables(table("collectives", rows, device.name), pool=pool)
    for size, micro in MI325X_ALL_REDUCE_US[8].items():
        seconds, source = asked(pool, "all_reduce", size, 64, 8)
        assert source == "extrapolated" and seconds == pytest.approx(micro * 1e-6, rel=0.05)
    assert asked(pool, "all_reduce", 4294967296, 32, 8) == (pytest.approx(23904e-6), "measured")


B300_ALL_TO_ALL_GB_PER_S = {2: 104.9, 4: 94.0, 8: 74.0, 16: 73.8, 32: 54.7}
"""NCCL all-to-all at 4096 tokens x 7168 x top-8, bf16, a rank, by nodes of 8 B300 and 8 x 800 Gb/s EFA (AWS p6-b300).
Source: awslabs/awsome-distributed-ai@95b939cdc5b2 micro-benchmarks/expert-parallelism/ep-backend-comparison"""


@pytest.mark.parametrize("bus", [False, True])
def test_tables_of_four_nodes_predict_sixteen(bus: bool) -> None:
    """The paper's Appendix D, within its 14 %. The source does not say whether what stays on the rank counts."""
    size, device = 4096 * 7168 * 8 * 2, find_device("b300")[0]
    network = Network(nics_per_node=8, nic_bytes_per_s=100e9, latency_s=15e-6, kind="efa")
    pool = msgspec.structs.replace(builders.pool("b300", nodes=32, device=device), network=network)
    measured_s = {
        nodes: size / (rate * 1e9) * ((8 * nodes - 1) / (8 * nodes) if bus else 1.0)
        for nodes, rate in B300_ALL_TO_ALL_GB_PER_S.items()
    }
    rows = [collective("all_to_all", size, measured_s[nodes], 8 * nodes, 8) for nodes in (2, 4)]
    pool = with_tables(table("collectives", rows, device.name), pool=pool)
    for nodes in (8, 16, 32):
        seconds, source = asked(pool, "all_to_all", size, 8 * nodes, 8)
        assert source == "extrapolated" and seconds == pytest.approx(measured_s[nodes], rel=0.14)


def test_sends_between_pools_are_those_of_their_link() -> None:
    cluster = builders.cluster(builders.pool("a100"), builders.pool("mi300x"), links=(("a100", "mi300x"),))
    rows = [collective("send_recv", size, size / 5e8, 2, 1, "a100--mi300x") for size in (10**6, 10**8)]
    found = tables.attach(cluster, [table("collectives", rows)])
    link = found.link("mi300x", "a100")
    assert link is not None and link.tables is not None and found.pools[0].tables is None
    one = np.ones(1)
    seconds = send_s(np.array([1e7]), one, pool=found.pools[0], to=found.pools[1], link=link)
    assert float(seconds[0]) == pytest.approx(1e7 / 5e8)


def test_ratios_of_neighbours() -> None:
    points = np.array([[1.0, 1.0], [16.0, 1.0], [1.0, 16.0]])
    ratio = np.array([2.0, 8.0, 8.0])
    found, source = ratio_among(points, ratio, np.array([[16.0, 1.0], [4.0, 1.0], [1.0, 64.0]]))
    assert float(found[0]) == pytest.approx(8.0)
    # distances in log2: 2, 2 and sqrt(20), so weights 1/4, 1/4, 1/20; logs of the ratios 1, 3, 3
    assert np.log2(found[1]) == pytest.approx((1 / 4 * 1 + 1 / 4 * 3 + 1 / 20 * 3) / (1 / 4 + 1 / 4 + 1 / 20))
    assert [SOURCES[code] for code in source] == ["measured", "interpolated", "extrapolated"]


def test_a_measured_gemm_is_used_as_it_was_measured() -> None:
    """fc1 of LLaMA-2 7B, two passes over [4096, 4096] x [4096, 22016] and their transposes."""
    job = job_of(LLAMA2_7B, global_batch_size=8)
    shapes = {"forward": (4096, 22016, 4096), "dgrad": (4096, 4096, 22016), "wgrad": (22016, 4096, 4096)}
    seconds = {"forward": 3e-3, "dgrad": 4e-3, "wgrad": 7e-3}
    rows = [
        Compute(run=RUN.id, op="gemm", m=m, n=n, k=k, median_s=seconds[way], **SPREAD)
        for way, (m, n, k) in shapes.items()
    ]
    pool = with_tables(table("compute", rows))
    (line,) = [line for line in explain(job, pool, options_of(tp=1, dp=8)) if line.name == "fc1"]
    # These are bound by compute. A step holds this share of the rate of kernels alone (data/efficiency.yaml).
    held = efficiency_of(pool.device).sustained["bf16"]
    assert line.forward_s == pytest.approx(3e-3 / held, rel=0.01)
    assert line.backward_s == pytest.approx(11e-3 / held, rel=0.01)
    assert line.sources == {"measured": pytest.approx(line.forward_s + line.backward_s)}


TRUE = {"moe": (2.5e-3, 6e-3), "embedding": (4e-4, 9e-4), "head": (1.5e-3, 2.5e-3)}
"""Forward and backward seconds of a machine that nobody modelled."""


def pieces(job: JobSpec, stages: Sequence[tuple[int, int, int]], **at: int) -> list[Piece]:
    """Stages of (MoE layers, embedding, head): what each would take."""
    rows = []
    for layers, embedding, head in stages:
        for way, phase in enumerate(("forward", "backward")):
            total = layers * TRUE["moe"][way] + embedding * TRUE["embedding"][way] + head * TRUE["head"][way]
            values = {"model": tables.shape_key(job), "precision": "bf16", "seq_len": job.training.seq_len}
            counts = {"moe_layers": layers, "embedding": embedding, "head": head}
            place = {"micro_batch_size": 1, "ep": 8, **at}
            rows.append(
                Piece(
                    run=RUN.id, phase=phase, median_s=total + 1e-3, comm_s=1e-3, **values, **counts, **place, **SPREAD
                )
            )
    return rows


def options(ep: int, mbs: int = 1) -> Options:
    return Options(*(np.array([value]) for value in (1, 1, ep, 1, 8, mbs)))


def test_pieces_are_taken_apart_and_win() -> None:
    """Stages of 1 to 4 layers: each layer, embedding and head come out as they went in."""
    job = builders.job()
    pool = with_tables(table("pieces", pieces(job, [(1, 0, 0), (2, 1, 0), (3, 0, 1), (4, 1, 1)])))
    found = price(job, pool, options(8))
    exposed = price(job, msgspec.structs.replace(pool, tables=None), options(8)).exposed_comm_CK[0, 0]
    both = found.forward_CK[0, 0] + found.backward_CK[0, 0] - exposed
    assert both == pytest.approx(sum(TRUE["moe"]), rel=1e-3)
    assert found.embedding_forward_K[0] == pytest.approx(TRUE["embedding"][0], rel=1e-2)
    assert found.head_backward_K[0] == pytest.approx(TRUE["head"][1], rel=1e-2)
    # recomputing all of a layer costs its measured forward pass, messages again included
    assert found.recompute_RCK[-1, 0, 0] == found.forward_CK[0, 0]


def test_other_degrees_follow_the_model_from_the_nearest_pieces() -> None:
    job = builders.job()
    pool = with_tables(table("pieces", pieces(job, [(1, 0, 0), (2, 1, 0), (3, 0, 1)])))
    bare = msgspec.structs.replace(pool, tables=None)

    def layer(at: Pool, how: Options) -> float:
        priced = price(job, at, how)
        return float((priced.forward_CK + priced.backward_CK - priced.exposed_comm_CK)[0, 0])

    ratio = layer(pool, options(8)) / layer(bare, options(8))
    assert layer(pool, options(4, 2)) / layer(bare, options(4, 2)) == pytest.approx(ratio, rel=0.2)
    sources = [line.sources for line in explain(job, pool, options(4, 2)) if line.block == "moe layer"]
    assert {name for each in sources for name in each} <= {"extrapolated", "roofline", "assumed"}
    other = msgspec.structs.replace(job, model=msgspec.structs.replace(job.model, hidden=512))
    assert layer(bare, options(8)) != layer(pool, options(8))
    assert price(other, pool, options(8)).forward_CK == pytest.approx(price(other, bare, options(8)).forward_CK)


def test_between_micro_batch_sizes_the_own_degrees_decide() -> None:
    """Degrees change what runs, the micro-batch size how many rows of it: others count beyond those measured only."""
    job = builders.job()
    own = [row for size in (1, 4) for row in pieces(job, [(1, 0, 0), (3, 0, 0)], micro_batch_size=size)]
    other = [
        msgspec.structs.replace(row, median_s=10 * row.median_s)
        for row in pieces(job, [(1, 0, 0), (3, 0, 0)], micro_batch_size=2, ep=4)
    ]
    alone, both = with_tables(table("pieces", own)), with_tables(table("pieces", [*own, *other]))

    def layer(at: Pool, mbs: int) -> float:
        return float(price(job, at, options(8, mbs)).forward_CK[0, 0])

    assert layer(both, 2) == layer(alone, 2) and layer(both, 4) == layer(alone, 4)
    assert layer(both, 8) > 1.1 * layer(alone, 8)


def test_the_estimate_says_which_share_was_measured() -> None:
    job, plan = builders.job(), builders.plan(ep=8, dp=8)
    bare = builders.cluster(builders.pool())
    assert evaluate(job, bare, plan).source_share == dict.fromkeys(SOURCES, 0.0) | {"assumed": 1.0}
    sizes = [collective("all_to_all", 10**n, 10.0 ** (n - 10), 8, 8) for n in range(4, 10)]
    sent = evaluate(job, tables.attach(bare, [table("collectives", sizes)]), plan).source_share
    # forward and backward dispatch and combine, and nothing else
    assert sent["interpolated"] > 0 and sent["measured"] == sent["extrapolated"] == 0
    assert sum(sent.values()) == pytest.approx(1.0)
    rows = pieces(job, [(1, 0, 0), (2, 1, 0), (3, 0, 1)])
    all_of_it = evaluate(job, tables.attach(bare, [table("collectives", sizes), table("pieces", rows)]), plan)
    assert all_of_it.source_share["measured"] > 0.5
    assert all_of_it.source_share["measured"] + all_of_it.source_share["interpolated"] == pytest.approx(1.0)


def test_tables_of_other_devices_are_refused_unless_lent() -> None:
    cluster = builders.cluster(builders.pool("a100"))
    rows = [collective("all_reduce", 10**6, 1e-3, 8, 8)]
    with pytest.raises(InputError, match="measured on h800, but the pools are of a100"):
        tables.attach(cluster, [table("collectives", rows, "h800")])
    lent = table("collectives", rows, "h800", borrowed=(Borrowed(device="a100", reason="same board"),))
    found = tables.attach(cluster, [lent])
    assert asked(found.pools[0], "all_reduce", 1e6, 8, 8) == (pytest.approx(1e-3), "measured")
    noted = evaluate(builders.job(), found, builders.plan(ep=8, dp=8)).assumptions
    assert "a100: collectives figures borrowed from h800: same board" in noted
    own = table("collectives", [collective("all_reduce", 10**6, 2e-3, 8, 8)])
    assert asked(tables.attach(cluster, [lent, own]).pools[0], "all_reduce", 1e6, 8, 8)[0] == pytest.approx(2e-3)


def test_the_name_that_the_driver_gives_is_understood() -> None:
    device = find_device("h100-80g-sxm")[0]
    named = Table(
        kind="collectives",
        device="NVIDIA H100 80GB HBM3",
        runs=(RUN,),
        rows=(collective("all_reduce", 10**6, 1e-3, 8, 8),),
    )
    found = tables.attach(Cluster(pools=(builders.pool("any", device=device),)), [named])
    assert found.pools[0].tables is not None and len(found.tables_sha256) == 64


def test_a_planned_job_uses_the_tables_everywhere() -> None:
    """Search and oracle see the same prices: a measured all-to-all that never ends drives experts together."""
    import hapmoe

    job = job_of(builders.job().model, global_batch_size=64, dispatcher="alltoall", distributed_optimizer=True)
    cluster = builders.cluster(builders.pool("a100"))
    slow = [collective("all_to_all", 10**n, 30.0 * 10 ** (n - 9), ranks, ranks) for n in (3, 9) for ranks in (2, 4, 8)]
    bare = hapmoe.plan(job, cluster)
    found = hapmoe.plan(job, tables.attach(cluster, [table("collectives", slow)]))
    assert bare.plan is not None and found.plan is not None and found.estimate is not None
    assert {stage.ep for stage in found.plan.stages} == {1}
    assert (
        evaluate(job, tables.attach(cluster, [table("collectives", slow)]), bare.plan).step_s >= found.estimate.step_s
    )


def test_memory_beside_tensors_is_what_devices_showed() -> None:
    """80 GiB in use where the framework counted 71, and 40 where it counted 33: 9 and 7, the median 8."""
    job, bare = builders.job(), builders.cluster(builders.pool())
    rows = [
        Memory(
            run=RUN.id, model="any", precision="bf16", seq_len=4096, micro_batch_size=1, mark=mark, stage=stage, bytes=n
        )
        for stage, marks in ((0, {"allocated": 71, "reserved": 75, "device": 80}), (1, {"allocated": 33, "device": 40}))
        for mark, n in ((name, count * 2**30) for name, count in marks.items())
    ]
    found = evaluate(job, tables.attach(bare, [table("memory", rows)]), builders.plan(ep=8, dp=8))
    assert found.stages[0].memory.workspace == 8 * 2**30


def test_a_calibration_older_than_pieces_is_left_out() -> None:
    job, bare = builders.job(), builders.cluster(builders.pool())
    measured = table("pieces", pieces(job, [(1, 0, 0), (2, 1, 0), (3, 0, 1)]))
    plain = tables.attach(bare, [measured])
    plan = builders.plan(ep=8, dp=8)
    for date, same in (("2026-11-29T00:00:00Z", True), ("2026-12-01T00:00:00Z", False)):
        run = Run(date=date)
        row = Calibration(run=run.id, term="compute", model=tables.shape_key(job), value=2.0, samples=3)
        twice = Table(kind="calibration", device="a100", device_kind="a100", runs=(run,), rows=(row,))
        found = evaluate(job, tables.attach(bare, [measured, twice]), plan).step_s
        assert (found == evaluate(job, plain, plan).step_s) == same
