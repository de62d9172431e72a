"""The fast cost against the event simulator, which shares no code with it."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fivefold.errors import FivefoldError
from fivefold.schedule import actions, legal, pipeline_seconds, simulate

KINDS = ("afab", "1f1b", "interleaved")
CLOSE = 1e-9


def draw_times(rng, rows: int, stages: int):
    """Rows of very different character: equal stages, nearly equal, orders of magnitude apart, slow links, zeros."""
    forward = 10 ** rng.uniform(-3, 1, (rows, stages))
    backward = 10 ** rng.uniform(-3, 1, (rows, stages))
    exchange = 10 ** rng.uniform(-3, 1, rows)
    for row in range(rows):
        match int(rng.integers(5)):
            case 0:
                forward[row], backward[row] = 1.0, 2.0
            case 1:
                forward[row], backward[row] = 1 + 0.01 * rng.random((2, stages))
                exchange[row] = 0.05
            case 2:
                forward[row], backward[row] = 1.0, 2.0
                forward[row, -1], backward[row, -1] = 1.6, 3.1
                exchange[row] = 0.02
            case 3:
                forward[row, rng.random(stages) < 0.5] = 0.0
                exchange[row] = 0.0
            case _:
                pass
    return forward, backward, exchange


def assert_equals_simulator(kind, p, m, v, forward, backward, exchange):
    fast = pipeline_seconds(kind, p, m, v, forward, backward, exchange)
    lists = actions(kind, p, m, v)
    for row, seconds in enumerate(fast):
        slow = simulate(lists, forward[row], backward[row], exchange[row]).makespan_s
        assert seconds == pytest.approx(slow, rel=CLOSE, abs=1e-300), (kind, p, m, v, row)


@pytest.mark.parametrize("kind", KINDS)
def test_all_small_pipelines(kind):
    rng = np.random.default_rng(17)
    for p, m, v in product(range(1, 9), range(1, 33), range(1, 5)):
        if legal(kind, p, m, v):
            assert_equals_simulator(kind, p, m, v, *draw_times(rng, 2, p * v))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("p", "m"), [(1, 300), (2, 240), (3, 300), (4, 400), (7, 210), (8, 256), (12, 240)])
def test_many_micro_batches(kind, p, m):
    rng = np.random.default_rng(p * m)
    v = 2 if kind == "interleaved" else 1
    if legal(kind, p, m, v):
        assert_equals_simulator(kind, p, m, v, *draw_times(rng, 6, p * v))


@st.composite
def pipelines(draw):
    kind = draw(st.sampled_from(KINDS))
    v = draw(st.integers(2, 4)) if kind == "interleaved" else 1
    p = draw(st.integers(2 if kind == "interleaved" else 1, 6))
    m = draw(st.integers(1, 16)) * (p if kind == "interleaved" else 1)
    seconds = st.one_of(st.just(0.0), st.sampled_from([0.5, 1.0, 2.0]), st.floats(1e-6, 1e3))
    times = hnp.arrays(np.float64, (2, 2, p * v), elements=seconds)
    return kind, p, m, v, *draw(times), draw(hnp.arrays(np.float64, 2, elements=seconds))


@settings(max_examples=150, deadline=None)
@given(pipelines())
def test_wild_stage_times(pipeline):
    assert_equals_simulator(*pipeline)


@pytest.mark.parametrize("kind", KINDS)
def test_slow_approach_to_the_steady_state(kind):
    """Two ranks almost equally busy, the slower one behind the other: the case that tempts to extrapolate too early."""
    p, v = 4, 2 if kind == "interleaved" else 1
    for gap, slow, ahead in product((1e-2, 1e-3), range(p), range(p)):
        forward, backward = np.full((1, p * v), 0.9), np.full((1, p * v), 1.8)
        forward[0, slow::p] = 1.0 + gap
        backward[0, ahead::p] = 1.9 + 0.5 * gap
        for m in (40, 160):
            assert_equals_simulator(kind, p, m, v, forward, backward, np.array([0.03]))


def test_a_row_does_not_depend_on_its_neighbours():
    rng = np.random.default_rng(5)
    for kind, v in (("afab", 1), ("1f1b", 1), ("interleaved", 3)):
        forward, backward, exchange = draw_times(rng, 40, 4 * v)
        together = pipeline_seconds(kind, 4, 120, v, forward, backward, exchange)
        alone = [
            pipeline_seconds(kind, 4, 120, v, forward[i : i + 1], backward[i : i + 1], exchange[i])[0]
            for i in range(40)
        ]
        assert together == pytest.approx(alone, rel=1e-12)


def test_closed_form_at_any_length():
    for p, m in ((4, 10**6), (64, 5000)):
        ones = np.ones((1, p))
        assert pipeline_seconds("1f1b", p, m, 1, ones, 2 * ones, 0.0)[0] == pytest.approx(3 * (m + p - 1), rel=CLOSE)
        assert pipeline_seconds("afab", p, m, 1, ones, 2 * ones, 0.0)[0] == pytest.approx(3 * (m + p - 1), rel=CLOSE)
        m -= m % p
        halves = np.full((1, 2 * p), 0.5)
        interleaved = pipeline_seconds("interleaved", p, m, 2, halves, 2 * halves, 0.0)[0]
        assert interleaved == pytest.approx(3 * m + 3 * (p - 1) / 2, rel=CLOSE)


def test_inputs_are_left_alone_and_no_rows_are_no_seconds():
    forward, backward = np.ones((3, 4)), np.ones((3, 4))
    pipeline_seconds("1f1b", 4, 100, 1, forward, backward, 0.5)
    assert (forward == 1).all() and (backward == 1).all()
    assert pipeline_seconds("1f1b", 4, 8, 1, np.ones((0, 4)), np.ones((0, 4)), 0.1).shape == (0,)


@pytest.mark.parametrize(
    ("forward", "exchange", "words"),
    [
        (np.ones((2, 3)), 0.0, "shape"),
        (np.ones(4), 0.0, "shape"),
        (np.ones((2, 4)), np.ones(3), "one per row"),
        (-np.ones((2, 4)), 0.0, "forward_s has a time that is negative"),
        (np.full((2, 4), np.nan), 0.0, "not finite"),
        (np.ones((2, 4)), np.inf, "exchange_s"),
    ],
)
def test_bad_times_are_refused(forward, exchange, words):
    with pytest.raises(FivefoldError, match=words):
        pipeline_seconds("1f1b", 4, 8, 1, forward, np.ones_like(forward), exchange)
