"""Before training, on two hosts: whatever is not as planned stops all of them with a line that names it."""

from __future__ import annotations

import runpy
import sys
from importlib import resources
from pathlib import Path

import builders as b
import msgspec
import pytest
import torch.distributed as dist
from megatron_oracle import groups, parallel_state
from two_hosts import HOSTS, TwoHosts

from hapmoe.launch import target
from hapmoe.launch.options import KindOptions, LaunchOptions
from hapmoe.launch.write import write_files
from hapmoe.resolve import resolve

TRAINER = """import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
value = torch.tensor([10.0 ** dist.get_rank()])
dist.all_reduce(value)
if os.environ["LOCAL_RANK"] == "0":
    line = f"trained {os.environ['RANK']} {int(value.item())} {os.environ['KIND']}\\n"
    os.write(1, line.encode())  # one write: two hosts share this output, and print() may write word by word
dist.barrier()
dist.destroy_process_group()  # gloo's threads may abort a process that just ends
"""


def launch(where: Path, hosts: tuple[str, str] = HOSTS, slots: int = 1) -> Path:
    """Two stages: one on an A100 host, one on an H800 host."""
    cluster = b.cluster(
        b.pool("a100", devices_per_node=slots, hosts=hosts[:1]), b.pool("h800", devices_per_node=slots, hosts=hosts[1:])
    )
    env = {"GLOO_SOCKET_IFNAME": "eth0"}
    options = LaunchOptions(kinds={name: KindOptions(env={**env, "KIND": name}) for name in ("a100", "h800")})
    plan = resolve(b.job(), cluster, b.plan((3, 5), pools=("a100", "h800"), dp=slots, ep=slots))
    files = target("torchrun")(b.job(), cluster, plan, msgspec.json.encode(plan).decode(), options)
    return write_files(where / "hapmoe-plan", files)


@pytest.fixture
def hosts(tmp_path: Path) -> TwoHosts:
    made = TwoHosts(tmp_path)
    made.devices("first", "NVIDIA A100-SXM4-80GB")
    made.devices("second", "NVIDIA H800")
    (made.work / "pretrain_gpt.py").write_text("print('trained', flush=True)\n")
    return made


def test_all_is_well_and_training_starts(tmp_path: Path, hosts: TwoHosts) -> None:
    """Two real torchruns over ssh, every group answers, then the trainer's own collective crosses the cable."""
    for name in ("first", "second"):
        hosts.devices(name, "NVIDIA A100" if name == "first" else "NVIDIA H800", count=2)
    (hosts.work / "pretrain_gpt.py").write_text(TRAINER)
    run = hosts.run(launch(tmp_path, slots=2) / "launch.sh", HAPMOE_CHECK="full", HAPMOE_SKIP_DEVICE_CHECK="1")
    assert run.code == 0, run.stderr
    assert sorted(run.stdout.splitlines()) == ["trained 0 1111 a100", "trained 2 1111 h800"]
    assert "check_ranks: 4 ranks, every group answers" in run.stderr
    for kind, count in (("data", 2), ("expert", 2), ("pipeline", 2)):
        assert f"{kind} parallel" in run.stderr and f"{count} groups" in run.stderr


def stopped(hosts: TwoHosts, folder: Path, **variables: str) -> list[str]:
    """Lines of all hosts that say why there is no training."""
    run = hosts.run(folder / "launch.sh", HAPMOE_TORCHRUN=str(hosts.bin / "torchrun"), **variables)
    assert run.code != 0 and "trained" not in run.stdout, (run.stdout, run.stderr)
    return list(dict.fromkeys(line for line in run.stderr.splitlines() if line.startswith(("check_", "ssh:"))))


def test_wrong_device(tmp_path: Path, hosts: TwoHosts) -> None:
    hosts.devices("second", "NVIDIA H20")
    said = stopped(hosts, launch(tmp_path))
    assert said == ["check_hosts: node 1 (10.77.0.2) has 'NVIDIA H20', the plan wants h800"]


def test_two_hosts_swapped(tmp_path: Path, hosts: TwoHosts) -> None:
    said = stopped(hosts, launch(tmp_path, (HOSTS[1], HOSTS[0])))
    assert said[0].startswith("check_hosts: node 0 (10.77.0.2) has 'NVIDIA H800', the plan wants a100: swap it with")
    assert said[1].endswith("swap it with node 0 (10.77.0.2) in hosts.tsv") and len(said) == 2


def test_one_host_missing(tmp_path: Path, hosts: TwoHosts) -> None:
    assert stopped(hosts, launch(tmp_path, (HOSTS[0], "10.77.0.9"))) == [
        "ssh: connect to host 10.77.0.9 port 22: No route to host"
    ]


def test_one_host_silent(tmp_path: Path, hosts: TwoHosts) -> None:
    said = stopped(hosts, launch(tmp_path, (HOSTS[0], "silent")), HAPMOE_CHECK_TIMEOUT="1")
    assert said == ["check_hosts: node 1 (silent) did not report within 1 s"]


def test_first_host_out_of_reach(tmp_path: Path, hosts: TwoHosts) -> None:
    variables = {"NODE_RANK": "1", "MASTER_ADDR": "10.77.0.9", "MASTER_PORT": "29500", "HAPMOE_CHECK_TIMEOUT": "1"}
    run = hosts.run("ip", "netns", "exec", "second", str(launch(tmp_path) / "run_node.sh"), **variables)
    assert run.code == 2
    assert "check_hosts: node 1 cannot reach node 0 at 10.77.0.9:29500 within 1 s" in run.stderr


@pytest.mark.parametrize(
    ("package", "version"), [("torch", "2.6.0+cu124"), ("megatron-core", "0.12.0"), ("nvidia-nccl-cu12", "2.18.1")]
)
def test_different_versions(tmp_path: Path, hosts: TwoHosts, package: str, version: str) -> None:
    hosts.installed("second", package, version)
    said = stopped(hosts, launch(tmp_path))
    assert len(said) == 1 and said[0].startswith(f"check_hosts: {package} is {version} on node 1 (10.77.0.2), ")


def test_different_folders(tmp_path: Path, hosts: TwoHosts) -> None:
    """One host has an older copy: seen by content, and the file is named."""
    folder = launch(tmp_path)
    other = tmp_path / "other"
    write_files(other, {str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*") if p.is_file()})
    (other / "args" / "stage_0.args").write_text("--recompute-granularity selective\n")
    (hosts.bin / "second" / "bash").write_text(
        f'#!/bin/sh\nif [ "$1" = {folder}/run_node.sh ]; then shift; exec /bin/bash {other}/run_node.sh "$@"; fi\n'
        'exec /bin/bash "$@"\n'
    )
    (hosts.bin / "second" / "bash").chmod(0o755)
    said = stopped(hosts, folder)
    assert said == ["check_hosts: args/stage_0.args on node 1 (10.77.0.2) differs from node 0's: copy the folder again"]


def test_too_few_devices(tmp_path: Path, hosts: TwoHosts) -> None:
    hosts.devices("first", "NVIDIA A100", count=2)
    said = stopped(hosts, launch(tmp_path, slots=2))
    assert said == ["check_hosts: node 1 (10.77.0.2) has 1 devices of type h800, hosts.tsv says 2"]


def test_one_machine_under_two_names(tmp_path: Path, hosts: TwoHosts) -> None:
    for name in ("first", "second"):
        hosts.devices(name, "NVIDIA A100-SXM4-80GB", serial="same")
    cluster = b.cluster(b.pool("a100", nodes=2, devices_per_node=1, hosts=HOSTS))
    plan = resolve(b.job(), cluster, b.plan((3, 5)))
    files = target("torchrun")(b.job(), cluster, plan, msgspec.json.encode(plan).decode())
    assert stopped(hosts, write_files(tmp_path / "hapmoe-plan", files)) == [
        "check_hosts: node 1 (10.77.0.2) and node 0 (10.77.0.1) have the same devices (GPU-same-0): one host stands "
        "on two lines of hosts.tsv"
    ]


def test_others_at_the_port_hold_nobody_up(tmp_path: Path, hosts: TwoHosts) -> None:
    """One says nothing, one something else, one half of a line; then the second node reports."""
    folder = launch(tmp_path)
    (hosts.bin / "disturbed").write_text(
        f"""#!{sys.executable}
import os, socket, subprocess, time
env = dict(os.environ, MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
start = lambda node: subprocess.Popen(["{sys.executable}", "{folder}/check_hosts.py"], env=dict(env, NODE_RANK=node))
first, others = start("0"), []
while len(others) < 3:
    try:
        others.append(socket.create_connection(("127.0.0.1", 29500)))
    except OSError:
        time.sleep(0.05)
others[0].sendall(b"GET / HTTP/1.1\\r\\n")
others[1].sendall(b'{{"node"')
second = start("1")
assert second.wait(20) == 0 and first.wait(20) == 0
"""
    )
    (hosts.bin / "disturbed").chmod(0o755)
    run = hosts.run("ip", "netns", "exec", "first", str(hosts.bin / "disturbed"), HAPMOE_CHECK_TIMEOUT="30")
    assert run.code == 0, run.stderr


def test_a_port_that_is_taken_is_named(tmp_path: Path, hosts: TwoHosts) -> None:
    folder = launch(tmp_path)
    (hosts.bin / "taken").write_text(
        f"#!{sys.executable}\nimport socket, subprocess, sys\nwith socket.create_server(('', 29500)):\n"
        f"    sys.exit(subprocess.run(['{folder}/run_node.sh']).returncode)\n"
    )
    (hosts.bin / "taken").chmod(0o755)
    variables = {"NODE_RANK": "0", "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "29500"}
    run = hosts.run("ip", "netns", "exec", "first", str(hosts.bin / "taken"), **variables)
    assert run.code == 2 and run.stderr.splitlines()[-1] == (
        "check_hosts: cannot listen on port 29500 of node 0: Address already in use; another MASTER_PORT may be free"
    )


def test_a_rank_that_cannot_join_is_named(tmp_path: Path, hosts: TwoHosts) -> None:
    """The nodes see each other, but the second one's ranks are told to use an interface that is not there."""
    folder = launch(tmp_path)
    env = folder / "env" / "h800.env"
    env.write_text(env.read_text().replace("GLOO_SOCKET_IFNAME=eth0", "GLOO_SOCKET_IFNAME=nowhere0"))
    said = stopped(hosts, folder, HAPMOE_CHECK="only", HAPMOE_CHECK_TIMEOUT="20")
    assert any(line.startswith("check_ranks: rank 1 of stage 1 does not meet the others: ") for line in said), said


@pytest.mark.parametrize(("tp", "cp", "dp", "ep", "etp"), [(2, 1, 4, 4, 1), (2, 2, 2, 2, 2), (1, 1, 6, 3, 1)])
def test_groups_are_those_that_megatron_makes(tp: int, cp: int, dp: int, ep: int, etp: int) -> None:
    path = resources.files("hapmoe.launch") / "templates" / "check_ranks.py"
    ours = runpy.run_path(str(path))["groups"]
    plan = resolve(b.job(), b.cluster(), b.plan((4, 4), tp=tp, cp=cp, dp=dp, ep=ep, etp=etp))
    found = {(kind, tuple(ranks)) for kind, ranks in ours(msgspec.to_builtins(plan.stages))}
    theirs = set()
    world = plan.num_devices
    for rank in range(world):
        with groups(
            world,
            rank,
            tensor_model_parallel_size=tp,
            context_parallel_size=cp,
            pipeline_model_parallel_size=2,
            expert_model_parallel_size=ep,
            expert_tensor_parallel_size=etp,
        ):
            for kind, group in (
                ("tensor", parallel_state.get_tensor_model_parallel_group()),
                ("context", parallel_state.get_context_parallel_group()),
                ("data", parallel_state.get_data_parallel_group()),
                ("expert tensor", parallel_state.get_expert_tensor_parallel_group()),
                ("expert", parallel_state.get_expert_model_parallel_group()),
                ("expert data", parallel_state.get_expert_data_parallel_group()),
                ("pipeline", parallel_state.get_pipeline_model_parallel_group()),
            ):
                ranks = tuple(dist.get_process_group_ranks(group))
                if len(ranks) > 1:
                    theirs.add((kind, ranks))
    assert found == theirs
