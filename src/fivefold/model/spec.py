"""ModelSpec: what is trained, as an ordered run-length list of blocks.

A block is an ordered list of two sublayers, a token mixer and a feed-forward; embedding, final norm,
head and multi-token-prediction modules are items beside the blocks that a pipeline stage can hold.
Sizes are those of the whole, unsharded model; nothing here knows about parallelism.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Norm = Literal["rmsnorm", "layernorm"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]


class Attention(msgspec.Struct, frozen=True, kw_only=True, tag="attention"):
    """Multi-head, grouped-query or multi-query softmax attention.

    window: sliding-window size in tokens, None for full causal attention.
    qk_norm: an RMSNorm over head_dim on queries and on keys (qwen3).
    """

    heads: int
    kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    rope: bool = True
    window: int | None = None


class LatentAttention(msgspec.Struct, frozen=True, kw_only=True, tag="latent_attention"):
    """Multi-head latent attention (DeepSeek-V2, section 2.1). q_lora_rank None: queries are projected directly."""

    heads: int
    q_lora_rank: int | None = None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    bias: bool = False

    @property
    def qk_head_dim(self) -> int:
        """Width of one head's query and key: the part without and the part with rotary embedding."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


class FeedForward(msgspec.Struct, frozen=True, kw_only=True, tag="feed_forward"):
    """A dense feed-forward network; gated means SwiGLU-like, with two input projections."""

    ffn: int
    gated: bool = True
    bias: bool = False
    activation: Activation = "silu"


class Experts(msgspec.Struct, frozen=True, kw_only=True, tag="experts"):
    """Routed experts and, beside them, shared experts that every token passes.

    ffn: intermediate size of one routed expert. shared_ffn: summed width of the shared experts, 0 if none.
    """

    num_experts: int
    top_k: int
    ffn: int
    shared_ffn: int = 0
    gated: bool = True
    activation: Activation = "silu"


Mixer = Attention | LatentAttention
Feed = FeedForward | Experts


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """One Transformer block: pre-norm, token mixer, pre-norm, feed-forward."""

    mixer: Mixer
    feed: Feed
    norm: Norm = "rmsnorm"
    norm_bias: bool = False

    @property
    def is_moe(self) -> bool:
        return isinstance(self.feed, Experts)


class BlockRun(msgspec.Struct, frozen=True):
    """`count` consecutive equal blocks."""

    count: int
    block: Block


class Rotary(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary position embedding (Su et al. 2021, arXiv 2104.09864). It changes what is computed and no size.

    theta: base of the frequencies. share: of each head's dimensions, those that turn.
    scaling: how frequencies are stretched beyond the pre-training length, "default" for not at all, else the
        configuration's own word (llama3, yarn, linear, ...); the numbers after it are llama3's, None elsewhere.
    """

    theta: float = 10_000.0
    share: float = 1.0
    scaling: str = "default"
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_positions: int | None = None


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder-only Transformer.

    vocab: rows of the embedding as published, unpadded (padding belongs to the runtime).
    learned_positions: rows of a learned position table, 0 when positions are rotary.
    rotary, norm_eps: what turns queries and keys, and what every norm adds to the variance; they shape no tensor and
        cost nothing, and a trainer needs them.
    mtp: multi-token-prediction modules after the last block (DeepSeek-V3); 0 unless asked for.
    """

    name: str
    family: str
    hidden: int
    vocab: int
    max_position: int
    runs: tuple[BlockRun, ...]
    tied_embeddings: bool = False
    learned_positions: int = 0
    rotary: Rotary = Rotary()
    norm_eps: float = 1e-5
    final_norm: Norm = "rmsnorm"
    final_norm_bias: bool = False
    mtp: int = 0
    source: str = ""

    @property
    def layers(self) -> int:
        """Number of blocks, without embedding, head and MTP modules."""
        return sum(run.count for run in self.runs)

    @property
    def kinds(self) -> tuple[Block, ...]:
        """The distinct blocks in order of first appearance."""
        return tuple(dict.fromkeys(run.block for run in self.runs))

    @property
    def mtp_block(self) -> Block:
        """The block inside a multi-token-prediction module, like the model's last (DeepSeek-V3, section 2.2)."""
        return self.runs[-1].block

    @property
    def is_moe(self) -> bool:
        return any(run.block.is_moe for run in self.runs)
