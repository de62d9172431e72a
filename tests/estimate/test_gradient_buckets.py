"""Which gradients are reduced together: dense ones and those of experts, framework by framework."""

from __future__ import annotations

import math

import numpy as np
import pytest
from msgspec.structs import replace

from fivefold.cluster import collective_seconds
from fivefold.cluster.beside import WAITED
from fivefold.estimate import Kernel, Problem
from fivefold.layout import Layout

ONE = np.arange(1)
BUCKET = 40_000_000


def one(kernel: Kernel, op: str, size: float, expert: int) -> float:
    """Seconds of one collective over the ranks that share dense parameters, or an expert."""
    groups = kernel.groups(ONE)
    where = (groups.dense, groups.expert)[expert]
    return float(np.ravel(collective_seconds(kernel.problem.cluster, op, np.array([size]), where))[0])


@pytest.mark.parametrize("shared", [False, True])
def test_experts_fill_buckets_of_their_own_or_those_of_all(kernel_of, shared):
    """Megatron-Core: 58M dense parameters and 101M of experts are 2 and 3 buckets of 40M. DeepSpeed: 4 of both."""
    usual = kernel_of("mixtral", [Layout(ep=8)], gpus=16)
    problem = usual.problem
    runtime = replace(problem.runtime, shared_buckets=(1,) if shared else ())
    kernel = Kernel(Problem(problem.model, problem.cluster, problem.work, runtime), usual.columns)
    sizes = [float(each[0, 0]) for each in kernel.rank_parameters(ONE)]
    buckets = [sum(sizes) / BUCKET] * 2 if shared else [size / BUCKET for size in sizes]
    assert [math.ceil(each) for each in buckets] == ([4, 4] if shared else [2, 3])
    forward, backward = (float(part[0, 0]) for part in kernel.pass_seconds(ONE))
    expected = 0.0
    for op, width, passing in (("reduce_scatter", 4, backward), ("all_gather", 2, forward)):
        seconds = last = 0.0
        for expert, (size, count) in enumerate(zip(sizes, buckets, strict=True)):
            seconds += math.ceil(count) * one(kernel, op, width * size / math.ceil(count), expert)
            last += one(kernel, op, width * size / count, expert)
        expected += last + max(seconds - last - passing, WAITED * (seconds - last))
    assert kernel.exposed_reduction_seconds(ONE)[0] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("runtime", "ep", "apart"), [
    ("torchtitan", 1, False), ("torchtitan", 4, True), ("deepspeed-zero", 1, False), ("megatron-fsdp", 1, True),
])  # fmt: skip
def test_experts_that_are_not_spread_may_be_gathered_with_their_block(kernel_of, runtime, ep, apart):
    """torchtitan makes experts a unit of their own with expert parallelism alone, Megatron-FSDP always."""
    kernel = kernel_of("mixtral", [Layout(ep=ep, zero=3)], runtime=runtime)
    dense, expert = (float(each[0, 0]) for each in (kernel.variants.dense, kernel.variants.expert))
    alone = [(dense, 0), (expert, 1)] if apart else [(dense + expert, 0)]
    for op, width, seconds in zip(("reduce_scatter", "all_gather"), (4, 2), kernel.unit_seconds, strict=True):
        expected = sum(one(kernel, op, width * size, expert) for size, expert in alone)
        assert seconds[0, 0] == pytest.approx(expected, rel=1e-12)
