"""Quantities: text with units on the way in, SI base units and bytes inside, short text on the way out.

Gb/s counts bits, GB/s bytes; GB is 10^9 bytes, GiB 2^30. A bare number where a unit belongs is refused.
"""

from __future__ import annotations

import re
from typing import Final

from hapmoe.errors import InputError

__all__ = [
    "DTYPE_BYTES",
    "GIB",
    "format_bytes",
    "format_count",
    "format_seconds",
    "parse_bandwidth",
    "parse_bytes",
    "parse_flop_rate",
    "parse_seconds",
]

GIB: Final = 2**30

DTYPE_BYTES: Final = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "fp4": 0.5}
"""Bytes per element of a stored tensor, by precision name."""

_PREFIX = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_TIME = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0}
_NUMBER = re.compile(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)\s*(.*?)\s*\Z")


def _split(text: object, where: str, example: str) -> tuple[float, str]:
    if isinstance(text, bool) or not isinstance(text, str):
        raise InputError(f"{text!r} has no unit", where=where, hint=f'write it with its unit, for example "{example}"')
    match = _NUMBER.match(text)
    if not match:
        raise InputError(f"{text!r} is not a quantity", where=where, hint=f'for example "{example}"')
    value, unit = float(match[1].replace("_", "")), match[2]
    if not unit:
        raise InputError(f"{text!r} has no unit", where=where, hint=f'write it with its unit, for example "{example}"')
    return value, unit


def _scale(prefix: str) -> float | None:
    return _PREFIX.get(prefix, _BINARY.get(prefix))


def parse_bytes(text: object, where: str = "", example: str = "80 GiB") -> int:
    """Bytes from ``"80 GiB"`` (2^30) or ``"80 GB"`` (10^9).

    >>> parse_bytes("4 GiB"), parse_bytes("80GB")
    (4294967296, 80000000000)
    """
    value, unit = _split(text, where, example)
    scale = _scale(unit[:-1]) if unit.endswith("B") else None
    if scale is None:
        raise InputError(
            f"{unit!r} is not a size", where=where, hint=f'sizes are in GiB (2^30) or GB (10^9): "{example}"'
        )
    return round(value * scale)


def parse_bandwidth(text: object, where: str = "", example: str = "400 Gb/s") -> float:
    """Bytes per second from ``"400 Gb/s"`` (bits) or ``"50 GB/s"`` (bytes).

    >>> parse_bandwidth("400 Gb/s") == parse_bandwidth("50 GB/s") == 50e9
    True
    """
    value, unit = _split(text, where, example)
    rate = re.fullmatch(r"(.*?)(?:/s|ps)", unit)
    if rate and rate[1].endswith(("B", "b")):
        scale = _scale(rate[1][:-1])
        if scale is not None and value > 0:
            return value * scale / (8 if rate[1].endswith("b") else 1)
    if rate and rate[1].endswith("bit") and value > 0:
        scale = _scale(rate[1][:-3])
        if scale is not None:
            return value * scale / 8
    if value <= 0:
        raise InputError(f"{text!r} is not above zero", where=where)
    raise InputError(f"{unit!r} is not a bandwidth", where=where, hint=f'Gb/s are bits, GB/s are bytes: "{example}"')


def parse_seconds(text: object, where: str = "", example: str = "5 us") -> float:
    """Seconds from ``"5 us"``.

    >>> parse_seconds("5 us")
    5e-06
    """
    value, unit = _split(text, where, example)
    if unit not in _TIME:
        raise InputError(f"{unit!r} is not a time", where=where, hint=f'ns, us, ms or s: "{example}"')
    return value * _TIME[unit]


def parse_flop_rate(text: object, where: str = "", example: str = "989 TFLOP/s") -> float:
    """FLOP/s (dense) from ``"989 TFLOP/s"`` or ``"989 TFLOPS"``.

    >>> parse_flop_rate("989 TFLOP/s")
    989000000000000.0
    """
    value, unit = _split(text, where, example)
    match = re.fullmatch(r"([kKMGTP]?)FLOP(?:/s|s|S|s/s)", unit)
    if not match or value <= 0:
        raise InputError(f"{text!r} is not a compute rate", where=where, hint=f'dense, for example "{example}"')
    return value * _PREFIX[match[1]]


def format_bytes(value: float) -> str:
    """``68.3 GiB``: three significant digits, binary units (what allocators report)."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(value) >= size:
            return f"{value / size:.3g} {unit}" if abs(value) < 1000 * size else f"{value / size:,.0f} {unit}"
    return f"{value:.0f} B"


def format_seconds(value: float) -> str:
    """``3.21 s``, ``12.4 ms``, ``5.0 us``."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(value) >= size:
            return f"{value / size:.3g} {unit}" if abs(value) < 1000 * size else f"{value / size:,.0f} {unit}"
    return f"{value * 1e9:.3g} ns"


def format_count(value: float) -> str:
    """``8.03 B``, ``329 M``: parameters and tokens."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g}"
