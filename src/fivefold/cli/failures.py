"""Every way a command can fail, as one paragraph or one JSON document, and its exit code."""

from __future__ import annotations

import sys
import traceback
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

if TYPE_CHECKING:
    from cyclopts import CycloptsError

    from fivefold.errors import FivefoldError

DONE = 0
ANSWER_IS_NO = 1
BAD_INPUT = 2
# Beside the contract's three: EX_SOFTWARE of sysexits.h, and 128 + the signal as shells report it.
INTERNAL_ERROR = 70
INTERRUPTED = 130
BROKEN_PIPE = 141


def from_parser(error: CycloptsError) -> FivefoldError:
    """A mistake in the command line itself, in the project's words."""
    from cyclopts.exceptions import (
        MissingArgumentError,
        UnknownCommandError,
        UnknownOptionError,
        UnusedCliTokensError,
    )

    from fivefold.errors import FivefoldError

    if isinstance(error.__cause__, FivefoldError):  # of a flag's own converter
        return error.__cause__
    command = " ".join(error.command_chain or ())
    code, option, value, message = "bad-usage", None, None, ""
    legal: list[str] | str | None = None
    if isinstance(error, UnknownCommandError):
        code, value, legal = "unknown-command", (error.unused_tokens or [""])[0][:60], _commands(error)
        message = f"There is no command {value!r}.{_near(value, legal)} Legal: {', '.join(legal)}."
    elif isinstance(error, UnknownOptionError):
        code, option = "unknown-option", (error.token.keyword or error.token.value)[:60]
        legal = sorted({name for argument in error.argument_collection for name in argument.names if argument.show})
        message = f"There is no option {option}.{_near(option, legal)}"
    elif isinstance(error, UnusedCliTokensError):
        code, value = "unexpected-argument", " ".join(error.unused_tokens or ())[:100]
        message = f"Nothing takes the argument {value!r}; a set of values is written with commas and without spaces."
    elif isinstance(error, MissingArgumentError):
        code, option = "missing-option", error.argument.name if error.argument else None
        message = f"{option} needs a value." if option and option.startswith("-") else f"{option} is missing."
    else:
        option, value = error.argument.name if error.argument else _keyword(error), _offending(error)
        legal, message = _legal(error), str(error).strip()
    message += f" See fivefold {command + ' ' if command else ''}--help."
    return FivefoldError(message, code=code, option=option, value=value, legal=legal)


def _commands(error: CycloptsError) -> list[str]:
    """The commands at the place where an unknown one was given."""
    app = error.app
    return [] if app is None else [name for name in app if not name.startswith("-")]


def _near(given: str, legal: list[str]) -> str:
    near = get_close_matches(given.lower(), legal, n=1, cutoff=0.7)
    return f" Did you mean {near[0]}?" if near else ""


def _offending(error: CycloptsError) -> str | None:
    token = getattr(error, "token", None)
    return token.value[:100] if token is not None else None


def _keyword(error: CycloptsError) -> str | None:
    """The flag as it was written, where the parser does not say whose it is."""
    token = getattr(error, "token", None)
    return token.keyword[:60] if token is not None and token.keyword else None


def _legal(error: CycloptsError) -> list[str] | str | None:
    """What the flag takes, where its value could not be read."""
    from cyclopts.exceptions import CoercionError

    if not isinstance(error, CoercionError) or error.argument is None:
        return None
    kind = error.argument.hint
    kinds = [each for each in get_args(kind) if each is not type(None)] or [kind]
    if all(isinstance(each, str) for each in kinds):
        return kinds
    return {float: "a number", bool: ["true", "false"]}.get(kinds[0])


def internal(error: Exception) -> FivefoldError:
    """A bug: what and where, in one sentence, and how to report it."""
    from fivefold.errors import FivefoldError

    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    text = " ".join(str(error).split())[:200]
    return FivefoldError(
        f"fivefold itself failed ({type(error).__name__}{': ' + text if text else ''}{where}), which no input should "
        "cause. Please report it with the command line that you used and the output of fivefold --version.",
        code="internal",
    )


def exit_code(error: FivefoldError) -> int:
    """1 where the error is the answer to a valid question, 2 for bad input."""
    from fivefold.errors import WouldNotStartError

    return ANSWER_IS_NO if isinstance(error, WouldNotStartError) else BAD_INPUT


def report(error: FivefoldError, *, as_json: bool, argv: list[str]) -> None:
    """The error object on standard output, or one paragraph on standard error."""
    if not as_json:
        say(f"error: {error.message}")
        return
    from fivefold.cli.output import write_json
    from fivefold.estimate.result import envelope

    write_json({**envelope("error", {"arguments": [*map(_utf8, argv)]}), **_printable(error.to_dict())})


def say(message: str) -> None:
    """One paragraph on standard error, if that is there."""
    from fivefold.cli.output import printable

    try:
        sys.stderr.write(f"{printable(' '.join(message.split()))}\n")
        sys.stderr.flush()
    except (OSError, AttributeError):  # AttributeError: it was closed before the start, and is None
        return


def _printable(document: dict[str, Any]) -> dict[str, Any]:
    """Values of unusual types, as a library call may have left them, become text."""
    plain = (int, float, bool, list, dict, type(None))
    inner = document["error"]
    return {"error": {key: value if isinstance(value, plain) else _utf8(str(value)) for key, value in inner.items()}}


def _utf8(text: str) -> str:
    """Bytes of the command line that are not UTF-8 become ?."""
    return text.encode(errors="replace").decode()
