"""Keys of arrays: the order in which bash lists those of an associative one, and those that it refuses."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from .control import Control, branch

if TYPE_CHECKING:
    from .interpret import Shell

__all__ = ["assoc_keys", "check_subscript", "pass_bad_key"]


def assoc_keys(items: Iterable[Any]) -> list[int | str]:
    """Keys of an associative array as bash 5.1 and later lists them: by hash, the newest of a bucket first.

    hash_string in bash's hashlib.c (FNV-1), 1024 buckets (assoc.h).
    """

    def bucket(key: int | str) -> int:
        value = 2166136261
        for byte in str(key).encode():
            value = (value * 16777619 & 0xFFFFFFFF) ^ byte
        return value & 1023

    return sorted(reversed(list(items)), key=bucket)


def check_subscript(shell: Shell, name: str, key: int | str | None) -> None:
    """A place before the first element, or an empty key: bash drops the line, and under ``set -e`` ends the script."""

    def bad() -> None:
        shell.world.notes.append(f"{shell.where()}: {name}[{key}]: bad array subscript")
        shell.state.status = 1
        raise Control("exit" if "errexit" in shell.state.options else "abort")

    if key == "" or (isinstance(key, int) and key < 0):
        bad()
    if isinstance(key, str) and shell.world.marks.emptiness(key) is None:  # perhaps an empty one
        branch(shell, shell.where(), [lambda: None, bad])


def pass_bad_key(shell: Shell, name: str, key: int | str | None) -> None:
    """A bad subscript that is read, or stands in a list: bash says so and goes on, but not under ``set -e``."""
    if "errexit" in shell.state.options:
        check_subscript(shell, name, key)
