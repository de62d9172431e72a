"""Compute beside a collective: slower while it runs."""

from __future__ import annotations

import numpy as np
import pytest

from fivefold.cluster.beside import SLOWER, WAITED, unhidden


def stepped(collective_s: float, compute_s: float, steps: int = 200_000) -> float:
    """End of both, from small steps of time in which compute gets on more slowly while the collective runs."""
    left, now, step = compute_s, 0.0, (collective_s + 2 * compute_s) / steps
    while left > 0:
        left -= step / (1 + SLOWER) if now < collective_s else step
        now += step
    return max(now, collective_s)


@pytest.mark.parametrize(("collective_s", "compute_s"), [(1.0, 3.0), (1.0, 0.9), (2.0, 1.0), (0.0, 1.0), (1.0, 0.0)])
def test_seconds_added_to_compute_agree_with_time_stepped(collective_s, compute_s):
    added = float(unhidden(np.array(collective_s), np.array(compute_s)))
    assert compute_s + added == pytest.approx(stepped(collective_s, compute_s), rel=1e-3)


def test_a_collective_that_holds_no_multiprocessor_adds_only_what_is_left_of_it():
    assert unhidden(np.array([1.0, 3.0]), np.array(2.0), waited=0.0).tolist() == [0.0, 1.0]
    assert 0.1 < WAITED < 0.2
