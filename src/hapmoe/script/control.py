"""Leaving a construct early, and exploring both ways of a condition that is not known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .state import State, join

if TYPE_CHECKING:
    from .interpret import Shell

__all__ = ["Control", "Pending", "bounded", "branch", "take"]


class Control(Exception):
    """``exit``, ``return``, ``break``, ``continue``, or ``abort`` (an error that drops the top-level command)."""

    def __init__(self, kind: str, levels: int = 1) -> None:
        super().__init__(kind)
        self.kind, self.levels = kind, levels


@dataclass(frozen=True, slots=True)
class Pending:
    """A way of an unknown condition that left early, waiting at the construct it left for."""

    kind: str
    levels: int
    state: State
    where: str


def branch(shell: Shell, where: str, ways: list[Callable[[], None]]) -> None:
    """Run each of ``ways`` from the present state, and go on with what holds after any of them.

    A way that leaves early (``exit``, ``return``, ...) is put aside and joins where it arrives.
    """
    base = shell.state
    normal: list[State] = []
    left: list[Pending] = []
    tested, shell.tested = shell.tested, set()
    for way in ways:
        shell.state = base.copy()
        shell.state.guards = (*base.guards, where)
        shell.state.assumed = base.assumed | tested
        try:
            way()
            normal.append(shell.state)
        except Control as control:
            left.append(Pending(control.kind, control.levels, shell.state, where))
    last: Pending | None = None
    if not normal:
        last = left.pop()
        normal = [last.state]
    shell.pending += left
    shell.state = normal[0]
    for state in normal[1:]:
        shell.state = join(shell.state, state, where, shell.world.marks)
    shell.state.guards, shell.state.assumed = base.guards, base.assumed
    if last:
        raise Control(last.kind, last.levels)


def take(shell: Shell, since: int, kinds: tuple[str, ...]) -> list[Pending]:
    """The ways put aside after position ``since`` that arrive here; a break of several levels goes on one level out."""
    arrived = [each for each in shell.pending[since:] if each.kind in kinds and each.levels <= 1]
    rest = []
    for each in shell.pending[since:]:
        if each.kind in kinds:
            if each.levels > 1:
                rest.append(Pending(each.kind, each.levels - 1, each.state, each.where))
        else:
            rest.append(each)
    shell.pending[since:] = rest
    return arrived


def bounded(shell: Shell, kinds: tuple[str, ...], run: Callable[[], None]) -> None:
    """Run a function body or subshell, in which ``kinds`` end no more than that construct."""
    since = len(shell.pending)
    live: list[State] = []
    leaving: Control | None = None
    base = (shell.state.guards, shell.state.assumed)
    try:
        run()
        live.append(shell.state)
    except Control as control:
        if control.kind in kinds:
            live.append(shell.state)
        else:
            leaving = control
    final = shell.state
    arrived = take(shell, since, kinds)
    where = arrived[0].where if arrived else ""
    live += [each.state for each in arrived]
    if not live:
        assert leaving
        raise leaving
    if leaving:
        shell.pending.append(Pending(leaving.kind, leaving.levels, final, where))
    shell.state = live[0]
    for state in live[1:]:
        shell.state = join(shell.state, state, where, shell.world.marks)
    shell.state.guards, shell.state.assumed = base
