"""Measurements that exist already. Fixtures are written here, in the formats that the programs print."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import builders
import pytest

from hapmoe.errors import InputError
from hapmoe.logs.megatron import read_log
from hapmoe.logs.nccl import is_nccl_tests, nccl_table
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


def test_lines_with_the_launchers_prefix() -> None:
    """mpirun --tag-output of a test built for MPI (nccl-tests 2.18, published run of two ranks), srun --label."""
    text = """# nccl-tests version 2.18.0 nccl-headers=22907 nccl-library=22907
# Collective test starting: all_reduce_perf_mpi
# nThread 1 nGpus 1 minBytes 1048576 maxBytes 134217728 step: 2(factor) warmup iters: 10 iters: 50 agg iters: 1
#  Rank  0 Group  0 Pid 2994447 on        lab device  0 [0000:02:00] NVIDIA GeForce RTX 5090
#  Rank  1 Group  0 Pid 2994448 on        lab device  0 [0000:02:00] NVIDIA GeForce RTX 5090
#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong
     1048576        262144     float     sum      -1  4366.46    0.24    0.24       0  4365.21    0.24    0.24       0
"""
    for prefix in ("[1,0]<stdout>:", "   [1,0]<stdout>: ", "0: ", "> ", "[node-0]:", ""):
        table = nccl_table("".join(prefix + line + "\n" for line in text.splitlines()), RUN, "tagged.log")
        (row,) = table.rows
        assert isinstance(row, Collective) and table.device == "NVIDIA GeForce RTX 5090"
        assert (row.collective, row.ranks, row.bytes, row.median_s, row.samples) == (
            "all_reduce", 2, 1048576, pytest.approx(4366.46e-6), 50
        )  # fmt: skip


@pytest.mark.parametrize(
    ("test", "header", "line"),
    [
        # print_line_header of alltoall.cu in 2.10.0, and common.cu in 2.13.0: no reduction, a blank column
        ("alltoall_perf", "redop     time", f"{1 << 20:>12}  {1 << 17:>12}  {'float':>8}  {'':>6}"),
        ("all_gather_perf", "redop    root     time", f"{1 << 20:>12}  {1 << 17:>12}  {'float':>8}  {'':>6}  {-1:>6}"),
        ("sendrecv_perf", "    time", f"{1 << 20:>12}  {1 << 17:>12}  {'float':>8}"),
    ],
)
def test_a_blank_column_is_not_counted(test: str, header: str, line: str) -> None:
    text = f"{test} -b 1M\n#  size  count  type  {header}  algbw  busbw  error  time  algbw  busbw  error\n"
    text += f"{line}    33.00   31.78   27.80  0e+00    32.50   32.26   28.23    N/A\n"
    (row,) = nccl_table(text, RUN, "old.log", device="Tesla V100", ranks=8).rows
    assert isinstance(row, Collective) and row.median_s == pytest.approx(33e-6)


def test_nccl_tests_as_json() -> None:
    """What src/util.cu of 2.19 writes to the file of -J, as far as it is read; its environment stays out."""
    timed = {"time": 71.21, "alg_bw": 14.72, "bus_bw": 27.61, "nwrong": 0.0}
    row = {"size": 1048576, "count": 262144, "type": "float", "redop": "none", "root": "    -1", "out_of_place": timed}
    devices = [
        {"rank": rank, "group": 0, "pid": 7, "hostname": f"node-{rank // 2}", "device": 0, "device_info": "NVIDIA H100"}
        for rank in range(4)
    ]
    document: dict[str, Any] = {
        "version": 1, "start_time": "2026-07-09", "args": ["/opt/nccl-tests/build/alltoall_perf_mpi", "-J", "a.json"],
        "env": ["TOKEN=geheim"], "nccl_version": 22907, "config": {"iterations": 20, "devices": devices},
        "results": [row | {"in_place": timed, "actual_iterations": 20, "experiment_name": ""}],
    }  # fmt: skip
    text = json.dumps(document)
    assert is_nccl_tests(text)
    table = nccl_table(text, RUN, "a.json")
    (found,) = table.rows
    assert isinstance(found, Collective) and (table.device, table.software) == ("NVIDIA H100", {"nccl": "2.29.7"})
    assert (found.collective, found.ranks, found.ranks_per_node, found.link, found.samples, found.median_s) == (
        "all_to_all", 4, 2, "network", 20, pytest.approx(71.21e-6)
    )  # fmt: skip
    for cut in (text[:-20], json.dumps({**document, "config": {}})):
        with pytest.raises(InputError, match="not what nccl-tests -J writes"):
            nccl_table(cut, RUN, "a.json")


def test_ranks_that_somebody_cut_out_are_missed() -> None:
    lines = log("nccl-tests-2.18").splitlines(keepends=True)
    for gone in (
        [" Rank 11 "],
        [f" Rank {rank} " for rank in range(12, 16)],
    ):  # 15 of 16; 8 on one host, 4 on the other
        text = "".join(line for line in lines if not any(name in line for name in gone))
        with pytest.raises(InputError, match="not all of them are listed, or not as many on each"):
            nccl_table(text, RUN, "cut.log")
        assert (
            nccl_table(text, RUN, "cut.log", ranks=16, nodes=2).rows[0] == nccl_table("".join(lines), RUN, "").rows[0]
        )


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
