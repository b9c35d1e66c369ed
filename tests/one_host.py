"""This machine as all hosts of a launch: what ``launch.sh`` needs around it to train in the CPU lab."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from bench.lab import SOURCE, free_port

__all__ = ["environment"]


def environment(folder: Path) -> dict[str, str]:
    """For ``launch.sh`` and what calls it; an ssh that stays here is put into the folder."""
    ssh = folder / "ssh"
    ssh.write_text('#!/bin/bash\nshift\nexec bash -c "$*"\n')
    ssh.chmod(0o755)
    return {
        **{name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")},
        "PYTHONPATH": str(SOURCE),
        "PYTHONWARNINGS": "ignore",
        "OMP_NUM_THREADS": "1",
        "HAPMOE_LAB": "1",
        "HAPMOE_SSH": str(ssh),
        "HAPMOE_CHECK": "off",
        "HAPMOE_MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "HAPMOE_TORCHRUN": str(Path(sys.executable).parent / "torchrun"),
    }
