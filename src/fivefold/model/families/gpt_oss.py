"""gpt-oss: alternating windows, a learned sink in every head's softmax, biases everywhere and in the experts.

Defaults are those of GptOssConfig in transformers 5.24.
"""

from __future__ import annotations

import msgspec

from fivefold.model.families.dense import SHARED_OPTIONAL, SIZES, attention, with_window
from fivefold.model.families.moe import ROUTER_KEYS, routed
from fivefold.model.families.reader import ROPE_KEYS, Family, Reader, keys
from fivefold.model.spec import Block, ModelSpec

KINDS = ("full_attention", "sliding_attention")


def read_gpt_oss(reader: Reader) -> ModelSpec:
    bias = reader.flag("attention_bias", True)
    mixer = attention(reader, head_dim=64, qkv_bias=bias, out_bias=bias)
    mixer = msgspec.structs.replace(mixer, sinks=True)
    feed = routed(reader, experts_key="num_local_experts", ffn_key="intermediate_size")
    feed = msgspec.structs.replace(feed, bias=True, router_bias=True, clamped=True)
    window = reader.sliding_window(128)
    kinds = reader.layer_types("layer_types", reader.layers(), KINDS, lambda i: KINDS[(i + 1) % 2])
    blocks = (
        Block(mixer=with_window(mixer, window if kind == "sliding_attention" else None), feed=feed) for kind in kinds
    )
    return reader.model(blocks, peculiar=("experts clamp their gate and add one to the other half",))


FAMILIES = (
    Family(
        model_type="gpt_oss",
        architecture="GptOssForCausalLM",
        required=SIZES | keys("num_key_value_heads num_local_experts num_experts_per_tok"),
        optional=SHARED_OPTIONAL | keys("head_dim attention_bias sliding_window layer_types"),
        irrelevant=ROPE_KEYS | ROUTER_KEYS | keys("swiglu_limit swiglu_alpha initial_context_length"),
        aliases={"experts_per_token": "num_experts_per_tok", "num_experts": "num_local_experts"},
        rope_theta=150_000.0,
        norm_eps=1e-5,
        read=read_gpt_oss,
    ),
)
