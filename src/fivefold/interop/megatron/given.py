"""The options of one launch, typed on demand; what is wrong or missing is collected and said once."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fivefold.interop.megatron.options import ARGUMENTS, OPTIONS, near_options
from fivefold.interop.shell.state import State, Unknown, is_unknown, without_unknowns
from fivefold.interop.source import UNKNOWN, Field, Place, plain

_LARGEST = 1 << 40


@dataclass(frozen=True, slots=True)
class Setting:
    """One option with its values, as given. place: of the option; values carry their own."""

    option: str
    values: tuple[Field, ...]
    place: Place

    @property
    def at(self) -> Place:
        """Where the value stands, of a flag the flag."""
        return self.values[0].place if self.values else self.place

    @property
    def text(self) -> str:
        """The values as written, unknown parts as an ellipsis."""
        return " ".join(without_unknowns(str(plain(value.text))) for value in self.values)


@dataclass(frozen=True, slots=True)
class Mistake:
    """An option that Megatron-LM's own parser would refuse."""

    id: str
    option: str
    value: Any
    legal: list[Any]
    message: str
    place: Place


@dataclass(slots=True)
class Given:
    """All settings of a launch. Bridge and YAML files become the same thing.

    state: knows what unknown values stand for. used: options that some figure rests on. missing: sentences that ask
    for what is needed and not there.
    """

    state: State
    settings: dict[str, Setting] = field(default_factory=dict)
    unknown: list[Setting] = field(default_factory=list)
    dropped: list[tuple[Place, Unknown]] = field(default_factory=list)
    repeated: list[Setting] = field(default_factory=list)
    mistakes: list[Mistake] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)

    def add(self, setting: Setting) -> None:
        """A later setting of the same option wins, as in argparse."""
        before = self.settings.get(setting.option)
        if before is not None and before.text != setting.text:
            self.repeated.append(before)
        self.settings[setting.option] = setting

    def __contains__(self, option: str) -> bool:
        return option in self.settings

    def place(self, option: str) -> Place | None:
        """Where the option's value stands; None where it is not given."""
        found = self.settings.get(option)
        return found.at if found else None

    def is_unknown(self, option: str) -> bool:
        """Whether the option is given with a value that the file does not fix."""
        found = self.settings.get(option)
        return found is not None and any(UNKNOWN in value.text for value in found.values)

    # ---------------------------------------------------------------- typed values

    def flag(self, option: str) -> bool:
        """Whether a switch is there."""
        self.used.add(option)
        found = self.settings.get(option)
        return found is not None and not (found.values and found.text.lower() in ("false", "0", "no", "off"))

    def integer(self, option: str, *, low: int = 1, needed: str = "") -> int | None:
        """A whole number of at least `low`; None where it is not given. needed: why it has to be known, if it has."""
        text = self.text(option, needed=needed)
        if text is None:
            return self._default(option)
        value = int(text) if re.fullmatch(r"[-+]?\d{1,13}", text) else None
        if value is None or not low <= value <= _LARGEST:
            asked = f"a whole number of {low} or more"
            self._mistake("option-type", option, text, [asked], f"{option} {text[:40]} is not {asked}.")
            return self._default(option)
        return value

    def number(self, option: str) -> float | None:
        text = self.text(option)
        try:
            return None if text is None else float(text)
        except ValueError:
            self._mistake("option-type", option, text, ["a number"], f"{option} {str(text)[:40]} is not a number.")
            return None

    def text(self, option: str, *, needed: str = "") -> str | None:
        """The value as text; None where it is not given or not known."""
        self.used.add(option)
        found = self.settings.get(option)
        if found is None:
            if needed:
                self.missing.setdefault(option, f"{option} is not given, and {needed}")
            return None
        if not found.values:
            self._mistake("option-value", option, None, [], f"{option} has no value.")
            return None
        value = found.values[0].text
        if UNKNOWN in value:
            unknown = self.state.unknown_in(value)
            self.missing.setdefault(
                option, f"{option} at {found.place} is not known: {unknown.sentence() if unknown else 'no value'}"
            )
            return None
        return str(plain(value))

    def word(self, option: str, *, needed: str = "") -> str | None:
        """A value out of the option's choices; its default where it is not given."""
        text = self.text(option, needed=needed)
        if text is None:
            return self._default(option)
        choices = OPTIONS[option].choices
        if choices and text not in choices:
            listed = ", ".join(choices)
            self._mistake("option-choice", option, text, list(choices), f"{option} {text[:40]} is none of {listed}.")
            return self._default(option)
        return text

    def texts(self, option: str) -> tuple[str, ...]:
        """All values; empty where it is not given."""
        if self.text(option) is None:
            return ()
        values = [str(plain(value.text)) for value in self.settings[option].values]
        return tuple(part for value in values for part in value.replace(",", " ").split())

    def _default(self, option: str) -> Any:
        return OPTIONS[option].default if option in OPTIONS else None

    def _mistake(self, id: str, option: str, value: Any, legal: list[Any], message: str) -> None:
        found = Mistake(id, option, value, legal, message, self.place(option) or Place(self.state.file, 1))
        if all((each.id, each.option) != (id, option) for each in self.mistakes):
            self.mistakes.append(found)


def parse_arguments(given: Given, fields: list[Field]) -> None:
    """The words after the script's name, as argparse takes them; fills `given`."""
    at = 0
    while at < len(fields):
        field_ = fields[at]
        word = str(plain(field_.text))
        at += 1
        if is_unknown(word):
            given.dropped.append((field_.place, _unknown(given, word)))
            continue
        if not word.startswith("--"):
            if word and UNKNOWN not in word:
                given.unknown.append(Setting(word[:80], (), field_.place))
            continue
        name, equals, value = word.partition("=")
        option = OPTIONS.get(name)
        takes = _VALUES.get(option.kind, _takes_one) if option else _takes_any
        values = [Field(value, field_.place)] if equals else takes(given, fields, at)
        at += 0 if equals else len(values)
        values = [Field(str(plain(each.text)), each.place) for each in values]
        setting = Setting(name, tuple(values), field_.place)
        if option is None:
            given.unknown.append(setting)
        else:
            given.add(setting)


def _unknown(given: Given, word: str) -> Unknown:
    found = given.state.unknown_in(word)
    return found if found is not None else Unknown("command", "", Place(given.state.file, 1))


def _is_option(text: str) -> bool:
    return text.startswith("-") and re.fullmatch(r"-\d+(\.\d*)?([eE][-+]?\d+)?|-\.\d+", text) is None


def _takes_none(given: Given, fields: list[Field], at: int) -> list[Field]:
    return []


def _takes_one(given: Given, fields: list[Field], at: int) -> list[Field]:
    following = fields[at : at + 1]
    return following if following and not _is_option(str(plain(following[0].text))) else []


def _takes_any(given: Given, fields: list[Field], at: int) -> list[Field]:
    end = at
    while end < len(fields) and not _is_option(str(plain(fields[end].text))):
        end += 1
    return fields[at:end]


_VALUES: dict[str, Callable[[Given, list[Field], int], list[Field]]] = {
    "flag": _takes_none,
    "off": _takes_none,
    "bool": _takes_none,
    "ints": _takes_any,
    "texts": _takes_any,
}


def unknown_sentence(setting: Setting) -> str:
    """What to say of an option that the table does not have."""
    near = near_options(setting.option)
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    return f"{setting.option} at {setting.place} is no option of {ARGUMENTS.partition(',')[0]} known here.{hint}"
