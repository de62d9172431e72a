"""ZB-H1 against the paper's closed forms, and against PyTorch's order."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
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

from fivefold.errors import FivefoldError
from fivefold.schedule import actions, in_flight, legal, pipeline_seconds
from fivefold.schedule import simulate as run_lists

KIND, V = "zb-h1", 1
seconds = st.floats(0.01, 10.0)


def test_runs_everywhere_and_holds_what_the_closed_form_says():
    assert_runs_and_holds(KIND, V)
    assert_moments_cover_everything(KIND, V)


def test_every_rank_holds_as_many_as_the_first_rank_of_1f1b():
    # Qi et al. 2023, table 1: the peak of ZB-H1 is p, that of 1F1B.
    for p, m in cases(KIND, V):
        assert in_flight(KIND, p, m).tolist() == [in_flight("1f1b", p, m)[0]] * p


def test_published_bubble():
    # Qi et al. 2023, table 1: (p-1)(F+B-W) against (p-1)(F+B+W).
    for p, m in cases(KIND, V):
        if m < p:
            continue
        for f, b, w in ((1.0, 1.0, 1.0), (1.0, 1.1, 0.9), (1.0, 1.0, 0.5), (2.0, 3.0, 2.0)):
            timeline = simulate(KIND, p, m, V, f, b, w)
            assert timeline.bubble_s == pytest.approx([(p - 1) * (f + b - w)] * p, abs=1e-9)


@settings(max_examples=80, deadline=None)
@given(p=st.integers(2, 6), groups=st.integers(1, 4), f=seconds, b=seconds, w=seconds)
def test_bubble_for_any_times(p, groups, f, b, w):
    """Where W outlasts F or B there is nothing more for it to fill: a forward and a backward way remain."""
    timeline = simulate(KIND, p, groups * p, V, f, b, w)
    assert timeline.makespan_s == pytest.approx(groups * p * (f + b + w) + (p - 1) * max(f + b - w, f, b), rel=1e-9)


def test_order_of_the_first_and_last_rank():
    first, _, last = (" ".join(steps) for steps in orders(KIND, 3, 4, V))
    assert first.replace(".0", "") == "F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3"
    assert last.replace(".2", "") == "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3"


def test_order_agrees_with_pytorch():
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    order_of = getattr(schedules.ScheduleInterleavedZeroBubble, "_calculate_single_rank_operations", None)
    if order_of is None:
        pytest.skip("this PyTorch computes the order elsewhere")
    for p, m in cases(KIND, V):
        rounds = max(1, m // p)
        if m % rounds:
            continue
        # The method reads these attributes alone, so no process group is needed.
        shape = SimpleNamespace(
            n_local_stages=1, microbatches_per_round=m // rounds, pp_group_size=p, _n_microbatches=m
        )
        assert orders(KIND, p, m, V) == [pytorch_order(order_of(shape, rank)) for rank in range(p)], (p, m)


@settings(max_examples=25, deadline=None)
@given(times=st.tuples(seconds, seconds, seconds), p=st.integers(1, 5), more=st.integers(0, 12))
def test_never_slower_than_1f1b_whose_transfers_take_no_time(times, p, more):
    """With equal stages and m >= p; a rank far slower than its neighbours can make the fixed order lose."""
    f, b, w = ([each] * p for each in times)
    m = p + more
    whole = [x + y for x, y in zip(b, w, strict=True)]
    slow = run_lists(actions("1f1b", p, m), f, whole).makespan_s
    assert simulate(KIND, p, m, V, f, b, w).makespan_s <= slow * (1 + 1e-12)


def test_cost_is_the_simulator():
    rng = np.random.default_rng(0)
    f, b, w = rng.random((3, 4, 3))
    found = pipeline_seconds(KIND, 3, 5, 1, f, b + w, 0.2, weight_grad_s=w)
    assert found.tolist() == [simulate(KIND, 3, 5, V, f[i], b[i], w[i], 0.2).makespan_s for i in range(4)]


def test_cost_asks_for_the_weights_part_and_refuses_it_where_nothing_splits():
    times = np.ones((1, 2))
    with pytest.raises(FivefoldError, match="needs the seconds"):
        pipeline_seconds(KIND, 2, 4, 1, times, times, 0.0)
    with pytest.raises(FivefoldError, match="splits no backward"):
        pipeline_seconds("1f1b", 2, 4, 1, times, times, 0.0, weight_grad_s=times)
    with pytest.raises(FivefoldError, match="rows"):
        pipeline_seconds(KIND, 2, 4, 1, times, times, 0.0, weight_grad_s=np.ones((2, 2)))


def test_simulator_refuses_bad_parts_and_lists_that_split_without_them():
    lists = actions(KIND, 2, 2)
    with pytest.raises(FivefoldError, match="no time for input_grad"):
        run_lists(lists, [1.0] * 2, [2.0] * 2)
    for weights in ([1.0], [3.0, 1.0], [-1.0, 1.0]):
        with pytest.raises(FivefoldError, match="between 0 and the stage's backward_s"):
            run_lists(lists, [1.0] * 2, [2.0] * 2, weight_grad_s=weights)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda steps: [a for a in steps if a.kind.value != "weight_grad"], "never gives the weights"),
        (lambda steps: sorted(steps, key=lambda a: a.kind.value != "weight_grad"), "no gradients for the weights"),
    ],
)
def test_simulator_refuses_a_weight_gradient_that_is_missing_or_early(change, words):
    lists = actions(KIND, 2, 2)
    with pytest.raises(FivefoldError, match=words):
        run_lists([change(lists[0]), lists[1]], [1.0] * 2, [2.0] * 2, weight_grad_s=[1.0] * 2)


def test_legal():
    assert legal(KIND, 4, 1) and legal(KIND, 1, 3)
    assert not legal(KIND, 4, 8, 2)
