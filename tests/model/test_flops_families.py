"""FLOPs of every family against torch's own counter running transformers' small models, to the last one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from small import SMALL

from fivefold.model import (
    Attention,
    GatedDeltaNet,
    LatentAttention,
    Mamba,
    Mamba2,
    ModelSpec,
    attention_flops_per_token,
    block_matmuls,
    forward_flops_per_token,
    keys_per_query,
    load_model,
)

BATCH, SEQ = 2, 64
CHUNK = 16
# What makes the count comparable: all keys within reach, and not the dense experts that this class computes for all.
CHANGES: dict[str, dict[str, Any]] = {
    "deepseek_v32": {"index_topk": SEQ},
    "llama4_text": {"num_local_experts": 1},
    # As many groups as heads: transformers repeats B and C for every head of a group before it multiplies them.
    "nemotron_h": {"n_groups": 4, "chunk_size": CHUNK},
    "falcon_h1": {"mamba_n_groups": 4, "mamba_chunk_size": CHUNK},
}
SCANS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "jamba", "nemotron_h", "falcon_h1")


def counted(family: str, build: Callable[..., Any]) -> tuple[ModelSpec, dict[str, int]]:
    """The model, and what torch counts of one forward pass by kind of operation, without the rotary angles."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    config = {"model_type": family, "pad_token_id": 0} | SMALL[family][0] | CHANGES.get(family, {})
    if "max_position_embeddings" in config:
        config["max_position_embeddings"] = 2 * SEQ
    options = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = build(config, device="cpu", **options).eval()
    model.requires_grad_(False)  # else torch's counter trips over dbrx's clamp in place
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.arange(BATCH * SEQ).reshape(BATCH, SEQ) % 33, use_cache=False)
    counts = counter.get_flop_counts()
    by_kind = {str(kind).rpartition(".")[2]: flops for kind, flops in counts["Global"].items()}
    rotary = sum(sum(kinds.values()) for name, kinds in counts.items() if name.endswith("rotary_emb"))
    by_kind["bmm"] = by_kind.get("bmm", 0) - rotary
    return load_model(config), by_kind


@pytest.mark.parametrize("family", [family for family in SMALL if family not in SCANS])
def test_forward_flops_against_torch(family: str, transformers_model: Callable[..., Any]) -> None:
    spec, counts = counted(family, transformers_model)
    assert sum(counts.values()) == BATCH * SEQ * forward_flops_per_token(spec, SEQ, "noncausal")


def linears(spec: ModelSpec) -> int:
    blocks = sum(run.count * sum(m.flops_per_token for m in block_matmuls(run.block, spec.hidden)) for run in spec.runs)
    return BATCH * SEQ * (blocks + 2 * spec.hidden * spec.vocab)


def mixers(spec: ModelSpec) -> list[Any]:
    return [run.block.mixer for run in spec.runs for _ in range(run.count)]


@pytest.mark.parametrize("family", [family for family in SCANS if family != "jamba"])
def test_linears_of_hybrids(family: str, transformers_model: Callable[..., Any]) -> None:
    spec, counts = counted(family, transformers_model)
    assert counts["mm"] + counts.get("addmm", 0) == linears(spec)


@pytest.mark.parametrize("family", SCANS[:3])
def test_gated_delta_net_by_chunks(family: str, transformers_model: Callable[..., Any]) -> None:
    """transformers solves the two triangular systems, which torch does not count; the kernels invert and multiply."""
    spec, counts = counted(family, transformers_model)
    nets = [mixer for mixer in mixers(spec) if isinstance(mixer, GatedDeltaNet)]
    solved = sum(net.value_heads * (2 * SEQ * (net.key_dim + net.value_dim) + SEQ * SEQ / 3) for net in nets)
    ours = sum(attention_flops_per_token(mixer, SEQ) for mixer in mixers(spec)) - solved
    assert nets
    assert counts["bmm"] == pytest.approx(BATCH * SEQ * ours, rel=1e-12)


@pytest.mark.parametrize("family", ["nemotron_h", "falcon_h1"])
def test_mamba_2_by_chunks(family: str, transformers_model: Callable[..., Any]) -> None:
    """Beside ours transformers counts the step from state to state, a product with a (chunks + 1)^2 triangle."""
    spec, counts = counted(family, transformers_model)
    spaces = [getattr(mixer, "state_space", mixer) for mixer in mixers(spec)]
    spaces = [space for space in spaces if isinstance(space, Mamba2)]
    chunks = SEQ // CHUNK + 1
    between = sum(2 * BATCH * space.inner * space.state * chunks**2 for space in spaces)
    ours = BATCH * SEQ * sum(attention_flops_per_token(mixer, SEQ) for mixer in mixers(spec))
    assert spaces
    assert counts["bmm"] == ours + between


def test_jamba(transformers_model: Callable[..., Any]) -> None:
    """Of its scan transformers has one product that torch counts, the states with C: 2 of our 7."""
    spec, counts = counted("jamba", transformers_model)
    products = sum(flops for kind, flops in counts.items() if kind != "convolution")
    spaces = [mixer for mixer in mixers(spec) if isinstance(mixer, Mamba)]
    scan = sum(attention_flops_per_token(space, SEQ) * 2 / 7 for space in spaces)
    attention = sum(attention_flops_per_token(m, SEQ) for m in mixers(spec) if isinstance(m, Attention))
    assert spaces and attention
    assert products == pytest.approx(linears(spec) + BATCH * SEQ * (attention + scan), rel=1e-12)


def test_mamba_is_seven_per_channel_and_state() -> None:
    mixer = Mamba(inner=10, state=3, conv=4, dt_rank=2)
    assert attention_flops_per_token(mixer, 100) == attention_flops_per_token(mixer, 7, "causal") == 7 * 10 * 3


def test_chunks_of_attention_against_the_mask() -> None:
    for seq_len in (7, 8, 20, 21):
        whole = [sum(i // 8 == j // 8 for j in range(seq_len)) for i in range(seq_len)]
        assert keys_per_query(None, seq_len, "noncausal", 8) == pytest.approx(sum(whole) / seq_len)
        assert keys_per_query(None, seq_len, "causal", 8) == pytest.approx(sum(whole) / seq_len / 2)


def test_llama_4_attends_within_chunks() -> None:
    model = load_model("llama-4-scout")
    chunked, full = (block.mixer for block in model.kinds)
    assert isinstance(chunked, Attention) and isinstance(full, Attention)
    assert (chunked.chunk, chunked.rope, full.chunk, full.rope) == (8192, True, None, False)
    assert attention_flops_per_token(chunked, 65536) == attention_flops_per_token(full, 65536) / 8


def test_sparse_latent_attention_by_hand() -> None:
    """DeepSeek-V3.2 at 32,768 tokens: 2,048 keys for 128 heads of 192 + 128, all keys for the indexer's 64 of 128."""
    mixer = load_model("deepseek-v3.2").kinds[0].mixer
    assert isinstance(mixer, LatentAttention)
    attention, indexer = 2 * 128 * (192 + 128) * 2048, 2 * 64 * (128 + 1) * 32768
    assert attention_flops_per_token(mixer, 32768) == attention + indexer
    dense = load_model("deepseek-v3").kinds[0].mixer
    assert attention_flops_per_token(dense, 32768) == 2 * 128 * (192 + 128) * 32768
