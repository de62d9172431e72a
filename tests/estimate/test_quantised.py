"""Narrow recipes: which tensors are held in how many bytes, scales included, against sums by hand."""

from __future__ import annotations

import pytest

from fivefold.cluster import load_cluster
from fivefold.estimate import Estimate, estimate
from fivefold.layout import Layout, Workload
from fivefold.model import load_model

# Two copies with their scales: fp8 one scale a tensor; MXFP8 a byte per 32; NVFP4 half a byte and a byte per 16.
COPIES = {"fp8": 2.0, "mxfp8": 2 * 33 / 32, "nvfp4": 2 * (0.5 + 1 / 16)}
INPUT = {"bf16": 2.0, "fp8": 1.0, "mxfp8": 33 / 32, "nvfp4": 0.5625}
EMBEDDING_AND_HEAD = 2 * 128_256 * 4096
NORMS = 65 * 4096


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
