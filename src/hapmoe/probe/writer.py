"""The lines of one rank: under another name until they are complete."""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any

__all__ = ["Writer"]


class Writer:
    """Lines of JSON in ``rank<r>.jsonl.part``, which gets its name without ``.part`` when all are there."""

    def __init__(self, folder: str, rank: int) -> None:
        os.makedirs(folder, exist_ok=True)
        self.path = os.path.join(folder, f"rank{rank}.jsonl")
        self._stream = open(f"{self.path}.part", "w", encoding="utf-8")  # noqa: SIM115

    def write(self, row: dict[str, Any]) -> None:
        self._stream.write(json.dumps(row) + "\n")
        self._stream.flush()

    def complete(self) -> None:
        """All lines are on the disk, under the final name."""
        os.fsync(self._stream.fileno())
        self._stream.close()
        os.replace(f"{self.path}.part", self.path)

    def give_up(self) -> None:
        """Nothing half-written stays."""
        with contextlib.suppress(OSError):
            self._stream.close()
        with contextlib.suppress(OSError):
            os.unlink(f"{self.path}.part")
