"""A real Slurm on this machine: munge, the controller, and a daemon per node, with two kinds of nodes.

Needs Debian's slurmctld, slurmd, slurm-client and munge. All state is in one folder; all daemons are
children of the test and end with it.
"""

from __future__ import annotations

import os
import pwd
import re
import secrets
import socket
import subprocess
import time
from pathlib import Path

__all__ = ["Slurm"]

_CONF = """ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={root}/munge.sock
MpiDefault=none
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/linear
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_min_interval=1
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/%n.pid
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName=z0 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=100 Features=a100 Gres={gres[0]}:2
NodeName=b1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 RealMemory=100 Features=h800 Gres={gres[1]}:1
NodeName=b2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[3]} CPUs=2 RealMemory=100 Features=h800 Gres={gres[1]}:1
PartitionName=a100 Nodes=z0
PartitionName=h800 Nodes=b[1-2]
PartitionName=all Nodes=z0,b[1-2] Default=YES
"""
_GRES = ("gpu:nvidia_a100-sxm4-80gb", "gpu:nvidia_h800")
"""Types as Slurm's AutoDetect=nvml names them; their device files are stand-ins."""

NODES = ("z0", "b1", "b2")
"""The A100 node sorts last by name, so that Slurm's own order is not the plan's."""


class Slurm:
    """``with Slurm(folder) as slurm: slurm.run(...)``."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.daemons: list[subprocess.Popen[bytes]] = []
        self.env = {"SLURM_CONF": str(root / "slurm.conf"), "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}

    def __enter__(self) -> Slurm:
        sockets = [socket.socket() for _ in range(4)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        ports = [one.getsockname()[1] for one in sockets]
        for one in sockets:
            one.close()
        host = socket.gethostname().partition(".")[0]
        user = pwd.getpwuid(os.getuid()).pw_name
        values = {"host": host, "ports": ports, "root": self.root, "user": user, "gres": _GRES}
        (self.root / "slurm.conf").write_text(_CONF.format(**values))
        rows = (("z0", _GRES[0], "null"), ("z0", _GRES[0], "zero"), ("b[1-2]", _GRES[1], "null"))
        (self.root / "gres.conf").write_text(
            "".join(f"NodeName={node} Name=gpu Type={name[4:]} File=/dev/{file}\n" for node, name, file in rows)
        )
        (self.root / "state").mkdir()
        key = self.root / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        files = {"key-file": key, "socket": "munge.sock", "pid-file": "munged.pid", "log-file": "munged.log"}
        files["seed-file"] = "munged.seed"
        options = [f"--{name}={self.root / value}" for name, value in files.items()]
        try:
            self._start("munged", "--foreground", "--force", *options)
            self._until(lambda: (self.root / "munge.sock").exists(), "munged does not start")
            self._start("slurmctld", "-D", "-c", "-f", self.env["SLURM_CONF"])
            for node in NODES:
                (self.root / f"spool-{node}").mkdir()
                self._start("slurmd", "-D", "-N", node, "-f", self.env["SLURM_CONF"])
            self._until(
                lambda: self.call("sinfo", "-h", "-N", "-p", "all", "-o", "%t").split() == ["idle"] * 3, "no nodes"
            )
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self, *command: str) -> None:
        env = {**os.environ, **self.env}
        with (self.root / f"{len(self.daemons)}-{command[0]}.log").open("wb") as log:
            self.daemons.append(subprocess.Popen(command, env=env, stdout=log, stderr=log, stdin=subprocess.DEVNULL))

    def _until(self, condition: object, said: str, limit: float = 30) -> None:
        end = time.monotonic() + limit
        while time.monotonic() < end:
            if condition():  # type: ignore[operator]
                return
            time.sleep(0.1)
        logs = {path.name: path.read_text(errors="replace")[-600:] for path in self.root.glob("*.log")}
        raise AssertionError(f"{said}: {logs}")

    def call(self, *command: str | Path, cwd: Path | None = None, **variables: str) -> str:
        env = {**self.env, "HOME": str(self.root), **variables}
        done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=60, check=False)
        return done.stdout + done.stderr

    def run(self, folder: Path, script: Path, *options: str, **variables: str) -> tuple[str, int, str]:
        """Submit from ``folder`` and wait: (state, exit code, output)."""
        out = self.root / f"{time.monotonic_ns()}.out"
        said = self.call("sbatch", f"--output={out}", *options, script, cwd=folder, **variables)
        match = re.search(r"Submitted batch job (\d+)", said)
        assert match, said
        self._until(lambda: not self.call("squeue", "-h", "-j", match[1]).strip(), f"job {match[1]} hangs", 60)
        shown = self.call("scontrol", "show", "job", match[1])
        state, code = re.search(r"JobState=(\w+)", shown), re.search(r"ExitCode=(\d+):", shown)
        assert state and code, shown
        return state[1], int(code[1]), out.read_text() if out.exists() else ""

    def __exit__(self, *_: object) -> None:
        if len(self.daemons) > 1:
            self.call("scancel", "--user", pwd.getpwuid(os.getuid()).pw_name)
        for daemon in reversed(self.daemons):
            daemon.terminate()
        for daemon in self.daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
