"""Redirections: where a command's output goes and its input comes from."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from .syntax import Pipeline, Program, Redirect, Simple
from .words import text_of

if TYPE_CHECKING:
    from .interpret import Shell

__all__ = ["keep_redirects", "only_a_file", "with_redirects"]


def with_redirects(shell: Shell, redirects: tuple[Redirect, ...], run: Callable[[], None]) -> None:
    """Run with ``redirects`` in effect; what goes to standard error is not followed, only that it joins the output."""
    if not redirects:
        run()
        return
    outer, stdin, inputs, merged = shell.state.out, shell.state.stdin, dict(shell.state.inputs), shell.merged
    sink: tuple[str, bool] | None = None
    elsewhere = errors = apart = nowhere = False
    copied: int | None = None
    for each in redirects:
        shell.current_line = each.line
        target = each.target.source
        if each.op in ("<", "<<", "<<-", "<<<"):
            fd = each.fd or 0
            given = _here(shell, each) if each.op != "<" else None
            if each.op == "<":
                name = text_of(shell, each.target).text
                nowhere = nowhere or not name
                given = _input(shell, name)
            _read_from(shell, fd, given)
            copied = None if fd == 0 else copied
        elif each.op == "<&" and (each.fd or 0) == 0 and target.isdigit():
            copied = int(target)
            shell.state.stdin = shell.state.stdin if copied == 0 else shell.state.inputs.get(copied)
        elif each.op in ("<&", "<>"):
            _read_from(shell, each.fd or 0, None)
        elif each.op == ">&" and re.fullmatch(r"\d+|-", target):
            if each.fd == 2:
                shell.merged = target == "1" and not elsewhere and sink is None
            elif (each.fd or 1) == 1:
                elsewhere, errors = target != "1", target == "2"
                sink = None if elsewhere else sink
        elif each.fd is not None and each.fd != 1:
            shell.merged = shell.merged and each.fd != 2
            if "&" not in each.op:
                shell.write_file(text_of(shell, each.target).text, None)
        elif each.fd in (None, 1):
            name = text_of(shell, each.target).text
            sink, elsewhere = (name, ">>" in each.op), False
            apart, shell.merged = shell.merged, "&" in each.op
    if nowhere:
        shell.state.status = 1  # "No such file or directory", or "ambiguous redirect": the command is not run
        shell.state.stdin, shell.state.inputs, shell.merged = stdin, inputs, merged
        shell.errexit()
        return
    captured = sink is not None or elsewhere
    said, shell.said = shell.said, False
    if captured:
        shell.state.out = ""
    try:
        run()
    finally:
        if copied:
            inputs[copied] = shell.state.stdin
        if captured:
            text = shell.state.out
            shell.state.out = outer
            if sink is not None:
                shell.write_file(sink[0], text, append=sink[1])
            elif errors and text:
                shell.said = True
                if merged:
                    shell.print(None, what="standard error")
        if apart and shell.said:  # 2>&1 > file: errors go where the output went
            shell.print(None, what="standard error")
        shell.said = shell.said or said
        shell.state.stdin, shell.state.inputs, shell.merged = stdin, inputs, merged


def keep_redirects(shell: Shell, redirects: tuple[Redirect, ...]) -> None:
    """``exec`` with nothing but redirections: they hold for what follows."""
    for each in redirects:
        shell.current_line = each.line
        target = each.target.source
        if each.op in ("<", "<<", "<<-", "<<<"):
            named = each.op == "<"
            _read_from(
                shell, each.fd or 0, _input(shell, text_of(shell, each.target).text) if named else _here(shell, each)
            )
        elif each.op in ("<&", "<>"):
            _read_from(shell, each.fd or 0, None)
        else:
            if not re.fullmatch(r"\d+|-", target):
                shell.write_file(text_of(shell, each.target).text, None)
            if each.fd in (None, 1):
                shell.print(None, what="exec")  # what a substitution around it gets of the rest is not known


def _here(shell: Shell, redirect: Redirect) -> str:
    return text_of(shell, redirect.target).text + ("\n" if redirect.op == "<<<" else "")


def _read_from(shell: Shell, fd: int, text: str | None) -> None:
    if fd == 0:
        shell.state.stdin = text
    else:
        shell.state.inputs = {**shell.state.inputs, fd: text}


def _input(shell: Shell, name: str) -> str | None:
    text = shell.read_file(name)
    if text is None and re.fullmatch(r"[A-Z_a-z][\w ]*", name) and not shell.exists(name, "-e"):
        shell.tested.discard(shell.absolute(name))
        shell.placeholder = f"<{name}>"
    elif name and text is None and name.startswith("/"):
        return None
    return text


def only_a_file(body: Program) -> Redirect | None:
    """The redirection of ``$(< file)``, which stands for the file's text."""
    node = body[0].node if len(body) == 1 else None
    if isinstance(node, Pipeline) and len(node.commands) == 1 and not node.negated:
        node = node.commands[0]
    if isinstance(node, Simple) and not node.words and not node.assigns and len(node.redirects) == 1:
        redirect = node.redirects[0]
        return redirect if redirect.op == "<" and redirect.fd in (None, 0) else None
    return None
