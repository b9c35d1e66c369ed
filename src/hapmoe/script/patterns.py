"""Shell patterns as Python regular expressions."""

from __future__ import annotations

import re
from functools import lru_cache

from hapmoe.errors import InputError

__all__ = [
    "CLASSES",
    "escape",
    "matches",
    "regex_of",
    "strip_prefix",
    "strip_suffix",
    "substitute",
    "translate",
]

CLASSES = {
    "alpha": "a-zA-Z",
    "digit": "0-9",
    "alnum": "a-zA-Z0-9",
    "space": r"\s",
    "upper": "A-Z",
    "lower": "a-z",
    "blank": r" \t",
    "punct": r"!-/:-@\[-`{-~",
    "xdigit": "0-9A-Fa-f",
    "word": r"\w",
    "cntrl": r"\x00-\x1f",
    "print": r"\x20-\x7e",
    "graph": r"\x21-\x7e",
}

_MOST_TRIES = 10**8
"""Steps of a matcher: about two seconds."""
_EXTENDED = re.compile(r"[?*+@!]\(")


def escape(text: str) -> str:
    """``text`` as a pattern that matches only itself."""
    return re.sub(r"([\\*?\[\]()|!+@])", r"\\\1", text)


@lru_cache(maxsize=2000)
def translate(pattern: str, *, lazy: bool = False) -> str:
    """A shell pattern (extended globs included) as a Python regular expression, not anchored."""
    return "".join(_translate(pattern, 0, "", lazy=lazy)[0])


@lru_cache(maxsize=2000)
def regex_of(pattern: str, flags: int = re.DOTALL) -> re.Pattern[str]:
    """For ``fullmatch``. Between two stars the first match is as good as any, so nothing is tried twice."""
    pieces, _ = _translate(pattern, 0, "", lazy=False)
    if _EXTENDED.search(pattern):
        return re.compile("".join(pieces), flags)
    runs: list[list[str]] = [[]]
    for piece in pieces:
        if piece == ".*":
            runs.append([])
        else:
            runs[-1].append(piece)
    if len(runs) < 3:
        return re.compile("".join(pieces), flags)
    middle = "".join("(?>.*?" + "".join(run) + ")" for run in runs[1:-1])
    return re.compile("".join(runs[0]) + middle + ".*" + "".join(runs[-1]), flags)


def matches(text: str, pattern: str, *, nocase: bool = False) -> bool:
    """Whether all of ``text`` matches, with ``nocase`` in either case (``shopt -s nocasematch``)."""
    _bounded(text, pattern)
    return regex_of(pattern, re.DOTALL | re.IGNORECASE if nocase else re.DOTALL).fullmatch(text) is not None


def _bounded(text: str, pattern: str) -> None:
    """Refuse what a backtracking matcher could take for ever on."""
    if len(text) > 30 and re.search(r"[+*]\([^()]*[*|+?][^()]*\)", pattern):
        raise InputError("an extended pattern that may take for ever")
    if _EXTENDED.search(pattern) and (len(text) > 1000 or re.search(r"[+*]\(.*[+*]\(", pattern)):
        raise InputError("a nested or long extended pattern is not followed")
    if len(text) > 20_000 and "*" in pattern:
        raise InputError("a pattern is matched against a very long value")


def _translate(pattern: str, pos: int, stop: str, *, lazy: bool) -> tuple[list[str], int]:
    out: list[str] = []
    star = ".*?" if lazy else ".*"
    while pos < len(pattern):
        char = pattern[pos]
        if stop and char in stop:
            return out, pos
        if char in "?*+@!" and pattern.startswith("(", pos + 1) and ")" in pattern[pos:]:
            piece, pos = _group(pattern, pos)
            out.append(piece)
            continue
        pos += 1
        if char == "*":
            if not out or out[-1] != star:
                out.append(star)
        elif char == "?":
            out.append(".")
        elif char == "[":
            piece, pos = _bracket(pattern, pos)
            out.append(piece)
        elif char == "\\" and pos < len(pattern):
            out.append(re.escape(pattern[pos]))
            pos += 1
        else:
            out.append(re.escape(char))
    return out, pos


def _group(pattern: str, pos: int) -> tuple[str, int]:
    kind = pattern[pos]
    pos += 2
    options = []
    while True:
        pieces, pos = _translate(pattern, pos, "|)", lazy=False)
        options.append("".join(pieces))
        if pos >= len(pattern) or pattern[pos] == ")":
            pos += 1
            break
        pos += 1
    body = "(?:" + "|".join(options) + ")"
    if kind == "!":
        rest = translate(pattern[pos:])
        return f"(?!{body}{rest}\\Z).*?", pos
    return body + {"?": "?", "*": "*", "+": "+", "@": ""}[kind], pos


def _bracket(pattern: str, pos: int) -> tuple[str, int]:
    """A bracket expression; ``pos`` is behind the ``[``. Without its end the bracket is an ordinary character."""
    start, negated = pos, False
    if pattern[pos : pos + 1] in ("!", "^"):
        negated = True
        pos += 1
    out: list[str] = []
    first = True
    while pos < len(pattern):
        if pattern[pos] == "]" and not first:
            members = "".join(out)
            if not members:
                return "." if negated else "(?!)", pos + 1
            return f"[{'^' if negated else ''}{members}]", pos + 1
        first = False
        named = re.compile(r"\[:(\w+):\]").match(pattern, pos)
        if named:
            out.append(CLASSES.get(named.group(1), ""))
            pos = named.end()
            continue
        low, pos = _member(pattern, pos)
        if pattern.startswith("-", pos) and pos + 1 < len(pattern) and not re.match(r"\]|\[:", pattern[pos + 1 :]):
            high, pos = _member(pattern, pos + 1)
            if low <= high:  # a range that ends before it begins holds nothing
                out.append(f"{re.escape(low)}-{re.escape(high)}")
        else:
            out.append(re.escape(low))
    return re.escape("["), start


def _member(pattern: str, pos: int) -> tuple[str, int]:
    """One character of a bracket expression."""
    if pattern[pos] == "\\" and pos + 1 < len(pattern):
        pos += 1
    return pattern[pos], pos + 1


def _few_tries(text: str, pattern: str) -> None:
    """Refuse many stars on a long value, where each may end anywhere."""
    if pattern.count("*") > 1 and len(text) ** pattern.count("*") > _MOST_TRIES:
        raise InputError("a pattern of several stars is matched against a very long value")


def strip_prefix(text: str, pattern: str, *, longest: bool) -> str:
    _bounded(text, pattern)
    _few_tries(text, pattern)
    if _EXTENDED.search(pattern):
        regex = regex_of(pattern)
        for end in range(len(text), -1, -1) if longest else range(len(text) + 1):
            if regex.fullmatch(text, 0, end):
                return text[end:]
        return text
    match = re.compile(translate(pattern, lazy=not longest), re.DOTALL).match(text)
    return text[match.end() :] if match else text


def strip_suffix(text: str, pattern: str, *, longest: bool) -> str:
    _bounded(text, pattern)
    regex = regex_of(pattern)
    if "*" not in pattern and not _EXTENDED.search(pattern):
        start = len(text) - _width(pattern)
        return text[:start] if start >= 0 and regex.fullmatch(text, start) else text
    for start in range(len(text) + 1) if longest else range(len(text), -1, -1):
        if regex.fullmatch(text, start):
            return text[:start]
    return text


def _width(pattern: str) -> int:
    """How many characters a pattern without stars matches."""
    return len(_translate(pattern, 0, "", lazy=False)[0])


def substitute(text: str, pattern: str, by: str, op: str) -> str:
    """``${text/pattern/by}`` and its variants ``//``, ``/#``, ``/%``: the longest match at the leftmost place."""
    _bounded(text, pattern)
    _few_tries(text, pattern)
    if len(text) * (len(by) + 1) > _MOST_TRIES:
        raise InputError("a value grows beyond 2 MB")
    if not pattern:
        return by + text if op == "/#" else text + by if op == "/%" else text
    extended = bool(_EXTENDED.search(pattern))
    if not text:
        return by if regex_of(pattern).fullmatch("") else text
    greedy = re.compile(translate(pattern), re.DOTALL)
    if op == "/%":
        kept = strip_suffix(text, pattern, longest=True)
        return kept + by if len(kept) < len(text) else text

    def end_of_match(pos: int) -> int | None:
        if not extended:
            match = greedy.match(text, pos)
            return match.end() if match and match.end() > pos else None
        return next((end for end in range(len(text), pos, -1) if greedy.fullmatch(text, pos, end)), None)

    if op == "/#":
        end = end_of_match(0)
        return by + text[end:] if end is not None else text
    out: list[str] = []
    pos = 0
    while pos < len(text):
        end = end_of_match(pos)
        if end is None:
            out.append(text[pos])
            pos += 1
            continue
        out.append(by)
        pos = end
        if op == "/":
            break
    return "".join(out) + text[pos:]
