"""Fields of the user's files, read and checked: mappings, words, counts and quantities with plausible bounds.

Every refusal is an ``InputError`` that names the field, shows the value briefly and says what would be right.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from hapmoe.errors import InputError
from hapmoe.units import parse_bandwidth, parse_seconds

__all__ = [
    "as_count",
    "as_list",
    "as_mapping",
    "as_quantity",
    "as_text",
    "check_keys",
    "closest",
    "counter",
    "join_or",
    "nic_bandwidth",
    "nic_latency",
    "one_of",
    "parse_watts",
    "power",
    "reader",
    "short",
    "show_bandwidth",
    "show_bytes",
    "show_flops",
    "show_rate",
    "show_seconds",
    "show_watts",
]


def as_mapping(value: object, where: str, allowed: Iterable[str]) -> dict[str, Any]:
    """``value`` as a mapping with text keys out of ``allowed``."""
    if not isinstance(value, dict):
        raise InputError(f"{short(value)} is not a mapping", where=where, hint=f"its keys: {', '.join(allowed)}")
    check_keys(value, allowed, where)
    return value


def check_keys(mapping: Mapping[Any, Any], allowed: Iterable[str], where: str) -> None:
    """Refuses a key outside ``allowed``, naming the closest one."""
    allowed = tuple(allowed)
    for key in mapping:
        if key not in allowed:
            raise InputError(f"unknown key {short(key)}", where=where, hint=closest(key, allowed))


def closest(word: object, known: Iterable[str]) -> str:
    """``did you mean nodes?``, or the list of what there is."""
    known = tuple(known)
    near = difflib.get_close_matches(str(word)[:100].lower(), known, 1, 0.6)
    return f"did you mean {near[0]}?" if near else f"one of {', '.join(known)}"


def one_of(value: object, known: tuple[str, ...], where: str) -> str:
    """``value`` in lower case, when it is one of ``known``."""
    if isinstance(value, str) and value.strip().lower() in known:
        return value.strip().lower()
    raise InputError(f"{short(value)} is not one of {', '.join(known)}", where=where)


def as_count(value: object, where: str, low: int, high: int) -> int:
    """A whole number within bounds; text, fractions and booleans are refused."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(f"{short(value)} is not a whole number", where=where)
    if not low <= value <= high:
        raise InputError(f"{short(value)} is outside {low} to {high:,}", where=where)
    return value


def as_quantity(
    parse: Callable[..., float],
    value: object,
    where: str,
    low: float,
    high: float,
    show: Callable[[float], str],
    example: str,
) -> float:
    """A quantity with its unit, within plausible bounds; out of bounds, the reading is shown."""
    if not isinstance(value, str) or len(value) > 60:
        hint = f'write it with its unit, for example "{example}"'
        raise InputError(f"{short(value)} has no unit", where=where, hint=hint)
    try:
        number = parse(value, where, example)
    except (OverflowError, ValueError):  # a number beyond what a float holds
        number = math.inf
    if not low <= number <= high:
        reading = show(number) if math.isfinite(number) else "more than any number"
        what = f"{short(value)} reads as {reading}, which is outside {show(low)} to {show(high)}"
        raise InputError(what, where=where, hint=f'for example "{example}"')
    return number


def show_bandwidth(bytes_per_s: float) -> str:
    """``3,200 Gb/s``: as network people count."""
    return f"{bytes_per_s * 8 / 1e9:,.10g} Gb/s"


def show_rate(bytes_per_s: float) -> str:
    """``3.35 TB/s`` or ``450 GB/s``."""
    return f"{bytes_per_s / 1e12:.4g} TB/s" if bytes_per_s >= 1e12 else f"{bytes_per_s / 1e9:.4g} GB/s"


def show_bytes(size: float) -> str:
    """``79.1 GiB``."""
    return f"{size / 2**30:.4g} GiB"


def show_seconds(seconds: float) -> str:
    """``1.9 us``."""
    return f"{seconds * 1e6:.4g} us"


def show_flops(rate: float) -> str:
    """``989.5 TFLOP/s``."""
    return f"{rate / 1e12:,.5g} TFLOP/s"


def show_watts(watts: float) -> str:
    """``700 W``."""
    return f"{watts:,.4g} W"


def parse_watts(text: object, where: str = "", example: str = "700 W") -> float:
    """Watts from ``"700 W"`` or ``"1.2 kW"``."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(k?)W\s*", text) if isinstance(text, str) else None
    if not match:
        hint = f'write it with its unit, for example "{example}"'
        raise InputError(f"{short(text)} is not a power", where=where, hint=hint)
    return float(match[1]) * (1000 if match[2] else 1)


def reader(
    parse: Callable[..., float], low: float, high: float, show: Callable[[float], str], example: str
) -> Callable[[object, str], float]:
    """A reader of one quantity, ``(value, where) -> number``."""
    return lambda value, where: as_quantity(parse, value, where, low, high, show, example)


def counter(high: int) -> Callable[[object, str], int]:
    """A reader of a whole number from 1 to ``high``."""
    return lambda value, where: as_count(value, where, 1, high)


nic_bandwidth: Final = reader(parse_bandwidth, 1e9 / 8, 3.2e12 / 8, show_bandwidth, "400 Gb/s")
nic_latency: Final = reader(parse_seconds, 1e-7, 0.1, show_seconds, "4 us")
power: Final = reader(parse_watts, 1, 100_000, show_watts, "700 W")


def as_list(value: object, where: str) -> list[Any]:
    """``value`` as a list."""
    if not isinstance(value, list):
        raise InputError(f"{short(value)} is not a list", where=where)
    return value


def as_text(value: object, where: str) -> str:
    """``value`` as text that is not blank."""
    if not isinstance(value, str) or not value.strip():
        raise InputError(f"{short(value)} is not text", where=where)
    return value.strip()


def short(value: object) -> str:
    """A value as shown in an error: never longer than a glance."""
    if isinstance(value, dict | list):
        return f"a {'mapping' if isinstance(value, dict) else 'list'} of {len(value)}"
    if isinstance(value, int) and abs(value) >= 10**20:
        return "a number of more than 20 digits"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def join_or(names: Iterable[str]) -> str:
    """``a, b or c``."""
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last
