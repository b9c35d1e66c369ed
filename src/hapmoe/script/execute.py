"""The second opinion: run the script itself, with stand-ins for every launcher, in a sandbox that cannot do harm.

Asked for by the user (``hapmoe extract --execute``), never the default. bubblewrap gives a read-only view of the
machine's programs and of the folder of the script, a temporary folder for everything else, no network, no processes
of others, and no environment but what is given; time, processes, file size and memory are limited. Launchers are
stand-ins that write down their words and start nothing, except that those which run a command go on to that command.
"""

from __future__ import annotations

import errno
import os
import re
import resource
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hapmoe.errors import InputError

from .values import MARK, Invocation, Token, without_secrets

__all__ = ["Executed", "compare", "execute"]

SECONDS = 20
_PROCESSES = 200
_MEMORY = 2 << 30
_FILE = 64 << 20
_MOST_RECORDS = 4000
_TRIES, _PAUSE_S = 5, 0.5
_NOBODY = 65534
_STARTS = "torchrun python python3 deepspeed accelerate msrun"
_RUNS = (
    "srun mpirun mpiexec orterun docker podman singularity apptainer enroot nsys numactl ssh ray uv conda sudo sbatch"
)
_SUCCEEDS = "nvidia-smi npu-smi rocm-smi scontrol module ml pip pip3 conda wget curl sleep ping"

_STAND_IN = r"""#!/bin/bash
name=${0##*/}
case $name in python*) [ "$1" = -c ] && exec /usr/bin/python3 -I "$@" 2>/dev/null ;; esac
printf '%s\0' "$name" "$@" > "/record/$(date +%s%N).$$"
"""
_RUNNER = r"""#!/bin/bash
name=${0##*/}; all=("$@")
[ $name = ssh ] && exec bash -c "${all[*]:1}"
for ((i = 0; i < $#; i++)); do
  case ${all[i]##*/} in
    --wrap=*) exec bash -c "${all[i]#--wrap=}" ;;
    bash|sh|env|timeout|STARTS|RUNS) [ "$(type -t "${all[i]##*/}")" ] && exec "${all[@]:i}" ;;
    *.sh) exec bash "${all[@]:i}" ;;
  esac
done
[ $name = sbatch ] && exec bash -s
exit 0
"""


@dataclass(frozen=True, slots=True)
class Executed:
    """What the run started, and how it ended."""

    launches: tuple[tuple[str, ...], ...]
    status: int | None
    """None: it was stopped."""
    why: str = ""


def execute(script: Path, args: Sequence[str] = (), env: Mapping[str, str] | None = None) -> Executed:
    """Run ``script`` in the sandbox. Raises :class:`InputError` where bubblewrap is not there or cannot work."""
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise InputError(
            "bubblewrap is not installed, and nothing is run without it",
            where="--execute",
            hint="install the package bubblewrap (apt-get install bubblewrap, dnf install bubblewrap)",
        )
    with tempfile.TemporaryDirectory(prefix="hapmoe-") as name:
        folder = Path(name)
        (folder / "record").mkdir()
        _stand_ins(folder / "bin")
        _open_to_nobody(folder)
        command = _sandbox(bwrap, folder, script, args, dict(env or {}))
        status, why = _bounded(command)
        launches = tuple(_records(folder / "record"))
    if not launches and status and why.startswith("bwrap:"):
        raise InputError(f"the sandbox cannot be set up here ({why})", where="--execute")
    return Executed(launches, status, why)


def _stand_ins(folder: Path) -> None:
    folder.mkdir()
    runner = _RUNNER.replace("STARTS", _STARTS.replace(" ", "|")).replace("RUNS", _RUNS.replace(" ", "|"))
    for names, text in ((_SUCCEEDS, "#!/bin/bash\nexit 0\n"), (_RUNS, runner), (_STARTS, _STAND_IN)):
        for name in names.split():
            path = folder / name
            path.write_text(text)
            path.chmod(0o755)


def _open_to_nobody(folder: Path) -> None:
    """As root the run drops to nobody, whom a limit on processes binds: it does not bind root."""
    if os.geteuid() == 0:
        folder.chmod(0o755)
        os.chown(folder / "record", _NOBODY, _NOBODY)


def _sandbox(bwrap: str, folder: Path, script: Path, args: Sequence[str], env: dict[str, str]) -> list[str]:
    here, home = Path.cwd().resolve(), script.resolve().parent
    words = [bwrap, "--unshare-all", "--die-with-parent", "--new-session", "--clearenv", "--hostname", "sandbox"]
    if os.geteuid() == 0:
        words += ["--unshare-user", "--uid", str(_NOBODY), "--gid", str(_NOBODY)]
    words += ["--tmpfs", "/", "--proc", "/proc", "--dev", "/dev", "--dir", "/tmp", "--dir", "/root"]
    for system in ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc/alternatives", "/etc/passwd"):
        path = Path(system)
        if path.is_symlink():
            words += ["--symlink", os.readlink(path), system]
        elif path.exists():
            words += ["--ro-bind", system, system]
    for near in dict.fromkeys((here, home)):
        if near != Path("/"):
            words += ["--ro-bind", str(near), str(near)]
    words += ["--ro-bind", str(folder / "bin"), "/stand-ins", "--bind", str(folder / "record"), "/record"]
    given = {"HOME": "/root", "USER": "nobody", "LC_ALL": "C.UTF-8", **env}
    given["PATH"] = "/stand-ins:" + env.get("PATH", "/usr/bin:/bin")
    for key, value in given.items():
        words += ["--setenv", key, value]
    return [*words, "--chdir", str(here), "bash", str(script), *args]


def _bounded(command: list[str]) -> tuple[int | None, str]:
    """Run with limits. The limit on processes counts all of the user nobody, and those of a run that was ended may
    take a moment to go: a sandbox that finds no room is started again."""
    for _ in range(_TRIES):
        status, why = _once(command)
        if not (status and why.startswith("bwrap:") and os.strerror(errno.EAGAIN) in why):
            break
        time.sleep(_PAUSE_S)
    return status, why


def _once(command: list[str]) -> tuple[int | None, str]:
    """Run with limits; the whole process group ends with it."""

    def limits() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        resource.setrlimit(resource.RLIMIT_FSIZE, (_FILE, _FILE))
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
        resource.setrlimit(resource.RLIMIT_NPROC, (_PROCESSES, _PROCESSES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    user = {"user": _NOBODY, "group": _NOBODY, "extra_groups": ()} if os.geteuid() == 0 else {}
    with tempfile.TemporaryFile() as log:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                preexec_fn=limits,
                start_new_session=True,
                **user,  # type: ignore[call-overload]
            )
        except OSError as error:
            raise InputError(f"the sandbox cannot be started ({error.strerror})", where="--execute") from None
        try:
            status: int | None = process.wait(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return None, f"it ran longer than {SECONDS} seconds"
        log.seek(max(0, log.seek(0, os.SEEK_END) - 2000))
        lines = log.read().decode(errors="replace").strip().splitlines()
    return status, re.sub(r"[^\x20-\x7e]", "?", lines[-1])[:200] if lines and status else ""


def _records(folder: Path) -> list[tuple[str, ...]]:
    """Every launch, in order; each is a launcher's name and its words."""
    files = sorted(folder.iterdir())[:_MOST_RECORDS]
    return [tuple(path.read_bytes().decode(errors="replace").split("\0")[:-1]) for path in files]


def compare(invocation: Invocation, executed: Executed) -> str:
    """Empty when the run started the training as it was read; else the difference, in one line."""
    wanted = (invocation.entry or Token(None), *invocation.argv)
    best = ""
    for launch in executed.launches:
        for place in range(1, len(launch)):
            words = launch[place:]
            if not _may_be(wanted[0], words[0]):
                continue
            said = _difference(wanted, words)
            if not said:
                return ""
            if wanted[0].text is not None or Path(words[0]).name == Path(invocation.program).name:
                best = said
            if wanted[0].text is not None:
                break
    if best:
        return best
    end = f"; {executed.why}" if executed.why else ""
    return f"the run started no such training ({len(executed.launches)} launches, status {executed.status}{end})"


def _may_be(token: Token, word: str) -> bool:
    return token.text is None or token.text == word


def _difference(wanted: Sequence[Token], words: Sequence[str]) -> str:
    for place, (token, word) in enumerate(zip(wanted, words, strict=False)):
        if not _may_be(token, word):
            before = wanted[place - 1].text or "" if place else ""
            return without_secrets(
                f"word {place}, after {before!r}: {MARK.sub('?', token.text or '')!r} is read, {word!r} is run"
            )
    if len(wanted) != len(words):
        return f"{len(wanted) - 1} arguments are read, {len(words) - 1} are run"
    return ""
