"""Pages that are written by hand but for a part that a benchmark computes, between two marks."""

from __future__ import annotations

from pathlib import Path

BEGIN, END = "<!-- computed: begin -->", "<!-- computed: end -->"


def put(page: Path, text: str, begin: str = BEGIN, end: str = END) -> None:
    """Put the text between the marks of the page, in place of what is there."""
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    _, _, after = rest.partition(end)
    page.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}", encoding="utf-8")


def print_or_put(page: Path, text: str, arguments: list[str]) -> None:
    """With --write among the arguments put the text into the page, else print it."""
    if "--write" in arguments:
        put(page, text)
    else:
        print(text)
