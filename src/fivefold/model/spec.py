"""ModelSpec: what is trained, as an ordered run-length list of blocks.

A block is an ordered list of two sublayers, a token mixer and a feed-forward; embedding, final norm,
head and multi-token-prediction modules are items beside the blocks that a pipeline stage can hold.
Sizes are those of the whole, unsharded model; nothing here knows about parallelism.
"""

from __future__ import annotations

from typing import Literal

import msgspec

# "layernorm_fixed" has no parameters (OLMo, arXiv 2402.00838, section 2.1).
Norm = Literal["rmsnorm", "layernorm", "layernorm_fixed"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]


class Attention(msgspec.Struct, frozen=True, kw_only=True, tag="attention"):
    """Multi-head, grouped-query or multi-query softmax attention.

    window: sliding-window size in tokens, None for full causal attention.
    chunk: tokens attend within consecutive chunks of this size only (llama 4), None for no chunks.
    qk_norm: a norm on queries and on keys. qk_norm_over: "head" shares one weight of head_dim among the heads (qwen3);
        "all" normalises all heads together (olmo2); "each" has a weight of head_dim for every head (command-r-plus).
    qk_norm_kind: layernorm here has no bias.
    sinks: one learned logit per head that takes part in the softmax (gpt-oss).
    gate: the output is multiplied by the sigmoid of a projection as wide as the queries (qwen3-next).
    alibi: linear biases on the scores instead of positions (Press et al. 2021, arXiv 2108.12409).
    """

    heads: int
    kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    qk_norm_over: Literal["head", "all", "each"] = "head"
    qk_norm_kind: Norm = "rmsnorm"
    rope: bool = True
    window: int | None = None
    chunk: int | None = None
    sinks: bool = False
    gate: bool = False
    alibi: bool = False


class Indexer(msgspec.Struct, frozen=True, kw_only=True):
    """What picks the keys that a query of sparse latent attention sees (DeepSeek-V3.2, section 2.1).

    heads, head_dim: of its own queries, projected from the query latent; it has one key per token, and one weight per
    head and token. top_k: keys that it picks for a query.
    """

    heads: int
    head_dim: int
    top_k: int


class LatentAttention(msgspec.Struct, frozen=True, kw_only=True, tag="latent_attention"):
    """Multi-head latent attention (DeepSeek-V2, section 2.1). q_lora_rank None: queries are projected directly."""

    heads: int
    q_lora_rank: int | None = None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    bias: bool = False
    indexer: Indexer | None = None

    @property
    def qk_head_dim(self) -> int:
        """Width of one head's query and key: the part without and the part with rotary embedding."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


class GatedDeltaNet(msgspec.Struct, frozen=True, kw_only=True, tag="gated_delta_net"):
    """Linear attention by the gated delta rule (Yang et al. 2024, arXiv 2412.06464), as in qwen3-next.

    One projection makes queries, keys, values and output gate, another the two scalars per value head; a causal
    depthwise convolution of `conv` taps runs over queries, keys and values; the output is normed and gated.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv: int

    @property
    def key_width(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        return self.value_heads * self.value_dim


class Mamba(msgspec.Struct, frozen=True, kw_only=True, tag="mamba"):
    """Selective state space (Gu and Dao 2023, arXiv 2312.00752), as in jamba.

    inner: width after the input projection (which makes as much for the gate). dt_rank: of the step size's projection.
    inner_norms: RMSNorms on dt, B and C (jamba).
    """

    inner: int
    state: int
    conv: int
    dt_rank: int
    conv_bias: bool = True
    proj_bias: bool = False
    inner_norms: bool = False


class Mamba2(msgspec.Struct, frozen=True, kw_only=True, tag="mamba2"):
    """State-space duality (Dao and Gu 2024, arXiv 2405.21060), as in nemotron-h and falcon-h1.

    inner = heads * head_dim; `groups` share B and C of `state` each; chunk: tokens per block of the scan.
    norm: a gated RMSNorm before the output projection.
    """

    heads: int
    head_dim: int
    groups: int
    state: int
    conv: int
    chunk: int = 256
    conv_bias: bool = True
    proj_bias: bool = False
    norm: bool = True

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def conv_width(self) -> int:
        """Channels of the convolution: x, B and C."""
        return self.inner + 2 * self.groups * self.state


class SideBySide(msgspec.Struct, frozen=True, kw_only=True, tag="side_by_side"):
    """Attention and a state space that read the same normed input and whose outputs are added (falcon-h1)."""

    attention: Attention
    state_space: Mamba2


class FeedForward(msgspec.Struct, frozen=True, kw_only=True, tag="feed_forward"):
    """A dense feed-forward network; gated means SwiGLU-like, with two input projections."""

    ffn: int
    gated: bool = True
    bias: bool = False
    activation: Activation = "silu"


class Experts(msgspec.Struct, frozen=True, kw_only=True, tag="experts"):
    """Routed experts and, beside them, shared experts that every token passes.

    ffn: intermediate size of one routed expert. shared_ffn: summed width of the shared experts, 0 if none.
    bias: of each routed expert's projections. router_bias: of the router. shared_gate: the shared experts' output is
    scaled by the sigmoid of a projection to one number (qwen2-moe). clamped: both inputs of the gate are (gpt-oss).
    latent: width that tokens are projected to before they are sent to routed experts, and back from after, 0: they are
    sent as they are (Nemotron 3 Super's LatentMoE; Megatron-Core's --moe-latent-size).
    """

    num_experts: int
    top_k: int
    ffn: int
    shared_ffn: int = 0
    gated: bool = True
    activation: Activation = "silu"
    bias: bool = False
    router_bias: bool = False
    shared_gate: bool = False
    clamped: bool = False
    latent: int = 0


Mixer = Attention | LatentAttention | GatedDeltaNet | Mamba | Mamba2 | SideBySide
Feed = FeedForward | Experts


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """One Transformer block: a token mixer and a feed-forward with their norms and residuals. Hybrids have blocks with
    one of the two (nemotron-h); a block has at least one.

    norms: "pre" norms what a sublayer reads; "post" what it gives, before the residual (olmo2); "sandwich" both
        (gemma2).
    parallel: mixer and feed-forward read the block's input and are added together; shared_norm: through one norm
        (gpt-j, falcon-7b, command-r) instead of one each (gpt-neox).
    """

    mixer: Mixer | None
    feed: Feed | None
    norm: Norm = "rmsnorm"
    norm_bias: bool = False
    norms: Literal["pre", "post", "sandwich"] = "pre"
    parallel: bool = False
    shared_norm: bool = False

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
    embedding_norm: a norm of the final norm's kind right after the embedding (bloom). head_bias: of the output
        projection (gpt-j).
    peculiar: what the model computes besides and no size shows ("scores are soft-capped", "embeddings are scaled by
        sqrt(hidden)"): nothing to a plan's figures, everything to a trainer.
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
    embedding_norm: bool = False
    head_bias: bool = False
    peculiar: tuple[str, ...] = ()
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
        """The block inside a multi-token-prediction module, like the model's last (DeepSeek-V3, section 2.2); where
        that is a feed-forward alone, with the model's attention before it (Nemotron 3, "*E")."""
        last = self.runs[-1].block
        if last.mixer is not None:
            return last
        mixer = next((kind.mixer for kind in reversed(self.kinds) if isinstance(kind.mixer, Attention)), None)
        return msgspec.structs.replace(last, mixer=mixer)

    @property
    def is_moe(self) -> bool:
        return any(run.block.is_moe for run in self.runs)
