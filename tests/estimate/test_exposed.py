"""What communication leaves exposed, from the cost of each collective and the compute that runs beside it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from msgspec.structs import replace

from fivefold.cluster import collective_seconds, load_cluster
from fivefold.cluster.beside import WAITED
from fivefold.cluster.groups import place
from fivefold.layout import Layout, Overlap
from fivefold.model.spec import BlockRun

ONE = np.arange(1)
LLAMA = 16 * (2 * 1024 + 1024 * 2048 + 1024 * 1024 + 3 * 1024 * 4096) + 2 * 4096 * 1024 + 1024


def one_collective(op: str, size: float, ranks: int, stride: int, gpus: int) -> float:
    cluster = load_cluster("h100-sxm", gpus=gpus)
    where = place(cluster, np.array([ranks]), np.array([stride]))
    return float(np.ravel(collective_seconds(cluster, op, np.array([float(size)]), where))[0])


def test_without_overlap_reduction_and_gather_stand_alone(price):
    est = price("llama", Layout(overlap=Overlap(grad=False)), gpus=64)
    reduce_s = one_collective("reduce_scatter", 4 * LLAMA, 64, 1, 64)
    gather_s = one_collective("all_gather", 2 * LLAMA, 64, 1, 64)
    assert est.step.breakdown_s["dp"] == pytest.approx(reduce_s + gather_s, rel=1e-9)


@pytest.mark.parametrize(("runtime", "zero"), [("megatron-fsdp", 3), ("megatron-fsdp", 2), ("deepspeed-zero", 3)])
@pytest.mark.parametrize(("grad", "param"), [(False, False), (True, False)])
def test_sharded_parameters_without_overlap_stand_alone(price, runtime, zero, grad, param):
    """Every block, embedding and head is gathered once a pass (ZeRO-2: once) and scattered, and nothing hides it; with
    overlapped gradients the gathers alone stand out. DeepSpeed also copies what it gathered, 2%."""
    ends, base = 4096 * 1024, Layout(zero=zero)
    pieces = [(LLAMA - 2 * ends - 1024) / 16] * 16 + [ends, ends + 1024]
    bare, hidden = (
        price("llama", replace(base, overlap=overlap), gpus=64, runtime=runtime, seq_len=4096)
        for overlap in (Overlap(grad=grad, param=param), Overlap())
    )
    gathers = sum(one_collective("all_gather", 2 * piece, 64, 1, 64) for piece in pieces) * (2 if zero == 3 else 1)
    scatters = sum(one_collective("reduce_scatter", 4 * piece, 64, 1, 64) for piece in pieces)
    alone = bare.layout.num_micro_batches * (gathers + scatters * (not grad))
    step = max(one_collective("all_gather", 2 * size, 64, 1, 64) for size in pieces)
    step += max(one_collective("reduce_scatter", 4 * size, 64, 1, 64) for size in pieces)
    if grad:
        assert alone <= bare.step.breakdown_s["dp"] < hidden.step.breakdown_s["dp"] + alone
    else:
        assert bare.step.breakdown_s["dp"] == pytest.approx(alone + step, rel=0.03)
    assert bare.step.seconds.value > hidden.step.seconds.value


@pytest.mark.parametrize("seq_len", [256, 4096])
def test_with_overlap_the_last_bucket_or_the_excess_remains(price, kernel_of, seq_len):
    """Buckets of max(40 million, a million per replica) elements (Megatron-LM): the last cannot overlap, and compute
    is slower beside the others."""
    gpus = 64
    est = price("llama", Layout(), gpus=gpus, seq_len=seq_len)
    kernel = kernel_of("llama", [Layout()], gpus=gpus, seq_len=seq_len)
    forward, backward = (float(part[0, 0]) for part in kernel.pass_seconds(ONE))
    most = max(40_000_000, 1_000_000 * gpus)
    whole, expected = math.ceil(LLAMA / most), 0.0
    for op, size, beside in (("reduce_scatter", 4, backward), ("all_gather", 2, forward)):
        last = one_collective(op, size * most, gpus, 1, gpus)
        others = whole * one_collective(op, size * LLAMA / whole, gpus, 1, gpus) - last
        expected += last + max(others - beside, WAITED * others)
    assert est.step.breakdown_s["dp"] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("overlap", [Overlap(param=False), Overlap()])
def test_the_embedding_is_reduced_last_and_gathered_first(price, kernel_of, small, overlap):
    """A tensor is in one bucket: all of an embedding larger than that waits for the end of backward, and forward for
    all of it. Many tokens, so that the rest is hidden."""
    model, gpus, layout = replace(small["llama"], vocab=131_072), 64, Layout(overlap=overlap)
    ends = 131_072 * 1024
    whole = LLAMA + 2 * (ends - 4096 * 1024)
    est = price(model, layout, gpus=gpus, seq_len=4096)
    kernel = kernel_of(model, [layout], gpus=gpus, seq_len=4096)
    buckets = math.ceil(whole / 64_000_000)
    assert kernel.embedding_elements(ONE)[0, 0] == ends
    expected = 0.0
    for op, size, overlapped in (("reduce_scatter", 4, True), ("all_gather", 2, overlap.param is not False)):
        last = one_collective(op, size * ends, gpus, 1, gpus)
        others = buckets * one_collective(op, size * whole / buckets, gpus, 1, gpus) - last
        at_once = one_collective(op, size * whole, gpus, 1, gpus)
        expected += last + WAITED * others if overlapped else at_once
    assert est.step.breakdown_s["dp"] == pytest.approx(expected, rel=1e-9)


def test_later_ranks_have_more_time_to_hide(price, kernel_of, small):
    """The last rank reduces while the first still computes its last backward, and gathers before its first forward, all
    in one piece: Megatron-Core's buckets are the first rank's.

    Wide layers and few tokens, so that the last rank, with 15 of 16 blocks, leaves most exposed."""
    run = small["llama"].runs[0]
    wide = replace(run.block, feed=replace(run.block.feed, ffn=131072))
    model, layout = replace(small["llama"], runs=(BlockRun(16, wide),)), Layout(pp=2, first_stage_layers=1)
    est = price(model, layout, gpus=64, global_batch=256, seq_len=128)
    kernel = kernel_of(model, [layout], gpus=64, global_batch=256, seq_len=128, every_rank=True)
    params = kernel.rank_parameters(ONE)[0][0]
    forward, backward = (part[0] for part in kernel.pass_seconds(ONE))
    expected = 0.0
    for op, size, passing in (("reduce_scatter", 4, backward), ("all_gather", 2, forward)):
        seconds = one_collective(op, size * params[1], 32, 1, 64)
        assert seconds > passing[0]
        expected += seconds - passing[0]
    assert est.step.breakdown_s["dp"] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("seq_len", "hidden"), [(64, False), (4096, True)])
def test_interleaved_chunks_reduce_while_their_groups_of_micro_batches_pass(price, kernel_of, small, seq_len, hidden):
    """Megatron-Core starts a chunk's reduction after its last micro-batch, when pp micro-batches have yet to pass each
    earlier chunk, and the first chunk's after all: followed chunk by chunk on the rank that has most parameters."""
    run = small["llama"].runs[0]
    wide = replace(run.block, feed=replace(run.block.feed, ffn=524288))
    model, pp, vpp = replace(small["llama"], runs=(BlockRun(16, wide),)), 2, 4
    layout = Layout(pp=pp, vpp=vpp, overlap=Overlap(param=False))
    given = {"gpus": 64, "global_batch": 256, "seq_len": seq_len}
    est = price(model, layout, **given)
    kernel = kernel_of(model, [layout], every_rank=True, **given)
    backward = kernel.pass_seconds(ONE)[1][0]
    params = kernel.rank_parameters(ONE)[0][0]
    exposed = []
    for rank in range(pp):
        whole = (math.ceil(params[rank] / vpp / 40_000_000) if rank == 0 else 1) + vpp - 1
        reduce_s = whole * one_collective("reduce_scatter", 4 * params[rank] / whole, 32, 1, 64)
        embedding = 4096 * 1024 / params[rank] if rank == 0 else 0
        chunk_s = backward[rank] / vpp  # its blocks are equal; the head of the last rank is small
        last = embedding + (1 - embedding) / vpp
        done, free = 0.0, (vpp - 1) * pp * chunk_s + chunk_s
        for chunk in range(vpp - 1):  # from the one that is through first
            done = max(done, chunk * pp * chunk_s) + reduce_s * (1 - last) / (vpp - 1)
        waited = max(done - free, WAITED * reduce_s * (1 - last))
        late = rank * chunk_s
        exposed.append(max(reduce_s * last - late, 0) + waited)
    gather = max(one_collective("all_gather", 2 * params[rank], 32, 1, 64) for rank in range(pp))
    assert est.step.breakdown_s["dp"] == pytest.approx(max(exposed) + gather, rel=0.02)
    plain = price(model, replace(layout, vpp=1), **given)
    assert (plain.step.breakdown_s["dp"] > 1.1 * est.step.breakdown_s["dp"]) is not hidden


def test_a_ring_takes_one_transfer_per_other_rank(kernel_of):
    cp = 4
    kernel = kernel_of("llama", [Layout(cp=cp)], gpus=cp)
    block = kernel.ledgers[0]
    keys_values = 2 * 2 * (2048 // cp) * 512
    found = {row.name: float(s[0]) for row, s in kernel.pricer.exchanges.alone(block) if row.op == "send"}
    forward = (cp - 1) * one_collective("send", keys_values, cp, 1, cp)
    backward = (cp - 1) * one_collective("send", 2 * keys_values, cp, 1, cp)
    assert sorted(found.values()) == pytest.approx(sorted([forward, backward]), rel=1e-9)


def test_gathers_of_a_fully_sharded_block_hide_behind_compute(price, small):
    """Long sequences hide every gather but the ends of the step; short ones do not. Wide blocks, which are not waited
    for by the host."""
    run = small["llama"].runs[0]
    wide = replace(small["llama"], runs=(BlockRun(16, replace(run.block, feed=replace(run.block.feed, ffn=65536))),))
    long, short = (price(wide, Layout(zero=3), runtime="torchtitan", seq_len=s, gpus=64) for s in (65536, 64))
    assert long.step.breakdown_s["dp"] < 0.35 * long.step.seconds.value
    assert short.step.breakdown_s["dp"] > 0.5 * short.step.seconds.value
    assert short.step.breakdown_s["dp"] > long.step.breakdown_s["dp"]


def test_pytorchs_stages_wait_once_for_their_gradients(price):
    """However many micro-batches a step has: the first rank's, whole, after its last backward."""
    few, many = (
        price("llama", Layout(pp=2, zero=2), runtime="torchtitan", seq_len=512, gpus=16, global_batch=8 * m)
        for m in (4, 32)
    )
    blocks = (LLAMA - 2 * 4096 * 1024 - 1024) / 16
    once = 8 * one_collective("reduce_scatter", 4 * blocks, 8, 1, 16)
    once += one_collective("reduce_scatter", 4 * 4096 * 1024, 8, 1, 16)
    # What every micro-batch adds is the sum of 16-bit and fp32 gradients, at less than the memory's 3.35 TB/s.
    each = (many.step.breakdown_s["dp"] - few.step.breakdown_s["dp"]) / (32 - 4)
    added = 10 * (8 * blocks + 4096 * 1024) / 3.35e12
    assert added < each < 3 * added
    assert once < few.step.breakdown_s["dp"] - 4 * each < 1.5 * once


def test_pytorchs_later_stages_reduce_while_earlier_ones_still_go_back(kernel_of, small):
    """The last of two stages holds most: longer sequences hide its reduction, until the first one's is the longest."""
    block = small["llama"].runs[0].block
    thin, wide = (replace(block, feed=replace(block.feed, ffn=ffn)) for ffn in (512, 16384))
    model = replace(small["llama"], runs=(BlockRun(8, thin), BlockRun(8, wide)))
    works = [{"seq_len": seq, "cuda_graphs": True} for seq in (16, 1024, 65536)]
    kernels = [kernel_of(model, [Layout(pp=2, zero=2)], runtime="torchtitan", **work) for work in works]
    short, long, longer = (float(kernel.exposed_reduction_seconds(ONE)[0]) for kernel in kernels)
    assert short > long > longer
    first = 8 * (2 * 1024 + 1024 * 2048 + 1024 * 1024 + 3 * 1024 * 512)
    once = 8 * one_collective("reduce_scatter", 4 * first / 8, 8, 1, 16)
    assert once < longer


def test_crossing_nodes_costs(price):
    """A tensor-parallel group of 16 leaves the node of 8, one of 8 does not."""
    inside, across = (price("llama", Layout(tp=tp), gpus=16).step.breakdown_s["tp"] for tp in (8, 16))
    assert across > 2 * inside
