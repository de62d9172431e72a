"""The event simulator against closed forms and hand-made lists, and what it refuses."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from fivefold.errors import FivefoldError
from fivefold.schedule import Action, ActionKind, Direction, Tensor, Transfer, actions, simulate

A, G = Tensor.ACTIVATION, Tensor.GRADIENT


def forward(i):
    return Action(ActionKind.FORWARD, i, 0)


def backward(i):
    return Action(ActionKind.BACKWARD, i, 0)


def send(peer, tensor, i, stage, blocking=True):
    return Action(ActionKind.EXCHANGE, transfers=(Transfer(Direction.SEND, peer, tensor, i, stage),), blocking=blocking)


def recv(peer, tensor, i, stage, blocking=True):
    return Action(ActionKind.EXCHANGE, transfers=(Transfer(Direction.RECV, peer, tensor, i, stage),), blocking=blocking)


FIRST = [forward(0), send(1, A, 0, 1), recv(1, G, 0, 0), backward(0)]
LAST = [recv(0, A, 0, 1), forward(0), backward(0), send(0, G, 0, 0)]


@pytest.mark.parametrize("kind", ["afab", "1f1b"])
def test_equal_stages_and_free_exchange_give_the_textbook_bubble(kind):
    f, b = 1.0, 2.5
    for p, m in product(range(1, 9), range(1, 17)):
        timeline = simulate(actions(kind, p, m), [f] * p, [b] * p)
        assert timeline.makespan_s == pytest.approx((m + p - 1) * (f + b), rel=1e-12)
        assert timeline.bubble_s == pytest.approx([(p - 1) * (f + b)] * p, abs=1e-9)


def test_interleaving_divides_the_bubble_by_the_chunks():
    f, b = 1.0, 2.5  # of a whole rank
    for p, v, groups in product(range(2, 9), range(2, 5), range(1, 5)):
        timeline = simulate(actions("interleaved", p, groups * p, v), [f / v] * (p * v), [b / v] * (p * v))
        assert timeline.makespan_s == pytest.approx(groups * p * (f + b) + (p - 1) * (f + b) / v, rel=1e-12)
        assert timeline.bubble_s == pytest.approx([(p - 1) * (f + b) / v] * p, abs=1e-9)


def test_two_ranks_by_hand():
    timeline = simulate([FIRST, LAST], [1.0, 10.0], [2.0, 20.0], 0.5)
    assert timeline.start_s[0].tolist() == [0.0, 1.0, 1.5, 32.0]
    assert timeline.end_s[0].tolist() == [1.0, 1.5, 32.0, 34.0]
    assert timeline.start_s[1].tolist() == [0.0, 1.5, 11.5, 31.5]
    assert timeline.end_s[1].tolist() == [1.5, 11.5, 31.5, 32.0]
    assert timeline.makespan_s == 34.0
    assert timeline.busy_s.tolist() == [3.0, 30.0]
    assert timeline.bubble_s.tolist() == [31.0, 4.0]
    assert timeline.in_flight.tolist() == [1, 1]


def test_an_exchange_that_does_not_block_lets_compute_go_on_and_delays_only_what_needs_it():
    first = [
        forward(0),
        send(1, A, 0, 1, blocking=False),
        forward(1),
        send(1, A, 1, 1, blocking=False),
        recv(1, G, 0, 0, blocking=False),
        backward(0),
        recv(1, G, 1, 0, blocking=False),
        backward(1),
    ]
    last = [
        recv(0, A, 0, 1, blocking=False),
        forward(0),
        backward(0),
        send(0, G, 0, 0, blocking=False),
        recv(0, A, 1, 1, blocking=False),
        forward(1),
        backward(1),
        send(0, G, 1, 0, blocking=False),
    ]
    timeline = simulate([first, last], [1.0, 1.0], [1.0, 1.0], 4.0)
    assert timeline.end_s[0][:3].tolist() == [1.0, 5.0, 2.0]  # the second forward does not wait for the first send
    # The receive of micro-batch 1 is posted at 7, after the send of it, so it arrives at 11.
    assert timeline.start_s[1].tolist() == [0.0, 5.0, 6.0, 7.0, 7.0, 11.0, 12.0, 13.0]
    assert timeline.makespan_s == 18.0


def test_a_grouped_exchange_ends_with_its_last_transfer():
    group = (Transfer(Direction.SEND, 1, A, 0, 1), Transfer(Direction.RECV, 1, G, 0, 0))
    first = [forward(0), Action(ActionKind.EXCHANGE, transfers=group), backward(0)]
    timeline = simulate([first, LAST], [1.0, 1.0], [1.0, 1.0], 0.25)
    assert timeline.end_s[0][1] == timeline.end_s[1][-1] == 3.5


def test_makespan_is_never_below_the_busiest_rank_nor_the_way_through():
    rng = np.random.default_rng(0)
    for kind, v in (("afab", 1), ("1f1b", 1), ("interleaved", 2)):
        for p, groups in product((2, 3, 5), (1, 3)):
            f, b = rng.random((2, p * v))
            timeline = simulate(actions(kind, p, groups * p, v), f, b, 0.1)
            assert timeline.makespan_s >= timeline.busy_s.max()
            assert timeline.makespan_s >= f.sum() + b.sum() + 2 * (p * v - 1) * 0.1 - 1e-12
            assert timeline.busy_s == pytest.approx(groups * p * (f + b).reshape(v, p).sum(0))


def test_deadlock_says_who_waits_for_whom():
    crossed = [forward(0), recv(1, G, 0, 0), send(1, A, 0, 1), backward(0)]
    with pytest.raises(FivefoldError, match=r"rank 0 waits .* for rank 1 .*gradient.*; rank 1 waits .* for rank 0"):
        simulate([crossed, LAST], [1.0, 1.0], [1.0, 1.0])


def test_mismatched_order_of_blocking_exchanges_deadlocks():
    ranks = actions("1f1b", 2, 2)
    steps = list(ranks[1])
    receives = [i for i, a in enumerate(steps) if a.kind is ActionKind.EXCHANGE]
    del steps[receives[-1]]  # the last gradient is never sent
    with pytest.raises(FivefoldError, match="deadlocks: rank 0 waits"):
        simulate([ranks[0], steps], [1.0] * 2, [1.0] * 2)


@pytest.mark.parametrize(
    ("first", "last", "words"),
    [
        (FIRST, [forward(0), *LAST[2:]], "never asked for"),
        (FIRST, [LAST[0], forward(0), forward(0), *LAST[2:]], "runs twice"),
        (FIRST, [LAST[0], backward(0)], "before forward"),
        ([send(1, A, 0, 1), *FIRST], LAST, "sent before it is made"),
        ([*FIRST, forward(1)], LAST, "never runs backward"),
        ([forward(0), send(1, A, 0, 1), send(1, A, 0, 1)], [LAST[0]], "posted twice"),
        ([forward(0), send(1, A, 0, 1, blocking=False)], [], "other side never does"),
        ([forward(0), send(0, A, 0, 1)], LAST, "do not name each other"),
        ([Action(ActionKind.OPTIM)], [], "no time for optim"),
        ([Action(ActionKind.FORWARD, 0, 3)], [], "no micro-batch and chunk of this rank"),
    ],
)
def test_broken_lists_are_refused(first, last, words):
    with pytest.raises(FivefoldError, match=words):
        simulate([first, last], [1.0, 1.0], [1.0, 1.0])


def test_stage_times_have_to_fit_the_ranks():
    with pytest.raises(FivefoldError, match="whole number of chunks"):
        simulate([FIRST, LAST], [1.0] * 3, [1.0] * 3)
