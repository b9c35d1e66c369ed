"""``grep`` and ``sed`` in their simple forms."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from .patterns import slow_ere, translate_ere
from .streams import UNKNOWN, Result, input_text, joined, lines_of, split_args
from .values import MARK

if TYPE_CHECKING:
    from .interpret import Shell

__all__ = ["grep", "sed"]


def _basic_to_extended(pattern: str) -> str:
    """A basic regular expression as an extended one."""
    pattern = re.sub(r"\\([(){}+?|])|([(){}+?|])", lambda m: m.group(1) or "\\" + m.group(2), pattern)
    return re.sub(r"^\*", r"\\*", pattern)


def _compiled(pattern: str, *, extended: bool, flags: int = 0) -> re.Pattern[str] | None:
    try:
        return re.compile(translate_ere(pattern if extended else _basic_to_extended(pattern)), flags)
    except re.error:
        return None


def grep(shell: Shell, args: list[str], stdin: str | None) -> Result:
    parsed = split_args(args, "emA")
    if parsed is None or set(parsed[0]) - set("qEeivcowFPmsxr"):
        return UNKNOWN
    options, operands = parsed
    pattern = options["e"] if "e" in options else operands.pop(0) if operands else ""
    text = input_text(shell, operands, stdin)
    if text is None or MARK.search(text + pattern) or "r" in options:
        return UNKNOWN
    source = re.escape(pattern) if "F" in options else pattern
    regex = _compiled(
        source, extended=bool(options.keys() & {"E", "P", "F"}), flags=re.IGNORECASE if "i" in options else 0
    )
    if regex is None or "w" in options or "x" in options or slow_ere(source, text):
        return UNKNOWN
    found = [line for line in lines_of(text) if bool(regex.search(line)) != ("v" in options)]
    if options.get("m", "").isdigit():
        found = found[: int(options["m"])]
    status = 0 if found else 1
    if "q" in options:
        return "", status
    if "c" in options:
        return f"{len(found)}\n", status
    if "o" in options:
        found = [match.group() for line in found for match in regex.finditer(line) if match.group()]
    return joined(found), status


def sed(shell: Shell, args: list[str], stdin: str | None) -> Result:
    parsed = split_args(args, "e")
    if parsed is None or set(parsed[0]) - set("eEr"):
        return UNKNOWN
    options, operands = parsed
    program = options["e"] if "e" in options else operands.pop(0) if operands else ""
    text = input_text(shell, operands, stdin)
    if text is None or MARK.search(text + program):
        return UNKNOWN
    lines = lines_of(text)
    for command in _sed_commands(program):
        match = re.fullmatch(r"s(.)(.*)", command, re.DOTALL)
        pieces = re.split(rf"(?<!\\){re.escape(match.group(1))}", match.group(2)) if match else []
        if len(pieces) != 3 or set(pieces[2]) - set("gI"):
            return UNKNOWN
        regex = _compiled(
            pieces[0].replace("\\" + match.group(1), match.group(1)) if match else "",
            extended=bool(options.keys() & {"E", "r"}),
            flags=re.IGNORECASE if "I" in pieces[2] else 0,
        )
        if regex is None or slow_ere(regex.pattern, text):
            return UNKNOWN
        by = _sed_replacement(pieces[1], match.group(1) if match else "/")
        lines = [regex.sub(by, line, count=0 if "g" in pieces[2] else 1) for line in lines]
    return joined(lines), 0


def _sed_commands(program: str) -> list[str]:
    return [piece.strip() for piece in re.split(r";\s*(?=s[^\w\s])|\n", program) if piece.strip()]


def _sed_replacement(by: str, delimiter: str) -> str:
    by = by.replace("\\" + delimiter, delimiter)
    return re.sub(
        r"\\(\d)|\\n|\\(.)|(&)|(\\$)",
        lambda m: (
            rf"\g<{m.group(1)}>"
            if m.group(1)
            else r"\g<0>"
            if m.group(3)
            else "\n"
            if m.group(0) == "\\n"
            else (m.group(2) or "").replace("\\", r"\\")
        ),
        by,
    )
