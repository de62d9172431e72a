"""FLOPs of what a mixer does between its linears: attention's two products, linear attention and state spaces.

    Attention           2 (width of queries + width of values) per token and key.
    sparse latent       the same over the keys that the indexer picks, top_k at most, and the indexer's own scores over
                        all of them: 2 heads (head_dim + 1), the 1 for weighing its heads (DeepSeek-V3.2, equation 1).
    Gated delta net     by chunks of C = 64 tokens (the public kernels' size), per value head and token:
                        2 C (3 K + 2 V) + 6 K V + C^2 / 3. That is K K^T, T K, Q K^T (C K each) and T V, the scores'
                        product with the values (C V each), three products with the state (K V), and the inverse of a
                        triangle (Yang et al. 2024, arXiv 2406.06484 section 3.2 and 2412.06464 section 3.3).
    Mamba 2             by chunks of C = `chunk` tokens, per token: 2 C N for each group (C B^T), and for each head
                        2 C P (its product with x) + 4 N P (into the chunk's state and out of the one before)
                        (Dao and Gu 2024, arXiv 2405.21060 section 6). The step from state to state is left out.
    Mamba 1             7 per channel and element of the state: dt A, its exponential, B dt x, and two multiply-adds.
                        It has no matrix products; 7 is also what Megatron-LM charges (training.py, from memory).

C stands for keys_per_query within a chunk, so that the causal convention charges half of every chunk's square.
Depthwise convolutions are bandwidth, like norms, and are not counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from fivefold.errors import FivefoldError
from fivefold.model.spec import Attention, GatedDeltaNet, LatentAttention, Mamba, Mamba2, Mixer, SideBySide

Convention = Literal["noncausal", "causal"]
CONVENTIONS: tuple[Convention, ...] = ("noncausal", "causal")
# Of flash-linear-attention's kernels for the delta rule and of transformers' own loop (both from memory: 64).
DELTA_CHUNK = 64
MAMBA_FLOPS_PER_STATE = 7


def attention_widths(mixer: Mixer | None) -> tuple[int, int]:
    """Summed widths of the queries' heads (scores) and of the values' heads (output of the attention core); 0 for
    mixers that make no scores over the sequence."""
    if isinstance(mixer, LatentAttention):
        return mixer.heads * mixer.qk_head_dim, mixer.heads * mixer.v_head_dim
    if isinstance(mixer, SideBySide):
        mixer = mixer.attention
    if isinstance(mixer, Attention):
        return mixer.heads * mixer.head_dim, mixer.heads * mixer.head_dim
    return 0, 0


def keys_per_query(window: int | None, seq_len: float, convention: Convention, chunk: int | None = None) -> float:
    """Mean number of keys that a query is charged for; chunk: it sees those of its own chunk only."""
    if convention not in CONVENTIONS:
        raise FivefoldError(
            f"convention = {convention!r}: FLOPs of attention are counted as {' or '.join(CONVENTIONS)}",
            code="bad-convention",
            option="convention",
            value=convention,
            legal=list(CONVENTIONS),
        )
    if chunk is not None and chunk < seq_len:
        whole, rest = divmod(seq_len, chunk)
        inside = whole * chunk * keys_per_query(window, chunk, convention)
        return (inside + (rest * keys_per_query(window, rest, convention) if rest else 0.0)) / seq_len
    keys = seq_len if window is None else min(window, seq_len)
    return float(keys) if convention == "noncausal" else keys - keys * keys / (2 * seq_len)


def attention_flops_per_token(mixer: Mixer | None, seq_len: float, convention: Convention = "noncausal") -> float:
    """Forward FLOPs per token of the mixer's core: all that it computes but its linears; 0 without a mixer."""
    return _CORES[type(mixer)](mixer, seq_len, convention)


def _none(mixer: None, seq_len: float, convention: Convention) -> float:
    return 0.0


def _attention(a: Attention, seq_len: float, convention: Convention) -> float:
    return 2 * sum(attention_widths(a)) * keys_per_query(a.window, seq_len, convention, a.chunk)


def _latent(a: LatentAttention, seq_len: float, convention: Convention) -> float:
    if a.indexer is None:
        return 2 * sum(attention_widths(a)) * keys_per_query(None, seq_len, convention)
    scores = 2 * a.indexer.heads * (a.indexer.head_dim + 1) * keys_per_query(None, seq_len, convention)
    # A query with fewer than top_k keys before it takes all of them: the same count as of a window.
    return 2 * sum(attention_widths(a)) * keys_per_query(a.indexer.top_k, seq_len, convention) + scores


def _gated_delta_net(d: GatedDeltaNet, seq_len: float, convention: Convention) -> float:
    keys = keys_per_query(None, seq_len, convention, DELTA_CHUNK)
    square = 2 * keys * (3 * d.key_dim + 2 * d.value_dim)
    inverse = keys_per_query(None, seq_len, "noncausal", DELTA_CHUNK) ** 2 / 3
    return d.value_heads * (square + 6 * d.key_dim * d.value_dim + inverse)


def _mamba(m: Mamba, seq_len: float, convention: Convention) -> float:
    return float(MAMBA_FLOPS_PER_STATE * m.inner * m.state)


def _mamba2(m: Mamba2, seq_len: float, convention: Convention) -> float:
    keys = keys_per_query(None, seq_len, convention, m.chunk)
    return 2 * keys * (m.groups * m.state + m.inner) + 4 * m.inner * m.state


def _side_by_side(s: SideBySide, seq_len: float, convention: Convention) -> float:
    return _attention(s.attention, seq_len, convention) + _mamba2(s.state_space, seq_len, convention)


# Any: a table from a type to the function for that type, which the type system has no word for.
_CORES: dict[type, Callable[[Any, float, Convention], float]] = {
    type(None): _none,
    Attention: _attention,
    LatentAttention: _latent,
    GatedDeltaNet: _gated_delta_net,
    Mamba: _mamba,
    Mamba2: _mamba2,
    SideBySide: _side_by_side,
}
