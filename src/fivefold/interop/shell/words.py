"""From characters to words: quotes, expansions, line continuations."""

from __future__ import annotations

import re
from bisect import bisect_right

from fivefold.errors import FivefoldError
from fivefold.interop.shell.syntax import Arithmetic, Literal, Parameter, Part, Substitution, Word
from fivefold.interop.source import LINE, Place, unreadable

MAX_DEPTH = 40  # of quotes and expansions inside one another, and of statements
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[0-9]|[@*#?$!-]")
_BRACED_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*|[0-9]{1,4}|[@*#?$!-]")
_OPERATOR = re.compile(r":[-=?+]|[-=?+]|##?|%%?|//|/[#%]?|\^\^?|,,?|@[A-Za-z]|:")
_MARK = re.compile(rf"{LINE}(\d+){LINE}|\n")
_ENDS_WORD = " \t\n;&|<>()"


class Lines:
    """Which line of the file an offset of a text stands on.

    Texts made by expansion, such as a command in a variable, hold marks of their lines.
    """

    def __init__(self, text: str, first: int) -> None:
        self._at, self._line = [0], [first]
        for mark in _MARK.finditer(text):
            self._at.append(mark.end())
            self._line.append(int(mark[1]) if mark[1] else self._line[-1] + 1)

    def of(self, offset: int) -> int:
        return self._line[bisect_right(self._at, offset) - 1]


class Scanner:
    """Reads words at a position that only moves forward."""

    def __init__(self, text: str, file: str, first_line: int = 1) -> None:
        self.text, self.file = text, file
        self.at = 0
        self.depth = 0
        self._lines = Lines(text, first_line)

    @property
    def line(self) -> int:
        return self._lines.of(self.at)

    @property
    def here(self) -> str:
        """The character at the position, "" at the end."""
        return self.text[self.at : self.at + 1]

    def starts(self, text: str) -> bool:
        return self.text.startswith(text, self.at)

    def error(self, problem: str, remedy: str = "correct that line", at: int | None = None) -> FivefoldError:
        line = self._lines.of(self.at if at is None else at)
        return unreadable(Place(self.file, line), problem, remedy)

    def nest(self) -> None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise self.error(f"quotes, expansions or statements nest deeper than {MAX_DEPTH}", "make it flatter")

    # ---------------------------------------------------------------- words

    def word(self, ends: str = _ENDS_WORD) -> Word:
        """The word at the position; it ends before an unquoted character of `ends`."""
        line = self.line
        parts: list[Part] = []
        text: list[str] = []
        self.nest()
        while (char := self.here) and char not in ends:
            if char == "\\":
                self._escape(text, parts)
            elif char == LINE:
                self._mark(text)
            elif char == "'" or self.starts("$'"):
                flush(text, parts)
                parts.append(self._single())
            elif char == '"' or self.starts('$"'):
                flush(text, parts)
                self.at += len(char) if char == '"' else 2
                parts += self._double()
            elif char in "$`":
                flush(text, parts)
                parts += self._expansion(quoted=False)
            else:
                text.append(char)
                self.at += 1
        flush(text, parts)
        self.depth -= 1
        return Word(tuple(parts), line)

    def _escape(self, text: list[str], parts: list[Part]) -> None:
        following = self.text[self.at + 1 : self.at + 2]
        self.at += 2
        if following == "\n":
            text.append(f"{LINE}{self.line}{LINE}")
        elif following:
            flush(text, parts)
            parts.append(Literal(following, quoted=True))

    def _mark(self, text: list[str]) -> None:
        end = self.text.find(LINE, self.at + 1)
        text.append(self.text[self.at : end + 1])
        self.at = end + 1

    def _single(self) -> Literal:
        start = self.at
        dollar = self.here == "$"
        self.at += 2 if dollar else 1
        end = self.text.find("'", self.at)
        while dollar and end > 0 and self.text[end - 1] == "\\":
            end = self.text.find("'", end + 1)
        if end < 0:
            raise self.error("a single quote is opened here and never closed", at=start)
        found = self.text[self.at : end]
        self.at = end + 1
        return Literal(self._with_lines(found, start), quoted=True)

    def _with_lines(self, found: str, start: int) -> str:
        """Quoted text over several lines, with a mark of its line after each line end."""
        if "\n" not in found:
            return found
        line = self._lines.of(start)
        pieces = found.split("\n")
        return pieces[0] + "".join(f"\n{LINE}{line + i}{LINE}{piece}" for i, piece in enumerate(pieces[1:], start=1))

    def _double(self) -> list[Part]:
        start = self.at
        self.nest()
        parts = self.quoted_text('"')
        if self.here != '"':
            raise self.error("a double quote is opened here and never closed", at=max(start - 1, 0))
        self.at += 1
        self.depth -= 1
        return parts or [Literal("", quoted=True)]

    def quoted_text(self, end: str) -> list[Part]:
        """Parts of text in double quotes, or with end "" of a here-document, up to `end`."""
        parts: list[Part] = []
        text: list[str] = []
        while (char := self.here) and char != end:
            following = self.text[self.at + 1 : self.at + 2]
            if char == "\\" and following and following in '$`"\\\n':
                self.at += 2
                text.append(f"{LINE}{self.line}{LINE}" if following == "\n" else following)
            elif char in "$`":
                flush(text, parts, quoted=True)
                parts += self._expansion(quoted=True)
            elif char == "\n":
                self.at += 1
                text.append(f"\n{LINE}{self.line}{LINE}")
            else:
                text.append(char)
                self.at += 1
        flush(text, parts, quoted=True)
        return parts

    # ---------------------------------------------------------------- expansions

    def _expansion(self, *, quoted: bool) -> list[Part]:
        if self.here == "`":
            return [Substitution(self._backticks(), quoted)]
        if self.starts("$(("):
            inner = self._balanced(self.at + 1)
            if inner.endswith(")") and inner.startswith("("):
                return [Arithmetic(inner[1:-1], quoted)]
            return [Substitution(inner, quoted)]
        if self.starts("$("):
            return [Substitution(self._balanced(self.at + 1), quoted)]
        if self.starts("${"):
            return [self._braced(quoted)]
        name = _NAME.match(self.text, self.at + 1)
        if name is None:
            self.at += 1
            return [Literal("$", quoted=True)]
        self.at = name.end()
        index = name[0] if name[0] in "@*" else None
        return [Parameter(name[0], quoted, index=index)]

    def _backticks(self) -> str:
        start = self.at
        end = self.text.find("`", self.at + 1)
        while end > 0 and self.text[end - 1] == "\\":
            end = self.text.find("`", end + 1)
        if end < 0:
            raise self.error("a backtick is opened here and never closed", at=start)
        self.at = end + 1
        return self.text[start + 1 : end]

    def _balanced(self, opening: int) -> str:
        """The text inside the parentheses that open at `opening`; the position moves behind them."""
        level, at = 0, opening
        while at < len(self.text):
            char = self.text[at]
            if char == "\\":
                at += 1
            elif char in "'\"":
                at = self._behind_quote(at)
                continue
            elif char in "()":
                level += 1 if char == "(" else -1
                if level == 0:
                    self.at = at + 1
                    return self.text[opening + 1 : at]
            at += 1
        raise self.error("a parenthesis is opened here and never closed", at=opening)

    def _behind_quote(self, start: int) -> int:
        quote, at = self.text[start], start + 1
        while at < len(self.text) and self.text[at] != quote:
            at += 2 if self.text[at] == "\\" and quote == '"' else 1
        if at >= len(self.text):
            raise self.error("a quote is opened here and never closed", at=start)
        return at + 1

    def _braced(self, quoted: bool) -> Parameter:
        start = self.at
        self.at += 2
        length = self.here == "#" and self.text[self.at + 1 : self.at + 2] not in ("}", "")
        indirect = self.here == "!"
        self.at += length or indirect
        name = _BRACED_NAME.match(self.text, self.at)
        if name is None:
            raise self.error("an expansion in braces does not start with a name", at=start)
        self.at = name.end()
        index: str | Word | None = name[0] if name[0] in "@*" else None
        if self.here == "[":
            self.at += 1
            inner = self.word("]")
            self._expect("]", start)
            index = inner.bare if inner.bare in ("@", "*") else inner
        operator = _OPERATOR.match(self.text, self.at)
        argument = None
        if operator is not None:
            self.at = operator.end()
            argument = self.word("}")
        self._expect("}", start)
        return Parameter(
            name[0],
            quoted,
            index=index,
            operator=operator[0] if operator else "",
            argument=argument,
            length=length,
            indirect=indirect,
        )

    def _expect(self, char: str, start: int) -> None:
        if self.here != char:
            raise self.error("an expansion in braces is opened here and never closed, or is of no known form", at=start)
        self.at += 1


def flush(text: list[str], parts: list[Part], *, quoted: bool = False) -> None:
    """The characters so far become a literal."""
    if text:
        parts.append(Literal("".join(text), quoted))
        text.clear()
