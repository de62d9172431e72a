"""Bytes of buffers and of what is gathered, and what an update moves, counted by hand on small models."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from fivefold.layout import Layout

ONE = np.arange(1)
H, FFN, VOCAB = 1024, 4096, 4096
BLOCK = 2 * H + 2 * H * H + H * H + 3 * H * FFN  # two norms, query with half as many keys and values, output, SwiGLU
ENDS = 2 * VOCAB * H + H  # embedding, head, last norm


def test_no_more_is_gathered_ahead_than_a_rank_has(kernel_of):
    """One block and the next; a pipeline rank of one block has no next."""
    whole, staged = (
        kernel_of("llama", [Layout(pp=pp, zero=3)], gpus=32, runtime="torchtitan", every_rank=True) for pp in (1, 16)
    )
    assert whole.rank_memory(ONE)["gathered"][0].tolist() == [2 * 2 * BLOCK]
    gathered = staged.rank_memory(ONE)["gathered"][0]
    assert set(gathered[2:15].tolist()) == {2 * BLOCK}
    assert gathered[15] == 2 * (VOCAB * H + H)


@pytest.mark.parametrize(("grad_dtype", "size"), [("fp32", 4), ("bf16", 2)])
def test_one_whole_gradient_waits_twice_as_computed_and_as_reduced(kernel_of, grad_dtype, size):
    kernel = kernel_of("llama", [Layout(zero=3)], gpus=8, runtime="fsdp", grad_dtype=grad_dtype)
    assert kernel.rank_memory(ONE)["buffers"][0, 0] == (2 + size) * BLOCK


def test_interleaved_stages_receive_ahead(kernel_of):
    """Every stage but the first holds what it received; interleaved, the next activation and gradient too."""
    kernel = kernel_of("llama", [Layout(pp=4), Layout(pp=4, vpp=2)], gpus=4, every_rank=True)
    hidden_state = 2 * 2048 * H
    expected = [[0, 1, 1, 1], [2, 3, 3, 3]]
    assert (kernel.exchange_buffers(np.arange(2)) / hidden_state).tolist() == expected


@pytest.mark.parametrize(
    ("schedule", "vpp", "tensors"), [("zbv", 2, 0), ("dualpipev", 2, 0), ("interleaved", 2, 1), ("1f1b", 1, 1)]
)
def test_a_tied_head_is_summed_unless_a_v_brings_both_ends_together(kernel_of, schedule, vpp, tensors):
    kernel = kernel_of("gpt2", [Layout(pp=2, vpp=vpp, schedule=schedule)], gpus=2)
    assert kernel.tied_bytes(ONE).tolist() == [tensors * 4 * VOCAB * H]


@pytest.mark.parametrize(
    ("runtime", "cleared", "copied", "passed"), [("megatron-fsdp", 1 / 64, 0, 0), ("megatron", 1, 4, 4 + 8)]
)
def test_an_update_moves_states_of_the_shard_and_clears_the_gradients_that_are_held(
    kernel_of, runtime, cleared, copied, passed
):
    """Norm 4; update: gradient 4, master and both moments read and written 24, weight 2; and zeros over gradients.
    Megatron reads the masters again for the weights, looks for numbers that are none and divides by the replicas."""
    layout = Layout(zero=3 if runtime == "megatron-fsdp" else 1)
    kernel = kernel_of("llama", [layout], gpus=64, runtime=runtime)
    held = 16 * BLOCK + ENDS
    moved = (4 + 4 + 2 * (4 + 8) + copied + 2) * held / 64 + (4 * cleared + passed) * held
    curve, gpu = kernel.pricer.curve, kernel.problem.cluster.gpu
    seconds = moved / (gpu.memory_bandwidth_per_s * curve.streaming_efficiency) + 4 * curve.launch_s
    assert kernel.optimizer_seconds(ONE)[0] == pytest.approx(seconds, rel=1e-9)


def test_newton_schulz_by_hand(kernel_of):
    """Five times X Xt, its square, and that times X; X has the fewer rows."""
    kernel = kernel_of("gpt2", [Layout()], gpus=1, optimizer="muon")
    shapes = [(H, 3 * H), (H, H), (H, FFN), (H, FFN)]  # query, key and value as one
    flops = sum(5 * (2 * m * m * n + 2 * m**3 + 2 * m * m * n) for m, n in shapes)
    assert kernel.costs[0].newton_schulz[0] == pytest.approx(flops, rel=1e-9)


@pytest.mark.parametrize(("over", "tp", "sums"), [("all", 2, 2), ("all", 1, 0), ("head", 2, 0)])
def test_a_norm_over_all_heads_sums_over_the_ranks_that_have_some(kernel_of, small, over, tp, sums):
    """One fp32 number a token for queries and one for keys, in both passes."""
    run = small["llama"].runs[0]
    block = replace(run.block, mixer=replace(run.block.mixer, qk_norm=True, qk_norm_over=over))
    model = replace(small["llama"], runs=(replace(run, block=block),))
    rows = kernel_of(model, [Layout(tp=tp)]).ledgers[0].exchanges
    found = [float(np.ravel(row.bytes)[0]) for row in rows if row.name == "qk_norm sums"]
    assert found == [2 * 4 * 2048] * sums
