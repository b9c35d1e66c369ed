"""Following a script statement by statement without executing anything.

What only a run would tell stands as a mark in strings (:mod:`values`) and as None in exit statuses; a condition that
depends on it is explored both ways (:mod:`control`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hapmoe.errors import InputError

from . import files
from .arithmetic import ArithmeticError_
from .commands import run_words
from .control import Control, Pending, bounded, branch, take
from .assigning import run_assign
from .launchers import Around
from .parse import Parser
from .patterns import regex_of
from .redirects import with_redirects
from .state import State, Var, World, join
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
from .values import MARK, Text, Unknown
from .variables import assign, index_of, number, read_number, resolve, secret, write_number
from .words import fields, fragments, pattern_of, text_of

__all__ = ["Shell"]

_ROUNDS = 70
_WORDS_CACHE = 4096


class Shell:
    """One shell being followed. Its parts live in other modules; this one holds the position and the statements."""

    def __init__(self, world: World, state: State, file: str) -> None:
        self.world, self.state, self.file = world, state, file
        self.pending: list[Pending] = []
        self.sources: list[str] = [state.zero]
        self.calls: list[str] = []
        self.tested: set[str] = set()
        self.around = Around()
        self.placeholder = ""
        self.substitution = ""
        self.current_line = 1
        self.depth = 0
        self.conditions = 0
        self.tolerant = 0
        self.loops = 0
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
        word = Word(tuple(Parser(source, self.file, self.current_line).parts_until(frozenset())), source, self.current_line)
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
        why = f"depends on the condition at {branch}" if branch else f"arithmetic on a value that is not known: {source}"
        return self.world.marks.mark(Unknown(why, source, self.where(), branch=branch))

    def branch_in_names(self, text: str) -> str:
        """The condition that a variable named in an arithmetic text depends on, if any."""
        import re

        for name in re.findall(r"[A-Za-z_]\w*", text):
            found = self.state.find(name)
            if found:
                var = found[1]
                for unknown in self.world.marks.of((var.value.text if var.value else "") + var.mark):
                    if unknown.branch:
                        return unknown.branch
        return ""

    def note_export(self, name: str) -> None:
        if name not in self.state.exports:
            self.state.exports = (*self.state.exports, name)

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
            return self.world.marks.mark(replace(first, source=f'$({name} "{files.source_of(self, text)}")', path=function(real)))
        return self.world.marks.derive(text, "", f'$({name} "{files.source_of(self, text)}")', self.where(), nonempty=True)

    # -- programs -------------------------------------------------------------------------------------------------

    def run_text(self, text: str, file: str, first_line: int = 1, *, script: bool = False) -> None:
        """Follow source text command by command, as bash reads it; ``script`` when it is a whole script of its own."""
        outer, self.file = self.file, file
        line = self.current_line
        try:
            self.nested(lambda: self._run_items(Parser(text, file, first_line), script=script))
        finally:
            self.file, self.current_line = outer, line

    def _run_items(self, parser: Parser, *, script: bool) -> None:
        depth = (self.depth, len(self.state.scopes), len(self.calls), self.conditions, self.loops)
        for item in parser.commands():
            try:
                self.item(item)
            except ArithmeticError_ as error:
                if not script:
                    raise
                self.world.notes.append(f"{self.where()}: {error}")
                self.depth, scopes, calls, self.conditions, self.loops = depth
                del self.state.scopes[scopes:], self.calls[calls:]
                self.state.status = 1

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
        _RUN[type(node)](self, node)

    def subshell(self, run: Callable[[], None]) -> None:
        """Run in a copy of the state; only files, output and status come back."""
        outer = self.state
        self.state = outer.copy()
        loops, self.loops = self.loops, 0
        try:
            bounded(self, ("exit", "return", "break", "continue"), run)
        finally:
            self.loops = loops
            inner, self.state = self.state, outer
        outer.files, outer.out, outer.status = inner.files, inner.out, inner.status

    def errexit(self) -> None:
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
        line, conditions = self.current_line, self.conditions
        try:
            self.nested(lambda: self.subshell(lambda: self.program(body)))
            text = self.state.out
        finally:
            self.state.out, self.substitution, self.current_line, self.conditions = out, outer_source, line, conditions
        return text.rstrip("\n") if strip else text

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


def _and_or(shell: Shell, node: AndOr) -> None:
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


def _if(shell: Shell, node: If) -> None:
    def clause(place: int) -> None:
        if place == len(node.clauses):
            shell.state.status = 0
            shell.program(node.otherwise)
            return
        condition, body = node.clauses[place]
        shell.current_line = condition[0].line if condition else node.line
        status = shell.condition(lambda: shell.program(condition))
        where = shell.where(condition[0].line if condition else node.line)
        shell.choose(where, status, lambda: shell.program(body), lambda: clause(place + 1))

    clause(0)


def _case(shell: Shell, node: Case) -> None:
    shell.world.missing = ""
    subject = text_of(shell, node.word).text
    where = shell.where(node.line)
    if shell.world.missing and not shell.world.arguments_given and not shell.calls and not subject:
        raise InputError(f"a case reads argument {shell.world.missing}, which is not given", where=where,
                         hint="give the script's arguments")
    unknown = bool(MARK.search(subject))
    ways: list[Callable[[], None]] = []

    def body(place: int) -> Callable[[], None]:
        def run() -> None:
            at = place
            shell.program(node.items[at][1])
            while node.items[at][2] == ";&" and at + 1 < len(node.items):
                at += 1
                shell.program(node.items[at][1])
        return run

    shell.state.status = 0
    for place, (patterns, _, ender) in enumerate(node.items):
        texts = [pattern_of(shell, pattern) for pattern in patterns]
        if unknown or any(MARK.search(text) for text in texts):
            ways.append(body(place))
            if "*" in texts:
                branch(shell, where, ways)
                return
            continue
        if any(regex_of(text).fullmatch(subject) for text in texts):
            if ways:
                branch(shell, where, [*ways, body(place)])
            else:
                body(place)()
            if ender != ";;&":
                return
    if ways:
        branch(shell, where, [*ways, lambda: None])


def _for(shell: Shell, node: For) -> None:
    if node.words is None:
        values = list(shell.state.positionals)
        if shell.state.positional_mark:
            values = [Text(shell.state.positional_mark, shell.where())]
    else:
        values = [value for word in node.words for value in fields(shell, word)]
    shell.state.status = 0
    loop = _Loop(shell, shell.where(node.line))
    for value in values:
        spread = [each for each in shell.world.marks.of(value.text) if each.spread or not each.single]
        if spread or (node.words is None and shell.state.positional_mark):
            branch_line = next((each.branch for each in spread if each.branch), "")
            item = Text(shell.world.marks.mark(Unknown("an item of a list that is not known", f"${node.name}", shell.where(node.line),
                                                       nonempty=False, branch=branch_line)), value.where)
            loop.any_number(lambda item=item: _loop_once(shell, node.name, item, node.body))  # type: ignore[misc]
        elif not loop.once(lambda value=value: _loop_once(shell, node.name, value, node.body)):  # type: ignore[misc]
            break
    loop.end()


def _loop_once(shell: Shell, name: str, value: Text, body: Program) -> None:
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

    def once(self, run: Callable[[], None]) -> bool:
        """One round; False when the loop ends with it for certain."""
        shell = self.shell
        goes_on = True
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
        return goes_on

    def _collect(self, live: list[State]) -> bool:
        arrived = take(self.shell, self.since, ("break", "continue"))
        live += [each.state for each in arrived if each.kind == "continue"]
        self.broken += [each for each in arrived if each.kind == "break"]
        return bool(arrived)

    def any_number(self, run: Callable[[], None]) -> None:
        """The round runs an unknown number of times: repeat until nothing more can become unknown."""
        shell = self.shell
        for _ in range(_ROUNDS):
            before = shell.state
            shell.state = before.copy()
            goes_on = self.once(run)
            self.stopped = False
            after = join(before, shell.state, self.where, shell.world.marks) if goes_on else before
            shell.state = after
            if same(before, after):
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


def same(left: State, right: State) -> bool:
    return (left.scopes == right.scopes and left.files == right.files and left.positionals == right.positionals
            and left.positional_mark == right.positional_mark and left.out == right.out and left.cwd == right.cwd
            and left.stdin == right.stdin)


def _rounds(shell: Shell, where: str, test: Callable[[], int | None], body: Callable[[], None]) -> None:
    """A ``while``: known conditions are followed round by round, unknown ones until nothing changes."""
    loop = _Loop(shell, where)
    rounds = 0
    while True:
        shell.world.step(where)
        before = shell.state.copy()
        wide = bool(loop.broken) and rounds > 40
        since = len(shell.pending)
        status = test()
        if status is None or wide:
            _until_settled(shell, loop, test, body, first=status)
            break
        if status != 0:
            break
        del since
        if not loop.once(body):
            break
        rounds += 1
        if same(before, shell.state):
            loop.stopped = True  # nothing changes any more: behind it come only the ways that broke out
            if not loop.broken:
                shell.world.notes.append(f"{where}: a loop without end")
            break
    if not loop.stopped or loop.broken:
        shell.state.status = shell.state.status if loop.stopped else 0
    loop.end()


def _until_settled(shell: Shell, loop: _Loop, test: Callable[[], int | None], body: Callable[[], None], *,
                   first: int | None) -> None:
    def run() -> None:
        body()
        test()

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
        if same(before, shell.state):
            loop.stopped = first == 0 and bool(loop.broken)
            return


def _while(shell: Shell, node: While) -> None:
    def test() -> int | None:
        shell.current_line = node.line
        status = shell.condition(lambda: shell.program(node.condition))
        return status if not node.until or status is None else int(status == 0)

    _rounds(shell, shell.where(node.line), test, lambda: shell.program(node.body))


def _c_for(shell: Shell, node: CFor) -> None:
    def value(word: Word) -> int | None:
        shell.current_line = node.line
        return number(shell, "".join(each.text for each in fragments(shell, word.parts, shell.where(), quoted=True)))

    def test() -> int | None:
        if not node.condition.source.strip():
            return 0
        result = value(node.condition)
        return None if result is None else int(result == 0)

    def body() -> None:
        # the step also follows a `continue`
        since = len(shell.pending)
        try:
            shell.program(node.body)
        except Control as control:
            if control.kind != "continue" or control.levels > 1:
                raise
        arrived = [each for each in shell.pending[since:] if each.kind == "continue" and each.levels <= 1]
        shell.pending[since:] = [each for each in shell.pending[since:] if each not in arrived]
        for each in arrived:
            shell.state = join(shell.state, each.state, each.where, shell.world.marks)
        value(node.step)

    value(node.start)
    _rounds(shell, shell.where(node.line), test, body)


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
    tested: set[str] = set()
    try:
        for command in node.commands:
            shell.state.out, shell.state.stdin = "", text
            shell.subshell(lambda command=command: shell.node(command))  # type: ignore[misc]
            text = shell.state.out
            statuses.append(shell.state.status)
    finally:
        shell.conditions -= 1
        shell.state.out, shell.state.stdin = out + (text or ""), stdin
    del tested
    if "pipefail" in shell.state.options:
        failed = [status for status in statuses if status != 0]
        return failed[-1] if failed else 0
    return statuses[-1]


def _arith_command(shell: Shell, node: ArithCommand) -> None:
    shell.current_line = node.line
    text = "".join(each.text for each in fragments(shell, node.word.parts, shell.where(), quoted=True))
    from .arithmetic import evaluate

    shell.world.missing = ""
    value = evaluate(text, lambda n, i: read_number(shell, n, i), lambda n, i, v: write_number(shell, n, i, v))
    shell.state.status = None if value is None else int(value == 0)
    shell.errexit()


def _cond_command(shell: Shell, node: CondCommand) -> None:
    shell.current_line = node.line
    value = conditional(shell, node.test)
    shell.state.status = None if value is None else int(not value)
    shell.errexit()


def _function(shell: Shell, node: Function) -> None:
    shell.state.functions[node.name] = node
    shell.state.status = 0


def _subshell(shell: Shell, node: Subshell) -> None:
    shell.nested(lambda: shell.subshell(lambda: shell.program(node.body)))
    shell.errexit()


def _simple(shell: Shell, node: Simple) -> None:
    shell.current_line = node.line
    words: list[Text | Assign] = []
    shell.state.status = 0 if not shell.state.status else shell.state.status
    for word in node.words:
        if isinstance(word, Assign):
            words.append(word)
        else:
            words += fields(shell, word)
    if not words:
        if any(redirect.op == "<" for redirect in node.redirects) and node.assigns:
            raise InputError("an assignment reads from a file, which looks like a placeholder <...>", where=shell.where(),
                             hint="fill in the placeholder")
        shell.state.status = 0
        for each in node.assigns:
            run_assign(shell, each)
        if node.redirects:
            with_redirects(shell, node.redirects, lambda: None)
        shell.errexit()
        return
    with_redirects(shell, node.redirects, lambda: _prefixed(shell, node.assigns, lambda: run_words(shell, words)))
    shell.errexit()


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
            del shell.state.scopes[depth - 1:]


_RUN: dict[type, Callable[[Shell, object], None]] = {
    AndOr: _and_or, If: _if, Case: _case, For: _for, While: _while, CFor: _c_for, Pipeline: _pipeline,  # type: ignore[dict-item]
    ArithCommand: _arith_command, CondCommand: _cond_command, Function: _function, Subshell: _subshell,  # type: ignore[dict-item]
    Simple: _simple,  # type: ignore[dict-item]
    Group: lambda shell, node: shell.nested(lambda: shell.program(node.body)),  # type: ignore[attr-defined]
    Redirected: lambda shell, node: with_redirects(shell, node.redirects, lambda: shell.node(node.node)),  # type: ignore[attr-defined]
}
