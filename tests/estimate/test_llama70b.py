"""Llama-3-70B on 64 H100 with TP4 PP4 CP2, 8,192 tokens and batch 512: the published Megatron Core guide's example."""

from __future__ import annotations

import pytest

from fivefold.layout import Layout
from fivefold.model import load_model

GB = 1e9
# meta-llama/Meta-Llama-3-70B config.json
H, LAYERS, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB = 8192, 80, 64, 8, 128, 28672, 128256
TP, PP, CP, DP, S = 4, 4, 2, 2, 8192
T = S // CP  # tokens on a rank
Q, KV = HEADS * HEAD_DIM // TP, KV_HEADS * HEAD_DIM // TP
BLOCK = 2 * H + H * (Q + 2 * KV) + Q * H + 3 * H * FFN // TP
PADDED = -(-VOCAB // (128 * TP)) * 128 * TP
STAGE_0 = LAYERS // PP * BLOCK + PADDED // TP * H


def static(breakdown: dict[str, int]) -> int:
    return sum(breakdown[name] for name in ("weights", "gradients", "master", "optimizer"))


@pytest.fixture(scope="module", params=[0, 1])
def zero(request):
    return request.param


@pytest.fixture(scope="module")
def est(price, zero):
    layout = Layout(tp=TP, pp=PP, cp=CP, zero=zero)
    return price(load_model("llama-3-70b"), layout, gpus=64, seq_len=S, global_batch=512)


def test_dp_follows(est):
    assert est.layout.dp == DP
    assert est.layout.num_micro_batches == 256


def test_states_of_the_first_stage(est, zero):
    # 2 weights + 4 gradients on every rank; 4 master + 8 moments whole, or shared by the DP x CP ranks.
    per_parameter = 18 if zero == 0 else 6 + 12 / (DP * CP)
    found = static(est.memory.stages[0].breakdown)
    assert found == STAGE_0 * per_parameter
    billions = STAGE_0 / 1e9
    assert billions == pytest.approx(4.54, abs=0.005)
    assert found / GB == pytest.approx(81.7 if zero == 0 else 40.9, abs=0.1)


def test_only_the_sharded_optimizer_fits(est, zero):
    assert est.fits is (zero == 1)
    if zero == 0:
        assert static(est.memory.stages[0].breakdown) > 80 * GB


def test_activations_of_the_first_stage(est):
    # Per token of the sequence shard: two norms in and out; over tp: q, k, v, output, log-sum-exp, fc1 and fc2 inputs.
    per_block = T // TP * 8 * H + T * (2 * (2 * Q + 2 * KV) + 4 * HEADS // TP + 6 * FFN // TP)
    # Backward of the feed-forward: output gradient, sharded and gathered, and the gradient of fc1's output.
    working = 2 * T // TP * H + 2 * T * H + 4 * T * FFN // TP
    found = est.memory.stages[0].breakdown["activations"]
    assert found == PP * (LAYERS // PP) * per_block + working
    assert found / GB == pytest.approx(23, abs=0.5)


def test_the_zero_stage_changes_nothing_else(price):
    model = load_model("llama-3-70b")
    by_zero = [
        price(model, Layout(tp=TP, pp=PP, cp=CP, zero=z), gpus=64, seq_len=S, global_batch=512).memory.stages[0]
        for z in (0, 1)
    ]
    for name in ("weights", "gradients", "activations", "logits", "buffers", "reserve"):
        assert by_zero[0].breakdown[name] == by_zero[1].breakdown[name]
