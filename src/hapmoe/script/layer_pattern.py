"""Per-layer patterns such as ``([0]*3+[1]*58)``: a Python list expression, evaluated without Python.

Megatron allows digits and ``[ ] ( ) + * ,`` and nothing else, no spaces either (arguments.py:241-253).
"""

from __future__ import annotations

import re

from hapmoe.errors import InputError

__all__ = ["every_nth", "read_pattern"]

_TOKEN = re.compile(r"\d+|[\[\]()+*,]")
_LONGEST = 10_000
_DEEPEST = 100

_Value = int | list[int]


def every_nth(step: int, num_layers: int) -> tuple[bool, ...]:
    """Expert layers at 0, step, 2*step … (core/models/gpt/gpt_layer_specs.py:645)."""
    return tuple(layer % step == 0 for layer in range(num_layers))


def read_pattern(text: str, *, flag: str, where: str = "") -> int | tuple[int, ...]:
    """The value of a frequency flag: a number, or one number per layer.

    Raises InputError where Megatron would.

    >>> read_pattern("([0]*2+[1]*3)*2", flag="--moe-layer-freq")
    (0, 0, 1, 1, 1, 0, 0, 1, 1, 1)
    >>> read_pattern("2", flag="--moe-layer-freq")
    2
    """

    def bad(why: str) -> InputError:
        quoted = text[:1] in ("'", '"') or text[-1:] in ("'", '"')
        hint = "the quotes arrive as part of the value, and Megatron refuses them" if quoted else "e.g. ([0]*3+[1]*58)"
        return InputError(f"{flag} {text}: {why}", where=where, hint=hint)

    if re.fullmatch(r"-\d{1,6}", text):  # a frequency, which Megatron reads with int()
        return int(text)
    words = _TOKEN.findall(text)
    if not words or "".join(words) != text:
        raise bad("only digits and [ ] ( ) + * , are allowed")
    if words.count("(") > _DEEPEST or len(words) > _LONGEST:
        raise bad("too many layers")
    try:
        value, rest = _sum(words)
    except ValueError as error:
        raise bad(str(error)) from None
    if rest:
        raise bad(f"unexpected {rest[0]!r}")
    return value if isinstance(value, int) else tuple(value)


def _sum(words: list[str]) -> tuple[_Value, list[str]]:
    total, words = _product(words)
    while words[:1] == ["+"]:
        term, words = _product(words[1:])
        total = _add(total, term)
    return total, words


def _product(words: list[str]) -> tuple[_Value, list[str]]:
    total, words = _atom(words)
    while words[:1] == ["*"]:
        factor, words = _atom(words[1:])
        total = _times(total, factor)
    return total, words


def _atom(words: list[str]) -> tuple[_Value, list[str]]:
    if not words:
        raise ValueError("it ends too early")
    first, words = words[0], words[1:]
    if first.isdigit():
        return int(first), words
    if first == "(":
        value, words = _sum(words)
        return value, _after(")", words)
    if first == "[":
        return _items(words)
    raise ValueError(f"unexpected {first!r}")


def _items(words: list[str]) -> tuple[_Value, list[str]]:
    items: list[int] = []
    while words[:1] != ["]"]:
        value, words = _sum(words)
        if not isinstance(value, int):
            raise ValueError("a list inside a list")
        items.append(value)
        if words[:1] != [","]:
            break
        words = words[1:]
    return items, _after("]", words)


def _after(word: str, words: list[str]) -> list[str]:
    if words[:1] != [word]:
        raise ValueError(f"{word!r} is missing")
    return words[1:]


def _add(left: _Value, right: _Value) -> _Value:
    if isinstance(left, int) and isinstance(right, int):
        return left + right
    if isinstance(left, list) and isinstance(right, list):
        return left + right
    raise ValueError("a number and a list cannot be added")


def _times(left: _Value, right: _Value) -> _Value:
    if isinstance(left, int) and isinstance(right, int):
        if left * right > _LONGEST:
            raise ValueError("too many layers")
        return left * right
    if isinstance(left, list) and isinstance(right, list):
        raise ValueError("two lists cannot be multiplied")
    items, times = (left, right) if isinstance(left, list) else (right, left)
    assert isinstance(items, list) and isinstance(times, int)
    if len(items) * times > _LONGEST:
        raise ValueError("too many layers")
    return items * times
