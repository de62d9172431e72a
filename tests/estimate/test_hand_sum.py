"""Llama-3-8B on 8 A100-PCIe, summed by hand: every tensor of both pipeline stages, to the byte.

The arithmetic below takes the model's sizes from its config.json (meta-llama/Meta-Llama-3-8B) and nothing from
fivefold. The outside value is second-hand: 51.4 GiB is what a published relative error of another estimator implies
for an A100 run of this job; 45.7 GiB on the last stage is that estimator's own structure, not a measurement.
"""

from __future__ import annotations

import pytest

GIB = 1024**3
MIB = 1024**2

# meta-llama/Meta-Llama-3-8B config.json
H, LAYERS, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB = 4096, 32, 32, 8, 128, 14336, 128256
PP, DP, S, MBS = 2, 4, 4096, 1
T = S * MBS  # tokens of a micro-batch on a rank
BLOCKS = LAYERS // PP

Q = HEADS * HEAD_DIM
KV = KV_HEADS * HEAD_DIM
QKV_PROJ = H * (Q + 2 * KV)
OUT_PROJ = Q * H
FC1 = H * 2 * FFN
FC2 = FFN * H
BLOCK_PARAMS = 2 * H + QKV_PROJ + OUT_PROJ + FC1 + FC2
PADDED_VOCAB = -(-VOCAB // 128) * 128  # Megatron pads to 128 x tp; 128256 is 1002 x 128 already
EMBEDDING = PADDED_VOCAB * H

STAGE_PARAMS = (BLOCKS * BLOCK_PARAMS + EMBEDDING, BLOCKS * BLOCK_PARAMS + H + EMBEDDING)
IN_FLIGHT = (2, 1)  # 1F1B on two ranks

SAVED_PER_BLOCK = {
    "input of the first norm": 2 * T * H,
    "output of the first norm, input of the QKV projection": 2 * T * H,
    "queries, keys, values as attention reads them": 2 * T * (Q + 2 * KV),
    "output of attention, input of the output projection": 2 * T * Q,
    "log-sum-exp of attention, fp32": 4 * T * HEADS,
    "input of the second norm": 2 * T * H,
    "output of the second norm, input of fc1": 2 * T * H,
    "output of fc1: gate and up": 2 * T * 2 * FFN,
    "product of activated gate and up, input of fc2": 2 * T * FFN,
}
# Backward of a block beyond what is saved: gradient of the block's output and of both halves of fc1's output.
MLP_BACKWARD = 2 * T * H + 2 * T * 2 * FFN
# Or, later: gradients of attention's output and of queries (both q wide), of keys and values, of the residual.
ATTENTION_BACKWARD = 2 * T * (2 * Q + 2 * KV) + 2 * T * H
HEAD_SAVED = {"input of the final norm": 2 * T * H, "its output, input of the head": 2 * T * H}
# Loss: logits in bf16 with their fp32 copy. Head backward: gradient of logits, of the weight (placeholder), of input.
LOGITS = max((2 + 4) * T * PADDED_VOCAB, 2 * T * PADDED_VOCAB + 2 * PADDED_VOCAB * H + 2 * T * H)
RECEIVED = 2 * T * H  # the activation that every stage but the first receives
BUFFERS = {
    "one bf16 placeholder per weight shape": 2 * (QKV_PROJ + OUT_PROJ + FC1 + FC2),
}
WORKSPACE = 60 * MIB  # fitted constant of the Megatron profile


def by_hand(stage: int) -> dict[str, int]:
    """The breakdown of one pipeline rank, bytes."""
    params = STAGE_PARAMS[stage]
    activations = IN_FLIGHT[stage] * BLOCKS * sum(SAVED_PER_BLOCK.values())
    logits = 0
    if stage == PP - 1:
        activations += sum(HEAD_SAVED.values())
        logits = LOGITS
    working = max(MLP_BACKWARD, ATTENTION_BACKWARD)
    if working > logits:
        activations, logits = activations + working, 0
    return {
        "weights": 2 * params,
        "gradients": 4 * params,
        "master": 4 * params // DP,
        "optimizer": 8 * params // DP,
        "activations": activations,
        "logits": logits,
        "gathered": 0,
        "buffers": sum(BUFFERS.values()) + (RECEIVED if stage else 0),
        "reserve": WORKSPACE,
    }


@pytest.fixture(scope="module")
def est(price):
    from fivefold.layout import Layout
    from fivefold.model import load_model

    return price(load_model("llama-3-8b"), Layout(pp=PP), gpu="a100-80g-pcie", gpus=8, seq_len=S, global_batch=32)


def test_the_layout_is_the_one_summed(est):
    assert (est.layout.dp, est.layout.num_micro_batches, est.layout.zero) == (DP, 8, 1)
    assert est.layout.stages == (((0, 16),), ((16, 32),))


@pytest.mark.parametrize("stage", range(PP))
def test_every_category_to_the_byte(est, stage):
    found = est.memory.stages[stage]
    assert found.breakdown == by_hand(stage)
    assert found.peak_bytes == sum(by_hand(stage).values())
    assert found.in_flight == IN_FLIGHT[stage]


def test_parameters_by_hand(est):
    assert est.params.total == LAYERS * BLOCK_PARAMS + H + 2 * VOCAB * H == 8_030_261_248


@pytest.mark.parametrize(("stage", "outside_gib"), [(0, 51.4), (1, 45.7)])
def test_near_the_outside_value(est, stage, outside_gib):
    assert est.memory.stages[stage].peak_bytes / GIB == pytest.approx(outside_gib, rel=0.03)


def test_the_peak_is_the_first_stage(est):
    assert est.memory.peak_stage == 0
    assert est.memory.peak_bytes == est.memory.stages[0].peak_bytes
    assert est.memory.peak_phase == "steady_state"


# ---------------------------------------------------------------- which moment is the peak


def test_full_recompute_adds_one_block_back(price):
    """What backward rebuilds of one block lives beside the inputs of all of them."""
    from fivefold.layout import Layout, Recompute
    from fivefold.model import load_model

    layout = Layout(pp=PP, recompute=Recompute(kind="full"))
    work = {"gpu": "a100-80g-pcie", "gpus": 8, "seq_len": S, "global_batch": 32}
    est = price(load_model("llama-3-8b"), layout, **work)
    block_input, block_saved = 2 * T * H, sum(SAVED_PER_BLOCK.values())
    held = IN_FLIGHT[0] * BLOCKS * block_input
    assert est.memory.stages[0].breakdown["activations"] == held + block_saved - block_input + MLP_BACKWARD


@pytest.mark.parametrize(("vocab", "at_the_loss"), [(4096, True), (2048, False)])
def test_the_larger_of_loss_and_last_block(vocab, at_the_loss, small, price):
    """One rank: logits with their fp32 copy, 6 v bytes per token, against the last block's backward, 2 h + 4 ffn."""
    from msgspec.structs import replace

    from fivefold.layout import Layout

    tokens, h, ffn, layers = 2048, 1024, 4096, 16
    saved = layers * (8 * h + 2 * (1024 + 2 * 512) + 2 * 1024 + 4 * 16 + 6 * ffn) * tokens + 4 * h * tokens
    est = price(replace(small["llama"], vocab=vocab), Layout(), gpus=1)
    found = est.memory.stages[0].breakdown
    working = (2 * h + 4 * ffn) * tokens
    assert (6 * vocab * tokens > working) is at_the_loss
    assert found["logits"] == (6 * vocab * tokens if at_the_loss else 0)
    assert found["activations"] == saved + (0 if at_the_loss else working)
