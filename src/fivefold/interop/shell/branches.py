"""Where the text does not decide a branch: all are followed, and what they leave different becomes unknown."""

from __future__ import annotations

from collections.abc import Callable

from fivefold.interop.shell.state import State, Variable, is_unknown, without_unknowns
from fivefold.interop.source import UNKNOWN, Field, Place, plain


class Flow(Exception):  # noqa: N818  (control flow of the script that is read, no error)
    """The script leaves the place where it is."""


class Ended(Flow):
    """exit, or a failing command that ends the script."""


class Returned(Flow):
    """return from a function or a sourced file."""


class Broke(Flow):
    """break, or continue where that is told apart."""


class Continued(Broke):
    """continue."""


Branch = Callable[[], None]


def follow_all(state: State, branches: list[Branch], place: Place) -> None:
    """Follow every branch from the same start; those that end the script are taken not to happen.

    Raises Ended where all of them end it.
    """
    start, kept = state.variables, []
    for branch in branches:
        state.variables = start
        state.variables = state.snapshot()
        try:
            branch()
        except Ended:
            continue
        except Flow:
            pass
        kept.append(state.variables)
    if not kept:
        state.variables = start
        raise Ended
    state.variables = merged(state, kept, place)


def merged(state: State, outcomes: list[dict[str, Variable]], place: Place) -> dict[str, Variable]:
    """What all outcomes agree on; the rest unknown."""
    if len(outcomes) == 1:
        return outcomes[0]
    names = dict.fromkeys(name for outcome in outcomes for name in outcome)
    return {name: _agreed(state, name, [outcome.get(name) for outcome in outcomes], place) for name in names}


def _agreed(state: State, name: str, values: list[Variable | None], place: Place) -> Variable:
    there = [value for value in values if value is not None]
    texts = [tuple(str(plain(each.text)) for each in value.values) if value else () for value in values]
    if len(there) == len(values) and len(set(texts)) == 1:
        return there[0]
    if any(value.array for value in there):
        return Variable(_common_fields(state, name, [value.values if value else [] for value in values], place), True)
    first = [value.values[0].text if value and value.values else "" for value in values]
    shared = _shared_start(first)
    start = len(str(plain(shared)))
    rest = tuple(dict.fromkeys(_choice(state, str(plain(text))[start:]) for text in first))
    return Variable([Field(shared + state.unknown("branch", name, place, rest), place)])


def _common_fields(state: State, name: str, lists: list[list[Field]], place: Place) -> list[Field]:
    """Fields that all lists start with, then one unknown for what some add."""
    common = 0
    while all(common < len(each) for each in lists) and len({plain(each[common].text) for each in lists}) == 1:
        common += 1
    rest = tuple(dict.fromkeys(" ".join(_choice(state, field.text) for field in each[common:]) for each in lists))
    return [*lists[0][:common], Field(state.unknown("branch", name, place, rest), place)]


def _shared_start(texts: list[str]) -> str:
    """The shortest text and a space where the others only add words to it, else nothing."""
    shortest = min(texts, key=len)
    start = str(plain(shortest))
    if start and all(each == start or each.startswith((start + " ", start + "\n")) for each in map(plain, texts)):
        return shortest + " "
    return ""


def _choice(state: State, text: str) -> str:
    """A branch's value in words."""
    text = " ".join(str(plain(text)).split())
    if is_unknown(text):
        found = state.unknown_in(text)
        return f"${found.name}" if found and found.why in ("unset", "argument") else "…"
    return without_unknowns(text) if UNKNOWN in text else text
