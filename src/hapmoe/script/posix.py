"""POSIX regular expressions, basic and extended as GNU has them, on Python's matcher: leftmost, then longest."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import permutations
from typing import NamedTuple

from .patterns import CLASSES

__all__ = ["SED_ESCAPES", "Posix", "ambiguous", "compiled", "perl", "slow"]

_MOST_TRIES = 10**8
"""Steps of a matcher: about two seconds."""
# What GNU adds to POSIX: word characters, blanks, and the edges of words and of the text.
_GNU = {
    **{"w": r"\w", "W": r"\W", "s": r"\s", "S": r"\S", "b": r"\b", "B": r"\B"},
    **{"<": r"\b(?=\w)", ">": r"\b(?<=\w)", "`": r"\A", "'": r"\Z"},
}
SED_ESCAPES = {"n": "\n", "t": "\t", "f": "\f", "v": "\v", "r": "\r", "a": "\a"}
_INTERVAL = re.compile(r"(\d*)(?:(,)(\d*))?")
_LARGEST_REPEAT = 255  # RE_DUP_MAX of POSIX


class Posix(NamedTuple):
    """One expression. Python takes the first way that matches, POSIX the longest text from the leftmost place."""

    regex: re.Pattern[str]
    choosy: bool = False
    """Whether another way may match more text than the first."""
    doubtful: bool = False
    """Whether its groups may hold other text than Python's."""

    def search(self, text: str, pos: int = 0) -> re.Match[str] | None:
        match = self.regex.search(text, pos)
        while self.choosy and match and match.end() < len(text):
            most_left = len(text) - match.end() - 1
            pattern = f"(?:{self.regex.pattern})(?=.{{0,{most_left}}}\\Z)"
            longer = re.compile(pattern, self.regex.flags).match(text, match.start())
            if longer is None:
                break
            match = longer
        return match

    def every(self, text: str) -> Iterator[re.Match[str]]:
        """The matches from left to right."""
        pos = 0
        while pos <= len(text) and (match := self.search(text, pos)):
            yield match
            pos = match.end() + (match.start() == match.end())

    def replaced(self, text: str, by: Callable[[re.Match[str]], str], *, first: int, every: bool) -> tuple[str, bool]:
        """``text`` with its ``first``-th match (counted from 1) replaced, or ``every`` one from there on; and whether
        there was one. Nothing matches right behind a match."""
        out: list[str] = []
        pos, last, seen = 0, -1, 0
        while pos <= len(text) and (match := self.search(text, pos)):
            start, end = match.span()
            out.append(text[pos:start])
            if start < end or start > last:
                seen += 1
                out.append(by(match) if seen == first or (every and seen > first) else match.group())
                last = end
            pos = end
            if start == end:
                out.append(text[end : end + 1])
                pos = end + 1
            if seen >= first and not every:
                break
        return "".join(out) + text[pos:], seen >= first


@lru_cache(maxsize=500)
def compiled(pattern: str, *, extended: bool = True, nocase: bool = False, sed: bool = False) -> Posix:
    """``pattern`` as a matcher; ValueError where it is no expression, or one that is not followed (back references,
    collation). ``sed`` knows ``\\n`` and ``\\t``."""
    source, groups, doubtful = _Reader(pattern, extended=extended, sed=sed).whole()
    try:
        regex = re.compile(source, re.DOTALL | (re.IGNORECASE if nocase else 0))
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(str(error)) from None
    assert regex.groups == groups
    repeats = len(re.findall(r"[*+?{]", re.sub(r"\\.|\[[^\]]*\]|\(\?", "", source)))
    return Posix(regex, "|" in source or repeats > 1, doubtful or ambiguous(pattern))


def perl(pattern: str, *, nocase: bool = False) -> Posix:
    """An expression of Perl's (``grep -P``), as far as Python's mean the same; ValueError on others."""
    if "[[:" in pattern or "(?<" in pattern.replace("(?<=", "").replace("(?<!", ""):
        raise ValueError(pattern)
    try:
        return Posix(re.compile(pattern, re.ASCII | (re.IGNORECASE if nocase else 0)))
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(str(error)) from None


class _Reader:
    """Reads an expression once, from left to right."""

    def __init__(self, pattern: str, *, extended: bool, sed: bool) -> None:
        self.text, self.extended, self.sed = pattern, extended, sed
        self.pos = 0
        self.groups = 0
        self.doubtful = False

    def whole(self) -> tuple[str, int, bool]:
        source, _ = self.alternatives(depth=0)
        if self.pos < len(self.text):
            raise ValueError(f"a parenthesis too many in {self.text!r}")
        return source, self.groups, self.doubtful

    def operator(self) -> str:
        """The operator at this place, without the backslash that a basic expression has in front; "" where there is
        none."""
        text = self.text[self.pos : self.pos + 2]
        if not self.extended:
            return (
                text[1] if len(text) == 2 and text[0] == "\\" and text[1] in "(){}|+?" else text[:1] * (text[:1] == "*")
            )
        return text[:1] if text[:1] and text[:1] in "(){|*+?" else ""

    def take(self) -> None:
        self.pos += 2 if not self.extended and self.text[self.pos] == "\\" else 1

    def alternatives(self, depth: int) -> tuple[str, bool]:
        """Up to the end of a group or of the text: its source, and whether it matches nothing too."""
        if depth > 30:
            raise ValueError("groups are nested too deeply")
        options = []
        while True:
            options.append(self.sequence(depth))
            if self.operator() != "|":
                break
            self.take()
        return "|".join(source for source, _ in options), any(empty for _, empty in options)

    def sequence(self, depth: int) -> tuple[str, bool]:
        out: list[str] = []
        empty = True
        start = True
        while self.pos < len(self.text) and self.operator() not in ("|", ")"):
            source, nothing, repeatable = self.atom(depth, first=not out, start=start)
            start = not self.extended and source == r"\A"
            if self.operator() and self.operator() in "*+?{" and not start:
                if not repeatable:
                    raise ValueError(f"nothing to repeat in {self.text!r}")
                again = self.repeat()
                if nothing and source.startswith("("):
                    self.doubtful = True
                nothing = nothing or again in "*?" or again.startswith(("{0", "{,"))
                source += again
                if self.operator() and self.operator() in "*+?{":
                    raise ValueError("a repetition of a repetition is not followed")
            empty = empty and nothing
            out.append(source)
        return "".join(out), empty

    def repeat(self) -> str:
        operator = self.operator()
        self.take()
        if operator != "{":
            return operator
        match = _INTERVAL.match(self.text, self.pos)
        closing = "}" if self.extended else "\\}"
        assert match
        if not self.text.startswith(closing, match.end()) or not match.group():
            raise ValueError(f"no interval in {self.text!r}")
        self.pos = match.end() + len(closing)
        low, comma, high = match[1] or "0", match[2] or "", match[3] or ""
        if max(int(low), int(high or 0)) > _LARGEST_REPEAT:
            raise ValueError("too large an interval")
        return "{" + low + comma + high + "}"

    def atom(self, depth: int, *, first: bool, start: bool) -> tuple[str, bool, bool]:
        """One character, bracket, anchor or group: its source, whether it matches nothing, whether it may repeat.

        At the ``start`` of a basic expression, an anchor in front or not, a star is an ordinary character.
        """
        operator = self.operator()
        if operator == "(":
            self.take()
            self.groups += 1
            inner, empty = self.alternatives(depth + 1)
            if self.operator() != ")":
                raise ValueError(f"a parenthesis is not closed in {self.text!r}")
            self.take()
            return f"({inner})", empty, True
        if operator and not (operator == "*" and start and not self.extended):
            raise ValueError(f"nothing to repeat in {self.text!r}")
        char = self.text[self.pos]
        self.pos += 1
        if char == "\\":
            return self.escaped()
        if char == "[":
            return self.bracket(), False, True
        if char == ".":
            return ".", False, True
        if char == "^" and (self.extended or first):
            return r"\A", True, False
        if char == "$" and (self.extended or self.pos == len(self.text) or self.operator() in ("|", ")")):
            return r"\Z", True, False
        return re.escape(char), False, True

    def escaped(self) -> tuple[str, bool, bool]:
        char = self.text[self.pos : self.pos + 1]
        self.pos += 1
        if not char or char.isdigit() or (self.sed and char in "cdox"):
            raise ValueError(f"\\{char} in {self.text!r} is not followed")
        if char in _GNU:
            return _GNU[char], char in "bB<>`'", char in "wWsS"
        return re.escape(SED_ESCAPES.get(char, char) if self.sed else char), False, True

    def bracket(self) -> str:
        out = "["
        if self.text.startswith("^", self.pos):
            out += "^"
            self.pos += 1
        first = self.pos
        while self.pos < len(self.text):
            char = self.text[self.pos]
            if char == "]" and self.pos > first:
                self.pos += 1
                return out + "]"
            two = self.text[self.pos : self.pos + 2]
            named = re.compile(r"\[:(\w+):\]").match(self.text, self.pos)
            self.pos += 1
            if named:
                if named[1] not in CLASSES:
                    raise ValueError(f"no class {named[1]}")
                out += CLASSES[named[1]]
                self.pos = named.end()
            elif two in ("[.", "[=", "[:"):
                raise ValueError("collation is not followed")
            elif char == "\\" and self.sed and two[1:] in SED_ESCAPES:
                out += re.escape(SED_ESCAPES[two[1:]])
                self.pos += 1
            elif char == "-" and self.pos - 1 > first and not self.text.startswith("]", self.pos):
                out += "-"
            else:
                out += re.escape(char)
        raise ValueError(f"a bracket is not closed in {self.text!r}")


def slow(pattern: str, text: str) -> bool:
    """Whether a backtracking matcher might take for ever: a repeated group that itself repeats or chooses, or many
    repetitions in a row on a long line."""
    repeats = len(re.findall(r"[*+]|\{\d*,\d*\}", re.sub(r"\\.|\[[^\]]*\]", "", pattern)))
    if repeats > 1 and max(map(len, text.split("\n"))) ** repeats > _MOST_TRIES:
        return True
    return len(text) > 24 and bool(re.search(r"\([^()]*[+*|{][^()]*\)[+*{]|\)\)[+*{]", pattern))


def ambiguous(pattern: str) -> bool:
    """Whether alternatives may match at one place with different lengths, so that groups hold other text: POSIX takes
    the longest, Python the first.

    >>> [ambiguous(pattern) for pattern in ("a(bc|d)", "(a|ab)c", "x|y")]
    [False, True, False]
    """
    groups = re.findall(r"(?:^|\()([^()]*\|[^()]*)(?=\)|$)", pattern)
    if pattern.count("|") > sum(group.count("|") for group in groups):
        return True
    for group in groups:
        options = group.removeprefix("?:").split("|")
        if any(re.search(r"[^\w /,:=-]", option) for option in options):
            return True
        if any(one.startswith(other) for one, other in permutations(options, 2)):
            return True
    return False
