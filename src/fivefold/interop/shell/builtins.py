"""The shell's own commands that matter to reading: they set variables, choose branches, or leave."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from fivefold.interop.shell.branches import Broke, Continued, Ended, Returned
from fivefold.interop.shell.conditions import Condition, Truth
from fivefold.interop.shell.state import Variable
from fivefold.interop.source import LINE, UNKNOWN, Field, Place, plain

if TYPE_CHECKING:
    from fivefold.interop.shell.calls import Calls
    from fivefold.interop.shell.syntax import Simple

Builtin = Callable[["Calls", list[Field], "Simple", Place], Truth]
_DONE = Truth(True)
_TRAILING = re.compile(rf"(?:\s|{LINE}\d+{LINE})+\Z")


def _texts(fields: list[Field]) -> list[str]:
    return [str(plain(field.text)) for field in fields]


def _test(runner: Calls, fields: list[Field], node: Simple, place: Place) -> Truth:
    items = [field.text for field in fields[1:]]
    if plain(fields[0].text) == "[" and items and plain(items[-1]) == "]":
        items.pop()
    return Condition(runner.state, items, place, patterns=False).truth()


def _exit(runner: Calls, fields: list[Field], node: Simple, place: Place) -> Truth:
    raise Ended


def _return(runner: Calls, fields: list[Field], node: Simple, place: Place) -> Truth:
    raise Returned


def _break(runner: Calls, fields: list[Field], node: Simple, place: Place) -> Truth:
    raise Broke


def _continue(runner: Calls, fields: list[Field], node: Simple, place: Place) -> Truth:
    raise Continued


def _unset(runner: Calls, fields: list[Field], node: Simple, place: Place) -> Truth:
    for name in _texts(fields[1:]):
        runner.state.variables.pop(name, None)
    return _DONE


def _set(runner: Calls, fields: list[Field], node: Simple, place: Place) -> Truth:
    words = _texts(fields)
    if "--" in words:
        runner.state.arguments, runner.state.arguments_given = fields[words.index("--") + 1 :], True
    return _DONE


def _shift(runner: Calls, fields: list[Field], node: Simple, place: Place) -> Truth:
    words = _texts(fields[1:])
    by = int(words[0]) if words and words[0].isdigit() and len(words[0]) < 6 else 1
    runner.state.arguments = runner.state.arguments[by:]
    return Truth(True if runner.state.arguments_given else None)


def _source(runner: Calls, fields: list[Field], node: Simple, place: Place) -> Truth:
    if len(fields) > 1:
        runner.files.source(runner, fields[1], fields[2:], place)
    return _DONE


def _eval(runner: Calls, fields: list[Field], node: Simple, place: Place) -> Truth:
    text = " ".join(field.text for field in fields[1:])
    runner.state.spend(len(text), place)
    runner.text(text, fields[1].place.line if len(fields) > 1 else place.line, must=True)
    return _DONE


def _wrapped(runner: Calls, fields: list[Field], node: Simple, place: Place) -> Truth:
    """exec, nohup and the like: the rest is the command."""
    rest = fields[1:]
    while rest and str(plain(rest[0].text)).startswith("-"):
        rest = rest[1:]
    return runner.command(rest, node, place)


def _exec(runner: Calls, fields: list[Field], node: Simple, place: Place) -> Truth:
    if len(fields) == 1:  # only redirections
        return _DONE
    _wrapped(runner, fields, node, place)
    raise Ended


def _read(runner: Calls, fields: list[Field], node: Simple, place: Place) -> Truth:
    """read: a here-document's text, else something that only a run knows."""
    names = [name for name in _texts(fields[1:]) if name.isidentifier()]
    for name in names[-1:]:
        texts = [_TRAILING.sub("", runner.heredoc(each)) for each in node.heredocs]
        text = texts[0] if texts else runner.state.unknown("command", f"read {name}", place)
        runner.state.set(name, Variable([Field(text, place)]), place)
    return _DONE


def _let(runner: Calls, fields: list[Field], node: Simple, place: Place) -> Truth:
    for text in _texts(fields[1:]):
        name, sign, value = text.partition("=")
        if sign and name.isidentifier():
            runner.state.set(name, Variable([Field(runner.arithmetic(value, place), place)]), place)
    return Truth(None)


def _found(runner: Calls, fields: list[Field], node: Simple, place: Place) -> Truth:
    """command -v, which, type: whether a program is there is not known; `command program` runs it."""
    words = _texts(fields)
    if words[0] == "command" and len(words) > 1 and not words[1].startswith("-"):
        return runner.command(fields[1:], node, place)
    return Truth(None)


def _getopts(runner: Calls, fields: list[Field], node: Simple, place: Place) -> Truth:
    """The next option of the script's own, as POSIX has it; none where there are no arguments."""
    state, words = runner.state, _texts(fields[1:])
    given = fields[3:] or state.arguments
    if not given or len(words) < 2:
        return Truth(False, assumed=True)
    held = state.scalar("OPTIND")
    index = str(plain(held.text)) if held else "1"
    at = int(index) if re.fullmatch(r"\d{1,4}", index) and int(index) > 0 else 1
    word = str(plain(given[at - 1].text)) if at <= len(given) else ""
    if UNKNOWN in word:
        return Truth(None)

    def keep(name: str, text: str) -> None:
        state.set(name, Variable([Field(text, place)]), place)

    if len(word) < 2 or not word.startswith("-") or word == "--":
        keep("OPTIND", str(at + (word == "--")))
        keep(words[1], "?")
        return Truth(False)
    letter, rest = word[state.letter], word[state.letter + 1 :]
    declared = letter in words[0] and letter != ":"
    takes = declared and words[0].partition(letter)[2].startswith(":")
    value = rest or (given[at].text if at < len(given) else None) if takes else None
    lacks = takes and value is None
    keep(words[1], letter if declared and not lacks else ":" if lacks and words[0].startswith(":") else "?")
    blamed = letter if lacks or (words[0].startswith(":") and not declared) else ""
    keep("OPTARG", blamed if value is None else value)
    ends = takes or not rest
    state.letter = 1 if ends else state.letter + 1
    keep("OPTIND", str(at + ends + (takes and not rest and not lacks)))
    return Truth(True)


BUILTINS: dict[str, Builtin] = {
    "getopts": _getopts,
    "[": _test,
    "test": _test,
    "true": lambda runner, fields, node, place: _DONE,
    ":": lambda runner, fields, node, place: _DONE,
    "false": lambda runner, fields, node, place: Truth(False),
    "exit": _exit,
    "return": _return,
    "break": _break,
    "continue": _continue,
    "unset": _unset,
    "set": _set,
    "shift": _shift,
    "source": _source,
    ".": _source,
    "eval": _eval,
    "exec": _exec,
    "nohup": _wrapped,
    "builtin": _wrapped,
    "read": _read,
    "let": _let,
    "command": _found,
    "which": _found,
    "type": _found,
    "grep": lambda runner, fields, node, place: Truth(None),
    "pgrep": lambda runner, fields, node, place: Truth(None),
    "diff": lambda runner, fields, node, place: Truth(None),
}
