"""Following a script statement by statement without executing anything.

What only a run would tell stands as a mark in strings (:mod:`values`) and as None in exit statuses; a condition that
depends on it is explored both ways (:mod:`control`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hapmoe.errors import InputError

from . import files
from .arithmetic import ArithmeticError_, evaluate
from .assigning import run_assign
from .choices import and_or, case, if_
from .commands import run_words
from .control import Control, Pending, bounded, branch
from .launched import Around
from .loops import c_for, for_in, while_
from .parse import Parser
from .redirects import keep_redirects, only_a_file, with_redirects
from .state import State, Var, World
from .syntax import (
    AndOr,
    ArithCommand,
    ArrayLiteral,
    Assign,
    Case,
    CFor,
    CommandSub,
    CondCommand,
    For,
    Function,
    Group,
    If,
    Item,
    Node,
    Pipeline,
    Program,
    Redirected,
    Simple,
    Subshell,
    While,
    Word,
)
from .tests import conditional
from .traps import at_exit, on_error
from .values import Text, Unknown
from .variables import read_number, secret, write_number
from .words import fields, fragments, text_of

__all__ = ["Shell"]

_WORDS_CACHE = 4096


class Shell:
    """One shell being followed. Its parts live in other modules; this one holds the position and the statements."""

    def __init__(self, world: World, state: State, file: str) -> None:
        self.world, self.state, self.file = world, state, file
        self.pending: list[Pending] = []
        self.sources: list[str] = [state.zero]
        self.calls: list[str] = []
        self.frames: list[tuple[str, str]] = [("main", state.zero)]
        """Functions and sourced files being run, outermost first: the name, and the file it was read from."""
        self.tested: set[str] = set()
        self.around = Around()
        self.placeholder = ""
        self.substitution = ""
        self.current_line = 1
        self.depth = 0
        self.conditions = 0
        self.tolerant = 0
        self.loops = 0
        self.captures = self.captured = 0
        """Command substitutions so far, and when the present simple command began."""
        self.merged = False
        """Standard error goes where the output goes."""
        self.said = False
        """Something was written to standard error."""
        self.splitting = False
        self._words: dict[tuple[str, int], Word | None] = {}

    # -- places and text ------------------------------------------------------------------------------------------

    def where(self, line: int | None = None) -> str:
        return f"{self.file}:{self.current_line if line is None else line}"

    def parse_word(self, source: str, line: int) -> Word | None:
        if (source, line) not in self._words:
            if len(self._words) > _WORDS_CACHE:
                self._words.clear()
            self._words[source, line] = Parser(source, self.file, line).word()
        return self._words[source, line]

    def expand_source(self, source: str) -> str:
        """A subscript's source as a string."""
        word = Word(
            tuple(Parser(source, self.file, self.current_line).parts_until(frozenset())), source, self.current_line
        )
        return text_of(self, word).text

    def expand_arithmetic(self, source: str) -> str:
        if "$" not in source and "`" not in source and '"' not in source:
            return source
        parts = Parser(source, self.file, self.current_line)._sub_parts(source)
        return "".join(each.text for each in fragments(self, parts, self.where(), quoted=True))

    def number_text(self, value: int | None, source: str, *, branch: str = "") -> str:
        """A number as text, or the mark of one that is not known."""
        if value is not None:
            return str(value)
        why = (
            f"depends on the condition at {branch}" if branch else f"arithmetic on a value that is not known: {source}"
        )
        return self.world.marks.mark(Unknown(why, source, self.where(), branch=branch))

    def branch_in_names(self, text: str) -> str:
        """The condition that a variable named in an arithmetic text depends on, if any."""
        for name in re.findall(r"[A-Za-z_]\w*", text):
            found = self.state.find(name)
            if found:
                var = found[1]
                for unknown in self.world.marks.of((var.value.text if var.value else "") + var.mark):
                    if unknown.branch:
                        return unknown.branch
        return ""

    def note_export(self, name: str) -> None:
        self.state.exports.setdefault(name)

    # -- files ----------------------------------------------------------------------------------------------------

    def absolute(self, text: str) -> str:
        return files.absolute(self, text)

    def read_file(self, name: str) -> str | None:
        return files.read(self, name)

    def write_file(self, name: str, text: str | None, *, append: bool = False) -> None:
        files.write(self, name, text, append=append)

    def exists(self, name: str, op: str) -> bool | None:
        return files.exists(self, name, op)

    def files_matching(self, text: str, active: str, where: str) -> list[Text]:
        return files.matching(self, text, active, where)

    def derived_path(self, text: str, function: Callable[[str], str], name: str) -> str:
        real = self.world.marks.real_path(text)
        unknowns = self.world.marks.of(text)
        first = unknowns[0]
        if real is not None:
            return self.world.marks.mark(
                replace(first, source=f'$({name} "{files.source_of(self, text)}")', path=function(real))
            )
        return self.world.marks.derive(
            text, "", f'$({name} "{files.source_of(self, text)}")', self.where(), nonempty=True
        )

    # -- programs -------------------------------------------------------------------------------------------------

    def run_text(self, text: str, file: str, first_line: int = 1) -> None:
        """Follow source text line by line, as bash reads it."""
        outer, self.file = self.file, file
        line = self.current_line
        try:
            self.nested(lambda: self._run_lines(Parser(text, file, first_line)))
        finally:
            self.file, self.current_line = outer, line

    def _run_lines(self, parser: Parser) -> None:
        """An error in an expansion drops the rest of its line and no more."""
        depth = len(self.state.scopes)
        empty = True
        for items in parser.lines():
            empty = False
            bounded(self, ("abort",), lambda items=items: self.program(tuple(items)))  # type: ignore[misc]
            del self.state.scopes[depth:]
        if empty:
            self.state.status = 0

    def nested(self, run: Callable[[], None]) -> None:
        self.depth += 1
        if self.depth > 60:
            raise InputError("commands are nested too deeply", where=self.where(), hint="an endless recursion, perhaps")
        try:
            run()
        finally:
            self.depth -= 1

    def program(self, body: Program) -> None:
        for item in body:
            self.item(item)

    def item(self, item: Item) -> None:
        self.current_line = item.line
        if item.background:
            self.subshell(lambda: self.node(item.node))
            self.state.status = 0
            return
        self.node(item.node)

    def node(self, node: Node) -> None:
        self.world.step(self.where())
        try:
            _RUN[type(node)](self, node)
        except InputError as error:
            if error.where:
                raise
            raise InputError(error.what, where=self.where(), hint=error.hint) from None
        except ArithmeticError_ as error:
            self.world.notes.append(f"{self.where()}: {error}")
            self.state.status = 1
            raise Control("abort") from None

    def subshell(self, run: Callable[[], None]) -> None:
        """Run in a copy of the state; only files, output and status come back."""
        outer = self.state
        self.state = outer.copy()
        self.state.traps = {
            key: value for key, value in outer.traps.items() if key == "ERR" and "errtrace" in outer.options
        }
        loops, self.loops = self.loops, 0
        try:
            bounded(self, ("exit", "return", "break", "continue", "abort"), run)
            at_exit(self)
        finally:
            self.loops = loops
            inner, self.state = self.state, outer
        outer.files, outer.out, outer.status = inner.files, inner.out, inner.status

    def errexit(self, *, trapped: bool = True) -> None:
        """What follows a command that failed where nothing tests for it; ``trapped``: the trap was set before it."""
        if self.state.traps and trapped and not self.conditions:
            on_error(self)
        if self.state.status and not self.conditions and "errexit" in self.state.options:
            raise Control("exit")

    # -- captures -------------------------------------------------------------------------------------------------

    def capture(self, part: CommandSub) -> str:
        """What ``$( )`` prints, trailing newlines removed."""
        body = part.body
        if body is None:
            body = Parser(part.inner, self.file, part.line, 1).program()
        return self.capture_body(body, part.source)

    def capture_body(self, body: Program, source: str, *, strip: bool = True) -> str:
        outer_source, self.substitution = self.substitution, source if len(source) < 300 else source[:300]
        out, self.state.out = self.state.out, ""
        merged, self.merged = self.merged, False
        line, conditions, captured = self.current_line, self.conditions, self.captured
        try:
            file = only_a_file(body)
            if file is not None:
                self.print(self.read_file(text_of(self, file.target).text))
            else:
                self.nested(lambda: self.subshell(lambda: self._captured(body, lenient=strip)))
            text = self.state.out
            self.captures += 1
        finally:
            self.state.out, self.substitution, self.current_line, self.conditions = out, outer_source, line, conditions
            self.merged, self.captured = merged, captured
        return text.rstrip("\n") if strip else text

    def _captured(self, body: Program, *, lenient: bool) -> None:
        """``lenient``: a command substitution, which drops ``set -e`` unless told otherwise; ``<( )`` keeps it, also
        where a condition around it suspends it."""
        if not lenient:
            self.conditions = 0
        elif not self.state.options & {"inherit_errexit", "posix"}:
            self.state.options -= {"errexit"}
        self.program(body)

    def print(self, text: str | None, *, what: str = "") -> None:
        """Add to standard output; None where a run would tell."""
        if text is None:
            source = self.substitution or what
            why = f"command substitution {self.substitution}" if self.substitution else f"the output of {what}"
            text = self.world.marks.mark(Unknown(why, source, self.where(), single=False, nonempty=False))
        self.state.out = self.world.bounded(self.state.out + text, self.where())

    # -- conditions -----------------------------------------------------------------------------------------------

    def condition(self, run: Callable[[], None]) -> int | None:
        """The status of commands in a condition, where ``set -e`` does not act."""
        self.conditions += 1
        try:
            run()
        finally:
            self.conditions -= 1
        return self.state.status

    def choose(self, where: str, status: int | None, yes: Callable[[], None], no: Callable[[], None]) -> None:
        """Go the way a status says, or both when it is not known."""
        if status is None:
            branch(self, where, [yes, no])
        elif status == 0:
            yes()
        else:
            no()


def _pipeline(shell: Shell, node: Pipeline) -> None:
    if len(node.commands) == 1:
        status = shell.condition(lambda: shell.node(node.commands[0])) if node.negated else None
    else:
        status = _pipes(shell, node)
    if node.negated:
        shell.state.status = None if status is None else int(status == 0)
        return
    shell.state.status = status
    shell.errexit()


def _pipes(shell: Shell, node: Pipeline) -> int | None:
    out, stdin = shell.state.out, shell.state.stdin
    statuses: list[int | None] = []
    text: str | None = stdin
    shell.conditions += 1
    try:
        for command in node.commands:
            shell.state.out, shell.state.stdin = "", text
            if command is node.commands[-1] and "lastpipe" in shell.state.options:
                shell.node(command)
            else:
                shell.subshell(lambda command=command: shell.node(command))  # type: ignore[misc]
            text = shell.state.out
            statuses.append(shell.state.status)
    finally:
        shell.conditions -= 1
        shell.state.out, shell.state.stdin = out + (text or ""), stdin
    if "pipefail" in shell.state.options:
        failed = [status for status in statuses if status != 0]
        return failed[-1] if failed else 0
    return statuses[-1]


def _arith_command(shell: Shell, node: ArithCommand) -> None:
    shell.current_line = node.line
    text = "".join(each.text for each in fragments(shell, node.word.parts, shell.where(), quoted=True))
    shell.world.missing = ""
    try:
        value = evaluate(text, lambda n, i: read_number(shell, n, i), lambda n, i, v: write_number(shell, n, i, v))
    except ArithmeticError_ as error:  # unlike in $(( )), the script goes on
        shell.world.notes.append(f"{shell.where()}: {error}")
        value = 0
    shell.state.status = None if value is None else int(value == 0)
    shell.errexit()


def _cond_command(shell: Shell, node: CondCommand) -> None:
    shell.current_line = node.line
    value = conditional(shell, node.test)
    shell.state.status = None if value is None else int(not value)
    shell.errexit()


def _function(shell: Shell, node: Function) -> None:
    shell.state.functions[node.name] = node
    shell.world.defined[id(node)] = (node, shell.file, shell.frames[-1][1] if shell.frames else "environment")
    shell.state.status = 0


def _subshell(shell: Shell, node: Subshell) -> None:
    shell.nested(lambda: shell.subshell(lambda: shell.program(node.body)))
    shell.errexit()


def _simple(shell: Shell, node: Simple) -> None:
    shell.current_line, shell.captured = node.line, shell.captures
    words: list[Text | Assign] = []
    for word in node.words:
        if isinstance(word, Assign):
            words.append(word)
        else:
            words += fields(shell, word)
    if not words:
        if any(redirect.op == "<" for redirect in node.redirects) and node.assigns:
            raise InputError(
                "an assignment reads from a file, which looks like a placeholder <...>",
                where=shell.where(),
                hint="fill in the placeholder",
            )
        captures = shell.captures
        for each in node.assigns:
            run_assign(shell, each)
        if shell.captures == captures:
            shell.state.status = 0
        if node.redirects:
            with_redirects(shell, node.redirects, lambda: None)
        shell.errexit()
        return
    if len(words) == 1 and node.redirects and isinstance(words[0], Text) and words[0].text == "exec":
        keep_redirects(shell, node.redirects)
        shell.state.status = 0
        return
    trapped = "ERR" in shell.state.traps
    with_redirects(shell, node.redirects, lambda: _prefixed(shell, node.assigns, lambda: run_words(shell, words)))
    shell.errexit(trapped=trapped)


def _prefixed(shell: Shell, assigns: tuple[Assign, ...], run: Callable[[], None]) -> None:
    """Run with ``NAME=value`` words in front: exported for this command only."""
    if not assigns:
        run()
        return
    values = {}
    for each in assigns:
        if isinstance(each.value, ArrayLiteral):
            raise InputError("an array in front of a command", where=shell.where(each.line))
        value = text_of(shell, each.value, assignment=True)
        values[each.name] = Var(value=secret(shell, each.name, value), exported=True)
    shell.state.scopes.append(values)
    depth = len(shell.state.scopes)
    try:
        run()
    finally:
        if len(shell.state.scopes) >= depth:
            del shell.state.scopes[depth - 1 :]


_RUN: dict[type, Callable[[Shell, Any], None]] = {
    AndOr: and_or,
    If: if_,
    Case: case,
    For: for_in,
    While: while_,
    CFor: c_for,
    Pipeline: _pipeline,
    ArithCommand: _arith_command,
    CondCommand: _cond_command,
    Function: _function,
    Subshell: _subshell,
    Simple: _simple,
    Group: lambda shell, node: shell.nested(lambda: shell.program(node.body)),
    Redirected: lambda shell, node: with_redirects(shell, node.redirects, lambda: shell.node(node.node)),
}
