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

_FOLLOWED_APART = 3
"""In a chain so short the ways after a status that is not known are followed apart to the end of the chain, so that
``[ -f x ] && A=1 || A=2`` leaves one of two values; in a longer one they meet after each command."""


def and_or(shell: Shell, node: AndOr) -> None:
    end = len(node.rest)
    if end > 200:
        raise InputError("too long a chain of && and ||", where=shell.where())

    def follow(place: int, succeeded: bool | None) -> None:
        """The chain from ``place`` on, where what stands before ended well, did not, or nobody knows."""
        if place == end:
            return
        op, command = node.rest[place]
        wanted = op == "&&"
        where = shell.where()
        status = shell.state.status

        def run() -> None:
            if place + 1 < end:
                shell.condition(lambda: shell.node(command))
            else:
                shell.node(command)

        def skip() -> None:
            shell.state.status = status if status is not None else (None if wanted else 0)

        def after(way: Callable[[], None], outcome: bool | None) -> None:
            way()
            follow(place + 1, _success(shell) if way is run else outcome)

        if succeeded is not None:
            after(run if succeeded == wanted else skip, succeeded)
        elif end - place <= _FOLLOWED_APART:
            branch(
                shell,
                where,
                [lambda: after(run if wanted else skip, True), lambda: after(skip if wanted else run, False)],
            )
        else:
            branch(shell, where, [run if wanted else skip, skip if wanted else run])
            follow(place + 1, _success(shell))

    tolerant = any(op == "||" for op, _ in node.rest)
    shell.tolerant += tolerant
    try:
        shell.condition(lambda: shell.node(node.first))
    finally:
        shell.tolerant -= tolerant
    follow(0, _success(shell))


def _success(shell: Shell) -> bool | None:
    return None if shell.state.status is None else shell.state.status == 0


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
