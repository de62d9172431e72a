"""From a published row's sizes to a ModelSpec; what the columns cannot say comes from the catalogue's model of the same
sizes, or from the family's usual choice, and is named as assumed."""

from __future__ import annotations

import re
from functools import lru_cache

import msgspec

from fivefold.layout.mixers import softmax_attention
from fivefold.measure.frameworks import framework_of
from fivefold.measure.runs import Run
from fivefold.model import load_model, models
from fivefold.model.spec import (
    Attention,
    Block,
    BlockRun,
    Experts,
    Feed,
    FeedForward,
    LatentAttention,
    Mixer,
    ModelSpec,
)

# GPT-2's byte-pair vocabulary, which Megatron's and DeepSpeed's GPT examples train with, and Llama's.
_USUAL_VOCAB = {False: 50_257, True: 32_000}
_USUAL_HEAD_DIM = 128
# Families with a gated feed-forward, where a row does not say.
_GATED = re.compile(r"llama|qwen|mi[sx]tral|deepseek|gemma|yi-|internlm|baichuan|palm|kimi|phi-3|olmo", re.IGNORECASE)
# DeepSeek-V2 and V3 (papers' tables of hyper-parameters): latent widths and head sizes; V2-Lite and smaller ones
# project queries directly.
_LATENT = LatentAttention(heads=1, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
_QUERY_RANK, _QUERY_RANK_FROM = 1536, 5120


def model_of(run: Run, assumed: set[str]) -> ModelSpec:
    """The model of a row. Needs layers, hidden and seq."""
    known = _catalogued(run)
    if known is not None:
        assumed.add("architecture")
        mtp = bool(re.search(r"\bmtp\b", run.notes or "", re.IGNORECASE)) and known.mtp == 0
        return load_model(known.name, mtp=True) if mtp and _has_mtp(known.name) else known
    return _built(run, assumed)


@lru_cache(maxsize=1)
def _mixed_models() -> tuple[ModelSpec, ...]:
    """Models of the catalogue whose columns do not say everything: several kinds of block, latent attention..."""
    found = [load_model(name) for name in models()]
    return tuple(m for m in found if len(m.kinds) > 1 or any(_is_peculiar(block) for block in m.kinds))


def _is_peculiar(block: Block) -> bool:
    """Whether a block has what no column says: latent attention, norms of queries and keys."""
    mixer = block.mixer
    return isinstance(mixer, LatentAttention) or (isinstance(mixer, Attention) and mixer.qk_norm)


@lru_cache(maxsize=64)
def _has_mtp(name: str) -> bool:
    return load_model(name, mtp=True).mtp > 0


def _catalogued(run: Run) -> ModelSpec | None:
    """The catalogue's model with a row's layers, hidden size, heads and experts, where columns cannot build it."""
    for model in _mixed_models():
        last = model.runs[-1].block
        experts = last.feed.num_experts if isinstance(last.feed, Experts) else None
        attention = softmax_attention(last.mixer)
        sizes = (model.layers, model.hidden, model.vocab, experts, attention.heads if attention else None)
        if sizes == (run.layers, run.hidden, run.vocab, run.experts, run.heads):
            return model
    return None


def _built(run: Run, assumed: set[str]) -> ModelSpec:
    hidden, seq = int(run.hidden or 1), int(run.seq or 1)
    like_gpt = not (_GATED.search(run.model or "") if run.gated_mlp is None else run.gated_mlp)
    for field in ("kv_heads", "tied_embeddings", "vocab", "heads", "gated_mlp"):
        if getattr(run, field) is None:
            assumed.add(field)
    line = framework_of(run)
    tied = bool(run.tied_embeddings) if run.tied_embeddings is not None else like_gpt
    if line.lists_ties:
        tied = "untie-embeddings" not in (run.overlap or "")
    modules = re.search(r"\bmtp=(\d+)", run.notes or "")
    block = Block(
        mixer=_mixer(run, hidden, like_gpt, assumed),
        feed=_feed(run, hidden, like_gpt),
        norm="layernorm" if like_gpt else "rmsnorm",
        norm_bias=like_gpt,
    )
    return ModelSpec(
        name=run.model or run.id,
        family="gpt2" if like_gpt else "llama",
        hidden=hidden,
        vocab=int(run.vocab or line.vocab or _USUAL_VOCAB[not like_gpt]),
        max_position=seq,
        runs=(BlockRun(int(run.layers or 1), block),),
        tied_embeddings=tied,
        learned_positions=seq if like_gpt else 0,
        final_norm="layernorm" if like_gpt else "rmsnorm",
        final_norm_bias=like_gpt,
        mtp=int(modules[1]) if modules else 0,
    )


def _mixer(run: Run, hidden: int, like_gpt: bool, assumed: set[str]) -> Mixer:
    heads = run.heads or max(hidden // _USUAL_HEAD_DIM, 1)
    if "mla" in (run.arch or ""):
        assumed.add("latent_sizes")
        rank = _QUERY_RANK if hidden >= _QUERY_RANK_FROM else None
        return msgspec.structs.replace(_LATENT, heads=heads, q_lora_rank=rank)
    head_dim = run.head_dim or max(hidden // heads, 1)
    kv_heads = run.kv_heads or heads
    return Attention(
        heads=heads, kv_heads=kv_heads, head_dim=head_dim, qkv_bias=like_gpt, out_bias=like_gpt, rope=not like_gpt
    )


def _feed(run: Run, hidden: int, like_gpt: bool) -> Feed:
    ffn = int(run.ffn or 4 * hidden)
    if run.experts and run.experts > 1:
        width = int(run.moe_ffn or ffn)
        return Experts(
            num_experts=run.experts,
            top_k=int(run.topk or 2),
            ffn=width,
            shared_ffn=width * (run.shared_experts or 0),
            gated=not like_gpt,
        )
    return FeedForward(ffn=ffn, gated=not like_gpt, bias=like_gpt, activation="gelu" if like_gpt else "silu")
