"""Measurements that exist already. Fixtures are written here, in the formats that the programs print."""

from __future__ import annotations

import json
from pathlib import Path

import builders
import pytest

from hapmoe.errors import InputError
from hapmoe.logs.megatron import read_log
from hapmoe.logs.nccl import nccl_table
from hapmoe.logs.routing import routing_table, trace_table
from hapmoe.measured import Collective, Routing, Run
from hapmoe.plan import Plan
from hapmoe.resolve import resolve

RUN = Run(date="2026-11-30T00:00:00Z", command="import of a file")

# ------------------------------------------------------------------------------------------ Megatron

LOGS = Path(__file__).parent / "logs"


def log(name: str) -> str:
    return (LOGS / f"{name}.log").read_text()


def test_iteration_lines_of_several_versions() -> None:
    old = read_log(log("megatron-2021"))
    assert [(one.number, one.step_s, one.global_batch_size) for one in old.iterations] == [
        (1, 9.8005, 64),
        (2, 1.4238, 64),
    ]
    assert [one.step_s for one in old.steady] == [1.4238]
    _, second = read_log(log("core-0.12")).iterations
    assert (second.step_s, second.tflop_per_s_per_device, second.global_batch_size) == (4.2105, 104.7, 256)
    assert [one.step_s for one in read_log(log("core-0.16")).steady] == [
        3.98
    ]  # the first, and the one with skipped steps, not
    (primus,) = read_log(log("primus")).iterations
    assert (primus.step_s, primus.tflop_per_s_per_device) == (0.8015, 300.1)
    (deepspeed,) = read_log(log("megatron-deepspeed")).iterations
    assert (deepspeed.number, deepspeed.step_s, deepspeed.tflop_per_s_per_device) == (3, 10.8932, 49.66)


def test_timers_are_those_of_the_slowest_rank() -> None:
    assert read_log(log("core-0.12")).timers == {
        "forward-backward": (3.95075,),
        "all-grads-sync": (0.0605,),
        "optimizer": (0.13025,),
    }
    assert read_log(log("core-0.16")).timers == {"forward-backward": (3.7125,), "optimizer": (0.1,)}
    assert read_log(log("core-0.16")).by_rank["optimizer"] == {0: (0.1,), 8: (0.099,)}


def test_memory_reports_share_a_line() -> None:
    """Ranks write at once; MB are 2^20 bytes (training/utils: report_memory)."""
    first, second = read_log(log("core-0.16")).memory
    assert (first.rank, first.after, first.max_allocated, first.max_reserved) == (0, 1, 3000 * 2**20, 4096 * 2**20)
    assert first.device == 5000 * 2**20 and second.rank == 8 and second.device is None


def test_what_is_no_log_is_refused() -> None:
    for text in ("", "hello\n", " iteration 3/ 5 | lm loss: 3.0 |\n"):
        with pytest.raises(InputError, match="no iterations"):
            read_log(text)


# ---------------------------------------------------------------------------------------- nccl-tests


def test_nccl_tests() -> None:
    table = nccl_table(log("nccl-tests-2.18"), RUN, "all.log")
    assert (table.device, table.software) == ("NVIDIA H100 80GB HBM3", {"nccl": "2.28.7"})
    found = [
        (row.collective, row.link, row.ranks, row.ranks_per_node, row.bytes, row.median_s, row.samples)
        for row in table.rows
        if isinstance(row, Collective)
    ]
    assert found == [
        ("all_reduce", "network", 16, 8, 1048576, pytest.approx(71.21e-6), 20),
        ("all_reduce", "network", 16, 8, 8589934592, pytest.approx(45123e-6), 20),
        ("all_to_all", "node", 8, 8, 1048576, pytest.approx(40e-6), 20),
    ]


def test_older_columns_and_output_without_ranks() -> None:
    """Before 2.13 there was no root; a log that somebody cut says nothing of its ranks."""
    text = log("nccl-tests-2.0")
    with pytest.raises(InputError, match="does not list its ranks"):
        nccl_table(text, RUN, "old.log", device="Tesla V100")
    row = nccl_table(text, RUN, "old.log", device="Tesla V100", ranks=8).rows[0]
    assert isinstance(row, Collective)
    assert (row.collective, row.link, row.ranks, row.median_s) == ("all_gather", "node", 8, pytest.approx(33e-6))
    with pytest.raises(InputError, match="which device"):
        nccl_table(text, RUN, "old.log", ranks=8)
    with pytest.raises(InputError, match="unknown collective"):
        nccl_table(text.partition("\n")[2], RUN, "old.log", device="Tesla V100", ranks=8)


# ------------------------------------------------------------------------------------------- routing


def write_ranks(folder: Path, counts: dict[int, dict[int, list[list[int]]]]) -> None:
    """``save_tpe``'s files: per rank and layer, a list per microbatch of the rank's own experts."""
    folder.mkdir()
    for rank, layers in counts.items():
        lines = [{"iter": 10, "block": "decoder", "layer": layer, "tpe": tpe} for layer, tpe in layers.items()]
        lines.append({"iter": 10, "block": "mtp", "mtp_idx": 0, "layer": 0, "tpe": [[1, 1]]})
        (folder / f"rank{rank}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_counts_of_ranks_that_share_experts_are_put_together(tmp_path: Path) -> None:
    """8 experts, two a rank: 4 ranks are a group, and there are two of them."""
    counts = {rank: {0: [[rank * 10, 1], [2, rank]], 3: [[5, 5], [5, 5]]} for rank in range(8)}
    write_ranks(tmp_path / "tpe", counts)
    rows = [row for row in routing_table(tmp_path / "tpe", RUN, 8).rows if isinstance(row, Routing)]
    assert len(rows) == 2 * 2 * 2  # layers, microbatches, groups
    first = {(row.layer, row.microbatch, row.replica): row.tokens for row in rows}
    assert first[0, 0, 0] == (0, 1, 10, 1, 20, 1, 30, 1) and first[0, 1, 1] == (2, 4, 2, 5, 2, 6, 2, 7)
    (tmp_path / "tpe" / "rank5.jsonl").unlink()
    with pytest.raises(InputError, match=r"rank5\.jsonl is missing"):
        routing_table(tmp_path / "tpe", RUN, 8)


def test_layers_of_later_stages_are_counted_over_the_whole_model(tmp_path: Path) -> None:
    """Two stages of 4 ranks, ep 2 and etp 2: ranks that share experts by tensor parallelism count once."""
    cluster = builders.cluster(builders.pool(nodes=1))
    plan: Plan = resolve(builders.job(), cluster, builders.plan((5, 3), tp=2, ep=2, etp=2, dp=2, num_devices=4))
    counts = {rank: {0: [[rank] * 4]} for rank in range(8)}
    write_ranks(tmp_path / "tpe", counts)
    found = {
        (row.layer, row.tokens)
        for row in routing_table(tmp_path / "tpe", RUN, 8, plan).rows
        if isinstance(row, Routing)
    }
    assert found == {(0, (0, 0, 0, 0, 2, 2, 2, 2)), (5, (4, 4, 4, 4, 6, 6, 6, 6))}


def test_any_trace_as_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"layer": 1, "tokens": [3, 5], "step": 7}\n\n{"layer": 2, "tokens": [8, 0], "microbatch": 4}\n')
    assert [
        (r.layer, r.step, r.microbatch, r.tokens) for r in trace_table(path, RUN).rows if isinstance(r, Routing)
    ] == [
        (1, 7, 0, (3, 5)),
        (2, 0, 4, (8, 0)),
    ]
    path.write_text('{"layer": 1, "tokens": [3, 5]}\n{"layer": 1}\n')
    with pytest.raises(InputError, match=r"trace\.jsonl:2"):
        trace_table(path, RUN)
