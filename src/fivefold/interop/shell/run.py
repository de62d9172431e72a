"""Following a script from its first line to its last, without running anything.

Variables, arrays, functions, loops over words and conditions on texts are followed as bash would with an empty
environment and no arguments; a branch that the text does not decide is followed both ways. Commands have no effect.
"""

from __future__ import annotations

from collections.abc import Callable

from fivefold.interop.shell.branches import Broke, Continued, Ended, Flow, follow_all
from fivefold.interop.shell.calls import Calls
from fivefold.interop.shell.conditions import Condition, Truth, both, either
from fivefold.interop.shell.files import Files
from fivefold.interop.shell.patterns import matches
from fivefold.interop.shell.state import State, is_unknown, too_much
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
    Simple,
    Test,
    While,
)
from fivefold.interop.source import UNKNOWN, Field, Place, plain

_DEEPEST = 60  # statements, calls and texts inside one another
_MOST_ITEMS = 64  # of a loop that is unrolled


class Runner(Calls):
    """Follows the statements and keeps the commands that `wanted` asks for."""

    def __init__(self, state: State, files: Files, wanted: Callable[[list[Field]], bool]) -> None:
        super().__init__(state, files, wanted)
        self._depth = 0

    def whole(self, program: Program) -> None:
        """Follow a script to its end."""
        try:
            self.program(program)
        except Flow:
            return

    def program(self, nodes: Program) -> None:
        for node in nodes:
            self.node(node)

    def node(self, node: Node) -> Truth:
        """Follow one statement. Returns whether it succeeds, as far as the text decides it."""
        self.state.step(self._place(node))
        self._depth += 1
        if self._depth > _DEEPEST:
            raise too_much(self._place(node), "statements nest too deeply, or a function calls itself")
        try:
            return _KINDS[type(node)](self, node)
        finally:
            self._depth -= 1

    def _place(self, node: Node) -> Place:
        return Place(self.state.file, node.line)

    # ---------------------------------------------------------------- branches

    def _and_or(self, node: AndOr) -> Truth:
        found = self.node(node.first)
        for operator, following in node.rest:
            if found.value is None:
                branches = [lambda n=following: self._ignore(self.node(n)), lambda: None]
                self._both_ways(branches, self._place(node))
                continue
            if found.value == (operator == "||"):
                continue
            found = self._guarded(following, found, operator, self._place(node))
        return found

    def _guarded(self, following: Node, found: Truth, operator: str, place: Place) -> Truth:
        """`test && command`, where an assumed test must not end the script."""
        if not found.assumed:
            return self.node(following)
        result = [found]

        def take() -> None:
            result[0] = self.node(following)

        self._assumed(take, [lambda: None], place)
        return (both if operator == "&&" else either)(found, result[0])

    def _if(self, node: If) -> Truth:
        self._branch([(cond, body) for cond, body in node.branches], node.otherwise, self._place(node))
        return Truth(True)

    def _branch(self, branches: list[tuple[Program, Program]], otherwise: Program, place: Place) -> None:
        if not branches:
            self.program(otherwise)
            return
        (condition, body), rest = branches[0], branches[1:]
        truth = Truth(True)
        for each in condition:
            truth = self.node(each)

        def others() -> None:
            self._branch(rest, otherwise, place)

        self._choose(truth, lambda: self.program(body), others, place)

    def _choose(self, truth: Truth, yes: Callable[[], None], no: Callable[[], None], place: Place) -> None:
        if truth.value is None:
            self._both_ways([yes, no], place)
        elif truth.assumed:
            self._assumed(yes if truth.value else no, [no if truth.value else yes], place)
        else:
            (yes if truth.value else no)()

    def _both_ways(self, branches: list[Callable[[], None]], place: Place) -> None:
        self._undecided += 1
        try:
            follow_all(self.state, branches, place)
        finally:
            self._undecided -= 1

    def _assumed(self, taken: Callable[[], None], others: list[Callable[[], None]], place: Place) -> None:
        """Follow `taken`; if that ends the script, the variable will be set in practice: follow the others."""
        start, commands = self.state.snapshot(), len(self.commands)
        try:
            taken()
        except Ended:
            self.state.variables = start
            del self.commands[commands:]
            self.state.assume(place, "the condition here would end the script; it is read as not holding")
            self._both_ways(others, place)

    def _case(self, node: Case) -> Truth:
        place = self._place(node)
        value = self._expand.text(node.word).text
        if UNKNOWN in value:
            bodies: list[Callable[[], None]] = [lambda b=body: self.program(b) for _, body in node.branches]
            if not any(pattern.bare == "*" for patterns, _ in node.branches for pattern in patterns):
                bodies.append(lambda: None)
            self._both_ways(bodies, place)
            return Truth(None)
        text = str(plain(value))
        for patterns, body in node.branches:
            for pattern in patterns:
                shown = self._expand.pattern(pattern)
                self.state.step(place, 1 + len(text) * len(shown) // 4096)
                if matches(shown, text):
                    self.program(body)
                    return Truth(True)
        return Truth(True)

    def _for(self, node: For) -> Truth:
        place = self._place(node)
        words = node.words
        items = list(self.state.arguments) if words is None and node.name else self._expand.all_fields(words or ())
        known = node.name and not any(is_unknown(item.text) for item in items) and len(items) <= _MOST_ITEMS
        if not known:
            if node.name:
                self._set(node.name, self.state.unknown("branch", node.name, place), place)
            self._both_ways([lambda: self.program(node.body), lambda: None], place)
            return Truth(True)
        for item in items:
            self._set(node.name, item.text, item.place)
            try:
                self.program(node.body)
            except Continued:
                continue
            except Broke:
                break
        return Truth(True)

    def _while(self, node: While) -> Truth:
        """A loop that takes arguments away is followed turn by turn; any other may turn any number of times."""
        place = self._place(node)
        while True:
            before = self._arguments()
            truth = Truth(True)
            for each in node.condition:
                truth = self.node(each)
            truth = ~truth if node.until else truth
            if truth.value is False:
                return Truth(True)
            if truth.value is None or not self.state.arguments_given:
                break
            start, arguments, commands = self.state.snapshot(), list(self.state.arguments), len(self.commands)
            try:
                self.program(node.body)
            except Continued:
                pass
            except Broke:
                return Truth(True)
            if self._arguments() == before:
                self.state.variables, self.state.arguments = start, arguments
                del self.commands[commands:]
                break
        self._both_ways([lambda: self.program(node.body), lambda: None], place)
        return Truth(True)

    def _arguments(self) -> tuple[int, str, int]:
        """How far shift and getopts have come."""
        held = self.state.scalar("OPTIND")
        return len(self.state.arguments), held.text if held else "", self.state.letter

    # ---------------------------------------------------------------- conditions

    def _test(self, node: Test) -> Truth:
        items: list[str] = []
        for item in node.items:
            if isinstance(item, str):
                items.append(item)
            elif items and items[-1] in ("=", "==", "!="):
                items.append(self._expand.pattern(item))
            else:
                items.append(self._expand.text(item).text)
        return Condition(self.state, items, self._place(node), patterns=True).truth()

    def _arithmetic(self, node: ArithmeticCommand) -> Truth:
        value = self._expand.arithmetic(node.text, self._place(node))
        return Truth(None if UNKNOWN in value else value != "0")

    def _pipeline(self, node: Pipeline) -> Truth:
        if len(node.nodes) == 1:
            found = self.node(node.nodes[0])
            return ~found if node.negated else found
        place = self._place(node)
        self.print_text(self.state.unknown("command", "a pipeline", place), place)
        held, self._printed = self._printed, None  # what the parts hand on is no output of the whole
        try:
            for each in node.nodes:
                self._aside(lambda n=each: self._ignore(self.node(n)))
        finally:
            self._printed = held
        return Truth(None) if node.negated else Truth(True)

    def _group(self, node: Group) -> Truth:
        if node.subshell:
            self._aside(lambda: self.program(node.body))
        else:
            self.program(node.body)
        return Truth(True)

    def _function(self, node: Function) -> Truth:
        if len(self.state.functions) < 1000:
            self.state.functions[node.name] = node.body
        return Truth(True)


def _kinds() -> dict[type, Callable[[Runner, object], Truth]]:
    table: dict[type, object] = {
        Simple: Runner.simple, Test: Runner._test, ArithmeticCommand: Runner._arithmetic, AndOr: Runner._and_or,
        Pipeline: Runner._pipeline, If: Runner._if, Case: Runner._case, For: Runner._for, While: Runner._while,
        Group: Runner._group, Function: Runner._function,
    }  # fmt: skip
    return table  # type: ignore[return-value]


_KINDS = _kinds()
