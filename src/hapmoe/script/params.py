"""Parameter expansion: ``$x`` and every operator of ``${x...}``."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from hapmoe.errors import InputError

from . import words
from .arithmetic import ArithmeticError_
from .assoc import assoc_keys
from .control import branch
from .patterns import escape, regex_of, strip_prefix, strip_suffix, substitute
from .syntax import Arith, CommandSub, DoubleQuoted, Param, Part, ProcessSub
from .values import MARK, Text, Unknown
from .variables import assign, elements, missing, number, provides, resolve, scalar

if TYPE_CHECKING:
    from .interpret import Shell

__all__ = ["expand_param"]

_Piece = tuple[str, str, str]


def expand_param(shell: Shell, part: Param, where: str, *, quoted: bool) -> list[_Piece]:
    """The fragments of one expansion, as ``(kind, text, where)``."""
    if part.indirect:
        return _indirect(shell, part, where, quoted=quoted)
    many = part.name if part.name in ("@", "*") else part.index if part.index in ("@", "*") else ""
    if many:
        return _many(shell, part, many, where, quoted=quoted)
    value = scalar(shell, part.name, part.index)
    if part.length:
        return [_one(_length(shell, part, value, where), where, quoted)]
    op = part.op
    if op and op.lstrip(":") in ("-", "=", "+", "?"):
        return _substituted(shell, part, value, where, quoted=quoted)
    if value is None:
        if not _declared(shell, part):
            missing(shell, part.name, where)
        value = Text("", where)
        op = "" if op == ":" else op
    if op:
        value = Text(_operate(shell, part, value.text, where), value.where)
    return [_one(value.text, value.where or where, quoted)]


def _declared(shell: Shell, part: Param) -> bool:
    """Whether the variable stands declared, e.g. an element beyond the end of a known array."""
    if part.name.isdigit():
        return False
    found = shell.state.find(resolve(shell, part.name)[0])
    return bool(found) and "nounset" not in shell.state.options


def _one(text: str, where: str, quoted: bool) -> _Piece:
    return ("quoted" if quoted else "expanded", text, where)


def _indirect(shell: Shell, part: Param, where: str, *, quoted: bool) -> list[_Piece]:
    if part.index in ("@", "*"):
        return _keys(shell, part, where, quoted=quoted)
    if part.op in ("@", "*"):
        names = sorted({n for scope in shell.state.scopes for n in scope if n.startswith(part.name)})
        if provides(part.name):
            mark = Unknown(f"the shell's variables named {part.name}*", part.source, where, single=False)
            return [_one(shell.world.marks.mark(mark), where, quoted)]
        return _separated([Text(name, where) for name in names], "@" if part.op == "@" else "*", where, quoted, shell)
    value = scalar(shell, part.name, part.index)
    if value is None:
        missing(shell, part.name, where)
        return [_one("", where, quoted)]
    found = shell.state.find(part.name)
    if found and found[1].ref:
        return [_one(resolve(shell, part.name)[0], where, quoted)]
    if MARK.search(value.text):
        return [_one(shell.world.marks.derive(value.text, "", part.source, where, single=False), where, quoted)]
    target = re.fullmatch(r"([A-Za-z_]\w*|\d+|[@*#?])(?:\[(.*)\])?", value.text)
    if not target:
        raise InputError(f"{part.source} names no variable ({value.text!r})", where=where)
    inner = Param(target.group(1), target.group(2), part.op, part.arg, part.second, source=part.source)
    return expand_param(shell, inner, where, quoted=quoted)


def _keys(shell: Shell, part: Param, where: str, *, quoted: bool) -> list[_Piece]:
    found = shell.state.find(resolve(shell, part.name)[0])
    if not found:
        return []
    var = found[1]
    if var.mark:
        return [_one(shell.world.marks.derive(var.mark, "", part.source, where, single=False), where, quoted)]
    items = var.items if var.items is not None else ({} if var.value is None else {0: var.value})
    keys = assoc_keys(items) if var.assoc else sorted(items)
    return _separated([Text(str(key), where) for key in keys], str(part.index), where, quoted, shell)


def _many(shell: Shell, part: Param, many: str, where: str, *, quoted: bool) -> list[_Piece]:
    values, mark = elements(shell, part.name)
    if mark:
        if part.length:
            return [
                _one(shell.world.marks.derive(mark, "", part.source, where, single=True, nonempty=True), where, quoted)
            ]
        if quoted and many == "*":
            return [("quoted", mark, where)]
        of = shell.world.marks.of(mark)
        return [
            ("expanded", "".join(shell.world.marks.mark(replace(each, single=False, many=True)) for each in of), where)
        ]
    if part.length:
        if not values and "nounset" in shell.state.options:
            found = shell.state.find(resolve(shell, part.name)[0])
            if not found or found[1].bare or (found[1].items is None and found[1].value is None):
                missing(shell, part.name, where)
        return [_one(str(len(values)), where, quoted)]
    op = part.op
    if op == ":":
        values = _slice(shell, part, values, where)
        many = "*" if quoted and not shell.splitting else many  # in an assignment a slice is joined with IFS
    elif op and op.lstrip(":") in ("-", "=", "+", "?"):
        joined = " ".join(value.text for value in values)
        present = Text(joined, where) if values else None
        if op.lstrip(":") == "+" or present is None or (op[0] == ":" and shell.world.marks.emptiness(joined)):
            return _substituted(shell, part, present, where, quoted=quoted)
    elif op in ("@A", "@K", "@k", "@a", "@P"):
        why = Unknown(f"the expansion {part.source}", part.source, where, single=False, nonempty=False)
        return [_one(shell.world.marks.mark(why), where, quoted=False)]
    elif op:
        values = [Text(_operate(shell, part, value.text, where), value.where) for value in values]
    if not values and part.name not in ("@", "*") and not _declared(shell, part):
        if "nounset" in shell.state.options and part.index is None:
            missing(shell, part.name, where)
        elif not shell.state.find(part.name):
            shell.world.unset.setdefault(part.name, where)
    return _separated(values, many, where, quoted, shell)


def _separated(values: list[Text], many: str, where: str, quoted: bool, shell: Shell) -> list[_Piece]:
    ifs = scalar(shell, "IFS") if many == "*" else None
    separator = ifs.text[:1] if ifs else " "
    if quoted and many == "*":
        return [("quoted", shell.world.joined((value.text for value in values), where, separator), where)]
    if not quoted and shell.splitting:
        separators = scalar(shell, "IFS")
        first = separators.text[:1] if separators else " "
        if first and not first.isspace() and values:
            return [("expanded", first.join(value.text for value in values), values[0].where or where)]
    out: list[_Piece] = []
    for place, value in enumerate(values):
        if place:
            out.append(("break", separator, where))
        out.append(_one(value.text, value.where or where, quoted))
    return out


def _slice(shell: Shell, part: Param, values: list[Text], where: str) -> list[Text]:
    start = number(shell, _plain(shell, part.arg, where))
    count = number(shell, _plain(shell, part.second, where)) if part.second is not None else None
    if start is None or (count is None and part.second is not None):
        raise InputError(f"{part.source} depends on a value that is not known", where=where)
    if part.name in ("@", "*"):
        values = [Text(shell.state.zero, where), *values]
        top = len(values)
    else:
        found = shell.state.find(resolve(shell, part.name)[0])
        keys = sorted(found[1].items) if found and found[1].items and not found[1].assoc else []
        top = int(keys[-1]) + 1 if keys else len(values)
    if start < 0:
        start += top
        if start < 0:
            return []
    if part.name not in ("@", "*") and keys:
        start = sum(int(key) < start for key in keys)
    return values[start:] if count is None else values[start : start + max(count, 0)]


def _plain(shell: Shell, parts: tuple[Part, ...] | None, where: str) -> str:
    return "".join(each.text for each in words.fragments(shell, parts or (), where, quoted=True))


def _length(shell: Shell, part: Param, value: Text | None, where: str) -> str:
    if value is None:
        missing(shell, part.name, where)
        return "0"
    if MARK.search(value.text):
        return shell.world.marks.derive(value.text, "", part.source, shell.where(), single=True, nonempty=True)
    return str(len(value.text))


def _substituted(shell: Shell, part: Param, value: Text | None, where: str, *, quoted: bool) -> list[_Piece]:
    """``:-``, ``:=``, ``:+``, ``:?`` and the forms without the colon, which look only at being set."""
    kind = part.op.lstrip(":")
    absent: bool | None = value is None
    if value is not None and part.op[0] == ":":
        absent = shell.world.marks.emptiness(value.text)
    if absent is None:
        assert value is not None
        if kind == "?":
            return [_one(value.text, value.where, quoted)]
        if _acts(part.arg):
            branch(shell, where, [lambda: _evaluated(shell, part, where, quoted=quoted), lambda: _passed_over(shell)])
        text = shell.world.marks.derive(value.text, "", part.source, where, single=False)
        return [_one(text, where, quoted)]
    if kind == "+":
        return [] if absent else _argument(shell, part, where, quoted=quoted)
    if not absent:
        assert value is not None
        return [_one(value.text, value.where or where, quoted)]
    if kind == "?":
        message = _plain(shell, part.arg, where) or "not set"
        name = f"argument {part.name}" if part.name.isdigit() else f"--env {part.name}=VALUE"
        raise InputError(
            f"{part.name} must be given ({MARK.sub('?', message)})", where=shell.where(), hint=f"give {name}"
        )
    pieces = _argument(shell, part, where, quoted=quoted)
    if kind == "=":
        text = "".join(piece[1] for piece in pieces)
        assign(shell, part.name, part.index, Text(text, where))
        held = scalar(shell, part.name, part.index)
        return [_one(held.text if held else "", where, quoted)]
    return pieces


def _acts(parts: tuple[Part, ...]) -> bool:
    """Whether evaluating ``parts`` does more than give a text."""
    return any(
        isinstance(part, CommandSub | Arith | ProcessSub)
        or (isinstance(part, DoubleQuoted) and _acts(part.parts))
        or (isinstance(part, Param) and (part.op in ("=", ":=") or _acts((*part.arg, *(part.second or ())))))
        for part in parts
    )


def _evaluated(shell: Shell, part: Param, where: str, *, quoted: bool) -> None:
    _argument(shell, part, where, quoted=quoted)


def _operands(shell: Shell, part: Param, where: str) -> None:
    for parts in (part.arg, part.second or ()):
        words.fragments(shell, parts, where, quoted=True)


def _passed_over(shell: Shell) -> None:
    """An assignment without a command substitution ends with 0."""
    if shell.captures == shell.captured:
        shell.state.status = 0


def _argument(shell: Shell, part: Param, where: str, *, quoted: bool) -> list[_Piece]:
    got = words.fragments(shell, words.with_tilde(shell, part.arg), where, quoted=quoted, split=not quoted)
    if quoted and not got:
        return [("quoted", "", where)]
    return [(each.kind, each.text, each.where) for each in got]


def _operate(shell: Shell, part: Param, text: str, where: str) -> str:
    shell.world.step(where, len(text) // 20)
    op = part.op
    if MARK.search(text):
        if _acts((*part.arg, *(part.second or ()))):
            branch(shell, where, [lambda: _operands(shell, part, where), lambda: _passed_over(shell)])
        return _on_unknown(shell, part, text, where)
    if op == ":":
        return _substring(shell, part, text, where)
    if op[0] in "#%/^,":
        pattern = "".join(
            escape(each.text) if each.kind == "quoted" else each.text
            for each in words.fragments(shell, part.arg, where)
        )
        if op[0] == "/" and "nocasematch" in shell.state.options:
            return shell.world.marks.mark(Unknown(f"{part.source} in either case", part.source, where, nonempty=False))
        if MARK.search(pattern):
            return shell.world.marks.derive(pattern, "", part.source, where)
        if op[0] == "#":
            return strip_prefix(text, pattern, longest=op == "##")
        if op[0] == "%":
            return strip_suffix(text, pattern, longest=op == "%%")
        if op[0] in "^,":
            return _cased(text, op, pattern)
        pieces = words.fragments(shell, part.second or (), where)
        by = "".join(each.text for each in pieces)
        if any("&" in each.text for each in pieces if each.kind != "quoted"):
            return shell.world.marks.mark(
                Unknown(
                    f"{part.source}: & in a replacement differs between versions of bash",
                    part.source,
                    where,
                    nonempty=False,
                )
            )
        return substitute(text, pattern, by, op)
    if op in ("@U", "@L", "@u"):
        return {"@U": text.upper(), "@L": text.lower(), "@u": text[:1].upper() + text[1:]}[op]
    if op == "@Q" and not re.search(r"[\x00-\x1f\x7f-\x9f]", text):
        return "\\'" if text == "'" else "'" + text.replace("'", "'\\''") + "'"
    return shell.world.marks.mark(
        Unknown(f"the expansion {part.source}", part.source, where, single=False, nonempty=False)
    )


def _cased(text: str, op: str, pattern: str) -> str:
    change = str.upper if op[0] == "^" else str.lower
    regex = regex_of(pattern) if pattern else None

    def one(char: str) -> str:
        return change(char) if regex is None or regex.fullmatch(char) else char

    if len(op) == 1:
        return one(text[:1]) + text[1:]
    return "".join(map(one, text))


def _substring(shell: Shell, part: Param, text: str, where: str) -> str:
    start = number(shell, _plain(shell, part.arg, where))
    count = number(shell, _plain(shell, part.second, where)) if part.second is not None else None
    if start is None or (part.second is not None and count is None):
        return shell.world.marks.mark(Unknown(f"the substring {part.source}", part.source, where, nonempty=False))
    if start < 0:
        start += len(text)
        if start < 0:
            return ""
    if count is None or start > len(text):
        return text[start:]
    if count < 0:
        if len(text) + count < start:
            raise ArithmeticError_(f"{part.source}: substring expression < 0")
        return text[start : len(text) + count]
    return text[start : start + count]


def _on_unknown(shell: Shell, part: Param, text: str, where: str) -> str:
    """An operator on text that holds unknowns: exact where only the known tail matters, else unknown."""
    pattern = "".join(each.text for each in words.fragments(shell, part.arg, where)) if part.op[0] in "#%" else ""
    tail = MARK.split(text)[-1]
    if part.op == "##" and pattern == "*/" and "/" in tail:
        return tail.rpartition("/")[2]
    if part.op == "%" and pattern == "/*" and "/" in tail:
        return text.rpartition("/")[0]
    if part.op == "%" and pattern and not re.search(r"[*?\[\\+@!|]", pattern) and len(tail) >= len(pattern):
        return text.removesuffix(pattern)
    return shell.world.marks.derive(text, "", part.source, where)
