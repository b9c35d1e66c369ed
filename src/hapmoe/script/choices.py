"""``&&`` and ``||``, ``if`` and ``case``: the way that is known, or every way that is possible."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from hapmoe.errors import InputError

from .control import branch
from .patterns import matches
from .syntax import AndOr, Case, If
from .values import MARK
from .words import pattern_of, text_of

if TYPE_CHECKING:
    from .interpret import Shell

__all__ = ["and_or", "case", "if_"]


def and_or(shell: Shell, node: AndOr) -> None:
    def last(place: int) -> None:
        op, command = node.rest[place]
        wanted = op == "&&"
        where = shell.where()
        status = shell.state.status

        def run() -> None:
            if place + 1 < len(node.rest):
                shell.condition(lambda: shell.node(command))
            else:
                shell.node(command)

        def skip() -> None:
            shell.state.status = status if status is not None else (None if wanted else 0)

        shell.choose(where, status, run if wanted else skip, skip if wanted else run)
        if place + 1 < len(node.rest):
            last(place + 1)

    tolerant = any(op == "||" for op, _ in node.rest)
    shell.tolerant += tolerant
    try:
        shell.condition(lambda: shell.node(node.first))
    finally:
        shell.tolerant -= tolerant
    if len(node.rest) > 200:
        raise InputError("too long a chain of && and ||", where=shell.where())
    last(0)


def if_(shell: Shell, node: If) -> None:
    def clause(place: int) -> None:
        if place == len(node.clauses):
            if not node.otherwise:
                shell.state.status = 0
            shell.program(node.otherwise)
            return
        condition, body = node.clauses[place]
        shell.current_line = condition[0].line if condition else node.line
        status = shell.condition(lambda: shell.program(condition))
        where = shell.where(condition[0].line if condition else node.line)
        shell.choose(where, status, lambda: shell.program(body), lambda: clause(place + 1))

    clause(0)


def case(shell: Shell, node: Case) -> None:
    shell.world.missing = ""
    subject = text_of(shell, node.word).text
    where = shell.where(node.line)
    if shell.world.missing and not shell.world.arguments_given and not shell.calls and not subject:
        raise InputError(
            f"a case reads argument {shell.world.missing}, which is not given",
            where=where,
            hint="give the script's arguments",
        )
    unknown = bool(MARK.search(subject))
    ways: list[Callable[[], None]] = []

    def body(place: int) -> Callable[[], None]:
        def run() -> None:
            for each in range(place, last_of(place) + 1):
                if not node.items[each][1]:
                    shell.state.status = 0
                shell.program(node.items[each][1])

        return run

    def last_of(place: int) -> int:
        while node.items[place][2] == ";&" and place + 1 < len(node.items):
            place += 1
        return place

    def none() -> None:
        shell.state.status = 0

    skip_to = 0
    matched = False
    for place, (patterns, _, _) in enumerate(node.items):
        if place < skip_to:
            continue
        texts = [pattern_of(shell, pattern) for pattern in patterns]
        if unknown or any(MARK.search(text) for text in texts):
            ways.append(body(place))
            if "*" in texts:
                branch(shell, where, ways)
                return
            continue
        if any(matches(subject, text, nocase="nocasematch" in shell.state.options) for text in texts):
            if ways:
                branch(shell, where, [*ways, body(place)])
            else:
                body(place)()
            matched = True
            if node.items[last_of(place)][2] != ";;&":
                return
            skip_to = last_of(place) + 1
    if ways:
        branch(shell, where, [*ways, none])
    elif not matched:
        none()
