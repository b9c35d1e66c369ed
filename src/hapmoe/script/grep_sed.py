"""``grep`` and ``sed`` in their simple forms."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from .patterns import ambiguous_ere, slow_ere, translate_ere
from .streams import UNKNOWN, Result, input_text, joined, lines_of, split_args
from .values import MARK

if TYPE_CHECKING:
    from .interpret import Shell

__all__ = ["grep", "sed"]

_MOST_OUTPUT = 2_000_000


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
    if "o" in options and ambiguous_ere(regex.pattern):
        return UNKNOWN
    if "o" in options:
        found = [match.group() for line in found for match in regex.finditer(line) if match.group()]
    return joined(found), status


def sed(shell: Shell, args: list[str], stdin: str | None) -> Result:
    programs: list[str] = []
    operands: list[str] = []
    letters = ""
    words = list(args)
    while words:
        word = words.pop(0)
        if word in ("-e", "--expression"):
            programs += [words.pop(0)] if words else []
        elif word.startswith("--expression="):
            programs.append(word.partition("=")[2])
        elif re.fullmatch(r"-[nEri]+", word):
            letters += word[1:]
        elif word.startswith("-") and word != "-":
            return UNKNOWN
        else:
            operands.append(word)
    if not programs and operands:
        programs.append(operands.pop(0))
    program = "\n".join(programs)
    text = input_text(shell, operands, stdin)
    if text is None or MARK.search(text + program) or ("i" in letters and len(operands) != 1):
        return UNKNOWN
    try:
        commands = _sed_program(program, extended=bool(set("Er") & set(letters)))
    except (ValueError, re.error):
        return UNKNOWN
    if any(slow_ere(regex.pattern, text) for command in commands for regex in command.regexes):
        return UNKNOWN
    growth = 1
    for command in commands:
        growth *= 1 + len(command.by)
    lines = lines_of(text)
    if len(text) * growth > _MOST_OUTPUT and any("g" in command.flags for command in commands):
        return UNKNOWN
    out: list[str] = []
    for number, line in enumerate(lines, 1):
        out += _sed_line(commands, line, number, last=number == len(lines), quiet="n" in letters)
    if "i" in letters:
        shell.write_file(operands[0], joined(out))
        return "", 0
    return joined(out), 0


class _Command(NamedTuple):
    low: int | re.Pattern[str] | None
    high: int | None
    """The lines it acts on: from ``low`` (0: the last one), or those that match it, to ``high``."""
    negated: bool
    verb: str
    regexes: tuple[re.Pattern[str], ...]
    by: str
    flags: str


_ADDRESS = re.compile(r"\s*(?:(\d+|\$)(?:,(\d+|\$))?|/((?:[^/\\\n]|\\.)*)/)?\s*(!?)\s*")


def _sed_program(program: str, *, extended: bool) -> list[_Command]:
    """The commands ``s``, ``d`` and ``p``; ValueError on any other."""
    commands = []
    pos = 0
    while pos < len(program):
        if program[pos] in "; \t\n":
            pos += 1
            continue
        match = _ADDRESS.match(program, pos)
        assert match
        first, second, pattern, negation = match.groups()
        found = [_sed_regex(pattern, "/", extended=extended)] if pattern else []
        low = found[0] if found else None if first is None else 0 if first == "$" else int(first)
        high = None if second is None else 0 if second == "$" else int(second)
        verb, pos = program[match.end() : match.end() + 1], match.end() + 1
        by = flags = ""
        if verb == "s" and pos < len(program):
            delimiter = program[pos]
            body = rf"((?:[^{re.escape(delimiter)}\\\n]|\\[^\n])*){re.escape(delimiter)}"
            pieces = re.compile(body + body + r"([gIp]*)").match(program, pos + 1)
            if not pieces or (delimiter in "\\\n") or re.search(r"\\[LUluE]", pieces[2]):
                raise ValueError(program)
            flags = pieces[3]
            regex = _sed_regex(pieces[1], delimiter, extended=extended, nocase="I" in flags)
            if ambiguous_ere(regex.pattern):
                raise ValueError("the longest of several matches")
            found.append(regex)
            by = _sed_replacement(pieces[2], delimiter)
            pos = pieces.end()
        elif verb not in ("d", "p"):
            raise ValueError(program)
        if program[pos : pos + 1].strip(" \t;\n"):
            raise ValueError(program)
        commands.append(_Command(low, high, bool(negation), verb, tuple(found), by, flags))
    return commands


def _sed_regex(pattern: str, delimiter: str, *, extended: bool, nocase: bool = False) -> re.Pattern[str]:
    source = pattern.replace("\\" + delimiter, delimiter)
    regex = _compiled(source, extended=extended, flags=re.IGNORECASE if nocase else 0)
    if regex is None or not pattern:
        raise ValueError(pattern)
    return regex


def _sed_line(commands: list[_Command], line: str, number: int, *, last: bool, quiet: bool) -> list[str]:
    out: list[str] = []
    for command in commands:
        low, high = command.low, command.high
        if isinstance(low, re.Pattern):
            chosen = bool(low.search(line))
        elif high is not None:
            chosen = number == low or (low <= number and (high == 0 or number <= high)) if low else last
        else:
            chosen = low is None or (last if low == 0 else number == low)
        if chosen == command.negated:
            continue
        if command.verb == "d":
            return out
        changed = 1
        if command.verb == "s":
            line, changed = command.regexes[-1].subn(command.by, line, count=0 if "g" in command.flags else 1)
        if changed and (command.verb == "p" or "p" in command.flags):
            out.append(line)
    return out if quiet else [*out, line]


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
