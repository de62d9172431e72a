"""Narrow recipes: which tensors are held in how many bytes, scales included, against sums by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from fivefold.cluster import collective_seconds, load_cluster, load_curve_of
from fivefold.estimate import Estimate, Kernel, Problem, estimate
from fivefold.estimate.price import OWNERS
from fivefold.layout import Columns, Layout, Overlap, Workload
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


LINEARS = ((HIDDEN, 2 * HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, 2 * FFN), (FFN, HIDDEN))  # (in, out)
INPUTS, OUTPUTS = (TOKENS * sum(sizes) for sizes in zip(*LINEARS, strict=True))
WEIGHTS = sum(into * out for into, out in LINEARS)


def more_moved(few: Kernel, many: Kernel, side: str) -> tuple[float, float]:
    """Seconds that one kernel's block spends more on memory than another's, and seconds a byte takes there."""
    times = [getattr(k.costs[0], side)[_MEMORY, 0] for k in (few, many)]
    curve, gpu = load_curve_of(many.problem.cluster), many.problem.cluster.gpu
    return times[1] - times[0], curve.in_step / (gpu.memory_bandwidth_per_s * curve.streaming_efficiency)


@pytest.mark.parametrize("compiled", [False, True])
def test_scales_by_row_quantise_both_operands_of_each_product(small, compiled: bool) -> None:
    """Along rows 3 bytes an element, across them 5; the input and the weight in both passes, the gradient twice. What a
    compiler writes transposed takes half as long again, which the largest values before it do not."""
    changes = {"launch_host_s": 0.0, "quantised_gathers": False}
    whole, each = (
        kernel(small["llama"], "fp8", Layout(zero=3), "torchtitan", **on, **changes)
        for on in ({"compiled_casts": False}, {"scaled_by_row": True, "compiled_casts": compiled})
    )
    across = 2 + 1.5 * 3 if compiled else 5
    more = {
        "forward": ((3 - 4) * INPUTS + 3 * WEIGHTS, 4 * (2 - 1)),
        "backward": ((3 + across - 4) * OUTPUTS + across * (INPUTS + WEIGHTS), 4 * (4 - 1)),
    }
    launch_s = load_curve_of(each.problem.cluster).launch_s
    for side, (moved, kernels) in more.items():
        seconds, rate = more_moved(whole, each, side)
        in_step = load_curve_of(each.problem.cluster).in_step
        assert seconds == pytest.approx(moved * rate + in_step * kernels * launch_s), side


@pytest.mark.parametrize("ready", [False, True])
def test_compiled_casts_look_for_the_largest_value_and_turn_operands_for_themselves(small, ready: bool) -> None:
    """torchao: forward reads twice and writes once what it quantises, weights too unless they were gathered so;
    backward turns input and weight, and writes the gradient both ways, half as long again as what is not turned."""
    changes = {"launch_host_s": 0.0, "quantised_parameters": ready}
    fused, apart = (
        kernel(small["llama"], "fp8", Layout(zero=3), "torchtitan", compiled_casts=on, **changes)
        for on in (False, True)
    )
    more = {
        "forward": ((5 - 4) * INPUTS + (0 if ready else 5) * WEIGHTS, 4 * (2 - 1)),
        "backward": ((2 + 1.5 * 4 - 4) * OUTPUTS + 1.5 * 2 * (INPUTS + WEIGHTS), 4 * (4 - 1)),
    }
    curve = load_curve_of(apart.problem.cluster)
    for side, (moved, kernels) in more.items():
        seconds, rate = more_moved(fused, apart, side)
        assert seconds == pytest.approx(moved * rate + curve.in_step * kernels * curve.launch_s), side


def test_parameters_that_are_quantised_before_move_half_as_much(small) -> None:
    """Those of blocks: what lies beside them is gathered in 16 bits."""
    layout = Layout(zero=3, overlap=Overlap(grad=False, param=False))
    plain, narrow = (
        kernel(small["llama"], "fp8", layout, "torchtitan", quantised_parameters=on).variants.gather_forward[0]
        for on in (False, True)
    )
    blocks = len(small["llama"].kinds)
    assert narrow[:blocks] == pytest.approx(plain[:blocks] / 2)
    assert narrow[blocks:] == pytest.approx(plain[blocks:])
    assert np.any(plain[blocks:] > 0)


def test_async_tp_lays_out_what_is_quantised_by_row(small) -> None:
    """Only a product takes the parts of a gather as they come; casts stand between it and that product."""
    layout = Layout(tp=4, micro_batch=2, overlap=Overlap(tp=True))
    taken, laid_out = (
        kernel(small["llama"], "fp8", layout, "torchtitan", quantised_gathers=False, scaled_by_row=on)
        for on in (False, True)
    )

    def copied(found: Kernel) -> dict[str, float]:
        return {row.name: float(np.max(row.copied)) for row, _ in found.costs[0].exchanges if row.when == "forward"}

    assert set(copied(taken).values()) == {0.0}
    whole = 2.0 * 2 * 2 * TOKENS * HIDDEN  # read and written, 2 bytes, two sequences
    by_name = copied(laid_out)
    assert by_name["gather qkv_proj input"] == by_name["gather mlp.fc1 input"] == whole
    assert by_name["scatter out_proj output"] == 0.0


@pytest.mark.parametrize(("by_row", "counts"), [(False, (1 + 1 + 1 + 1, 3 + 2 + 1 + 1)), (True, (2 + 2, 2 * (3 + 2)))])
def test_largest_values_are_reduced_over_the_ranks_that_share_what_is_cast(small, by_row: bool, counts) -> None:
    """torchao: inputs of four projections forward, gradients of seven backward; with a scale for every row those alone
    whose rows lie over the ranks, and likewise weights, a number for every row."""
    k = kernel(small["llama"], "fp8", Layout(tp=4), "torchtitan", scaled_by_row=by_row, quantised_gathers=not by_row)
    found = [(row, seconds) for row, seconds in k.costs[0].exchanges if row.name.startswith("largest values")]
    assert tuple(sum(row.times for row, _ in found if row.when == side) for side in ("forward", "backward")) == counts
    for row, seconds in found:
        size = 4.0 * (TOKENS if by_row else 1)
        once = collective_seconds(k.problem.cluster, "all_reduce", size, k.pricer.placements["tp"])
        assert seconds == pytest.approx(row.times * k.problem.runtime.tp_in_step * once)
    fused = kernel(small["llama"], "fp8", Layout(tp=4), "megatron")
    assert not [row for row, _ in fused.costs[0].exchanges if row.name.startswith("largest values")]
