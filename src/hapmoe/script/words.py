"""Expanding words: parameters, substitutions, splitting, braces, and file patterns."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from hapmoe.errors import InputError

from .arithmetic import evaluate
from .braces import brace_expand
from .params import expand_param
from .patterns import escape
from .syntax import Arith, CommandSub, DoubleQuoted, Literal, Param, Part, ProcessSub, Word
from .values import MARK, Text, Unknown
from .variables import read_number, scalar, write_number

if TYPE_CHECKING:
    from .interpret import Shell

__all__ = ["Fragment", "fields", "fragments", "pattern_of", "text_of", "with_tilde"]

_GLOB = re.compile(r"[*?]|\[[^\]]*\]")


class Fragment(NamedTuple):
    """A piece of an expansion: ``kind`` is literal, quoted, expanded (splits when unquoted) or break (a new field)."""

    kind: str
    text: str
    where: str


def fragments(
    shell: Shell, parts: tuple[Part, ...], where: str, *, quoted: bool = False, split: bool = False
) -> list[Fragment]:
    """The pieces of ``parts``; ``split`` when their literals split too, as in an unquoted ``${x:-a b}``."""
    out: list[Fragment] = []
    for part in parts:
        if isinstance(part, Literal):
            kind = "quoted" if part.quoted or quoted else "expanded" if split else "literal"
            out.append(Fragment(kind, part.text, where))
        elif isinstance(part, DoubleQuoted):
            inner = fragments(shell, part.parts, where, quoted=True)
            if not inner and any(_may_vanish(each) for each in part.parts):
                continue
            out += inner or [Fragment("quoted", "", where)]
        elif isinstance(part, Param):
            out += [Fragment(*each) for each in expand_param(shell, part, where, quoted=quoted)]
        elif isinstance(part, CommandSub):
            out.append(Fragment("quoted" if quoted else "expanded", shell.capture(part), where))
        elif isinstance(part, Arith):
            out.append(Fragment("quoted" if quoted else "expanded", _arith(shell, part, where), where))
        else:
            out.append(Fragment("quoted", _process(shell, part), where))
    return out


def _may_vanish(part: Part) -> bool:
    """``"$@"`` and ``"${a[@]}"`` give no word at all when there is nothing in them."""
    return isinstance(part, Param) and (part.name == "@" or part.index == "@")


def _arith(shell: Shell, part: Arith, where: str) -> str:
    text = "".join(each.text for each in fragments(shell, part.parts, where, quoted=True))
    value = evaluate(text, lambda n, i: read_number(shell, n, i), lambda n, i, v: write_number(shell, n, i, v))
    branch = next((u.branch for u in shell.world.marks.of(text) if u.branch), "") if value is None else ""
    return shell.number_text(
        value, part.source, branch=branch or (shell.branch_in_names(text) if value is None else "")
    )


def _process(shell: Shell, part: ProcessSub) -> str:
    """A file name whose content is what the command prints."""
    name = f"/dev/fd/{63 + len(shell.state.files)}"
    if part.reads:
        shell.state.files[name] = shell.capture_body(part.body, part.source, strip=False)
    return name


def with_tilde(shell: Shell, parts: tuple[Part, ...], *, assignment: bool = False) -> tuple[Part, ...]:
    def home(text: str) -> list[Part] | None:
        match = re.match(r"~([\w.-]*|\+)(?=/|:|$)", text)
        if not match:
            return None
        value = scalar(shell, {"": "HOME", "+": "PWD"}.get(match.group(1), "HOME"))
        if match.group(1) not in ("", "+"):
            value = Text(shell.world.marks.mark(Unknown("a user's home directory", match.group(), shell.where())))
        return [Literal(value.text if value else "", quoted=True), Literal(text[match.end() :])]

    first = parts[0] if parts else None
    if isinstance(first, Literal) and not first.quoted and first.text.startswith("~"):
        if first.text == "~" and len(parts) > 1 and isinstance(parts[1], Literal | DoubleQuoted):
            return parts
        replaced = home(first.text)
        if replaced:
            parts = (*replaced, *parts[1:])
    if assignment:
        out: list[Part] = []
        for part in parts:
            if isinstance(part, Literal) and not part.quoted and ":~" in part.text:
                head, *tails = part.text.split(":~")
                out.append(Literal(head))
                for tail in tails:
                    out += [Literal(":"), *(home("~" + tail) or [Literal("~" + tail)])]
            else:
                out.append(part)
        parts = tuple(out)
    return parts


def text_of(shell: Shell, word: Word, *, assignment: bool = False) -> Text:
    """``word`` as one string: no splitting, no file patterns (assignments, ``case``, ``[[ ]]``, redirections)."""
    where = shell.where(word.line)
    parts = word.parts
    if (
        len(parts) == 1
        and isinstance(parts[0], Literal)
        and not parts[0].text.startswith("~")
        and ":~" not in parts[0].text
    ):
        return Text(parts[0].text, where)
    splitting, shell.splitting = shell.splitting, False
    got = fragments(shell, with_tilde(shell, parts, assignment=assignment), where)
    shell.splitting = splitting
    text = shell.world.joined((each.text for each in got), where)
    filled = [each for each in got if each.text]
    return Text(text, filled[0].where if len(filled) == 1 else where)


def pattern_of(shell: Shell, word: Word) -> str:
    """``word`` as a pattern in which quoted characters match only themselves."""
    got = fragments(shell, with_tilde(shell, word.parts), shell.where(word.line))
    return "".join(escape(each.text) if each.kind == "quoted" else each.text for each in got)


def fields(shell: Shell, word: Word) -> list[Text]:
    """The words that ``word`` becomes on a command line."""
    out: list[Text] = []
    for each in brace_expand(shell, word):
        parts = each.parts
        if (
            len(parts) == 1
            and isinstance(parts[0], Literal)
            and not MARK.search(parts[0].text)
            and (parts[0].quoted or not (_GLOB.search(parts[0].text) or parts[0].text.startswith("~")))
        ):
            out.append(Text(parts[0].text, shell.where(word.line)))
            continue
        splitting, shell.splitting = shell.splitting, True
        got = fragments(
            shell,
            with_tilde(shell, parts, assignment=bool(re.match(r"[A-Za-z_]\w*=", each.source))),
            shell.where(word.line),
        )
        shell.splitting = splitting
        out += _split(shell, got, shell.where(word.line))
    return out


def _split(shell: Shell, got: list[Fragment], where: str) -> list[Text]:
    size = sum(80 + len(each.text) for each in got)
    if size > 2000:
        shell.world.step(where, size // 400)
    ifs = _separators(shell) if any(each.kind == "expanded" for each in got) else ""
    out: list[Text] = []
    current: list[Fragment] = []

    def flush() -> None:
        if current:
            out.extend(_finished(shell, current, where))
            current.clear()

    for each in got:
        if each.kind == "break":
            flush()
        elif each.kind != "expanded":
            current.append(each)
        elif not (ifs and any(char in ifs for char in each.text)):
            if each.text:
                current.append(each)
        else:
            pieces = _pieces(each.text, ifs, bool(current))
            shell.world.step(where, len(pieces) // 8)
            for piece, ends in pieces:
                if piece is not None:
                    current.append(each._replace(text=piece))
                if ends:
                    flush()
    flush()
    return out


def _separators(shell: Shell) -> str:
    value = scalar(shell, "IFS")
    if value is None:
        return " \t\n"
    if MARK.search(value.text):
        raise InputError("IFS is not known", where=shell.where())
    return value.text


def _pieces(text: str, ifs: str, started: bool) -> list[tuple[str | None, bool]]:
    """``(piece or None, whether a field ends behind it)``."""
    blank = "".join(char for char in ifs if char in " \t\n")
    solid = "".join(char for char in ifs if char not in " \t\n")
    if not solid:
        out: list[tuple[str | None, bool]] = []
        if text[0] in blank and started:
            out.append((None, True))
        words = re.split(f"[{re.escape(blank)}]+", text.strip(blank))
        out += [(word, True) for word in words if word]
        if out and text[-1] not in blank:
            out[-1] = (out[-1][0], False)
        return out
    around = f"[{re.escape(blank)}]*" if blank else ""
    inner = f"{around}[{re.escape(solid)}]{around}" + (f"|[{re.escape(blank)}]+" if blank else "")
    out = []
    rest = text if started else text.lstrip(blank) if blank else text
    while rest:
        match = re.search(inner, rest)
        if not match:
            out.append((rest, False))
            break
        piece = rest[: match.start()]
        out.append((piece if piece or any(char in solid for char in match.group()) else None, True))
        rest = rest[match.end() :]
    return out


def _finished(shell: Shell, current: list[Fragment], where: str) -> list[Text]:
    """One field, or the files it matches when it holds an unquoted pattern."""
    text = shell.world.joined((each.text for each in current), where)
    filled = [each for each in current if each.text]
    place = filled[0].where if len(filled) == 1 else where
    active = "".join(each.text if each.kind != "quoted" else "\0" * len(each.text) for each in current)
    text = "".join(_spread(shell, each) for each in current)
    if _GLOB.search(active) and "noglob" not in shell.state.options:
        return shell.files_matching(text, active, place)
    return [Text(text, place)]


def _spread(shell: Shell, piece: Fragment) -> str:
    """The text of ``piece``, where unquoted unknowns that may hold blanks are marked as any number of words."""
    if piece.kind == "quoted" or not MARK.search(piece.text):
        return piece.text

    def one(match: re.Match[str]) -> str:
        unknown = shell.world.marks.of(match.group())[0]
        return match.group() if unknown.single else shell.world.marks.mark(replace(unknown, spread=True))

    return MARK.sub(one, piece.text)
