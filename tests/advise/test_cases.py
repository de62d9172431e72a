"""The public cases of docs/cases.md: at least nine of ten are answered as their sources report."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def cases() -> ModuleType:
    """benchmarks/cases.py."""
    spec = importlib.util.spec_from_file_location("cases", REPOSITORY / "benchmarks" / "cases.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["cases"] = module  # its dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_cases_are_answered_as_reported(cases: ModuleType) -> None:
    rows = cases.scores()
    assert len(rows) >= 60
    assert sum(row.agrees for row in rows) / len(rows) >= 0.9
    for row in rows:
        assert row.agrees or row.case.explained, row.case.id


def test_the_page_has_every_case(cases: ModuleType) -> None:
    page = (REPOSITORY / "docs" / "cases.md").read_text(encoding="utf-8")
    for case in cases.CASES:
        assert f"| {case.id} |" in page
    for name, _ in cases.LEFT_OUT:
        assert f"- {name}: " in page
    assert not {case.id for case in cases.CASES} & {name for name, _ in cases.LEFT_OUT}


def test_every_case_is_there_once(cases: ModuleType) -> None:
    """All of the collection's cases of the kinds a (fits or not) and c (starts or not): 21 and 46."""
    names = [case.id for case in cases.CASES] + [name for name, _ in cases.LEFT_OUT]
    assert len(names) == len(set(names)) == 67
    assert set(names) >= {f"c{number:02}" for number in range(1, 47)}


def test_a_refusal_for_another_reason_does_not_agree(cases: ModuleType) -> None:
    launch = cases.Planned(model="small", gpus=7, runtime="fsdp", seq=1024, batch=9, expected="refused")
    assert cases._same("refused", cases.verdict(launch))
    assert not cases._same("refused", cases.verdict(cases.msgspec.structs.replace(launch, because="heads-tp")))
