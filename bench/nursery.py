"""Starts Python programs out of a process that has imported torch already, which is most of a small rank's time.

``start`` is ``subprocess.Popen([sys.executable, program, ...])`` as far as a run needs it. The process behind it
forks, and runs the program as ``__main__`` with an environment of its own. megatron is imported by the program
itself, as always. What only the start of an interpreter reads (``sitecustomize``, PYTHON*) is that of the nursery.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

__all__ = ["Child", "start"]

_AT_START = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "TORCHDYNAMO_DISABLE": "1"}
"""What torch and Python read while the nursery starts; the last one as hapmoe.lab.shim sets it."""


class Child:
    """A program that runs."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        """Its exit code (negative: the signal that ended it); None while it runs."""
        if self._code is None:
            self._code = _ask({"poll": self.pid})
        return self._code

    def wait(self) -> int | None:
        if self._code is None:
            self._code = _ask({"wait": self.pid})
        return self._code

    def terminate(self) -> None:
        if self.poll() is None:  # until then nobody else can have its number
            os.kill(self.pid, signal.SIGTERM)


def start(command: Sequence[str], environment: Mapping[str, str], log: Path) -> Child:
    """Run ``command`` (a Python file and its arguments), with its output in ``log``."""
    return Child(_ask({"command": list(command), "environment": dict(environment), "log": str(log)}))


@cache
def _nursery() -> subprocess.Popen[str]:
    """Ends when this process ends, however that happens: its input is then closed."""
    environment = {**os.environ, **_AT_START}
    nursery = subprocess.Popen(
        [sys.executable, __file__], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    atexit.register(nursery.communicate)
    return nursery


def _ask(request: dict[str, Any]) -> Any:
    nursery = _nursery()
    assert nursery.stdin is not None and nursery.stdout is not None
    nursery.stdin.write(json.dumps(request) + "\n")
    nursery.stdin.flush()
    answer = nursery.stdout.readline()
    if not answer:
        raise RuntimeError(f"the nursery ended with exit code {nursery.wait()}")
    return json.loads(answer)


def _serve() -> None:
    """One request a line, one answer a line; a single thread, so that a fork has all there is."""
    import torch._dynamo.convert_frame
    import torch.distributed.checkpoint
    import torch.distributed.tensor  # noqa: F401

    running: set[int] = set()
    for line in sys.stdin:
        request = json.loads(line)
        if "command" in request:
            child = os.fork()
            if child == 0:
                _become(request)
            running.add(child)
            answer: int | None = child
        else:
            waits = "wait" in request
            ended, status = os.waitpid(request["wait" if waits else "poll"], 0 if waits else os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if ended else None
            if ended:
                running.discard(ended)
                _sweep(ended)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    for child in running:  # whoever asked for them is gone
        _sweep(child)


def _become(request: dict[str, Any]) -> NoReturn:
    """The rest of a child's life. It ends as an interpreter does: multiprocessing then ends what it has started."""
    os.setsid()
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = request["command"]
    found = [one for one in request["environment"].get("PYTHONPATH", "").split(os.pathsep) if one]
    sys.path[:1] = [str(Path(sys.argv[0]).parent), *found]
    runpy.run_path(sys.argv[0], run_name="__main__")
    raise SystemExit(0)


def _sweep(child: int) -> None:
    """End what a child has left behind: a rank that was stopped while it saved leaves writers, which wait for ever."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)


if __name__ == "__main__":
    _serve()
