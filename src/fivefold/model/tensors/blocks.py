"""The parameters of a block and of the items beside the blocks, and the table of a whole model."""

from __future__ import annotations

from collections.abc import Iterator

from fivefold.model.spec import Block, ModelSpec
from fivefold.model.tensors.feeds import feed_tensors
from fivefold.model.tensors.mixers import mixer_tensors
from fivefold.model.tensors.tensor import Tensor, linear, norm


def block_tensors(block: Block, hidden: int) -> tuple[Tensor, ...]:
    """The parameters of one block in the order in which a token meets them; names are relative to the block."""
    before_mixer, after_mixer, before_feed, after_feed = norm_names(block)
    return (
        *_block_norms(before_mixer, block, hidden),
        *mixer_tensors(block.mixer, hidden),
        *_block_norms(after_mixer, block, hidden),
        *_block_norms(before_feed, block, hidden),
        *feed_tensors(block.feed, hidden),
        *_block_norms(after_feed, block, hidden),
    )


def norm_names(block: Block) -> tuple[str | None, str | None, str | None, str | None]:
    """Names of the norms before and after the mixer and before and after the feed-forward, None where there is none.

    They are those of transformers' Llama (pre), OLMo 2 (post) and Gemma 2 (sandwich), where
    post_attention_layernorm stands for three different places.
    """
    before_mixer, after_mixer, before_feed, after_feed = _NORMS[block.norms]
    return (
        before_mixer if block.mixer is not None else None,
        after_mixer if block.mixer is not None else None,
        before_feed if block.feed is not None and not block.shared_norm else None,
        after_feed if block.feed is not None else None,
    )


_NORMS: dict[str, tuple[str | None, str | None, str | None, str | None]] = {
    "pre": ("input_layernorm", None, "post_attention_layernorm", None),
    "post": (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    "sandwich": (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
}


def _block_norms(name: str | None, block: Block, hidden: int) -> Iterator[Tensor]:
    return norm(name, hidden, block.norm, block.norm_bias) if name else iter(())


def embedding_tensors(model: ModelSpec) -> tuple[Tensor, ...]:
    """The token embedding, where positions are learned their table, and the norm that some models put after both."""
    table = [Tensor("embed_tokens.weight", (model.vocab, model.hidden), "vocab")]
    if model.learned_positions:
        table.append(Tensor("embed_positions.weight", (model.learned_positions, model.hidden), "replicated"))
    if model.embedding_norm:
        table += norm("embed_layernorm", model.hidden, model.final_norm, model.final_norm_bias)
    return tuple(table)


def head_tensors(model: ModelSpec) -> tuple[Tensor, ...]:
    """The final norm and the output projection, whose weight a tied model does not have as a tensor of its own."""
    tensors = list(norm("norm", model.hidden, model.final_norm, model.final_norm_bias))
    if not model.tied_embeddings:
        tensors.append(Tensor("lm_head.weight", (model.vocab, model.hidden), "vocab"))
    if model.head_bias:
        tensors.append(Tensor("lm_head.bias", (model.vocab,), "vocab"))
    return tuple(tensors)


def mtp_tensors(model: ModelSpec) -> tuple[Tensor, ...]:
    """One multi-token-prediction module (DeepSeek-V3, section 2.2): the norms of the embedding and of the hidden
    state, their projection 2h -> h, one block and a norm before the head. Embedding and head are the model's own."""
    h = model.hidden
    return (
        Tensor("enorm.weight", (h,), "replicated"),
        Tensor("hnorm.weight", (h,), "replicated"),
        *linear("eh_proj", h, 2 * h, "column"),
        *(tensor.prefixed("block.") for tensor in block_tensors(model.mtp_block, h)),
        *norm("norm", h, model.final_norm, model.final_norm_bias),
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
