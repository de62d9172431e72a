"""Numbers and small pieces in the words that every view uses."""

from __future__ import annotations

from typing import Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fivefold.cli.output import encodes_unicode

_JUSTIFY: dict[str, Literal["left", "right"]] = {"<": "left", ">": "right"}
_WORD = 9  # words may be folded to so many cells
_GAPS = (1, 0)  # cells between columns beside the divider, where a table is too wide with two
_LEAST = 0.0001  # of a column of sizes
_SCALES = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"))
# One colour per owner of the step and of memory, the same in every view.
OWNER_STYLES = {
    "compute": "green",
    "host": "bright_green",
    "recompute": "yellow",
    "tp": "blue",
    "cp": "cyan",
    "ep": "magenta",
    "pp": "bright_blue",
    "dp": "bright_cyan",
    "bubble": "red",
    "optimizer": "bright_magenta",
    "other": "bright_black",
}


def count(value: float) -> str:
    """8.03B, 671B, 1.4T."""
    for scale, letter in _SCALES:
        if abs(value) >= scale:
            return f"{value / scale:.3g}{letter}" if abs(value) < 999.5 * scale else f"{value / scale:,.0f}{letter}"
    return f"{value:g}"


def giga(value: float) -> str:
    """Bytes or bytes per second in GB, three digits."""
    return _plain(value / 1e9)


def mega(value: float) -> str:
    """Bytes in MB, three digits."""
    return _plain(value / 1e6)


def _plain(value: float) -> str:
    """Three digits without a power of ten, which a column of sizes is not read with."""
    if 0 < value < _LEAST:
        return f"<{_LEAST}"
    return f"{value:,.3g}" if abs(value) < 999.5 else f"{value:,.0f}"


def gigabytes(value: float) -> str:
    """Bytes in GB with one digit, enough to compare with a GPU's memory."""
    return f"{value / 1e9:,.1f}"


def seconds(value: float) -> str:
    """Seconds in the unit a person would use, three digits."""
    size = abs(value)
    if size >= 2 * 86400:
        return f"{_three_digits(value / 86400)} days"
    if size >= 2 * 3600:
        return f"{value / 3600:.3g} h"
    if size >= 1:
        return f"{value:,.3g} s" if size < 999.5 else f"{value:,.0f} s"
    return f"{value * 1e3:.3g} ms" if size >= 1e-3 or size == 0 else f"{value * 1e6:.3g} us"


def seconds_interval(value: float, low: float, high: float) -> str:
    """51.2 s (45.1-58.2), all three in the unit of the first."""
    for size, unit in ((2 * 86400, "days"), (2 * 3600, "h"), (1.0, "s"), (0.0, "ms")):
        if value >= size:
            scale = {"days": 86400, "h": 3600, "s": 1.0, "ms": 1e-3}[unit]
            return f"{_three_digits(value / scale)} {unit} ({_three_digits(low / scale)}-{_three_digits(high / scale)})"
    return f"{value:g} s"


def _three_digits(value: float) -> str:
    """12.3, and 1,234 rather than 1.23e+03."""
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:,.0f}"


def percent(value: float) -> str:
    return f"{value:.1%}"


class _Numbers(Table):
    """A table that moves its columns together, then folds the heads of its numbers, and words, before it would split a
    number over two lines."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        cells = [max(map(_longest, column.cells), default=0) for column in self.columns]
        heads = [_longest(column.header) for column in self.columns]
        numbers = [column.justify == "right" for column in self.columns]
        least = [cell if number else min(cell, _WORD) for cell, number in zip(cells, numbers, strict=True)]
        widths = [max(pair) for pair in zip(least, heads, strict=True)]
        wide = self.padding
        for gap in _GAPS:
            if sum(widths) <= self._room(options):
                break
            self.padding = (0, gap, 0, 0)
        room = self._room(options)
        if sum(map(max, cells, heads)) > room >= sum(least):
            while sum(widths) > room:
                widest = max(range(len(widths)), key=lambda at: widths[at] - least[at])
                widths[widest] -= 1
            for column, width, number in zip(self.columns, widths, numbers, strict=True):
                column.width = width if number else None
        yield from super().__rich_console__(console, options)
        self.padding = wide

    def _room(self, options: ConsoleOptions) -> int:
        """Cells for the columns' own text: each has its padding and a divider, and the table an edge."""
        _, right, _, left = Padding.unpack(self.padding)
        return options.max_width - (left + right + 1) * len(self.columns) - 1


def _longest(cell: object) -> int:
    return max(map(len, str(cell).split("\n")))


def plain_table(*heads: tuple[str, str], title: str | None = None) -> Table:
    """A table with one rule under its heads, and no other lines. heads: names, and < or > for the side they keep to."""
    table = _Numbers(
        box=SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", header_style="bold", pad_edge=False
    )
    for name, side in heads:
        table.add_column(name, justify=_JUSTIFY[side], overflow="fold")
    return table


def heading(text: str, note: str = "") -> Text:
    """A section's name, and beside it what it is about."""
    line = Text(f"\n{text}", style="bold")
    if note:
        line.append(f"  {note}", style="not bold dim")
    return line


def bar(share: float, width: int, style: str) -> Text:
    """A horizontal bar of up to `width` cells, in eighths where the output can hold them."""
    share = min(max(share, 0.0), 1.0)
    if not encodes_unicode():
        return Text("#" * round(share * width), style=style)
    eighths = round(share * width * 8)
    full, rest = divmod(eighths, 8)
    return Text("█" * full + ("▏▎▍▌▋▊▉"[rest - 1] if rest else ""), style=style)


__all__ = [
    "OWNER_STYLES",
    "bar",
    "count",
    "giga",
    "gigabytes",
    "heading",
    "mega",
    "percent",
    "plain_table",
    "seconds",
    "seconds_interval",
]
