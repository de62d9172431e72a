"""The matrix: every layout of the table against one process, in fp64; some of them in fp32 and in bf16."""

from __future__ import annotations

import math
from itertools import combinations, product
from typing import Any

import matrix
import proving
import pytest
from controls import CONTROLLED
from matrix import CORE, EXHAUSTIVE, LOWER_PRECISION, REFUSED, Row

from fivefold.errors import FivefoldError
from fivefold.layout import SCHEDULES
from fivefold.train.refuse import refuse


def check(row: Row) -> None:
    outcome = proving.prove(row)
    assert outcome.verdict.passed, outcome.verdict.failures()
    assert len(outcome.verdict.parameters) == len(proving.reference_of(row).gradients)
    without = outcome.sites - CONTROLLED
    assert not without, f"sums over ranks without a control in controls.py: {', '.join(map(str, without))}"


@pytest.mark.parametrize("row", CORE, ids=str)
def test_equal_to_one_process(row: Row) -> None:
    check(row)


@pytest.mark.exhaustive
@pytest.mark.parametrize("row", EXHAUSTIVE, ids=str)
def test_every_other_combination(row: Row) -> None:
    check(row)


@pytest.mark.parametrize("row", LOWER_PRECISION, ids=str)
def test_fp32_is_as_near_to_fp64_as_one_process(row: Row) -> None:
    """The reference is in fp64, so that the bound is on the layout's own rounding, and not on the difference of two."""
    verdict = proving.prove(row, "fp32", exact="fp64").verdict
    assert verdict.passed, verdict.failures()


@pytest.mark.parametrize("row", LOWER_PRECISION, ids=str)
def test_bf16_comes_near(row: Row) -> None:
    verdict = proving.prove(row, "bf16", exact="fp64").verdict
    assert all(math.isfinite(parameter.error) for parameter in verdict.parameters)
    assert verdict.relative.losses < 5e-3
    assert verdict.relative.norm < 0.02


@pytest.mark.parametrize(("code", "options"), REFUSED, ids=str)
def test_what_is_refused_is_refused_by_its_rule(code: str, options: dict[str, Any]) -> None:
    with pytest.raises(FivefoldError) as refused:
        proving.prove(matrix.row("refused", **options))
    assert refused.value.code == code


def degrees(row: Row) -> dict[str, int]:
    layout = row.layout
    return {"tp": layout.tp, "cp": layout.cp, "pp": layout.pp, "dp": row.dp}


def test_the_table_holds_what_it_promises() -> None:
    for row in (*CORE, *EXHAUSTIVE, *LOWER_PRECISION):
        refuse(row.job)
    active = [{axis: n for axis, n in degrees(row).items() if n > 1} for row in CORE]
    names = [row.name for row in (*CORE, *EXHAUSTIVE)]
    assert len(names) == len(set(names)) and len(CORE) >= 150
    for axis, n in product(("tp", "cp", "pp", "dp"), (2, 3, 4)):
        assert {axis: n} in active
    for pair in combinations(("tp", "cp", "pp", "dp"), 2):
        assert set(pair) in [set(axes) for axes in active]
    for some in combinations(("tp", "cp", "pp", "dp"), 3):
        assert set(some) in [set(axes) for axes in active]
    combined = {
        (row.layout.schedule, row.layout.zero, row.layout.tp) for row in (*CORE, *EXHAUSTIVE)
        if row.layout.pp > 1 and row.dp > 1
    }  # fmt: skip
    assert combined >= set(product(SCHEDULES, range(4), (1, 2)))
    assert all({"tp", "cp", "pp", "dp"} != set(axes) for axes in active) and any(
        {"tp", "cp", "pp", "dp"} == {axis for axis, n in degrees(row).items() if n > 1} for row in EXHAUSTIVE
    )


def test_the_clipping_of_every_proof_is_active() -> None:
    row = CORE[0]
    clip = proving.proof_of(row).adamw.clip
    assert clip is not None
    assert all(norm > clip for each in CORE for norm in proving.reference_of(each).grad_norms)
