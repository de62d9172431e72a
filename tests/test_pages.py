"""The pages: all of them can be found, their links lead somewhere, and the files that they name are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.glob("*.md"), *(DOCS / "decisions").glob("*.md")])
# Of these pages every file that they name is ours; others cite those of frameworks.
OF_OUR_CODE = [page for page in PAGES if page.name in ("design.md", "CONTRIBUTING.md")]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def links(page: Path) -> list[str]:
    return [link for link in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")) if "://" not in link]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_to_files(page: Path) -> None:
    assert [link for link in links(page) if not (page.parent / link).exists()] == []


def test_every_page_is_listed() -> None:
    index = DOCS / "README.md"
    listed = {(DOCS / link).resolve() for link in links(index)} | {index}
    assert [name(page) for page in PAGES if page.is_relative_to(DOCS) and page not in listed] == []
    assert index in {(ROOT / link).resolve() for link in links(ROOT / "README.md")}


@pytest.mark.parametrize("page", OF_OUR_CODE, ids=name)
def test_files_of_the_code_are_there(page: Path) -> None:
    ours = {path.name for folder in ("src", "tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")}
    named = re.findall(r"([\w/]+\.py)\b", page.read_text(encoding="utf-8"))
    assert [each for each in named if Path(each).name not in ours] == []
