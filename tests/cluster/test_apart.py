"""The slowest of many GPUs, against drawn ones."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from fivefold.cluster.apart import SPREAD, slowest


@pytest.mark.parametrize("gpus", [16, 128, 2048])
def test_the_slowest_of_many_is_slower_than_the_slowest_of_a_node(gpus):
    drawn = np.random.default_rng(0).normal(1.0, SPREAD, (4000, gpus))
    node = np.random.default_rng(1).normal(1.0, SPREAD, (200_000, 8))
    expected = drawn.max(axis=1).mean() - node.max(axis=1).mean()
    assert slowest(gpus) - 1 == pytest.approx(expected, rel=0.04)


def test_up_to_a_node_nothing_is_added():
    assert [slowest(gpus) for gpus in (1, 2, 8)] == [1.0, 1.0, 1.0]
    growth = [slowest(2**power) for power in range(3, 15)]
    assert all(fewer < more for fewer, more in pairwise(growth))
