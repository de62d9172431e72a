"""Ledgers of every kind of block: weights against the model room's tensors, operations against its FLOPs, and what is
saved against counts made here by hand from the public kernels' own lists of saved tensors."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from fivefold.estimate.items import ItemWriter
from fivefold.estimate.shard import distinct_shards
from fivefold.layout import Layout, Workload
from fivefold.layout.columns import Columns
from fivefold.model.flops import block_flops_per_token
from fivefold.model.spec import (
    Attention,
    Block,
    BlockRun,
    Experts,
    FeedForward,
    GatedDeltaNet,
    Indexer,
    LatentAttention,
    Mamba,
    Mamba2,
    ModelSpec,
    SideBySide,
)
from fivefold.model.tensors import embedding_tensors, head_tensors, shard_counts
from fivefold.runtime import load_runtime

HIDDEN, SEQ = 256, 512


def written(block: Block, layout: Layout | None = None, *, seq_len: int = SEQ, precision: str = "bf16", **model):
    """The ledger of one block under one layout, and its keys."""
    spec = ModelSpec(
        name="one", family="one", hidden=HIDDEN, vocab=4096, max_position=seq_len, runs=(BlockRun(4, block),), **model
    )
    work = Workload(seq_len=seq_len, global_batch=64, precision=precision)  # type: ignore[arg-type]
    columns = Columns.from_layouts([layout or Layout()], 4096, work)
    shard, _ = distinct_shards(columns, seq_len)
    return ItemWriter(spec, work, load_runtime("megatron"), shard)


def ledger_of(block: Block, layout: Layout | None = None, **more):
    return written(block, layout, **more).block(block)


def saved(ledger) -> dict[str, float]:
    """Bytes by name; the names of a ledger are its own."""
    return {row.name: float(np.asarray(row.bytes).reshape(-1)[0]) for row in ledger.saved}


# ---------------------------------------------------------------- random blocks

flags = st.booleans()
attentions = st.builds(
    Attention,
    heads=st.just(8),
    kv_heads=st.sampled_from([1, 2, 4, 8]),
    head_dim=st.sampled_from([16, 32]),
    qkv_bias=flags,
    out_bias=flags,
    qk_norm=flags,
    qk_norm_over=st.sampled_from(["head", "all", "each"]),
    qk_norm_kind=st.sampled_from(["rmsnorm", "layernorm", "layernorm_fixed"]),
    rope=flags,
    window=st.sampled_from([None, 64, 4096]),
    chunk=st.sampled_from([None, 128, 4096]),
    sinks=flags,
    gate=flags,
    alibi=flags,
)
latents = st.builds(
    LatentAttention,
    heads=st.just(8),
    q_lora_rank=st.sampled_from([None, 96]),
    kv_lora_rank=st.just(64),
    qk_nope_head_dim=st.just(32),
    qk_rope_head_dim=st.just(16),
    v_head_dim=st.just(32),
    bias=flags,
    indexer=st.sampled_from([None, Indexer(heads=4, head_dim=32, top_k=128), Indexer(heads=4, head_dim=32, top_k=999)]),
)
delta_nets = st.builds(
    GatedDeltaNet,
    key_heads=st.sampled_from([8, 16]),
    value_heads=st.sampled_from([16, 32]),
    key_dim=st.just(16),
    value_dim=st.sampled_from([16, 32]),
    conv=st.just(4),
)
mambas = st.builds(
    Mamba,
    inner=st.just(512),
    state=st.just(16),
    conv=st.just(4),
    dt_rank=st.just(16),
    conv_bias=flags,
    proj_bias=flags,
    inner_norms=flags,
)
mamba2s = st.builds(
    Mamba2,
    heads=st.sampled_from([8, 16]),
    head_dim=st.just(32),
    groups=st.sampled_from([1, 8]),
    state=st.just(64),
    conv=st.just(4),
    chunk=st.sampled_from([128, 256]),
    conv_bias=flags,
    proj_bias=flags,
    norm=flags,
)
pairs = st.builds(SideBySide, attention=attentions, state_space=mamba2s)
mixers = st.one_of(attentions, latents, delta_nets, mambas, mamba2s, pairs)
dense = st.builds(FeedForward, ffn=st.just(512), gated=flags, bias=flags)
routed = st.builds(
    Experts,
    num_experts=st.just(8),
    top_k=st.sampled_from([1, 2]),
    ffn=st.just(128),
    shared_ffn=st.sampled_from([0, 128]),
    gated=flags,
    bias=flags,
    router_bias=flags,
    shared_gate=flags,
    latent=st.sampled_from([0, 64]),
)


@st.composite
def blocks(draw) -> Block:
    mixer, feed = draw(st.none() | mixers), draw(st.none() | dense | routed)
    if mixer is None and feed is None:
        feed = draw(dense)
    both = mixer is not None and feed is not None
    parallel = both and draw(flags)
    norms = "pre" if parallel else draw(st.sampled_from(["pre", "post", "sandwich"]))
    norm = draw(st.sampled_from(["rmsnorm", "layernorm", "layernorm_fixed"]))
    return Block(
        mixer=mixer,
        feed=feed,
        norm=norm,
        norm_bias=norm == "layernorm" and draw(flags),
        norms=norms,  # type: ignore[arg-type]
        parallel=parallel,
        shared_norm=parallel and draw(flags),
    )


def kv_heads(block: Block) -> int:
    mixer = block.mixer.attention if isinstance(block.mixer, SideBySide) else block.mixer
    return mixer.kv_heads if isinstance(mixer, Attention) else 1


@settings(max_examples=300, deadline=None)
@given(blocks(), st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 8]), st.sampled_from([1, 2, 4]))
def test_a_ledgers_weights_are_the_models_tensors_under_every_split(block, tp, ep, etp):
    ledger = ledger_of(block, Layout(tp=tp, ep=ep, etp=etp))
    counts = shard_counts(block, HIDDEN)
    kept = {
        expert: sum(Fraction(float(np.max(w.elements))) for w in ledger.weights if w.expert is expert)
        for expert in (False, True)
    }
    split = counts["replicated"] + Fraction(counts["column"] + counts["row"], tp)
    assert float(kept[False]) == pytest.approx(float(split + Fraction(counts["kv"], min(tp, kv_heads(block)))), 1e-12)
    experts = Fraction(counts["expert"], ep * etp) + Fraction(counts["expert_whole"], ep)
    assert float(kept[True]) == pytest.approx(float(experts), 1e-12)


@settings(max_examples=300, deadline=None)
@given(blocks(), st.sampled_from([512, 1024, 4096]))
def test_a_ledgers_operations_are_the_models_flops(block, seq_len):
    """On one rank, where nothing is done twice. Kernels skip what the mask hides, so the count is the causal one."""
    ledger = ledger_of(block, seq_len=seq_len)
    done = sum(float(np.max(2 * np.asarray(g.m, float) * g.n * g.k * g.groups)) for g in ledger.gemms)
    done += sum(float(np.max(row.flops)) for row in (*ledger.attends, *ledger.scans))
    assert done / seq_len == pytest.approx(block_flops_per_token(block, HIDDEN, seq_len, "causal"), rel=1e-9)


@settings(max_examples=200, deadline=None)
@given(blocks(), st.sampled_from(["bf16", "fp8", "fp32"]), st.booleans())
def test_tensor_and_sequence_parallelism_keep_no_more_than_one_rank_does(block, precision, sp):
    """And everything that a ledger has is finite and not negative."""
    whole = ledger_of(block, precision=precision)
    part = ledger_of(block, Layout(tp=4, sequence_parallel=sp), precision=precision)
    for ledger in (whole, part):
        for row in (*ledger.saved, *ledger.working):
            assert np.isfinite(row.bytes).all(), row
            assert (np.asarray(row.bytes) >= 0).all(), row
        for row in (*ledger.streams, *ledger.scans):
            assert (np.asarray(row.forward_bytes) >= 0).all(), row
            assert (np.asarray(row.backward_bytes) >= 0).all(), row
    one, many = saved(whole), saved(part)
    assert one.keys() == many.keys()
    for name in one:
        assert many[name] <= one[name] + 1e-6, name
    assert len(one) == len(whole.saved), "two rows have one name"


@settings(max_examples=100, deadline=None)
@given(blocks())
def test_matrix_products_that_hide_collectives_exist_once(block):
    """A collective names the product that it runs behind; two products of one name would hide it twice."""
    ledger = ledger_of(block, Layout(tp=2))
    names = [row.name for row in ledger.gemms]
    assert len(names) == len(set(names))
    assert {row.behind[0] for row in ledger.exchanges if row.behind} <= set(names)


# ---------------------------------------------------------------- counts by hand, bytes per token in bf16

DENSE = FeedForward(ffn=512)
GROUPED = Attention(heads=8, kv_heads=2, head_dim=32)
OF_DENSE = 2 * 512 * 2 + 2 * 512  # both inputs of the gate and the product
OF_GROUPED = 2 * (256 + 2 * 64) + 2 * 256 + 4 * 8  # q, k, v, the output and a log-sum-exp per head
H = 2 * HIDDEN


def per_token(block: Block, layout: Layout | None = None, **more) -> float:
    return sum(saved(ledger_of(block, layout, **more)).values()) / SEQ


@pytest.mark.parametrize(
    ("changes", "norms_and_inputs"),
    [
        ({}, 4 * H),  # of each norm its input and its output
        ({"norms": "post"}, 4 * H),  # each sublayer's input and its output, which a norm reads
        ({"norms": "sandwich"}, 6 * H),
        ({"parallel": True}, 3 * H),  # two norms read one tensor
        ({"parallel": True, "shared_norm": True}, 2 * H),
        ({"norm": "layernorm_fixed"}, 4 * H),
        ({"mixer": None}, 2 * H - OF_GROUPED),
        ({"feed": None}, 2 * H - OF_DENSE),
    ],
    ids=str,
)
def test_what_a_block_keeps_follows_where_its_norms_are(changes, norms_and_inputs):
    block = replace(Block(mixer=GROUPED, feed=DENSE), **changes)
    assert per_token(block) == OF_GROUPED + OF_DENSE + norms_and_inputs


def test_the_additions_to_attention_keep_what_their_gradients_need():
    def more_than_plain(**changes) -> float:
        return per_token(Block(mixer=replace(GROUPED, **changes), feed=DENSE)) - plain

    plain = per_token(Block(mixer=GROUPED, feed=DENSE))
    assert more_than_plain(gate=True) == 2 * 2 * 256  # the gate and the gated output
    assert more_than_plain(sinks=True) == 0
    for over in ("head", "all", "each"):
        assert more_than_plain(qk_norm=True, qk_norm_over=over) == 2 * (256 + 64)
    assert more_than_plain(window=64) == more_than_plain(chunk=64) == more_than_plain(alibi=True) == 0


def test_mamba_2_keeps_its_input_and_its_output_before_gate_and_norm():
    """mamba_ssm's MambaSplitConv1dScanCombinedFn saves zxbcdt and out_x; the norm its input and one number a group; the
    output projection its input."""
    mixer = Mamba2(heads=16, head_dim=32, groups=2, state=64, conv=4)
    inner, made = 512, 2 * 512 + 2 * 2 * 64 + 16
    kept = 2 * made + 2 * inner + (2 * inner + 4 * 2) + 2 * inner
    assert per_token(Block(mixer=mixer, feed=None)) == kept + 2 * H
    assert per_token(Block(mixer=replace(mixer, norm=False), feed=None)) == kept - (2 * inner + 4 * 2) + 2 * H
    assert per_token(Block(mixer=mixer, feed=None), Layout(tp=2, sequence_parallel=True)) == (kept + 2 * H) / 2


def test_mamba_1_keeps_what_its_scan_saves():
    """selective_scan_fn saves x, delta, B, C, gate, output and the states at every 2048 tokens (here one, of a short
    sequence) in pairs of fp32; the input projection's output is the convolution's input and the gate."""
    mixer = Mamba(inner=512, state=16, conv=4, dt_rank=16)
    kept = 2 * (2 * 512 + 512 + (16 + 32) + 512 + 512) + 2 * 4 * 512 * 16 / SEQ + 2 * 512
    assert per_token(Block(mixer=mixer, feed=None)) == kept + 2 * H
    more = per_token(Block(mixer=replace(mixer, inner_norms=True), feed=None)) - kept - 2 * H
    assert more == 2 * (16 + 32)


def test_a_delta_net_keeps_what_its_kernel_saves():
    """chunk_gated_delta_rule saves q and k of every value head, v, decay, beta and the triangles of 64; before it the
    convolution its input, the norms of q and k their output; after it the gated norm its input and gate."""
    mixer = GatedDeltaNet(key_heads=2, value_heads=4, key_dim=32, value_dim=64, conv=4)
    convolution = 2 * (2 * 64 + 256)
    norms = 2 * 2 * 64 + 4 * 2 * 2
    kernel = 2 * (2 * 4 * 32 + 256) + (2 * 4 + 2 * 2) * 4 + 2 * 64 * 4
    gated = 2 * 2 * 256 + 4 * 4 + 2 * 256
    assert per_token(Block(mixer=mixer, feed=None)) == convolution + norms + kernel + gated + 2 * H
    alone = replace(mixer, key_heads=4, key_dim=16)  # as wide, and nothing to repeat
    difference = per_token(Block(mixer=mixer, feed=None)) - per_token(Block(mixer=alone, feed=None))
    assert difference == 2 * 2 * 64 + 2 * 2 * 4 * 16 - 4 * 2 * 2


def test_sparse_attention_costs_its_picked_keys_and_an_index_of_all():
    dense = LatentAttention(
        heads=8, q_lora_rank=96, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32
    )
    block = Block(mixer=replace(dense, indexer=Indexer(heads=4, head_dim=32, top_k=64)), feed=None)
    core, scores = ledger_of(block).attends[::-1]
    assert float(core.flops[0]) == SEQ * 2 * 8 * (48 + 32) * (64 - 64 * 64 / (2 * SEQ))
    assert float(scores.flops[0]) == SEQ * 2 * 4 * (32 + 1) * SEQ / 2
    more = per_token(block) - per_token(Block(mixer=dense, feed=None))
    assert more == 2 * (4 * 32 + 32 + 4) + (4 + 4) * 64


def test_context_parallel_state_spaces_exchange_heads_for_sequence():
    """Megatron-Core's mamba_context_parallel: z, x, B, C and dt there, the output back; one group's B and C go to every
    rank that has some of its heads."""
    mixer = Mamba2(heads=16, head_dim=32, groups=1, state=64, conv=4)
    ledger = ledger_of(Block(mixer=mixer, feed=None), Layout(cp=4))
    sent = [float(row.bytes[0]) for row in ledger.exchanges if row.axis == "cp"]
    assert sent == [SEQ / 4 * 2 * (2 * 512 + 4 * 2 * 64 + 16 + 512)] * 2


def test_tokens_are_sent_and_ordered_in_the_width_of_their_latent_space():
    """The router and shared experts read whole tokens; a projection of each direction stands around the exchange."""
    feed = Experts(num_experts=8, top_k=2, ffn=128, shared_ffn=128)
    whole, latent = (
        ledger_of(Block(mixer=None, feed=replace(feed, latent=width)), Layout(ep=4)) for width in (0, HIDDEN // 4)
    )

    def moved(ledger, name: str) -> float:
        return next(float(np.max(row.bytes)) for row in ledger.exchanges if row.name == name)

    for name in ("dispatch", "combine"):
        assert moved(whole, name) == 4 * moved(latent, name)
    assert saved(whole)["experts.fc1 input"] == 4 * saved(latent)["experts.fc1 input"]
    products = {row.name: (row.n, row.k) for row in latent.gemms}
    assert (products["fc1_latent"], products["fc2_latent"]) == ((HIDDEN // 4, HIDDEN), (HIDDEN, HIDDEN // 4))
    assert products["router"] == (8, HIDDEN)
    assert products["experts.fc1"][1] == HIDDEN // 4


def test_embedding_norm_and_head_bias_are_in_their_items():
    block = Block(mixer=GROUPED, feed=DENSE, norm="layernorm")
    more = {"final_norm": "layernorm", "final_norm_bias": True, "embedding_norm": True, "head_bias": True}
    writer = written(block, **more)
    embedding, head = writer.embedding(), writer.head()
    assert sum(float(np.max(w.elements)) for w in embedding.weights) == sum(
        t.numel for t in embedding_tensors(writer.model)
    )
    weights = sum(float(np.max(w.elements)) for w in head.weights) + float(writer.head_weight()[0])
    assert weights == sum(t.numel for t in head_tensors(writer.model))
    assert saved(embedding) == {"embedding_norm.input": H * SEQ}
