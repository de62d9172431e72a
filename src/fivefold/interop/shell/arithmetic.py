"""$((...)) on whole numbers, by its own small parser: nothing is evaluated by Python."""

from __future__ import annotations

import re
from collections.abc import Callable

_TOKEN = re.compile(r"\s*(?:(\d{1,18})|\$?\{?([A-Za-z_]\w*)\}?|(\*\*|<=|>=|==|!=|&&|\|\||[-+*/%()<>!?:]))")
_LEVELS: tuple[dict[str, Callable[[int, int], int]], ...] = (
    {"||": lambda a, b: int(bool(a or b))},
    {"&&": lambda a, b: int(bool(a and b))},
    {"==": lambda a, b: int(a == b), "!=": lambda a, b: int(a != b)},
    {"<": lambda a, b: int(a < b), ">": lambda a, b: int(a > b), "<=": lambda a, b: int(a <= b),
     ">=": lambda a, b: int(a >= b)},
    {"+": lambda a, b: a + b, "-": lambda a, b: a - b},
    {"*": lambda a, b: a * b, "/": lambda a, b: _divide(a, b)[0], "%": lambda a, b: _divide(a, b)[1]},
)  # fmt: skip
_LARGEST = 10**18
_DEEPEST = 50


class NotKnown(Exception):  # noqa: N818  (no error: the value only a running shell has)
    """The expression holds something that is not known, or is outside the part that is read."""


def evaluate(expression: str, lookup: Callable[[str], int]) -> int:
    """The value of an expression. lookup: a variable's number; raises NotKnown. Raises NotKnown for anything odd."""
    tokens: list[str] = []
    at = 0
    expression = expression.strip()
    while at < len(expression):
        found = _TOKEN.match(expression, at)
        if found is None or len(tokens) > 200:
            raise NotKnown
        tokens.append(found[1] or found[2] or found[3])
        at = found.end()
    value, rest = _level(tokens, 0, 0, lookup)
    if rest != len(tokens):
        raise NotKnown
    return value


def _level(tokens: list[str], at: int, level: int, lookup: Callable[[str], int], depth: int = 0) -> tuple[int, int]:
    if depth > _DEEPEST:
        raise NotKnown
    if level == len(_LEVELS):
        return _atom(tokens, at, lookup, depth + 1)
    value, at = _level(tokens, at, level + 1, lookup, depth)
    while at < len(tokens) and tokens[at] in _LEVELS[level]:
        other, following = _level(tokens, at + 1, level + 1, lookup, depth)
        value, at = _LEVELS[level][tokens[at]](value, other), following
        if abs(value) > _LARGEST:
            raise NotKnown
    return value, at


def _atom(tokens: list[str], at: int, lookup: Callable[[str], int], depth: int) -> tuple[int, int]:
    token = tokens[at] if at < len(tokens) else ""
    if token in ("-", "+", "!"):
        if depth > _DEEPEST:
            raise NotKnown
        value, at = _atom(tokens, at + 1, lookup, depth + 1)
        return {"-": -value, "+": value, "!": int(not value)}[token], at
    if token == "(":
        value, at = _level(tokens, at + 1, 0, lookup, depth + 1)
        if at >= len(tokens) or tokens[at] != ")":
            raise NotKnown
        value, at = value, at + 1
    elif token.isdigit():
        value, at = int(token), at + 1
    elif token.isidentifier():
        value, at = lookup(token), at + 1
    else:
        raise NotKnown
    if at < len(tokens) and tokens[at] == "**":
        power, at = _atom(tokens, at + 1, lookup, depth + 1)
        if not 0 <= power <= 64 or abs(value) > _LARGEST:
            raise NotKnown
        value = value**power
        if abs(value) > _LARGEST:
            raise NotKnown
    return value, at


def _divide(a: int, b: int) -> tuple[int, int]:
    """Quotient and remainder truncated towards zero, as shells do."""
    if b == 0:
        raise NotKnown
    quotient = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
    return quotient, a - quotient * b
