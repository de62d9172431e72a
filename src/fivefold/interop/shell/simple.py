"""Simple commands: assignments, words, redirections and here-documents, with the small steps between them."""

from __future__ import annotations

import re

from fivefold.interop.shell.syntax import Assign, Heredoc, Simple, Substitution, Word
from fivefold.interop.shell.words import Scanner
from fivefold.interop.source import LINE

_ASSIGN = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(?:\[([^\]\n]*)\])?(\+?=)")
_RESERVED = re.compile(r"(?:\[\[|[{}!]|[a-z]+)(?=[\s;&|()]|$)")
_REDIRECTION = re.compile(r"(?:\d+|&)?(<<<|<<-?|>>|>&|<&|>\||<>|>|<)(?!\()")
_DECLARING = ("export", "local", "declare", "typeset", "readonly")


class SimpleParser(Scanner):
    """Reads one simple command at a position."""

    def __init__(self, text: str, file: str, first_line: int = 1) -> None:
        super().__init__(text, file, first_line)
        self._pending: list[tuple[str, bool, bool, list[Heredoc], int]] = []
        self._quiet = False

    def _simple(self) -> Simple:
        line, start, self._quiet = self.line, self.at, False
        assigns: list[Assign] = []
        words: list[Word | Assign] = []
        heredocs: list[Heredoc] = []
        redirected: list[Word] = []
        while True:
            self._blank()
            if self._redirections(heredocs, redirected):
                continue
            if self.here in ("", "\n", ";", "&", "|", ")"):
                break
            first = words[0] if words else None
            declaring = isinstance(first, Word) and first.bare in _DECLARING
            found = _ASSIGN.match(self.text, self.at) if not words or declaring else None
            if found is not None:
                assign = self._assign(found)
                if words:
                    words.append(assign)
                else:
                    assigns.append(assign)
            elif self.here in "<>":
                words.append(self._process())
            elif self.here == "(":
                raise self.error("'(' is not expected here")
            else:
                words.append(self.word())
        if self.at == start:
            raise self.error(f"{self.here!r} is not expected here")
        return Simple(tuple(assigns), tuple(words), heredocs, tuple(redirected), line, self._quiet)

    def _assign(self, found: re.Match[str]) -> Assign:
        line, start = self.line, self.at
        self.at = found.end()
        index = None if found[2] is None else Scanner(found[2], self.file, line).word("")
        if self.here != "(":
            return Assign(found[1], self.word(), found[3] == "+=", index, line)
        self.at += 1
        values: list[Word] = []
        while True:
            self._blank(newlines=True)
            if self.here == ")":
                self.at += 1
                return Assign(found[1], tuple(values), found[3] == "+=", index, line)
            before = self.at
            values.append(self.word())
            if self.at == before:
                raise self.error("this array is not closed with )", at=start)

    def _process(self) -> Word:
        """<(commands): a file name that only a running shell knows."""
        line = self.line
        self.at += 1
        if self.here != "(":
            raise self.error("a redirection has no target")
        return Word((Substitution(self._balanced(self.at), quoted=True),), line)

    def _redirections(self, heredocs: list[Heredoc], redirected: list[Word]) -> bool:
        """Reads the redirections at the position; whether there was one."""
        any_found = False
        while True:
            self._blank()
            found = _REDIRECTION.match(self.text, self.at)
            if found is None:
                return any_found
            any_found = True
            self._quiet |= found[1] in (">", ">>", ">|", ">&") and found[0][0] in (">", "1", "&")
            self.at = found.end()
            self._blank()
            before = self.at
            target = self.word()
            if self.at == before:
                raise self.error("a redirection has no target")
            if found[1] in ("<<", "<<-"):
                quoted = target.bare is None
                ends = "".join(getattr(part, "text", "") for part in target.parts)
                self._pending.append((ends, quoted, found[1] == "<<-", heredocs, before))
            elif found[1] not in (">&", "<&", "<<<"):
                redirected.append(target)

    def _read_heredocs(self) -> None:
        """Called behind a line end: the bodies of the here-documents that the line opened."""
        for ends, quoted, tabs, heredocs, opened in self._pending:
            line, start = self.line, self.at
            while True:
                if self.at >= len(self.text):
                    raise self.error(f"the here-document that ends with {ends[:40]!r} is not closed", at=opened)
                stop = self.text.find("\n", self.at)
                stop = len(self.text) if stop < 0 else stop
                row = self.text[self.at : stop]
                begin, self.at = self.at, min(stop + 1, len(self.text))
                if (row.lstrip("\t") if tabs else row).split(LINE)[-1] == ends:
                    heredocs.append(Heredoc(self.text[start:begin], not quoted, line))
                    break
        self._pending = []

    # ---------------------------------------------------------------- small steps

    def _blank(self, *, newlines: bool = False) -> None:
        """Skips spaces, comments, continued lines, marks and, if asked, line ends."""
        while char := self.here:
            if char in " \t":
                self.at += 1
            elif self.starts("\\\n"):
                self.at += 2
            elif char == LINE:
                self.at = self.text.find(LINE, self.at + 1) + 1
            elif char == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            elif char == "\n" and newlines:
                self.at += 1
                if self._pending:
                    self._read_heredocs()
            else:
                return

    def _reserved(self) -> str | None:
        found = _RESERVED.match(self.text, self.at)
        return found[0] if found else None

    def _take_reserved(self) -> str:
        self._blank(newlines=True)
        word = self._reserved() or ""
        self.at += len(word)
        return word

    def _need(self, word: str, line: int) -> None:
        self._blank(newlines=True)
        if self._reserved() != word:
            raise self.error(f"the statement of line {line} lacks its {word!r}")
        self.at += len(word)
