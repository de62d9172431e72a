"""Whether a test holds, as far as text decides it: True, False, or None for not decided."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from fivefold.interop.shell.arithmetic import NotKnown, evaluate
from fivefold.interop.shell.patterns import matches
from fivefold.interop.shell.state import State, Unknown
from fivefold.interop.source import UNKNOWN, Place, plain

_NUMBERS: dict[str, Callable[[int, int], bool]] = {
    "-eq": lambda a, b: a == b,
    "-ne": lambda a, b: a != b,
    "-lt": lambda a, b: a < b,
    "-le": lambda a, b: a <= b,
    "-gt": lambda a, b: a > b,
    "-ge": lambda a, b: a >= b,
}
_TEXTS = ("=", "==", "!=", "<", ">", "=~")
_DEEPEST = 40


@dataclass(frozen=True, slots=True)
class Truth:
    """value: None when not decided. assumed: decided by taking a variable that is set nowhere as empty."""

    value: bool | None
    assumed: bool = False

    def __invert__(self) -> Truth:
        return Truth(None if self.value is None else not self.value, self.assumed)


class Condition:
    """One test's items, after expansion: operators and texts. patterns: == compares with a pattern, as in [[ ]]."""

    def __init__(self, state: State, items: list[str], place: Place, *, patterns: bool) -> None:
        self._state, self._items, self._place = state, items, place
        self._patterns = patterns
        self._at = 0

    def truth(self) -> Truth:
        if not self._items:
            return Truth(False)
        found = self._or(0)
        return found if self._at == len(self._items) else Truth(None)

    def _next(self) -> str | None:
        return self._items[self._at] if self._at < len(self._items) else None

    def _or(self, depth: int) -> Truth:
        found = self._and(depth)
        while self._next() in ("||", "-o"):
            self._at += 1
            found = either(found, self._and(depth))
        return found

    def _and(self, depth: int) -> Truth:
        found = self._primary(depth)
        while self._next() in ("&&", "-a"):
            self._at += 1
            found = both(found, self._primary(depth))
        return found

    def _primary(self, depth: int) -> Truth:
        item = self._next()
        if item is None or depth > _DEEPEST:
            self._at = len(self._items) + 1
            return Truth(None)
        following = self._items[self._at + 1] if self._at + 1 < len(self._items) else None
        if following in _TEXTS or following in _NUMBERS:
            return self._compared(item, following)
        self._at += 1
        if item == "!":
            return ~self._primary(depth + 1)
        if item == "(":
            found = self._or(depth + 1)
            self._at += 1
            return found
        if len(item) == 2 and item[0] == "-" and following is not None and following not in ("&&", "||", "-a", "-o"):
            self._at += 1
            return self._unary(item, following)
        text, assumed = self._known(item)
        return Truth(None if text is None else bool(text), assumed)

    def _unary(self, operator: str, operand: str) -> Truth:
        if operator == "-v":
            there = str(plain(operand)) in self._state.variables
            return Truth(there, assumed=not there)
        if operator not in ("-z", "-n"):
            return Truth(None)
        text, assumed = self._known(operand)
        return Truth(None if text is None else bool(text) == (operator == "-n"), assumed)

    def _compared(self, left: str, operator: str) -> Truth:
        right = self._items[self._at + 2] if self._at + 2 < len(self._items) else ""
        self._at += 3
        (a, first), (b, second) = self._known(left), self._known(right)
        if a is None or b is None:
            return Truth(None)
        assumed = first or second
        if operator in _NUMBERS:
            return self._numbers(a, operator, b, assumed)
        if operator == "=~":
            simple = re.fullmatch(r"\^?[\w./:@ -]*\$?", b)
            if simple is None:
                return Truth(None)
            start, end = b.startswith("^"), b.endswith("$")
            inner = b[start : len(b) - end]
            hit = (
                a == inner
                if start and end
                else a.startswith(inner)
                if start
                else a.endswith(inner)
                if end
                else inner in a
            )
            return Truth(hit, assumed)
        if operator in ("<", ">"):
            return Truth(a < b if operator == "<" else a > b, assumed)
        self._state.step(self._place, 1 + len(a) * len(b) // 4096)
        same = matches(b, a) if self._patterns else a == b
        return Truth(same == (operator != "!="), assumed)

    def _numbers(self, a: str, operator: str, b: str, assumed: bool) -> Truth:
        try:
            return Truth(_NUMBERS[operator](evaluate(a, self._number), evaluate(b, self._number)), assumed)
        except NotKnown:
            return Truth(None)

    def _number(self, name: str) -> int:
        held = self._state.scalar(name)
        text = str(plain(held.text)) if held else ""
        if not re.fullmatch(r"-?\d{1,18}", text):
            raise NotKnown
        return int(text)

    def _known(self, item: str) -> tuple[str | None, bool]:
        """(text, whether it rests on a variable being empty because nothing sets it); None for not known."""
        if UNKNOWN not in item:
            return str(plain(item)), False
        pieces = item.split(UNKNOWN)
        held: list[Unknown] = [self._state.unknowns[int(number)] for number in pieces[1::2]]
        if all(each.why in ("unset", "argument") for each in held):
            for each in held:
                if each.why == "unset":
                    self._state.assume(self._place, f"${each.name} is set nowhere and taken as empty in this condition")
            pieces[1::2] = ["0" if each.name == "#" else "" for each in held]
            return str(plain("".join(pieces))), True
        return None, False


def both(a: Truth, b: Truth) -> Truth:
    if a.value is False or b.value is False:
        return Truth(False, a.assumed or b.assumed)
    return Truth(None) if None in (a.value, b.value) else Truth(True, a.assumed or b.assumed)


def either(a: Truth, b: Truth) -> Truth:
    return ~both(~a, ~b)
