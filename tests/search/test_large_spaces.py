"""A GPT of 1T parameters on 4,096 GPUs, and a mixture of experts whose bounds exclude most layouts.

How long the search takes is measured by benchmarks/search.py, never here.
"""

from __future__ import annotations

import numpy as np
import pytest

from fivefold.cluster import load_cluster
from fivefold.estimate import estimate
from fivefold.model import load_model
from fivefold.search.found import Found, search

CASES = {
    "gpt-1t": ("gpt-1t", "a100-80g-sxm", 4096, 2048, 4096),
    "mixtral": ("mixtral-8x7b", "h100-sxm", 64, 8192, 512),
}


@pytest.fixture(scope="module")
def searched(help_with):
    """Raw outcomes by case, each searched once."""
    cache: dict[str, Found] = {}

    def get(name: str) -> Found:
        if name not in cache:
            model, gpu, gpus, seq, batch = CASES[name]
            cluster = load_cluster(gpu, gpus=gpus)
            problem = help_with.problem_of(load_model(model), cluster, seq_len=seq, global_batch=batch)
            cache[name] = search(problem, "megatron", {})
        return cache[name]

    return get


def _draw(rows, number: int) -> np.ndarray:
    return np.random.default_rng(0).choice(rows, size=min(number, len(rows)), replace=False)


def _estimate(raw: Found, row: int):
    problem = raw.problem
    est = estimate(problem.model, problem.cluster, problem.work, raw.columns.row(int(row)))
    assert est.valid and est.step and est.memory, est.violations
    return est


def test_a_hundred_thousand_layouts_are_settled(searched):
    raw = searched("gpt-1t")
    assert len(raw.columns) >= 100_000
    assert len(raw.rows) >= 20_000
    assert len(raw.rows) + len(raw.bounded_rows) == raw.fitting
    assert raw.fitting + len(raw.unfit_rows) == len(raw.columns)


def test_every_layout_is_settled_once(searched):
    for name in CASES:
        raw = searched(name)
        settled = np.concatenate([raw.rows, raw.bounded_rows, raw.unfit_rows])
        assert (np.sort(settled) == np.arange(len(raw.columns))).all()


@pytest.mark.parametrize("name", CASES)
def test_priced_layouts_equal_their_estimates(searched, name):
    raw = searched(name)
    for position in _draw(np.arange(len(raw.rows)), 200 if name == "gpt-1t" else 50):
        est = _estimate(raw, raw.rows[position])
        assert raw.seconds[position] == pytest.approx(est.step.seconds.value, rel=1e-9)
        assert raw.reserved[position] == pytest.approx(est.memory.reserved_bytes, rel=1e-9)
        assert est.fits


@pytest.mark.parametrize("name", CASES)
def test_excluded_layouts_do_not_fit_or_are_not_faster(searched, name):
    raw = searched(name)
    excluded = np.concatenate([raw.bounded_rows, raw.unfit_rows])
    for row in _draw(excluded, 300 if name == "gpt-1t" else 100):
        est = _estimate(raw, row)
        assert not (est.fits and est.step.seconds.value < raw.seconds[0])


def test_bounded_layouts_fit_and_lose(searched):
    raw = searched("mixtral")
    assert len(raw.bounded_rows) > 1000
    for row in _draw(raw.bounded_rows, 60):
        est = _estimate(raw, row)
        assert est.fits
        assert est.step.seconds.value > raw.seconds[0] * (1 + raw.problem.runtime.tie_spread)


def test_no_bounded_layout_would_be_on_the_front(searched):
    """For a drawn bounded layout some priced one is no heavier and no slower."""
    raw = searched("mixtral")
    for row in _draw(raw.bounded_rows, 60):
        est = _estimate(raw, row)
        no_worse = (raw.seconds <= est.step.seconds.value) & (raw.reserved <= est.memory.reserved_bytes + 1)
        assert no_worse.any()
