"""SmolLM3: Llama's block, every fourth without a rotary embedding.

Defaults are those of SmolLM3Config in transformers 5.24.
"""

from __future__ import annotations

import msgspec

from fivefold.model.families.dense import LAYER_TYPES, SHARED_OPTIONAL, SIZES, attention, feed_forward
from fivefold.model.families.llama4 import turning_blocks
from fivefold.model.families.reader import ROPE_KEYS, Family, Reader, keys
from fivefold.model.spec import Block, ModelSpec


def read_smollm3(reader: Reader) -> ModelSpec:
    """With use_sliding_window the blocks that do not turn have the window."""
    layers = reader.layers()
    bias = reader.flag("attention_bias", False)
    mixer = attention(reader, qkv_bias=bias, out_bias=bias)
    feed = feed_forward(reader, bias=reader.flag("mlp_bias", False))
    window = reader.sliding_window(None)
    windowed = reader.flag("use_sliding_window", False) and window is not None
    turning = turning_blocks(reader, layers)
    kinds = reader.layer_types(
        "layer_types",
        layers,
        LAYER_TYPES,
        lambda i: "sliding_attention" if windowed and not turning[i] else "full_attention",
    )
    blocks = (
        Block(
            mixer=msgspec.structs.replace(mixer, rope=turns, window=window if kind == "sliding_attention" else None),
            feed=feed,
        )
        for turns, kind in zip(turning, kinds, strict=True)
    )
    return reader.model(blocks, tied=True)


FAMILIES = (
    Family(
        model_type="smollm3",
        architecture="SmolLM3ForCausalLM",
        required=SIZES | {"num_key_value_heads"},
        optional=SHARED_OPTIONAL
        | keys(
            """
            attention_bias mlp_bias use_sliding_window sliding_window no_rope_layers no_rope_layer_interval layer_types
            head_dim
            """
        ),
        # Written by published files; the class does not look at it.
        irrelevant=ROPE_KEYS | {"max_window_layers", "pretraining_tp"},
        rope_theta=2e6,
        read=read_smollm3,
    ),
)
