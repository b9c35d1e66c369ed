"""``declare``, ``local``, ``export``, ``readonly`` and ``unset``; values are read before their names are local."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from hapmoe.errors import InputError

from .assigning import assign_array, scalar_value
from .sourcing import Args
from .state import Var
from .syntax import ArrayLiteral, Assign
from .values import MARK, Text
from .variables import INDEXED, SITE, assign, index_of, provided, resolve

if TYPE_CHECKING:
    from .interpret import Shell

__all__ = ["declaration", "unset", "unset_reference"]

_LETTERS = {"a": "array", "A": "assoc", "i": "integer", "r": "readonly", "x": "exported", "n": "ref"}


def declaration(shell: Shell, args: Args, kind: str) -> None:
    flags: dict[str, bool | str] = {}
    if kind in ("export", "readonly"):
        flags["exported" if kind == "export" else "readonly"] = True
    if kind == "local" and not shell.calls:
        shell.state.status = 1
        return
    local = kind == "local" or (kind == "declare" and bool(shell.calls))
    lists = ""
    pending = list(args)
    while pending and isinstance(pending[0], Text) and re.fullmatch(r"[-+][a-zA-Z]+|--", pending[0].text):
        word = pending.pop(0)
        assert isinstance(word, Text)
        for letter in word.text[1:]:
            if letter == "n" and kind == "export":
                flags["exported"] = False
            elif letter in _LETTERS:
                flags[_LETTERS[letter]] = word.text[0] == "-"
            elif letter in "lu":
                flags["case"] = "lower" if letter == "l" else "upper"
            elif letter == "g":
                local = False
            elif letter in "fFp":
                lists += letter
    if lists or not pending:
        names = [each.text for each in pending if isinstance(each, Text)]
        functions = all(name in shell.state.functions for name in names)
        variables = all(shell.state.find(name) for name in names)
        # What the script does not define itself may come from the site's environment.
        known = not lists or (functions if set(lists) & set("fF") else variables)
        shell.state.status = 0 if known else None
        if not pending or kind != "export":
            shell.print(None, what=kind)
        return
    late_readonly = bool(flags.pop("readonly", False))
    ready = [each if isinstance(each, Text) else (each, scalar_value(shell, each)) for each in pending]
    shell.state.status = 0
    for item in ready:
        name = (
            _plain(shell, item, flags, local=local)
            if isinstance(item, Text)
            else _assigned(shell, *item, flags, local=local)
        )
        if late_readonly and name:
            declare(shell, name, local=local, flags={"readonly": True})


def _assigned(shell: Shell, node: Assign, value: Text | None, flags: dict[str, bool | str], *, local: bool) -> str:
    """``NAME=value`` of a declaration; ``value`` is None for an array, whose words are read before it is local."""
    if isinstance(node.value, ArrayLiteral):
        assign_array(shell, node, node.value, local=local, assoc=bool(flags.get("assoc")))
        if flags:
            declare(shell, node.name, local=local, flags=flags)
        return node.name
    assert value is not None
    fresh = local and node.name not in shell.state.scopes[-1]
    if fresh:
        shell.state.scopes[-1][node.name] = Var()
    if flags or not fresh:
        declare(shell, node.name, local=local, flags=flags)
    scope = shell.state.scopes[-1] if local else shell.state.scopes[0]
    if flags.get("ref") and node.name in scope:
        scope[node.name] = Var(value=value, ref=True)
    else:
        assign(shell, node.name, node.index, value, append=node.append)
    return node.name


def _plain(shell: Shell, arg: Text, flags: dict[str, bool | str], *, local: bool) -> str:
    """A word that is no assignment when it is read: a name, or what an expansion gave, such as ``export $PAIR``."""
    if MARK.search(arg.text.partition("=")[0]):
        raise InputError(
            "variables are declared whose names are not known",
            where=shell.where(),
            hint="give them with --env NAME=VALUE and drop the line",
        )
    name, equals, value = arg.text.partition("=")
    append = name.endswith("+")
    name = name.removesuffix("+")
    if not re.fullmatch(r"[A-Za-z_]\w*(\[.*\])?", name):
        shell.state.status = 1
        return ""
    name = name.partition("[")[0]
    if local and name not in shell.state.scopes[-1]:
        shell.state.scopes[-1][name] = Var()
    declare(shell, name, local=local, flags=flags)
    if equals:
        found = shell.state.find(name)
        if flags.get("ref") and found:
            found[0][name] = Var(value=Text(value, arg.where), ref=True)
        else:
            assign(shell, name, None, Text(value, arg.where), append=append)
    return name


def declare(shell: Shell, name: str, *, local: bool, flags: dict[str, bool | str]) -> None:
    """Give ``name`` attributes, in the innermost scope when ``local``."""
    state = shell.state
    if local and len(state.scopes) > 1:
        scope = state.scopes[-1]
        var = scope.get(name, Var())
    else:
        if not flags.get("ref"):
            name, _ = resolve(shell, name)
        found = state.find(name)
        scope, var = found if found else (state.scopes[0], Var())
        if not found and flags.get("exported"):
            value = provided(shell, name) if name in SITE else None
            var = replace(var, value=value) if value else var
    if flags.get("array") or flags.get("assoc"):
        bare = var.bare or (var.items is None and var.value is None and not var.mark)
        if flags.get("assoc") and var.items is not None and not var.assoc:
            raise InputError(f"the array {name} is declared as an associative one", where=shell.where())
        first: int | str = "0" if flags.get("assoc") else 0
        items = var.items if var.items is not None else {} if var.value is None else {first: var.value}
        var = replace(var, items=items, value=None, bare=bare)
    fresh = {
        key: bool(flag) for key, flag in flags.items() if key in ("assoc", "exported", "readonly", "integer", "ref")
    }
    scope[name] = replace(var, case=str(flags.get("case", var.case)), **fresh)  # type: ignore[arg-type]
    if flags.get("exported"):
        shell.note_export(name)


def unset_reference(shell: Shell, name: str) -> None:
    """``unset -n``: the name itself, whatever it refers to."""
    found = shell.state.find(name)
    if found:
        del found[0][name]


def unset(shell: Shell, name: str) -> None:
    indexed = INDEXED.fullmatch(name)
    name, index = (indexed.group(1), indexed.group(2)) if indexed else (name, None)
    name, through = resolve(shell, name)
    index = index or through
    found = shell.state.find(name)
    if not found:
        if name in SITE:
            shell.state.scopes[0][name] = Var()
        return
    scope, var = found
    if index is not None and var.mark:
        return  # an array that is not known stays so without one element
    if index is not None and var.items is None and index != "0":
        raise InputError(f"an element of {name}, which is no array, is unset", where=shell.where())
    if index is None or var.items is None:
        if len(shell.state.scopes) > 1 and scope is shell.state.scopes[-1]:
            scope[name] = Var()
        else:
            scope.pop(name)
            if name in SITE:
                scope[name] = Var()
        return
    key = index_of(shell, var, index)
    if key is None or (isinstance(key, str) and MARK.search(key)):
        raise InputError(f"which element of {name} is unset is not known", where=shell.where())
    scope[name] = replace(var, items={k: v for k, v in var.items.items() if k != key})
