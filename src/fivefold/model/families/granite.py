"""Granite 3, dense and with experts: Llama's or Mixtral's block, with four numbers that scale embeddings, scores,
residuals and logits.

Defaults are those of GraniteConfig and GraniteMoeConfig in transformers 5.24.
"""

from __future__ import annotations

from fivefold.model.families.dense import SHARED_OPTIONAL, SIZES, attention, feed_forward
from fivefold.model.families.moe import ROUTER_KEYS, routed
from fivefold.model.families.reader import ROPE_KEYS, Family, Reader, keys
from fivefold.model.spec import Block, Feed, ModelSpec

MULTIPLIERS = {
    "embedding_multiplier": "embeddings are multiplied by",
    "attention_multiplier": "scores are multiplied by",
    "residual_multiplier": "what sublayers add is multiplied by",
    "logits_scaling": "logits are divided by",
}


def read_granite(reader: Reader) -> ModelSpec:
    return _read(reader, feed_forward(reader, bias=reader.flag("mlp_bias", False)))


def read_granite_moe(reader: Reader) -> ModelSpec:
    return _read(reader, routed(reader, experts_key="num_local_experts", ffn_key="intermediate_size"))


def _read(reader: Reader, feed: Feed) -> ModelSpec:
    """A scale of the scores replaces 1 / sqrt(head_dim), so an absent one, which stands for 1, is told too."""
    bias = reader.flag("attention_bias", False)
    mixer = attention(reader, qkv_bias=bias, out_bias=bias)
    told = []
    for key, sentence in MULTIPLIERS.items():
        given = reader.number(key)
        value = 1.0 if given is None else given
        plain = mixer.head_dim**-0.5 if key == "attention_multiplier" else 1.0
        if value != plain:
            told.append(f"{sentence} {value:g}")
    return reader.model([Block(mixer=mixer, feed=feed)] * reader.layers(), peculiar=tuple(told))


FAMILIES = (
    Family(
        model_type="granite",
        architecture="GraniteForCausalLM",
        required=SIZES,
        optional=SHARED_OPTIONAL | keys("num_key_value_heads attention_bias mlp_bias") | frozenset(MULTIPLIERS),
        irrelevant=ROPE_KEYS,
        read=read_granite,
    ),
    Family(
        model_type="granitemoe",
        architecture="GraniteMoeForCausalLM",
        required=SIZES | keys("num_local_experts num_experts_per_tok"),
        optional=SHARED_OPTIONAL | keys("num_key_value_heads attention_bias") | frozenset(MULTIPLIERS),
        irrelevant=ROPE_KEYS | ROUTER_KEYS,
        read=read_granite_moe,
    ),
)
