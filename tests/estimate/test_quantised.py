"""Narrow recipes: which tensors are held in how many bytes, scales included, against sums by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from fivefold.cluster import load_cluster, load_curve_of
from fivefold.estimate import Estimate, Kernel, Problem, estimate
from fivefold.estimate.price import OWNERS
from fivefold.layout import Columns, Layout, Workload
from fivefold.model import load_model
from fivefold.runtime import load_runtime

# Two copies with their scales: fp8 one scale a tensor; MXFP8 a byte per 32; NVFP4 half a byte and a byte per 16.
COPIES = {"fp8": 2.0, "mxfp8": 2 * 33 / 32, "nvfp4": 2 * (0.5 + 1 / 16)}
INPUT = {"bf16": 2.0, "fp8": 1.0, "mxfp8": 33 / 32, "nvfp4": 0.5625}
EMBEDDING_AND_HEAD = 2 * 128_256 * 4096
NORMS = 65 * 4096
_MEMORY = OWNERS.index("memory")


def priced(precision: str, **how) -> Estimate:
    work = Workload(seq_len=8192, global_batch=8, precision=precision)  # type: ignore[arg-type]
    return estimate(load_model("llama-3-8b"), load_cluster("b200", gpus=8), work, Layout(**how))


@pytest.mark.parametrize("precision", [*COPIES])
def test_blocks_have_copies_and_the_ends_do_not(precision: str) -> None:
    found = priced(precision)
    assert found.memory
    total = 8_030_261_248
    matrices = total - EMBEDDING_AND_HEAD - NORMS
    by_hand = 2 * total + COPIES[precision] * matrices
    assert found.memory.stages[0].breakdown.weights == pytest.approx(by_hand, rel=1e-9)


@pytest.mark.parametrize("precision", [*COPIES])
def test_saved_inputs_of_linears_are_narrow(precision: str) -> None:
    """Per token of a Llama block: outputs of two norms and the activation's, 4096 + 4096 + 14,336 elements."""
    plain, narrow = priced("bf16"), priced(precision)
    assert plain.memory and narrow.memory
    less = plain.memory.stages[0].breakdown.activations - narrow.memory.stages[0].breakdown.activations
    by_hand = 32 * 8192 * (4096 + 4096 + 14_336) * (INPUT["bf16"] - INPUT[precision])
    assert less == pytest.approx(by_hand, rel=1e-6)


def test_the_head_and_attention_stay_in_sixteen_bits() -> None:
    times = {precision: priced(precision) for precision in ("bf16", "mxfp8")}
    assert times["mxfp8"].step and times["bf16"].step
    assert times["mxfp8"].step.breakdown_s.compute > times["bf16"].step.breakdown_s.compute / 2


TOKENS, HIDDEN, FFN = 2048, 1024, 4096


def kernel(model, precision: str, layout: Layout, runtime: str = "megatron", **changes: Any) -> Kernel:
    work = Workload(seq_len=TOKENS, global_batch=8, precision=precision)  # type: ignore[arg-type]
    cluster, profile = load_cluster("b200", gpus=8), replace(load_runtime(runtime), **changes)
    return Kernel(Problem(model, cluster, work, profile), Columns.from_layouts([layout], 8, work))


def gathered(k: Kernel) -> dict[str, float]:
    rows = [row for row in k.ledgers[0].exchanges if row.op == "all_gather"]
    return {f"{row.name} {row.when}": float(np.ravel(row.bytes)[0]) for row in rows}


@pytest.mark.parametrize("precision", [*COPIES])
def test_what_sequence_parallelism_gathers_is_quantised_first(small, precision: str) -> None:
    found = gathered(kernel(small["llama"], precision, Layout(tp=4)))
    assert len(found) == 6  # two inputs, each in both passes, and two gradients
    assert set(found.values()) == {INPUT[precision] * TOKENS * HIDDEN}
    assert set(gathered(kernel(small["llama"], "bf16", Layout(tp=4))).values()) == {2 * TOKENS * HIDDEN}
    late = kernel(small["llama"], precision, Layout(tp=4), quantised_gathers=False)
    assert set(gathered(late).values()) == {2 * TOKENS * HIDDEN}


def test_the_head_is_gathered_in_sixteen_bits(small) -> None:
    k = kernel(small["llama"], "fp8", Layout(tp=4))
    head = [row for row in k.ledgers[k.blocks + 1].exchanges if row.op == "all_gather"]
    assert {float(np.ravel(row.bytes)[0]) for row in head} == {2 * TOKENS * HIDDEN}


@pytest.mark.parametrize(("precision", "alone", "share", "whole"), [("fp8", 4, 3, 2), ("mxfp8", 6, 6, 0)])
def test_a_gathered_operand_is_quantised_by_its_ranks_together(small, precision, alone, share, whole) -> None:
    """Two operands of the hidden size each way are gathered in a block; only casts differ in memory-bound work."""
    early, late = (
        kernel(small["llama"], precision, Layout(tp=4), quantised_gathers=on, launch_host_s=0.0) for on in (True, False)
    )
    cluster = early.problem.cluster
    curve, gpu = load_curve_of(cluster), cluster.gpu
    less = 2 * (alone - whole - share / 4) * TOKENS * HIDDEN
    by_hand = curve.in_step * less / (gpu.memory_bandwidth_per_s * curve.streaming_efficiency)
    for side in ("forward", "backward"):
        times = [getattr(k.costs[0], side)[_MEMORY, 0] for k in (late, early)]
        assert times[0] - times[1] == pytest.approx(by_hand), side


def test_without_sequence_parallelism_nothing_is_gathered_quantised(small) -> None:
    layout = Layout(tp=4, sequence_parallel=False)
    early, late = (kernel(small["llama"], "fp8", layout, quantised_gathers=on) for on in (True, False))
    assert np.all(early.costs[0].forward == late.costs[0].forward)


def test_scales_by_row_quantise_both_operands_of_each_product(small) -> None:
    """Along rows 3 bytes an element, across them 5; the input and the weight in both passes, the gradient twice."""
    changes = {"launch_host_s": 0.0, "quantised_gathers": False}
    once, each = (
        kernel(small["llama"], "fp8", Layout(zero=3), "torchtitan", scaled_by_row=on, **changes) for on in (False, True)
    )
    curve, gpu = load_curve_of(each.problem.cluster), each.problem.cluster.gpu
    linears = ((HIDDEN, 2 * HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, 2 * FFN), (FFN, HIDDEN))  # (in, out)
    inputs, outputs = (TOKENS * sum(sizes) for sizes in zip(*linears, strict=True))
    weights = sum(into * out for into, out in linears)
    rate = gpu.memory_bandwidth_per_s * curve.streaming_efficiency
    more = {
        "forward": ((3 - 4) * inputs + 3 * weights, 4 * (2 - 1)),
        "backward": ((8 - 4) * outputs + 5 * inputs + 5 * weights, 4 * (4 - 1)),
    }
    for side, (moved, kernels) in more.items():
        times = [getattr(k.costs[0], side)[_MEMORY, 0] for k in (once, each)]
        by_hand = curve.in_step * (moved / rate + kernels * curve.launch_s)
        assert times[1] - times[0] == pytest.approx(by_hand), side
