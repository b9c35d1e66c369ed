"""Puts the files of a launch on disk: all of them, or none."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path, PurePosixPath

from hapmoe.errors import InputError

__all__ = ["write_files"]

OURS = {
    *("report.html", "trace.json", "__pycache__"),
    *("launch.sh", "launch.sbatch", "launch-one.sbatch", "jobset.yaml", "launch_nemo.py", "flagscale", "galvatron"),
    *("hapmoe_runtime", "runtime.json"),
}
"""What other targets, the report and Python leave in a folder of ours."""


def write_files(directory: str | os.PathLike[str], files: dict[str, str], *, force: bool = False) -> Path:
    """Write ``files`` (relative path -> text) as the whole content of ``directory``; returns its path.

    They are written beside it, flushed, and moved into place by renaming, so that a crash or a full
    disk leaves what was there. A folder that holds anything is replaced only with ``force``, and
    only if it is one that we wrote (its plan.json has a schema) with nothing of the user's in it;
    scripts (``.sh``) are made executable. InputError in one line for all that goes wrong.
    """
    target = Path(directory)
    where = str(target)
    try:
        _refuse_foreign(target, files, force=force, where=where)
        target.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        try:
            new = staging / "new"
            for name, text in files.items():
                _write(new, name, text)
            if target.is_dir() and any(target.iterdir()):
                target.rename(staging / "old")
            try:
                new.rename(target)
            except OSError:
                if (staging / "old").exists():
                    (staging / "old").rename(target)
                raise
            _flush(target.parent)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    except OSError as error:
        raise InputError(
            f"cannot write: {error.strerror or error}", where=where, hint="nothing was changed; choose another --out"
        ) from error
    return target


def _refuse_foreign(target: Path, files: dict[str, str], *, force: bool, where: str) -> None:
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise InputError("exists and is not a folder", where=where, hint="choose another --out")
    if not target.exists():
        return
    present = {path.name for path in target.iterdir()}
    if not present:
        return
    if not _is_ours(target):
        raise InputError("is not empty and not a plan of hapmoe", where=where, hint="choose another --out")
    ours = {PurePosixPath(name).parts[0] for name in files} | OURS
    if foreign := sorted(present - ours):
        raise InputError(f"holds {foreign[0]!r}, which hapmoe did not write", where=where, hint="choose another --out")
    if not force:
        raise InputError("holds a plan already", where=where, hint="--force replaces it (host names in hosts.tsv too)")


def _is_ours(target: Path) -> bool:
    try:
        plan = json.loads((target / "plan.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(plan, dict) and "schema" in plan and "stages" in plan


def _write(root: Path, name: str, text: str) -> None:
    relative = PurePosixPath(name)
    assert not relative.is_absolute() and ".." not in relative.parts, name
    path = root / relative
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="\n") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    path.chmod(0o755 if path.suffix == ".sh" or path.name == "entry.py" else 0o644)


def _flush(folder: Path) -> None:
    """Make the renaming itself last."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
