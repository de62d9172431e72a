"""DualPipeV: PyTorch's order, the published memory, and a bubble no larger than the published one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from split_schedules import (
    assert_moments_cover_everything,
    assert_runs_and_holds,
    cases,
    orders,
    pytorch_order,
    simulate,
)

from fivefold.schedule import ActionKind, actions, illegal_reason, in_flight

KIND, V = "dualpipev", 2
seconds = st.floats(0.1, 10.0)


def test_runs_everywhere_and_holds_what_in_flight_says():
    assert_runs_and_holds(KIND, V)
    assert_moments_cover_everything(KIND, V)


def test_published_memory():
    # DeepSeek-AI's DualPipe, README, from memory: PP + 1 with PP = 2p stages, the same on every rank.
    for p, m in cases(KIND, V):
        assert in_flight(KIND, p, m, V).tolist() == [min(2 * p + 1, 2 * m)] * p


def test_bubble_when_the_three_parts_cost_the_same():
    for p, m in cases(KIND, V):
        assert simulate(KIND, p, m, V, 1.0, 1.0, 1.0).makespan_s == pytest.approx(6 * m + p - 1)


@settings(max_examples=60, deadline=None)
@given(
    p=st.integers(2, 6), more=st.integers(0, 8), w=seconds, forward=st.floats(1.0, 3.0), backward=st.floats(1.0, 3.0)
)
def test_bubble_is_at_most_the_published_one(p, more, w, forward, backward):
    """(p-1)(F&B + B - 3W) (README, from memory) with F&B = F + B, B whole: here a neighbour gets the forward's output
    before the backward beside it ends. It holds where the parts are as in practice, W <= F <= the input's part of B."""
    f = w * forward
    b = f * backward
    timeline = simulate(KIND, p, 2 * p + more, V, f, b, w)
    assert timeline.bubble_s.max() <= (p - 1) * (f + 2 * (b + w) - 3 * w) * (1 + 1e-9)
    assert timeline.bubble_s.max() >= (p - 1) * f * (1 - 1e-9)


def test_backwards_are_whole_in_the_middle_and_split_at_the_ends():
    for rank, steps in enumerate(actions(KIND, 4, 16, V)):
        kinds = [a.kind for a in steps if a.kind is not ActionKind.EXCHANGE]
        assert kinds.count(ActionKind.INPUT_GRAD) == kinds.count(ActionKind.WEIGHT_GRAD) == 2 * 4 - 1 - rank
        assert kinds[-1] is ActionKind.WEIGHT_GRAD


def test_order_agrees_with_pytorch():
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    order_of = getattr(schedules.ScheduleDualPipeV, "_calculate_single_rank_operations", None)
    if order_of is None:
        pytest.skip("this PyTorch computes the order elsewhere")
    for p, m in cases(KIND, V):
        shape = SimpleNamespace(pp_group_size=p, _n_microbatches=m)
        assert orders(KIND, p, m, V) == [pytorch_order(order_of(shape, rank)) for rank in range(p)], (p, m)


def test_illegal_combinations_say_why():
    assert "exactly 2 chunks" in (illegal_reason(KIND, 4, 8, 3) or "")
    assert "as many micro-batches as stages" in (illegal_reason(KIND, 4, 7, 2) or "")
