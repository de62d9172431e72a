"""ZBV: the V, no bubble when all three parts cost the same, and PyTorch's order."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from split_schedules import (
    assert_moments_cover_everything,
    assert_runs_and_holds,
    cases,
    orders,
    pytorch_order,
    simulate,
)

from fivefold.errors import FivefoldError
from fivefold.schedule import Placement, actions, illegal_reason, in_flight, placement
from fivefold.schedule import simulate as run_lists

KIND, V = "zbv", 2


def test_runs_everywhere_and_holds_what_in_flight_says():
    assert_runs_and_holds(KIND, V)
    assert_moments_cover_everything(KIND, V)


def test_placement_is_a_v():
    assert [placement(KIND).stage(rank, chunk, 4) for chunk in (0, 1) for rank in range(4)] == [0, 1, 2, 3, 7, 6, 5, 4]
    for where in Placement:
        for p in range(1, 6):
            assert all(where.stage(*where.home(stage, p), p) == stage for stage in range(3 * p))


def test_no_bubble_when_the_three_parts_cost_the_same():
    # Qi et al. 2023, section 6: no rank is idle between its first and its last step.
    for p, m in cases(KIND, V):
        timeline = simulate(KIND, p, m, V, 1.0, 1.0, 1.0)
        if m >= 2 * p - 1:
            assert timeline.makespan_s == pytest.approx(6 * m + p - 1)
            for rank, steps in enumerate(actions(KIND, p, m, V)):
                starts = [s for s, a in zip(timeline.start_s[rank], steps, strict=True) if a.micro_batch is not None]
                ends = [e for e, a in zip(timeline.end_s[rank], steps, strict=True) if a.micro_batch is not None]
                assert starts[0] == rank and ends[-1] - starts[0] == 6 * m


def test_memory_is_that_of_1f1b():
    # Qi et al. 2023, section 6: p micro-batches of a whole rank, which is 2p chunks, on every rank.
    for p, m in cases(KIND, V):
        if m >= 2 * p - 1:
            assert in_flight(KIND, p, m, V).tolist() == [2 * p] * p
        assert (in_flight(KIND, p, m, V) <= 2 * min(p, m)).all()


def test_the_bottom_of_the_v_moves_nothing():
    for p in (2, 3, 5):
        bottom = actions(KIND, p, 6, V)[p - 1]
        assert {t.peer for a in bottom for t in a.transfers} == {p - 2}


def test_a_stage_that_uses_what_its_own_rank_has_not_made_is_refused():
    lists = actions(KIND, 2, 2, V)
    steps = [a for a in lists[1] if not (a.kind.value == "forward" and a.chunk == 0)]
    with pytest.raises(FivefoldError, match="before this rank has made it"):
        run_lists([lists[0], steps], [1.0] * 4, [2.0] * 4, weight_grad_s=[1.0] * 4, placement=Placement.V)


def test_order_agrees_with_pytorch():
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    order_of = getattr(schedules.ScheduleZBVZeroBubble, "_calculate_single_rank_operations", None)
    if order_of is None:
        pytest.skip("this PyTorch computes the order elsewhere")
    for p, m in cases(KIND, V):
        shape = SimpleNamespace(pp_group_size=p, _n_microbatches=m, num_stages=2 * p)
        assert orders(KIND, p, m, V) == [pytorch_order(order_of(shape, rank)) for rank in range(p)], (p, m)


def test_illegal_combinations_say_why():
    assert "exactly 2 chunks" in (illegal_reason(KIND, 4, 8, 1) or "")
    assert "at least 2 pipeline ranks" in (illegal_reason(KIND, 1, 8, 2) or "")
