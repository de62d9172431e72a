"""Standard output: one JSON document, or a console of at most 100 columns whose colour can be forced or forbidden."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, ConsoleRenderable, RenderHook
    from rich.segment import Segment

    from fivefold.cli.flags import OutputFlags

WIDEST = 100
NARROWEST = 40
# Unicode's category Cc without the tab and the line feed: what a terminal may obey instead of showing.
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(text: str) -> str:
    """`text` without control characters, which names and sources from files could hold."""
    return CONTROL.sub("", text)


def encodes_unicode() -> bool:
    """Whether standard output can hold more than ASCII."""
    return (getattr(sys.stdout, "encoding", None) or "ascii").lower().startswith("utf")


def lenient_streams() -> None:
    """What an encoding cannot hold is written as ?, and ends no answer."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def write_json(document: dict[str, Any]) -> None:
    """Exactly one JSON document. Numbers that are not finite become null, as msgspec writes them."""
    import msgspec

    text = msgspec.json.format(msgspec.json.encode(document, enc_hook=_plain), indent=2).decode()
    escaped = _C1 if encodes_unicode() else _NOT_ASCII
    sys.stdout.write(escaped.sub(lambda found: json.dumps(found[0])[1:-1], text) + "\n")
    sys.stdout.flush()


_C1 = re.compile(r"[\x80-\x9f]+")  # control characters that JSON itself lets pass
_NOT_ASCII = re.compile(r"[^\x00-\x7f]+")


def _plain(value: Any) -> Any:
    """numpy's scalars and arrays as Python's own."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    return str(value)


def console(flags: OutputFlags) -> Console:
    """Where tables go."""
    from rich.console import Console

    wide = min(shutil.get_terminal_size((WIDEST, 24)).columns, WIDEST)
    options: dict[str, Any] = {}
    if flags.color == "always":
        options = {"force_terminal": True, "no_color": False, "color_system": "standard"}
    elif flags.color == "never":
        options = {"no_color": True, "color_system": None}
    elif os.environ.get("NO_COLOR"):
        options = {"no_color": True}
    elif os.environ.get("FORCE_COLOR"):
        options = {"force_terminal": True, "color_system": "standard"}
    made = Console(
        file=sys.stdout, width=max(wide, NARROWEST), highlight=False, emoji=False, legacy_windows=False, **options
    )
    made.push_render_hook(_cleaner())
    return made


def _cleaner() -> RenderHook:
    """The one place that everything printed passes: its texts lose their control characters, its styles stay."""
    from rich.console import RenderHook
    from rich.segment import Segment

    class Clean:
        def __init__(self, inner: ConsoleRenderable) -> None:
            self.inner = inner

        def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
            for segment in console.render(self.inner, options):
                yield segment if segment.control else Segment(printable(segment.text), segment.style)

    class Cleaner(RenderHook):
        def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
            return [Clean(each) for each in renderables]

    return Cleaner()
