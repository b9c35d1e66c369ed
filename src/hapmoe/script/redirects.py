"""Redirections: where a command's output goes and its input comes from."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from .syntax import Redirect
from .words import text_of

if TYPE_CHECKING:
    from .interpret import Shell

__all__ = ["with_redirects"]


def with_redirects(shell: Shell, redirects: tuple[Redirect, ...], run: Callable[[], None]) -> None:
    """Run with ``redirects`` in effect; standard error is not followed."""
    if not redirects:
        run()
        return
    outer, stdin = shell.state.out, shell.state.stdin
    sink: tuple[str, bool] | None = None
    elsewhere = False
    for each in redirects:
        shell.current_line = each.line
        if each.op in ("<<", "<<-"):
            shell.state.stdin = text_of(shell, each.target).text
        elif each.op == "<<<":
            shell.state.stdin = text_of(shell, each.target).text + "\n"
        elif each.op == "<":
            shell.state.stdin = _input(shell, each)
        elif each.op in ("<&", "<>"):
            continue
        elif each.op == ">&" and re.fullmatch(r"\d+|-", each.target.source):
            if (each.fd or 1) == 1 and each.fd != 2:
                elsewhere = each.target.source != "1"
                sink = None if elsewhere else sink
        elif each.fd in (None, 1):
            name = text_of(shell, each.target).text
            sink, elsewhere = (name, ">>" in each.op), False
    captured = sink is not None or elsewhere
    if captured:
        shell.state.out = ""
    try:
        run()
    finally:
        if captured:
            text = shell.state.out
            shell.state.out = outer
            if sink is not None:
                shell.write_file(sink[0], text, append=sink[1])
        shell.state.stdin = stdin


def _input(shell: Shell, redirect: Redirect) -> str | None:
    name = text_of(shell, redirect.target).text
    text = shell.read_file(name)
    if text is None and re.fullmatch(r"[A-Z_a-z][\w ]*", name) and not shell.exists(name, "-e"):
        shell.tested.discard(shell.absolute(name))
        shell.placeholder = f"<{name}>"
    elif name and text is None and name.startswith("/"):
        return None
    return text
