"""``getopt``, the program of util-linux: sorts and quotes the arguments of a script for ``eval set --``."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from .streams import UNKNOWN, Result
from .values import MARK

if TYPE_CHECKING:
    from .interpret import Shell

__all__ = ["getopt"]

_OWN = {"o": "options", "l": "longoptions", "n": "name", "q": "quiet", "a": "alternative", "u": "unquoted"}
_NEEDS = "oln"


def getopt(shell: Shell, args: list[str], stdin: str | None) -> Result:
    """``getopt -o ab: --long all,base: -- "$@"`` in its own form (getopt(1)); the old one, whose output is not
    quoted, is not followed."""
    own: dict[str, list[str]] = {}
    words = list(args)
    while words and words[0].startswith("-") and words[0] != "-":
        word = words.pop(0)
        if word == "--":
            break
        name, equals, value = word.partition("=")
        if word.startswith("--"):
            found = [letter for letter, full in _OWN.items() if full.startswith(name[2:])]
            if len(found) != 1:
                return UNKNOWN
            letter = found[0]
        else:
            letter, value, equals = word[1], word[2:], word[2:]
            if letter not in _NEEDS and value:
                return UNKNOWN
        if letter not in _OWN:
            return UNKNOWN
        if letter in _NEEDS and not equals:
            if not words:
                return UNKNOWN
            value = words.pop(0)
        own.setdefault(letter, []).append(value)
    if "o" not in own or "a" in own or "u" in own or MARK.search("".join((*own["o"], *own.get("l", ())))):
        return UNKNOWN
    short, long = own["o"][-1], re.split(r"[,\s]+", ",".join(own.get("l", ())))
    if short.startswith("-"):
        return UNKNOWN
    return _sorted(words, short, {name.rstrip(":"): name.count(":") for name in long if name})


def _sorted(words: list[str], short: str, long: dict[str, int]) -> Result:
    """The options with their values, ``--``, and the rest, each value quoted; 1 where one is wrong."""
    letters = {match[1]: len(match[2]) for match in re.finditer(r"([^:])(:{0,2})", short.lstrip("+"))}
    out: list[str] = []
    rest: list[str] = []
    status = 0
    pending = list(words)
    while pending:
        word = pending.pop(0)
        if word == "--":
            break
        if MARK.match(word) or (word.startswith("-") and MARK.search(word.partition("=")[0])):
            return UNKNOWN  # may be an option
        if not word.startswith("-") or word == "-":
            rest.append(word)
            if short.startswith("+"):
                break
            continue
        options = [word] if word.startswith("--") else list(word[1:])
        while options:
            option = options.pop(0)
            name, equals, value = option.partition("=") if option.startswith("--") else (f"-{option}", "", "")
            if option.startswith("--"):
                fitting = [full for full in long if full.startswith(name[2:])]
                fitting = [name[2:]] if name[2:] in long else fitting
                takes = long[fitting[0]] if len(fitting) == 1 else None
                name = f"--{fitting[0]}" if fitting else name
            else:
                takes = letters.get(option)
                if takes and options:
                    value, equals, options = "".join(options), "=", []
            if takes is None or (equals and not takes) or (takes == 1 and not equals and not pending):
                status = 1
                continue
            if takes == 1 and not equals:
                value = pending.pop(0)
            out += [name, _quoted(value)] if takes else [name]
    return " " + " ".join([*out, "--", *map(_quoted, rest + pending)]) + "\n", status


def _quoted(word: str) -> str:
    return "'" + word.replace("'", "'\\''") + "'"
