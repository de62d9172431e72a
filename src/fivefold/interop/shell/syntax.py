"""The part of the shell language that launch scripts use, as a tree. Nothing in it can run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Literal:
    """Text as written; quoted text is not split into words."""

    text: str
    quoted: bool = False


@dataclass(frozen=True, slots=True)
class Parameter:
    """$name or ${name...}. index: "@", "*" or the word between brackets. operator: "" or one of ${}'s, as in ":-"."""

    name: str
    quoted: bool = False
    index: str | Word | None = None
    operator: str = ""
    argument: Word | None = None
    length: bool = False
    indirect: bool = False


@dataclass(frozen=True, slots=True)
class Substitution:
    """$(commands) or `commands`."""

    text: str
    quoted: bool = False


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """$((expression))."""

    text: str
    quoted: bool = False


Part = Literal | Parameter | Substitution | Arithmetic


@dataclass(frozen=True, slots=True)
class Word:
    """One word before expansion."""

    parts: tuple[Part, ...]
    line: int

    @property
    def bare(self) -> str | None:
        """The text of a word without quotes and expansions; None for any other."""
        if len(self.parts) == 1 and isinstance(self.parts[0], Literal) and not self.parts[0].quoted:
            return self.parts[0].text
        return None


@dataclass(frozen=True, slots=True)
class Assign:
    """name=word, name+=word, name[index]=word, name=(words)."""

    name: str
    value: Word | tuple[Word, ...]
    append: bool
    index: Word | None
    line: int


@dataclass(frozen=True, slots=True)
class Heredoc:
    """The text of a here-document. expands: its delimiter was not quoted."""

    text: str
    expands: bool
    line: int


@dataclass(frozen=True, slots=True)
class Simple:
    """Assignments, then a command with its words. heredocs: what it reads, there once the line was read to its end.
    redirected: words that name files. quiet: its output goes to a file or to the errors."""

    assigns: tuple[Assign, ...]
    words: tuple[Word | Assign, ...]
    heredocs: list[Heredoc]
    redirected: tuple[Word, ...]
    line: int
    quiet: bool = False


@dataclass(frozen=True, slots=True)
class Test:
    """[[ items ]]: words and the operators && || ( ) ! < >."""

    items: tuple[Word | str, ...]
    line: int


@dataclass(frozen=True, slots=True)
class ArithmeticCommand:
    """(( expression ))."""

    text: str
    line: int


@dataclass(frozen=True, slots=True)
class AndOr:
    """first, then (operator, node) pairs joined by && and ||."""

    first: Node
    rest: tuple[tuple[str, Node], ...]
    line: int


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Commands joined by |; negated by a leading !."""

    nodes: tuple[Node, ...]
    negated: bool
    line: int


@dataclass(frozen=True, slots=True)
class If:
    """(condition, body) pairs in order, and the else body."""

    branches: tuple[tuple[Program, Program], ...]
    otherwise: Program
    line: int


@dataclass(frozen=True, slots=True)
class Case:
    """case word in; (patterns, body) pairs."""

    word: Word
    branches: tuple[tuple[tuple[Word, ...], Program], ...]
    line: int


@dataclass(frozen=True, slots=True)
class For:
    """for name in words. words None: the script's arguments, or a counting loop, whose name is ""."""

    name: str
    words: tuple[Word, ...] | None
    body: Program
    line: int


@dataclass(frozen=True, slots=True)
class While:
    """while or until."""

    condition: Program
    body: Program
    line: int
    until: bool = False


@dataclass(frozen=True, slots=True)
class Group:
    """{ body } or, in a subshell, ( body )."""

    body: Program
    subshell: bool
    line: int


@dataclass(frozen=True, slots=True)
class Function:
    """name() { body }."""

    name: str
    body: Node
    line: int


Node = Simple | Test | ArithmeticCommand | AndOr | Pipeline | If | Case | For | While | Group | Function
Program = tuple[Node, ...]
