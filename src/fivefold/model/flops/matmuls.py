"""The linears of every kind of sublayer, one table from a spec's type to its function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from fivefold.model.spec import (
    Attention,
    Block,
    Experts,
    FeedForward,
    GatedDeltaNet,
    LatentAttention,
    Mamba,
    Mamba2,
    SideBySide,
)


class Matmul(msgspec.Struct, frozen=True):
    """A linear of one block: (tokens * share, k) by (k, n).

    share: rows per token of the batch; top_k for routed experts, which each token meets top_k times.
    """

    name: str
    k: int
    n: int
    share: int = 1

    @property
    def flops_per_token(self) -> int:
        return 2 * self.k * self.n * self.share


def block_matmuls(block: Block, hidden: int) -> tuple[Matmul, ...]:
    """The linears of one block, unsharded, named like the tensors they multiply by."""
    return (*_LINEARS[type(block.mixer)](block.mixer, hidden), *_LINEARS[type(block.feed)](block.feed, hidden))


def _none(sublayer: None, hidden: int) -> tuple[Matmul, ...]:
    return ()


def _attention(a: Attention, hidden: int) -> tuple[Matmul, ...]:
    width, kv_width = a.heads * a.head_dim, a.kv_heads * a.head_dim
    gate = (Matmul("q_gate_proj", hidden, width),) if a.gate else ()
    return (
        Matmul("q_proj", hidden, width),
        *gate,
        Matmul("k_proj", hidden, kv_width),
        Matmul("v_proj", hidden, kv_width),
        Matmul("o_proj", width, hidden),
    )


def _latent(a: LatentAttention, hidden: int) -> tuple[Matmul, ...]:
    """Training form: keys and values are expanded for every head (the absorbed form is for decoding)."""
    queries = a.heads * a.qk_head_dim
    if a.q_lora_rank is None:
        query = (Matmul("q_proj", hidden, queries),)
    else:
        query = (Matmul("q_a_proj", hidden, a.q_lora_rank), Matmul("q_b_proj", a.q_lora_rank, queries))
    indexer = ()
    if a.indexer is not None:
        indexer = (
            Matmul("indexer.wq_b", a.q_lora_rank or hidden, a.indexer.heads * a.indexer.head_dim),
            Matmul("indexer.wk", hidden, a.indexer.head_dim),
            Matmul("indexer.weights_proj", hidden, a.indexer.heads),
        )
    return (
        *query,
        Matmul("kv_a_proj_with_mqa", hidden, a.kv_lora_rank + a.qk_rope_head_dim),
        Matmul("kv_b_proj", a.kv_lora_rank, a.heads * (a.qk_nope_head_dim + a.v_head_dim)),
        *indexer,
        Matmul("o_proj", a.heads * a.v_head_dim, hidden),
    )


def _gated_delta_net(d: GatedDeltaNet, hidden: int) -> tuple[Matmul, ...]:
    return (
        Matmul("in_proj_qkv", hidden, 2 * d.key_width + d.value_width),
        Matmul("in_proj_z", hidden, d.value_width),
        Matmul("in_proj_b", hidden, d.value_heads),
        Matmul("in_proj_a", hidden, d.value_heads),
        Matmul("out_proj", d.value_width, hidden),
    )


def _mamba(m: Mamba, hidden: int) -> tuple[Matmul, ...]:
    return (
        Matmul("in_proj", hidden, 2 * m.inner),
        Matmul("x_proj", m.inner, m.dt_rank + 2 * m.state),
        Matmul("dt_proj", m.dt_rank, m.inner),
        Matmul("out_proj", m.inner, hidden),
    )


def _mamba2(m: Mamba2, hidden: int) -> tuple[Matmul, ...]:
    return (Matmul("in_proj", hidden, m.inner + m.conv_width + m.heads), Matmul("out_proj", m.inner, hidden))


def _side_by_side(s: SideBySide, hidden: int) -> tuple[Matmul, ...]:
    return (*_attention(s.attention, hidden), *_mamba2(s.state_space, hidden))


def _feed_forward(feed: FeedForward, hidden: int) -> tuple[Matmul, ...]:
    return _projections("", hidden, feed.ffn, feed.gated, 1)


def _experts(e: Experts, hidden: int) -> tuple[Matmul, ...]:
    router = Matmul("gate", hidden, e.num_experts)
    routed = _projections("experts.", e.latent or hidden, e.ffn, e.gated, e.top_k)
    if e.latent:
        down, up = Matmul("fc1_latent_proj", hidden, e.latent), Matmul("fc2_latent_proj", e.latent, hidden)
        routed = (down, *routed, up)
    if not e.shared_ffn:
        return (router, *routed)
    shared = _projections("shared_experts.", hidden, e.shared_ffn, e.gated, 1)
    gate = (Matmul("shared_expert_gate", hidden, 1),) if e.shared_gate else ()
    return (router, *routed, *shared, *gate)


def _projections(prefix: str, hidden: int, ffn: int, gated: bool, share: int) -> tuple[Matmul, ...]:
    gate = (Matmul(f"{prefix}gate_proj", hidden, ffn, share),) if gated else ()
    return (
        *gate,
        Matmul(f"{prefix}up_proj", hidden, ffn, share),
        Matmul(f"{prefix}down_proj", ffn, hidden, share),
    )


# Any: a table from a type to the function for that type, which the type system has no word for.
_LINEARS: dict[type, Callable[[Any, int], tuple[Matmul, ...]]] = {
    type(None): _none,
    Attention: _attention,
    LatentAttention: _latent,
    GatedDeltaNet: _gated_delta_net,
    Mamba: _mamba,
    Mamba2: _mamba2,
    SideBySide: _side_by_side,
    FeedForward: _feed_forward,
    Experts: _experts,
}
