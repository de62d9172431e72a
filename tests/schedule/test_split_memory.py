"""How much ranks hold where a backward is split, and where a schedule that splits it is not allowed to."""

from __future__ import annotations

import pytest

from fivefold.schedule import actions, in_flight, in_flight_moments, legal, placement, simulate, split_moments
from fivefold.schedule.actions import ActionKind
from fivefold.schedule.split import whole_backward

SPLIT = [("zb-h1", 1), ("zbv", 2), ("dualpipev", 2)]
SHAPES = [(2, 4), (2, 9), (3, 6), (4, 8), (4, 13)]
CASES = [(kind, p, m, v) for kind, v in SPLIT for p, m in SHAPES if legal(kind, p, m, v)]


@pytest.mark.parametrize(("kind", "p", "m", "v"), CASES)
def test_whole_backwards_run_and_hold_what_the_simulator_counts(kind: str, p: int, m: int, v: int) -> None:
    ranks = [whole_backward(order) for order in actions(kind, p, m, v)]
    ones = [1.0] * (p * v)
    timeline = simulate(ranks, ones, [2.0] * (p * v), placement=placement(kind))
    assert in_flight(kind, p, m, v, split=False).tolist() == timeline.in_flight.tolist()
    assert (in_flight(kind, p, m, v, split=False) <= in_flight(kind, p, m, v)).all()
    assert in_flight_moments(kind, p, m, v, split=False).max() <= m


def test_zb_h1_without_its_split_holds_as_1f1b() -> None:
    assert in_flight("zb-h1", 4, 8, split=False).tolist() == in_flight("1f1b", 4, 8).tolist() == [4, 3, 2, 1]


@pytest.mark.parametrize("p", [2, 4])
def test_zb_h1_owes_what_1f1b_would_not_hold(p: int) -> None:
    """Rank s waits with p - s micro-batches, as 1F1B does, and owes s: p in all (Qi et al. 2023, section 2.1)."""
    waiting, owed, apart = split_moments("zb-h1", p, 3 * p)
    assert waiting[..., 0].max(axis=0).tolist() == [p - s for s in range(p)]
    assert owed[..., 0].max(axis=0).tolist() == list(range(p))
    assert apart.all()


@pytest.mark.parametrize(("kind", "p", "m", "v"), CASES)
def test_moments_are_those_of_the_lists(kind: str, p: int, m: int, v: int) -> None:
    """Every start of a backward step, counted by sets of micro-batches, has a moment that is at least as much."""
    waiting, owed, apart = split_moments(kind, p, m, v)
    for rank, order in enumerate(actions(kind, p, m, v)):
        moments = {
            (*waiting[k, rank].tolist(), *owed[k, rank].tolist(), int(apart[k, rank])) for k in range(len(apart))
        }
        forwards: set[tuple[int, int]] = set()
        halves: set[tuple[int, int]] = set()
        seen = set()
        for action in order:
            step = (action.micro_batch or 0, action.chunk or 0)
            if action.kind in (ActionKind.BACKWARD, ActionKind.INPUT_GRAD):
                counts = [sum(each[1] == chunk for each in group) for group in (forwards, halves) for chunk in range(v)]
                seen.add((*counts, int(action.kind is ActionKind.INPUT_GRAD)))
                forwards.remove(step)
            if action.kind is ActionKind.FORWARD:
                forwards.add(step)
            elif action.kind is ActionKind.INPUT_GRAD:
                halves.add(step)
            elif action.kind is ActionKind.WEIGHT_GRAD:
                halves.remove(step)
        assert moments <= seen
        assert all(any(all(a <= b for a, b in zip(each, most, strict=True)) for most in moments) for each in seen)
