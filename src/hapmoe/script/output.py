"""What ``echo`` and ``printf`` print."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from .values import MARK

if TYPE_CHECKING:
    from .interpret import Shell

__all__ = ["echo", "printf", "unescape"]

_ESCAPES = {
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "\\": "\\",
    "a": "\a",
    "b": "\b",
    "f": "\f",
    "v": "\v",
    "e": "\x1b",
    '"': '"',
}


def unescape(text: str) -> tuple[str, bool]:
    """Backslash escapes done, and whether ``\\c`` ended the output."""
    out: list[str] = []
    pos = 0
    while pos < len(text):
        char = text[pos]
        pos += 1
        if char != "\\" or pos >= len(text):
            out.append(char)
            continue
        code = re.compile(
            r"(?:x|u|U)((?<=x)[0-9a-fA-F]{1,2}|(?<=u)[0-9a-fA-F]{1,4}|(?<=U)[0-9a-fA-F]{1,8})|0?([0-7]{1,3})"
        ).match(text, pos)
        if code:
            value = int(code.group(1), 16) if code.group(1) else int(code.group(2), 8)
            out.append(chr(value) if value < 0xD800 else "\ufffd")
            pos = code.end()
        elif text[pos] == "c":
            return "".join(out), True
        else:
            out.append(_ESCAPES.get(text[pos], "\\" + text[pos]))
            pos += 1
    return "".join(out), False


def echo(args: list[str]) -> str:
    newline, escapes = True, False
    while args and re.fullmatch(r"-[neE]+", args[0]):
        newline = newline and "n" not in args[0]
        escapes = "e" in args[0] or (escapes and "E" not in args[0])
        args = args[1:]
    text, ended = unescape(" ".join(args)) if escapes else (" ".join(args), False)
    return text if ended or not newline else text + "\n"


def printf(shell: Shell, args: list[str]) -> str:
    """The output of ``printf``; formats are reused until the arguments are used up."""
    template, values = args[0], list(args[1:])
    out: list[str] = []
    while True:
        before = len(values)
        out.append(_printf_once(shell, template, values))
        if not values or len(values) == before:
            return "".join(out)


def _printf_once(shell: Shell, template: str, values: list[str]) -> str:
    def one(match: re.Match[str]) -> str:
        flags, width, precision, kind = match.groups()
        if kind == "%":
            return "%"
        width = values.pop(0) if width == "*" and values else width
        value = values.pop(0) if values else ""
        if int(width or 0) > 10_000 or (precision and int(precision[1:] or 0) > 1000):
            raise ValueError("a very wide field")
        if MARK.search(value):
            return value if not width else shell.world.marks.derive(value, "", "", shell.where())
        if kind in "diouxX":
            number = _c_number(value)
            body = {"d": "d", "i": "d", "o": "o", "u": "d", "x": "x", "X": "X"}[kind]
            return ("%" + flags + width + (precision or "") + body) % number
        if kind in "fFeEgG":
            return ("%" + flags + width + (precision or "") + kind) % float(value or 0)
        if kind == "q":
            return _quoted(value)
        if kind == "b":
            value = unescape(value)[0]
        value = value[:1] if kind == "c" else value
        return ("%" + flags + width + (precision or "") + "s") % value

    if re.search(r"(?<!%)(?:%%)*%[-\d]*\(", template):
        raise ValueError("a date")
    pieces = re.split(r"(%[-+ 0#]*(?:\*|\d*)(?:\.\d*)?[diouxXfFeEgGsbcq%])", template)
    out: list[str] = []
    for piece in pieces:
        match = re.fullmatch(r"%([-+ 0#]*)(\*|\d*)(\.\d*)?([diouxXfFeEgGsbcq%])", piece)
        if match:
            out.append(one(match))
            continue
        out.append(unescape(piece)[0])
    return "".join(out)


_ANSI_C = {"\n": "n", "\t": "t", "\r": "r", "\a": "a", "\b": "b", "\f": "f", "\v": "v", "\x1b": "E"}


def _quoted(text: str) -> str:
    """``text`` as ``printf %q`` quotes it: with backslashes, or as ``$'...'`` where it holds control characters."""
    if re.search(r"[\x00-\x1f\x7f]", text):

        def escaped(match: re.Match[str]) -> str:
            char = match.group()
            return "\\" + (_ANSI_C.get(char) or (char if char in "'\\" else f"{ord(char):03o}"))

        return "$'" + re.sub(r"[\x00-\x1f\x7f'\\]", escaped, text) + "'"
    return re.sub(r"[ '\"\\|&;()<>!{}*\[\]?^$`,]|(?:^|(?<=[:=]))~|^#", r"\\\g<0>", text) or "''"


def _c_number(text: str) -> int:
    text = text.strip()
    if text[:1] in "'\"" and text:
        return ord(text[1:2] or "\0")
    match = re.match(r"[-+]?(?:0[xX][0-9a-fA-F]+|\d+)", text)
    if not match:
        return 0
    digits = match.group()
    return (
        int(digits, 16)
        if "x" in digits.lower()
        else int(digits, 8)
        if re.fullmatch(r"[-+]?0[0-7]+", digits)
        else int(digits)
    )
