"""How tensors split: shards put together are the whole, and the class counts say the same as the table."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fivefold.errors import FivefoldError
from fivefold.model import (
    Attention,
    Block,
    Experts,
    FeedForward,
    GatedDeltaNet,
    Indexer,
    LatentAttention,
    Mamba,
    Mamba2,
    SideBySide,
    block_params,
    block_tensors,
    count_params,
    load_model,
    local_shape,
    model_tensors,
    models,
    padded_vocab,
    shard_counts,
)

attentions = st.builds(
    lambda kv, groups, **rest: Attention(heads=kv * groups, kv_heads=kv, **rest),
    kv=st.sampled_from([1, 2, 4, 8]),
    groups=st.sampled_from([1, 2, 4]).map(lambda groups: 8 * groups),
    head_dim=st.sampled_from([8, 16]),
    qkv_bias=st.booleans(),
    out_bias=st.booleans(),
    qk_norm=st.booleans(),
    qk_norm_over=st.sampled_from(["head", "all", "each"]),
    qk_norm_kind=st.sampled_from(["rmsnorm", "layernorm", "layernorm_fixed"]),
    sinks=st.booleans(),
    gate=st.booleans(),
)
latents = st.builds(
    LatentAttention,
    heads=st.sampled_from([8, 16]),
    q_lora_rank=st.sampled_from([None, 5, 16]),
    kv_lora_rank=st.integers(1, 9),
    qk_nope_head_dim=st.integers(1, 8),
    qk_rope_head_dim=st.sampled_from([2, 4]),
    v_head_dim=st.integers(1, 8),
    bias=st.booleans(),
    indexer=st.one_of(
        st.none(), st.builds(Indexer, heads=st.integers(1, 3), head_dim=st.integers(1, 5), top_k=st.integers(1, 9))
    ),
)
delta_nets = st.builds(
    GatedDeltaNet,
    key_heads=st.just(8),
    value_heads=st.sampled_from([8, 16]),
    key_dim=st.integers(1, 5),
    value_dim=st.integers(1, 5),
    conv=st.integers(1, 4),
)
mambas = st.builds(
    Mamba,
    inner=st.sampled_from([8, 24]),
    state=st.integers(1, 5),
    conv=st.integers(1, 4),
    dt_rank=st.integers(1, 5),
    conv_bias=st.booleans(),
    proj_bias=st.booleans(),
    inner_norms=st.booleans(),
)
mambas2 = st.builds(
    Mamba2,
    heads=st.sampled_from([8, 16]),
    head_dim=st.integers(1, 5),
    groups=st.just(8),
    state=st.integers(1, 5),
    conv=st.integers(1, 4),
    conv_bias=st.booleans(),
    proj_bias=st.booleans(),
    norm=st.booleans(),
)
mixers = st.one_of(
    attentions,
    latents,
    delta_nets,
    mambas,
    mambas2,
    st.builds(SideBySide, attention=attentions, state_space=mambas2),
)
dense = st.builds(FeedForward, ffn=st.sampled_from([8, 24]), gated=st.booleans(), bias=st.booleans())
experts = st.builds(
    Experts,
    num_experts=st.sampled_from([8, 16]),
    top_k=st.integers(1, 8),
    ffn=st.sampled_from([8, 24]),
    shared_ffn=st.sampled_from([0, 8]),
    gated=st.booleans(),
    bias=st.booleans(),
    router_bias=st.booleans(),
    shared_gate=st.booleans(),
    latent=st.sampled_from([0, 8]),
)
feeds = st.one_of(dense, experts)
sublayers = st.one_of(st.tuples(mixers, feeds), st.tuples(mixers, st.none()), st.tuples(st.none(), feeds))
blocks = st.builds(
    lambda sublayers, **rest: Block(mixer=sublayers[0], feed=sublayers[1], **rest),
    sublayers=sublayers,
    norm=st.sampled_from(["rmsnorm", "layernorm", "layernorm_fixed"]),
    norm_bias=st.booleans(),
    norms=st.sampled_from(["pre", "post", "sandwich"]),
    parallel=st.booleans(),
    shared_norm=st.booleans(),
)
degrees = st.sampled_from([1, 2, 4, 8])
HIDDEN = 32


@given(block=blocks, tp=degrees, ep=degrees, etp=degrees)
def test_class_counts_divide_like_the_tensors(block: Block, tp: int, ep: int, etp: int) -> None:
    tensors = block_tensors(block, HIDDEN)
    counts = shard_counts(block, HIDDEN)
    assert sum(counts.values()) == sum(tensor.numel for tensor in tensors) == block_params(block, HIDDEN)
    mixer = block.mixer.attention if isinstance(block.mixer, SideBySide) else block.mixer
    kv_parts = min(tp, mixer.kv_heads) if isinstance(mixer, Attention) else 1
    by_class = (
        counts["replicated"]
        + (counts["column"] + counts["row"]) / tp
        + counts["kv"] / kv_parts
        + counts["expert"] / (ep * etp)
        + counts["expert_whole"] / ep
    )
    assert by_class == sum(prod(local_shape(tensor, tp=tp, ep=ep, etp=etp)) for tensor in tensors)


@given(block=blocks)
def test_names_are_unique_and_experts_are_on_their_grid(block: Block) -> None:
    tensors = block_tensors(block, HIDDEN)
    assert len({tensor.name for tensor in tensors}) == len(tensors)
    assert all((tensor.grid == "expert") == (".experts." in tensor.name) for tensor in tensors)


def test_counts_are_the_callers_own() -> None:
    block = load_model("llama-3-8b").kinds[0]
    shard_counts(block, 4096)["column"] = 0
    assert shard_counts(block, 4096)["column"] > 0


def test_llama_3_70b_by_hand() -> None:
    """Head dimension 128, 64 and 8 heads: every tensor of a block from the paper's sizes."""
    model = load_model("llama-3-70b")
    assert shard_counts(model.kinds[0], model.hidden) == {
        "replicated": 2 * 8192,
        "column": 8192 * 8192 + 2 * 28672 * 8192,
        "row": 8192 * 8192 + 8192 * 28672,
        "kv": 2 * 8 * 128 * 8192,
        "expert": 0,
        "expert_whole": 0,
    }
    # A guide for Megatron Core states 4.54B parameters for stage 0 of TP4 PP4: 20 blocks and the embedding.
    rank = {t.name: prod(local_shape(t, tp=4)) for t in model_tensors(load_model("llama-3-70b", layers=20))}
    stage = sum(n for name, n in rank.items() if not name.startswith(("norm", "lm_head")))
    assert stage / 1e9 == pytest.approx(4.54, abs=0.005)


def test_kv_heads_are_replicated_beyond_their_number() -> None:
    model = load_model("llama-3-70b")
    k_proj = next(t for t in model_tensors(model) if t.name == "layers.0.self_attn.k_proj.weight")
    assert local_shape(k_proj, tp=4) == (256, 8192)
    assert local_shape(k_proj, tp=8) == local_shape(k_proj, tp=16) == (128, 8192)


def test_latent_down_projections_stay_whole() -> None:
    model = load_model("deepseek-v3", layers=4)
    whole = {
        t.name.split(".", 2)[2]
        for t in model_tensors(model)
        if t.name.startswith("layers.3.") and t.split == "replicated"
    }
    assert whole == {
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
        "self_attn.q_a_proj.weight",
        "self_attn.q_a_layernorm.weight",
        "self_attn.kv_a_proj_with_mqa.weight",
        "self_attn.kv_a_layernorm.weight",
        "mlp.gate.weight",
    }


def test_indivisible_is_refused() -> None:
    embedding = model_tensors(load_model("gpt2"))[0]
    with pytest.raises(FivefoldError, match="embed_tokens"):
        local_shape(embedding, tp=8)
    assert padded_vocab(50257, 128 * 8) == 51200
    assert padded_vocab(51200, 128 * 8) == 51200


@pytest.mark.parametrize("name", models())
def test_counts_add_up(name: str) -> None:
    model = load_model(name)
    counts = count_params(model)
    blocks = sum(run.count * n for run, n in zip(model.runs, counts.blocks, strict=True))
    assert counts.total == counts.embedding + blocks + counts.final_norm + counts.head
    assert (counts.head == 0) == model.tied_embeddings
    assert (counts.active == counts.total) != model.is_moe
