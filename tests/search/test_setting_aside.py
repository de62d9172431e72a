"""Setting combinations aside before recomputation is enumerated loses nothing: the same search with and without it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.cluster import load_cluster
from fivefold.estimate import Kernel
from fivefold.layout.columns import COLUMN_NAMES
from fivefold.layout.rules import valid_mask
from fivefold.model import load_model
from fivefold.search import found as found_module
from fivefold.search import prune
from fivefold.search.found import Found, search
from fivefold.search.front import Front, outermost
from fivefold.search.leaders import DEGREES
from fivefold.search.space import Space

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


def _leaders(found: Found, rows: np.ndarray, values: np.ndarray) -> list[float]:
    """The least of each set of degrees, least first: as many as were wanted."""
    degrees = np.stack([getattr(found.columns, name)[rows] for name in DEGREES], axis=1)
    best: dict[tuple[int, ...], float] = {}
    for names, value in zip(map(tuple, degrees.tolist()), values.tolist(), strict=True):
        best[names] = min(value, best.get(names, np.inf))
    return sorted(best.values())[:WANTED]


def test_the_fastest_of_the_best_degrees_stay(both):
    """Beside the price of every layout that fits, each pair of searches found the same sets of degrees."""
    whole, _ = both
    fitting = np.concatenate([whole.rows, whole.bounded_rows])
    kernel = Kernel(whole.problem, whole.columns)
    expected = _leaders(whole, fitting, kernel.step_seconds(fitting)) if len(fitting) else []
    for found in both:
        assert _leaders(found, found.rows, found.seconds) == pytest.approx(expected, rel=1e-12)


def test_the_lightest_of_the_best_degrees_stay(both):
    whole, _ = both
    fitting = np.concatenate([whole.rows, whole.bounded_rows])
    kernel = Kernel(whole.problem, whole.columns)
    expected = _leaders(whole, fitting, kernel.peak(fitting).reserved) if len(fitting) else []
    for found in both:
        assert _leaders(found, found.rows, found.reserved) == expected


def test_the_lightest_layout_stays_when_nothing_fits(both):
    whole, pruned = both
    if whole.fitting:
        pytest.skip("something fits")
    assert not pruned.fitting
    assert pruned.unfit_reserved.min() == whole.unfit_reserved.min()


@pytest.mark.parametrize("pins", [{"recompute": ("none",)}, {"recompute": ("selective", "none")}])
def test_what_misses_by_least_stays_where_not_all_can_be_recomputed(pins, help_with):
    """A pin rules out what the memory of a base is bounded with, which fits although no layout does."""
    wide = help_with.problem_of(load_model("deepseek-v2-lite"), load_cluster("h100-sxm", gpus=8), global_batch=32)
    full, pinned = (search(wide, "megatron", asked).reserved.min() for asked in ({"recompute": ("full",)}, pins))
    assert full < pinned
    cluster = help_with.small_cluster(8, 1.0001 * full / 1e9)
    problem = help_with.problem_of(wide.model, cluster, global_batch=32)
    whole, pruned = (search(problem, "megatron", pins, most=most) for most in (10**9, 0))
    assert not whole.fitting and not pruned.fitting
    assert len(pruned.columns) < len(whole.columns)
    assert pruned.unfit_reserved.min() == whole.unfit_reserved.min()


@pytest.mark.parametrize("case", [("nanotron", {"trained": "adapters"}), ("fivefold", {}), ("fivefold@cpu", {})])
def test_no_choice_of_recomputation_is_below_the_bounds_of_its_base(case, help_with):
    """On stages of a block or two, where recomputing parts can need less than recomputing all."""
    runtime, work = case
    cluster = load_cluster("h100-sxm", gpus=8)
    model = help_with.cut("llama-3-70b", 6)
    problem = help_with.problem_of(model, cluster, runtime, seq_len=1024, global_batch=16, **work)
    found = search(problem, runtime, {})
    columns, rows = found.columns, np.arange(len(found.columns))
    masks = np.unique(columns.recompute_modules[columns.recompute_modules > 0]).tolist()
    kernel = Kernel(problem, columns)
    assert (prune._least_bytes(problem, columns, masks) <= kernel.peak(rows).reserved).all()
    fastest = Kernel(problem, prune._recomputing(columns, prune._NONE))
    assert (fastest.lower_bound(rows) <= kernel.step_seconds(rows) * (1 + 1e-12)).all()


def test_a_step_of_nothing_but_its_bound_leads_its_degrees(help_with):
    """Frozen weights reduce and update nothing, so that nothing lies between the bound and the time of a step."""
    cluster = load_cluster("h100-sxm", gpus=8)
    problem = help_with.problem_of(load_model("mixtral-8x7b"), cluster, trained="adapters", global_batch=2)
    found = [search(problem, "megatron", {"tp": (8,)}, WANTED, most=most) for most in (10**9, 0)]
    whole, pruned = (_leaders(each, each.rows, each.seconds) for each in found)
    assert len(whole) > 1 and pruned == pytest.approx(whole, rel=1e-12)


def test_what_is_refused_is_neither_multiplied_nor_priced(help_with):
    """A table without a legal row is thinned at every step."""
    cluster = load_cluster("h100-sxm", gpus=512)
    problem = help_with.problem_of(
        load_model("gpt2"), cluster, "fivefold", precision="fp8", trained="adapters", global_batch=512
    )
    for most in (0, 10**9):
        found = search(problem, "fivefold", {}, most=most)
        assert not len(found.columns) and 0 < len(found.candidates) < 100_000


def test_no_layout_is_listed_twice(help_with):
    """Without ZeRO, pinned replicas of 1 and of all ranks are the same layout."""
    cluster = load_cluster("h100-sxm", gpus=4)
    problem = help_with.problem_of(help_with.cut("llama-3-8b", 4), cluster, "fivefold", global_batch=8)
    columns = Space(problem, {"dp_replicate": (1, 2, 4)}, "fivefold").columns()
    rows = np.stack([getattr(columns, name).astype(int) for name in COLUMN_NAMES], axis=1)
    assert {*columns.zero.tolist()} == {0, 1, 2, 3}
    assert len(np.unique(rows, axis=0)) == len(rows)


@pytest.mark.parametrize("runtime", ["megatron", "torchtitan", "fsdp"])
def test_nothing_but_recomputation_is_left_for_rules_to_refuse(runtime, help_with):
    problem = help_with.problem_of(load_model("mixtral-8x7b"), load_cluster("h100-sxm", gpus=16), runtime)
    space = Space(problem, {"recompute": ("none",)}, runtime)
    columns = space.columns()
    assert len(columns) > 10 and valid_mask(columns, space._context()).all()


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
