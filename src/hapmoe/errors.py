"""What can go wrong, as a tree.

    HapmoeError            shown as one line, no traceback
    ├── InputError         the user's file, field, script line or option is wrong (exit code 2)
    ├── DataMissing        no figure exists for what was asked, and none is invented (exit code 2)
    └── Unsupported        legal, but not something this version can run (exit code 2)

An infeasible job is not an error: it is an answer (``SearchResult.status``, exit code 1).
Anything that is not a ``HapmoeError`` is a bug of ours and keeps its traceback (exit code 70).
"""

from __future__ import annotations

__all__ = ["DataMissing", "HapmoeError", "InputError", "Unsupported"]


class HapmoeError(Exception):
    """Base of everything that is reported as one line."""

    exit_code = 2


class InputError(HapmoeError):
    """Something the user gave is wrong: ``where`` (file, field or line), ``what``, and what to do.

    >>> str(InputError("0 nodes", where="cluster.yaml: pools[0].nodes", hint="give at least 1"))
    'cluster.yaml: pools[0].nodes: 0 nodes; give at least 1'
    """

    def __init__(self, what: str, *, where: str = "", hint: str = "") -> None:
        self.what, self.where, self.hint = what, where, hint
        super().__init__((f"{where}: " if where else "") + what + (f"; {hint}" if hint else ""))


class DataMissing(HapmoeError):
    """No figure for this device, precision or collective; the nearest there is is named in the text."""


class Unsupported(HapmoeError):
    """A request that no back end of this version can run; the text says which rule and why."""
