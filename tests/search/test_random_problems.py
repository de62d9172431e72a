"""Random small problems: the search answers or refuses with a sentence, and what it answers is consistent."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fivefold.errors import FivefoldError

MODELS = {
    "llama": ("llama-3-8b", 3),
    "gpt2": ("gpt2", 4),
    "mixtral": ("mixtral-8x7b", 2),
    "latent": ("deepseek-v2-lite", 3),
    "mtp": ("deepseek-v3", 4),
    "windowed": ("mistral-7b-v0.1", 3),
}
GPUS = ("h100-sxm", "a100-40g-sxm", "mi300x", "gb200-nvl72", "l4")


@st.composite
def problems(draw):
    """(model, gpu, gpus, gpus_per_node or None, work, runtime, pins)."""
    gpus = draw(st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 20, 24]))
    nodes = [n for n in range(1, gpus + 1) if gpus % n == 0]
    pins: dict = {}
    if draw(st.booleans()):
        name = draw(st.sampled_from(["tp", "cp", "pp", "ep", "zero", "micro_batch", "vpp"]))
        pins[name] = draw(st.sampled_from([1, 2, 3, 4]))
    if draw(st.booleans()):
        pins["recompute"] = draw(st.sampled_from(["none", "selective", "full"]))
    return (
        draw(st.sampled_from(sorted(MODELS))),
        draw(st.sampled_from(GPUS)),
        gpus,
        draw(st.sampled_from(nodes)),
        {
            "seq_len": draw(st.sampled_from([128, 777, 1024, 2048, 8192])),
            "global_batch": draw(st.integers(1, 48)),
            "precision": draw(st.sampled_from(["bf16", "bf16", "fp8"])),
            "optimizer": draw(st.sampled_from(["adamw", "adamw", "sgd", "muon", "adafactor"])),
        },
        draw(st.sampled_from(["megatron", "torchtitan"])),
        pins,
    )


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=problems(), explain=st.booleans(), objective=st.sampled_from(["tokens_per_s", "memory", "gpus"]))
def test_every_problem_has_an_answer(case, explain, objective, help_with):
    name, gpu, gpus, per_node, work, runtime, pins = case
    try:
        cluster = help_with.small_cluster(gpus, 40.0, gpu, gpus_per_node=per_node)
        problem = help_with.problem_of(help_with.cut(*MODELS[name]), cluster, runtime, **work)
        plan = help_with.found(problem, pins=pins, explain=explain, objective=objective)
    except FivefoldError as error:
        assert str(error) and error.code
        return
    assert plan.searched >= plan.valid >= plan.fitting == plan.priced + plan.bounded
    assert bool(plan.plans) == (plan.fitting > 0)
    for est in plan.plans:
        assert est.valid and est.fits and est.violations == ()
        for option, value in pins.items():
            found = est.layout.recompute.kind if option == "recompute" else getattr(est.layout, option)
            assert found == value
    if not plan.plans:
        assert plan.advice
    front = [(plan.plans[i].step.seconds.value, plan.plans[i].memory.reserved_bytes) for i in plan.pareto]
    for seconds, reserved in front:
        assert not any(
            (other <= seconds * (1 + 1e-11) and less < reserved) or (other < seconds * (1 - 1e-11) and less <= reserved)
            for other, less in front
        )
    plan.to_dict()


@pytest.mark.parametrize("gpus", [7, 9, 13, 20])
def test_odd_numbers_of_gpus_have_a_plan(gpus, help_with):
    """Primes and counts that are no multiple of a node, with batches that divide them."""
    cluster = help_with.small_cluster(gpus, 80.0)
    problem = help_with.problem_of(help_with.cut("llama-3-8b", 4), cluster, global_batch=5 * gpus)
    assert help_with.found(problem, explain=True).plans
