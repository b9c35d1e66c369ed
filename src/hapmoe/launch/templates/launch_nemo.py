#!/usr/bin/env python3
"""Hands launch.sbatch to Slurm through NeMo-Run's tunnel: here, or on a login node.

    python launch_nemo.py WORKDIR                     Slurm is here
    python launch_nemo.py WORKDIR --host H --user U   on H, where this folder lies at the same path

WORKDIR is the folder in which the training program runs. What a job asks for stands in launch.sbatch.
"""

from __future__ import annotations

import argparse
import importlib
import shlex
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workdir", type=Path)
    parser.add_argument("--host")
    parser.add_argument("--user")
    given = parser.parse_args()
    run: Any = importlib.import_module("nemo_run")
    if given.host:
        tunnel = run.SSHTunnel(host=given.host, user=given.user or "", job_dir=str(HERE))
    else:
        tunnel = run.LocalTunnel(job_dir=str(HERE))
    tunnel.connect()
    folder, script = shlex.quote(str(given.workdir)), shlex.quote(str(HERE / "launch.sbatch"))
    plan = shlex.quote(str(HERE))
    done = tunnel.run(f"cd {folder} && HAPMOE_PLAN={plan} sbatch {script}", hide=False, warn=True)
    raise SystemExit(done.return_code)


if __name__ == "__main__":
    main()
