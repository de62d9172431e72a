"""Model FLOPs per token, counted from the operations.

A matrix product of (m, k) by (k, n) is 2 m n k FLOPs. Counted: every linear, the router, the attention scores and
their product with the values, the head. Not counted: the embedding look-up, norms, softmax, rotary embedding,
activation functions, biases; they are bandwidth, not arithmetic.

Two conventions for attention over a sequence of s tokens:
    noncausal  every token is charged s keys, as most published MFU numbers do (Narayanan et al. 2021, nanotron);
    causal     only the half of the score matrix that a causal mask keeps, s / 2 keys (Megatron-Bridge since 25.11).
A window of w < s tokens charges w keys, and causal w - w^2 / (2 s): the area of the band below the diagonal.
Backward is two products for each of the forward's, so training is three times the forward; recomputation is no
model FLOP and belongs to the layout.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from fivefold.errors import FivefoldError
from fivefold.model.spec import Attention, Block, Experts, FeedForward, LatentAttention, Mixer, ModelSpec

Convention = Literal["noncausal", "causal"]
CONVENTIONS: tuple[Convention, ...] = ("noncausal", "causal")
TRAINING_TO_FORWARD = 3


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
    return (*_mixer_matmuls(block.mixer, hidden), *_feed_matmuls(block.feed, hidden))


def attention_widths(mixer: Mixer) -> tuple[int, int]:
    """Summed widths of the queries' heads (scores) and of the values' heads (output of the attention core)."""
    if isinstance(mixer, LatentAttention):
        return mixer.heads * mixer.qk_head_dim, mixer.heads * mixer.v_head_dim
    return mixer.heads * mixer.head_dim, mixer.heads * mixer.head_dim


def keys_per_query(window: int | None, seq_len: int, convention: Convention) -> float:
    """Mean number of keys that a query is charged for."""
    if convention not in CONVENTIONS:
        raise FivefoldError(
            f"convention = {convention!r}: FLOPs of attention are counted as {' or '.join(CONVENTIONS)}",
            code="bad-convention",
            option="convention",
            value=convention,
            legal=list(CONVENTIONS),
        )
    keys = seq_len if window is None else min(window, seq_len)
    return float(keys) if convention == "noncausal" else keys - keys * keys / (2 * seq_len)


def attention_flops_per_token(mixer: Mixer, seq_len: int, convention: Convention = "noncausal") -> float:
    """Forward FLOPs per token of the attention core: scores and the product with the values."""
    window = mixer.window if isinstance(mixer, Attention) else None
    return 2 * sum(attention_widths(mixer)) * keys_per_query(window, seq_len, convention)


def block_flops_per_token(block: Block, hidden: int, seq_len: int, convention: Convention = "noncausal") -> float:
    """Forward FLOPs per token of one block."""
    linears = sum(matmul.flops_per_token for matmul in block_matmuls(block, hidden))
    return linears + attention_flops_per_token(block.mixer, seq_len, convention)


def head_flops_per_token(model: ModelSpec) -> int:
    """Forward FLOPs per token of the output projection, tied or not."""
    return 2 * model.hidden * model.vocab


def mtp_flops_per_token(model: ModelSpec, seq_len: int, convention: Convention = "noncausal") -> float:
    """Forward FLOPs per token of one multi-token-prediction module: projection 2h -> h, block, the head once more."""
    projection = 2 * (2 * model.hidden) * model.hidden
    block = block_flops_per_token(model.mtp_block, model.hidden, seq_len, convention)
    return projection + block + head_flops_per_token(model)


def forward_flops_per_token(model: ModelSpec, seq_len: int, convention: Convention = "noncausal") -> float:
    """Forward FLOPs per token of the whole model at sequences of seq_len tokens."""
    blocks = sum(run.count * block_flops_per_token(run.block, model.hidden, seq_len, convention) for run in model.runs)
    mtp = model.mtp * mtp_flops_per_token(model, seq_len, convention) if model.mtp else 0.0
    return blocks + head_flops_per_token(model) + mtp


def training_flops_per_token(model: ModelSpec, seq_len: int, convention: Convention = "noncausal") -> float:
    """Forward and backward model FLOPs per token; the numerator of MFU."""
    return TRAINING_TO_FORWARD * forward_flops_per_token(model, seq_len, convention)


def _mixer_matmuls(mixer: Mixer, hidden: int) -> tuple[Matmul, ...]:
    if isinstance(mixer, LatentAttention):
        return _latent_matmuls(mixer, hidden)
    width, kv_width = mixer.heads * mixer.head_dim, mixer.kv_heads * mixer.head_dim
    return (
        Matmul("q_proj", hidden, width),
        Matmul("k_proj", hidden, kv_width),
        Matmul("v_proj", hidden, kv_width),
        Matmul("o_proj", width, hidden),
    )


def _latent_matmuls(a: LatentAttention, hidden: int) -> tuple[Matmul, ...]:
    """Training form: keys and values are expanded for every head (the absorbed form is for decoding)."""
    queries = a.heads * a.qk_head_dim
    if a.q_lora_rank is None:
        query = (Matmul("q_proj", hidden, queries),)
    else:
        query = (Matmul("q_a_proj", hidden, a.q_lora_rank), Matmul("q_b_proj", a.q_lora_rank, queries))
    return (
        *query,
        Matmul("kv_a_proj_with_mqa", hidden, a.kv_lora_rank + a.qk_rope_head_dim),
        Matmul("kv_b_proj", a.kv_lora_rank, a.heads * (a.qk_nope_head_dim + a.v_head_dim)),
        Matmul("o_proj", a.heads * a.v_head_dim, hidden),
    )


def _feed_matmuls(feed: FeedForward | Experts, hidden: int) -> tuple[Matmul, ...]:
    if isinstance(feed, FeedForward):
        return _gated("", hidden, feed.ffn, feed.gated, 1)
    router = Matmul("gate", hidden, feed.num_experts)
    routed = _gated("experts.", hidden, feed.ffn, feed.gated, feed.top_k)
    shared = _gated("shared_experts.", hidden, feed.shared_ffn, feed.gated, 1) if feed.shared_ffn else ()
    return (router, *routed, *shared)


def _gated(prefix: str, hidden: int, ffn: int, gated: bool, share: int) -> tuple[Matmul, ...]:
    gate = (Matmul(f"{prefix}gate_proj", hidden, ffn, share),) if gated else ()
    return (
        *gate,
        Matmul(f"{prefix}up_proj", hidden, ffn, share),
        Matmul(f"{prefix}down_proj", ffn, hidden, share),
    )
