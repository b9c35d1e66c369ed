"""``awk`` where it takes columns apart or calculates: one block that prints, with or without lines of input."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, Any

from .calculate import STEPS, calculate
from .streams import UNKNOWN, Result, input_text, joined, lines_of
from .values import MARK

if TYPE_CHECKING:
    from .interpret import Shell

__all__ = ["awk"]

_PROGRAM = re.compile(
    r"\s*(BEGIN)?\s*\{\s*(?:print(?!f)\s*(?P<items>.*?)|printf\s*\(?\s*\"(?P<format>[^\"\\%]*(?:%(?:d|s|\.\d+f|i|\.0f)(?:\\n)?[^\"\\%]*)?)\"\s*,(?P<value>.*?)\)?)\s*;?\s*\}\s*",
    re.DOTALL,
)
_WRONG = re.compile(r"^\s*[*%^]|([*%^]|(?<![-+])[-+])\s*$")
"""An expression that lacks its first or last number: a variable in it was empty. An error in every awk."""
_EXPRESSION = re.compile(r"(?:[\w.]+|[-+*/%^() \t])+")


def awk(shell: Shell, args: list[str], stdin: str | None) -> Result:
    options: dict[str, str] = {"F": " "}
    names: dict[str, Any] = {}
    words = list(args)
    while words and re.match(r"-[Fv]", words[0]):
        letter, value = words[0][1], words[0][2:] or (words[1] if len(words) > 1 else "")
        words = words[1:] if words[0][2:] else words[2:]
        name, equals, given = value.partition("=")
        if letter == "v" and equals and re.fullmatch(r"-?[\d.]+(?:[eE][-+]?\d+)?", given):
            names[name] = float(given)
        elif letter == "v":
            return UNKNOWN
        else:
            options["F"] = value
    program = _PROGRAM.fullmatch(words.pop(0)) if words and not words[0].startswith("-") else None
    if program is None or MARK.search(program.group()):
        return UNKNOWN
    if program.group(1) and _WRONG.search(program["value"] or program["items"] or "1"):
        return "", 2
    try:
        if program.group(1):
            return _begun(program, names)
        return _columns(shell, program, options["F"], input_text(shell, words, stdin))
    except (SyntaxError, ValueError, ArithmeticError, TypeError, LookupError, RecursionError):
        return UNKNOWN


def _begun(program: re.Match[str], names: dict[str, Any]) -> Result:
    """``BEGIN { print 3 * 4 }``."""
    if program["format"] is None and not program["items"].strip():
        return "\n", 0  # the whole line, of which there is none
    if program["format"] is None:
        return _shown(_number(program["items"], names)) + "\n", 0
    value = _number(program["value"], names)
    form = program["format"].replace("\\n", "\n")
    if "%" not in form:
        return UNKNOWN
    if whole := re.search(r"%[dis]", form):
        _shown(value)
        return form % (_shown(value) if whole.group() == "%s" else int(value)), 0
    return form % value, 0


def _number(text: str, names: dict[str, Any]) -> float:
    """An arithmetic expression in awk's numbers, which are all floating point."""
    text = text.strip()
    if not _EXPRESSION.fullmatch(text) or "//" in text or "**" in text or re.search(r"[\w)]\s+[\w(]", text):
        raise ValueError(text)
    tree = ast.parse(text.replace("^", "**"), mode="eval").body
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            node.value = float(node.value)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) and "-" in text:
            raise ValueError(text)
    return float(calculate(tree, {STEPS: [0], **names}))


def _shown(value: float) -> str:
    """As awk prints a number: whole ones as such, others with ``OFMT`` (%.6g)."""
    if abs(value) >= 2**31:
        raise ValueError("awks differ in how they print large numbers")
    return str(int(value)) if value == int(value) else f"{value:.6g}"


def _columns(shell: Shell, program: re.Match[str], separator: str, text: str | None) -> Result:
    """``{ print $1, $NF }``."""
    items = program["items"]
    if items is None or text is None or MARK.search(text):
        return UNKNOWN
    if separator != " " and not re.fullmatch(r"[^\\.*?+|()\[\]{}^$]", separator):
        return UNKNOWN
    parts = re.findall(r'\$(\d+|NF)|"([^"\\]*)"|(,)|(\S)', items)
    if any(other for *_, other in parts):
        return UNKNOWN
    out = []
    for line in lines_of(text):
        fields = line.split() if separator == " " else line.split(separator)

        def one(part: tuple[str, str, str, str], line: str = line, fields: list[str] = fields) -> str:
            column, literal, comma, _ = part
            if comma:
                return " "
            if not column:
                return literal
            place = len(fields) if column == "NF" else int(column)
            return line if place == 0 else fields[place - 1] if place <= len(fields) else ""

        out.append("".join(map(one, parts)) if parts else line)
    return joined(out), 0
