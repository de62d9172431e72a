"""From words to the fields of a command: variables, arrays, quotes, and the few substitutions that text decides."""

from __future__ import annotations

import re
from collections.abc import Callable

from fivefold.errors import FivefoldError
from fivefold.interop.shell.arithmetic import NotKnown, evaluate
from fivefold.interop.shell.parser import parse
from fivefold.interop.shell.patterns import without_prefix, without_suffix
from fivefold.interop.shell.splitting import Splitting, marked
from fivefold.interop.shell.state import State, Variable, is_unknown
from fivefold.interop.shell.syntax import Arithmetic, Literal, Parameter, Part, Simple, Word
from fivefold.interop.shell.words import Scanner
from fivefold.interop.source import UNKNOWN, Field, Place, plain

_SPECIAL = re.compile(r"[*?\[\\]")


class Expander:
    """Expands words in a State."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.output_of: Callable[[list[Field], Place], str | None] | None = None  # of the script's own functions
        self._depth = 0

    def place(self, word: Word) -> Place:
        return Place(self.state.file, word.line)

    def fields(self, word: Word) -> list[Field]:
        """The fields of one word: none, one, or several."""
        place = self.place(word)
        splitting = Splitting(self.state, word, place)
        for part in word.parts:
            splitting.add(part, self._part(part, place))
        return splitting.made()

    def all_fields(self, words: tuple[Word, ...] | list[Word]) -> list[Field]:
        return [each for word in words for each in self.fields(word)]

    def text(self, word: Word) -> Field:
        """A word as one text: no splitting, arrays joined by spaces."""
        pieces: list[str] = []
        place = None
        for part in word.parts:
            found = self._part(part, self.place(word))
            pieces.append(" ".join(each.text for each in found))
            if len(word.parts) > 1 and found and found[0].place != self.place(word):
                pieces[-1] = marked(pieces[-1], found[0].place, word.line)
            place = place or (found[0].place if found and not isinstance(part, Literal) else None)
        only = len(word.parts) == 1
        text = "".join(pieces)
        self.state.spend(len(text), self.place(word))
        return Field(text, place if only and place else self.place(word))

    def pattern(self, word: Word) -> str:
        """A word as a pattern: what is quoted in it stands for itself."""
        pieces: list[str] = []
        for part in word.parts:
            text = " ".join(each.text for each in self._part(part, self.place(word)))
            pieces.append(_SPECIAL.sub(r"\\\g<0>", text) if part.quoted else text)
        made = "".join(pieces)
        self.state.spend(len(made), self.place(word))
        return str(plain(made))

    def heredoc(self, text: str, line: int) -> str:
        """The text of a here-document with its expansions."""
        scanner = Scanner(text, self.state.file, line)
        parts = tuple(scanner.quoted_text(""))
        return self.text(Word(parts, line)).text

    # ---------------------------------------------------------------- parts

    def _part(self, part: Part, place: Place) -> list[Field]:
        if isinstance(part, Literal):
            return [Field(part.text, place)]
        self._depth += 1
        if self._depth > 60:
            raise self.state_error(place)
        try:
            if isinstance(part, Parameter):
                return self.parameter(part, place)
            made = self.arithmetic if isinstance(part, Arithmetic) else self._substitution
            return [Field(made(part.text, place), place)]
        finally:
            self._depth -= 1

    def state_error(self, place: Place) -> FivefoldError:
        from fivefold.interop.shell.state import too_much

        return too_much(place, "expansions nest too deeply")

    def parameter(self, part: Parameter, place: Place) -> list[Field]:
        """The values of a parameter: several for arrays with [@]."""
        name = part.name
        if part.indirect:
            held = self.state.scalar(name)
            if held is None or not (target := str(plain(held.text))).isidentifier():
                return [Field(self.state.unknown("unset", name, place), place)]
            name = target
        found = self._values(name, part, place)
        if part.length:
            several = isinstance(part.index, str)
            if found is None:
                return [Field("0", place)]
            count = len(found) if several else len(str(plain(found[0].text))) if found else 0
            return [Field(str(count), place)]
        if part.operator:
            return self._operated(part, name, found, place)
        if found is None:
            return [Field(self._unset(name, place), place)]
        return found

    def _unset(self, name: str, place: Place) -> str:
        if name in ("@", "*"):
            return ""
        return self.state.unknown("argument" if name.isdigit() else "unset", name, place)

    def _values(self, name: str, part: Parameter, place: Place) -> list[Field] | None:
        """Values of a variable or special parameter; None where it is not set."""
        state = self.state
        if name in ("@", "*"):
            if not state.arguments and not state.arguments_given:
                state.assume(place, f"${name}, the script's own arguments, is taken as empty; give them with --args")
            return list(state.arguments)
        if name == "#":
            known = state.arguments_given
            return [Field(str(len(state.arguments)) if known else state.unknown("argument", "#", place), place)]
        if name.isdigit():
            at = int(name)
            if at == 0:
                return [Field(state.file, place)]
            return [state.arguments[at - 1]] if at <= len(state.arguments) else None
        if name in "?$!-":
            return [Field(state.unknown("command", f"${name}", place), place)]
        variable = state.variables.get(name)
        if variable is None:
            return None
        if isinstance(part.index, Word):
            return self._element(variable, part.index, place)
        if variable.array and part.index is None:
            return variable.values[:1]
        return variable.values

    def _element(self, variable: Variable, index: Word, place: Place) -> list[Field] | None:
        try:
            at = evaluate(str(plain(self.text(index).text)), self._number)
            return [variable.values[at]] if -len(variable.values) <= at < len(variable.values) else None
        except NotKnown:
            return [Field(self.state.unknown("command", "an array element", place), place)]

    # ---------------------------------------------------------------- operators

    def _operated(self, part: Parameter, name: str, found: list[Field] | None, place: Place) -> list[Field]:
        operator, argument = part.operator, part.argument or Word((), place.line)
        empty = found is None or (operator.startswith(":") and all(not plain(each.text) for each in found))
        if operator in (":-", "-", ":=", "="):
            if not empty and found is not None:
                return found
            value = self.text(argument)
            if not name.isdigit() and name not in "@*":
                if operator.endswith("="):
                    self.state.set(name, Variable([value]), place)
                if found is None:
                    self.state.assume(place, f"${name} is not set; its default {_shown(value.text)} is taken")
            return [Field(value.text, place)]
        if operator in (":+", "+"):
            return [] if empty else [self.text(argument)]
        if operator in (":?", "?"):
            return found if found is not None and not empty else [Field(self._unset(name, place), place)]
        if found is None:
            return [Field(self._unset(name, place), place)]
        if operator == ":":
            return self._slice(part, found, argument, place)
        return [Field(self._edited(operator, each.text, argument, place), each.place) for each in found]

    def _edited(self, operator: str, text: str, argument: Word, place: Place) -> str:
        if UNKNOWN in text:
            return self.state.unknown("command", "an edited variable", place)
        text = str(plain(text))
        if operator[0] in "^,":
            change = str.upper if operator[0] == "^" else str.lower
            return change(text) if len(operator) == 2 else change(text[:1]) + text[1:]
        pattern = str(plain(self.text(argument).text))
        self.state.step(place, 1 + len(text) * len(pattern) // 8)
        if operator[0] == "#":
            return without_prefix(text, pattern, longest=operator == "##")
        if operator[0] == "%":
            return without_suffix(text, pattern, longest=operator == "%%")
        if operator in ("/", "//"):
            old, _, new = pattern.partition("/")
            if old and not set(old) & set("*?["):
                made = text.replace(old, new, -1 if operator == "//" else 1)
                self.state.spend(len(made), place)
                return made
        return self.state.unknown("command", "an edited variable", place)

    def _slice(self, part: Parameter, found: list[Field], argument: Word, place: Place) -> list[Field]:
        numbers = str(plain(self.text(argument).text)).split(":")
        try:
            start = evaluate(numbers[0], self._number)
            size = evaluate(numbers[1], self._number) if len(numbers) > 1 else None
        except NotKnown:
            return [Field(self.state.unknown("command", "a slice", place), place)]
        if isinstance(part.index, str):
            first = start - 1 if part.name in "@*" else start
            return found[max(first, 0) :][:size]
        text = str(plain(found[0].text)) if found else ""
        if UNKNOWN in text:
            return [Field(self.state.unknown("command", "a slice", place), place)]
        return [Field(text[start:][:size], place)]

    # ---------------------------------------------------------------- substitutions

    def arithmetic(self, expression: str, place: Place) -> str:
        """The value of $((expression)), or an unknown."""
        try:
            scanner = Scanner(str(plain(expression)), self.state.file, place.line)
            parts = tuple(scanner.quoted_text(""))
            return str(evaluate(str(plain(self.text(Word(parts, place.line)).text)), self._number))
        except NotKnown:
            blamed = self._blame(expression)
            return blamed or self.state.unknown("command", f"$(({plain(expression)}))", place)

    def _blame(self, expression: str) -> str | None:
        """The unknown value of a variable in an expression, which says more than the expression."""
        for name in re.findall(r"[A-Za-z_]\w*", expression):
            held = self.state.scalar(name)
            if held is None:
                return self.state.unknown("unset", name, Place(self.state.file, 1))
            if is_unknown(held.text):
                return held.text
        return None

    def _number(self, name: str) -> int:
        held = self.state.scalar(name)
        text = str(plain(held.text)).strip() if held else ""
        if not re.fullmatch(r"-?\d{1,18}", text):
            raise NotKnown
        return int(text)

    def _substitution(self, text: str, place: Place) -> str:
        """The output of the few commands that only work on text; anything else is unknown."""
        self.state.step(place)
        try:
            nodes = parse(text, self.state.file, place.line)
        except FivefoldError:
            nodes = ()
        if len(nodes) == 1 and isinstance(nodes[0], Simple) and not nodes[0].redirected and nodes[0].words:
            words = self.all_fields([w for w in nodes[0].words if isinstance(w, Word)])
            printed = self.output_of(words, place) if self.output_of and words else None
            if printed is not None:
                return printed
            fields = [str(plain(each.text)) for each in words]
            known = not any(UNKNOWN in each for each in fields)
            if fields and known and fields[0] in _OUTPUTS:
                made = _OUTPUTS[fields[0]](fields[1:])
                if made is not None:
                    return made
        return self.state.unknown("command", " ".join(str(plain(text)).split()), place)


def _shown(text: str) -> str:
    text = str(plain(text)).replace(UNKNOWN, "")
    return repr(text[:60]) if text else "''"


def _expr(words: list[str]) -> str | None:
    try:
        return str(evaluate(" ".join(words), _no_variable))
    except NotKnown:
        return None


def _no_variable(name: str) -> int:
    raise NotKnown


def _path_part(which: Callable[[str], str]) -> Callable[[list[str]], str | None]:
    return lambda words: which(words[0]) if len(words) == 1 else None


_OUTPUTS: dict[str, Callable[[list[str]], str | None]] = {
    "echo": lambda words: " ".join(word for word in words if word not in ("-n", "-e")),
    "expr": _expr,
    "basename": _path_part(lambda path: path.rstrip("/").rpartition("/")[2]),
    "dirname": _path_part(lambda path: path.rstrip("/").rpartition("/")[0] or "."),
}
