"""What single numbers of a profile do to collectives and what lies around them, by hand: buffers, copies, rings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from numbers_of import HIDDEN, ONE, SELECTIVE, TOKENS, kernel, saved

from fivefold.cluster import collective_seconds
from fivefold.cluster.apart import slowest
from fivefold.cluster.beside import WAITED
from fivefold.estimate import Kernel
from fivefold.estimate.kernels import flash_seconds
from fivefold.layout import Layout, Overlap


@pytest.mark.parametrize(("tp", "parallel", "whole"), [(2, True, 1), (2, False, 0), (1, False, 0)])
def test_buffers_that_gathers_fill_stay_allocated(small, tp, parallel, whole):
    layout = Layout(tp=tp, sequence_parallel=parallel)
    none, two = (kernel(small["llama"], layout, gather_buffers=n) for n in (0, 2))
    more = two.rank_memory(ONE)["buffers"] - none.rank_memory(ONE)["buffers"]
    assert more == 2 * whole * 2 * TOKENS * HIDDEN  # two of them, 2 bytes an element, of all tokens


def test_gathered_inputs_that_are_kept_are_not_gathered_again(small):
    again, kept = (kernel(small["llama"], Layout(tp=2), gathered_inputs_kept=on) for on in (False, True))
    # Whole inputs of the query-key-value and of the gate-up projection, beside the shards that the norms gave.
    assert sum(saved(kept).values()) - sum(saved(again).values()) == 2 * 2 * TOKENS * HIDDEN
    moved = [
        sum(
            float(np.ravel(row.bytes)[0])
            for row in k.ledgers[0].exchanges
            if row.op == "all_gather" and row.when == "backward"
        )
        for k in (again, kept)
    ]
    assert moved == [4 * 2 * TOKENS * HIDDEN, 2 * 2 * TOKENS * HIDDEN]  # left: the gradients of both outputs
    # Without sequence parallelism nothing is gathered.
    assert sum(
        saved(kernel(small["llama"], Layout(tp=2, sequence_parallel=False), gathered_inputs_kept=True)).values()
    ) == (sum(saved(kernel(small["llama"], Layout(tp=2, sequence_parallel=False))).values()))


def test_sharded_states_may_still_get_the_whole_sum_after_backward(small):
    """One all-reduce and then one gather, nothing beside them; without ZeRO no difference."""
    for zero in (0, 1):
        usual, at_once = (
            kernel(small["llama"], Layout(zero=zero), sharded_reduced_at_once=each) for each in (False, True)
        )
        dense, _ = at_once.rank_parameters(ONE)
        group = at_once.groups(ONE).dense
        whole_sum, gather = (
            float(collective_seconds(at_once.problem.cluster, op, size * dense[0], group)[0])
            for op, size in (("all_reduce", 4), ("all_gather", 2))
        )
        alone = float(usual.exposed_reduction_seconds(ONE)[0]) if zero == 0 else whole_sum + gather
        assert at_once.exposed_reduction_seconds(ONE)[0] == pytest.approx(alone)


def wide(model):
    """Blocks that a GPU computes for longer than they are gathered and scattered."""
    run = model.runs[0]
    return replace(model, runs=(replace(run, block=replace(run.block, feed=replace(run.block.feed, ffn=65536))),))


def test_compute_falls_behind_beside_gathers_but_of_registered_buffers(small):
    layout = Layout(zero=3, micro_batch=4)
    held, free = (
        kernel(wide(small["llama"]), layout, gpus=8, runtime="megatron-fsdp", registered_buffers=on)
        for on in (False, True)
    )
    reduce_s, gather_s = held.reduction_seconds(ONE, held.variants.dense[:, :1], held.variants.expert[:, :1])
    assert free.variants.gather_forward[0, 0] == free.variants.gather_backward[0, 0] == 0
    assert held.variants.gather_forward[0, 0] == pytest.approx(WAITED * gather_s[0, 0])
    assert held.variants.gather_backward[0, 0] == pytest.approx(WAITED * (gather_s + reduce_s)[0, 0])


def test_nothing_hides_gathers_that_wait_for_the_gradients_before(small):
    layout = Layout(zero=3, micro_batch=4)
    waits = kernel(
        wide(small["llama"]),
        layout,
        gpus=8,
        runtime="megatron-fsdp",
        registered_buffers=True,
        backward_gathers_wait=True,
    )
    _, gather_s = waits.reduction_seconds(ONE, waits.variants.dense[:, :1], waits.variants.expert[:, :1])
    assert waits.variants.gather_forward[0, 0] == 0
    assert waits.variants.gather_backward[0, 0] == pytest.approx(gather_s[0, 0])


def test_compute_waits_for_the_slowest_gpu(small):
    """The same work per GPU on more of them: only the compute curve's level moves."""
    node, many = (kernel(small["llama"], Layout(), gpus=gpus, launch_host_s=0.0) for gpus in (8, 64))
    assert many.pricer.curve.in_step == pytest.approx(node.pricer.curve.in_step * slowest(64))
    assert many.costs[0].forward[0] == pytest.approx(slowest(64) * node.costs[0].forward[0])


def test_fully_sharded_units_are_copied_beside_compute(small):
    """Per parameter 4 bytes after each of two gathers and 6 before the scatter, in the stream of compute."""
    layout = Layout(zero=3)
    off, on = (
        kernel(small["llama"], layout, runtime="torchtitan", gather_copy_bytes=4 * each, scatter_copy_bytes=6 * each)
        for each in (0, 1)
    )
    cluster = on.problem.cluster
    curve = on.pricer.curve
    rate = cluster.gpu.memory_bandwidth_per_s * curve.streaming_efficiency
    block = float(on.variants.dense[0, 0])
    gather, scatter = (curve.in_step * (each * block / rate + curve.launch_s) for each in (4, 6))
    assert float((on.variants.forward_s - off.variants.forward_s)[0, 0]) == pytest.approx(gather)
    assert float((on.variants.backward_s - off.variants.backward_s)[0, 0]) == pytest.approx(gather + scatter)
    # ZeRO-2 keeps what it gathered, and a pipeline's micro-batches scatter nothing.
    kept = [kernel(small["llama"], Layout(zero=2), runtime="torchtitan", gather_copy_bytes=each) for each in (0, 4)]
    assert np.all(kept[0].variants.forward_s == kept[1].variants.forward_s)


def test_each_step_of_a_ring_is_launched(small):
    """Of four ranks: two more kernels of attention forward and four more backward than of two, and two more sends."""
    two, four = (kernel(small["llama"], Layout(cp=cp), launch_host_s=1.0).variants for cp in (2, 4))
    assert float((four.forward_s - two.forward_s)[0, 0]) == pytest.approx(2 + 2)
    assert float((four.backward_s - two.backward_s)[0, 0]) == pytest.approx(4 + 2)
    two, four = (kernel(small["llama"], Layout(cp=cp, cp_kind="a2a"), launch_host_s=1.0).variants for cp in (2, 4))
    assert float((four.forward_s - two.forward_s)[0, 0]) == pytest.approx(0)


def first(column: Any) -> float:
    return float(np.ravel(column)[0])


def copied(k: Kernel) -> dict[str, float]:
    return {
        f"{row.name} {row.when}": float(np.ravel(row.copied)[0]) for row in k.ledgers[0].exchanges if np.any(row.copied)
    }


@pytest.mark.parametrize("micro_batch", [1, 4])
def test_sequences_after_sequences_are_copied_around_a_collective(small, micro_batch):
    layout = Layout(tp=4, micro_batch=micro_batch, overlap=Overlap(tp=False))
    k = kernel(small["llama"], layout, sequence_second=True)
    whole = 2 * 2 * micro_batch * TOKENS * HIDDEN  # read and written in 16 bit
    found = copied(k)
    assert set(found.values()) == {whole}
    scatters = {name for name in found if name.startswith("scatter")}
    assert len(scatters) == 4  # outputs of two row-parallel layers, input gradients of two column-parallel ones
    # One sequence's parts follow each other as gathered: no copy after a gather.
    assert len(found) - len(scatters) == (0 if micro_batch == 1 else 4)
    for on in (Overlap(tp=True), Overlap(tp=False)):
        plain = Layout(tp=4, micro_batch=micro_batch, overlap=on)
        assert not copied(kernel(small["llama"], plain, sequence_second=bool(on.tp)))


def test_a_copy_takes_the_time_of_its_bytes(small):
    layout = Layout(tp=4, micro_batch=4)
    without, with_copies = (kernel(small["llama"], layout, sequence_second=on) for on in (False, True))
    cluster = without.problem.cluster
    curve = without.pricer.curve
    bandwidth = cluster.gpu.memory_bandwidth_per_s * curve.streaming_efficiency
    four = curve.in_step * 4 * (2 * 2 * 4 * TOKENS * HIDDEN / bandwidth + curve.launch_s)
    for side in ("forward", "backward"):
        more = getattr(with_copies.costs[0], side)[1, 0] - getattr(without.costs[0], side)[1, 0]
        assert more == pytest.approx(four), side


def test_single_operations_gather_again_and_a_checkpoint_that_stops_early_does_not_scatter(small):
    """torchtitan's selective recomputation keeps what was scattered; a whole block's ends before its last scatter."""
    cost = kernel(small["llama"], Layout(tp=4, zero=3), runtime="torchtitan").costs[0]
    rows = {row.name: float(s[0]) for row, s in cost.exchanges if row.when == "forward"}
    gathers = rows["gather qkv_proj input"] + rows["gather mlp.fc1 input"]
    assert float(cost.recompute[SELECTIVE, 1, 0]) == pytest.approx(gathers)
    assert float(cost.full[1, 0]) == pytest.approx(gathers + rows["scatter out_proj output"])
    assert rows["scatter mlp.fc2 output"] > 0


def test_a_ring_that_gathers_moves_every_query_heads_keys_at_once_and_their_gradients_in_fp32(small):
    """Grouped queries: 2048 / 4 tokens of 16 heads of 64 keys and values, whatever the number of their own heads."""
    k = kernel(small["llama"], Layout(cp=4, zero=3), runtime="torchtitan")
    kv = 2 * TOKENS / 4 * 16 * (64 + 64)
    rows = {f"{row.name} {row.when}": row for row in k.ledgers[0].exchanges if row.axis == "cp" and np.any(row.bytes)}
    assert {name: (row.op, first(row.bytes), first(row.ring_steps)) for name, row in rows.items()} == {
        "gather keys and values forward": ("all_gather", 4 * kv, 1),
        "gather keys and values backward": ("all_gather", 4 * kv, 1),
        "ring gradients backward": ("send", 2 * kv, 4),
    }
    assert first(rows["ring gradients backward"].copied) == 4 * 2 * 2 * kv
    alone = kernel(small["llama"], Layout(zero=3), runtime="torchtitan").ledgers[0]
    assert not [row for row in alone.exchanges if row.axis == "cp" and np.any(row.bytes)]


def test_a_ring_that_is_waited_for_hides_behind_nothing(small):
    layout = Layout(cp=4, zero=3)
    hidden, waited = (kernel(small["llama"], layout, runtime="torchtitan", ring_waits=on) for on in (False, True))
    alone = {
        (row.name, row.when): float(seconds[0]) for row, seconds in waited.pricer.exchanges.alone(waited.ledgers[0])
    }
    copies = {
        (row.name, row.when): float(seconds[0])
        for row, seconds in waited.costs[0].exchanges
        if row.axis == "cp" and np.any(row.bytes)
    }
    curve, gpu = waited.pricer.curve, waited.problem.cluster.gpu
    rate = gpu.memory_bandwidth_per_s * curve.streaming_efficiency
    for row, _ in waited.costs[0].exchanges:
        if row.axis == "cp" and np.any(row.bytes):
            key = (row.name, row.when)
            copied = curve.in_step * (first(row.copied) / rate + curve.launch_s)
            assert copies[key] == pytest.approx(alone[key] + copied)
    assert sum(float(s[0]) for row, s in hidden.costs[0].exchanges if row.axis == "cp") < sum(copies.values())


@pytest.mark.parametrize("cp", [2, 4])
def test_a_gather_of_keys_and_values_hides_behind_the_first_step_of_attention(small, cp):
    """Which is as long as one of the ring's."""
    hidden, waited = (kernel(small["llama"], Layout(cp=cp), ring_gathers=True, ring_waits=on) for on in (False, True))
    row = hidden.ledgers[0].attends[0]
    pricer = hidden.pricer
    ahead, _ = flash_seconds(
        pricer.curve, pricer.gpu, row, np.asarray(row.flops, dtype=float), "bf16", pricer.attention_kernel
    )
    exposed, whole = (
        next(float(s[0]) for r, s in k.costs[0].exchanges if r.axis == "cp" and r.when == "forward")
        for k in (hidden, waited)
    )
    beside = pricer.curve.in_step * float(ahead[0]) / cp
    assert 0 < beside < whole
    assert whole - exposed == pytest.approx(beside, rel=1e-6)
