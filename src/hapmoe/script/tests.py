"""Conditions: ``[ ]``, ``test`` and ``[[ ]]``, each True, False or not known."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from hapmoe.errors import InputError

from .arithmetic import ArithmeticError_
from .patterns import matches
from .posix import compiled, slow
from .state import Var
from .syntax import Test
from .values import MARK, Text, Unknown
from .variables import elements, number, resolve, scalar
from .words import Fragment, fragments, pattern_of, text_of

if TYPE_CHECKING:
    from .interpret import Shell

__all__ = ["bracket", "conditional"]

_FILE_TESTS = frozenset("abcdefghkprstuwxGLNOS")
_INTEGER = {
    "-eq": lambda a, b: a == b,
    "-ne": lambda a, b: a != b,
    "-lt": lambda a, b: a < b,
    "-le": lambda a, b: a <= b,
    "-gt": lambda a, b: a > b,
    "-ge": lambda a, b: a >= b,
}
_BINARY = frozenset((*_INTEGER, "=", "==", "!=", "<", ">", "-nt", "-ot", "-ef"))
_SPECIAL = frozenset("\\^$.|?*+()[]{}")


class BadTest(Exception):
    """The words are no test; bash says so and goes on with status 2."""


def conditional(shell: Shell, test: Test) -> bool | None:
    """The value of a ``[[ ]]`` expression."""
    if test.op == "not":
        return _not(conditional(shell, test.tests[0]))
    if test.op in ("and", "or"):
        left = conditional(shell, test.tests[0])
        if left is (test.op == "or"):
            return left
        right = conditional(shell, test.tests[1])
        return right if left is not None else (right if right is (test.op == "or") else None)
    if test.op == "word":
        return _not(shell.world.marks.emptiness(text_of(shell, test.words[0]).text))
    shell.world.missing = ""
    first = text_of(shell, test.words[0]).text
    if len(test.words) == 1:
        return _unary(shell, test.op, first)
    if test.op in ("=", "==", "!="):
        second = text_of(shell, test.words[1]).text
        _no_missing(shell, first, second)
        result = _matches(shell, first, pattern_of(shell, test.words[1]), second)
        return result if test.op != "!=" else _not(result)
    if test.op == "=~":
        _no_missing(shell, first, "x")
        return _regex(shell, first, test)
    second = text_of(shell, test.words[1]).text
    return _compare(shell, first, test.op, second, arithmetic=True)


def _not(value: bool | None) -> bool | None:
    return None if value is None else not value


def _no_missing(shell: Shell, first: str, second: str) -> None:
    """A script called with no arguments at all must not have its way chosen by one (other than by its absence)."""
    name, shell.world.missing = shell.world.missing, ""
    if name and not shell.world.arguments_given and first and second != first and not shell.calls:
        raise InputError(
            f"a condition reads argument {name}, which is not given",
            where=shell.where(),
            hint=f"give the script's arguments ({name} at least)",
        )
    if name and not shell.world.arguments_given and not shell.calls and second and not first:
        raise InputError(
            f"a condition compares argument {name}, which is not given",
            where=shell.where(),
            hint=f"give the script's arguments ({name} at least)",
        )


def _matches(shell: Shell, text: str, pattern: str, plain: str) -> bool | None:
    if MARK.search(text) or MARK.search(plain):
        if "nocasematch" in shell.state.options:
            return None
        return _equal(shell, text, plain) if not re.search(r"[*?\[]", pattern) else None
    return matches(text, pattern, nocase="nocasematch" in shell.state.options)


def _equal(shell: Shell, left: str, right: str) -> bool | None:
    """Whether two strings are equal; unknown pieces leave it open unless the known ends already differ."""
    marks = shell.world.marks
    unknowns = marks.of(left) + marks.of(right)
    if not unknowns:
        return left == right
    if left == right and all(each.stable and not each.branch for each in unknowns):
        return True
    for text, other in ((left, right), (right, left)):
        if not other and marks.emptiness(text) is False:
            return False
    heads = [MARK.split(side)[0] for side in (left, right)]
    tails = [MARK.split(side)[-1] for side in (left, right)]
    short = min(map(len, heads))
    if heads[0][:short] != heads[1][:short]:
        return False
    short = min(map(len, tails))
    if short and tails[0][-short:] != tails[1][-short:]:
        return False
    return None


def _regex_source(pieces: list[Fragment]) -> str:
    """The expression that bash hands on: a quoted character matches itself, within brackets it stands as it is."""
    out: list[str] = []
    opened = -1  # how many characters stood there when the bracket opened
    for piece in pieces:
        quoted = piece.kind == "quoted"
        for char in piece.text:
            inside = opened >= 0
            if inside and char == "]" and out[opened + 1 :] not in ([], ["^"]):
                opened = -1
            elif not inside and char == "[" and not quoted and out[-1:] != ["\\"]:
                opened = len(out)
            out.append("\\" + char if quoted and not inside and char in _SPECIAL else char)
    return "".join(out)


def _regex(shell: Shell, text: str, test: Test) -> bool | None:
    pattern = _regex_source(fragments(shell, test.words[1].parts, shell.where()))
    if slow(pattern, text):
        raise InputError("a regular expression that may take for ever", where=shell.where())
    if MARK.search(text + pattern):
        shell.state.scopes[0]["BASH_REMATCH"] = Var(
            mark=shell.world.marks.derive(text + pattern, "", "", shell.where(), single=False)
        )
        return None
    try:
        expression = compiled(pattern, nocase="nocasematch" in shell.state.options)
    except ValueError as error:
        raise InputError(f"the regular expression {pattern!r} is not understood", where=shell.where()) from error
    if "\n" in text and r"\A" in expression.regex.pattern.lstrip("(")[2:]:
        raise InputError("a regular expression with ^ in its middle is matched to lines", where=shell.where())
    match = expression.search(text)
    groups: dict[int | str, Text] = {}
    if match and expression.doubtful:
        mark = Unknown("what the longest of several matches is", "", shell.where(), single=False, nonempty=False)
        shell.state.scopes[0]["BASH_REMATCH"] = Var(mark=shell.world.marks.mark(mark))
        return True
    if match:
        found = (match.group(0), *match.groups())
        groups = {place: Text(group or "", shell.where()) for place, group in enumerate(found)}
    shell.state.scopes[0]["BASH_REMATCH"] = Var(items=groups)
    return match is not None


def _unary(shell: Shell, op: str, text: str) -> bool | None:
    if op in ("-z", "-n"):
        empty = shell.world.marks.emptiness(text)
        return empty if op == "-z" else _not(empty)
    if op == "-v":
        return _is_set(shell, text)
    if op == "-o":
        return text in shell.state.options
    if op == "-R":
        found = shell.state.find(text)
        return bool(found and found[1].ref)
    if op[1] in _FILE_TESTS and text == "":
        return False
    if op in ("-f", "-d", "-e", "-a", "-s", "-r"):
        return shell.exists(text, op)
    return None


def _is_set(shell: Shell, text: str) -> bool | None:
    if MARK.search(text):
        return None
    match = re.fullmatch(r"([A-Za-z_]\w*)(?:\[(.*)\])?", text)
    if not match:
        return False
    name, index = match.groups()
    if index in ("@", "*"):
        values, mark = elements(shell, name)
        return None if mark else bool(values)
    if index == "":
        return False
    found = shell.state.find(resolve(shell, name)[0])
    if found and found[1].mark:
        return None
    return scalar(shell, name, index) is not None


def _compare(shell: Shell, left: str, op: str, right: str, *, arithmetic: bool) -> bool | None:
    if op in _INTEGER:
        _no_missing(shell, left, right)
        if MARK.search(left + right):
            return None
        try:
            numbers = [number(shell, side) if arithmetic else _integer(side) for side in (left, right)]
        except ArithmeticError_ as error:  # inside [[ ]] the comparison is then false
            shell.world.notes.append(f"{shell.where()}: {error}")
            return False
        if None in numbers:
            return None
        return bool(_INTEGER[op](numbers[0], numbers[1]))
    if op in ("=", "==", "!="):
        _no_missing(shell, left, right)
        same = _equal(shell, left, right)
        return same if op != "!=" else _not(same)
    if op in ("<", ">"):
        if MARK.search(left + right):
            return None
        return left < right if op == "<" else left > right
    return None


def _integer(text: str) -> int:
    match = re.fullmatch(r"\s*([-+]?\d+)\s*", text, re.ASCII)
    if not match:
        raise BadTest(f"{text!r} is no integer")
    return int(match.group(1))


def bracket(shell: Shell, args: list[str]) -> bool | None:
    """The value of ``[ args ]``; raises :class:`BadTest` where bash reports an error."""
    if any(unknown.spread for arg in args for unknown in shell.world.marks.of(arg)):
        return None
    value, rest = _or(shell, args) if len(args) > 4 or _has_logic(args) else (_short(shell, args), [])
    if rest:
        raise BadTest("too many arguments")
    return value


def _has_logic(args: list[str]) -> bool:
    return (len(args) == 4 and args[0] != "!") or (
        len(args) > 2
        and any(arg in ("-a", "-o") for arg in args[1:-1])
        and args[1] not in _BINARY
        and args[0] != "!"
        and len(args) > 3
    )


def _short(shell: Shell, args: list[str]) -> bool | None:
    """POSIX: what one to four words mean depends on their number."""
    if not args:
        return False
    if len(args) == 1:
        return _not(shell.world.marks.emptiness(args[0]))
    if len(args) == 2:
        if args[0] == "!":
            return _not(_short(shell, args[1:]))
        if re.fullmatch(r"-[a-zA-Z]", args[0]):
            return _unary(shell, args[0], args[1])
        raise BadTest("unary operator expected")
    if len(args) == 3:
        if args[1] in _BINARY:
            return _compare(shell, args[0], args[1], args[2], arithmetic=False)
        if args[1] in ("-a", "-o"):
            sides = [_short(shell, [args[0]]), _short(shell, [args[2]])]
            return _logic(args[1], sides[0], sides[1])
        if args[0] == "!":
            return _not(_short(shell, args[1:]))
        if args[0] == "(" and args[2] == ")":
            return _short(shell, [args[1]])
        raise BadTest("binary operator expected")
    if args[0] == "!":
        return _not(_short(shell, args[1:]))
    raise BadTest("too many arguments")


def _logic(op: str, left: bool | None, right: bool | None) -> bool | None:
    decisive = op == "-o"
    if decisive in (left, right):
        return decisive
    return None if None in (left, right) else not decisive


def _or(shell: Shell, args: list[str]) -> tuple[bool | None, list[str]]:
    value, rest = _and(shell, args)
    while rest and rest[0] == "-o":
        right, rest = _and(shell, rest[1:])
        value = _logic("-o", value, right)
    return value, rest


def _and(shell: Shell, args: list[str]) -> tuple[bool | None, list[str]]:
    value, rest = _term(shell, args)
    while rest and rest[0] == "-a":
        right, rest = _term(shell, rest[1:])
        value = _logic("-a", value, right)
    return value, rest


def _term(shell: Shell, args: list[str]) -> tuple[bool | None, list[str]]:
    if not args:
        raise BadTest("argument expected")
    if args[0] == "!" and len(args) > 1:
        value, rest = _term(shell, args[1:])
        return _not(value), rest
    if args[0] == "(":
        value, rest = _or(shell, args[1:])
        if not rest or rest[0] != ")":
            raise BadTest("`)' expected")
        return value, rest[1:]
    if len(args) > 2 and args[1] in _BINARY:
        return _compare(shell, args[0], args[1], args[2], arithmetic=False), args[3:]
    if len(args) > 1 and re.fullmatch(r"-[a-zA-Z]", args[0]) and args[1] not in ("-a", "-o"):
        return _unary(shell, args[0], args[1]), args[2:]
    return _not(shell.world.marks.emptiness(args[0])), args[1:]
