"""Small programs on lines of text: head, tail, sort, uniq, paste, rev, tac, and xargs that echoes."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from .output import unescape
from .streams import UNKNOWN, Result, input_text, joined, lines_of, split_args
from .values import MARK

if TYPE_CHECKING:
    from .interpret import Shell

__all__ = ["head", "paste", "rev", "sort", "tac", "tail", "uniq", "xargs"]

_MOST_WORDS_BYTES = 20_000
"""What surely fits in one command line of ``xargs``: its default is 128 KiB at most, the environment included."""


def head(shell: Shell, args: list[str], stdin: str | None, *, tail: bool = False) -> Result:
    args = [f"-n{args[0][1:]}", *args[1:]] if args and re.fullmatch(r"-\d+", args[0]) else args
    parsed = split_args(args, "nc")
    if parsed is None or "c" in parsed[0]:
        return UNKNOWN
    count = re.fullmatch(r"([-+]?)(\d+)", parsed[0].get("n", "10"))
    text = input_text(shell, parsed[1], stdin)
    if text is None or count is None or len(parsed[1]) > 1:
        return UNKNOWN
    if any(not unknown.single for unknown in shell.world.marks.of(text)):
        return UNKNOWN
    lines = re.findall(r"[^\n]*\n|[^\n]+", text)
    sign, number = count[1], int(count[2])
    if tail:
        first = max(number - 1, 0) if sign == "+" else max(len(lines) - number, 0)
        return "".join(lines[first:]), 0
    return "".join(lines[: max(len(lines) - number, 0) if sign == "-" else number]), 0


def tail(shell: Shell, args: list[str], stdin: str | None) -> Result:
    return head(shell, args, stdin, tail=True)


def uniq(shell: Shell, args: list[str], stdin: str | None) -> Result:
    text = input_text(shell, args, stdin)
    if text is None or len(args) > 1 or any(arg.startswith("-") for arg in args) or MARK.search(text):
        return UNKNOWN
    lines = lines_of(text)
    return joined([line for place, line in enumerate(lines) if not place or line != lines[place - 1]]), 0


def sort(shell: Shell, args: list[str], stdin: str | None) -> Result:
    parsed = split_args(args)
    if parsed is None or set(parsed[0]) - set("urn"):
        return UNKNOWN
    text = input_text(shell, parsed[1], stdin)
    if text is None or MARK.search(text):
        return UNKNOWN
    lines = lines_of(text)
    if "n" in parsed[0]:
        if not all(re.fullmatch(r"-?\d+", line) for line in lines):
            return UNKNOWN
        lines.sort(key=int)
    elif all(re.fullmatch(r"[a-z0-9]*", line) for line in lines):
        lines.sort()
    else:
        return UNKNOWN  # the order of other characters depends on the locale
    if "u" in parsed[0]:
        lines = list(dict.fromkeys(lines))
    return joined(lines[::-1] if "r" in parsed[0] else lines), 0


def xargs(shell: Shell, args: list[str], stdin: str | None) -> Result:
    """``xargs`` that echoes: words with one blank between, all in one line, a line each, or as their lines were."""
    each = args[:1] in (["-n1"], ["-L1"]) or args[:2] in (["-n", "1"], ["-L", "1"])
    by_line = each and args[0].startswith("-L")
    rest = args[(2 if args[0] in ("-n", "-L") else 1) if each else 0 :]
    if stdin is None or len(stdin) > _MOST_WORDS_BYTES or rest not in ([], ["echo"]) or MARK.search(stdin):
        return UNKNOWN
    if re.search(r"[^\S \t\n]|\\|\0", stdin) or (by_line and re.search(r"[ \t](\n|$)", stdin)):
        return UNKNOWN
    lines = [_unquoted(line) for line in stdin.split("\n")]
    known = [line for line in lines if line is not None]
    if len(known) < len(lines):
        return (
            None,
            1,
        )  # a quote that its line does not close; whether words before it are echoed depends on the version
    words = [word for line in known for word in line]
    calls = [line for line in known if line] if by_line else [[word] for word in words] if each else [words]
    if any(call and re.match(r"-[neE]+$|--(help|version)$", call[0]) for call in calls):
        return UNKNOWN
    return joined([" ".join(call) for call in calls or [[]]]), 0


def _unquoted(line: str) -> list[str] | None:
    """The words of a line of input to ``xargs``; None when a quote is not closed."""
    piece = r"""[^ \t"']+|"[^"]*"|'[^']*'"""
    if not re.fullmatch(rf"(?:[ \t]|{piece})*", line):
        return None
    words = re.findall(rf"(?:{piece})+", line)
    return [re.sub(r"""\"([^"]*)\"|'([^']*)'""", lambda quoted: quoted[1] or quoted[2] or "", word) for word in words]


def paste(shell: Shell, args: list[str], stdin: str | None) -> Result:
    parsed = split_args([arg for arg in args if arg != "-"], "d")
    if parsed is None or "s" not in parsed[0] or set(parsed[0]) - {"s", "d"} or len(parsed[1]) > 1:
        return UNKNOWN
    text, by = input_text(shell, parsed[1], stdin), unescape(parsed[0].get("d", "\t"))[0]
    if text is None or len(by) != 1 or any(not each.single for each in shell.world.marks.of(text)):
        return UNKNOWN
    return by.join(lines_of(text)) + "\n", 0


def rev(shell: Shell, args: list[str], stdin: str | None) -> Result:
    text = input_text(shell, args, stdin)
    if not text or MARK.search(text):
        return UNKNOWN
    return "\n".join(line[::-1] for line in text.split("\n")), 0


def tac(shell: Shell, args: list[str], stdin: str | None) -> Result:
    text = input_text(shell, args, stdin)
    known = text is not None and text.endswith("\n") and not MARK.search(text)
    return (joined(lines_of(text or "")[::-1]), 0) if known else UNKNOWN
