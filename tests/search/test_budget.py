"""The wall clock of a run against a simulation of failures, and against the run that the defaults come from."""

from __future__ import annotations

import random

import pytest

from fivefold.cluster import load_cluster
from fivefold.estimate import estimate
from fivefold.layout import Layout, Workload
from fivefold.model import load_model
from fivefold.search.budget import GPU_MTBF_HOURS, best_interval, budget_of, checkpoint_bytes, goodput, reliability


def simulated(interval_s: float, write_s: float, restart_s: float, mtbf_s: float, segments: int) -> float:
    """Goodput of a run of many checkpoints, failure by failure."""
    draw = random.Random(7)
    now, left = 0.0, segments
    next_failure = draw.expovariate(1 / mtbf_s)

    def passes(length: float) -> bool:
        nonlocal now, next_failure
        if now + length <= next_failure:
            now += length
            return True
        now = next_failure
        next_failure = now + draw.expovariate(1 / mtbf_s)
        return False

    while left:
        if passes(interval_s + write_s):
            left -= 1
            continue
        while not passes(restart_s):
            pass
    return segments * interval_s / now


@pytest.mark.parametrize(
    ("write_s", "restart_s", "mtbf_s"), [(3.0, 600.0, 11_000.0), (120.0, 300.0, 3_000.0), (30.0, 60.0, 100_000.0)]
)
def test_goodput_is_what_a_simulation_of_failures_gives(write_s: float, restart_s: float, mtbf_s: float) -> None:
    interval_s = best_interval(write_s, mtbf_s)
    expected = goodput(interval_s, write_s, restart_s, mtbf_s)
    assert simulated(interval_s, write_s, restart_s, mtbf_s, 60_000) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("write_s", [3.0, 60.0, 400.0])
def test_no_other_interval_is_better(write_s: float) -> None:
    mtbf_s = 4_000.0
    best = best_interval(write_s, mtbf_s)
    mine = goodput(best, write_s, 300.0, mtbf_s)
    others = [goodput(best * share, write_s, 300.0, mtbf_s) for share in (0.25, 0.5, 0.8, 1.25, 2, 4)]
    assert mine > max(others)


def test_the_run_that_the_defaults_come_from() -> None:
    """Llama 3 405B on 16,384 GPUs: 419 failures in 54 days, "more than 90%" of the time training."""
    work = Workload(seq_len=8192, global_batch=2048, tokens=1e12)
    days = 54 * 86_400
    wall = reliability(work, 405_000_000_000, days, 16_384, 2_048)
    assert wall.failures * days / wall.seconds == pytest.approx(419, rel=0.02)
    assert 0.90 < wall.goodput < 0.95
    assert wall.gpu_mtbf_hours == GPU_MTBF_HOURS and set(wall.sources) == {
        "gpu_mtbf_hours", "checkpoint_bytes_per_s", "restart_s"
    }  # fmt: skip


def test_what_is_given_replaces_the_defaults_and_counts() -> None:
    model, cluster = load_model("llama-3-8b"), load_cluster("h100-sxm", gpus=64)
    common = {"seq_len": 8192, "global_batch": 512, "tokens": 15e12, "price": 2.0}
    layout = Layout(tp=2)
    usual = estimate(model, cluster, Workload(**common), layout)
    given = Workload(**common, gpu_mtbf_hours=5_000, checkpoint_bytes_per_s=1e9, restart_s=1_800)
    worse = estimate(model, cluster, given, layout)
    a, b = budget_of(Workload(**common), usual), budget_of(given, worse)
    assert a and b and a.reliability and b.reliability
    assert a.seconds == b.seconds  # the training itself is the same
    assert b.reliability.goodput < a.reliability.goodput < 1
    assert b.reliability.cost == pytest.approx(b.reliability.gpu_hours * 2.0)
    assert b.reliability.seconds == pytest.approx(b.seconds / b.reliability.goodput)
    assert (
        b.reliability.checkpoint_bytes == checkpoint_bytes(given, model_total := usual.params.total) == model_total * 14
    )
    assert not b.reliability.sources
