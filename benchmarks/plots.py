"""Small charts as SVG text, for the pages that benchmarks write: scatters on logarithmic axes, and bars.

No library: a few hundred shapes, colours that hold on light and dark pages, and text that stays text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from math import ceil, floor, log10
from typing import NamedTuple

INK, FAINT, DOT, BAND, PLUS, MINUS = "#8a8f98", "#8a8f9855", "#3b82c4", "#3b82c41f", "#3b82c4", "#d9822b"
FONT = "font-family='system-ui, sans-serif' font-size='11'"
PANEL, GAP, MARGIN = 190, 46, 40


class Box(NamedTuple):
    """A panel's place and its range of decades."""

    left: float
    top: float
    size: float
    low: float
    high: float

    def x(self, value: float) -> float:
        return self.left + self.size * (log10(value) - self.low) / (self.high - self.low)

    def y(self, value: float) -> float:
        return self.top + self.size - (self.x(value) - self.left)


def text(x: float, y: float, words: str, *, anchor: str = "start", size: int = 11) -> str:
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}' font-size='{size}' fill='{INK}'>{escape(words)}</text>"
    )


def document(width: float, height: float, parts: Sequence[str], title: str) -> str:
    head = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width:.0f} {height:.0f}' role='img' {FONT}>"
    return "\n".join((head, f"<title>{escape(title)}</title>", *parts, "</svg>\n"))


def scatters(panels: Mapping[str, Sequence[tuple[float, float]]], title: str, band: float, columns: int = 3) -> str:
    """One square panel per name: (measured, predicted) points, the diagonal, and a band of `band`, relative, around
    it."""
    width = columns * (PANEL + GAP) + GAP
    rows = -(-len(panels) // columns)
    parts: list[str] = []
    for number, (name, points) in enumerate(panels.items()):
        left = GAP + number % columns * (PANEL + GAP)
        top = MARGIN + number // columns * (PANEL + GAP + 14)
        parts += _scatter(name, points, left, top, band)
    return document(width, MARGIN + rows * (PANEL + GAP + 14), parts, title)


def _scatter(name: str, points: Sequence[tuple[float, float]], left: float, top: float, band: float) -> list[str]:
    every = [value for point in points for value in point]
    box = Box(left, top, PANEL, log10(min(every)) - 0.1, log10(max(every)) + 0.1)
    low, high = 10**box.low, 10**box.high
    far = 1 + band
    corners = [(low, low), (low, low * far), (high / far, high), (high, high), (high, high / far), (low * far, low)]
    shape = " ".join(f"{box.x(x):.1f},{box.y(y):.1f}" for x, y in corners)
    parts = [
        text(left, top - 8, f"{name} ({len(points)})", size=12),
        f"<polygon points='{shape}' fill='{BAND}'/>",
        f"<rect x='{left}' y='{top}' width='{PANEL}' height='{PANEL}' fill='none' stroke='{FAINT}'/>",
        f"<line x1='{left}' y1='{top + PANEL}' x2='{left + PANEL}' y2='{top}' stroke='{INK}' stroke-width='0.8'/>",
    ]
    for decade in range(ceil(box.low), floor(box.high) + 1):
        at = 10.0**decade
        parts += [
            text(box.x(at), top + PANEL + 14, _seconds(at), anchor="middle", size=9),
            text(left - 4, box.y(at) + 3, _seconds(at), anchor="end", size=9),
        ]
    parts += [
        f"<circle cx='{box.x(x):.1f}' cy='{box.y(y):.1f}' r='2' fill='{DOT}' fill-opacity='0.55'/>" for x, y in points
    ]
    parts.append(text(left + PANEL, top + PANEL + 26, "measured seconds, predicted up", anchor="end", size=9))
    return parts


def _seconds(value: float) -> str:
    return f"{value:g} s" if value >= 1 else f"{1000 * value:g} ms"


def bars(values: Mapping[str, float], title: str, unit: str) -> str:
    """A horizontal bar per name, above zero to the right; the number stands beside it."""
    names, longest = 190, max((abs(value) for value in values.values()), default=1) or 1
    below = any(value < 0 for value in values.values())
    room, zero, step = (150, names + 160, 20) if below else (330, names, 20)
    parts = [text(8, 20, title, size=12)]
    for row, (name, value) in enumerate(values.items()):
        y = 34 + row * step
        length = room * abs(value) / longest
        start = zero if value >= 0 else zero - length
        colour = PLUS if value >= 0 else MINUS
        parts += [
            text(8, y + 11, name),
            f"<rect x='{start:.1f}' y='{y}' width='{max(length, 0.8):.1f}' height='13' rx='2' fill='{colour}'/>",
            text(zero + max(length if value >= 0 else 0, 0) + 6, y + 11, f"{value:+.1f} {unit}", size=10),
        ]
    bottom = 34 + len(values) * step
    parts.append(f"<line x1='{zero}' y1='30' x2='{zero}' y2='{bottom}' stroke='{INK}' stroke-width='0.8'/>")
    return document(600, bottom + 10, parts, title)


def pairs(values: Mapping[str, tuple[float, float]], title: str, words: tuple[str, str]) -> str:
    """A line per name from one share to another: an empty dot for the first, a full one for the second."""
    left, room, step = 120, 380, 22
    most = max((max(pair) for pair in values.values()), default=1) * 1.05
    parts = [text(8, 20, title, size=12)]
    for row, (name, (first, second)) in enumerate(values.items()):
        y = 44 + row * step
        a, b = (left + room * value / most for value in (first, second))
        parts += [
            text(8, y + 4, name),
            f"<line x1='{left}' y1='{y}' x2='{left + room}' y2='{y}' stroke='{FAINT}' stroke-width='0.6'/>",
            f"<line x1='{a:.1f}' y1='{y}' x2='{b:.1f}' y2='{y}' stroke='{DOT}' stroke-width='1.6'/>",
            f"<circle cx='{a:.1f}' cy='{y}' r='4' fill='none' stroke='{MINUS}' stroke-width='1.8'/>",
            f"<circle cx='{b:.1f}' cy='{y}' r='4' fill='{DOT}'/>",
            text(left + room + 12, y + 4, f"{first:.1%} to {second:.1%}", size=10),
        ]
    bottom = 44 + len(values) * step
    parts += [
        f"<circle cx='{left + 4}' cy='{bottom + 6}' r='4' fill='none' stroke='{MINUS}' stroke-width='1.8'/>",
        text(left + 14, bottom + 10, words[0], size=10),
        f"<circle cx='{left + 124}' cy='{bottom + 6}' r='4' fill='{DOT}'/>",
        text(left + 134, bottom + 10, words[1], size=10),
    ]
    return document(620, bottom + 24, parts, title)
