"""``grep`` and ``sed`` in their simple forms."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from .posix import SED_ESCAPES, Posix, compiled, perl, slow
from .streams import UNKNOWN, Result, input_text, joined, lines_of, split_args
from .values import MARK

if TYPE_CHECKING:
    from .interpret import Shell

__all__ = ["grep", "sed"]

_MOST_OUTPUT = 2_000_000


_GREP_LONG = {
    **{"quiet": "q", "silent": "q", "extended-regexp": "E", "ignore-case": "i", "invert-match": "v", "count": "c"},
    **{"only-matching": "o", "word-regexp": "w", "fixed-strings": "F", "perl-regexp": "P", "no-messages": "s"},
    **{"line-regexp": "x", "no-filename": "h", "line-number": "n", "basic-regexp": "G"},
}


def grep(shell: Shell, args: list[str], stdin: str | None) -> Result:
    words = []
    for word in args:
        long, equals, value = word.removeprefix("--").partition("=")
        if word.startswith("--") and long in ("max-count", "regexp") and equals:
            words += ["-" + long[0].replace("r", "e"), value]
        elif not re.fullmatch(r"--colou?r(=\w+)?", word):
            words.append("-" + _GREP_LONG[long] if word.startswith("--") and long in _GREP_LONG else word)
    parsed = split_args(words, "emABC", joined="e")
    if parsed is None or set(parsed[0]) - set("qEeivcowFPGmsxhn"):
        return UNKNOWN
    options, operands = parsed
    pattern = options["e"] if "e" in options else operands.pop(0) if operands else ""
    text = input_text(shell, operands, stdin)
    if text is None or MARK.search(text + pattern) or (len(operands) > 1 and not options.keys() & {"h", "q"}):
        return UNKNOWN
    try:
        expression = _grep_pattern(pattern, options)
    except ValueError:
        return UNKNOWN
    if slow(expression.regex.pattern, text):
        return UNKNOWN
    found = [
        (number, line)
        for number, line in enumerate(lines_of(text), 1)
        if bool(expression.regex.search(line)) != ("v" in options)
    ]
    if "m" in options:
        found = found[: int(options["m"])] if options["m"].isdigit() else found
    status = 0 if found else 1
    if "q" in options:
        return "", status
    if "c" in options:
        return f"{len(found)}\n", status
    if "o" in options:
        found = [
            (number, match.group())
            for number, line in found
            for match in expression.every(line)
            if match.group() and "v" not in options
        ]
    return joined([f"{number}:{line}" if "n" in options else line for number, line in found]), status


def _grep_pattern(pattern: str, options: dict[str, str]) -> Posix:
    """The expression of ``grep``, whose lines are alternatives; ValueError on one that is not followed."""
    nocase = "i" in options
    if "P" in options:
        if options.keys() & {"w", "x"} or "\n" in pattern:
            raise ValueError(pattern)
        return perl(pattern, nocase=nocase)
    extended = bool(options.keys() & {"E", "F"})
    lines = [re.escape(line) if "F" in options else line for line in pattern.split("\n")]
    source = ("|" if extended else "\\|").join(lines)
    if "x" in options:
        source = f"^({source})$" if extended else f"^\\({source}\\)$"
    made = compiled(source, extended=extended, nocase=nocase)
    if "w" not in options:
        return made
    if made.regex.fullmatch("") or "o" in options:
        raise ValueError("where such words begin and end is not followed")
    return made._replace(regex=re.compile(rf"(?<!\w)(?:{made.regex.pattern})(?!\w)", made.regex.flags), choosy=True)


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
    if any(slow(each.regex.pattern, text) for command in commands for each in command.expressions):
        return UNKNOWN
    growth = 1
    for command in commands:
        growth *= 1 + len(command.by)
    lines = lines_of(text)
    if len(text) * growth > _MOST_OUTPUT and any("g" in command.flags for command in commands):
        return UNKNOWN
    out: list[str] = []
    ended = True
    for number, line in enumerate(lines, 1):
        made = _sed_line(commands, line, number, last=number == len(lines), quiet="n" in letters)
        ended = not made or number < len(lines) or text.endswith("\n")
        out += made
    result = joined(out) if ended else joined(out)[:-1]
    if "i" in letters:
        shell.write_file(operands[0], result)
        return "", 0
    return result, 0


class _Command(NamedTuple):
    low: int | Posix | None
    high: int | None
    """The lines it acts on: from ``low`` (0: the last one), or those that match it, to ``high``."""
    negated: bool
    verb: str
    expressions: tuple[Posix, ...]
    by: str
    """What an ``s`` puts in place of a match, for :meth:`re.Match.expand`."""
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
            pieces = re.compile(body + body + r"([gIip]*\d*[gIip]*)").match(program, pos + 1)
            if not pieces or (delimiter in "\\\n") or re.search(r"\\[LUluE]", pieces[2]):
                raise ValueError(program)
            flags = pieces[3].lower()
            expression = _sed_regex(pieces[1], delimiter, extended=extended, nocase="i" in flags)
            by = _sed_replacement(pieces[2], delimiter)
            used = [int(each) for each in re.findall(r"\\g<(\d)>", by)]
            if used and (max(used) > expression.regex.groups or (max(used) and expression.doubtful)):
                raise ValueError("a group that is not certain")
            found.append(expression)
            pos = pieces.end()
        elif verb not in ("d", "p"):
            raise ValueError(program)
        if program[pos : pos + 1].strip(" \t;\n"):
            raise ValueError(program)
        commands.append(_Command(low, high, bool(negation), verb, tuple(found), by, flags))
    return commands


def _sed_regex(pattern: str, delimiter: str, *, extended: bool, nocase: bool = False) -> Posix:
    if not pattern or ("\\" + delimiter in pattern and delimiter not in "/,:;#@%!=~-"):
        raise ValueError(pattern)
    return compiled(pattern.replace("\\" + delimiter, delimiter), extended=extended, nocase=nocase, sed=True)


def _sed_line(commands: list[_Command], line: str, number: int, *, last: bool, quiet: bool) -> list[str]:
    out: list[str] = []
    for command in commands:
        low, high = command.low, command.high
        if isinstance(low, Posix):
            chosen = low.regex.search(line) is not None
        elif high is not None:
            chosen = number == low or (low <= number and (high == 0 or number <= high)) if low else last
        else:
            chosen = low is None or (last if low == 0 else number == low)
        if chosen == command.negated:
            continue
        if command.verb == "d":
            return out
        changed = True
        if command.verb == "s":
            first = int(re.sub(r"\D", "", command.flags) or 1)
            line, changed = command.expressions[-1].replaced(
                line, _expander(command.by), first=first, every="g" in command.flags
            )
        if changed and (command.verb == "p" or "p" in command.flags):
            out.append(line)
    return out if quiet else [*out, line]


def _expander(by: str) -> Callable[[re.Match[str]], str]:
    return lambda match: match.expand(by) if "\\" in by else by


def _sed_replacement(by: str, delimiter: str) -> str:
    """The text that ``s`` puts in, for :meth:`re.Match.expand`."""

    def one(match: re.Match[str]) -> str:
        digit, char, whole = match.groups()
        if digit or whole:
            return rf"\g<{digit or 0}>"
        if char in "cdox" and char != delimiter:
            raise ValueError(by)
        text = char if char == delimiter else SED_ESCAPES.get(char, char)
        return text.replace("\\", r"\\")

    if by.endswith("\\") and not by.endswith("\\\\"):
        raise ValueError(by)
    return re.sub(r"\\(\d)|\\(.)|(&)", one, by, flags=re.DOTALL)
