"""What a model has beyond Llama's blocks, by name: a runtime supports a set of these and refuses a model by the rest.

A feature's phrase completes "the model has ...". Everything that no size shows is one feature, "peculiar".
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from fivefold.layout.mixers import softmax_attention
from fivefold.model.spec import (
    Attention,
    Block,
    Experts,
    FeedForward,
    GatedDeltaNet,
    LatentAttention,
    Mamba,
    Mamba2,
    ModelSpec,
    Norm,
    SideBySide,
)


class Feature(NamedTuple):
    name: str
    phrase: str
    has: Callable[[ModelSpec], bool]


def _block(holds: Callable[[Block], bool]) -> Callable[[ModelSpec], bool]:
    return lambda model: any(holds(block) for block in model.kinds)


def _attention(holds: Callable[[Attention], bool]) -> Callable[[ModelSpec], bool]:
    def of(block: Block) -> bool:
        attention = softmax_attention(block.mixer)
        return isinstance(attention, Attention) and holds(attention)

    return _block(of)


def _experts(holds: Callable[[Experts], bool]) -> Callable[[ModelSpec], bool]:
    return _block(lambda block: isinstance(block.feed, Experts) and holds(block.feed))


def _mixer(kind: type) -> Callable[[ModelSpec], bool]:
    return _block(lambda block: isinstance(block.mixer, kind))


def _sparse(block: Block) -> bool:
    return isinstance(block.mixer, LatentAttention) and block.mixer.indexer is not None


def _rotary(model: ModelSpec) -> bool:
    found = (softmax_attention(block.mixer) for block in model.kinds)
    return any(isinstance(each, LatentAttention) or (each is not None and each.rope) for each in found)


def _norms(holds: Callable[[Norm, bool], bool]) -> Callable[[ModelSpec], bool]:
    """Whether a norm of a block or the final one is such, by its kind and whether it has a bias."""

    def of(model: ModelSpec) -> bool:
        if holds(model.final_norm, model.final_norm_bias):
            return True
        return any(holds(block.norm, block.norm_bias) for block in model.kinds)

    return of


FEATURES: tuple[Feature, ...] = (
    Feature("experts", "routed experts", _experts(lambda e: True)),
    Feature("shared-experts", "shared experts", _experts(lambda e: e.shared_ffn > 0)),
    Feature("expert-bias", "biases in its experts", _experts(lambda e: e.bias)),
    Feature("router-bias", "a bias in its router", _experts(lambda e: e.router_bias)),
    Feature("shared-expert-gate", "a gate on its shared experts", _experts(lambda e: e.shared_gate)),
    Feature("latent-experts", "experts in a latent space", _experts(lambda e: e.latent > 0)),
    Feature(
        "mixed-feed",
        "dense and expert blocks",
        lambda m: m.is_moe and any(isinstance(block.feed, FeedForward) for block in m.kinds),
    ),
    Feature("latent-attention", "latent attention", _mixer(LatentAttention)),
    Feature("sparse-attention", "sparse attention over the keys that an indexer picks", _block(_sparse)),
    Feature("gated-delta-net", "linear attention (gated delta net)", _mixer(GatedDeltaNet)),
    Feature("mamba", "Mamba blocks", _mixer(Mamba)),
    Feature("mamba2", "Mamba 2 blocks", _mixer(Mamba2)),
    Feature("side-by-side", "attention and a state space side by side", _mixer(SideBySide)),
    Feature(
        "one-sublayer-blocks",
        "blocks of a mixer or a feed-forward alone",
        _block(lambda block: block.mixer is None or block.feed is None),
    ),
    Feature("window", "sliding-window attention", _attention(lambda a: a.window is not None)),
    Feature("chunked-attention", "attention within chunks", _attention(lambda a: a.chunk is not None)),
    Feature("attention-sinks", "attention sinks", _attention(lambda a: a.sinks)),
    Feature("attention-gate", "a gate on attention's output", _attention(lambda a: a.gate)),
    Feature("alibi", "ALiBi positions", _attention(lambda a: a.alibi)),
    Feature("qk-norm", "a norm on queries and keys", _attention(lambda a: a.qk_norm)),
    Feature(
        "qk-norm-all",
        "a norm over all heads of queries and of keys",
        _attention(lambda a: a.qk_norm and a.qk_norm_over == "all"),
    ),
    Feature(
        "qk-norm-each",
        "a norm on queries and keys with weights for each head",
        _attention(lambda a: a.qk_norm and a.qk_norm_over == "each"),
    ),
    Feature(
        "qk-layernorm",
        "a LayerNorm on queries and keys",
        _attention(lambda a: a.qk_norm and a.qk_norm_kind != "rmsnorm"),
    ),
    Feature("post-norm", "norms after its sublayers", _block(lambda block: block.norms == "post")),
    Feature("sandwich-norm", "norms before and after its sublayers", _block(lambda block: block.norms == "sandwich")),
    Feature("parallel-blocks", "attention and feed-forward side by side", _block(lambda block: block.parallel)),
    Feature("fixed-layernorm", "LayerNorms without parameters", _norms(lambda kind, bias: kind == "layernorm_fixed")),
    Feature(
        "layernorm-without-bias",
        "LayerNorms without a bias",
        _norms(lambda kind, bias: kind == "layernorm" and not bias),
    ),
    Feature(
        "squared-relu",
        "squared-ReLU feed-forwards",
        _block(lambda block: block.feed is not None and block.feed.activation == "relu2"),
    ),
    Feature(
        "partial-rotary", "rotary embedding of a part of each head", lambda m: _rotary(m) and m.rotary.share != 1.0
    ),
    Feature(
        "scaled-rotary",
        "rotary frequencies that are scaled other than llama3's",
        lambda m: _rotary(m) and m.rotary.scaling not in ("default", "llama3"),
    ),
    Feature("learned-positions", "a table of learned positions", lambda m: m.learned_positions > 0),
    Feature("embedding-norm", "a norm after its embedding", lambda m: m.embedding_norm),
    Feature("head-bias", "a bias in its output projection", lambda m: m.head_bias),
    Feature("mtp", "multi-token-prediction modules", lambda m: m.mtp > 0),
    Feature("peculiar", "operations that its sizes do not show", lambda m: bool(m.peculiar)),
)
PHRASES: dict[str, str] = {feature.name: feature.phrase for feature in FEATURES}


@lru_cache(maxsize=256)
def features(model: ModelSpec) -> frozenset[str]:
    """The names of FEATURES that a model has."""
    return frozenset(feature.name for feature in FEATURES if feature.has(model))
