"""Brace expansion, done on a word's source as bash does it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from hapmoe.errors import InputError

from .syntax import Literal, Word

if TYPE_CHECKING:
    from .interpret import Shell

__all__ = ["brace_expand"]

_SEQUENCE = re.compile(r"(?:(-?\d+)\.\.(-?\d+)|([A-Za-z])\.\.([A-Za-z]))(?:\.\.(-?\d+))?")
_MOST = 20_000


class TooMany(Exception):
    """More words than a launch script can mean."""


def brace_expand(shell: Shell, word: Word) -> list[Word]:
    """The words that ``{a,b}`` and ``{1..3}`` make of ``word``; mostly ``word`` itself."""
    if not any(isinstance(part, Literal) and not part.quoted and "{" in part.text for part in word.parts):
        return [word]
    if word.source.count("{") > 200:
        raise InputError("too many braces in a word", where=shell.where(word.line))
    try:
        sources = _expand(word.source)
    except TooMany:
        raise InputError("a brace expansion gives too many words", where=shell.where(word.line)) from None
    if sources == [word.source]:
        return [word]
    return [made for source in sources if (made := shell.parse_word(source, word.line)) is not None]


def _skip_quoted(text: str, pos: int) -> int:
    """Behind the quoted or ``$`` group at ``pos``; ``pos`` itself when none is there."""
    char = text[pos]
    if char == "\\":
        return pos + 2
    if char in "'\"`":
        end = pos + 1
        while end < len(text) and text[end] != char:
            end += 2 if text[end] == "\\" and char != "'" else 1
        return end + 1
    if char == "$" and text[pos + 1 : pos + 2] in ("{", "("):
        opening = text[pos + 1]
        closing = {"{": "}", "(": ")"}[opening]
        level, end = 0, pos + 1
        while end < len(text):
            level += (text[end] == opening) - (text[end] == closing)
            end += 1
            if level == 0:
                break
        return end
    return pos


def _expand(text: str) -> list[str]:
    pos = 0
    while pos < len(text):
        after = _skip_quoted(text, pos)
        if after > pos:
            pos = after
            continue
        if text[pos] == "{":
            group = _group(text, pos)
            if group:
                pieces, end = group
                tails = _expand(text[end:])
                if len(pieces) * len(tails) > _MOST:
                    raise TooMany
                return [text[:pos] + piece + tail for piece in pieces for tail in tails]
        pos += 1
    return [text]


def _group(text: str, start: int) -> tuple[list[str], int] | None:
    """The alternatives of the brace group at ``start`` and where it ends; None when it is no brace expansion."""
    pieces: list[str] = []
    level, pos, piece_start = 0, start + 1, start + 1
    while pos < len(text):
        after = _skip_quoted(text, pos)
        if after > pos:
            pos = after
            continue
        char = text[pos]
        if char == "{":
            level += 1
        elif char == "}" and level:
            level -= 1
        elif char == "}":
            pieces.append(text[piece_start:pos])
            if len(pieces) > 1:
                return [each for piece in pieces for each in _expand(piece)], pos + 1
            sequence = _sequence(pieces[0])
            return (sequence, pos + 1) if sequence else None
        elif char == "," and not level:
            pieces.append(text[piece_start:pos])
            piece_start = pos + 1
        pos += 1
    return None


def _sequence(body: str) -> list[str] | None:
    match = _SEQUENCE.fullmatch(body)
    if not match:
        return None
    step = abs(int(match.group(5) or 1)) or 1
    if match.group(1) is None:
        first, last = ord(match.group(3)), ord(match.group(4))
        return [chr(code) for code in _range(first, last, step)]
    first, last = int(match.group(1)), int(match.group(2))
    if abs(last - first) // step > _MOST:
        raise TooMany
    width = max(len(match.group(1)), len(match.group(2))) if re.search(r"(^|\.|-)0\d", body) else 0
    return [f"{value:0{width}d}" for value in _range(first, last, step)]


def _range(first: int, last: int, step: int) -> range:
    return range(first, last + 1, step) if last >= first else range(first, last - 1, -step)
