"""What a script has set so far, what is not known, and how much reading it may cost."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from fivefold.errors import FivefoldError
from fivefold.interop.shell.syntax import Node
from fivefold.interop.source import UNKNOWN, Field, Place, plain, unreadable

MAX_STEPS = 10_000  # commands that are followed, loops unrolled
MAX_CHARACTERS = 1 << 20  # made by expansion in all
FIELD_COST = 64  # characters that a field costs beside its own
MAX_VARIABLES = 5_000
MAX_UNKNOWNS = 20_000
_UNKNOWN = re.compile(f"{UNKNOWN}(\\d+){UNKNOWN}")


@dataclass(frozen=True, slots=True)
class Unknown:
    """Text that reading cannot know.

    why: "unset" (a variable that only the environment could hold), "argument" (of the script), "command" (the output of
    one), "branch" (a condition that the text does not decide). name: the variable, argument or command. choices: what
    the branches give it, as far as known.
    """

    why: str
    name: str
    place: Place
    choices: tuple[str, ...] = ()

    def sentence(self) -> str:
        """What would have to be known."""
        if self.why == "unset":
            return f"${self.name} is set nowhere in what was read; give it with --set {self.name}=VALUE"
        if self.why == "argument":
            return f"${self.name} is an argument of the script; give the arguments with --args 'FIRST SECOND'"
        if self.why == "command":
            return f"it is the output of {self.name[:60]!r}, and nothing is run"
        known = [choice for choice in self.choices if choice not in ("", "…")]
        given = f" (one of {', '.join(known[:6])})" if known else ""
        return f"${self.name}{given} depends on a condition at {self.place} that the text does not decide"


@dataclass(slots=True)
class Variable:
    """A scalar, or an array of values. Empty values with exported only: declared."""

    values: list[Field]
    array: bool = False

    def copy(self) -> Variable:
        return Variable(list(self.values), self.array)


@dataclass(slots=True)
class State:
    """Everything that reading a script changes.

    given: variables of --set, which win over the script's own defaults only as the environment would: they are set
    before its first line. assumed: sentences about what was taken for granted, with their places.
    """

    file: str
    variables: dict[str, Variable] = field(default_factory=dict)
    functions: dict[str, Node] = field(default_factory=dict)
    arguments: list[Field] = field(default_factory=list)
    arguments_given: bool = False
    letter: int = 1  # where getopts stands in a word of several options
    unknowns: list[Unknown] = field(default_factory=list)
    assumed: list[tuple[Place, str]] = field(default_factory=list)
    steps: int = 0
    characters: int = 0
    last: Place | None = None

    def step(self, place: Place, cost: int = 1) -> None:
        self.steps += cost
        self.last = place
        if self.steps > MAX_STEPS:
            raise too_much(place, f"following it takes more than {MAX_STEPS:,} steps")

    def spend(self, characters: int, place: Place) -> None:
        self.characters += characters
        if self.characters > MAX_CHARACTERS:
            raise too_much(place, f"its expansions make more than {MAX_CHARACTERS >> 20} MiB of text")

    def unknown(self, why: str, name: str, place: Place, choices: tuple[str, ...] = ()) -> str:
        """Text that stands for something unknown."""
        if len(self.unknowns) >= MAX_UNKNOWNS:
            raise too_much(place, f"more than {MAX_UNKNOWNS:,} values in it are not known")
        self.unknowns.append(Unknown(why, name, place, choices))
        return f"{UNKNOWN}{len(self.unknowns) - 1}{UNKNOWN}"

    def unknown_in(self, text: str) -> Unknown | None:
        """The first unknown part of a text, None where all of it is known."""
        found = _UNKNOWN.search(text)
        return self.unknowns[int(found[1])] if found else None

    def assume(self, place: Place, sentence: str) -> None:
        if (place, sentence) not in self.assumed and len(self.assumed) < MAX_UNKNOWNS:
            self.assumed.append((place, sentence))

    def set(self, name: str, value: Variable, place: Place) -> None:
        if len(self.variables) >= MAX_VARIABLES and name not in self.variables:
            raise too_much(place, f"it sets more than {MAX_VARIABLES:,} variables")
        self.variables[name] = value

    def scalar(self, name: str) -> Field | None:
        """The value of a variable, of an array its first; None where it is not set."""
        found = self.variables.get(name)
        return found.values[0] if found and found.values else None

    def snapshot(self) -> dict[str, Variable]:
        """A copy of all variables, which counts as steps by its size."""
        size = sum(1 + len(value.values) for value in self.variables.values())
        self.step(self.last or Place(self.file, 1), 1 + size // 100)
        return {name: value.copy() for name, value in self.variables.items()}


def is_unknown(text: str) -> bool:
    """Whether a text is one unknown and nothing else."""
    return _UNKNOWN.fullmatch(str(plain(text))) is not None


def without_unknowns(text: str) -> str:
    """For messages: unknown parts as an ellipsis."""
    return _UNKNOWN.sub("…", text)


def too_much(place: Place, problem: str) -> FivefoldError:
    return unreadable(place, problem, "check the part of it that launches the training")
