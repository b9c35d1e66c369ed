"""What comes out of the nursery ends as any program does, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from bench import nursery

PROGRAM = """\
import os, subprocess, sys
left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(left.pid, os.environ["WORD"], sys.argv[1], flush=True)
if sys.argv[1] == "waits":
    left.wait()
raise SystemExit(3)
"""


@pytest.mark.parametrize(("word", "code"), [("ends", 3), ("waits", -signal.SIGTERM)])
def test_a_child_and_what_it_started_end(tmp_path: Path, word: str, code: int) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    log = tmp_path / "log"
    child = nursery.start([str(tmp_path / "program.py"), word], {**os.environ, "WORD": "seen"}, log)
    while not log.exists() or not log.read_text().endswith("\n"):
        time.sleep(0.01)
    if word == "waits":
        assert child.poll() is None
        child.terminate()
    assert child.wait() == code == child.poll()
    left, *said = log.read_text().split()
    assert said == ["seen", word]
    while runs(left):
        time.sleep(0.01)


def runs(process: str) -> bool:
    try:
        return "zombie" not in Path(f"/proc/{process}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
