"""Loops: known ones round by round, unknown ones until nothing more can become unknown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from hapmoe.errors import InputError

from .control import Control, Pending, take
from .state import State, join
from .syntax import CFor, For, Program, While, Word
from .values import Text, Unknown
from .variables import assign, number
from .words import fields, fragments

if TYPE_CHECKING:
    from .interpret import Shell

__all__ = ["c_for", "for_in", "while_"]

_ROUNDS = 70


def for_in(shell: Shell, node: For) -> None:
    if node.asks:
        raise InputError(
            "a menu (select) asks for an answer",
            where=shell.where(node.line),
            hint="write the choice into the script",
        )
    if node.words is None:
        values = list(shell.state.positionals)
        if shell.state.positional_mark:
            values = [Text(shell.state.positional_mark, shell.where())]
    else:
        values = [value for word in node.words for value in fields(shell, word)]
    if not values:
        shell.state.status = 0
    loop = _Loop(shell, shell.where(node.line))
    for value in values:
        spread = [each for each in shell.world.marks.of(value.text) if each.spread or not each.single]
        if spread or (node.words is None and shell.state.positional_mark):
            branch_line = next((each.branch for each in spread if each.branch), "")
            item = Text(
                shell.world.marks.mark(
                    Unknown(
                        "an item of a list that is not known",
                        f"${node.name}",
                        shell.where(node.line),
                        nonempty=False,
                        branch=branch_line,
                    )
                ),
                value.where,
            )
            loop.any_number(lambda item=item: _loop_once(shell, node.name, item, node.body))  # type: ignore[misc]
        else:
            loop.sure = True
            if not loop.once(lambda value=value: _loop_once(shell, node.name, value, node.body)):  # type: ignore[misc]
                break
    loop.end()
    if shell.state.status and loop.unsure and not loop.sure:
        shell.state.status = None  # without a round it is 0


def _loop_once(shell: Shell, name: str, value: Text, body: Program) -> None:
    found = shell.state.find(name)
    if found and found[1].ref:  # each word is the name of the variable that it then stands for
        found[0][name] = replace(found[1], value=value)
    else:
        assign(shell, name, None, value)
    shell.program(body)


class _Loop:
    """The rounds of one loop, with the ways that break out of it put aside until its end."""

    def __init__(self, shell: Shell, where: str) -> None:
        self.shell, self.where = shell, where
        self.since = len(shell.pending)
        self.broken: list[Pending] = []
        self.base = (shell.state.guards, shell.state.assumed)
        self.stopped = False
        self.sure = self.unsure = False
        """Whether there was a round for certain, and one that there may not be."""

    def once(self, run: Callable[[], None]) -> bool:
        """One round; False when the loop ends with it for certain."""
        shell = self.shell
        live = []
        shell.loops += 1
        try:
            run()
            live.append(shell.state)
        except Control as control:
            if control.kind not in ("break", "continue"):
                if not self._collect(live) and not self.broken:
                    raise
                if not live:
                    shell.pending.append(Pending(control.kind, control.levels, shell.state, self.where))
                    self.stopped = True
                    return False
                shell.pending.append(Pending(control.kind, control.levels, shell.state, self.where))
            elif control.levels > 1:
                self._collect(live)
                if live or self.broken:
                    shell.pending.append(Pending(control.kind, control.levels - 1, shell.state, self.where))
                else:
                    raise Control(control.kind, control.levels - 1) from None
            elif control.kind == "continue":
                live.append(shell.state)
            else:
                self.broken.append(Pending("break", 1, shell.state, self.where))
        finally:
            shell.loops -= 1
        self._collect(live)
        if not live:
            self.stopped = True
            return False
        shell.state = live[0]
        for state in live[1:]:
            shell.state = join(shell.state, state, self.where, shell.world.marks)
        return True

    def _collect(self, live: list[State]) -> bool:
        arrived = take(self.shell, self.since, ("break", "continue"))
        live += [each.state for each in arrived if each.kind == "continue"]
        self.broken += [each for each in arrived if each.kind == "break"]
        return bool(arrived)

    def any_number(self, run: Callable[[], None]) -> None:
        """The round runs an unknown number of times: repeat until nothing more can become unknown."""
        self.unsure = True
        shell = self.shell
        for _ in range(_ROUNDS):
            before = shell.state
            shell.state = before.copy()
            try:
                goes_on = self.once(run)
            except Control as control:  # a round leaves for certain, but there may be none
                shell.pending.append(Pending(control.kind, control.levels, shell.state, self.where))
                goes_on = False
            self.stopped = False
            after = join(before, shell.state, self.where, shell.world.marks) if goes_on else before
            shell.state = after
            if _same(before, after):
                return
        raise InputError("a loop does not settle", where=self.where, hint="it depends on a value that is not known")

    def end(self) -> None:
        """Go on behind the loop with every way that leads there."""
        shell = self.shell
        states = [each.state for each in self.broken] + ([] if self.stopped else [shell.state])
        if not states:
            raise Control("exit")
        shell.state = states[0]
        for state in states[1:]:
            shell.state = join(shell.state, state, self.broken[0].where, shell.world.marks)
        shell.state.guards, shell.state.assumed = self.base


def _same(left: State, right: State) -> bool:
    return (
        left.scopes == right.scopes
        and left.files == right.files
        and left.positionals == right.positionals
        and left.positional_mark == right.positional_mark
        and left.out == right.out
        and left.cwd == right.cwd
        and left.stdin == right.stdin
        and left.inputs == right.inputs
    )


def _rounds(shell: Shell, where: str, test: Callable[[], int | None], body: Callable[[], None]) -> None:
    """A ``while``: known conditions are followed round by round, unknown ones until nothing changes."""
    loop = _Loop(shell, where)
    rounds = 0
    after: int | None = 0
    ends: set[int | None] = set()

    def noted() -> None:
        body()
        ends.add(shell.state.status)

    while True:
        shell.world.step(where)
        before = shell.state.copy()
        wide = bool(loop.broken) and rounds > 40
        status = test()
        if status is None or wide:
            _until_settled(shell, loop, test, noted, first=status)
            after = after if ends <= {after} else None
            break
        if status != 0:
            break
        if not loop.once(body):
            break
        rounds += 1
        after = shell.state.status
        if _same(before, shell.state):
            loop.stopped = True  # nothing changes any more: behind it come only the ways that broke out
            if not loop.broken:
                shell.world.notes.append(f"{where}: a loop without end")
            break
    if not loop.stopped or loop.broken:
        shell.state.status = shell.state.status if loop.stopped else after
    loop.end()


def _then(shell: Shell, body: Callable[[], None], step: Callable[[], object]) -> None:
    """``body`` and ``step``, which also follows a ``continue``."""
    since = len(shell.pending)
    live: list[State] = []
    leaving: Control | None = None
    try:
        body()
        live.append(shell.state)
    except Control as control:
        if control.kind == "continue" and control.levels <= 1:
            live.append(shell.state)
        else:
            leaving = control
    final = shell.state
    arrived = [each for each in shell.pending[since:] if each.kind == "continue" and each.levels <= 1]
    shell.pending[since:] = [each for each in shell.pending[since:] if each not in arrived]
    live += [each.state for each in arrived]
    if leaving and not live:
        raise leaving
    if leaving:
        shell.pending.append(Pending(leaving.kind, leaving.levels, final, arrived[0].where))
    shell.state = live[0]
    for state in live[1:]:
        shell.state = join(shell.state, state, arrived[0].where, shell.world.marks)
    step()


def _until_settled(
    shell: Shell, loop: _Loop, test: Callable[[], int | None], body: Callable[[], None], *, first: int | None
) -> None:
    def run() -> None:
        _then(shell, body, test)

    if first is None:
        loop.any_number(run)
        return
    for _ in range(_ROUNDS):
        before = shell.state
        shell.state = before.copy()
        goes_on = loop.once(run)
        if not goes_on:
            return
        shell.state = join(before, shell.state, loop.where, shell.world.marks)
        if _same(before, shell.state):
            loop.stopped = first == 0 and bool(loop.broken)
            return


def while_(shell: Shell, node: While) -> None:
    def test() -> int | None:
        shell.current_line = node.line
        status = shell.condition(lambda: shell.program(node.condition))
        return status if not node.until or status is None else int(status == 0)

    _rounds(shell, shell.where(node.line), test, lambda: shell.program(node.body))


def c_for(shell: Shell, node: CFor) -> None:
    def value(word: Word) -> int | None:
        shell.current_line = node.line
        return number(shell, "".join(each.text for each in fragments(shell, word.parts, shell.where(), quoted=True)))

    def test() -> int | None:
        if not node.condition.source.strip():
            return 0
        result = value(node.condition)
        return None if result is None else int(result == 0)

    value(node.start)
    _rounds(
        shell,
        shell.where(node.line),
        test,
        lambda: _then(shell, lambda: shell.program(node.body), lambda: value(node.step)),
    )
