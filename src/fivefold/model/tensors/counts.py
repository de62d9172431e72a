"""Numbers of parameters: of a model, of a block, and by how they are split."""

from __future__ import annotations

from functools import lru_cache

import msgspec

from fivefold.model.spec import Block, Experts, ModelSpec
from fivefold.model.tensors.blocks import block_tensors, embedding_tensors, head_tensors, mtp_tensors


class ParamCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Exact numbers of parameters.

    total:      all of them, tied embeddings once.
    active:     those that take part in one token's forward pass: top_k of the routed experts, everything else whole.
                The embedding table is in, although only one row of it is read (publishers differ: DeepSeek-V2-Lite's
                2.4B is without it, Qwen3-30B's 3.3B with).
    embedding:  token and position tables, and the norm right after them where there is one.
    head:       the output projection, 0 when tied (but for a bias of its own).
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
    head = sum(t.numel for t in head_tensors(model) if t.name.startswith("lm_head."))
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
    counts = _shard_counts(block, hidden)
    experts = counts["expert"] + counts["expert_whole"]
    return experts // block.feed.num_experts * (block.feed.num_experts - block.feed.top_k)


def shard_counts(block: Block, hidden: int) -> dict[str, int]:
    """Elements of one block by how they are split, so that a caller can divide by arrays of degrees:

    replicated   whole on every rank of tp
    column, row  / tp
    kv           / min(tp, kv_heads)
    expert       / (ep * etp)
    expert_whole / ep: biases that the experts add after the reduction over etp
    """
    return dict(_shard_counts(block, hidden))


_COUNTED_AS = {"expert_column": "expert", "expert_row": "expert"}


@lru_cache(maxsize=1024)
def _shard_counts(block: Block, hidden: int) -> dict[str, int]:
    counts = {"replicated": 0, "column": 0, "row": 0, "kv": 0, "expert": 0, "expert_whole": 0}
    for tensor in block_tensors(block, hidden):
        counts[_COUNTED_AS.get(tensor.split, tensor.split)] += tensor.numel
    return counts
