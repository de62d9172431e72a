"""Files of other people as text: bounded in size, never run, and every value with the line that it stands on."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fivefold.errors import FivefoldError

# The longest launch scripts and configurations that we know of have some thousand lines, well under 100 kB.
MAX_FILE_BYTES = 256 << 10
# What reading writes into text for itself: \x00 around the number of an unknown, \x01 around a line number.
UNKNOWN, LINE = "\x00", "\x01"


@dataclass(frozen=True, slots=True)
class Place:
    """A line of a file, counted from 1."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True)
class Field:
    """One word of a command after expansion, and where its text stands."""

    text: str
    place: Place


def unreadable(where: Place | str, problem: str, remedy: str, code: str = "unreadable-script") -> FivefoldError:
    """The error for a file that cannot be understood: what, where, and what to try."""
    return FivefoldError(f"{where}: {problem}. To go on, {remedy}.", code=code, option="FILE", value=str(where))


def read_text(path: Path, name: str | None = None) -> str:
    """The text of a regular file of at most MAX_FILE_BYTES, line ends as \\n.

    Bytes that are not UTF-8 become the replacement character, since old scripts hold Latin-1 in comments. Raises
    FivefoldError for what is no regular file (devices and pipes could block or never end), is too large, or holds NUL
    bytes.
    """
    shown = name or str(path)
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL
        reason = getattr(error, "strerror", None) or "it cannot be opened"
        raise unreadable(shown, reason, "give the path of a launch script or a YAML file", "no-such-file") from error
    try:
        with os.fdopen(handle, "rb") as stream:
            if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                raise unreadable(shown, "it is not a regular file", "give a launch script or a YAML file")
            data = stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise unreadable(shown, error.strerror or "it cannot be read", "check the path") from error
    return decoded(data, shown)


def decoded(data: bytes, name: str) -> str:
    """`data` as text; see read_text."""
    if len(data) > MAX_FILE_BYTES:
        raise unreadable(name, f"it is larger than {MAX_FILE_BYTES >> 10} KiB", "cut it down to the launch itself")
    if b"\0" in data:
        line = data.count(b"\n", 0, data.index(b"\0")) + 1
        raise unreadable(Place(name, line), "it holds a NUL byte, so it is no text", "give a text file")
    text = data.decode("utf-8-sig", errors="replace").replace("\r\n", "\n").replace("\r", "\n")
    return text.replace(LINE, "\ufffd")


def plain(value: Any) -> Any:
    """Text without the marks that reading puts into it."""
    return value if not isinstance(value, str) or LINE not in value else "".join(value.split(LINE)[::2])
