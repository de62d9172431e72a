"""Standard output: one JSON document, or a console of at most 100 columns whose colour can be forced or forbidden."""

from __future__ import annotations

import os
import shutil
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from fivefold.cli.flags import OutputFlags

WIDEST = 100
NARROWEST = 40


def write_json(document: dict[str, Any]) -> None:
    """Exactly one JSON document. Numbers that are not finite become null, as msgspec writes them."""
    import msgspec

    text = msgspec.json.encode(document, enc_hook=_plain)
    sys.stdout.write(msgspec.json.format(text, indent=2).decode() + "\n")
    sys.stdout.flush()


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
    return Console(
        file=sys.stdout, width=max(wide, NARROWEST), highlight=False, emoji=False, legacy_windows=False, **options
    )
