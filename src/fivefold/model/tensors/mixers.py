"""The parameters of every kind of token mixer.

Splits over tp are Megatron-Core's (from memory) for attention, latent attention, the gated delta net
(core/ssm/gated_delta_net.py) and Mamba 2 (core/ssm/mamba_mixer.py): heads, and with them the channels of the
convolution, are divided. Megatron has no Mamba 1 and no sparse latent attention's indexer to follow: the channels of
Mamba 1 are divided as vLLM does (x_proj by rows), and the indexer is whole on every rank, as in DeepSeek's own code,
because all ranks have to pick the same keys. A norm over all heads of queries needs every rank's heads: it is kept
whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from fivefold.model.spec import (
    Attention,
    GatedDeltaNet,
    Indexer,
    LatentAttention,
    Mamba,
    Mamba2,
    Mixer,
    SideBySide,
)
from fivefold.model.tensors.tensor import Tensor, linear, norm


def mixer_tensors(mixer: Mixer | None, hidden: int) -> Iterator[Tensor]:
    """The parameters of a mixer; none where a block has no mixer."""
    return MIXERS[type(mixer)](mixer, hidden)


def _none(mixer: None, hidden: int) -> Iterator[Tensor]:
    return iter(())


def _attention(a: Attention, hidden: int) -> Iterator[Tensor]:
    width, kv_width = a.heads * a.head_dim, a.kv_heads * a.head_dim
    yield from linear("self_attn.q_proj", width, hidden, "column", a.qkv_bias)
    if a.gate:
        yield from linear("self_attn.q_gate_proj", width, hidden, "column", a.qkv_bias)
    yield from linear("self_attn.k_proj", kv_width, hidden, "kv", a.qkv_bias, a.kv_heads)
    yield from linear("self_attn.v_proj", kv_width, hidden, "kv", a.qkv_bias, a.kv_heads)
    if a.qk_norm:
        yield from _qk_norm(a)
    if a.sinks:
        yield Tensor("self_attn.sinks", (a.heads,), "column")
    yield from linear("self_attn.o_proj", hidden, width, "row", a.out_bias)


def _qk_norm(a: Attention) -> Iterator[Tensor]:
    if a.qk_norm_over == "each" and a.qk_norm_kind != "layernorm_fixed":
        yield Tensor("self_attn.q_norm.weight", (a.heads, a.head_dim), "column")
        yield Tensor("self_attn.k_norm.weight", (a.kv_heads, a.head_dim), "kv", a.kv_heads)
        return
    heads, kv_heads = (a.heads, a.kv_heads) if a.qk_norm_over == "all" else (1, 1)
    yield from norm("self_attn.q_norm", heads * a.head_dim, a.qk_norm_kind, bias=False)
    yield from norm("self_attn.k_norm", kv_heads * a.head_dim, a.qk_norm_kind, bias=False)


def _latent_attention(a: LatentAttention, hidden: int) -> Iterator[Tensor]:
    queries = a.heads * a.qk_head_dim
    if a.q_lora_rank is None:
        yield from linear("self_attn.q_proj", queries, hidden, "column")
    else:
        yield from linear("self_attn.q_a_proj", a.q_lora_rank, hidden, "replicated", a.bias)
        yield from norm("self_attn.q_a_layernorm", a.q_lora_rank, "rmsnorm", bias=False)
        yield from linear("self_attn.q_b_proj", queries, a.q_lora_rank, "column")
    latent = a.kv_lora_rank + a.qk_rope_head_dim
    yield from linear("self_attn.kv_a_proj_with_mqa", latent, hidden, "replicated", a.bias)
    yield from norm("self_attn.kv_a_layernorm", a.kv_lora_rank, "rmsnorm", bias=False)
    keys_values = a.heads * (a.qk_nope_head_dim + a.v_head_dim)
    yield from linear("self_attn.kv_b_proj", keys_values, a.kv_lora_rank, "column")
    if a.indexer is not None:
        yield from _indexer(a.indexer, a.q_lora_rank or hidden, hidden)
    yield from linear("self_attn.o_proj", hidden, a.heads * a.v_head_dim, "row", a.bias)


def _indexer(i: Indexer, queries_from: int, hidden: int) -> Iterator[Tensor]:
    yield from linear("self_attn.indexer.wq_b", i.heads * i.head_dim, queries_from, "replicated")
    yield from linear("self_attn.indexer.wk", i.head_dim, hidden, "replicated")
    yield from norm("self_attn.indexer.k_norm", i.head_dim, "layernorm", bias=True)
    yield from linear("self_attn.indexer.weights_proj", i.heads, hidden, "replicated")


def _gated_delta_net(d: GatedDeltaNet, hidden: int) -> Iterator[Tensor]:
    qkv = 2 * d.key_width + d.value_width
    yield from linear("linear_attn.in_proj_qkv", qkv, hidden, "column")
    yield from linear("linear_attn.in_proj_z", d.value_width, hidden, "column")
    yield from linear("linear_attn.in_proj_b", d.value_heads, hidden, "column")
    yield from linear("linear_attn.in_proj_a", d.value_heads, hidden, "column")
    yield Tensor("linear_attn.conv1d.weight", (qkv, 1, d.conv), "column")
    yield Tensor("linear_attn.dt_bias", (d.value_heads,), "column")
    yield Tensor("linear_attn.A_log", (d.value_heads,), "column")
    yield from norm("linear_attn.norm", d.value_dim, "rmsnorm", bias=False)
    yield from linear("linear_attn.out_proj", hidden, d.value_width, "row")


def _mamba(m: Mamba, hidden: int) -> Iterator[Tensor]:
    yield from linear("mamba.in_proj", 2 * m.inner, hidden, "column", m.proj_bias)
    yield from _conv("mamba.conv1d", m.inner, m.conv, m.conv_bias)
    yield from linear("mamba.x_proj", m.dt_rank + 2 * m.state, m.inner, "row")
    if m.inner_norms:
        yield from norm("mamba.dt_layernorm", m.dt_rank, "rmsnorm", bias=False)
        yield from norm("mamba.b_layernorm", m.state, "rmsnorm", bias=False)
        yield from norm("mamba.c_layernorm", m.state, "rmsnorm", bias=False)
    yield from linear("mamba.dt_proj", m.inner, m.dt_rank, "column", bias=True)
    yield Tensor("mamba.A_log", (m.inner, m.state), "column")
    yield Tensor("mamba.D", (m.inner,), "column")
    yield from linear("mamba.out_proj", hidden, m.inner, "row", m.proj_bias)


def _mamba2(m: Mamba2, hidden: int) -> Iterator[Tensor]:
    yield from linear("mamba.in_proj", m.inner + m.conv_width + m.heads, hidden, "column", m.proj_bias)
    yield from _conv("mamba.conv1d", m.conv_width, m.conv, m.conv_bias)
    for name in ("dt_bias", "A_log", "D"):
        yield Tensor(f"mamba.{name}", (m.heads,), "column")
    if m.norm:
        # One weight per channel: unlike a block's norms it is divided with the channels (each rank norms its groups).
        yield Tensor("mamba.norm.weight", (m.inner,), "column")
    yield from linear("mamba.out_proj", hidden, m.inner, "row", m.proj_bias)


def _conv(name: str, channels: int, taps: int, bias: bool) -> Iterator[Tensor]:
    yield Tensor(f"{name}.weight", (channels, 1, taps), "column")
    if bias:
        yield Tensor(f"{name}.bias", (channels,), "column")


def _side_by_side(s: SideBySide, hidden: int) -> Iterator[Tensor]:
    yield from _attention(s.attention, hidden)
    yield from _mamba2(s.state_space, hidden)


# Any: a table from a type to the function for that type, which the type system has no word for.
MIXERS: dict[type, Callable[[Any, int], Iterator[Tensor]]] = {
    type(None): _none,
    Attention: _attention,
    LatentAttention: _latent_attention,
    GatedDeltaNet: _gated_delta_net,
    Mamba: _mamba,
    Mamba2: _mamba2,
    SideBySide: _side_by_side,
}
