"""Runs the files of a launch without devices: a stand-in torchrun, torch, ssh and training program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

__all__ = ["TRAINER", "Run", "Sandbox"]

_TORCHRUN = f"""#!{sys.executable}
import os, subprocess, sys
options = dict(zip(sys.argv[1:11:2], sys.argv[2:12:2]))
entry = sys.argv[11:]
slots, node = int(options["--nproc-per-node"]), int(options["--node-rank"])
assert options["--rdzv-backend"] == "static", options
table = [line.split() for line in open(os.path.join(os.path.dirname(entry[0]), "hosts.tsv")) if line[0].isdigit()]
assert int(options["--nnodes"]) == len(table)
base = sum(int(row[3]) for row in table if int(row[0]) < node)
world = sum(int(row[3]) for row in table)
codes = []
for local in range(slots):
    env = dict(os.environ, RANK=str(base + local), LOCAL_RANK=str(local), WORLD_SIZE=str(world))
    codes.append(subprocess.run([sys.executable, *entry], env=env).returncode)
sys.exit(max(codes))
"""

_SSH = """#!/bin/bash
# Like ssh: the host, then words that a shell of the other side reads. The host decides the device.
while [ "${1:0:1}" = - ]; do shift 2; done
export STAND_IN_DEVICE=${1%%-*}
shift
exec bash -c "$*"
"""

_TORCH = """import os
class cuda:
    device_count = staticmethod(lambda: 8)
    get_device_name = staticmethod(lambda index: "Stand-in " + os.environ["STAND_IN_DEVICE"].upper())
"""

TRAINER = """import json, os, sys
row = {"rank": int(os.environ["RANK"]), "argv": sys.argv[1:], "env": dict(os.environ), "name": __name__}
with open(os.path.join("seen", os.environ["RANK"] + ".json"), "w") as stream:
    json.dump(row, stream)
"""


@dataclass(frozen=True)
class Run:
    """What came of one command: exit code, standard error, and what each rank was given."""

    code: int
    stderr: str
    stdout: str
    ranks: dict[int, dict[str, object]]

    def argv(self, rank: int) -> list[str]:
        words = self.ranks[rank]["argv"]
        assert isinstance(words, list)
        return words

    def env(self, rank: int) -> dict[str, str]:
        env = self.ranks[rank]["env"]
        assert isinstance(env, dict)
        return env


class Sandbox:
    """A folder with the stand-ins, in which launch files can be run."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "bin").mkdir()
        (root / "lib").mkdir()
        for name, text in (("bin/torchrun", _TORCHRUN), ("bin/ssh", _SSH), ("lib/torch.py", _TORCH)):
            (root / name).write_text(text)
            (root / name).chmod(0o755)

    def run(self, launch: Path, command: str, *, trainer: str = "pretrain_gpt.py", **variables: str) -> Run:
        """``command`` is a file of the launch and its arguments, started in a folder with the trainer."""
        work = self.root / "work"
        (work / "seen").mkdir(parents=True, exist_ok=True)
        for old in (work / "seen").iterdir():
            old.unlink()
        (work / trainer).write_text(TRAINER)
        env = {
            "PATH": f"{self.root / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": str(self.root / "lib"),
            "HOME": str(self.root),
            "PYTHONDONTWRITEBYTECODE": "1",
            "HAPMOE_CHECK": "off",  # the hosts are stand-ins; tests/test_check_hosts.py has real ones
            **variables,
        }
        script, *arguments = command.split()
        done = subprocess.run(
            [launch / script, *arguments], cwd=work, env=env, capture_output=True, text=True, timeout=60, check=False
        )
        seen = [json.loads(path.read_text()) for path in (work / "seen").iterdir()]
        return Run(done.returncode, done.stderr, done.stdout, {row["rank"]: row for row in seen})
