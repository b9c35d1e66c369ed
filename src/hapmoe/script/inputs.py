"""Reading script files, and splitting a line of input into variables."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hapmoe.errors import InputError

from .state import Var
from .values import MARK, Text, Unknown
from .variables import assign, scalar, secret

if TYPE_CHECKING:
    from .interpret import Shell

__all__ = ["mapfile", "read", "read_text"]

_LARGEST = 3_000_000


def read_text(path: Path, label: str, *, where: str = "") -> str:
    """The text of a shell script; InputError when it is none."""
    place = where or label
    try:
        if path.is_dir():
            raise InputError("is a folder, not a script" if not where else f"{label} is a folder", where=place)
        size = path.stat().st_size
        if size > _LARGEST:
            raise InputError(
                f"{size / 1e6:.1f} MB is too large for a launch script",
                where=place,
                hint="give the launch script itself",
            )
        raw = path.read_bytes()
    except FileNotFoundError:
        raise InputError("no such file", where=place) from None
    except (OSError, ValueError) as error:
        raise InputError(f"cannot be read ({getattr(error, 'strerror', None) or error})", where=place) from None
    if b"\0" in raw:
        raise InputError("is a binary file, not a shell script", where=place)
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise InputError("is not valid UTF-8", where=f"{label}:{line}", hint="convert it, e.g. with iconv") from None
    if "\r\n" in text:
        line = text[: text.index("\r\n")].count("\n") + 1
        raise InputError(
            "has Windows line ends (CRLF), which bash does not take",
            where=f"{label}:{line}",
            hint="convert it with dos2unix",
        )
    mark = MARK.search(text)
    if mark:
        raise InputError("holds a private-use character", where=f"{label}:{text[: mark.start()].count(chr(10)) + 1}")
    return text


def _put(shell: Shell, name: str, array: Var) -> None:
    """An array into the variable of this name, the nearest one."""
    if array.items:
        array = replace(array, items={key: secret(shell, name, text) for key, text in array.items.items()})
    found = shell.state.find(name)
    (found[0] if found else shell.state.scopes[0])[name] = array


def _split_into(shell: Shell, line: str, names: list[str], *, array: bool, whole: bool) -> None:
    """Split ``line`` at IFS into variables, the last of which takes the rest, or into an array."""
    ifs_value = scalar(shell, "IFS")
    ifs = ifs_value.text if ifs_value else " \t\n"
    blank = "".join(char for char in ifs if char in " \t\n")
    solid = "".join(char for char in ifs if char not in " \t\n")
    here = shell.where()
    if whole:
        assign(shell, names[0], None, Text(line, here))
        return
    if any(not each.single for each in shell.world.marks.of(line)) and (array or len(names) > 1):
        # where it splits is not known, so neither is what any variable gets
        mark = shell.world.marks.derive(line, "", "", here, single=False)
        for name in names:
            if array:
                _put(shell, name, Var(mark=mark))
            else:
                assign(shell, name, None, Text(mark, here))
        return
    text = line.strip(blank) if blank else line
    alternatives = []
    if solid:
        around = f"[{re.escape(blank)}]*" if blank else ""
        alternatives.append(f"{around}[{re.escape(solid)}]{around}")
    if blank:
        alternatives.append(f"[{re.escape(blank)}]+")
    separator = re.compile("|".join(alternatives)) if alternatives else None
    if array:
        pieces = separator.split(text) if separator and text else [text] if text else []
        if pieces and pieces[-1] == "":
            pieces.pop()
        _put(shell, names[0], Var(items={place: Text(piece, here) for place, piece in enumerate(pieces)}))
        return
    for place, name in enumerate(names):
        match = separator.search(text) if separator else None
        if place == len(names) - 1:
            if match and solid and match.end() == len(text) and match.group().strip(blank):
                text = text[: match.start()]
            assign(shell, name, None, Text(text, here))
        else:
            assign(shell, name, None, Text(text[: match.start()] if match else text, here))
            text = text[match.end() :] if match else ""


def _options(words: list[str], valued: str) -> tuple[dict[str, str], list[str]]:
    """The short options in front of ``words``, those in ``valued`` with their value, and the rest."""
    words, options = list(words), {}
    while words and words[0].startswith("-") and len(words[0]) > 1:
        letters = words.pop(0)[1:]
        while letters:
            letter, letters = letters[0], letters[1:]
            options[letter] = ""
            if letter in valued:
                options[letter], letters = letters or (words.pop(0) if words else ""), ""
    return options, words


def _descriptor(options: dict[str, str]) -> int:
    """The descriptor to read: ``-u``; one that is not known reads nothing that is known."""
    return int(options.get("u", "0")) if options.get("u", "0").isdigit() else -1


def _source(shell: Shell, fd: int) -> str | None:
    return shell.state.stdin if fd == 0 else shell.state.inputs.get(fd)


def _left(shell: Shell, fd: int, rest: str) -> None:
    if fd == 0:
        shell.state.stdin = rest
    else:
        shell.state.inputs = {**shell.state.inputs, fd: rest}


def read(shell: Shell, args: list[str]) -> None:
    """``read``: a line of input into variables."""
    options, words = _options(args, "adintNpu")
    raw, array, delimiter = "r" in options, options.get("a", ""), options.get("d", "\n")[:1]
    names = words or ["REPLY"]
    fd = _descriptor(options)
    stdin = _source(shell, fd)
    if stdin is None or MARK.search(options.get("n", "") + options.get("N", "")):
        for name in [array] if array else names:
            mark = shell.world.marks.mark(
                Unknown("text read from input", f"${name}", shell.where(), single=False, nonempty=False)
            )
            if array:
                _put(shell, name, Var(mark=mark))
            else:
                assign(shell, name, None, Text(mark, shell.where()))
        shell.state.status = None
        return
    if options.keys() & {"n", "N"} and not raw and "\\" in stdin:
        raise InputError(
            "read -n counts characters that backslashes escape, which is not followed", where=shell.where()
        )
    if "N" in options:
        count = int(options["N"]) if options["N"].isdigit() else 0
        line, found, rest = stdin[:count], stdin[:count][count - 1 :], stdin[count:]
        names = names[:1]
    else:
        line, found, rest = stdin.partition(delimiter) if delimiter else (stdin, "", "")
        if not raw and "\\" in line and delimiter != "\n":
            raise InputError("read -d of text with backslashes is not followed", where=shell.where(), hint="add -r")
        while not raw and found == "\n" and (len(line) - len(line.rstrip("\\"))) % 2:
            more, found, rest = rest.partition("\n")
            line = line[:-1] + more
        count = int(options["n"]) if options.get("n", "").isdigit() else len(line)
        if count < len(line):
            line, found, rest = line[:count], "\n", line[count:] + found + rest
    wild = "".join(mark for mark in MARK.findall(line) if not shell.world.marks.of(mark)[0].single)
    _left(shell, fd, wild + rest)  # what is not known may hold further lines, or none
    if not raw and "\\" in line:
        ifs = scalar(shell, "IFS")
        kept = re.findall(r"\\(.?)", line)  # bash does not split at a character that a backslash escapes
        if any(each in (ifs.text if ifs else " \t\n") or MARK.search(each) for each in kept):
            raise InputError("read of escaped separators is not followed", where=shell.where(), hint="add -r")
        line = re.sub(r"\\(.)", r"\1", line)
    _split_into(
        shell, line, [array] if array else names, array=bool(array), whole="N" in options or not (words or array)
    )
    shell.state.status = None if wild else 0 if found else 1


def mapfile(shell: Shell, args: list[str]) -> None:
    """``mapfile``: the lines of input into an array."""
    options, operands = _options(args, "dnOsuCc")
    name = operands[0] if operands else "MAPFILE"
    fd = _descriptor(options)
    stdin = _source(shell, fd)
    numbers = [options.get(letter) or "0" for letter in "nOs"]
    wild = stdin is None or any(not each.single for each in shell.world.marks.of(stdin))
    shell.state.status = 0
    if wild or "C" in options or MARK.search(options.get("d", "")) or not all(each.isdigit() for each in numbers):
        mark = (
            shell.world.marks.derive(stdin, "", "", shell.where(), single=False)
            if stdin and MARK.search(stdin)
            else shell.world.marks.mark(
                Unknown("lines read from input", f"${{{name}[@]}}", shell.where(), single=False, nonempty=False)
            )
        )
        _put(shell, name, Var(mark=mark))
        return
    assert stdin is not None
    most, origin, skipped = map(int, numbers)
    by = options.get("d", "\n")[:1]
    lines = stdin.split(by) if by else [stdin]  # NUL, which no text here holds
    ends = [by] * (len(lines) - 1) + [""]
    if lines[-1] == "":
        lines, ends = lines[:-1], ends[:-1]
    _left(
        shell,
        fd,
        "".join(map("".join, zip(lines[skipped + most :], ends[skipped + most :], strict=True))) if most else "",
    )
    chosen = slice(skipped, skipped + most if most else None)
    found = shell.state.find(name)
    items = dict(found[1].items or {}) if "O" in options and found else {}
    for place, (line, end) in enumerate(zip(lines[chosen], ends[chosen], strict=True)):
        items[origin + place] = Text(line if "t" in options else line + end, shell.where())
    _put(shell, name, Var(items=items))
