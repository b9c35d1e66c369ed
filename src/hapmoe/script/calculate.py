"""``python -c 'print(3 * 4)'``: plain arithmetic, evaluated from its syntax tree."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable

from .values import MARK

__all__ = ["calculate", "python_code"]

_OPERATORS: dict[type, Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def calculate(node: ast.expr) -> float:
    """The value of a plain arithmetic expression; ValueError on anything else."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return float(node.value) if isinstance(node.value, float) else int(str(node.value))
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](calculate(node.left), calculate(node.right))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        base, power = calculate(node.left), calculate(node.right)
        if abs(base) <= 1000 and abs(power) <= 64:
            return float(base**power) if isinstance(base**power, float) else int(base**power)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -calculate(node.operand)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        functions: dict[str, Callable[..., float]] = {
            "int": int,
            "round": round,
            "max": max,
            "min": min,
            "abs": abs,
            "float": float,
        }
        if node.func.id in functions:
            return functions[node.func.id](*map(calculate, node.args))
    raise ValueError(ast.dump(node))


def python_code(code: str) -> tuple[str | None, int | None]:
    """The output of ``python -c 'print(<arithmetic>)'``."""
    if MARK.search(code):
        return (None, None)
    try:
        body = ast.parse(code.strip()).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return (None, None)
    statement = body[0] if len(body) == 1 else None
    if (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Call)
        and not statement.value.keywords
        and isinstance(statement.value.func, ast.Name)
        and statement.value.func.id == "print"
    ):
        try:
            return " ".join(str(calculate(arg)) for arg in statement.value.args) + "\n", 0
        except (ValueError, ArithmeticError, TypeError):
            return (None, None)
    return (None, None)
