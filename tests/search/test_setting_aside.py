"""Setting combinations aside before recomputation is enumerated loses nothing: the same search with and without it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.cluster import load_cluster
from fivefold.estimate import Kernel
from fivefold.model import load_model
from fivefold.search import found as found_module
from fivefold.search.found import Found, search
from fivefold.search.front import Front, outermost
from fivefold.search.leaders import DEGREES

CASES = {
    "dense": ("llama-3-8b", 16, 8192, 64, "megatron"),
    "experts": ("mixtral-8x7b", 16, 4096, 32, "megatron"),
    "latent": ("deepseek-v2-lite", 16, 4096, 32, "megatron"),
    "fsdp": ("mixtral-8x7b", 32, 4096, 64, "torchtitan"),
    "nothing fits": ("llama-3-70b", 8, 8192, 64, "megatron"),
}
WANTED = 30


@pytest.fixture(scope="module", params=CASES)
def both(request, help_with):
    """(everything enumerated, set aside wherever possible)."""
    name, gpus, seq, batch, runtime = CASES[request.param]
    cluster = load_cluster("h100-sxm", gpus=gpus)
    problem = help_with.problem_of(load_model(name), cluster, runtime, seq_len=seq, global_batch=batch)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(found_module, "_PRICED_AT_LEAST", 64)  # so that bounds decide, on spaces as small as these
        return search(problem, runtime, {}, WANTED), search(problem, runtime, {}, WANTED, most=0)


def _front(found: Found) -> tuple[np.ndarray, np.ndarray]:
    keep = found.reserved < np.concatenate([[np.inf], np.minimum.accumulate(found.reserved)[:-1]])
    return found.seconds[keep], found.reserved[keep]


def test_something_is_set_aside(both):
    whole, pruned = both
    assert len(pruned.columns) < len(whole.columns)
    assert pruned.searched == whole.searched


def test_the_optimum_and_its_ties_stay(both):
    whole, _ = both
    limit = (1 + whole.problem.runtime.tie_spread) * whole.seconds[0] if len(whole.seconds) else 0
    kept = [np.sort(found.seconds[found.seconds <= limit]) for found in both]
    assert np.allclose(*kept, rtol=1e-12)


def test_the_front_stays(both):
    for whole, pruned in zip(*map(_front, both), strict=True):
        assert np.allclose(whole, pruned, rtol=1e-12)


def _leaders(found: Found, rows: np.ndarray, seconds: np.ndarray) -> list[float]:
    """The fastest of each set of degrees, fastest first: as many as were wanted."""
    degrees = np.stack([getattr(found.columns, name)[rows] for name in DEGREES], axis=1)
    best: dict[tuple[int, ...], float] = {}
    for names, time in zip(map(tuple, degrees.tolist()), seconds.tolist(), strict=True):
        best[names] = min(time, best.get(names, np.inf))
    return sorted(best.values())[:WANTED]


def test_the_fastest_of_the_best_degrees_stay(both):
    """Beside the price of every layout that fits, each pair of searches found the same sets of degrees."""
    whole, _ = both
    fitting = np.concatenate([whole.rows, whole.bounded_rows])
    kernel = Kernel(whole.problem, whole.columns)
    expected = _leaders(whole, fitting, kernel.step_seconds(fitting)) if len(fitting) else []
    for found in both:
        assert _leaders(found, found.rows, found.seconds) == pytest.approx(expected, rel=1e-12)


def test_the_lightest_layout_stays_when_nothing_fits(both):
    whole, pruned = both
    if whole.fitting:
        pytest.skip("something fits")
    assert not pruned.fitting
    assert pruned.unfit_reserved.min() == whole.unfit_reserved.min()


@pytest.mark.parametrize("runtime", ["megatron", "torchtitan"])
@pytest.mark.parametrize("room", [1.0001, 1.2, 1.5])
def test_nothing_is_lost_where_memory_is_tight(runtime, room, help_with):
    """GPUs with little more memory than the lightest layout needs: the front is still whole."""
    work = {"seq_len": 8192, "global_batch": 64}
    wide = help_with.problem_of(load_model("llama-3-8b"), load_cluster("h100-sxm", gpus=8), runtime, **work)
    lightest = search(wide, runtime, {}).reserved.min()
    cluster = help_with.small_cluster(8, room * lightest / 1e9)
    tight = help_with.problem_of(wide.model, cluster, runtime, **work)
    fronts = [_front(search(tight, runtime, {}, most=most)) for most in (10**9, 0)]
    assert len(fronts[0][0]) > 0
    for whole, pruned in zip(*fronts, strict=True):
        assert np.allclose(whole, pruned, rtol=1e-12)


POINTS = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=12)


@settings(max_examples=200, deadline=None)
@given(batches=st.lists(POINTS, min_size=1, max_size=3), asked=POINTS)
def test_a_front_knows_what_it_beats(batches, asked):
    front = Front()
    for batch in batches:
        front.add(*(np.array([point[i] for point in batch], dtype=float) for i in (0, 1)))
    everything = [point for batch in batches for point in batch]
    for point, beaten in zip(
        asked, front.beats(*(np.array([point[i] for point in asked], dtype=float) for i in (0, 1))), strict=True
    ):
        assert beaten == any(other[0] < point[0] and other[1] <= point[1] for other in everything)


@settings(max_examples=200, deadline=None)
@given(points=POINTS, wanted=st.integers(0, 12))
def test_layers_are_peeled_from_the_outside(points, wanted):
    seconds, reserved = (np.array([point[i] for point in points], dtype=float) for i in (0, 1))
    found = outermost(seconds, reserved, wanted)
    assert len(found) == min(wanted, len(points)) == len({*found.tolist()})
    left = [*range(len(points))]
    for position in found.tolist():
        rivals = [points[i] for i in left if i != position]
        inner = [other for other in rivals if other[0] < points[position][0] and other[1] < points[position][1]]
        # What beats it in both comes first, in an earlier layer.
        assert not [other for other in inner if other in [points[i] for i in left if i not in found]]
