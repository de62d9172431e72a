"""Other scripts that a script reads: only those in its own folder, and only as text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from fivefold.errors import FivefoldError
from fivefold.interop.shell.branches import Returned
from fivefold.interop.shell.parser import parse
from fivefold.interop.source import UNKNOWN, Field, Place, plain, read_text

if TYPE_CHECKING:
    from fivefold.interop.shell.calls import Calls

_MOST_FILES = 20
_DEEPEST = 8


class Files:
    """Where a script's companions may lie. root None: nothing else is read, as for a script from a pipe."""

    def __init__(self, root: Path | None) -> None:
        self._root = root.resolve() if root is not None else None
        self._count = self._depth = 0
        self.read: list[str] = []
        self.not_read: list[tuple[Place, str, str]] = []

    def source(self, runner: Calls, named: Field, arguments: list[Field], place: Place) -> None:
        """Follow a sourced file in the same shell."""

        def same_shell(text: str, name: str) -> None:
            state = runner.state
            if arguments:
                state.arguments, state.arguments_given = arguments, True
            try:
                runner.program(parse(text, name))
            except Returned:
                return

        self._with(runner, named, place, same_shell)

    def follow(self, runner: Calls, named: Field, arguments: list[Field], outer: list[Field], place: Place) -> bool:
        """Follow a script that is called, in a shell of its own. False where it is not read."""

        def own_shell(text: str, name: str) -> None:
            runner.called(text, name, arguments, outer)

        return self._with(runner, named, place, own_shell)

    def _with(self, runner: Calls, named: Field, place: Place, what: Callable[[str, str], None]) -> bool:
        found = self._open(named, place)
        if found is None:
            return False
        text, name = found
        state = runner.state
        held = state.file, state.arguments, state.arguments_given
        state.file = name
        self._depth += 1
        try:
            what(text, name)
        finally:
            self._depth -= 1
            state.file, state.arguments, state.arguments_given = held
        return True

    def _open(self, named: Field, place: Place) -> tuple[str, str] | None:
        """(text, name to show) of a companion; else the reason is kept."""
        written = str(plain(named.text))
        shown = written.replace(UNKNOWN, "?")[:80]
        if self._root is None or UNKNOWN in written:
            # $(dirname "$0")/env.sh and ${SCRIPT_DIR}/env.sh: the last part beside the script is what is meant.
            written = written.rpartition(UNKNOWN)[2].lstrip("/")
        if self._root is None or not written or self._count >= _MOST_FILES or self._depth >= _DEEPEST:
            self.not_read.append((place, shown, "its path is not known, or too many files call one another"))
            return None
        path, inside = self._beside(written)
        if path is None:
            reason = "there is no such file beside the script" if inside else "it lies outside the script's folder"
            self.not_read.append((place, shown, reason))
            return None
        self._count += 1
        name = path.name
        try:
            text = read_text(path, name)
        except FivefoldError as error:
            self.not_read.append((place, shown, error.message))
            return None
        self.read.append(name)
        return text, name

    def text_of(self, written: str) -> str | None:
        """The text of a file beside the script, None where it is not there or may not be read."""
        path, _ = self._beside(written)
        return None if path is None else read_text(path, path.name)

    def _beside(self, written: str) -> tuple[Path | None, bool]:
        """(the file, whether the name stays in the script's folder), links followed."""
        if self._root is None:
            return None, False
        try:
            path = (self._root / written).resolve()
            inside = path.is_relative_to(self._root)
            return (path if inside and path.is_file() else None), inside
        except (OSError, ValueError, RuntimeError):
            return None, False
