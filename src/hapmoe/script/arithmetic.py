"""Shell arithmetic: 64-bit integers with C operators, variables by name, and unknown operands."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from hapmoe.errors import InputError

from .values import MARK

__all__ = ["ArithmeticError_", "Number", "evaluate"]

_TOKEN = re.compile(
    r"\s*(?:(?P<number>0[xX][0-9a-fA-F]+|\d+#[0-9a-zA-Z@_]+|\d+)|(?P<name>[A-Za-z_]\w*)|(?P<mark>[\U000f0000-\U0010fffd])"
    r"|(?P<op><<=|>>=|\*\*|\+\+|--|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|[-+*/%<>=!~&|^?:,()\[\]]))",
    re.ASCII,
)
_LEVELS = (
    ("||",),
    ("&&",),
    ("|",),
    ("^",),
    ("&",),
    ("==", "!="),
    ("<", ">", "<=", ">="),
    ("<<", ">>"),
    ("+", "-"),
    ("*", "/", "%"),
)
_ASSIGN = frozenset(("=", "+=", "-=", "*=", "/=", "%=", "<<=", ">>=", "&=", "|=", "^="))
_DEEPEST = 50

Number = int | None
"""None: not known."""


class ArithmeticError_(Exception):
    """The expression is wrong; bash then drops the current top-level command."""


@dataclass(slots=True)
class _Name:
    name: str
    index: str | None


_Value = int | None | _Name


def evaluate(
    text: str, read: Callable[[str, str | None], str], write: Callable[[str, str | None, Number], None], depth: int = 0
) -> Number:
    """The value of an expression whose ``$`` expansions are done. ``read`` gives a variable's text ("" when unset)."""
    if depth > _DEEPEST:
        raise ArithmeticError_("expression recursion level exceeded")
    if not text.strip():
        return 0
    return _Evaluation(text, read, write, depth).run()


class _Evaluation:
    def __init__(
        self,
        text: str,
        read: Callable[[str, str | None], str],
        write: Callable[[str, str | None, Number], None],
        depth: int,
    ) -> None:
        self.text, self.read, self.write, self.depth = text, read, write, depth
        self.pos = 0
        self.skip = 0
        self.unsure = 0
        """Within what is only perhaps evaluated: after ``&&``, ``||`` or ``?`` on a value that is not known."""
        self.kind, self.token = "", ""
        self.level = 0
        self.advance()

    def run(self) -> Number:
        value = self.comma()
        if self.kind:
            raise ArithmeticError_(f"syntax error in expression {self.text!r}")
        return value

    def advance(self) -> None:
        match = _TOKEN.match(self.text, self.pos)
        if not match:
            if self.text[self.pos :].strip():
                raise ArithmeticError_(f"syntax error in expression {self.text!r}")
            self.kind = self.token = ""
            return
        self.pos = match.end()
        self.kind, self.token = str(match.lastgroup), match.group(str(match.lastgroup))
        if self.kind in ("number", "name") and MARK.match(self.text, self.pos):
            self.kind, self.token = "mark", ""
            self.swallow()
        elif self.kind == "mark":
            self.swallow()

    def swallow(self) -> None:
        match = re.compile(r"[\w\U000f0000-\U0010fffd]*").match(self.text, self.pos)
        assert match
        self.pos = match.end()

    def comma(self) -> Number:
        self.level += 1
        if self.level > _DEEPEST:
            raise ArithmeticError_("expression nested too deeply")
        value = self.assignment()
        while self.kind == "op" and self.token == ",":
            self.advance()
            value = self.assignment()
        self.level -= 1
        return value

    def assignment(self) -> Number:
        saved = (self.pos, self.kind, self.token)
        if self.kind == "name":
            name = self.name()
            if self.kind == "op" and self.token in _ASSIGN:
                op = self.token
                self.advance()
                value = self.assignment()
                if self.kind == "op" and self.token in _ASSIGN:
                    raise ArithmeticError_(f"attempted assignment to non-variable in {self.text!r}")
                if op != "=":
                    self.read_twice(name)
                    value = self.apply(op[:-1], self.value(name), value)
                self.put(name, value)
                return value
            self.pos, self.kind, self.token = saved
        return self.ternary()

    def ternary(self) -> Number:
        condition = self.binary(0)
        if not (self.kind == "op" and self.token == "?"):
            return condition
        self.advance()
        self.unsure += condition is None
        self.skip += condition == 0
        yes = self.assignment() if not (self.kind == "op" and self.token == ":") else None
        self.skip -= condition == 0
        if self.token != ":":
            raise ArithmeticError_(f"`:' expected in {self.text!r}")
        self.advance()
        self.skip += condition not in (0, None)
        no = self.ternary()
        self.skip -= condition not in (0, None)
        self.unsure -= condition is None
        return None if condition is None and yes != no else (yes if condition else no)

    def binary(self, level: int) -> Number:
        if level == len(_LEVELS):
            return self.power()
        value = self.binary(level + 1)
        while self.kind == "op" and self.token in _LEVELS[level]:
            op = self.token
            self.advance()
            decided = (op == "&&" and value == 0) or (op == "||" and bool(value))
            perhaps = op in ("&&", "||") and value is None
            self.skip += decided
            self.unsure += perhaps
            right = self.binary(level + 1)
            self.skip -= decided
            self.unsure -= perhaps
            value = self.logic(op, value, right) if op in ("&&", "||") else self.apply(op, value, right)
        return value

    @staticmethod
    def logic(op: str, left: Number, right: Number) -> Number:
        decisive = 0 if op == "&&" else 1
        sides = [None if side is None else int(bool(side)) for side in (left, right)]
        if decisive in sides:
            return decisive
        return None if None in sides else 1 - decisive

    def power(self) -> Number:
        base = self.unary()
        if self.kind == "op" and self.token == "**":
            self.advance()
            return self.apply("**", base, self.power())
        return base

    def unary(self) -> Number:
        if self.kind == "op" and self.token in ("+", "-", "!", "~"):
            op = self.token
            self.advance()
            value = self.unary()
            if value is None:
                return None
            return {"+": value, "-": _wrap(-value), "!": int(value == 0), "~": ~value}[op]
        if self.kind == "op" and self.token in ("++", "--"):
            op = self.token
            self.advance()
            if self.kind != "name":
                return self.unary()
            return self.change(self.name(), op, new=True)
        return self.primary()

    def primary(self) -> Number:
        if self.kind == "op" and self.token == "(":
            self.advance()
            value = self.comma()
            if self.token != ")":
                raise ArithmeticError_(f"missing `)' in {self.text!r}")
            self.advance()
            return value
        if self.kind == "mark":
            self.advance()
            return None
        if self.kind == "number":
            value = _number(self.token)
            self.advance()
            return value
        if self.kind == "name":
            name = self.name()
            if self.kind == "op" and self.token in ("++", "--"):
                op = self.token
                self.advance()
                return self.change(name, op, new=False)
            return self.value(name)
        raise ArithmeticError_(f"syntax error in expression {self.text!r}")

    def name(self) -> _Name:
        name = self.token
        index = None
        if self.text.startswith("[", self.pos):
            level, end = 0, self.pos
            while end < len(self.text):
                level += (self.text[end] == "[") - (self.text[end] == "]")
                end += 1
                if level == 0:
                    break
            index = self.text[self.pos + 1 : end - 1]
            self.pos = end
        self.advance()
        return _Name(name, index)

    def value(self, name: _Name) -> Number:
        if self.skip:
            return 0
        text = self.read(name.name, name.index)
        if re.fullmatch(r"-?(?:0|[1-9]\d{0,17})", text):
            return int(text)
        return evaluate(text, self.read, self.write, self.depth + 1)

    def change(self, name: _Name, op: str, *, new: bool) -> Number:
        self.read_twice(name)
        old = self.value(name)
        changed = self.apply("+" if op == "++" else "-", old, 1)
        self.put(name, changed)
        return changed if new else old

    def put(self, name: _Name, value: Number) -> None:
        if not self.skip:
            self.write(name.name, name.index, None if self.unsure else value)

    def read_twice(self, name: _Name) -> None:
        """Refuse an element that is read and written, where finding its place changes something."""
        if name.index and re.search(r"\+\+|--|(?<![=!<>])=(?!=)", name.index):
            raise InputError(f"the subscript of {name.name}[{name.index}] changes a variable, which is not followed")

    def apply(self, op: str, left: Number, right: Number) -> Number:
        if left is None or right is None:
            return 0 if op == "*" and 0 in (left, right) else None
        if op in ("/", "%"):
            if right == 0:
                if self.skip or self.unsure:
                    return None if self.unsure else 0
                raise ArithmeticError_(f"division by 0 in {self.text!r}")
            quotient = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)
            return _wrap(quotient if op == "/" else left - right * quotient)
        if op == "**":
            if right < 0:
                if self.skip or self.unsure:
                    return None if self.unsure else 0
                raise ArithmeticError_(f"exponent less than 0 in {self.text!r}")
            return _wrap(pow(left, right, 1 << 64))
        return _wrap(_OPERATORS[op](left, right))


_OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "<<": lambda a, b: a << (b & 63),
    ">>": lambda a, b: a >> (b & 63),
    "<": lambda a, b: int(a < b),
    ">": lambda a, b: int(a > b),
    "<=": lambda a, b: int(a <= b),
    ">=": lambda a, b: int(a >= b),
    "==": lambda a, b: int(a == b),
    "!=": lambda a, b: int(a != b),
    "&": lambda a, b: a & b,
    "|": lambda a, b: a | b,
    "^": lambda a, b: a ^ b,
}


def _wrap(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def _number(text: str) -> int:
    try:
        if "#" in text:
            base, _, digits = text.partition("#")
            return _wrap(_in_base(int(base), digits))
        if text[:2].lower() == "0x":
            return _wrap(int(text, 16))
        if text.startswith("0") and len(text) > 1:
            return _wrap(int(text, 8))
        return _wrap(int(text))
    except ValueError:
        raise ArithmeticError_(f"value too great for base in {text!r}") from None


def _in_base(base: int, digits: str) -> int:
    if not 2 <= base <= 64:
        raise ValueError(base)
    alphabet = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ@_"
    value = 0
    for digit in digits if base > 36 else digits.lower():
        place = alphabet.index(digit)
        if place >= base:
            raise ValueError(digit)
        value = value * base + place
    return value
