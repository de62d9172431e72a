"""Command R, R+ and A: attention and feed-forward side by side behind one LayerNorm without a bias, tied embeddings; in
Command A three blocks in four have a window, and only those turn.

Defaults are those of CohereConfig and Cohere2Config in transformers 5.24.
"""

from __future__ import annotations

import msgspec

from fivefold.model.families.dense import LAYER_TYPES, SHARED_OPTIONAL, SIZES, attention, feed_forward
from fivefold.model.families.eleuther import NEIGHBOURS
from fivefold.model.families.reader import MAX_LAYERS, ROPE_KEYS, Family, Reader, keys
from fivefold.model.spec import Attention, Block, ModelSpec


def read_cohere(reader: Reader) -> ModelSpec:
    """use_qk_norm (Command R+): a LayerNorm with weights of its own for every head of queries and keys."""
    bias = reader.flag("attention_bias", False)
    normed = reader.flag("use_qk_norm", False)
    mixer = attention(reader, qkv_bias=bias, out_bias=bias, qk_norm=normed)
    if normed:
        mixer = msgspec.structs.replace(mixer, qk_norm_over="each", qk_norm_kind="layernorm")
    return _model(reader, [mixer] * reader.layers())


def read_cohere2(reader: Reader) -> ModelSpec:
    """Every sliding_window_pattern-th block (the fourth) attends to everything and does not turn."""
    bias = reader.flag("attention_bias", False)
    full = msgspec.structs.replace(attention(reader, qkv_bias=bias, out_bias=bias), rope=False)
    window = reader.sliding_window(4096)
    # Without a size for it a block's window is none, and the class takes that for a block that does not turn.
    local = msgspec.structs.replace(full, rope=window is not None, window=window)
    step = reader.size("sliding_window_pattern", 4, high=MAX_LAYERS)
    kinds = reader.layer_types("layer_types", reader.layers(), LAYER_TYPES, lambda i: LAYER_TYPES[bool((i + 1) % step)])
    return _model(reader, [local if kind == "sliding_attention" else full for kind in kinds])


def _model(reader: Reader, mixers: list[Attention]) -> ModelSpec:
    feed = feed_forward(reader)
    given = reader.number("logit_scale")
    scale = 0.0625 if given is None else given
    told = (NEIGHBOURS,) if scale == 1 else (NEIGHBOURS, f"logits are multiplied by {scale:g}")
    blocks = (Block(mixer=mixer, feed=feed, norm="layernorm", parallel=True, shared_norm=True) for mixer in mixers)
    return reader.model(blocks, tied=True, final_norm="layernorm", peculiar=told)


FAMILIES = (
    Family(
        model_type="cohere",
        architecture="CohereForCausalLM",
        required=SIZES,
        optional=SHARED_OPTIONAL | keys("num_key_value_heads attention_bias use_qk_norm logit_scale"),
        # Written by published files; the class has no such option.
        irrelevant=ROPE_KEYS | keys("model_max_length"),
        rope_theta=5e5,
        norm_eps=1e-5,
        norm_eps_keys=keys("layer_norm_eps"),
        read=read_cohere,
    ),
    Family(
        model_type="cohere2",
        architecture="Cohere2ForCausalLM",
        required=SIZES,
        optional=SHARED_OPTIONAL
        | keys("num_key_value_heads attention_bias logit_scale sliding_window sliding_window_pattern layer_types"),
        # head_dim is written by transformers as hidden / heads; how a checkpoint's table was split changes nothing.
        irrelevant=ROPE_KEYS | keys("head_dim use_parallel_embedding cache_implementation"),
        # Published files say with these what the class always does.
        fixed={
            "use_qk_norm": (False,),
            "order_of_interleaved_layers": ("local_attn_first",),
            "position_embedding_type": ("rope_gptj",),
            "rotary_pct": (1.0,),
            "use_embedding_sharing": (True,),
            "use_gated_activation": (True,),
            "use_parallel_block": (True,),
        },
        aliases={"layer_switch": "sliding_window_pattern"},
        norm_eps=1e-5,
        norm_eps_keys=keys("layer_norm_eps"),
        read=read_cohere2,
    ),
)
