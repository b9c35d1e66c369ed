"""Launch files in hostile surroundings: odd paths, edited tables, other shells, many hosts, signals."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import builders as b
import msgspec
import pytest
from dryrun import Sandbox
from test_launch_torchrun import alive, made, within

from hapmoe.job import Argument
from hapmoe.launch import target
from hapmoe.launch.write import write_files
from hapmoe.resolve import resolve

MIXED = b.cluster(
    b.pool("a100", nodes=1, devices_per_node=1, hosts=("a100-0",)),
    b.pool("h800", nodes=2, devices_per_node=1, hosts=("h800-0", "h800-1")),
)
PLAN = b.plan((2, 3, 3), pools=("a100", "h800", "h800"))
TABLE = "0\ta100-0\ta100\t1\t0\n1\th800-0\th800\t1\t1\n2\th800-1\th800\t1\t2\n"


@pytest.fixture
def sandbox(tmp_path: Path) -> Sandbox:
    return Sandbox(tmp_path)


@pytest.mark.parametrize("shell", ["bash", "sh"])
def test_paths_and_values_with_everything_in_them(tmp_path: Path, sandbox: Sandbox, shell: str) -> None:
    """Whatever the login shell; sh is dash on Debian, which knows no $'…'."""
    ssh = tmp_path / "bin" / "ssh"
    ssh.write_text(ssh.read_text().replace("exec bash -c", f"exec {shell} -c"))
    odd = 'it\'s a "plan"\n end\nend\n$(touch pwned) `x` \\ é * ~'
    where = tmp_path / odd.replace("\n end\nend\n", " ; & | > ")
    env = {"TITLE": Argument(text=odd), "here": Argument(text="/nowhere"), "type": Argument(text="none")}
    env |= {"slots": Argument(text="99"), "start": Argument(text="x"), "VALUE": Argument(text=None, source='"$GIVEN"')}
    launch = made(where, b.job(env=env), MIXED, PLAN)
    run = sandbox.run(launch, "launch.sh", GIVEN=odd)
    assert run.code == 0, run.stderr
    assert sorted(run.ranks) == list(range(3))
    for rank in range(3):
        assert run.env(rank)["TITLE"] == run.env(rank)["VALUE"] == odd
    assert not list(tmp_path.rglob("pwned"))


@pytest.mark.parametrize(
    "table",
    [
        TABLE.replace("\n", "\r\n"),
        "# edited by hand\n\n" + TABLE.replace("1\t", "  1\t", 1).replace("\t", "   "),
        TABLE.rstrip("\n") + "   # the new rack\n\n",
    ],
)
def test_tables_as_editors_leave_them(tmp_path: Path, sandbox: Sandbox, table: str) -> None:
    launch = made(tmp_path, b.job(), MIXED, PLAN)
    (launch / "hosts.tsv").write_bytes(table.encode())
    torchrun = tmp_path / "bin" / "torchrun"
    torchrun.write_text(torchrun.read_text().replace("if line[0].isdigit()", "if line.strip()[:1].isdigit()"))
    run = sandbox.run(launch, "launch.sh")
    assert run.code == 0, run.stderr
    assert [run.env(rank)["STAND_IN_DEVICE"] for rank in range(3)] == ["a100", "h800", "h800"]
    dry = sandbox.run(launch, "launch.sh --dry-run")
    assert dry.code == 0 and len(dry.stdout.splitlines()) == 3


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (TABLE.replace("h800-1", "h800-0"), "host h800-0 stands on two lines of hosts.tsv: its ranks would share"),
        ("".join(sorted(TABLE.splitlines(True), reverse=True)), "hosts.tsv says node 2 where node 0 belongs"),
        (TABLE.replace("1\th800-0", "0\th800-0"), "hosts.tsv says node 0 where node 1 belongs"),
        (TABLE.replace("a100-0", "-oProxyCommand=x"), "-oProxyCommand=x in hosts.tsv is no host"),
        (TABLE.replace("\ta100\t1\t0", ""), "node 0 of hosts.tsv has 2 fields"),
        (TABLE.replace("h800-1\th800", "h800-1\th200"), "node 2 of hosts.tsv is of type h200, and there is no"),
        (TABLE.partition("2\t")[0], "hosts.tsv has 2 slots, the plan 3 ranks"),
        (TABLE.replace("h800\t1\t2", "h800\t2\t2"), "hosts.tsv has 4 slots, the plan 3 ranks"),
    ],
)  # fmt: skip
def test_tables_that_would_start_something_else(tmp_path: Path, sandbox: Sandbox, table: str, said: str) -> None:
    launch = made(tmp_path, b.job(), MIXED, PLAN)
    (launch / "hosts.tsv").write_text(table)
    for command in ("launch.sh", "launch.sh --dry-run"):
        run = sandbox.run(launch, command)
        assert run.code == 2 and not run.ranks and not run.stdout
        assert said in run.stderr and len(run.stderr.splitlines()) == 1


def test_no_torchrun_is_one_line(tmp_path: Path, sandbox: Sandbox) -> None:
    launch = made(tmp_path, b.job(), MIXED, PLAN)
    node = {"NODE_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1", "HAPMOE_TORCHRUN": "/nowhere/torchrun"}
    run = sandbox.run(launch, "run_node.sh", **node)
    assert run.code == 2 and "no /nowhere/torchrun on a100-0: give its full path as HAPMOE_TORCHRUN" in run.stderr


def test_nothing_is_written_into_the_folder(tmp_path: Path, sandbox: Sandbox) -> None:
    """It may be read-only, and the same for all hosts."""
    launch = made(tmp_path, b.job(), MIXED, PLAN)
    before = {path: path.stat().st_mtime_ns for path in launch.rglob("*")}
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    run = sandbox.run(launch, "launch.sh", TMPDIR=str(temporary), PYTHONDONTWRITEBYTECODE="")
    assert run.code == 0, run.stderr
    assert {path: path.stat().st_mtime_ns for path in launch.rglob("*")} == before
    assert not list(temporary.iterdir())


def test_200_hosts(tmp_path: Path, sandbox: Sandbox) -> None:
    """With few open files allowed at first; every host is started once and told its number."""
    cluster = b.cluster(b.pool("a100", nodes=200, devices_per_node=1, hosts=tuple(f"a100-{n}" for n in range(200))))
    job = b.with_training(b.job(moe=None), global_batch_size=200)
    plan = resolve(job, cluster, b.plan(dp=200))
    files = target("torchrun")(job, cluster, plan, msgspec.json.encode(plan).decode())
    launch = write_files(tmp_path / "hapmoe-plan", files)
    shutil.copy("/bin/true", tmp_path / "bin" / "torchrun")
    (tmp_path / "bin" / "ssh").write_text(
        '#!/bin/bash\nshift 2\nwhile read -r line; do\ncase $line in\n*NODE_RANK=*) set -- "$1" ${line##*RANK=} ;;\n'
        'end) echo "$1 $2" >>"$HOME/told"; exit ;;\nesac; done\n'
    )
    env = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    done = subprocess.run(
        ["bash", "-c", 'ulimit -S -n 128; exec "$0"', launch / "launch.sh"],
        env=env, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = (tmp_path / "told").read_text().splitlines()
    assert sorted(told) == sorted(f"a100-{n} {n}" for n in range(200))


@pytest.mark.parametrize("how", [signal.SIGHUP, signal.SIGQUIT, signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("group", [False, True])
def test_no_rank_outlives_a_terminal(tmp_path: Path, sandbox: Sandbox, how: signal.Signals, group: bool) -> None:
    """Signals to the launcher alone, and to its whole group as a terminal sends them; the other side of an ssh
    has a session of its own."""
    ssh = tmp_path / "bin" / "ssh"
    ssh.write_text(ssh.read_text().replace("exec bash", "exec setsid -w bash"))
    launch = made(tmp_path, b.job(), MIXED, PLAN)
    (tmp_path / "bin" / "torchrun").write_text(
        '#!/bin/bash\ntrap "" HUP INT QUIT\nsleep 60 & echo $! >"$HOME/rank$NODE_RANK"\n'
        'echo $$ > "$HOME/pid$NODE_RANK"; wait\n'
    )
    env = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "HOME": str(tmp_path), "HAPMOE_CHECK": "off"}
    running = subprocess.Popen(
        [launch / "launch.sh"], cwd=tmp_path, env=env, stderr=subprocess.DEVNULL, start_new_session=True
    )
    pids = [tmp_path / f"{name}{node}" for node in range(3) for name in ("rank", "pid")]
    assert within(30, lambda: all(path.exists() and path.read_text() and alive(path) for path in pids))
    if group:
        os.killpg(running.pid, how)
    else:
        running.send_signal(how)
    assert running.wait(30) != 0
    assert within(20, lambda: not any(map(alive, pids)))
