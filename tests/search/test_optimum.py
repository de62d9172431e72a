"""The search against brute force: on small spaces, every layout by loops and every price by `estimate`."""

from __future__ import annotations

import numpy as np
import pytest

from fivefold.layout import Layout
from fivefold.search import answer
from fivefold.search.found import search

# (catalogue model, blocks kept, GPUs, GB per GPU, runtime, global batch): memory binds in each, so that the choice
# has to use some axis or recomputation.
CASES = {
    "llama": ("llama-3-8b", 4, 4, 17.0, "megatron", 2),
    "llama-fsdp": ("llama-3-8b", 4, 8, 7.0, "torchtitan", 4),
    "mixtral": ("mixtral-8x7b", 2, 4, 22.0, "megatron", 2),
    "mixtral-fsdp": ("mixtral-8x7b", 2, 4, 21.0, "torchtitan", 4),
    "latent": ("deepseek-v2-lite", 3, 2, 24.0, "megatron", 2),
}


@pytest.fixture(scope="module", params=CASES)
def case(request, help_with):
    """(problem, every valid estimate, the search's raw outcome)."""
    name, layers, gpus, memory, runtime, batch = CASES[request.param]
    cluster = help_with.small_cluster(gpus, memory)
    problem = help_with.problem_of(help_with.cut(name, layers), cluster, runtime, global_batch=batch)
    everything = [help_with.priced(problem, layout) for layout in help_with.every_layout(problem)]
    return problem, everything, search(problem, runtime, {})


def _fitting(everything):
    return [est for est in everything if est.fits]


def test_the_case_is_tight(case):
    _, everything, _ = case
    assert 0 < len(_fitting(everything)) < len(everything)


def test_the_fastest_is_the_fastest_of_all(case, help_with):
    problem, everything, _ = case
    best = min(est.step.seconds.value for est in _fitting(everything))
    plan = help_with.found(problem)
    assert plan.plans[plan.fastest].step.seconds.value == pytest.approx(best, rel=1e-12)
    assert plan.plans[0].step.seconds.value <= best * (1 + problem.runtime.tie_spread)


def test_the_lightest_is_the_lightest_of_all(case, help_with):
    problem, everything, _ = case
    least = min(est.memory.reserved_bytes for est in _fitting(everything))
    plan = help_with.found(problem, objective="memory")
    assert plan.plans[0].memory.reserved_bytes == pytest.approx(least, rel=1e-9)


def test_every_valid_layout_is_in_the_space(case):
    """What the loops find valid, the columns hold: as a multiset of (memory, time) among the fitting ones."""
    _, everything, raw = case
    ours = {(round(s, 12), int(r)) for s, r in zip(raw.seconds, raw.reserved, strict=True)}
    # Both sides floor bytes; sums in another order can differ by one.
    near = {(s, r + shift) for s, r in ours for shift in (-1, 0, 1)}
    missing = [
        est.layout
        for est in _fitting(everything)
        if (round(est.step.seconds.value, 12), est.memory.reserved_bytes) not in near
    ]
    assert not missing
    assert len(raw.bounded_rows) == 0


def test_the_front_is_the_front_of_all(case, help_with):
    """No plan on the front is beaten in memory and time, by any layout; and nothing else is as good at both ends."""
    problem, everything, _ = case
    plan = help_with.found(problem)
    points = np.array([(est.step.seconds.value, est.memory.reserved_bytes) for est in _fitting(everything)])
    for index in plan.pareto:
        seconds, reserved = plan.plans[index].step.seconds.value, plan.plans[index].memory.reserved_bytes
        no_worse = (points[:, 0] <= seconds * (1 + 1e-12)) & (points[:, 1] <= reserved + 1)
        better = (points[:, 0] < seconds * (1 - 1e-12)) | (points[:, 1] < reserved - 1)
        assert not (no_worse & better).any()
    assert min(plan.plans[i].step.seconds.value for i in plan.pareto) == pytest.approx(points[:, 0].min(), rel=1e-12)
    assert min(plan.plans[i].memory.reserved_bytes for i in plan.pareto) == pytest.approx(points[:, 1].min(), abs=1)


def test_a_plan_that_is_not_on_the_front_is_beaten(case, help_with, monkeypatch):
    """However long the front is, of which only some layouts are added to the plans."""
    problem, everything, _ = case
    monkeypatch.setattr(answer, "_PARETO_SHOWN", 2)
    plan = help_with.found(problem, top=10)
    points = [(est.step.seconds.value, est.memory.reserved_bytes) for est in _fitting(everything)]
    for index, shown in enumerate(plan.plans):
        seconds, reserved = shown.step.seconds.value, shown.memory.reserved_bytes
        beaten = any(
            (other < seconds * (1 - 1e-12) and less <= reserved + 1)
            or (other <= seconds * (1 + 1e-12) and less < reserved - 1)
            for other, less in points
        )
        assert beaten == (index not in plan.pareto)


def test_ties_go_to_the_fewest_axes(case, help_with):
    problem, everything, _ = case
    fitting = _fitting(everything)
    best = min(est.step.seconds.value for est in fitting)
    tied = [est for est in fitting if est.step.seconds.value <= best * (1 + problem.runtime.tie_spread)]
    choice = help_with.found(problem).plans[0]
    assert _axes(choice) == min(_axes(est) for est in tied)


def _axes(est) -> int:
    layout = est.layout
    degrees = (layout.tp, layout.cp, layout.pp, layout.vpp, layout.ep, layout.etp)
    hybrid = layout.zero > 0 and layout.dp_replicate > 1
    unusual = layout.tp > 1 and not layout.sequence_parallel
    return sum(degree > 1 for degree in degrees) + hybrid + (layout.recompute.kind != "none") + unusual


@pytest.mark.parametrize("runtime", ["megatron", "torchtitan"])
def test_any_number_of_replicas_gains_nothing(runtime, help_with):
    """The search tries two kinds of hybrid sharding; the loops here try all."""
    cluster = help_with.small_cluster(8, 40.0, gpus_per_node=2)
    problem = help_with.problem_of(help_with.cut("llama-3-8b", 2), cluster, runtime, global_batch=8)
    pins = {"tp": 1, "cp": 1, "pp": 1, "recompute": "none"}
    layouts = [
        Layout(zero=zero, dp_replicate=copies)
        for zero in problem.runtime.zero_stages
        for copies in ((1, 2, 4, 8) if zero else (1,))
    ]
    estimates = [est for est in (help_with.priced(problem, layout) for layout in layouts) if est.fits]
    best = min(est.step.seconds.value for est in estimates)
    plan = help_with.found(problem, pins=pins)
    assert plan.plans[plan.fastest].step.seconds.value == pytest.approx(best, rel=1e-12)
