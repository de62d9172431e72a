"""Small TOML files that users give and get: read with a bound, and written with a sentence for what goes wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from fivefold.errors import FivefoldError, reason_of


class Unreadable(Exception):  # noqa: N818 - a reason, which each room says in its own words
    """Why a file is no table. kind: what stood in the way."""

    def __init__(self, kind: Literal["absent", "closed", "large", "syntax"], reason: str) -> None:
        super().__init__(reason)
        self.kind, self.reason = kind, reason


def read_table(path: Path, most_bytes: int) -> dict[str, Any]:
    """The table in a regular file of at most so many bytes. Raises Unreadable for anything else."""
    try:
        # A pipe or a device would be waited for.
        if not path.is_file():
            raise Unreadable("absent", "there is no such file")
        with path.open("rb") as stream:
            raw = stream.read(most_bytes + 1)
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        raise Unreadable("closed", getattr(error, "strerror", None) or "it cannot be read") from error
    if len(raw) > most_bytes:
        raise Unreadable("large", f"it is larger than {most_bytes:,} bytes")
    try:
        return msgspec.toml.decode(raw, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise Unreadable("syntax", str(error)[:200] or "it is nested too deeply") from error


def save_text(path: str | Path, text: str, what: str) -> None:
    """Write what --save asks for. what: the thing's name in the error. Raises FivefoldError where it cannot."""
    try:
        Path(path).write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        raise FivefoldError(
            f"{what} cannot be written to {str(path)[:200]!r}: {reason_of(error)}. Choose another file for --save.",
            code="cannot-write",
            option="--save",
            value=str(path)[:200],
        ) from error
