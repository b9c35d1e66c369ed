"""``trap``: commands that run when a shell ends (EXIT) or when a command fails (ERR).

Signals from outside do not belong to a run as it is read. What runs at every command (DEBUG) or when functions return
(RETURN) is refused, unless it only says something, cleans up, or notes commands down in variables of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from hapmoe.errors import InputError

from .control import bounded, branch
from .parse import Parser
from .sourcing import Args, texts
from .state import Var
from .syntax import Assign, Simple, Word
from .values import MARK, Text, Unknown

if TYPE_CHECKING:
    from .interpret import Shell

__all__ = ["at_exit", "on_error", "trap", "within_function"]

_FOLLOWED = frozenset(("EXIT", "ERR"))
_REFUSED = frozenset(("DEBUG", "RETURN"))
_HARMLESS = frozenset((":", "true", "rm", "kill", "wait", "sync", "sleep"))
_SPEAKS = frozenset(("echo", "printf", "date"))


def trap(shell: Shell, args: Args) -> None:
    words = texts(args)
    shell.state.status = 0
    words = words[1:] if words[:1] == ["--"] else words
    if not words or words[0] in ("-p", "-P", "-l"):
        shell.print(None, what="trap")
        return
    action, signals = ("-", words) if len(words) == 1 else (words[0], words[1:])
    for signal in signals:
        name = {"0": "EXIT"}.get(signal, signal.upper())
        if MARK.search(name) or MARK.search(action):
            raise InputError("a trap that is not known", where=shell.where(), hint="write it into the script")
        if name in _REFUSED and action != "-":
            _passed_over(shell, action, name)
        if name in _FOLLOWED:
            traps = {key: value for key, value in shell.state.traps.items() if key != name}
            shell.state.traps = traps if action in ("-", "") else {**traps, name: (action,)}


def _passed_over(shell: Shell, action: str, name: str) -> None:
    """Refuse a trap that would have to be followed; what it notes down in variables is not known from here on."""
    names = []
    for item in Parser(action, shell.file, shell.current_line).program():
        node = item.node
        first = node.words[0] if isinstance(node, Simple) and node.words else None
        word = first.source if isinstance(first, Word) else ""
        speaks = word in _SPEAKS and any(each.op.startswith((">&", ">")) for each in node.redirects)  # type: ignore[union-attr]
        if isinstance(node, Simple) and not node.words and all(each.index is None for each in node.assigns):
            names += [each.name for each in node.assigns if isinstance(each, Assign)]
        elif word not in _HARMLESS and not speaks:
            raise InputError(
                f"a trap on {name} is not followed", where=shell.where(), hint="take it out for the reading"
            )
    for each in names:
        why = Unknown(f"what the trap on {name} notes down", "", shell.where(), single=False, nonempty=False)
        shell.state.scopes[0][each] = Var(value=Text(shell.world.marks.mark(why), shell.where()))
        shell.world.volatile.add(each)


def _handle(shell: Shell, actions: tuple[str, ...]) -> None:
    """Run a handler, or each that may be set; the status is afterwards what it was."""
    status, where = shell.state.status, shell.where()

    def run(action: str) -> Callable[[], None]:
        def follow() -> None:
            if action:
                shell.run_text(action, shell.file, shell.current_line)
            shell.state.status = status

        return follow

    if len(actions) > 1:
        branch(shell, where, [run(action) for action in actions])
    else:
        run(actions[0])()


def at_exit(shell: Shell) -> None:
    """What a shell runs at its end."""
    actions = shell.state.traps.get("EXIT")
    if actions:
        shell.state.traps = {}
        bounded(shell, ("exit", "return", "break", "continue", "abort"), lambda: _handle(shell, actions))


def within_function(shell: Shell, run: Callable[[], None]) -> None:
    """A function begins without the trap on ERR, unless under ``set -E``; one that it sets itself stays behind it."""
    outer = shell.state.traps.get("ERR")
    if not outer or "errtrace" in shell.state.options:
        run()
        return
    shell.state.traps = {key: value for key, value in shell.state.traps.items() if key != "ERR"}
    run()
    inner = shell.state.traps.get("ERR", ("",))
    kept = dict.fromkeys(each for action in inner for each in ((action,) if action else outer))
    shell.state.traps = {**shell.state.traps, "ERR": tuple(kept)}


def on_error(shell: Shell) -> None:
    """What runs after a command that failed, or may have."""
    actions = shell.state.traps.get("ERR")
    status = shell.state.status
    if not actions or status == 0:
        return
    traps = shell.state.traps
    shell.state.traps = {key: value for key, value in traps.items() if key != "ERR"}
    if status is None:
        branch(shell, shell.where(), [lambda: None, lambda: _handle(shell, actions)])
    else:
        _handle(shell, actions)
    shell.state.traps = {**shell.state.traps, "ERR": actions} if "ERR" not in shell.state.traps else shell.state.traps
