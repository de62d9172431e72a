"""From the expanded parts of a word to its fields: what is quoted stays whole, the rest is split at spaces."""

from __future__ import annotations

import re

from fivefold.interop.shell.state import FIELD_COST, State
from fivefold.interop.shell.syntax import Literal, Parameter, Part, Word
from fivefold.interop.source import LINE, Field, Place, plain

_SPLIT = re.compile(rf"{LINE}\d+{LINE}|[ \t\n]+|[^ \t\n{LINE}]+")
_LAST_MARK = re.compile(rf"{LINE}(\d+){LINE}")


class Splitting:
    """Splits one word into fields while its parts are expanded. place: the word's own."""

    def __init__(self, state: State, word: Word, place: Place) -> None:
        self._state, self._word = state, word
        self._done: list[Field] = []
        self._open: list[str] | None = None
        self._place = self._default = place

    def add(self, part: Part, found: list[Field]) -> None:
        """The next part of the word, and what it expanded to."""
        quoted = part.quoted
        self._state.spend(sum(len(each.text) + FIELD_COST for each in found), self._default)
        if isinstance(part, Literal):
            self._append(part.text, self._default)
        elif quoted and not (isinstance(part, Parameter) and part.index == "@"):
            place = found[0].place if found else self._default
            text = " ".join(each.text for each in found)
            several = len(self._word.parts) > 1 and place != self._default
            self._append(marked(text, place, self._word.line) if several else text, place)
        else:
            self._several(found, split=not quoted)

    def made(self) -> list[Field]:
        """The fields, after the last part."""
        self._close()
        return self._done

    def _several(self, found: list[Field], *, split: bool) -> None:
        for at, each in enumerate(found):
            if at:
                self._close()
            if split:
                self._split(each)
            else:
                self._append(each.text, each.place)

    def _split(self, value: Field) -> None:
        place = value.place
        for piece in _SPLIT.findall(value.text):
            if piece[0] == LINE:
                place = Place(place.file, int(piece[1:-1]))
            elif piece[0] in " \t\n":
                self._close()
            else:
                self._append(piece, place)

    def _append(self, text: str, place: Place) -> None:
        if self._open is None:
            self._open, self._place = [], place
        elif self._place == self._default:  # --option=$VALUE: where the value stands says more
            self._place = place
        self._open.append(text)

    def _close(self) -> None:
        if self._open is None:
            return
        text = "".join(self._open)
        marks = _LAST_MARK.findall(text)
        if plain(text) or not marks:
            self._done.append(Field(text, self._place))
        self._open = None


def marked(text: str, place: Place, line: int) -> str:
    """A value inside a longer text, with marks of the line that it comes from and of the text's own."""
    return f"{LINE}{place.line}{LINE}{text}{LINE}{line}{LINE}" if text else text
