"""Shell patterns and POSIX regular expressions as Python ones."""

from __future__ import annotations

import re
from functools import lru_cache

__all__ = ["escape", "regex_of", "strip_prefix", "strip_suffix", "substitute", "translate", "translate_ere"]

_CLASSES = {
    "alpha": "a-zA-Z", "digit": "0-9", "alnum": "a-zA-Z0-9", "space": r"\s", "upper": "A-Z", "lower": "a-z", "blank": r" \t",
    "punct": r"!-/:-@\[-`{-~", "xdigit": "0-9A-Fa-f", "word": r"\w", "cntrl": r"\x00-\x1f", "print": r"\x20-\x7e",
    "graph": r"\x21-\x7e",
}


def escape(text: str) -> str:
    """``text`` as a pattern that matches only itself."""
    return re.sub(r"([\\*?\[\]()|!+@])", r"\\\1", text)


@lru_cache(maxsize=2000)
def translate(pattern: str) -> str:
    """A shell pattern (extended globs included) as a Python regular expression, not anchored."""
    out, pos = _translate(pattern, 0, "")
    del pos
    return out


def regex_of(pattern: str) -> re.Pattern[str]:
    return re.compile(translate(pattern), re.DOTALL)


def _translate(pattern: str, pos: int, stop: str) -> tuple[str, int]:
    out: list[str] = []
    while pos < len(pattern):
        char = pattern[pos]
        if stop and char in stop:
            return "".join(out), pos
        if char in "?*+@!" and pattern.startswith("(", pos + 1) and ")" in pattern[pos:]:
            piece, pos = _group(pattern, pos)
            out.append(piece)
            continue
        pos += 1
        if char == "*":
            if not out or out[-1] != ".*":
                out.append(".*")
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
    return "".join(out), pos


def _group(pattern: str, pos: int) -> tuple[str, int]:
    kind = pattern[pos]
    pos += 2
    options = []
    while True:
        piece, pos = _translate(pattern, pos, "|)")
        options.append(piece)
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
    if pattern[pos:pos + 1] in ("!", "^"):
        negated = True
        pos += 1
    out: list[str] = []
    first = True
    while pos < len(pattern):
        char = pattern[pos]
        if char == "]" and not first:
            return f"[{'^' if negated else ''}{''.join(out)}]", pos + 1
        first = False
        named = re.compile(r"\[:(\w+):\]").match(pattern, pos)
        if named:
            out.append(_CLASSES.get(named.group(1), ""))
            pos = named.end()
            continue
        if char == "\\" and pos + 1 < len(pattern):
            pos += 1
            out.append("\\" + pattern[pos])
        else:
            out.append("\\" + char if char in "\\[]^&~|" else char)
        pos += 1
    return re.escape("["), start


def translate_ere(pattern: str) -> str:
    """A POSIX extended regular expression as a Python one (back references and collation are not covered)."""
    def brackets(match: re.Match[str]) -> str:
        return "[" + re.sub(r"\[:(\w+):\]", lambda m: _CLASSES.get(m.group(1), ""), match.group(1)) + "]"

    return re.sub(r"\[(\^?\]?(?:\[:\w+:\]|[^\]])*)\]", brackets, pattern)


def strip_prefix(text: str, pattern: str, *, longest: bool) -> str:
    regex = regex_of(pattern)
    for end in (range(len(text), -1, -1) if longest else range(len(text) + 1)):
        if regex.fullmatch(text, 0, end):
            return text[end:]
    return text


def strip_suffix(text: str, pattern: str, *, longest: bool) -> str:
    regex = regex_of(pattern)
    for start in (range(len(text) + 1) if longest else range(len(text), -1, -1)):
        if regex.fullmatch(text, start):
            return text[:start]
    return text


def substitute(text: str, pattern: str, by: str, op: str) -> str:
    """``${text/pattern/by}`` and its variants ``//``, ``/#``, ``/%``: the longest match at the leftmost place."""
    regex = regex_of(pattern)
    out: list[str] = []
    pos = 0
    while pos <= len(text):
        ends = [end for end in range(len(text), pos, -1) if regex.fullmatch(text, pos, end)]
        anchored = [end for end in ends if end == len(text)] if op == "/%" else ends
        if anchored:
            out.append(by)
            pos = anchored[0]
            if op != "//":
                break
            continue
        if op == "/#":
            break
        out.append(text[pos:pos + 1])
        pos += 1
    return "".join(out) + text[pos:]
