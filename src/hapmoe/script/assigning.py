"""Assignment statements: scalars, elements, and array literals."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hapmoe.errors import InputError

from .assoc import pass_bad_key
from .state import Var
from .syntax import ArrayLiteral, Assign, Literal, Word
from .values import MARK, Text, Unknown
from .variables import assign, index_of, resolve, secret
from .words import fields, text_of

if TYPE_CHECKING:
    from .interpret import Shell

__all__ = ["assign_array", "run_assign", "scalar_value"]


def run_assign(shell: Shell, node: Assign) -> None:
    """An assignment statement."""
    value = scalar_value(shell, node)
    if isinstance(node.value, ArrayLiteral):
        assign_array(shell, node, node.value)
    else:
        assert value is not None
        assign(shell, node.name, node.index, value, append=node.append)


def scalar_value(shell: Shell, node: Assign) -> Text | None:
    """The value an assignment gives, or None for an array."""
    shell.current_line = node.line
    return None if isinstance(node.value, ArrayLiteral) else text_of(shell, node.value, assignment=True)


def _pairs(shell: Shell, name: str, literal: ArrayLiteral, items: dict[int | str, Text]) -> None:
    """Keys and values of an associative array in turn, as bash takes them since 5.1."""
    words = [
        text
        for key, _, word in literal.elements
        for text in (
            [text_of(shell, Word((Literal(f"[{key}]="), *word.parts), "", word.line))]
            if key is not None
            else fields(shell, word)
        )
    ]
    if any(each.spread for word in words for each in shell.world.marks.of(word.text)):
        raise InputError("the pairs of an associative array are not known", where=shell.where())
    for place in range(0, len(words), 2):
        key = words[place].text
        if not key:
            pass_bad_key(shell, name, key)
            continue
        if MARK.search(key):
            raise InputError("a key of an associative array is not known", where=shell.where())
        value = words[place + 1] if place + 1 < len(words) else Text("", words[place].where)
        items[key] = secret(shell, key, secret(shell, name, value))


def assign_array(
    shell: Shell, node: Assign, literal: ArrayLiteral, *, local: bool = False, assoc: bool = False
) -> None:
    """``name=( ... )``, ``local``: in the innermost scope, ``assoc``: as an associative array if it is new."""
    name, _ = resolve(shell, node.name)
    found = shell.state.find(name)
    scope, var = (
        found
        if found and not (local and name not in shell.state.scopes[-1])
        else (shell.state.scopes[-1 if local else 0], Var(assoc=assoc))
    )
    if node.append and var.mark:
        return
    if assoc and not var.assoc:
        if var.items is not None:
            raise InputError(f"the array {name} is declared as an associative one", where=shell.where())
        var = replace(var, assoc=True)
    start: dict[int | str, Text] = {}
    if node.append:
        first: int | str = "0" if var.assoc else 0
        start = dict(var.items) if var.items is not None else ({} if var.value is None else {first: var.value})
    items: dict[int | str, Text] = start
    place = int(max(items)) + 1 if items and not var.assoc else 0
    shell.world.step(shell.where(), len(items) // 2000)
    mark = ""
    if var.assoc and literal.elements and literal.elements[0][0] is None:
        _pairs(shell, name, literal, items)
        scope[name] = replace(var, items=items, value=None, mark="", bare=False)
        return
    for key_source, appends, word in literal.elements:
        shell.world.step(shell.where(word.line))
        if key_source is not None:
            key = index_of(shell, var if var.assoc else replace(var, items=items), key_source)
            text = text_of(shell, word)
            if key == "" or (isinstance(key, int) and key < 0):
                pass_bad_key(shell, name, key)
                continue
            if key is None or (isinstance(key, str) and MARK.search(key)):
                mark = shell.world.marks.mark(
                    Unknown("an array place that is not known", "", shell.where(), single=False)
                )
                continue
            old = items.get(key)
            text = Text((old.text if old and appends else "") + text.text, text.where)
            items[key] = secret(shell, str(key), secret(shell, name, text))
            place = key + 1 if isinstance(key, int) else place
            continue
        for text in fields(shell, word):
            spread = [each for each in shell.world.marks.of(text.text) if each.spread]
            if spread:
                mark = shell.world.marks.mark(spread[0])
                continue
            if var.assoc:
                raise InputError(f"{name}: keys and pairs are mixed", where=shell.where())
            items[place] = secret(shell, name, text)
            place += 1
    if len(items) > 400_000:
        raise InputError("an array of more than 400,000 elements", where=shell.where())
    new = replace(var, items=None if mark else items, value=None, mark=mark, bare=False)
    scope[name] = new
