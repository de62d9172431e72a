"""What a simple command does to a script that is read: variables, calls, and commands inside texts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from fivefold.errors import FivefoldError
from fivefold.interop.shell.branches import Flow, Returned
from fivefold.interop.shell.builtins import BUILTINS
from fivefold.interop.shell.conditions import Truth
from fivefold.interop.shell.expand import Expander
from fivefold.interop.shell.files import Files
from fivefold.interop.shell.parser import parse
from fivefold.interop.shell.state import State, Variable
from fivefold.interop.shell.syntax import Assign, Heredoc, Node, Program, Simple, Word
from fivefold.interop.source import LINE, Field, Place, plain

_SHELLS = ("bash", "sh", "zsh", "dash", "/bin/bash", "/bin/sh", "/usr/bin/bash")
_PRINTS = ("echo", "printf", "cat", "sed", "awk", "grep", "tee", "logger")
# Built-in here, and they print what a run alone knows.
_PRINTING = ("grep", "pgrep", "diff", "which", "type", "command")
_DECLARING = ("export", "local", "declare", "typeset", "readonly")
# Programs that hand a text to a shell without a -c of their own.
_RUN_TEXTS = ("ssh", "pdsh", "srun", "mpirun", "sudo", "docker", "singularity", "apptainer")


@dataclass(frozen=True, slots=True)
class Command:
    """One command with its words, as it would be called. undecided: only if a condition holds that is not decided."""

    fields: tuple[Field, ...]
    place: Place
    undecided: bool
    variables: dict[str, Variable]


class Calls(ABC):
    """Follows simple commands and keeps those that `wanted` asks for; statements are the subclass's."""

    def __init__(self, state: State, files: Files, wanted: Callable[[list[Field]], bool]) -> None:
        self.state, self.files = state, files
        self.commands: list[Command] = []
        self._expand = Expander(state)
        self._wanted = wanted
        self._outer: list[Field] = []
        self._undecided = 0
        self._surely = 0  # what _undecided is where every command of that function runs
        self._printed: list[str] | None = None  # what a function inside $(...) prints
        self._expand.output_of = self._output_of

    @abstractmethod
    def program(self, nodes: Program) -> None:
        """Follow statements."""

    @abstractmethod
    def node(self, node: Node) -> Truth:
        """Follow one statement."""

    def _aside(self, what: Callable[[], None]) -> None:
        """Follow in a shell of its own: its variables and its exit stay there."""
        start = self.state.snapshot()
        try:
            what()
        except Flow:
            pass
        finally:
            self.state.variables = start

    def simple(self, node: Simple) -> Truth:
        place = Place(self.state.file, node.line)
        if not node.words:
            for assign in node.assigns:
                self.assign(assign)
            return Truth(True)
        first = node.words[0]
        if isinstance(first, Word) and first.bare in _DECLARING:
            for each in (*node.assigns, *node.words[1:]):
                if isinstance(each, Assign):
                    self.assign(each)
            return Truth(True)
        # The words are expanded before the assignments in front of them, which hold for this command alone.
        fields = self._expand.all_fields([word for word in node.words if isinstance(word, Word)])
        before = self.state.snapshot() if node.assigns else None
        for assign in node.assigns:
            self.assign(assign)
        try:
            return self.command(fields, node, place)
        finally:
            if before is not None:
                self.state.variables = before

    def assign(self, assign: Assign) -> None:
        place = Place(self.state.file, assign.line)
        held = self.state.variables.get(assign.name)
        if isinstance(assign.value, tuple):
            values = self._expand.all_fields(assign.value)
            if assign.append and held is not None:
                values = [*held.values, *values]
            self.state.set(assign.name, Variable(values, array=True), place)
            return
        value = self._expand.text(assign.value)
        if assign.index is not None:
            value = Field(self.state.unknown("command", f"{assign.name}[...]", place), place)
        if assign.append and held is not None and held.values and not held.array:
            text = held.values[0].text + f"{LINE}{value.place.line}{LINE}" + value.text
            self.state.spend(len(text), place)
            value = Field(text, held.values[0].place)
        elif assign.append and held is not None and held.array and held.values:
            first = held.values[0]
            self.state.set(
                assign.name, Variable([Field(first.text + value.text, first.place), *held.values[1:]], True), place
            )
            return
        self.state.set(assign.name, Variable([value]), place)

    def _set(self, name: str, text: str, place: Place) -> None:
        self.state.set(name, Variable([Field(text, place)]), place)

    def command(self, fields: list[Field], node: Simple, place: Place) -> Truth:
        if not fields:
            return Truth(True)
        name = str(plain(fields[0].text))
        if name in self.state.functions:
            return self._call(self.state.functions[name], fields[1:])
        if self._printed is not None and (name not in BUILTINS or name in _PRINTING):
            return self._print(name, fields[1:], node, place)
        if name in BUILTINS:
            return BUILTINS[name](self, fields, node, place)
        self._heredocs(name, fields, node)
        if self._strings(name, fields, place):
            return Truth(True)
        if name not in _PRINTS and self._wanted([*self._outer, *fields]):
            self.commands.append(Command((*self._outer, *fields), place, self._undecided > 0, self.state.snapshot()))
        return Truth(True)

    def _print(self, name: str, fields: list[Field], node: Simple, place: Place) -> Truth:
        """The output of a command in a function whose output is a value: known of an echo, or a here-document's cat,
        that surely runs."""
        if node.quiet:
            return Truth(True)
        words = [str(field.text) for field in fields]
        text = None
        if name == "echo" and not any("\\" in word or word in ("-e", "-ne", "-E") for word in words):
            text = " ".join(words[1:]) if words[:1] == ["-n"] else " ".join(words) + "\n"
        elif name == "cat" and node.heredocs and not words:
            text = self.heredoc(node.heredocs[-1])
        known = text is not None and self._undecided == self._surely
        self.print_text(text if text is not None and known else self.state.unknown("command", name, place), place)
        return Truth(name not in _PRINTING or None)

    def print_text(self, text: str, place: Place) -> None:
        """Add to the output of a function whose output is a value."""
        if self._printed is not None:
            self.state.spend(len(text), place)
            self._printed.append(text)

    def _output_of(self, fields: list[Field], place: Place) -> str | None:
        """What $(function arguments) stands for; None where the first word is no function of the script's."""
        body = self.state.functions.get(str(plain(fields[0].text)))
        if body is None:
            return None
        held, surely, self._printed, self._surely = self._printed, self._surely, [], self._undecided
        try:
            self._aside(lambda: self._ignore(self._call(body, fields[1:])))
            return "".join(self._printed).rstrip("\n")
        finally:
            self._printed, self._surely = held, surely

    @staticmethod
    def _ignore(_: Truth) -> None:
        return

    def _heredocs(self, name: str, fields: list[Field], node: Simple) -> None:
        """A here-document that is, or is written to, a script."""
        words = [str(plain(field.text)) for field in fields]
        for heredoc in node.heredocs:
            text = self.heredoc(heredoc)
            shell = any(word.rpartition("/")[2] in ("bash", "sh") for word in words)
            if name == "read" or not (shell or "--" in text):
                continue
            self._outer, outer = [*self._outer, *(fields if shell else [])], self._outer
            self._aside(lambda t=text, n=heredoc.line, s=shell: self.text(t, n, must=s))
            self._outer = outer

    def _strings(self, name: str, fields: list[Field], place: Place) -> bool:
        """Commands in texts, as in bash -c '...' or ssh host "...", and scripts that are called. True when followed."""
        words = [str(plain(field.text)) for field in fields]
        at = next((i for i, word in enumerate(words) if word in _SHELLS), None)
        rest = words[at + 1 :] if at is not None else []
        options = 0
        while options < len(rest) and rest[options].startswith("-"):
            options += 1
        if at is not None and any("c" in word and not word.startswith("--") for word in rest[:options]):
            script = at + 1 + options
            if script < len(fields):
                # bash -c TEXT NAME ARGUMENTS: the words after the name are the text's $1, $2, ...
                self._inside(fields[:at], fields[script].text, fields[script].place, fields[script + 2 :])
            return True
        called = fields[at + 1 + options] if at is not None and options < len(rest) else fields[0]
        if plain(called.text).endswith(".sh") and (at is not None or called is fields[0]):
            following = fields[fields.index(called) + 1 :]
            return self.files.follow(self, called, following, [*fields[: at or 0]], place)
        if name in _RUN_TEXTS:
            for field in fields[1:]:
                if " " in field.text and ("--" in field.text and (".py" in field.text or " -m " in field.text)):
                    self._inside(fields[: fields.index(field)], field.text, field.place)
                    return True
        return False

    def _inside(self, outer: list[Field], text: str, place: Place, arguments: list[Field] | None = None) -> None:
        state = self.state
        held, given = state.arguments, state.arguments_given
        if arguments is not None:
            state.arguments, state.arguments_given = arguments, True
        self._outer, before = [*self._outer, *outer], self._outer
        self._aside(lambda: self.text(text, place.line, must=True))
        self._outer = before
        state.arguments, state.arguments_given = held, given

    def text(self, text: str, line: int, *, must: bool) -> None:
        """Follow a text as a script. must: errors in it are the user's; else it may be no script at all."""
        try:
            nodes = parse(text, self.state.file, line)
        except FivefoldError:
            if must:
                raise
            return
        self.program(nodes)

    def heredoc(self, heredoc: Heredoc) -> str:
        """The text of a here-document."""
        return self._expand.heredoc(heredoc.text, heredoc.line) if heredoc.expands else heredoc.text

    def arithmetic(self, expression: str, place: Place) -> str:
        """The value of an arithmetic expression, as text."""
        return self._expand.arithmetic(expression, place)

    def called(self, text: str, name: str, arguments: list[Field], outer: list[Field]) -> None:
        """Follow another script in a shell of its own."""
        self.state.arguments, self.state.arguments_given = arguments, True
        self._outer, before = [*self._outer, *outer], self._outer
        nodes = parse(text, name)
        self._aside(lambda: self.program(nodes))
        self._outer = before

    def _call(self, body: Node, arguments: list[Field]) -> Truth:
        held, given = self.state.arguments, self.state.arguments_given
        self.state.arguments, self.state.arguments_given = arguments, True
        try:
            return self.node(body)
        except Returned:
            return Truth(True)
        finally:
            self.state.arguments, self.state.arguments_given = held, given
