"""Kernels and collectives measured alone: the right shapes, honest figures, nothing measured twice."""

from __future__ import annotations

import os
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shapes_of import LLAMA2_7B, MIXTRAL_8X7B, job_of

from hapmoe import tables
from hapmoe.alone.collectives import wanted
from hapmoe.alone.groups import Shape, partition, shapes_of
from hapmoe.alone.shapes import grid, of_job
from hapmoe.alone.spread import spread
from hapmoe.alone.worker import missing_of
from hapmoe.measured import Collective, Compute, Run, Table


def test_one_disturbed_timing_does_not_count() -> None:
    """Median deviation of (10, 10.2, 9.9, 10.1, 10): 0.1, scaled 0.148; 30 is 135 of those away."""
    assert spread([10.0, 10.2, 9.9, 10.1, 10.0, 30.0]) == {
        "median_s": 10.0,
        "p10_s": 9.94,
        "p90_s": 10.16,
        "samples": 5,
    }


@given(st.lists(st.floats(1e-6, 10.0), min_size=1, max_size=40))
def test_spread_lies_within_the_timings(timings: list[float]) -> None:
    found = spread(timings)
    low, high = min(timings) * (1 - 1e-5), max(timings) * (1 + 1e-5)
    assert low <= found["p10_s"] <= found["median_s"] <= found["p90_s"] <= high
    assert 1 <= found["samples"] <= len(timings)
    if len(timings) < 5:
        assert found["median_s"] == pytest.approx(statistics.median(timings), rel=1e-5)


def test_the_kernels_of_a_job() -> None:
    """LLaMA-2 7B at tp 2, one sequence of 4096: qkv is [4096, 4096] x [4096, 3 * 4096 / 2] and its two transposes."""
    rows = of_job(job_of(LLAMA2_7B, seq_len=4096))
    gemms = {(row.m, row.n, row.k) for row in rows if row.op == "gemm"}
    assert {(4096, 6144, 4096), (4096, 4096, 6144), (6144, 4096, 4096)} <= gemms
    assert (4096, 16000, 4096) in gemms  # logits: 32000 tokens over tp 2
    attention = {(row.m, row.n, row.k, row.groups) for row in rows if row.op == "attention"}
    assert {(4096, 4096, 128, 16), (4096, 4096, 128, 64)} <= attention  # 32 heads: tp 2; tp 1 with two sequences
    # Mixtral, ep 8: one expert a rank, 8 ranks x 4096 tokens x 2 / 8 experts
    rows = of_job(job_of(MIXTRAL_8X7B, seq_len=4096))
    assert (1, 8192, 28672, 4096) in {(r.groups, r.m, r.n, r.k) for r in rows if r.op == "grouped_gemm"}


@pytest.mark.parametrize(("nodes", "per_node"), [(1, 8), (2, 4), (4, 8), (3, 2)])
def test_every_rank_is_in_one_group_of_each_shape(nodes: int, per_node: int) -> None:
    for shape in shapes_of(nodes, per_node):
        groups = partition(shape, nodes, per_node)
        assert sorted(rank for ranks in groups for rank in ranks) == list(range(nodes * per_node))
        for ranks in groups:
            homes = [rank // per_node for rank in ranks]
            assert len(ranks) == shape.ranks and {homes.count(node) for node in homes} == {shape.ranks_per_node}
            assert (len(set(homes)) > 1) == (shape.link == "network")
    assert Shape("node", per_node, per_node) in shapes_of(nodes, per_node)


def test_every_kind_of_kernel_runs() -> None:
    from hapmoe.alone.compute import measure
    from hapmoe.alone.machine import find_machine

    machine = find_machine("cpu")
    small = {"m": 16, "n": 16, "k": 16, "groups": 2}
    ops = {(row.op, row.direction) for row in grid("bf16")}
    assert ops == {(op, "forward") for op in ("gemm", "grouped_gemm", "norm", "permute", "copy", "adam")} | {
        ("attention", "forward"),
        ("attention", "backward"),
    }
    for op, direction in sorted(ops):
        key = Compute(run="", op=op, direction=direction, median_s=1.0, p10_s=1.0, p90_s=1.0, samples=1, **small)
        row = measure(machine, key, "run", share_s=0.002)
        assert isinstance(row, Compute) and row.key == key.key and row.run == "run", row
        assert 0 < row.p10_s <= row.median_s <= row.p90_s < 1.0
    unknown = msgspec.structs.replace(key, op="gemm", m=1, k=1, n=2**62)
    assert isinstance(measure(machine, unknown, "run", share_s=0.002), str)


def test_collectives_of_two_ranks(tmp_path: Path) -> None:
    """By the command; what is there is not asked for again."""
    root = Path(__file__).parents[1]
    env = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    env |= {"PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1"}
    words = ["profile", "collectives", "--tables", str(tmp_path), "--ranks", "2", "--max-bytes", "16 KiB"]
    command = [sys.executable, "-m", "hapmoe", *words, "--device", "cpu"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    (table,) = tables.load(tmp_path)
    assert (table.kind, table.device_kind, set(table.software)) == ("collectives", "cpu", {"torch"})
    found = {(row.collective, row.link, row.ranks, row.ranks_per_node, row.bytes) for row in table.rows}  # type: ignore[attr-defined]
    names = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")
    assert found == {(name, "node", 2, 2, size) for name in names for size in (4096, 16384)}
    keys = wanted(Shape("node", 2, 2), (4096, 16384, 65536))
    left = missing_of(str(tmp_path), msgspec.structs.replace(table, rows=()), keys)
    assert {row.bytes for row in left} == {65536} and len(left) == 5


def test_a_measurement_goes_on_where_it_stopped(tmp_path: Path) -> None:
    rows = of_job(job_of(LLAMA2_7B, seq_len=4096))
    run = Run(date="2026-11-30T00:00:00Z")
    table = Table(kind="compute", device="cpu", runs=(run,))
    done = tuple(msgspec.structs.replace(row, run=run.id) for row in rows[:5])
    assert missing_of(str(tmp_path / "none"), table, rows) == rows
    tables.save(tmp_path, msgspec.structs.replace(table, rows=done))
    assert missing_of(str(tmp_path), table, rows) == rows[5:]
    assert not any(isinstance(row, Collective) for row in rows)


def rank_of(marker: str, rank: int) -> int:
    """Process number of the rank of a job whose environment holds ``marker``; torchrun gives each its own session."""
    for place in Path("/proc").glob("[0-9]*"):
        try:
            settings = (place / "environ").read_bytes().decode().split("\0")
        except OSError:
            continue  # it has ended meanwhile, or is somebody else's
        if {marker, f"RANK={rank}"} <= set(settings):
            return int(place.name)
    raise AssertionError(f"no process runs rank {rank}")


@pytest.mark.parametrize(
    ("sent", "why"),
    [(signal.SIGKILL, r"rank \d ended with code -?\d+"), (signal.SIGSTOP, r"rank 0 .*Timed out waiting")],
)
def test_a_rank_that_dies_or_hangs_leaves_what_was_measured(tmp_path: Path, sent: signal.Signals, why: str) -> None:
    """For real: killed, as the kernel does when memory is short; stopped, so that the others wait in a collective."""
    env = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    env |= {"PYTHONPATH": str(Path(__file__).parents[1] / "src"), "OMP_NUM_THREADS": "1"}
    marker = f"HAPMOE_TEST={tmp_path}"
    env["HAPMOE_TEST"] = str(tmp_path)
    words = ["profile", "collectives", "--tables", str(tmp_path), "--ranks", "2", "--device", "cpu"]
    command = [sys.executable, "-m", "hapmoe", *words, "--max-bytes", "64 MiB", "--timeout", "15"]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 240
    while not list(tmp_path.glob("*.csv")) and time.monotonic() < deadline:
        time.sleep(0.05)
    first, second = rank_of(marker, 0), rank_of(marker, 1)
    os.kill(second, sent)
    if sent == signal.SIGSTOP:
        while Path(f"/proc/{first}").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(second, signal.SIGCONT)  # torchrun has told it to end
    said, _ = process.communicate(timeout=240)
    assert process.returncode == 1
    assert re.match(f"Stopped: {why}", said.splitlines()[-2])
    assert said.splitlines()[-1].endswith("the same command goes on from there.")
    (table,) = tables.load(tmp_path)  # whole: its checksum is right
    assert {row.collective for row in table.rows} >= {"all_reduce"}  # type: ignore[attr-defined]
    assert [path.suffix for path in tmp_path.iterdir() if not path.name.startswith(".")] == [".csv"]


def test_a_rank_that_ended_is_named() -> None:
    """torchrun's report as torch prints it: the root cause comes last, its peers were only stopped."""
    from hapmoe.cli_alone import _why

    report = """\
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
hapmoe FAILED
Failures:
[1]:
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 11)
------
Root Cause (first observed failure):
[0]:
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 12)
"""
    assert _why(report) == "rank 1 ended with code -9"
    assert _why("RuntimeError: Timed out waiting 8000ms for recv\n") == (
        "a rank failed: RuntimeError: Timed out waiting 8000ms for recv"
    )
