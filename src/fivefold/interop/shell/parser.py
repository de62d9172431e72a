"""From text to the tree of syntax.py. What is no shell, or not in the part that is read, is refused with its line."""

from __future__ import annotations

import re

from fivefold.interop.shell.simple import SimpleParser
from fivefold.interop.shell.syntax import (
    AndOr,
    ArithmeticCommand,
    Case,
    For,
    Function,
    Group,
    If,
    Node,
    Pipeline,
    Program,
    Test,
    While,
    Word,
)

_FUNCTION = re.compile(r"([A-Za-z_][A-Za-z0-9_:.-]*)[ \t]*\([ \t]*\)")
_CLOSING = ("then", "do", "done", "fi", "elif", "else", "esac", "}")


def parse(text: str, file: str, first_line: int = 1) -> Program:
    """The statements of a script. Raises FivefoldError with the line of what cannot be read."""
    return Parser(text, file, first_line).whole()


class Parser(SimpleParser):
    """Recursive descent, one method per construct."""

    def whole(self) -> Program:
        found = self._program(())
        if self.here:
            raise self.error(f"{self.here!r} is not expected here")
        return found

    # ---------------------------------------------------------------- lists

    def _program(self, until: tuple[str, ...]) -> Program:
        """Statements up to one of the reserved words `until`, ")" or ";;", or the end."""
        nodes: list[Node] = []
        self.nest()
        while True:
            self._blank(newlines=True)
            if not self.here or self.here == ")" or self.starts(";;") or self._reserved() in until:
                break
            if self._reserved() in _CLOSING:
                raise self.error(f"{self._reserved()!r} closes nothing")
            nodes.append(self._and_or())
            self._blank()
            if self.here in (";", "&") and not self.starts(";;"):
                self.at += 1
            elif self.here not in ("\n", "", ")") and not self.starts(";;"):
                raise self.error(f"{self.here!r} is not expected here")
        self.depth -= 1
        return tuple(nodes)

    def _and_or(self) -> Node:
        line = self.line
        first = self._pipeline()
        rest: list[tuple[str, Node]] = []
        self._blank()
        while self.starts("&&") or self.starts("||"):
            operator = self.text[self.at : self.at + 2]
            self.at += 2
            self._blank(newlines=True)
            rest.append((operator, self._pipeline()))
            self._blank()
        return AndOr(first, tuple(rest), line) if rest else first

    def _pipeline(self) -> Node:
        line, negated = self.line, False
        while self._reserved() in ("!", "time"):
            negated ^= self._take_reserved() == "!"
            self._blank()
        nodes = [self._command()]
        self._blank()
        while self.here == "|" and not self.starts("||"):
            self.at += 2 if self.starts("|&") else 1
            self._blank(newlines=True)
            nodes.append(self._command())
            self._blank()
        return nodes[0] if len(nodes) == 1 and not negated else Pipeline(tuple(nodes), negated, line)

    def _command(self) -> Node:
        start = self.at
        if self.starts("(("):
            return self._arithmetic_command()
        kinds = {"if": self._if, "case": self._case, "for": self._for, "while": self._while, "until": self._while,
                 "[[": self._test, "function": self._function, "{": self._group}  # fmt: skip
        word = self._reserved()
        if self.here == "(":
            node: Node = self._group()
        elif word in kinds:
            node = kinds[word]()
        elif found := _FUNCTION.match(self.text, self.at):
            self.at = found.end()
            node = self._function_body(found[1])
        else:
            return self._simple()
        self._redirections([], [])
        if self.at == start:
            raise self.error(f"{self.here!r} is not expected here")
        return node

    # ---------------------------------------------------------------- compounds

    def _if(self) -> If:
        line, start = self.line, self.at
        branches: list[tuple[Program, Program]] = []
        word = self._take_reserved()
        while word in ("if", "elif"):
            condition = self._program(("then",))
            self._need("then", line)
            branches.append((condition, self._program(("elif", "else", "fi"))))
            word = self._take_reserved()
        otherwise: Program = ()
        if word == "else":
            otherwise = self._program(("fi",))
            word = self._take_reserved()
        if word != "fi":
            raise self.error("this if is not closed with fi", at=start)
        return If(tuple(branches), otherwise, line)

    def _case(self) -> Case:
        line = self.line
        self._take_reserved()
        self._blank()
        word = self.word()
        self._blank(newlines=True)
        self._need("in", line)
        branches: list[tuple[tuple[Word, ...], Program]] = []
        while True:
            self._blank(newlines=True)
            if self._reserved() == "esac" or not self.here:
                break
            branches.append((self._patterns(), self._program(("esac",))))
            while self.starts(";;") or self.starts(";&"):
                self.at += 3 if self.starts(";;&") else 2
        self._need("esac", line)
        return Case(word, tuple(branches), line)

    def _patterns(self) -> tuple[Word, ...]:
        if self.here == "(":
            self.at += 1
        patterns: list[Word] = []
        while True:
            self._blank()
            before = self.at
            patterns.append(self.word())
            self._blank()
            if self.here == ")":
                self.at += 1
                return tuple(patterns)
            if self.here != "|" or self.at == before:
                raise self.error("a pattern of this case is not closed with )")
            self.at += 1

    def _for(self) -> For:
        line = self.line
        self._take_reserved()
        self._blank()
        if self.starts("(("):
            self._arithmetic_command()
            name, words = "", None
        else:
            name, words = self.word().bare or "", None
            self._blank(newlines=True)
            if self._reserved() == "in":
                self._take_reserved()
                words = tuple(self._words_to_end())
        self._blank(newlines=True)
        if self.here == ";":
            self.at += 1
            self._blank(newlines=True)
        return For(name, words, self._do(line), line)

    def _words_to_end(self) -> list[Word]:
        words: list[Word] = []
        self._blank()
        while self.here not in ("", "\n", ";", "&", "|", "(", ")", "<", ">"):
            words.append(self.word())
            self._blank()
        return words

    def _do(self, line: int) -> Program:
        self._need("do", line)
        body = self._program(("done",))
        self._need("done", line)
        return body

    def _while(self) -> While:
        line = self.line
        until = self._reserved() == "until"
        self._take_reserved()
        condition = self._program(("do",))
        return While(condition, self._do(line), line, until)

    def _group(self) -> Group:
        line = self.line
        subshell = self.here == "("
        self.at += 1
        body = self._program(() if subshell else ("}",))
        if self.here != (")" if subshell else "}"):
            raise self.error(f"the group of line {line} is not closed")
        self.at += 1
        return Group(body, subshell, line)

    def _function(self) -> Node:
        self._take_reserved()
        self._blank()
        name = self.word().bare or ""
        self._blank()
        if self.starts("()"):
            self.at += 2
        return self._function_body(name)

    def _function_body(self, name: str) -> Function:
        line = self.line
        self._blank(newlines=True)
        self.nest()
        body = self._command()
        self.depth -= 1
        return Function(name, body, line)

    def _test(self) -> Test:
        line = self.line
        self.at += 2
        items: list[Word | str] = []
        while True:
            self._blank(newlines=True)
            if not self.here:
                raise self.error(f"the [[ of line {line} is not closed with ]]")
            two, one = self.text[self.at : self.at + 2], self.here
            operator = two if two in ("&&", "||", "]]") else one if one in "()<>" else ""
            self.at += len(operator)
            if operator == "]]":
                return Test(tuple(items), line)
            if operator:
                items.append(operator)
                continue
            before = self.at
            items.append(self._pattern_word() if items and items[-1:] == ["=~"] else self.word(" \t\n;&|<>()"))
            if self.at == before:
                raise self.error(f"{self.here!r} is not expected inside [[ ]]")
            last = items[-1]
            if isinstance(last, Word) and last.bare in ("!", "=~"):
                items[-1] = last.bare or ""

    def _pattern_word(self) -> Word:
        """A regular expression, which may hold parentheses and bars."""
        return self.word(" \t\n")

    def _arithmetic_command(self) -> ArithmeticCommand:
        line = self.line
        inner = self._balanced(self.at)
        return ArithmeticCommand(inner.strip()[1:-1] if inner.strip().startswith("(") else inner, line)
