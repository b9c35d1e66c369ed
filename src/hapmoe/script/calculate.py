"""``python -c 'print(3 * 4)'``: expressions on numbers, strings and lists, evaluated from their syntax tree.

Nothing is executed: what is not in the tables here is not known, and every value is bounded.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Iterable
from typing import Any

from .values import MARK

__all__ = ["STEPS", "calculate", "python_code"]

_LONGEST = 20_000
_LARGEST = 10**60
STEPS = "number of steps"
_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARISONS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda a, b: a in b,
    ast.NotIn: lambda a, b: a not in b,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{"int": int, "float": float, "str": str, "bool": bool, "round": round, "abs": abs, "len": len},
    **{"max": max, "min": min, "sum": sum, "sorted": sorted, "list": list, "tuple": tuple, "reversed": reversed},
    "range": lambda *args: _items(range(*args)),
}
_MATH = frozenset(("ceil", "floor", "sqrt", "log", "log2", "log10", "gcd", "lcm", "exp", "prod", "trunc", "pi", "e"))
_METHODS = frozenset(
    ("join", "split", "strip", "lstrip", "rstrip", "replace", "upper", "lower", "startswith", "endswith")
)
_MODULES = frozenset(("math", "sys", "os", "re", "json"))
_ERRORS = (ValueError, ArithmeticError, TypeError, LookupError, AttributeError, RecursionError)


def _bounded(value: Any) -> Any:
    if isinstance(value, str | list | tuple) and len(value) > _LONGEST:
        raise ValueError("too long")
    if isinstance(value, int | float) and not abs(value) < _LARGEST:
        raise ValueError("too large")
    return value


def _items(values: Iterable[Any]) -> list[Any]:
    if isinstance(values, range) and len(values) > _LONGEST:
        raise ValueError("too long")
    return list(values)


def calculate(node: ast.expr, names: dict[str, Any] | None = None) -> Any:
    """The value of an expression; ValueError (or what Python raises for it) on anything that is not covered."""
    names = {STEPS: [0]} if names is None else names
    names[STEPS][0] += 1
    if names[STEPS][0] > _LONGEST:
        raise ValueError("too many steps")
    return _bounded(_value(node, names))


def _value(node: ast.expr, names: dict[str, Any]) -> Any:
    if isinstance(node, ast.Constant) and (node.value is None or type(node.value) in (int, float, str, bool)):
        return node.value
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        items = [calculate(each, names) for each in node.elts]
        return items if isinstance(node, ast.List) else tuple(items)
    if isinstance(node, ast.BinOp):
        return _binary(node.op, calculate(node.left, names), calculate(node.right, names))
    if isinstance(node, ast.UnaryOp):
        value = calculate(node.operand, names)
        return -value if isinstance(node.op, ast.USub) else not value if isinstance(node.op, ast.Not) else +value
    if isinstance(node, ast.IfExp):
        return calculate(node.body if calculate(node.test, names) else node.orelse, names)
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARISONS:
        return _COMPARISONS[type(node.ops[0])](calculate(node.left, names), calculate(node.comparators[0], names))
    if isinstance(node, ast.Subscript) and not isinstance(node.slice, ast.Slice):
        return calculate(node.value, names)[calculate(node.slice, names)]
    if isinstance(node, ast.JoinedStr):
        return "".join(_formatted(each, names) for each in node.values)
    if isinstance(node, ast.ListComp | ast.GeneratorExp):
        return _comprehension(node, names)
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "math":
        return getattr(math, node.attr) if node.attr in ("pi", "e") else _unknown(node)
    if isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.argv":
        return names["sys.argv"]
    if isinstance(node, ast.Call) and not node.keywords:
        return _call(node, names)
    return _unknown(node)


def _unknown(node: ast.AST) -> Any:
    raise ValueError(ast.dump(node))


def _binary(op: ast.operator, left: Any, right: Any) -> Any:
    if isinstance(op, ast.Pow):
        if not (isinstance(left, int | float) and isinstance(right, int | float)):
            raise ValueError("a power")
        return left**right if abs(left) <= 1000 and abs(right) <= 64 else _unknown(op)
    if isinstance(op, ast.Mult):
        for one, other in ((left, right), (right, left)):
            if isinstance(one, str | list | tuple) and (type(other) is not int or len(one) * other > _LONGEST):
                raise ValueError("too long")
    if isinstance(op, ast.Mod) and isinstance(left, str):
        raise ValueError("a format")
    return _OPERATORS[type(op)](left, right) if type(op) in _OPERATORS else _unknown(op)


def _formatted(node: ast.expr, names: dict[str, Any]) -> str:
    if isinstance(node, ast.FormattedValue) and node.conversion == -1 and node.format_spec is None:
        return str(calculate(node.value, names))
    return str(node.value) if isinstance(node, ast.Constant) else _unknown(node)


def _comprehension(node: ast.ListComp | ast.GeneratorExp, names: dict[str, Any]) -> list[Any]:
    loop = node.generators[0]
    if len(node.generators) > 1 or not isinstance(loop.target, ast.Name) or loop.is_async:
        raise ValueError("a comprehension")
    out = []
    for item in _items(calculate(loop.iter, names)):
        inner = {**names, loop.target.id: item}
        if all(calculate(test, inner) for test in loop.ifs):
            out.append(calculate(node.elt, inner))
    return out


def _call(node: ast.Call, names: dict[str, Any]) -> Any:
    args = [calculate(arg, names) for arg in node.args]
    if isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS:
        return _FUNCTIONS[node.func.id](*args)
    if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name) and node.func.value.id == "math":
        return getattr(math, node.func.attr)(*args) if node.func.attr in _MATH else _unknown(node)
    if isinstance(node.func, ast.Attribute) and node.func.attr in _METHODS:
        on = calculate(node.func.value, names)
        if isinstance(on, str) and len(on) * sum(len(str(arg)) + 1 for arg in args) <= _LONGEST**2 // 10:
            return getattr(on, node.func.attr)(*args)
    return _unknown(node)


def python_code(code: str, args: list[str]) -> tuple[str | None, int | None]:
    """The output of a small Python program that assigns and prints; ``args`` are its ``sys.argv[1:]``."""
    if MARK.search(code) or any(MARK.search(arg) for arg in args) or len(code) > _LONGEST:
        return (None, None)
    names: dict[str, Any] = {STEPS: [0], "sys.argv": ["-c", *args]}
    out: list[str] = []
    try:
        tree = ast.parse(code)
    except (SyntaxError, MemoryError, *_ERRORS) as error:
        later = not isinstance(error, SyntaxError) or re.match(r"\s", code) or re.search(r"\bf['\"]|\btype\b", code)
        return (None, None) if later else ("", 1)  # a later Python reads f-strings and indented text differently
    try:
        for statement in tree.body:
            _statement(statement, names, out)
    except (SyntaxError, MemoryError, *_ERRORS):
        return (None, None)
    return "".join(out), 0


def _statement(node: ast.stmt, names: dict[str, Any], out: list[str]) -> None:
    if isinstance(node, ast.Import) and all(each.name in _MODULES and not each.asname for each in node.names):
        return
    if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
        names[node.targets[0].id] = calculate(node.value, names)
        return
    call = node.value if isinstance(node, ast.Expr) else None
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "print":
        options = {each.arg: calculate(each.value, names) for each in call.keywords}
        if options.keys() <= {"sep", "end"}:
            values = [str(calculate(arg, names)) for arg in call.args]
            out.append(options.get("sep", " ").join(values) + options.get("end", "\n"))
            return
    _unknown(node)
