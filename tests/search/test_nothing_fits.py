"""Impossible requests: what is missing, and changes that do help when they are made."""

from __future__ import annotations

import re

import pytest
from msgspec.structs import replace

from fivefold.cluster import load_cluster
from fivefold.estimate import Problem
from fivefold.layout import blocks_per_stage
from fivefold.model import load_model
from fivefold.search.stage_counts import stage_counts


@pytest.fixture(scope="module", params=["llama-3-70b", "llama-3-8b"])
def impossible(request, help_with):
    """70B (or 8B) parameters on one GPU of 24 GB."""
    cluster = load_cluster("rtx-4090", gpus=1)
    problem = help_with.problem_of(load_model(request.param), cluster, seq_len=4096, global_batch=64)
    return problem, help_with.found(problem, explain=True)


def test_there_is_no_plan_but_an_answer(impossible):
    _, plan = impossible
    assert plan.plans == () and plan.pareto == () and plan.fastest is None and plan.why is None
    assert plan.valid > 0 and plan.fitting == plan.priced == 0


def test_the_advice_names_what_is_missing(impossible):
    problem, plan = impossible
    memory = plan.nearest.memory
    over = memory.reserved_bytes - problem.cluster.gpu.memory_bytes
    assert over > 0 and not plan.nearest.fits
    assert f"{over / 1e9:.1f} GB are missing" in plan.advice[0]
    # Mixed precision with Adam and fp32 gradients takes 18 bytes a parameter on one GPU.
    assert memory.reserved_bytes > 18 * plan.nearest.params.total


def _number(pattern: str, advice: tuple[str, ...]) -> int | None:
    found = [re.search(pattern, line) for line in advice]
    return next((int(match[1]) for match in found if match), None)


def test_the_advised_number_of_gpus_fits_and_half_of_it_does_not(impossible, help_with):
    problem, plan = impossible
    gpus = _number(r"--gpus (\d+)", plan.advice)
    assert gpus is not None
    cluster = load_cluster("rtx-4090", gpus=gpus)
    more = Problem(problem.model, cluster, problem.work, problem.runtime)
    assert help_with.found(more).plans
    fewer = Problem(problem.model, load_cluster("rtx-4090", gpus=gpus // 2), problem.work, problem.runtime)
    assert not help_with.found(fewer).plans


def test_the_advised_memory_fits(impossible, help_with):
    problem, plan = impossible
    # Advice is printed to a tenth of a GB; the next tenth is enough for certain.
    match = next(m for m in (re.search(r"at least ([\d.]+) GB", line) for line in plan.advice) if m)
    gpu = replace(problem.cluster.gpu, memory_bytes=int((float(match[1]) + 0.1) * 1e9))
    bigger = Problem(problem.model, replace(problem.cluster, gpu=gpu), problem.work, problem.runtime)
    assert help_with.found(bigger).plans


@pytest.mark.parametrize("runtime", ["megatron", "torchtitan"])
def test_advised_sequence_and_optimizer_fit(runtime, help_with):
    """A problem that misses by little: activations of long sequences."""
    cluster = help_with.small_cluster(8, 13.0)
    problem = help_with.problem_of(help_with.cut("llama-3-8b", 16), cluster, runtime, seq_len=65536, global_batch=8)
    plan = help_with.found(problem)
    assert not plan.plans
    seq = _number(r"--seq (\d+)", plan.advice)
    assert seq is not None
    assert help_with.found(_with_work(problem, seq_len=seq)).plans
    assert not help_with.found(_with_work(problem, seq_len=2 * seq)).plans
    lighter = next((re.search(r"--optimizer (\w+)", line) for line in plan.advice if "--optimizer" in line), None)
    if lighter:
        assert help_with.found(_with_work(problem, optimizer=lighter[1])).plans


def _with_work(problem: Problem, **work) -> Problem:
    return Problem(problem.model, problem.cluster, replace(problem.work, **work), problem.runtime)


def test_more_memory_buys_what_the_limit_says(help_with):
    """The limit on memory: a GPU of that size gives a plan that is at least that much faster."""
    problem = help_with.problem_of(
        load_model("llama-3-8b"), load_cluster("a100-40g-sxm", gpus=16), seq_len=4096, global_batch=64
    )
    plan = help_with.found(problem, explain=True)
    limit = next(x for x in plan.why.limits if x.change.endswith("of memory per GPU"))
    size = float(limit.change.split()[0]) + 0.1
    gpu = replace(problem.cluster.gpu, memory_bytes=int(size * 1e9))
    bigger = Problem(problem.model, replace(problem.cluster, gpu=gpu), problem.work, problem.runtime)
    better = help_with.found(bigger)
    promised = plan.plans[0].step.seconds.value - limit.gain_s
    assert better.plans[better.fastest].step.seconds.value <= promised * (1 + 1e-9)


@pytest.mark.parametrize(
    ("layers", "gpus", "ends"), [(6, 5, {(2, 1), (1, 2)}), (126, 25, {(6, 5), (5, 6)}), (7, 5, None)]
)
def test_blocks_that_are_a_few_too_many_lengthen_an_end(layers: int, gpus: int, ends, help_with):
    """No pipeline over all GPUs is missed because its longest stage would be an end: every count is one by hand."""
    model = help_with.cut("llama-3-8b", layers)
    problem = help_with.problem_of(model, load_cluster("h100-sxm", gpus=gpus), global_batch=gpus)
    counts = stage_counts(problem, gpus, 1)
    assert counts
    if ends is not None:
        assert {each[:2] for each in counts} == ends
    for each in counts:
        blocks = blocks_per_stage(
            layers,
            gpus,
            1,
            each.first_stage_layers or None,
            each.last_stage_layers or None,
            account_for_embedding=bool(each.account_for_embedding),
            account_for_loss=bool(each.account_for_loss),
        )
        assert sum(blocks) == layers and min(blocks[1:-1]) > 0
    assert help_with.found(problem, pins={"pp": gpus}).plans
