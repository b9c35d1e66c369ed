"""What real bash hands to the launchers: a fixture runs with stand-ins on PATH that record their arguments."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

BASH = shutil.which("bash") or "/bin/bash"
_NAMES = (
    "torchrun",
    "python",
    "python3",
    "deepspeed",
    "accelerate",
    "srun",
    "mpirun",
    "numactl",
    "nsys",
    "docker",
    "ssh",
    "ray",
    "timeout",
    "nohup",
    "singularity",
    "msrun",
    "uv",
    "sudo",
    "singularity",
    "mpiexec",
)
# A stand-in for a launcher that runs a shell inside starts that shell; every other one records its words.
_STAND_IN = r"""#!{bash}
case "${{0##*/}} $1" in "python -c"|"python3 -c"|"python3 -") exec {python} "$@" ;; esac
case "${{0##*/}}" in
  srun) args=("$@"); for i in "${{!args[@]}}"; do
      case "${{args[i]}}" in bash|sh) exec "${{args[@]:i}}" ;; esac; done ;;
  ssh) exec {bash} -c "${{@: -1}}" ;;
esac
{{ printf '%s\0' "${{0##*/}}" "$@"; }} > "$HAPMOE_RECORD.$$"
"""


@dataclass(frozen=True)
class Header:
    args: tuple[str, ...]
    env: dict[str, str]
    refused: str
    world: int | None


def header(text: str) -> Header:
    """The ``# args:``, ``# env:``, ``# refused:`` and ``# world:`` lines of a fixture."""

    def line(key: str) -> str:
        match = re.search(rf"(?m)^# {key}: (.*)$", text)
        return match.group(1).strip() if match else ""

    env = dict(word.split("=", 1) for word in shlex.split(line("env")))
    return Header(tuple(shlex.split(line("args"))), env, line("refused"), int(line("world")) if line("world") else None)


def stand_ins(folder: Path) -> Path:
    """A folder of stand-ins, made once."""
    folder.mkdir(parents=True, exist_ok=True)
    real_python = shutil.which("python3") or "python3"
    for name in _NAMES:
        path = folder / name
        path.write_text(_STAND_IN.format(bash=BASH, python=real_python))
        path.chmod(0o755)
    return folder


def run_bash(script: Path, args: tuple[str, ...], env: dict[str, str], shims: Path) -> list[list[str]]:
    """Every launch the script makes, in order: the launcher's name and its words."""
    with tempfile.TemporaryDirectory() as folder:
        full = {
            "PATH": f"{shims}:{os.defpath}",
            "HOME": "/home/nobody",
            "USER": "nobody",
            "HAPMOE_RECORD": f"{folder}/record",
            "LC_ALL": "C.UTF-8",
            **env,
        }
        subprocess.run(
            [BASH, script.name, *args],
            cwd=script.parent,
            env=full,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=20,
            check=False,
        )
        files = sorted(Path(folder).iterdir(), key=lambda path: path.stat().st_mtime_ns)
        return [path.read_bytes().decode().split("\0")[:-1] for path in files]


def training_of(launches: list[list[str]]) -> list[str] | None:
    """The argument vector behind the entry, of the last launch that has layers."""
    found = None
    for words in launches:
        if "--num-layers" not in words:
            continue
        place = next((i for i, word in enumerate(words) if word.endswith(".py")), None)
        if place is not None:
            found = words[place + 1 :]
    return found
