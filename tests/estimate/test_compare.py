"""Differences between estimates add up to the difference, and near layouts are called ties."""

from __future__ import annotations

import itertools

import pytest

import fivefold as ff
from fivefold.estimate.compare import compare
from fivefold.estimate.simple_view import simple_view
from fivefold.runtime import load_runtime


def price(gpus: int = 16, gbs: int = 64, **options) -> ff.Estimate:
    cluster = ff.load_cluster("h100-sxm", gpus=gpus)
    work = ff.Workload(seq_len=2048, global_batch=gbs)
    return ff.estimate(ff.load_model("llama-3.2-1b"), cluster, work, ff.Layout(**options))


def test_owners_sum_to_the_whole() -> None:
    a, b = price(tp=2), price(pp=2, recompute=ff.Recompute(kind="full"))
    found = compare(a, b)
    assert a.step and b.step and a.memory and b.memory
    assert sum(row.delta or 0 for row in found.seconds) == pytest.approx(b.step.seconds.value - a.step.seconds.value)
    assert sum(row.delta or 0 for row in found.memory) == b.memory.reserved_bytes - a.memory.reserved_bytes
    assert {row.field for row in found.layout} >= {"tp", "pp", "recompute.kind", "blocks_per_stage"}
    assert found.question == ()


def test_what_differs_by_rounding_does_not_differ() -> None:
    """Transfers between stages are what a pipeline takes beyond one of free transfers; context parallelism of one node
    moves as many bytes as tensor parallelism does."""
    cluster, work = ff.load_cluster("h100-sxm", gpus=64), ff.Workload(seq_len=8192, global_batch=512)
    model = ff.load_model("llama-3-70b")
    rows = []
    for pp, split in itertools.product((2, 4, 8), (1, 2, 4)):
        sides = [ff.estimate(model, cluster, work, ff.Layout(pp=pp, tp=tp, cp=8 // tp)) for tp in (split, 8)]
        rows += [row for row in compare(*sides).seconds if row.field == "pp"]
    assert any(row.a != row.b for row in rows)  # by how sums happen to round
    assert all(row.delta == 0 for row in rows)


def test_sides_swap() -> None:
    a, b = price(tp=1), price(tp=8)
    there, back = compare(a, b), compare(b, a)
    assert (there.faster, back.faster) == ("a", "b")
    assert there.speedup is not None
    assert back.speedup == pytest.approx(1 / there.speedup)


def test_a_layout_ties_with_itself() -> None:
    found = compare(price(), price())
    assert (found.faster, found.layout, found.same_question) == ("tie", (), True)
    assert found.tie_spread == load_runtime("megatron").tie_spread


def test_different_questions_are_said_and_judged_by_their_intervals() -> None:
    found = compare(price(gpus=16), price(gpus=32))
    assert [row.field for row in found.question] == ["gpus"]
    assert found.same_question is False
    assert found.tie_spread > load_runtime("megatron").tie_spread


def test_a_broken_rule_leaves_nothing_to_compare() -> None:
    found = compare(price(), price(tp=3))
    assert (found.faster, found.seconds, found.memory) == (None, (), ())


def test_the_simple_view_is_the_papers_arithmetic() -> None:
    """gpt3-175b, t = 8 with sequence parallelism: Korthikanti et al. 2022's s b h (34 + 5 a s / h) / t."""
    model = ff.load_model("gpt3-175b")
    cluster = ff.load_cluster("a100-80g-sxm", gpus=512)
    work = ff.Workload(seq_len=2048, global_batch=64)
    layout = ff.Layout(tp=8, pp=8)
    estimate = ff.estimate(model, cluster, work, layout)
    rows = {row.quantity: row for row in simple_view(model, cluster, work, layout, "megatron", estimate)}
    s, h, a = 2048, 12288, 96
    layer = s * h * (34 + 5 * a * s / h) / 8
    assert rows["activations of a layer"].simple == pytest.approx(layer)
    assert rows["activations of stage 0"].simple == pytest.approx(layer * 96 / 8 * 8)
    assert rows["bubble over busy time"].simple == pytest.approx((8 - 1) / 8)
    assert rows["FLOPs of a step, noncausal"].simple == pytest.approx(
        rows["FLOPs of a step, noncausal"].exact, rel=0.01
    )
    assert estimate.memory is not None
    assert rows["activations of stage 0"].exact == estimate.memory.stages[0].breakdown["activations"]
    states = ("weights", "gradients", "master", "optimizer")
    peak = estimate.memory.stages[estimate.memory.peak_stage].breakdown
    assert rows["states per GPU"].exact == sum(peak[name] for name in states)
    assert rows["states per GPU"].simple == pytest.approx(estimate.params.total / 64 * (6 + 12 / 8))


@pytest.mark.parametrize(
    ("schedule", "runtime", "cp", "held"), [("afab", "nanotron", 1, 8), ("1f1b", "megatron", 2, 4)]
)
def test_the_simple_view_counts_what_context_parallelism_shards_and_a_schedule_holds(
    schedule, runtime, cp, held
) -> None:
    """tp 2, pp 4 and eight ranks that share an optimizer state on 64 GPUs."""
    model, cluster = ff.load_model("llama-2-7b"), ff.load_cluster("h100-sxm", gpus=64)
    work, layout = ff.Workload(seq_len=4096, global_batch=64), ff.Layout(tp=2, cp=cp, pp=4, schedule=schedule)
    estimate = ff.estimate(model, cluster, work, layout, runtime=runtime)
    assert not estimate.violations
    rows = {row.quantity: row for row in simple_view(model, cluster, work, layout, runtime, estimate)}
    assert rows["states per GPU"].simple == pytest.approx(estimate.params.total / 8 * (6 + 12 / 8))
    layer = rows["activations of a layer"].simple
    assert rows["activations of stage 0"].simple == pytest.approx(layer * 32 / 4 * held)
