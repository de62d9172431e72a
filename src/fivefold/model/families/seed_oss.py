"""Seed-OSS: Llama's block with biases on queries, keys and values.

Defaults are those of SeedOssConfig in transformers 5.24.
"""

from __future__ import annotations

from fivefold.model.families.dense import SHARED_OPTIONAL, SIZES, attention, feed_forward
from fivefold.model.families.reader import ROPE_KEYS, Family, Reader, keys
from fivefold.model.spec import Block, ModelSpec


def read_seed_oss(reader: Reader) -> ModelSpec:
    block = Block(
        mixer=attention(
            reader,
            head_dim=128,
            qkv_bias=reader.flag("attention_bias", True),
            out_bias=reader.flag("attention_out_bias", False),
        ),
        feed=feed_forward(reader, bias=reader.flag("mlp_bias", False)),
    )
    return reader.model([block] * reader.layers())


FAMILIES = (
    Family(
        model_type="seed_oss",
        architecture="SeedOssForCausalLM",
        required=SIZES | {"num_key_value_heads"},
        optional=SHARED_OPTIONAL | keys("head_dim attention_bias attention_out_bias mlp_bias"),
        irrelevant=ROPE_KEYS | keys("residual_dropout pretraining_tp"),
        read=read_seed_oss,
    ),
)
