"""The order in which bash lists the keys of an associative array."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

__all__ = ["assoc_keys"]


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
