"""A calculator for `ownloop_tasks.tools`: arithmetic on numbers, and nothing that could run long."""

import ast
import operator
from collections.abc import Callable

_MAX_CHARACTERS = 200
_OPERATORS: dict[type[ast.AST], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def calculate(expression: str) -> str:
    """Calculates an arithmetic expression and returns the result.

    Args:
        expression: The expression, such as "(12 + 7) * 3". It may use + - * / // % and parentheses.
    """
    if len(expression) > _MAX_CHARACTERS:
        raise ValueError(f"the expression is longer than {_MAX_CHARACTERS} characters")
    value = _value(ast.parse(expression.strip(), mode="eval").body)
    return str(int(value)) if value == int(value) else f"{value:.10g}"


def _value(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
            return _OPERATORS[type(sign)](_value(left), _value(right))
        case _:
            raise ValueError(f"{ast.unparse(node)!r} is not arithmetic")
