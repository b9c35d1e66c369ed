"""NeMo-Run's part is its tunnel alone: a stand-in of it, and the command that comes out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import builders as b

from hapmoe.launch import target
from hapmoe.launch.write import write_files

_NEMO = """class Done:
    return_code = 3
class Tunnel:
    def __init__(self, **given): self.given = given
    def connect(self): print(type(self).__name__, sorted(self.given.items()))
    def run(self, command, hide=True, warn=False): print(command); return Done()
class SSHTunnel(Tunnel): pass
class LocalTunnel(Tunnel): pass
"""


def test_sbatch_goes_through_the_tunnel(tmp_path: Path) -> None:
    files = target("nemorun")(b.job(), b.cluster(), b.plan((4, 4), dp=8), "{}")
    assert "launch.sbatch" in files
    folder = write_files(tmp_path / "a plan", {**files, "plan.json": '{"schema": 1, "stages": []}'})
    (tmp_path / "nemo_run.py").write_text(_NEMO)
    command = [sys.executable, str(folder / "launch_nemo.py"), "/work dir", "--host", "login", "--user", "me"]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 3, done.stderr
    opened, submitted = done.stdout.splitlines()
    assert opened == f"SSHTunnel [('host', 'login'), ('job_dir', '{folder}'), ('user', 'me')]"
    assert submitted == f"cd '/work dir' && HAPMOE_PLAN='{folder}' sbatch '{folder}/launch.sbatch'"
