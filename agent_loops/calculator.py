"""A calculator tool, which evaluates nothing but arithmetic."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable

_MAX_CHARS = 200
_MAX_BITS = 512
"""The most bits of an intermediate integer, so that `9**9**9` cannot exhaust the machine."""
_ALLOWED = re.compile(r"[0-9+\-*/%(). ]*")

_BINARY: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[float], float]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression.

    Args:
        expression: Numbers with + - * / // % ** and parentheses.

    Raises:
        ValueError: The expression is not arithmetic, or too long or too large to evaluate.
        ZeroDivisionError: The expression divides by zero.
    """
    if len(expression) > _MAX_CHARS:
        raise ValueError(f"the expression has {len(expression)} characters; at most {_MAX_CHARS} are allowed")
    if not _ALLOWED.fullmatch(expression):
        raise ValueError("only numbers, + - * / // % ** and parentheses are allowed")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ValueError(f"{expression!r} is not an arithmetic expression") from None
    value = _evaluate(tree.body)
    return str(value) if isinstance(value, int) else format(value, ".12g")


def _evaluate(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as value):
            return _bounded(value)
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in _UNARY:
            return _UNARY[type(sign)](_evaluate(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            a, b = _evaluate(left), _evaluate(right)
            if isinstance(op, ast.Pow):
                _check_power(a, b)
            try:
                return _bounded(_BINARY[type(op)](a, b))
            except OverflowError:
                raise ValueError("the result is too large") from None
    raise ValueError("only numbers, + - * / // % ** and parentheses are allowed")


def _bounded(value: float) -> float:
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        raise ValueError("the result is too large")
    return value


def _check_power(base: float, exponent: float) -> None:
    """Refuse a power before it is computed."""
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * exponent > 2 * _MAX_BITS:
        raise ValueError("the result is too large")
    if base < 0 and not isinstance(exponent, int):
        raise ValueError("a negative number has no real power that is not a whole number")
