"""Profiling a script: which runs, what they are given, and what stays when one of them goes wrong."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from bench.lab import Case, free_port, prepare, write_tree

import hapmoe
from hapmoe import tables
from hapmoe.cli import cli
from hapmoe.cluster import Cluster
from hapmoe.errors import InputError, Unsupported
from hapmoe.job import Argument, JobSpec
from hapmoe.measured import Collective, Piece
from hapmoe.plan import Recompute
from hapmoe.profiling.collect import collect, routing_rows
from hapmoe.profiling.folder import PoolProfile, load_profile, pool_files, same_subject, state, write_profile
from hapmoe.profiling.probed import load_rank
from hapmoe.profiling.runs import Chosen, ProfileRun, alone, choose_runs, plan_of
from hapmoe.profiling.sends import between, between_files, collected, inside
from hapmoe.profiling.shorten import Layers, depths, shortened
from hapmoe.rules import check
from hapmoe.volumes import step_traffic

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def mixtral() -> tuple[JobSpec, Cluster]:
    return hapmoe.extract(ROOT / "examples" / "mixtral-s.sh"), hapmoe.load_cluster(
        ROOT / "examples" / "clusters" / "16-2.yaml"
    )


def words(job: JobSpec) -> list[str | None]:
    return [argument.text for argument in job.argv]


def test_depths_tell_every_kind_of_layer_apart(mixtral: tuple[JobSpec, Cluster]) -> None:
    """As many runs as unknowns: embedding and head together, one per kind of layer."""
    job, _ = mixtral
    assert depths(job) == (Layers(moe=1), Layers(moe=3))
    deepseek = hapmoe.extract(ROOT / "examples" / "deepseek-v3.sh")
    assert any(deepseek.model.moe_pattern) and not all(deepseek.model.moe_pattern) and deepseek.model.mtp_layers
    found = depths(deepseek)
    assert found == (
        Layers(dense=1, moe=1), Layers(dense=3, moe=1), Layers(dense=1, moe=3), Layers(dense=1, moe=1, mtp=1)
    )  # fmt: skip
    dense = hapmoe.extract(ROOT / "examples" / "llama2-13b.sh")
    assert depths(dense) == (Layers(dense=1), Layers(dense=3))


def test_a_shortened_script_keeps_its_layers_and_saves_nothing() -> None:
    job = hapmoe.extract(ROOT / "examples" / "deepseek-v3.sh")
    more = ("--save", "/ckpt", "--load", "/ckpt", "--rampup-batch-size", "16", "16", "300", "--train-iters", "3")
    kept = tuple(argument for argument in job.argv)
    job = msgspec.structs.replace(job, argv=(*kept, *(Argument(text=word) for word in more)))
    short = shortened(job, Layers(dense=1, moe=3), 8, 6)
    given = words(short)
    assert not {"--save", "--load", "--rampup-batch-size", "/ckpt", "300"} & set(given)
    for flag, value in (
        ("--num-layers", "4"),
        ("--moe-layer-freq", "[0,1,1,1]"),
        ("--global-batch-size", "8"),
        ("--train-iters", "6"),
    ):
        assert given.count(flag) == 1 and given[given.index(flag) + 1] == value
    assert "--mtp-num-layers" not in given and short.model.mtp_layers == 0
    assert short.model.moe_pattern == (False, True, True, True)
    for flag in ("--hidden-size", "--moe-router-topk", "--q-lora-rank", "--bf16"):
        assert flag in given


def test_a_model_that_lists_its_layers_is_refused(mixtral: tuple[JobSpec, Cluster]) -> None:
    job, _ = mixtral
    more = (Argument(text="--hybrid-override-pattern"), Argument(text="M*M*"))
    with pytest.raises(Unsupported, match="--hybrid-override-pattern"):
        shortened(msgspec.structs.replace(job, argv=(*job.argv, *more)), Layers(moe=1), 4, 6)


def test_runs_are_legal_fit_one_node_and_the_time(mixtral: tuple[JobSpec, Cluster]) -> None:
    job, cluster = mixtral
    for pool in cluster.pools:
        chosen = choose_runs(job, cluster, pool, budget_s=900)
        assert len({run.name for run in chosen.runs}) == len(chosen.runs) >= 4
        assert sum(run.expected_s for run in chosen.runs) <= 900
        for run in chosen.runs:
            assert run.processes <= pool.devices_per_node and run.ranks % (run.ep * run.etp) == 0
            short, plan = plan_of(job, cluster, pool, run)
            assert plan.stages[0].recompute == Recompute() and plan.num_microbatches == 4
            assert not check(short, alone(cluster, pool, run.ranks), plan)
        fewer = choose_runs(job, cluster, pool, budget_s=150)
        assert fewer.runs == chosen.runs[: len(fewer.runs)] and fewer.left_out["no time left"] > 0


def test_nothing_that_can_be_measured_is_said(mixtral: tuple[JobSpec, Cluster]) -> None:
    """16 experts a rank need more than 80 GiB with their optimizer: Mixtral-S on one device of a node of one."""
    job, cluster = mixtral
    one = msgspec.structs.replace(cluster.pools[0], devices_per_node=1, nodes=1)
    of_one = msgspec.structs.replace(cluster, pools=(one,), links=())
    for since in ({"megatron_version": "0.15.3"}, {"dispatcher": "flex"}):
        older = msgspec.structs.replace(job, training=msgspec.structs.replace(job.training, **since))
        with pytest.raises(InputError, match="nothing can be measured on one node: more than the 1 devices"):
            choose_runs(older, of_one, one, budget_s=900)
    # a newer Megatron runs one rank of eight by itself
    newer = choose_runs(job, of_one, one, budget_s=900)
    assert {(run.ep, run.single, run.processes) for run in newer.runs} >= {(8, True, 1)}


STAND_IN = """#!/bin/bash
# torchrun: does what stand/<run> says, else writes the lines of every rank
run=$(basename "$HAPMOE_PROBE" .part); run=${run#.}; run=${run%.*}
here=$(dirname "$0")
echo "$run $PYTHONPATH $OMP_NUM_THREADS" >>"$here/started"
case $(cat "$here/stand/$run" 2>/dev/null) in
    fail) echo "[rank0]: RuntimeError: CUDA out of memory" >&2; exit 1 ;;
    hang) echo "$$" >"$here/pid"; exec sleep 60 ;;
    full) echo "hapmoe probe: rank 0: [Errno 28] No space left on device; measures nothing more" >&2; exit 0 ;;
    dead) for ((r = 0; r < 1; r++)); do cp "$here/rank.jsonl" "$HAPMOE_PROBE/rank$r.jsonl"; done; exit 0 ;;
esac
while [ $# -gt 0 ]; do [ "$1" = --nproc-per-node ] && ranks=$2; shift; done
for ((r = 0; r < ranks; r++)); do
    sed -e "s/\\"rank\\": 0/\\"rank\\": $r/" -e "s/\\"world_size\\": 1/\\"world_size\\": $ranks/" \\
        "$here/rank.jsonl" >"$HAPMOE_PROBE/rank$r.jsonl"
done
"""


def lines(*, forward_s: float = 0.01) -> str:
    """One rank's file of three steps: 4 microbatches, an all-reduce over tp that takes 2 ms each time."""
    start = {"event": "start", "schema": 1, "rank": 0, "world_size": 1, "date": "2026-11-30T11:00:00Z", "host": "a"}
    start |= {"device": "NVIDIA H100 80GB HBM3", "clock": "device", "versions": {"torch": "2.13.0", "python": "3.11"}}
    start |= {"degrees": {"tp": 1, "cp": 1, "pp": 1, "dp": 1, "ep": 1, "etp": 1, "edp": 1, "vpp": 1, "stage": 0}}
    rows: list[dict[str, Any]] = [start]
    for step in (1, 2, 3):
        times = [{"wall_s": 9.0 if step == 1 else forward_s}] * 4
        sent = {"phase": "forward", "collective": "all_reduce", "axis": "tp", "ranks": 2, "call_bytes": 1024}
        sent |= {"calls": 8, "timed_calls": 8, "wall_s": 0.016}
        memory = {"mark": "step", "allocated_bytes": 7, "peak_bytes": 9, "reserved_bytes": 11}
        row = {"event": "step", "step": step, "wall_s": 0.2, "since_last_s": None, "forward": times, "backward": times}
        row |= {"optimizer": [{"wall_s": 0.03}], "collectives": [sent], "memory": [memory]}
        rows.append(row | {"tokens": [{"layer": 0, "microbatches": [[3, 1], [2, 2]]}]})
    return "\n".join(map(json.dumps, [*rows, {"event": "end", "steps": 3}])) + "\n"


@pytest.fixture
def folder(tmp_path: Path) -> tuple[JobSpec, Cluster, Path]:
    """A profile of three runs of one and two ranks, and a torchrun that trains nothing."""
    job, cluster, _ = prepare(Case("profile", (4,), dp=2, ep=2), tmp_path)
    pool = cluster.pools[0]
    runs = tuple(
        ProfileRun(
            name=f"ep{ep}-{name}",
            tp=1, cp=1, ep=ep, etp=1, dp=ep, micro_batch_size=1, layers=Layers(moe=count), expected_s=30.0,
        )
        for ep, name, count in ((1, "m1", 1), (2, "m1", 1), (2, "m3", 3))
    )  # fmt: skip
    profile, files = pool_files(job, cluster, pool, Chosen(runs=runs), timeout_s=60)
    write_profile(tmp_path / "out", files)
    assert load_profile(tmp_path / "out") == profile and same_subject(profile, job, pool)
    write_tree(tmp_path, {"torchrun": STAND_IN, "rank.jsonl": lines()})
    (tmp_path / "torchrun").chmod(0o755)
    (tmp_path / "stand").mkdir()
    return job, cluster, tmp_path


def start(root: Path, **options: Any) -> subprocess.Popen[str]:
    env = {**os.environ, "HAPMOE_TORCHRUN": str(root / "torchrun"), "HAPMOE_WORKDIR": str(root), **options}
    command = ["bash", str(root / "out" / "profile.sh")]
    return subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True, start_new_session=True)


def states(root: Path) -> dict[str, str]:
    profile = load_profile(root / "out")
    assert profile is not None
    return {run.name: state(root / "out", run) for run in profile.runs}


def started(root: Path) -> list[str]:
    return [line.split()[0] for line in (root / "started").read_text().splitlines()]


def test_all_runs_with_progress_and_the_probe_in_front(folder: tuple[JobSpec, Cluster, Path]) -> None:
    _, _, root = folder
    process = start(root, PYTHONPATH="/of/the/user")
    _, said = process.communicate(timeout=60)
    assert process.returncode == 0 and "2 of 3: ep2-m1 on 2 ranks; about" in said and "3 of 3 complete" in said
    assert set(states(root).values()) == {"done"}
    path = (root / "started").read_text().splitlines()[0].split()[1]
    assert path == f"{root / 'out' / 'probe'}:/of/the/user"
    start(root).communicate(timeout=60)
    assert len(started(root)) == 3  # nothing is measured twice


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("fail", "exit code 1: [rank0]: RuntimeError: CUDA out of memory"),
        ("hang", "took longer than 2 s: a rank hangs, or HAPMOE_TIMEOUT is too small"),
        ("full", "hapmoe probe: rank 0: [Errno 28] No space left on device; measures nothing more"),
        ("dead", "no rank wrote what it measured"),
    ],
)
def test_a_run_that_fails_loses_only_itself(folder: tuple[JobSpec, Cluster, Path], how: str, why: str) -> None:
    _, _, root = folder
    (root / "stand" / "ep2-m1").write_text(how)
    process = start(root, **({"HAPMOE_TIMEOUT": "2"} if how == "hang" else {}))
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1 and f"ep2-m1 failed: {why} (results/ep2-m1.log)" in said
    assert states(root) == {"ep1-m1": "done", "ep2-m1": "failed", "ep2-m3": "done"}
    left = {path.name for path in (root / "out" / "results").iterdir()} - {".lock"}
    assert left == {"ep1-m1", "ep1-m1.log", "ep2-m1.log", "ep2-m1.failed", "ep2-m3", "ep2-m3.log"}
    (root / "stand" / "ep2-m1").unlink()
    start(root).communicate(timeout=60)
    assert set(states(root).values()) == {"done"} and started(root)[3:] == ["ep2-m1"]


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_killed_profile_resumes(folder: tuple[JobSpec, Cluster, Path], sent: signal.Signals) -> None:
    _, _, root = folder
    (root / "stand" / "ep2-m1").write_text("hang")
    process = start(root, HAPMOE_TIMEOUT="50")
    deadline = time.monotonic() + 60
    while not (root / "pid").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(sent)
    _, said = process.communicate(timeout=60)
    assert process.returncode == (-9 if sent == signal.SIGKILL else 130)
    assert states(root) == {"ep1-m1": "done", "ep2-m1": "to do", "ep2-m3": "to do"}
    if sent != signal.SIGKILL:
        assert "interrupted; what is complete stays" in said
        with pytest.raises(ProcessLookupError):
            os.kill(int((root / "pid").read_text()), 0)
    else:
        os.kill(int((root / "pid").read_text()), signal.SIGTERM)
    (root / "stand" / "ep2-m1").unlink()
    start(root).communicate(timeout=60)
    assert set(states(root).values()) == {"done"} and started(root)[2:] == ["ep2-m1", "ep2-m3"]


def test_one_profile_at_a_time(folder: tuple[JobSpec, Cluster, Path]) -> None:
    _, _, root = folder
    (root / "stand" / "ep1-m1").write_text("hang")
    process = start(root, HAPMOE_TIMEOUT="50")
    while not (root / "pid").exists():
        time.sleep(0.05)
    _, said = (other := start(root)).communicate(timeout=60)
    assert other.returncode == 2 and "another profile.sh is at work" in said
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)


def test_results_become_tables(folder: tuple[JobSpec, Cluster, Path]) -> None:
    """Medians by hand: the first step is left out; 8 calls of 2 ms in 4 microbatches are 4 ms of each."""
    job, cluster, root = folder
    start(root).communicate(timeout=60)
    profile = load_profile(root / "out")
    assert isinstance(profile, PoolProfile)
    tables = collect(job, cluster, cluster.pools[0], root / "out", profile)
    assert tables == collect(job, cluster, cluster.pools[0], root / "out", profile)
    assert [table.kind for table in tables] == ["pieces", "collectives", "memory"]
    assert all(table.device == "NVIDIA H100 80GB HBM3" and table.device_kind == "cpu" for table in tables)
    assert tables[0].software == {"torch": "2.13.0"}
    pieces = [row for row in tables[0].rows if isinstance(row, Piece)]
    forward = {(row.ep, row.moe_layers): row for row in pieces if row.phase == "forward"}
    assert set(forward) == {(1, 1), (2, 1), (2, 3)}
    one = forward[2, 3]
    assert (one.median_s, one.comm_s, one.samples) == (0.01, 0.004, 2 * 2 * 4)
    assert (one.embedding, one.head, one.dp, one.clock) == (1, 1, 2, "device")
    optimizer = next(row for row in pieces if row.phase == "optimizer" and row.moe_layers == 3)
    # 3 layers of 2 of 4 experts a rank: 3 * 96 * 64 * 2 each; 512 rows of 64 twice; attention 4 * 64 * 64,
    # two norms, the router of 4 * 64; the last norm
    assert optimizer.expert_params == 3 * 2 * 3 * 96 * 64
    assert optimizer.params - optimizer.expert_params == 2 * 512 * 64 + 3 * (4 * 64 * 64 + 2 * 64 + 4 * 64) + 64


def test_a_disk_that_is_full_is_said_and_nothing_is_half_written(
    folder: tuple[JobSpec, Cluster, Path], tmp_path: Path
) -> None:
    """The system's own limit on the size of files; then without it the same command goes on."""
    _, _, root = folder
    start(root).communicate(timeout=60)
    (root / "profiles").mkdir()
    (root / "out").rename(root / "profiles" / "cpu")
    words = [
        "profile",
        str(root / "train.sh"),
        "--cluster",
        str(root / "cluster.yaml"),
        "--tables",
        str(root / "tables"),
    ]
    hapmoe_command = f"{shlex.quote(sys.executable)} -m hapmoe {shlex.join(words)}"
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}

    def run(limit: str, out: str) -> subprocess.CompletedProcess[str]:
        command = f"ulimit -f {limit}; {hapmoe_command} --out {shlex.quote(str(root / out))}"
        return subprocess.run(["bash", "-c", command], env=env, capture_output=True, text=True, check=False)

    for out, what in (("new", "new/cpu: cannot write"), ("profiles", "tables")):
        done = run("1", out)
        assert done.returncode == 2 and "Traceback" not in done.stderr
        assert len(done.stderr.splitlines()) == 1 and what in done.stderr and "File too large" in done.stderr
        assert not list(root.glob("new/cpu")) and not list(root.glob("tables/*.part"))
    assert {table.kind for table in tables.load(root / "tables")} <= {"collectives", "memory"}  # small, and whole
    assert run("unlimited", "profiles").returncode == 0
    assert {path.name.split("-")[0] for path in root.glob("tables/*.csv")} == {"pieces", "collectives", "memory"}


def test_tokens_of_ranks_that_share_experts_add_up(tmp_path: Path) -> None:
    ranks = []
    for number in range(4):
        text = lines().replace('"rank": 0', f'"rank": {number}').replace('"world_size": 1', '"world_size": 4')
        (tmp_path / f"rank{number}.jsonl").write_text(text.replace('"ep": 1', '"ep": 2'))
        ranks.append(load_rank(tmp_path / f"rank{number}.jsonl"))
    rows = routing_rows(ranks, "run")
    assert {(row.layer, row.step, row.microbatch, row.replica) for row in rows} == {
        (0, step, microbatch, replica) for step in (1, 2, 3) for microbatch in (0, 1) for replica in (0, 1)
    }
    assert {row.tokens for row in rows} == {(6, 2), (4, 4)}


def test_a_folder_of_something_else_is_refused(folder: tuple[JobSpec, Cluster, Path]) -> None:
    job, cluster, root = folder
    _, files = pool_files(job, cluster, cluster.pools[0], Chosen(runs=load_runs(root)), timeout_s=2)
    with pytest.raises(InputError, match="exists already"):
        write_profile(root / "out", files)
    (root / "out" / "profile.json").write_text("{}")
    with pytest.raises(InputError, match=r"profile\.json: not a profile of this version"):
        load_profile(root / "out")


def load_runs(root: Path) -> tuple[ProfileRun, ...]:
    profile = load_profile(root / "out")
    assert profile is not None
    return profile.runs


def test_scripts_are_clean(folder: tuple[JobSpec, Cluster, Path]) -> None:
    _, _, root = folder
    scripts = [root / "out" / name for name in ("profile.sh", "profile.sbatch", "with_probe.sh")]
    beside = Path(sys.executable).with_name("shellcheck")
    shellcheck = beside if beside.exists() else "shellcheck"
    found = subprocess.run([shellcheck, *scripts], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout


def test_command_shows_the_runs_and_writes_a_folder_per_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    script = [str(ROOT / "examples" / "mixtral-s.sh"), "--cluster", str(ROOT / "examples" / "clusters" / "16-2.yaml")]
    assert cli.main(["profile", *script, "--dry-run"], standalone_mode=False) == 0
    assert "runs on one node, about" in capsys.readouterr().out and not list(tmp_path.iterdir())
    assert cli.main(["profile", *script, "--time-limit", "200"], standalone_mode=False) == 0
    said = capsys.readouterr().out
    names = {path.name for path in (tmp_path / "hapmoe-profile").iterdir()}
    pools = names - {"_between"}
    assert len(pools) == 2 and all(f"hapmoe-profile/{name}/profile.sh" in said for name in pools)
    joined = {path.name for path in (tmp_path / "hapmoe-profile" / "_between").iterdir()}
    assert joined == {"--".join(sorted(pools))}  # a pool of several nodes has a folder of its own too
    assert all(f"hapmoe-profile/_between/{name}/measure.sh" in said for name in joined)
    assert cli.main(["profile", *script, "--json"], standalone_mode=False) == 0  # takes up what is there
    document = json.loads(capsys.readouterr().out)
    assert {one.get("between") for one in document[2:]} == joined
    document = document[:2]
    assert [one["pool"] for one in document] == sorted(pools, key=[one["pool"] for one in document].index)
    assert all(run["state"] == "to do" for one in document for run in one["runs"])
    with pytest.raises(InputError, match="another job or device"):
        cli.main(["profile", str(ROOT / "examples" / "llama2-13b.sh"), *script[1:]], standalone_mode=False)


def test_collectives_inside_a_node_and_between_pools(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the files that are handed out, which need torch and nothing of hapmoe; predictions use what comes back."""
    case = Case("sends", (2, 2), pools=("a", "b"), dp=2)
    job, cluster, _ = prepare(case, tmp_path)
    out = tmp_path / "out"
    found = {name: (pool, sends) for name, pool, sends in between(cluster)}
    assert set(found) == {"a--b"} and found["a--b"][1].backend == "gloo"
    pool, sends = found["a--b"]
    smaller = msgspec.structs.replace(sends, most_bytes=2**14)
    write_profile(out / "a--b", between_files("a--b", pool, smaller, timeout_s=200))
    node = inside(pool)
    assert node is not None and node.ranks == 2
    runs = choose_runs(job, cluster, pool, budget_s=1).runs[:1]
    chosen = Chosen(runs=runs, sends=msgspec.structs.replace(node, most_bytes=2**14))
    profile, files = pool_files(job, cluster, pool, chosen, timeout_s=200)
    write_profile(out / "a", files)
    (out / "a" / "results" / profile.runs[0].name).mkdir(parents=True)  # as if the training had been measured
    for rank in profile.runs[0].started:
        (out / "a" / "results" / profile.runs[0].name / f"rank{rank}.jsonl").write_text(lines())
    beside = Path(sys.executable).with_name("shellcheck")
    scripts = [str(out / "a" / "profile.sh"), str(out / "a--b" / "measure.sh")]
    linted = subprocess.run([beside if beside.exists() else "shellcheck", *scripts], capture_output=True, text=True)
    assert linted.returncode == 0, linted.stdout
    env = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "PYTHONPATH")}
    env |= {"HAPMOE_TORCHRUN": str(Path(sys.executable).parent / "torchrun"), "HAPMOE_WORKDIR": str(tmp_path)}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "PYTHONSAFEPATH": "1"}
    nodes = [subprocess.Popen(["bash", scripts[1]], env=env | {"NODE_RANK": str(rank)}) for rank in range(2)]
    assert [one.wait(timeout=240) for one in nodes] == [0, 0]
    assert subprocess.run(["bash", scripts[0]], env=env, timeout=240).returncode == 0
    assert {path.name for path in (out / "a--b" / "results").iterdir()} == {"collectives"}
    own, across = collected(out / "a", pool, "here"), collected(out / "a--b", pool, "here")
    assert own is not None and across is not None
    rows = [row for table in (own, across) for row in table.rows if isinstance(row, Collective)]
    names = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")
    wanted = {(name, "node", size) for name in names for size in (4096, 16384)}
    assert {(row.collective, row.link, row.bytes) for row in rows} == wanted | {
        ("send_recv", "a--b", size) for size in (4096, 16384)
    }
    attached = tables.attach(cluster, (own, across))
    link = attached.link("a", "b")
    assert link is not None and link.tables is not None and attached.pools[0].tables is not None
    broken = out / "a--b" / "results" / "collectives" / "rank0.jsonl"
    broken.write_text(broken.read_text().partition("\n")[0])
    with pytest.raises(InputError, match="not what a profile writes"):
        collected(out / "a--b", pool, "here")


def test_one_rank_of_many_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real Megatron-Core on a node of one device: rank 0 of four that share experts, and each kind of stage.

    What a stage alone sends is what the model has for it, which test_volumes.py and test_probe.py hold against whole
    runs.
    """
    job, cluster, _ = prepare(Case("single", (4,)), tmp_path)
    pool = cluster.pools[0]
    assert pool.devices_per_node == 1
    apart = msgspec.structs.replace(job, present=msgspec.structs.replace(job.present, ep=4))
    chosen = choose_runs(apart, cluster, pool, budget_s=90)
    assert [(run.name, run.ranks, list(run.started)) for run in chosen.runs[:5]] == [
        ("ep4-mbs1-m1-single", 4, [0]), ("ep4-mbs1-m3-single", 4, [0]), ("ep4-mbs1-m1-first", 12, [0]),
        ("ep4-mbs1-m1-middle", 12, [4]), ("ep4-mbs1-m1-last", 12, [8]),
    ]  # fmt: skip
    assert all(run.pp == 1 for run in choose_runs(apart, cluster, pool, budget_s=50).runs)
    kept = (chosen.runs[0], *chosen.runs[2:5])
    profile, files = pool_files(job, cluster, pool, Chosen(runs=kept), timeout_s=300)
    write_profile(tmp_path / "out", files)
    monkeypatch.setenv("HAPMOE_LAB", "1")
    source = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]).strip(os.pathsep)
    options = {"PYTHONPATH": source, "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    torchrun = str(Path(sys.executable).parent / "torchrun")
    process = start(tmp_path, HAPMOE_TORCHRUN=torchrun, HAPMOE_LAB_OUT=str(tmp_path / "lab"), **options)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 0, said
    tables = {table.kind: table.rows for table in collect(job, cluster, pool, tmp_path / "out", profile)}
    assert set(tables) == {"pieces"}  # nothing was sent, and a process on a CPU has no memory of its own
    pieces = [row for row in tables["pieces"] if isinstance(row, Piece)]
    assert {(row.ep, row.dp, row.moe_layers) for row in pieces} == {(4, 4, 1)}
    passes = sorted((row.phase, row.embedding, row.head) for row in pieces if row.phase != "optimizer")
    ends = [(0, 0), (0, 1), (1, 0), (1, 1)]  # middle, last, first, whole
    assert passes == [(phase, *one) for phase in ("backward", "forward") for one in ends]
    # Megatron has built what the plan of many ranks has on these
    lines_of_ranks = [line for path in (tmp_path / "lab").glob("rank*.jsonl") for line in path.read_text().splitlines()]
    built = [row["parameters"] for row in map(json.loads, lines_of_ranks) if row["event"] == "start"]
    held = [(row.params, row.expert_params) for row in pieces if row.phase == "optimizer"]
    assert sorted(held) == sorted((one["dense"] + one["expert"], one["expert"]) for one in built)
    assert len(set(held)) == 4
    for run in kept:
        rank = load_rank(tmp_path / "out" / "results" / run.name / f"rank{run.started[0]}.jsonl")
        assert (rank.start.world_size, rank.start.degrees["stage"]) == (run.ranks, run.stage)
        assert [len(step.forward) for step in rank.steps] == [len(step.backward) for step in rank.steps] == [4] * 5
        sent: Counter[tuple[str, str, str]] = Counter()
        for row in rank.steps[1].collectives:
            sent[row.axis, row.collective, "calls"] += row.calls
            sent[row.axis, row.collective, "bytes"] += row.calls * row.call_bytes
        planned: Counter[tuple[str, str, str]] = Counter()
        for one in step_traffic(*plan_of(apart, cluster, pool, run))[run.stage]:
            planned[one.axis, one.collective, "calls"] += int(one.calls)
            planned[one.axis, one.collective, "bytes"] += int(one.bytes)
        del sent["ep", "all_to_all", "bytes"], planned["ep", "all_to_all", "bytes"]  # it routes by chance
        assert sent == planned
        assert (("pp", "p2p", "bytes") in sent) == (run.pp > 1)
