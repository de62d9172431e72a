"""The one exception that a user's mistake raises, in every room.

It carries what the contract's ``error`` object carries, so that the command line and the library
say the same thing: which option, which value, which values are legal, one paragraph of message.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

# A value from a hostile file can be a megabyte; so much of it is said back.
_SHOWN_CHARS = 200


def option_of(name: str) -> str:
    """The flag of an option by its name in the library: micro_batch is --micro-batch."""
    return "--" + name.replace("_", "-")


class FivefoldError(ValueError):
    """Bad input (exit code 2 on the command line).

    code:    short stable identifier, e.g. ``"unknown-gpu"``
    option:  the user's own option or key, e.g. ``"--gpu"`` or ``"config.json: n_routed_experts"``
    value:   what was given
    legal:   what would be accepted
    message: one paragraph: what is wrong, where, and what to try
    """

    def __init__(
        self,
        message: str,
        *,
        code: str = "bad-input",
        option: str | None = None,
        value: Any = None,
        legal: Sequence[Any] | str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.option = option
        self.value = value
        self.legal = legal

    def said_of(self, place: str, option: str) -> FivefoldError:
        """The same mistake at another place: `place` before the message, and the user's own option or key there."""
        return FivefoldError(place + self.message, code=self.code, option=option, value=self.value, legal=self.legal)

    def to_dict(self) -> dict[str, Any]:
        """The contract's ``error`` object."""
        return {
            "error": {
                "code": self.code,
                "option": self.option,
                "value": _shortened(self.value),
                "legal": list(self.legal) if isinstance(self.legal, (list, tuple)) else self.legal,
                "message": self.message,
            }
        }


@contextmanager
def asked_as(option: str, shown: str) -> Iterator[None]:
    """What goes wrong inside with `option` is said of `shown`, as the user wrote it."""
    try:
        yield
    except FivefoldError as error:
        if error.option != option:
            raise
        raise error.said_of("", shown) from error


def reason_of(error: Exception) -> str:
    """Why a path could not be used, in the system's words where it has any (a null character is a ValueError)."""
    return getattr(error, "strerror", None) or str(error)


def _shortened(value: Any) -> Any:
    text = value if isinstance(value, str) else repr(value)
    return value if len(text) <= _SHOWN_CHARS else f"{text[: _SHOWN_CHARS - 3]}..."


class UnknownModelTypeError(FivefoldError):
    """A configuration that fivefold cannot read exactly, and so refuses to read at all."""


class WouldNotStartError(FivefoldError):
    """A layout that what should run it refuses: no mistake in the input, but an answer (exit code 1)."""
