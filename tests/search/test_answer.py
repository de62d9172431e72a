"""What `plan` answers: counts, pins, objectives, rules, budgets, and refusals of bad input."""

from __future__ import annotations

import json

import pytest

from fivefold.cluster import load_cluster
from fivefold.errors import FivefoldError
from fivefold.model import load_model
from fivefold.search import PIN_NAMES


@pytest.fixture(scope="module")
def dense(help_with):
    """Llama-3-8B on 16 H100s, 8192 tokens x 64."""
    return help_with.problem_of(
        load_model("llama-3-8b"), load_cluster("h100-sxm", gpus=16), seq_len=8192, global_batch=64
    )


@pytest.fixture(scope="module")
def experts(help_with):
    """Mixtral cut to 8 blocks on 16 H100s."""
    model = help_with.cut("mixtral-8x7b", 8)
    return help_with.problem_of(model, load_cluster("h100-sxm", gpus=16), seq_len=4096, global_batch=32)


@pytest.mark.parametrize("objective", ["tokens_per_s", "memory"])
def test_counts_add_up(objective, dense, experts, help_with):
    for problem in (dense, experts):
        plan = help_with.found(problem, objective=objective)
        assert plan.searched >= plan.valid >= plan.fitting > 0
        assert plan.fitting == plan.priced + plan.bounded


@pytest.mark.parametrize("runtime", ["megatron", "torchtitan"])
def test_every_plan_obeys_its_runtime(runtime, dense, experts, help_with):
    for problem in (dense, experts):
        problem = help_with.problem_of(problem.model, problem.cluster, runtime, seq_len=4096, global_batch=32)
        plan = help_with.found(problem, top=10)
        assert plan.plans
        for est in plan.plans:
            assert est.valid and est.violations == () and est.fits


def test_plans_come_fastest_first_after_the_choice_and_differ_in_degrees(dense, help_with):
    plan = help_with.found(dense, top=8)
    times = [est.step.seconds.value for est in plan.plans[1:8]]
    assert times == sorted(times)
    degrees = [(e.layout.tp, e.layout.cp, e.layout.pp, e.layout.ep, e.layout.etp) for e in plan.plans[:8]]
    assert len(set(degrees)) == len(degrees)
    assert plan.plans[0].step.seconds.value <= min(times) * (1 + dense.runtime.tie_spread)


PINS = [
    {"tp": 4},
    {"tp": [2, 4], "pp": 2},
    {"cp": 2, "cp_kind": "a2a"},
    {"zero": 0},
    {"micro_batch": 2},
    {"recompute": "full"},
    {"recompute": "selective", "recompute_modules": ("mlp",)},
    {"pp": 4, "vpp": 2},
    {"pp": 4, "schedule": "1f1b"},
    {"tp": 2, "sequence_parallel": False},
    {"tp": 2, "overlap_tp": True},
    {"pp": 4, "first_stage_layers": 7, "last_stage_layers": 7},
    {"overlap_grad": False},
]


@pytest.mark.parametrize("pins", PINS, ids=str)
def test_pins_are_kept(pins, dense, help_with):
    plan = help_with.found(dense, pins=pins, top=20)
    assert plan.plans
    for est in plan.plans:
        layout = est.layout
        values = {
            **{name: getattr(layout, name) for name in PIN_NAMES if hasattr(layout, name)},
            "recompute": layout.recompute.kind,
            "recompute_modules": layout.recompute.modules,
            "overlap_tp": layout.overlap.tp,
            "overlap_grad": layout.overlap.grad,
            "first_stage_layers": sum(last - first for first, last in layout.stages[0]),
            "last_stage_layers": sum(last - first for first, last in layout.stages[-1]),
        }
        for name, pinned in pins.items():
            allowed = pinned if isinstance(pinned, list) else [pinned]
            assert values[name] in allowed, name


@pytest.mark.parametrize(
    ("pins", "legal"),
    [
        ({"schedule": ["1f1b"], "vpp": [4]}, ["interleaved"]),
        ({"schedule": ["zbv", "dualpipev"], "vpp": [1, 3]}, ["afab", "1f1b", "interleaved", "zb-h1"]),
    ],
)
def test_a_schedule_that_runs_none_of_the_pinned_chunks_is_named(pins, legal, dense, help_with):
    with pytest.raises(FivefoldError, match="does not run --vpp") as caught:
        help_with.found(dense, pins=pins)
    assert (caught.value.option, caught.value.legal) == ("--schedule", legal)


def test_pins_narrow_the_same_space(dense, help_with):
    """The best under a pin that the free optimum obeys is the free optimum."""
    free = help_with.found(dense).plans[0]
    pinned = help_with.found(dense, pins={"tp": free.layout.tp, "cp": free.layout.cp, "pp": free.layout.pp}).plans[0]
    assert pinned.step.seconds.value == pytest.approx(free.step.seconds.value, rel=1e-12)


BAD = [
    ({"pins": {"tpp": 2}}, "unknown-pin"),
    ({"pins": {"tp": []}}, "empty-pin"),
    ({"pins": {"tp": 0}}, "bad-degree"),
    ({"pins": {"tp": "two"}}, "bad-degree"),
    ({"pins": {"tp": True}}, "bad-degree"),
    ({"pins": {"zero": 4}}, "bad-zero"),
    ({"pins": {"schedule": "dualpipe"}}, "unknown-value"),
    ({"pins": {"recompute": "some"}}, "unknown-value"),
    ({"pins": {"cp_kind": "ring"}}, "unknown-value"),
    ({"pins": {"recompute": "selective", "recompute_modules": ("mlpp",)}}, "unknown-value"),
    ({"pins": {"micro_batch": 7}}, "empty-space"),
    ({"pins": {"tp": 5}}, "empty-space"),
    ({"objective": "speed"}, "unknown-objective"),
    ({"objective": "time"}, "missing-option"),
    ({"objective": "cost"}, "missing-option"),
    ({"top": 0}, "bad-top"),
]


@pytest.mark.parametrize(("options", "code"), BAD, ids=[str(options) for options, _ in BAD])
def test_bad_input_is_refused_with_legal_values(options, code, dense, help_with):
    with pytest.raises(FivefoldError) as caught:
        help_with.found(dense, **options)
    assert caught.value.code == code
    assert caught.value.option


@pytest.mark.parametrize(
    ("pins", "why"),
    [({"tp": 16, "cp_kind": "a2a", "cp": 2}, None), ({"schedule": "afab", "pp": 4}, "no schedule afab")],
)
def test_pins_that_no_rule_allows_give_an_answer_without_plans(pins, why, help_with):
    problem = help_with.problem_of(
        load_model("llama-3-8b"), load_cluster("h100-sxm", gpus=32), seq_len=8192, global_batch=64
    )
    plan = help_with.found(problem, pins=pins)
    assert plan.plans == () and plan.valid == 0 and plan.fastest is None
    assert plan.advice and "%" in plan.advice[0]
    assert why is None or why in plan.advice[0]


def test_fewest_gpus_fit_and_fewer_do_not(help_with):
    model = load_model("llama-3-8b")
    problem = help_with.problem_of(model, load_cluster("h100-sxm", gpus=64), seq_len=8192, global_batch=64)
    plan = help_with.found(problem, objective="gpus")
    assert plan.plans and plan.gpus < 64
    for gpus in (n for n in (1, 2, 4, 8, 16, 32) if n < plan.gpus):
        fewer = help_with.problem_of(model, load_cluster("h100-sxm", gpus=gpus), seq_len=8192, global_batch=64)
        assert not help_with.found(fewer).plans


def test_the_lightest_needs_no_more_than_any_other(dense, help_with):
    light, fast = help_with.found(dense, objective="memory"), help_with.found(dense)
    least = light.plans[0].memory.reserved_bytes
    assert all(est.memory.reserved_bytes >= least for est in (*light.plans, *fast.plans))
    assert light.plans[0].step.seconds.value >= fast.plans[fast.fastest].step.seconds.value


def test_budget_is_tokens_over_rate(dense, help_with):
    problem = help_with.problem_of(dense.model, dense.cluster, seq_len=8192, global_batch=64, tokens=1e12, price=2.5)
    for objective in ("time", "cost", "tokens_per_s"):
        plan = help_with.found(problem, objective=objective)
        seconds = 1e12 / (8192 * 64) * plan.plans[0].step.seconds.value
        assert plan.budget.seconds == pytest.approx(seconds)
        assert plan.budget.gpu_hours == pytest.approx(seconds / 3600 * 16)
        assert plan.budget.cost == pytest.approx(seconds / 3600 * 16 * 2.5)
    assert help_with.found(dense).budget is None


def test_json_has_the_contracts_fields(dense, help_with):
    document = json.loads(json.dumps(help_with.found(dense, explain=True).to_dict()))
    assert document["schema"] == "fivefold/1" and document["kind"] == "plan"
    assert {"searched", "valid", "fitting", "priced", "bounded", "plans", "pareto", "why", "inputs"} <= document.keys()
    assert {"dimensions", "neighbours", "playbook", "limits"} <= document["why"].keys()
