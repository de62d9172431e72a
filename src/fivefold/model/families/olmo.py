"""OLMo 1, 2 and 3 and OLMoE: norms without weights (1), norms after the sublayers and over all heads of queries and
keys (2, 3), three windowed blocks to one of full attention (3), experts (OLMoE, which norms in front).

Defaults are those of the classes in transformers 5.24.
"""

from __future__ import annotations

import msgspec

from fivefold.model.families.dense import SHARED_OPTIONAL, SIZES, attention, feed_forward, with_window
from fivefold.model.families.moe import ROUTER_KEYS, routed
from fivefold.model.families.reader import ROPE_KEYS, Family, Reader, keys
from fivefold.model.spec import Attention, Block, ModelSpec

KINDS = ("full_attention", "sliding_attention")
OPTIONAL = SHARED_OPTIONAL | {"num_key_value_heads", "attention_bias"}


def _attention(reader: Reader, norm_all: bool) -> Attention:
    bias = reader.flag("attention_bias", False)
    mixer = attention(reader, qkv_bias=bias, out_bias=bias, qk_norm=norm_all)
    return msgspec.structs.replace(mixer, qk_norm_over="all") if norm_all else mixer


def _clipped(reader: Reader) -> tuple[str, ...]:
    clip = reader.number("clip_qkv")
    return () if clip is None else (f"queries, keys and values are clipped to {clip:g}",)


def read_olmo(reader: Reader) -> ModelSpec:
    block = Block(mixer=_attention(reader, norm_all=False), feed=feed_forward(reader), norm="layernorm_fixed")
    return reader.model([block] * reader.layers(), final_norm="layernorm_fixed", peculiar=_clipped(reader))


def read_olmo2(reader: Reader) -> ModelSpec:
    block = Block(mixer=_attention(reader, norm_all=True), feed=feed_forward(reader), norms="post")
    return reader.model([block] * reader.layers())


def read_olmo3(reader: Reader) -> ModelSpec:
    window = reader.sliding_window(4096)
    mixer, feed = _attention(reader, norm_all=True), feed_forward(reader)
    kinds = reader.layer_types("layer_types", reader.layers(), KINDS, lambda i: KINDS[(i + 1) % 4 != 0])
    model = reader.model(
        Block(mixer=with_window(mixer, window if kind == "sliding_attention" else None), feed=feed, norms="post")
        for kind in kinds
    )
    if model.rotary.scaling == "default":
        return model
    return msgspec.structs.replace(model, peculiar=("the rotary embedding of windowed blocks is not stretched",))


def read_olmoe(reader: Reader) -> ModelSpec:
    block = Block(
        mixer=_attention(reader, norm_all=True),
        feed=routed(reader, experts_key="num_experts", ffn_key="intermediate_size"),
    )
    return reader.model([block] * reader.layers(), peculiar=_clipped(reader))


FAMILIES = (
    Family(
        model_type="olmo",
        architecture="OlmoForCausalLM",
        required=SIZES,
        optional=OPTIONAL | {"clip_qkv"},
        irrelevant=ROPE_KEYS,
        # Fixed in OlmoLayerNorm.
        norm_eps=1e-5,
        norm_eps_keys=frozenset(),
        read=read_olmo,
    ),
    Family(
        model_type="olmo2",
        architecture="Olmo2ForCausalLM",
        required=SIZES,
        optional=OPTIONAL,
        irrelevant=ROPE_KEYS,
        norm_eps=1e-5,
        read=read_olmo2,
    ),
    Family(
        model_type="olmo3",
        architecture="Olmo3ForCausalLM",
        required=SIZES,
        optional=OPTIONAL | keys("sliding_window layer_types"),
        irrelevant=ROPE_KEYS,
        rope_theta=5e5,
        norm_eps=1e-5,
        read=read_olmo3,
    ),
    Family(
        model_type="olmoe",
        architecture="OlmoeForCausalLM",
        required=SIZES | {"num_experts", "num_experts_per_tok"},
        optional=OPTIONAL | {"clip_qkv"},
        irrelevant=ROPE_KEYS | ROUTER_KEYS,
        aliases={"num_local_experts": "num_experts"},
        norm_eps=1e-5,
        read=read_olmoe,
    ),
)
