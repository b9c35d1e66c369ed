"""The syntax tree of a shell script: plain frozen values, one class per construct."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = [
    "AndOr",
    "Arith",
    "ArithCommand",
    "ArrayLiteral",
    "Assign",
    "CFor",
    "Case",
    "CommandSub",
    "CondCommand",
    "DoubleQuoted",
    "For",
    "Function",
    "Group",
    "If",
    "Item",
    "Literal",
    "Node",
    "Param",
    "Part",
    "Pipeline",
    "ProcessSub",
    "Program",
    "Redirect",
    "Redirected",
    "Simple",
    "Subshell",
    "Test",
    "While",
    "Word",
]


@dataclass(frozen=True, slots=True)
class Literal:
    text: str
    quoted: bool = False


@dataclass(frozen=True, slots=True)
class DoubleQuoted:
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Param:
    """``$name``, ``${name[index]op arg}``."""

    name: str
    index: str | None = None
    op: str = ""
    arg: tuple[Part, ...] = ()
    second: tuple[Part, ...] | None = None
    """The replacement of ``${x/a/b}`` or the length of ``${x:1:2}``."""
    length: bool = False
    indirect: bool = False
    source: str = ""


@dataclass(frozen=True, slots=True)
class CommandSub:
    body: Program | None
    """None for backquotes, which are parsed when reached."""
    source: str
    line: int
    inner: str = ""


@dataclass(frozen=True, slots=True)
class Arith:
    parts: tuple[Part, ...]
    source: str


@dataclass(frozen=True, slots=True)
class ProcessSub:
    body: Program
    source: str
    reads: bool


Part = Literal | DoubleQuoted | Param | CommandSub | Arith | ProcessSub


@dataclass(frozen=True, slots=True)
class Word:
    parts: tuple[Part, ...]
    source: str
    line: int


@dataclass(frozen=True, slots=True)
class ArrayLiteral:
    elements: tuple[tuple[str | None, bool, Word], ...]
    """``(key, appends, value)``; the key is the source between the brackets of ``[key]=value``."""


@dataclass(frozen=True, slots=True)
class Assign:
    name: str
    index: str | None
    append: bool
    value: Word | ArrayLiteral
    line: int
    source: str = ""


@dataclass(slots=True)
class Redirect:
    """``target`` of a here-document is filled in when the parser reaches its body."""

    fd: int | None
    op: str
    target: Word
    line: int


@dataclass(frozen=True, slots=True)
class Simple:
    assigns: tuple[Assign, ...]
    words: tuple[Word | Assign, ...]
    redirects: tuple[Redirect, ...]
    line: int


@dataclass(frozen=True, slots=True)
class Pipeline:
    commands: tuple[Node, ...]
    negated: bool
    line: int


@dataclass(frozen=True, slots=True)
class AndOr:
    first: Node
    rest: tuple[tuple[str, Node], ...]
    line: int


@dataclass(frozen=True, slots=True)
class Item:
    node: Node
    background: bool
    line: int


Program = tuple[Item, ...]


@dataclass(frozen=True, slots=True)
class If:
    clauses: tuple[tuple[Program, Program], ...]
    otherwise: Program
    line: int


@dataclass(frozen=True, slots=True)
class While:
    condition: Program
    body: Program
    until: bool
    line: int


@dataclass(frozen=True, slots=True)
class For:
    name: str
    words: tuple[Word, ...] | None
    body: Program
    line: int
    asks: bool = False
    """A ``select``: a menu."""


@dataclass(frozen=True, slots=True)
class CFor:
    start: Word
    condition: Word
    step: Word
    body: Program
    line: int


@dataclass(frozen=True, slots=True)
class Case:
    word: Word
    items: tuple[tuple[tuple[Word, ...], Program, str], ...]
    line: int


@dataclass(frozen=True, slots=True)
class Group:
    body: Program
    line: int


@dataclass(frozen=True, slots=True)
class Subshell:
    body: Program
    line: int


@dataclass(frozen=True, slots=True)
class Function:
    name: str
    body: Node
    line: int


@dataclass(frozen=True, slots=True)
class ArithCommand:
    word: Word
    line: int


@dataclass(frozen=True, slots=True)
class Test:
    """One node of a ``[[ ]]`` expression: ``op`` is an operator, ``and``, ``or``, ``not`` or ``word``."""

    op: str
    words: tuple[Word, ...] = ()
    tests: tuple[Test, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class CondCommand:
    test: Test
    line: int


@dataclass(frozen=True, slots=True)
class Redirected:
    node: Node
    redirects: tuple[Redirect, ...]
    line: int


Node = (
    Simple
    | Pipeline
    | AndOr
    | If
    | While
    | For
    | CFor
    | Case
    | Group
    | Subshell
    | Function
    | ArithCommand
    | CondCommand
    | Redirected
)
