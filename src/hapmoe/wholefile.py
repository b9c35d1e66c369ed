"""Files written whole or not at all: beside their place, flushed, then moved there by renaming."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from hapmoe.errors import InputError

__all__ = ["write_whole"]


def write_whole(path: str | os.PathLike[str], text: str, *, replace: bool) -> Path:
    """Write ``text`` as the file ``path``; returns its path.

    A crash, a full disk or a killed process leaves what was there, at most with a hidden temporary
    file beside it (``.NAME.*.part``). InputError where it cannot be written, or where it exists and
    is not to be replaced.
    """
    path = Path(path)
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(name, 0o666 & ~_umask())
            if replace:
                os.rename(name, path)
            else:
                os.link(name, path)  # unlike a rename, this never replaces what is there
        finally:
            Path(name).unlink(missing_ok=True)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # make the renaming itself last
        finally:
            os.close(folder)
    except FileExistsError:
        raise InputError("exists already", where=str(path), hint="choose another name") from None
    except OSError as error:
        raise InputError(f"cannot write: {error.strerror or error}", where=str(path)) from None
    return path


def _umask() -> int:
    """What the process takes off new files (reading it means setting it)."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
