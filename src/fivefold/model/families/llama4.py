"""Llama 4 (text): three blocks that turn and attend within chunks to one that does neither; experts beside a shared
one, in every block or in every second.

Defaults are those of Llama4TextConfig in transformers 5.24.
"""

from __future__ import annotations

import msgspec

from fivefold.model.families.dense import SIZES, attention
from fivefold.model.families.eleuther import NEIGHBOURS
from fivefold.model.families.moe import ROUTER_KEYS, routed
from fivefold.model.families.reader import MAX_LAYERS, MAX_POSITIONS, ROPE_KEYS, Family, Reader, keys
from fivefold.model.spec import Attention, Block, FeedForward, ModelSpec

CHUNKED, FULL = "chunked_attention", "full_attention"


def read_llama4(reader: Reader) -> ModelSpec:
    layers = reader.layers()
    size = reader.size("intermediate_size")
    sparse = routed(reader, experts_key="num_local_experts", ffn_key="intermediate_size", shared_ffn=size)
    dense = FeedForward(ffn=reader.size("intermediate_size_mlp", 16_384), activation=sparse.activation)
    with_experts = _moe_layers(reader, layers)
    blocks = (
        Block(mixer=mixer, feed=sparse if i in with_experts else dense)
        for i, mixer in enumerate(_mixers(reader, layers))
    )
    return reader.model(blocks, peculiar=_peculiar(reader))


def _mixers(reader: Reader, layers: int) -> list[Attention]:
    bias = reader.flag("attention_bias", False)
    mixer = attention(reader, head_dim=128, qkv_bias=bias, out_bias=bias)
    turning = turning_blocks(reader, layers)
    # An absent key is the class's 8,192; null is attention to everything.
    given = "attention_chunk_size" in reader.config
    chunk = reader.optional_size("attention_chunk_size", high=MAX_POSITIONS) if given else 8192
    kinds = reader.layer_types("layer_types", layers, (CHUNKED, FULL), lambda i: CHUNKED if turning[i] else FULL)
    return [
        msgspec.structs.replace(mixer, rope=turns, chunk=chunk if kind == CHUNKED else None)
        for turns, kind in zip(turning, kinds, strict=True)
    ]


def turning_blocks(reader: Reader, layers: int) -> list[bool]:
    """no_rope_layers has 1 for a block with rotary embedding; without it every no_rope_layer_interval-th has none."""
    given = reader.config.get("no_rope_layers") or None
    if given is None:
        step = reader.size("no_rope_layer_interval", 4, high=MAX_LAYERS)
        return [(i + 1) % step != 0 for i in range(layers)]
    if not isinstance(given, list) or len(given) != layers or not all(each in (0, 1) for each in given):
        raise reader.error("no_rope_layers", f"must have 1 (rotary) or 0 for each of {layers} blocks")
    return [each == 1 for each in given]


def _moe_layers(reader: Reader, layers: int) -> frozenset[int]:
    if reader.config.get("moe_layers") is not None:
        return reader.layer_numbers("moe_layers", layers)
    step = reader.size("interleave_moe_layer_step", 1, high=MAX_LAYERS)
    return frozenset(range(step - 1, layers, step))


def _peculiar(reader: Reader) -> tuple[str, ...]:
    told = [NEIGHBOURS, "experts read inputs scaled by the router's score"]
    if reader.flag("use_qk_norm", True):
        told.append("queries and keys that turn are normed without weights")
    if _tuned(reader):
        told.append("queries that do not turn are scaled by their position")
    return tuple(told)


def _tuned(reader: Reader) -> bool:
    """The first published files have a number, 4 (from memory), where the class now has a flag."""
    given = reader.config.get("attn_temperature_tuning")
    if isinstance(given, int) and not isinstance(given, bool):
        return reader.size("attn_temperature_tuning", low=0) > 0
    return reader.flag("attn_temperature_tuning", True)


FAMILIES = (
    Family(
        model_type="llama4_text",
        architecture="Llama4ForCausalLM",
        required=SIZES | keys("num_key_value_heads num_local_experts num_experts_per_tok intermediate_size_mlp"),
        optional=keys(
            """
            tie_word_embeddings hidden_act head_dim attention_bias attention_chunk_size layer_types no_rope_layers
            no_rope_layer_interval moe_layers interleave_moe_layer_step use_qk_norm attn_temperature_tuning
            """
        ),
        irrelevant=ROPE_KEYS | ROUTER_KEYS | keys("floor_scale attn_scale for_llm_compressor"),
        rope_theta=5e5,
        norm_eps=1e-5,
        read=read_llama4,
    ),
)
