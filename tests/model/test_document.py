"""docs/models.md says of every file what is read from it today."""

from __future__ import annotations

from pathlib import Path

import pytest

from fivefold.errors import FivefoldError
from fivefold.model import count_params, read_config
from fivefold.model.families import FAMILIES
from fivefold.model.families.nested import NESTED

PUBLISHED = Path(__file__).parent / "data" / "hf_configs"
DOCUMENT = Path(__file__).parents[2] / "docs" / "models.md"


def table(head: str) -> list[list[str]]:
    """Cells of the rows of the table that follows a line."""
    lines = DOCUMENT.read_text().partition(f"\n{head}")[2].partition("|---|")[2].splitlines()[1:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return rows[: next((i for i, line in enumerate(lines) if not line.startswith("|")), len(rows))]


def test_counts() -> None:
    rows = {name: (family, int(theirs.replace(",", "")), int(ours.replace(",", "")))
            for name, family, _, theirs, ours, *_ in table("| file | family")}  # fmt: skip
    specs = {name: read_config(PUBLISHED / f"{name}.json") for name in rows}
    assert rows == {name: (s.family, count_params(s).total, count_params(s).total) for name, s in specs.items()}
    refused = [name for name, *_ in table("## Refused")]
    assert {*rows, *refused} == {path.stem for path in PUBLISHED.glob("*.json")}
    for name in refused:
        with pytest.raises(FivefoldError):
            read_config(PUBLISHED / f"{name}.json")


def test_families() -> None:
    assert [name for name, *_ in table("## Families")] == sorted({*FAMILIES, *NESTED})
