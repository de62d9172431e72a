"""Negative controls: each sum over ranks, dropped or doubled, fails the proof; so do faults seen in other trainers."""

from __future__ import annotations

import matrix
import proving
import pytest
from controls import CONTROLLED, CONTROLS, HOW, Control, spoil
from faults import FAULTS, Fault, weight_gradients_past_the_hooks
from ranks import RankFailure


def test_each_sum_has_one_control() -> None:
    assert len(CONTROLLED) == len(CONTROLS)


@pytest.mark.parametrize("control", CONTROLS, ids=lambda control: control.name)
def test_a_spoiled_sum_is_caught(control: Control) -> None:
    found = spoil(control)
    assert found.made, f"{control.row} does not make {control.site} any more"
    for how in HOW:
        assert not found.verdicts[how].passed, f"{how} {control.site} went unnoticed"


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_of_other_trainers_is_caught(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    """By one row; beside it a row that everybody runs, and that the fault passes."""
    caught, unseen = (matrix.row("faults", **options) for options in (fault.caught, fault.unseen))
    for row in (caught, unseen):
        proving.reference_of(row)  # before anything is broken
    fault.commit(monkeypatch)
    assert not proving.prove(caught).verdict.passed
    assert proving.prove(unseen).verdict.passed


def test_weight_gradients_that_miss_their_hooks_stop_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    row = matrix.row("faults", pp=2, dp=2, schedule="zb-h1")
    proving.reference_of(row)
    weight_gradients_past_the_hooks(monkeypatch)
    with pytest.raises(RankFailure, match="micro-batch was left out"):
        proving.prove(row)
