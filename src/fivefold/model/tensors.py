"""Every parameter tensor of a model by name: its full shape, and how it is split over the ranks.

The names are those of transformers' Llama-like modules, with fused projections kept apart (q_proj, k_proj, v_proj,
gate_proj, up_proj) and the routed experts of a block stacked in one tensor. Linear weights have shape (out, in).

The splits are Megatron's (Shoeybi et al. 2019, arXiv 1909.08053; for latent attention and experts Megatron-Core,
from memory): norms, the router and the down-projections of latent attention are kept whole on every rank of tp.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import prod
from typing import Literal

import msgspec

from fivefold.errors import FivefoldError
from fivefold.model.spec import Attention, Block, Experts, FeedForward, LatentAttention, Mixer, ModelSpec, Norm

Split = Literal["replicated", "column", "row", "kv", "vocab", "expert_column", "expert_row"]
Grid = Literal["dense", "expert"]


class Tensor(msgspec.Struct, frozen=True):
    """One parameter.

    shape: the whole, unsharded tensor.
    split: replicated    whole on every rank of tp;
           column        dimension 0 over tp;
           row           dimension 1 over tp;
           kv            dimension 0 over min(tp, kv_heads), each part held by tp / kv_heads ranks beyond that;
           vocab         dimension 0 over tp, after padding by the runtime;
           expert_column dimension 0 over ep and 1 over etp;
           expert_row    dimension 0 over ep and 2 over etp.
    kv_heads: heads that a kv tensor holds, 0 for the others.
    """

    name: str
    shape: tuple[int, ...]
    split: Split
    kv_heads: int = 0

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def grid(self) -> Grid:
        """Whether the tensor's gradient is reduced on the dense or on the expert grid."""
        return "expert" if self.split in ("expert_column", "expert_row") else "dense"

    def prefixed(self, prefix: str) -> Tensor:
        return Tensor(prefix + self.name, self.shape, self.split, self.kv_heads)


def block_tensors(block: Block, hidden: int) -> tuple[Tensor, ...]:
    """The parameters of one block in the order in which a token meets them; names are relative to the block."""
    return (
        *_norm("input_layernorm", hidden, block.norm, block.norm_bias),
        *_mixer(block.mixer, hidden),
        *_norm("post_attention_layernorm", hidden, block.norm, block.norm_bias),
        *_feed(block.feed, hidden),
    )


def embedding_tensors(model: ModelSpec) -> tuple[Tensor, ...]:
    """The token embedding and, where positions are learned, their table."""
    table = [Tensor("embed_tokens.weight", (model.vocab, model.hidden), "vocab")]
    if model.learned_positions:
        table.append(Tensor("embed_positions.weight", (model.learned_positions, model.hidden), "replicated"))
    return tuple(table)


def head_tensors(model: ModelSpec) -> tuple[Tensor, ...]:
    """The final norm and the output projection, which a tied model does not have as a tensor of its own."""
    tensors = list(_norm("norm", model.hidden, model.final_norm, model.final_norm_bias))
    if not model.tied_embeddings:
        tensors.append(Tensor("lm_head.weight", (model.vocab, model.hidden), "vocab"))
    return tuple(tensors)


def mtp_tensors(model: ModelSpec) -> tuple[Tensor, ...]:
    """One multi-token-prediction module (DeepSeek-V3, section 2.2): the norms of the embedding and of the hidden
    state, their projection 2h -> h, one block and a norm before the head. Embedding and head are the model's own."""
    h = model.hidden
    return (
        Tensor("enorm.weight", (h,), "replicated"),
        Tensor("hnorm.weight", (h,), "replicated"),
        Tensor("eh_proj.weight", (h, 2 * h), "column"),
        *(tensor.prefixed("block.") for tensor in block_tensors(model.mtp_block, h)),
        *_norm("norm", h, model.final_norm, model.final_norm_bias),
    )


def model_tensors(model: ModelSpec) -> tuple[Tensor, ...]:
    """All parameters in order: embedding, blocks ("layers.I."), final norm, head, MTP modules ("mtp.K.")."""
    tensors = list(embedding_tensors(model))
    index = 0
    for run in model.runs:
        inner = block_tensors(run.block, model.hidden)
        for i in range(index, index + run.count):
            tensors += [tensor.prefixed(f"layers.{i}.") for tensor in inner]
        index += run.count
    tensors += head_tensors(model)
    for k in range(model.mtp):
        tensors += [tensor.prefixed(f"mtp.{k}.") for tensor in mtp_tensors(model)]
    return tuple(tensors)


def local_shape(tensor: Tensor, *, tp: int = 1, ep: int = 1, etp: int = 1) -> tuple[int, ...]:
    """The shape that one rank holds. A vocab tensor must be padded already (see padded_vocab).

    Raises FivefoldError where a dimension does not divide. That heads stay whole is a rule of the layout's.
    """
    parts = {
        "replicated": (),
        "column": (tp,),
        "row": (1, tp),
        "kv": (min(tp, tensor.kv_heads or 1),),
        "vocab": (tp,),
        "expert_column": (ep, etp),
        "expert_row": (ep, 1, etp),
    }[tensor.split]
    shape = list(tensor.shape)
    for dimension, ranks in enumerate(parts):
        if shape[dimension] % ranks:
            raise FivefoldError(
                f"{tensor.name}: dimension {dimension} of {tensor.shape} does not divide over {ranks} ranks",
                code="indivisible-tensor",
                value=ranks,
            )
        shape[dimension] //= ranks
    return tuple(shape)


def padded_vocab(vocab: int, multiple: int) -> int:
    """Rows of the embedding after padding up to a multiple (Megatron: --make-vocab-size-divisible-by x tp)."""
    return -(-vocab // multiple) * multiple


class ParamCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Exact numbers of parameters.

    total:      all of them, tied embeddings once.
    active:     those that take part in one token's forward pass: top_k of the routed experts, everything else whole.
                The embedding table is in, although only one row of it is read (publishers differ: DeepSeek-V2-Lite's
                2.4B is without it, Qwen3-30B's 3.3B with).
    embedding:  token and position tables.
    head:       the output projection, 0 when tied.
    blocks:     per run of equal blocks, the count in one block.
    mtp:        all multi-token-prediction modules together, contained in total.
    """

    total: int
    active: int
    embedding: int
    head: int
    final_norm: int
    blocks: tuple[int, ...]
    mtp: int


def count_params(model: ModelSpec) -> ParamCounts:
    """The counts of the whole, unpadded model."""
    head = sum(t.numel for t in head_tensors(model) if t.name == "lm_head.weight")
    final_norm = sum(t.numel for t in head_tensors(model)) - head
    embedding = sum(t.numel for t in embedding_tensors(model))
    mtp = model.mtp * sum(t.numel for t in mtp_tensors(model))
    blocks = tuple(block_params(run.block, model.hidden) for run in model.runs)
    total = embedding + sum(run.count * n for run, n in zip(model.runs, blocks, strict=True)) + final_norm + head + mtp
    idle = sum(run.count * _idle(run.block, model.hidden) for run in model.runs)
    idle += model.mtp * _idle(model.mtp_block, model.hidden)
    return ParamCounts(
        total=total,
        active=total - idle,
        embedding=embedding,
        head=head,
        final_norm=final_norm,
        blocks=blocks,
        mtp=mtp,
    )


def block_params(block: Block, hidden: int) -> int:
    """Parameters of one block."""
    return sum(_shard_counts(block, hidden).values())


def _idle(block: Block, hidden: int) -> int:
    """Parameters of the routed experts that one token does not visit."""
    if not isinstance(block.feed, Experts):
        return 0
    experts = _shard_counts(block, hidden)["expert"]
    return experts // block.feed.num_experts * (block.feed.num_experts - block.feed.top_k)


def shard_counts(block: Block, hidden: int) -> dict[str, int]:
    """Elements of one block by how they are split, so that a caller can divide by arrays of degrees:

    replicated   whole on every rank of tp
    column, row  / tp
    kv           / min(tp, kv_heads)
    expert       / (ep * etp)
    """
    return dict(_shard_counts(block, hidden))


@lru_cache(maxsize=1024)
def _shard_counts(block: Block, hidden: int) -> dict[str, int]:
    counts = {"replicated": 0, "column": 0, "row": 0, "kv": 0, "expert": 0}
    for tensor in block_tensors(block, hidden):
        counts["expert" if tensor.grid == "expert" else tensor.split] += tensor.numel
    return counts


def _norm(name: str, width: int, kind: Norm, bias: bool) -> Iterator[Tensor]:
    yield Tensor(f"{name}.weight", (width,), "replicated")
    if bias:
        yield Tensor(f"{name}.bias", (width,), "replicated")


def _linear(name: str, out: int, into: int, split: Split, bias: bool = False, kv_heads: int = 0) -> Iterator[Tensor]:
    """A weight (out, into) and its bias, which a row-split linear adds after the reduction and so keeps whole."""
    yield Tensor(f"{name}.weight", (out, into), split, kv_heads)
    if bias:
        yield Tensor(f"{name}.bias", (out,), "replicated" if split == "row" else split, kv_heads)


def _mixer(mixer: Mixer, hidden: int) -> Iterator[Tensor]:
    if isinstance(mixer, LatentAttention):
        return _latent_attention(mixer, hidden)
    return _attention(mixer, hidden)


def _attention(a: Attention, hidden: int) -> Iterator[Tensor]:
    kv_width = a.kv_heads * a.head_dim
    yield from _linear("self_attn.q_proj", a.heads * a.head_dim, hidden, "column", a.qkv_bias)
    yield from _linear("self_attn.k_proj", kv_width, hidden, "kv", a.qkv_bias, a.kv_heads)
    yield from _linear("self_attn.v_proj", kv_width, hidden, "kv", a.qkv_bias, a.kv_heads)
    if a.qk_norm:
        yield from _norm("self_attn.q_norm", a.head_dim, "rmsnorm", bias=False)
        yield from _norm("self_attn.k_norm", a.head_dim, "rmsnorm", bias=False)
    yield from _linear("self_attn.o_proj", hidden, a.heads * a.head_dim, "row", a.out_bias)


def _latent_attention(a: LatentAttention, hidden: int) -> Iterator[Tensor]:
    queries = a.heads * a.qk_head_dim
    if a.q_lora_rank is None:
        yield from _linear("self_attn.q_proj", queries, hidden, "column")
    else:
        yield from _linear("self_attn.q_a_proj", a.q_lora_rank, hidden, "replicated", a.bias)
        yield from _norm("self_attn.q_a_layernorm", a.q_lora_rank, "rmsnorm", bias=False)
        yield from _linear("self_attn.q_b_proj", queries, a.q_lora_rank, "column")
    latent = a.kv_lora_rank + a.qk_rope_head_dim
    yield from _linear("self_attn.kv_a_proj_with_mqa", latent, hidden, "replicated", a.bias)
    yield from _norm("self_attn.kv_a_layernorm", a.kv_lora_rank, "rmsnorm", bias=False)
    keys_values = a.heads * (a.qk_nope_head_dim + a.v_head_dim)
    yield from _linear("self_attn.kv_b_proj", keys_values, a.kv_lora_rank, "column")
    yield from _linear("self_attn.o_proj", hidden, a.heads * a.v_head_dim, "row", a.bias)


def _feed(feed: FeedForward | Experts, hidden: int) -> Iterator[Tensor]:
    if isinstance(feed, FeedForward):
        return _feed_forward("mlp", hidden, feed.ffn, feed.gated, feed.bias)
    return _experts(feed, hidden)


def _feed_forward(name: str, hidden: int, ffn: int, gated: bool, bias: bool) -> Iterator[Tensor]:
    if gated:
        yield from _linear(f"{name}.gate_proj", ffn, hidden, "column", bias)
    yield from _linear(f"{name}.up_proj", ffn, hidden, "column", bias)
    yield from _linear(f"{name}.down_proj", hidden, ffn, "row", bias)


def _experts(e: Experts, hidden: int) -> Iterator[Tensor]:
    yield Tensor("mlp.gate.weight", (e.num_experts, hidden), "replicated")
    if e.gated:
        yield Tensor("mlp.experts.gate_proj", (e.num_experts, e.ffn, hidden), "expert_column")
    yield Tensor("mlp.experts.up_proj", (e.num_experts, e.ffn, hidden), "expert_column")
    yield Tensor("mlp.experts.down_proj", (e.num_experts, hidden, e.ffn), "expert_row")
    if e.shared_ffn:
        yield from _feed_forward("mlp.shared_experts", hidden, e.shared_ffn, e.gated, bias=False)
