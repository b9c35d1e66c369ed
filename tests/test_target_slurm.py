"""The Slurm target under a real Slurm with two kinds of nodes; training and devices are stand-ins."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import builders as b
import msgspec
import pytest
from dryrun import TRAINER, Sandbox
from slurm_cluster import Slurm

from hapmoe.discovery import discover
from hapmoe.launch import target
from hapmoe.launch.options import JobOptions, KindOptions, LaunchOptions
from hapmoe.launch.write import write_files
from hapmoe.plan import Recompute
from hapmoe.resolve import resolve

CLUSTER = b.cluster(b.pool("a100", nodes=1, devices_per_node=2), b.pool("h800", nodes=2, devices_per_node=1))
FULL = Recompute(granularity="full", method="uniform", num_layers=1)
PLAN = b.plan((2, 6), pools=("a100", "h800"), dp=2, ep=2, recompute=(FULL, Recompute()))
JOB = b.job(argv="--bf16 --save $(date)")
OPTIONS = LaunchOptions(
    job=JobOptions(name="a job", time="00:05:00"),
    kinds={
        name: KindOptions(partition=name, constraint=name, gres="none", env={"KIND": name, "CUDA_VISIBLE_DEVICES": "0"})
        for name in ("a100", "h800")
    },
)
RANKS = {0: "z0", 1: "z0", 2: "b1", 3: "b2"}


@dataclass
class Place:
    slurm: Slurm
    sandbox: Sandbox
    work: Path
    plan: Path

    def run(self, script: str, **variables: str) -> tuple[str, int, str, dict[int, dict[str, object]]]:
        for old in (self.work / "seen").iterdir():
            old.unlink()
        with socket.socket() as probe:  # the jobs of several clusters on one machine would meet at one port
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        env = {
            "MASTER_PORT": port,
            "PATH": f"{self.sandbox.root / 'bin'}:{self.slurm.env['PATH']}",
            "PYTHONPATH": str(self.sandbox.root / "lib"),
            "HAPMOE_SKIP_DEVICE_CHECK": "1",
            "HAPMOE_MASTER_ADDR": "127.0.0.1",  # all nodes are this machine, and their names are Slurm's alone
            **variables,
        }
        state, code, said = self.slurm.run(self.work, self.plan / script, **env)
        rows = [json.loads(path.read_text()) for path in (self.work / "seen").iterdir()]
        return state, code, said, {row["rank"]: row for row in rows}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    root = tmp_path_factory.mktemp("slurm")
    for name in ("daemons", "stand-ins", "work"):
        (root / name).mkdir()
    (root / "work" / "seen").mkdir()
    (root / "work" / "pretrain_gpt.py").write_text(TRAINER)
    plan = resolve(JOB, CLUSTER, PLAN)
    files = target("slurm")(JOB, CLUSTER, plan, msgspec.json.encode(plan).decode(), OPTIONS)
    folder = write_files(root / "work" / "the plan", files)
    with Slurm(root / "daemons") as slurm:
        yield Place(slurm, Sandbox(root / "stand-ins"), root / "work", folder)


@pytest.mark.parametrize("script", ["launch.sbatch", "launch-one.sbatch"])
def test_ranks_stand_on_their_kind(place: Place, script: str) -> None:
    """As a heterogeneous job, and in one partition whose nodes sort the other way round."""
    state, code, said, ranks = place.run(script)
    assert (state, code) == ("COMPLETED", 0), said
    assert {rank: row["env"]["SLURMD_NODENAME"] for rank, row in sorted(ranks.items())} == RANKS  # type: ignore[index]
    values = set()
    for rank, row in ranks.items():
        argv, env = row["argv"], row["env"]
        assert isinstance(argv, list) and isinstance(env, dict)
        assert ("--recompute-method" in argv) == (rank < 2)
        assert env["KIND"] == ("a100" if rank < 2 else "h800") and env["NODE_RANK"] == str(max(rank - 1, 0))
        values.add((argv[argv.index("--save") + 1], env["MASTER_PORT"]))
    assert len(values) == 1
    assert "2  slurm-h800-1" in said  # the page of check_hosts


def test_a_failing_node_ends_the_job(place: Place) -> None:
    (place.work / "pretrain_gpt.py").write_text(
        "import os, sys, time\nsys.exit(7) if os.environ['RANK'] == '3' else time.sleep(120)\n"
    )
    try:
        state, code, said, _ = place.run("launch.sbatch")
    finally:
        (place.work / "pretrain_gpt.py").write_text(TRAINER)
    # srun's code is the highest of its tasks, and it stops the others itself.
    assert state == "FAILED" and code in (7, 143) and "task 1: Exited with exit code 7" in said


def test_a_folder_that_is_not_there(place: Place) -> None:
    state, code, said, _ = place.run("launch.sbatch", HAPMOE_PLAN=os.devnull)
    assert (state, code) == ("FAILED", 2)
    assert "no run_node.sh in /dev/null: set HAPMOE_PLAN to the folder of launch.sbatch" in said


def test_nodes_without_the_feature(place: Place) -> None:
    text = (place.plan / "launch-one.sbatch").read_text()
    assert "#SBATCH --constraint=[a100*1&h800*2]\n" in text
    wrong = place.plan / "wrong.sbatch"
    wrong.write_text(text.replace("take a100 1", "take b200 1"))
    state, code, said, _ = place.run("wrong.sbatch")
    assert (state, code) == ("FAILED", 2)
    assert "launch-one.sbatch: 1 nodes with feature b200 are missing in b1 b2 z0" in said


def test_slurm_itself_reads_every_option(place: Place) -> None:
    """Images and resources are not here to be had, but sbatch takes or refuses each line by name."""
    options = LaunchOptions(
        job=JobOptions(time="1-00:00:00", account="research"),
        kinds={"a100": KindOptions(partition="a100"), "h800": KindOptions(image="registry#team/image:1")},
    )
    plan = resolve(JOB, CLUSTER, PLAN)
    files = target("slurm")(JOB, CLUSTER, plan, "{}", options)
    text = files["launch.sbatch"]
    assert text.count("#SBATCH --account=research") == 2 and "#SBATCH --gres=gpu:2" in text
    assert "--container-image='registry#team/image:1' --container-mounts=\"$mounts\"" in text
    script = place.work / "options.sbatch"
    script.write_text(text)
    said = place.slurm.call("sbatch", "--test-only", script)
    assert "unrecognized" not in said and "nvalid option" not in said
    assert "to start at" in said and said.strip().endswith("on b[1-2],z0")


def test_discover_reads_this_cluster(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in place.slurm.env.items():
        monkeypatch.setenv(name, value)
    found = discover(("slurm",))
    assert found.unknown == () and found.answer.remarks == ()
    assert {(pool.name, pool.device.name, pool.devices_per_node, pool.hosts) for pool in found.pools} == {
        ("a100", "a100-80g-sxm", 2, ("z0",)),
        ("h800", "h800-80g-sxm", 1, ("b1", "b2")),
    }
