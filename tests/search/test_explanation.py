"""Reasons: every number in them is a difference of two estimates that anybody can make."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from fivefold.cluster import load_cluster
from fivefold.estimate import Kernel, Problem
from fivefold.layout import Columns, Layout, Overlap, Recompute
from fivefold.model import load_model

replace = msgspec.structs.replace

PROBLEMS = {
    "dense": ("llama-3-8b", "h100-sxm", 16, "megatron", {"seq_len": 8192, "global_batch": 64}, {}),
    "large": ("llama-3-70b", "h100-sxm", 64, "megatron", {"seq_len": 8192, "global_batch": 128}, {}),
    "experts": ("mixtral-8x7b", "h100-sxm", 32, "megatron", {"seq_len": 4096, "global_batch": 64}, {}),
    "pinned": ("llama-3-8b", "a100-80g-sxm", 16, "megatron", {"seq_len": 4096, "global_batch": 64}, {"tp": 4, "pp": 2}),
    "fsdp": ("llama-3-8b", "h100-sxm", 32, "torchtitan", {"seq_len": 8192, "global_batch": 64}, {}),
    "uneven": ("deepseek-v2-lite", "h100-sxm", 16, "megatron", {"seq_len": 4096, "global_batch": 64}, {"pp": 4}),
}


@pytest.fixture(scope="module", params=PROBLEMS)
def answer(request, help_with):
    """(problem, its plan with reasons)."""
    model, gpu, gpus, runtime, work, pins = PROBLEMS[request.param]
    problem = help_with.problem_of(load_model(model), load_cluster(gpu, gpus=gpus), runtime, **work)
    return problem, help_with.found(problem, explain=True, pins=pins)


def _layout(fields: dict[str, Any]) -> Layout:
    return msgspec.convert(fields, Layout)


def _chosen(plan) -> Layout:
    """The choice as the user would write it."""
    return _layout(plan.plans[0].inputs["layout"])


def test_neighbours_are_differences_of_estimates(answer, help_with):
    problem, plan = answer
    best = plan.plans[0]
    assert len(plan.why.neighbours) >= 5
    for near in plan.why.neighbours:
        est = help_with.priced(problem, _layout(near.options))
        assert est.valid == (near.reason != "rule"), near.change
        if near.reason == "rule":
            assert near.message == est.violations[0].message
            continue
        assert near.delta_s == pytest.approx(est.step.seconds.value - best.step.seconds.value, rel=1e-9, abs=1e-12)
        assert est.fits == (near.reason == "slower")
        if near.reason == "memory":
            over = est.memory.reserved_bytes - est.memory.capacity_bytes
            assert near.over_bytes == pytest.approx(over, abs=8)
            assert near.stage == est.memory.peak_stage


def test_a_faster_neighbour_is_only_a_tie(answer):
    """What is faster and fits lies within the tie interval, unless pins exclude it."""
    problem, plan = answer
    if plan.inputs["pins"]:
        pytest.skip("pins exclude faster neighbours")
    for near in plan.why.neighbours:
        if near.reason == "slower":
            seconds = plan.plans[0].step.seconds.value
            assert near.delta_s >= -seconds * problem.runtime.tie_spread * (1 + 1e-9)


def test_neighbours_change_one_thing(answer):
    """The layout differs from the choice in the option that is named, and in what follows from it."""
    _, plan = answer
    chosen = msgspec.to_builtins(_chosen(plan))
    follows = {
        "cp": {"cp_kind"},
        "tp": {"sequence_parallel", "etp"},
        "pp": {
            "vpp",
            "schedule",
            "first_stage_layers",
            "last_stage_layers",
            "account_for_embedding",
            "account_for_loss",
        },
        "vpp": {"schedule"},
        "zero": {"overlap", "dp_replicate"},
    }
    for near in plan.why.neighbours:
        name = near.change.split()[0]
        changed = {field for field, value in near.options.items() if chosen[field] != value}
        assert name in changed and changed - {name} <= follows.get(name, set()), near.change


@pytest.mark.parametrize(
    ("model", "layers", "gpus", "pins", "change", "chosen"),
    [
        ("llama-3-8b", 10, 12, {"pp": 3}, "pp 3 -> 6", {"account_for_embedding": True, "account_for_loss": True}),
        ("llama-3-8b", 7, 20, {"pp": 5}, "pp 5 -> 10", None),
        ("gemma-2-9b", 4, 8, {"cp": 1}, "cp 1 -> 2", {"cp_kind": "a2a"}),
    ],
)
def test_a_degree_comes_with_what_the_search_chooses_for_it(model, layers, gpus, pins, change, chosen, help_with):
    """Blocks that do not divide and a window that refuses the ring: the search has layouts with both degrees, none with
    more stages than blocks and ends."""
    problem = help_with.problem_of(
        help_with.cut(model, layers), load_cluster("h100-sxm", gpus=gpus), global_batch=12 * gpus
    )
    near = {each.change: each for each in help_with.found(problem, explain=True, pins=pins).why.neighbours}[change]
    assert (near.reason == "rule") == (chosen is None)
    assert chosen is None or {name: near.options[name] for name in chosen} == chosen


# What taking a dimension away means, written down a second time.
_WITHOUT: dict[str, dict[str, Any]] = {
    "tp": {"tp": 1, "etp": 1, "sequence_parallel": None},
    "cp": {"cp": 1},
    "pp": {
        "pp": 1,
        "vpp": 1,
        "schedule": None,
        "first_stage_layers": None,
        "last_stage_layers": None,
        "account_for_embedding": False,
        "account_for_loss": False,
    },
    "vpp": {"vpp": 1, "schedule": None},
    "ep": {"ep": 1},
    "etp": {"etp": 1},
    "dp_replicate": {"dp_replicate": 1},
    "sequence_parallel": {"sequence_parallel": False},
    "recompute": {"recompute": Recompute()},
    "zero": {"zero": 0, "dp_replicate": 1, "overlap": Overlap()},
}


def test_dimensions_are_differences_of_estimates(answer, help_with):
    problem, plan = answer
    best, chosen = plan.plans[0], _chosen(plan)
    assert plan.why.dimensions
    for effect in plan.why.dimensions:
        outcomes = [
            help_with.priced(problem, replace(chosen, **_WITHOUT[effect.axis], micro_batch=size))
            for size in (chosen.micro_batch, *(n for n in (8, 4, 2, 1) if n < chosen.micro_batch))
        ]
        est = next((each for each in outcomes if each.valid), None)
        if est is None:
            assert effect.saves_bytes is None and effect.costs_s is None
            continue
        costs = best.step.seconds.value - est.step.seconds.value
        assert effect.costs_s == pytest.approx(costs, rel=1e-9, abs=1e-9)
        assert effect.saves_bytes == pytest.approx(est.memory.reserved_bytes - best.memory.reserved_bytes, abs=8)
        assert ("does not fit" in effect.message) == (not est.fits)


def test_every_active_axis_is_explained(answer):
    _, plan = answer
    layout = plan.plans[0].layout
    explained = {effect.axis for effect in plan.why.dimensions}
    active = {axis for axis in ("tp", "cp", "pp", "vpp", "ep", "etp") if getattr(layout, axis) > 1}
    assert active <= explained
    assert ("recompute" in explained) == (layout.recompute.kind != "none")
    assert ("zero" in explained) == (layout.zero > 0)


def test_limits_are_differences_of_estimates(answer, help_with):
    problem, plan = answer
    seconds, chosen = plan.plans[0].step.seconds.value, _chosen(plan)
    by_change = {limit.change: limit.gain_s for limit in plan.why.limits}
    for link in problem.cluster.links:
        gain = by_change.get(f"twice the bandwidth of {link.name}")
        if gain is None:
            continue
        links = [replace(x, bandwidth_per_s=2 * x.bandwidth_per_s) if x is link else x for x in problem.cluster.links]
        faster = Problem(problem.model, replace(problem.cluster, links=tuple(links)), problem.work, problem.runtime)
        assert gain == pytest.approx(seconds - help_with.priced(faster, chosen).step.seconds.value, abs=1e-9)
    more = replace(problem.work, global_batch=2 * problem.work.global_batch)
    doubled = help_with.priced(Problem(problem.model, problem.cluster, more, problem.runtime), chosen)
    gain = by_change["twice the global batch (per the same number of tokens)"]
    assert gain == pytest.approx(seconds - doubled.step.seconds.value / 2, abs=1e-9)
    gain = next((gain for change, gain in by_change.items() if "host" in change), None)
    assert (gain is None) == (plan.plans[0].step.breakdown_s["host"] == 0)
    if gain is not None:
        launched = replace(problem.runtime, launch_host_s=0.0)
        kernel = Kernel(
            Problem(problem.model, problem.cluster, problem.work, launched),
            Columns.from_layouts([chosen], problem.cluster.gpus, problem.work),
        )
        assert gain == pytest.approx(seconds - float(kernel.step_seconds(np.arange(1))[0]), abs=1e-9)


def test_the_playbook_ends_in_a_valid_layout(answer, help_with):
    problem, plan = answer
    book = plan.why.playbook
    assert book.path[0].rule_id == "dp-first"
    assert book.estimate is not None and book.estimate.valid
    again = help_with.priced(problem, _layout(book.estimate.inputs["layout"]))
    assert again.memory.reserved_bytes == book.estimate.memory.reserved_bytes
    assert book.path[-1].reserved_bytes == pytest.approx(book.estimate.memory.reserved_bytes, abs=8)
    if book.estimate.fits:
        gap = again.step.seconds.value - plan.plans[0].step.seconds.value
        assert book.gap_s == pytest.approx(gap, abs=1e-9)
    else:
        assert book.gap_s is None


def test_the_search_is_not_behind_the_playbook(answer):
    """Rules of thumb can tie with the choice, never beat it by more than the tie interval, unless pins bind."""
    problem, plan = answer
    gap = plan.why.playbook.gap_s
    if gap is None or plan.inputs["pins"]:
        pytest.skip("nothing to compare")
    assert gap >= -plan.plans[0].step.seconds.value * problem.runtime.tie_spread


def test_a_degree_that_the_rules_of_thumb_do_not_find_is_not_called_chosen(help_with):
    """Seven GPUs that are too small: no power of two divides them."""
    problem = help_with.problem_of(
        help_with.cut("llama-3-8b", 28), help_with.small_cluster(7, 40.0), seq_len=1024, global_batch=28
    )
    path = help_with.found(problem, explain=True, pins={"pp": 7}).why.playbook.path
    said = {step.rule_id: step.decision for step in path}
    for axis, rule_id in (("tp", "tp-inside-domain"), ("pp", "pp-across-nodes")):
        assert said[rule_id].startswith(f"no power of two above 1 is legal for {axis} here")
