"""What a shell knows at one point of a script, and how two such states are joined after an unknown condition."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from hapmoe.errors import InputError

from .syntax import Function
from .values import Marks, Text, Unknown

__all__ = ["Launch", "State", "Var", "World", "join"]

_MOST_STEPS = 60_000
_MOST_TEXT = 2_000_000
_STEPS_A_LINE = 15


@dataclass(frozen=True, slots=True)
class Var:
    """A shell variable; ``items`` (an array) is never changed in place."""

    value: Text | None = None
    items: dict[int | str, Text] | None = None
    mark: str = ""
    """The array's content as a whole is not known: the mark that stands for it."""
    assoc: bool = False
    exported: bool = False
    readonly: bool = False
    integer: bool = False
    ref: bool = False
    bare: bool = False
    """An array that was declared and never given a value."""
    case: str = ""


@dataclass(frozen=True, slots=True)
class Launch:
    """A training process the script would start, before the choice among several."""

    launcher: str
    launcher_argv: tuple[Text, ...]
    entry: Text
    argv: tuple[Text, ...]
    python: tuple[str, ...]
    world_size: int | None
    nodes: int | None
    devices_per_node: int | None
    env: tuple[tuple[str, Text], ...]
    where: str
    guards: tuple[str, ...]
    doubts: tuple[str, ...] = ()


@dataclass(slots=True)
class World:
    """What all branches share: the unknowns, the launches seen, what was read unset, and the bounds."""

    script: str
    folder: Path
    start: Path
    marks: Marks = field(default_factory=Marks)
    launches: list[Launch] = field(default_factory=list)
    unset: dict[str, str] = field(default_factory=dict)
    missing: str = ""
    """A positional that was read and not given, since this was last cleared."""
    arguments_given: int = 0
    steps: int = 0
    most_steps: int = _MOST_STEPS
    notes: list[str] = field(default_factory=list)
    lines: dict[str, str] = field(default_factory=dict)
    secrets: set[str] = field(default_factory=set)
    """Values that variables with the name of a credential were given: other words may hold them too."""
    defined: dict[int, tuple[Function, str, str]] = field(default_factory=dict)
    """Functions by identity: the node, the file it stands in, and that file's name as the script gave it."""
    outside: bool = False
    """A program that is not followed has run, which may have written files."""
    dropped_call: bool = False
    """An error may have dropped a call before it returned."""
    volatile: set[str] = field(default_factory=set)
    """Variables that a trap may change between any two commands."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Names that bash replaces by other text (``shopt -s expand_aliases``), and where."""

    def step(self, where: str, cost: int = 1) -> None:
        self.steps += cost
        if self.steps > self.most_steps:
            raise InputError("the script takes too many steps to follow", where=where, hint="an endless loop, perhaps")

    def allow(self, text: str) -> None:
        """A longer script may take more steps."""
        self.most_steps = max(self.most_steps, _MOST_STEPS + _STEPS_A_LINE * text.count("\n"))

    def joined(self, pieces: Iterable[str], where: str, by: str = "") -> str:
        """Pieces as one bounded text; too much is refused before it is put together."""
        pieces = list(pieces)
        if sum(map(len, pieces)) + len(pieces) * len(by) > _MOST_TEXT:
            raise InputError("a value grows beyond 2 MB", where=where, hint="an endless loop, perhaps")
        return self.bounded(by.join(pieces), where)

    def bounded(self, text: str, where: str) -> str:
        if len(text) > 4000:
            self.step(where, len(text) // 16_000)
        if len(text) > _MOST_TEXT:
            raise InputError("a value grows beyond 2 MB", where=where, hint="an endless loop, perhaps")
        return text


@dataclass(slots=True)
class State:
    """One point of a run. ``copy`` is shallow: the values inside are frozen or replaced, never changed in place."""

    scopes: list[dict[str, Var]]
    cwd: str
    functions: dict[str, Function | str] = field(default_factory=dict)
    positionals: tuple[Text, ...] = ()
    positional_mark: str = ""
    options: frozenset[str] = frozenset()
    status: int | None = 0
    files: dict[str, str | None] = field(default_factory=dict)
    out: str = ""
    exports: dict[str, None] = field(default_factory=dict)
    """Names in the order of their first export."""
    guards: tuple[str, ...] = ()
    assumed: frozenset[str] = frozenset()
    """Files that the branch being explored takes to exist."""
    stdin: str | None = None
    inputs: dict[int, str | None] = field(default_factory=dict)
    """What other descriptors read, by number."""
    zero: str = ""
    traps: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """What runs on EXIT and ERR, never changed in place; several where it is not known which ("": nothing)."""

    def copy(self) -> State:
        return replace(
            self,
            scopes=[dict(scope) for scope in self.scopes],
            functions=dict(self.functions),
            files=dict(self.files),
            exports=dict(self.exports),
            inputs=dict(self.inputs),
        )

    def find(self, name: str) -> tuple[dict[str, Var], Var] | None:
        for scope in reversed(self.scopes):
            if name in scope:
                return scope, scope[name]
        return None


def join(left: State, right: State, where: str, marks: Marks) -> State:
    """What holds after either of two branches: equal things stay, others become unknown, due to ``where``."""
    scopes = [_join_scope(a, b, where, marks) for a, b in zip(left.scopes, right.scopes, strict=False)]
    same_arguments = [p.text for p in left.positionals] == [p.text for p in right.positionals]
    files: dict[str, str | None] = {}
    for path in left.files.keys() | right.files.keys():
        a, b = left.files.get(path), right.files.get(path)
        files[path] = a if a == b else None
    functions: dict[str, Function | str] = dict(left.functions)
    for name in left.functions.keys() | right.functions.keys():
        if left.functions.get(name) is not right.functions.get(name):
            functions[name] = where
    return State(
        scopes=scopes,
        cwd=left.cwd if left.cwd == right.cwd else _either(where, marks),
        functions=functions,
        positionals=left.positionals if same_arguments else (),
        positional_mark=(
            left.positional_mark or right.positional_mark if same_arguments else _either(where, marks, single=False)
        ),
        options=left.options & right.options,
        status=left.status if left.status == right.status else None,
        files=files,
        out=left.out if left.out == right.out else _join_out(left.out, right.out, where, marks),
        exports=left.exports | right.exports,
        guards=left.guards,
        assumed=left.assumed & right.assumed,
        stdin=left.stdin if left.stdin == right.stdin else None,
        inputs={fd: text for fd, text in left.inputs.items() if right.inputs.get(fd) == text},
        zero=left.zero,
        traps=_joined_traps(left.traps, right.traps),
    )


def _joined_traps(left: dict[str, tuple[str, ...]], right: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """The traps that may be set after either of two ways; "" where none."""
    if left == right:
        return left
    return {
        name: tuple(dict.fromkeys((*left.get(name, ("",)), *right.get(name, ("",)))))
        for name in left.keys() | right.keys()
    }


def _join_out(left: str, right: str, where: str, marks: Marks) -> str:
    common = 0
    while common < min(len(left), len(right)) and left[common] == right[common]:
        common += 1
    shared = left[:common]
    if shared and any(each.branch for each in marks.of(shared[-1])):
        return shared  # the end was already open: whatever follows is covered
    return shared + _either(where, marks, single=False)


def _either(where: str, marks: Marks, *, single: bool = True, name: str = "") -> str:
    why = f"depends on the condition at {where}"
    source = f"${{{name}}}" if name else ""
    return marks.mark(Unknown(why, source, where, single=single, nonempty=False, branch=where))


def _join_scope(left: dict[str, Var], right: dict[str, Var], where: str, marks: Marks) -> dict[str, Var]:
    joined = dict(left)
    for name in left.keys() | right.keys():
        a, b = left.get(name), right.get(name)
        if a is not b:
            joined[name] = _join_var(name, a or Var(), b or Var(), where, marks)
    return joined


def _join_var(name: str, a: Var, b: Var, where: str, marks: Marks) -> Var:
    flags = replace(a, exported=a.exported or b.exported)
    if a.mark or b.mark or (a.items is None) != (b.items is None):
        return replace(
            flags, value=None, items=None, mark=a.mark or b.mark or _either(where, marks, single=False, name=name)
        )
    if a.items is not None and b.items is not None:
        if {k: v.text for k, v in a.items.items()} == {k: v.text for k, v in b.items.items()}:
            return flags
        return replace(flags, items=None, mark=_either(where, marks, single=False, name=name))
    left, right = a.value, b.value
    if (left is None and right is None) or (left and right and left.text == right.text):
        return flags
    for side in (left, right):
        if side and len(side.text) == 1 and any(part.branch for part in marks.of(side.text)):
            return replace(flags, value=side)
    single = all(
        side is None
        or (side.text and not any(c.isspace() for c in side.text) and all(p.single for p in marks.of(side.text)))
        for side in (left, right)
    )
    return replace(
        flags,
        value=Text(
            _either(where, marks, single=bool(single) and left is not None and right is not None, name=name), where
        ),
    )
