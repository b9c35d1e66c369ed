"""Tables of measurements: what is written comes back, merging has no order, writers do not hurt each other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hapmoe import tables
from hapmoe.errors import InputError
from hapmoe.measured import KINDS, Calibration, Collective, Compute, Memory, Piece, Routing, Run, Table

texts = st.text(st.characters(blacklist_categories=["Cs", "Cc"], blacklist_characters="\x85  "), max_size=12)
names = st.text("abcdefghijklmnopqrstuvwxyz0123456789 -:+", min_size=1, max_size=10)
seconds = st.floats(1e-9, 1e5, allow_nan=False)
counts = st.integers(0, 10**12)
whole = st.integers(1, 10**9)
runs = st.builds(Run, date=names, command=texts, clocks=texts, note=texts, hosts=whole, partial=st.booleans())
TIMED = {"median_s": seconds, "p10_s": seconds, "p90_s": seconds, "samples": whole}
PLACE = {name: st.integers(1, 8) for name in ("seq_len", "micro_batch_size", "tp", "ep", "dp")}
few = st.integers(0, 2)  # small, so that keys meet


def rows_of(kind: str, run: str) -> st.SearchStrategy[object]:
    at = {"run": st.just(run)}
    return {
        "compute": st.builds(Compute, **at, op=st.sampled_from(["gemm", "norm"]), m=few, n=few, k=few, **TIMED),
        "collectives": st.builds(
            Collective, **at, collective=names, link=names, ranks=whole, ranks_per_node=whole, bytes=few, **TIMED
        ),
        "pieces": st.builds(
            Piece, **at, model=names, precision=names, phase=names, moe_layers=few, **PLACE, **TIMED, comm_s=seconds
        ),
        "memory": st.builds(
            Memory, **at, model=names, precision=names, mark=names, bytes=counts, samples=whole, **PLACE
        ),
        "routing": st.builds(
            Routing, **at, layer=few, step=few, tokens=st.lists(counts, min_size=1, max_size=6).map(tuple)
        ),
        "calibration": st.builds(Calibration, **at, term=names, model=names, value=seconds, samples=whole),
    }[kind]


@st.composite
def measured(draw: st.DrawFn, kind: str | None = None) -> Table:
    kind = kind or draw(st.sampled_from(sorted(KINDS)))
    listed = draw(st.lists(runs, min_size=1, max_size=3))
    rows = draw(st.lists(st.sampled_from(listed).flatmap(lambda run: rows_of(kind, run.id)), max_size=6))
    software = draw(st.dictionaries(names, texts, max_size=2))
    return Table(
        kind=kind,
        device=draw(st.sampled_from(["NVIDIA H100 80GB HBM3", "cpu", "Größe: 'x' #1"])),
        software=software,
        runs=tuple(listed),
        rows=tuple(rows),
    )


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(measured())
def test_what_is_written_comes_back(table: Table) -> None:
    (expected,) = tables.merge([table])
    text = tables.encode(table)
    assert tables.decode(text) == expected
    assert tables.encode(tables.decode(text)) == text


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(measured("compute"), min_size=3, max_size=3), st.lists(st.just("cpu"), min_size=3, max_size=3))
def test_merging_has_no_order(three: list[Table], device: list[str]) -> None:
    a, b, c = (
        msgspec.structs.replace(table, device=name, software={}) for table, name in zip(three, device, strict=True)
    )
    whole = tables.merge([a, b, c])
    assert tables.merge([c, a, b]) == whole
    assert tables.merge([*tables.merge([a, b]), c]) == whole == tables.merge([a, *tables.merge([b, c])])
    assert tables.merge([*whole, *whole, a]) == whole


RUN = Run(date="2026-11-30T10:48:00Z", command="hapmoe profile compute")


def gemm(m: int, run: Run = RUN, median_s: float = 1e-3) -> Compute:
    return Compute(run=run.id, op="gemm", m=m, n=8, k=8, median_s=median_s, p10_s=1e-3, p90_s=2e-3, samples=5)


def table_of(*rows: Compute, run: Run = RUN, **more: object) -> Table:
    return Table(kind="compute", device="cpu", software={"torch": "2.13.0"}, runs=(run,), rows=rows, **more)  # type: ignore[arg-type]


def test_a_file_looks_like_this() -> None:
    """The format is for people and for other programs: it does not change unnoticed."""
    text = tables.encode(table_of(gemm(16), gemm(8)))
    head, checksum, body = text.partition("# sha256: ")
    assert head == (
        "# hapmoe table 1\n# kind: compute\n# device: cpu\n# software: {torch: 2.13.0}\n# runs:\n"
        f"# - {{id: {RUN.id}, date: '2026-11-30T10:48:00Z', command: hapmoe profile compute}}\n"
    )
    assert checksum and body.splitlines()[1:] == [
        "run,op,direction,precision,m,n,k,v,groups,median_s,p10_s,p90_s,samples",
        f"{RUN.id},gemm,forward,bf16,8,8,8,0,1,0.001,0.001,0.002,5",
        f"{RUN.id},gemm,forward,bf16,16,8,8,0,1,0.001,0.001,0.002,5",
    ]


@pytest.mark.parametrize("cut", range(0, 100, 7))
def test_a_file_cut_short_is_no_table(cut: int, tmp_path: Path) -> None:
    (path,) = tables.save(tmp_path, table_of(gemm(8), gemm(16)))
    text = path.read_text()
    path.write_text(text[: len(text) * cut // 100])
    with pytest.raises(InputError, match=path.name):
        tables.load(tmp_path)


def test_figures_that_cannot_be_are_refused() -> None:
    for bad in (-1e-3, 0.0, float("nan"), float("inf")):
        with pytest.raises(InputError, match="median_s"):
            tables.decode(tables.encode(table_of(gemm(8, median_s=bad))))
    with pytest.raises(ValueError, match="not a row of this table"):
        tables.encode(table_of(gemm(8, run=Run(date="another"))))


def test_the_newer_run_counts_and_the_older_is_kept(tmp_path: Path) -> None:
    later = Run(date="2026-12-01T00:00:00Z")
    tables.save(tmp_path, table_of(gemm(8, later, 3e-3), run=later))
    tables.save(tmp_path, table_of(gemm(8), gemm(16)))
    (table,) = tables.load(tmp_path)
    assert len(table.rows) == 3
    assert {row.m: row.median_s for row in tables.newest(table) if isinstance(row, Compute)} == {8: 3e-3, 16: 1e-3}
    wanted = table_of(gemm(8), gemm(24))
    assert [row.key for row in tables.missing([table], wanted)] == [gemm(24).key]
    assert tables.missing([table], msgspec.structs.replace(wanted, device="another")) == wanted.rows


WRITER = """
import sys
from hapmoe import tables
from tests.test_tables import gemm, table_of
folder, first, many = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
print("ready", flush=True)
for m in range(first, first + many):
    tables.save(folder, table_of(gemm(m)))
"""


def writer(folder: Path, first: int, many: int) -> subprocess.Popen[str]:
    root = Path(__file__).parents[1]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(root / "src"), str(root), str(root / "tests")])}
    command = [sys.executable, "-c", WRITER, str(folder), str(first), str(many)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)


def test_two_writers_at_once_lose_nothing(tmp_path: Path) -> None:
    both = [writer(tmp_path, first, 25) for first in (100, 200)]
    seen = 0
    while any(process.poll() is None for process in both):
        now = [len(table.rows) for table in tables.load(tmp_path)]  # whole at any moment, and never less
        assert sum(now) >= seen
        seen = sum(now)
        time.sleep(0.01)
    assert [process.communicate()[0] for process in both] == ["ready\n"] * 2
    assert [process.returncode for process in both] == [0, 0]
    (table,) = tables.load(tmp_path)
    assert sorted(row.m for row in table.rows if isinstance(row, Compute)) == [*range(100, 125), *range(200, 225)]


def test_a_killed_writer_leaves_whole_tables_and_no_lock(tmp_path: Path) -> None:
    process = writer(tmp_path, 0, 10**6)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    while not list(tmp_path.glob("*.csv")):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    (before,) = tables.load(tmp_path)
    (tmp_path / ".compute-cpu.csv.x1.part").write_text("# hapmoe table 1\n# kind")  # what a kill may leave
    tables.save(tmp_path, table_of(gemm(10**7)), wait_s=1.0)
    (after,) = tables.load(tmp_path)
    assert set(after.rows) == {*before.rows, gemm(10**7)}
    assert not list(tmp_path.glob(".*.part"))


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path,) = tables.save(tmp_path, table_of(gemm(8)))
    text = path.read_text()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InputError, match="No space left on device"):
        tables.save(tmp_path, table_of(gemm(16)))
    assert path.read_text() == text and [entry.name for entry in tmp_path.glob(".*")] == [".lock"]


def test_a_folder_that_is_held_is_said(tmp_path: Path) -> None:
    import fcntl

    tables.save(tmp_path, table_of(gemm(8)))
    with (tmp_path / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(InputError, match="another process is writing"):
            tables.save(tmp_path, table_of(gemm(16)), wait_s=0.05)


# ---------------------------------------------------------------------------------- the command line


def hapmoe(*words: str | Path) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parents[1]
    env = os.environ | {"PYTHONPATH": str(root / "src"), "COLUMNS": "120"}
    command = [sys.executable, "-m", "hapmoe", *map(str, words)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)


def test_tables_on_the_command_line(tmp_path: Path) -> None:
    from hapmoe.__main__ import cli

    def run(*words: str | Path) -> int:
        with cli.make_context("hapmoe", [str(word) for word in words]) as context:
            return int(cli.invoke(context))

    a, b, both = tmp_path / "a", tmp_path / "b", tmp_path / "both"
    tables.save(a, table_of(gemm(8)))
    tables.save(b, table_of(gemm(16)))
    assert run("tables", "merge", a, b, "--out", both) == 0
    assert run("tables", "export", both, "--out", tmp_path / "rows.json") == 0
    rows = msgspec.json.decode((tmp_path / "rows.json").read_bytes())
    assert [(row["m"], row["device"], row["date"]) for row in rows] == [(8, "cpu", RUN.date), (16, "cpu", RUN.date)]
    assert run("tables", "lend", both, "--from", "cpu", "--to", "t4-16g", "--reason", "a test") == 0
    assert tables.load(both)[0].borrowed[0].device == "t4-16g"
    assert run("tables", "verify", both) == 0
    (path,) = both.glob("*.csv")
    path.write_text(path.read_text().replace("0.002", "0.003"))
    assert run("tables", "verify", both) == 1


def test_routing_is_not_lent(tmp_path: Path) -> None:
    tables.save(tmp_path, Table(kind="routing", device="", runs=(RUN,), rows=()))
    ended = hapmoe("tables", "lend", tmp_path, "--from", "a100", "--to", "t4-16g", "--reason", "a test")
    assert ended.returncode == 2
    assert "routing is of no device" in ended.stderr


def test_a_prediction_from_tables_says_so(tmp_path: Path) -> None:
    root = Path(__file__).parents[1]
    size = {
        "ranks": 8,
        "ranks_per_node": 8,
        "link": "node",
        "median_s": 1e-2,
        "p10_s": 1e-2,
        "p90_s": 1e-2,
        "samples": 9,
    }
    rows = tuple(Collective(run=RUN.id, collective=name, bytes=10**8, **size) for name in ("all_gather", "all_to_all"))
    tables.save(tmp_path, Table(kind="collectives", device="NVIDIA H100 80GB HBM3", runs=(RUN,), rows=rows))
    words = [
        "predict",
        root / "examples" / "mixtral-8x7b.sh",
        "--cluster",
        root / "examples" / "clusters" / "h100.yaml",
    ]
    done = hapmoe(*words, "--json", "--tables", tmp_path)
    share = msgspec.json.decode(done.stdout)["estimate"]["source_share"]
    assert share["extrapolated"] > 0.01 and abs(sum(share.values()) - 1) < 1e-9
    refused = hapmoe(*words, "--tables", tmp_path / "none")
    assert refused.returncode == 2 and "no such folder of tables" in refused.stderr
