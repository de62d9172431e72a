"""Collectives per step, counted by hand: how many, over whom, and how many bytes a rank sends."""

from __future__ import annotations

import pytest

from fivefold.layout import Layout

H, LAYERS, VOCAB, S, MICRO_BATCHES = 1024, 16, 4096, 2048, 8
LLAMA_BLOCK = 2 * H + H * 2048 + H * H + 3 * H * 4096
LLAMA = LAYERS * LLAMA_BLOCK + 2 * VOCAB * H + H


def rows(est) -> dict[tuple[str, str], tuple[int, int]]:
    """(axis, collective) -> (calls, bytes sent per rank)."""
    return {(row.axis, row.collective): (row.count, row.bytes_sent_per_rank) for row in est.traffic}


def test_alone_there_is_none(price):
    assert price("llama", Layout(), gpus=1, global_batch=8).traffic == ()


def test_sequence_parallel_gathers_and_scatters(price):
    """Per block two column- and two row-parallel layers. Forward: a gather, a scatter each. Backward: gathers of the
    column layers' inputs again and of the row layers' gradients, scatters of the column layers' input gradients."""
    est = price("llama", Layout(tp=4), gpus=4, global_batch=MICRO_BATCHES)
    hidden_state = 2 * S * H
    gathers = MICRO_BATCHES * (LAYERS * (2 + 2 + 2) + 1 + 2)  # embedding's gradient; the head's input, twice
    scatters = MICRO_BATCHES * (LAYERS * (2 + 2) + 1 + 1)  # embedding's output; the head's input gradient
    found = rows(est)
    assert found["tp", "all_gather"] == (gathers, gathers * hidden_state * 3 // 4)
    assert found["tp", "reduce_scatter"] == (scatters, scatters * hidden_state * 3 // 4)
    losses = 3 * MICRO_BATCHES  # maximum, sum of exponentials and target's logit of each token, fp32
    assert found["tp", "all_reduce"] == (losses, losses * 4 * S * 2 * 3 // 4)
    assert set(found) == {("tp", "all_gather"), ("tp", "reduce_scatter"), ("tp", "all_reduce")}


def test_tensor_parallel_all_reduces_without_sequence_parallelism(price):
    est = price("llama", Layout(tp=4, sequence_parallel=False), gpus=4, global_batch=MICRO_BATCHES)
    whole = MICRO_BATCHES * (LAYERS * 4 + 2)  # two forward, two backward; embedding's output, head's input gradient
    losses = 3 * MICRO_BATCHES
    sent = (whole * 2 * S * H + losses * 4 * S) * 2 * 3 // 4
    assert rows(est) == {("tp", "all_reduce"): (whole + losses, sent)}


@pytest.mark.parametrize("cp", [1, 2])
def test_gradients_reduce_over_dp_and_cp(price, cp):
    """fp32 gradients: all-reduced by plain data parallelism, scattered by ZeRO-1, which gathers bf16 weights after."""
    n = 8  # dp x cp
    plain = rows(price("llama", Layout(cp=cp, zero=0), gpus=n, global_batch=64 // cp))
    assert plain["dp", "all_reduce"] == (1, 2 * (n - 1) * 4 * LLAMA // n)
    sharded = rows(price("llama", Layout(cp=cp, zero=1), gpus=n, global_batch=64 // cp))
    assert sharded["dp", "reduce_scatter"] == (1, (n - 1) * 4 * LLAMA // n)
    assert sharded["dp", "all_gather"] == (1, (n - 1) * 2 * LLAMA // n)


def test_deepspeed_scatters_gradients_of_fp16(price):
    moved = rows(price("llama", Layout(zero=1), gpus=8, runtime="deepspeed", precision="fp16"))
    assert ("dp", "reduce_scatter") in moved


@pytest.mark.parametrize("runtime", ["nanotron", "deepspeed"])
def test_gradients_of_sharded_states_may_be_all_reduced(price, runtime):
    """nanotron's trainer asks for no scatter, nor does DeepSpeed's optimizer of bf16; both gather bf16 weights then."""
    moved = rows(price("llama", Layout(zero=1), gpus=8, runtime=runtime))
    assert ("dp", "reduce_scatter") not in moved
    assert moved["dp", "all_reduce"] == (1, 2 * 7 * 4 * LLAMA // 8)
    assert moved["dp", "all_gather"] == (1, 7 * 2 * LLAMA // 8)


def test_fully_sharded_gathers_in_both_passes_of_every_micro_batch(price):
    n, m = 8, 4
    two, three = (
        rows(price("llama", Layout(zero=zero), gpus=n, global_batch=n * m, runtime="torchtitan")) for zero in (2, 3)
    )
    gather = (n - 1) * 2 * LLAMA // n
    assert two["dp", "all_gather"] == (m, m * gather)
    assert three["dp", "all_gather"] == (2 * m, 2 * m * gather)
    for found in (two, three):
        assert found["dp", "reduce_scatter"] == (m, m * 2 * gather)


@pytest.mark.parametrize(("zero", "gathers"), [(2, 1), (3, 8)])
def test_pytorchs_stages_reduce_once_a_step(price, zero, gathers):
    """Megatron-FSDP's reduce every micro-batch; under ZeRO-2 PyTorch's keep what the first one gathered."""
    layout, size = Layout(pp=2, zero=zero), {"gpus": 16, "global_batch": 8 * 4}
    titan, megatron = (
        rows(price("llama", layout, **size, runtime=runtime)) for runtime in ("torchtitan", "megatron-fsdp")
    )
    assert (titan["dp", "reduce_scatter"][0], megatron["dp", "reduce_scatter"][0]) == (1, 4)
    assert titan["dp", "all_gather"][0] == gathers


def test_a_pipeline_sends_boundaries(price):
    est = price("llama", Layout(pp=4), gpus=4, global_batch=MICRO_BATCHES)
    ends = 1 if est.step.slowest_stage in (0, 3) else 2
    calls = MICRO_BATCHES * ends
    assert rows(est) == {("pp", "send"): (calls, calls * 2 * S * H)}


def test_a_ring_passes_keys_and_values(price):
    cp = 4
    found = rows(price("llama", Layout(cp=cp), gpus=cp, global_batch=MICRO_BATCHES))
    keys_values = 2 * 2 * (S // cp) * 512
    steps = MICRO_BATCHES * LAYERS * (cp - 1)
    assert found["cp", "send"] == (2 * steps, steps * (1 + 2) * keys_values)  # backward passes their gradients too


def test_all_to_all_exchanges_heads(price):
    cp = 4
    found = rows(price("llama", Layout(cp=cp, cp_kind="a2a"), gpus=cp, global_batch=MICRO_BATCHES))
    calls = 2 * MICRO_BATCHES * LAYERS
    count, sent = found["cp", "all_to_all"]
    # Queries, keys, values before attention and the output after it, all but the own quarter of each.
    assert sent == calls * 2 * (S // cp) * (2 * 1024 + 2 * 512) * 3 // 4
    assert count == calls


def test_experts_dispatch_and_combine(price):
    ep, top_k = 4, 2
    found = rows(price("mixtral", Layout(ep=ep), gpus=8, global_batch=2 * 8))
    calls = 4 * 2 * LAYERS
    assert found["ep", "all_to_all"] == (calls, calls * 2 * S * top_k * H * 3 // 4)
    experts = LAYERS * 8 * 3 * H * 2048 // ep
    assert found["edp", "reduce_scatter"] == (1, 4 * experts // 2)
    assert found["edp", "all_gather"] == (1, 2 * experts // 2)
    dense = LAYERS * (2 * H + H * 2048 + H * H + 8 * H) + 2 * VOCAB * H + H
    assert found["dp", "reduce_scatter"] == (1, 4 * dense * 7 // 8)


def test_grids_are_named(price):
    est = price("mixtral", Layout(tp=2, ep=4, etp=2, pp=2), gpus=32)
    grids = {row.axis: row.grid for row in est.traffic}
    assert {axis for axis, grid in grids.items() if grid == "expert"} == {"ep", "etp", "edp"}
    assert {"tp", "pp", "dp"} <= {axis for axis, grid in grids.items() if grid == "dense"}
