"""Gemma 1, 2 and 3 (text): heads wider than hidden / heads, and from 2 on norms on both sides of every sublayer and
blocks that alternate between a window and full attention.

Defaults are those of the classes in transformers 5.24; what is peculiar is read from their modelling code.
"""

from __future__ import annotations

from fivefold.model.families.dense import SIZES, attention, with_window
from fivefold.model.families.reader import MAX_LAYERS, ROPE_KEYS, Family, Reader, keys
from fivefold.model.spec import Attention, Block, FeedForward, ModelSpec

KINDS = ("full_attention", "sliding_attention")
SCALED = ("norms multiply by 1 + weight", "embeddings are scaled by sqrt(hidden)")
# Of generation only, or training switches; cache_implementation is a word for generation's cache.
IRRELEVANT = ROPE_KEYS | {"cache_implementation"}
OPTIONAL = keys("tie_word_embeddings num_key_value_heads head_dim attention_bias")
GLOBAL_AND_LOCAL = OPTIONAL | keys(
    """
    hidden_activation sliding_window layer_types query_pre_attn_scalar final_logit_softcapping attn_logit_softcapping
    """
)
# Attention to later tokens would make it another kind of model.
ONE_WAY = {"use_bidirectional_attention": (False, None)}
# Gemma2Config and Gemma3TextConfig: positions of the class's default model.
POSITIONS_2, POSITIONS_3 = 8192, 131_072


def _attention(reader: Reader, qk_norm: bool = False) -> Attention:
    bias = reader.flag("attention_bias", False)
    return attention(reader, head_dim=256, qkv_bias=bias, out_bias=bias, qk_norm=qk_norm)


def _feed_forward(reader: Reader, key: str) -> FeedForward:
    """The first Gemma's files say gelu and mean the tanh approximation (GemmaConfig, transformers 5.24)."""
    activation = reader.activation(key, "gelu_pytorch_tanh")
    legacy = key == "hidden_act" and activation == "gelu"
    return FeedForward(ffn=reader.size("intermediate_size"), activation="gelu_tanh" if legacy else activation)


def read_gemma(reader: Reader) -> ModelSpec:
    # Old files have hidden_act = gelu beside the hidden_activation that was meant.
    key = "hidden_activation" if reader.config.get("hidden_activation") is not None else "hidden_act"
    block = Block(mixer=_attention(reader), feed=_feed_forward(reader, key))
    return reader.model([block] * reader.layers(), tied=True, peculiar=SCALED)


def read_gemma2(reader: Reader) -> ModelSpec:
    kinds = reader.layer_types("layer_types", reader.layers(), KINDS, lambda i: KINDS[(i + 1) % 2])
    return _alternating(reader, _attention(reader), kinds, POSITIONS_2, soft_caps=(50.0, 30.0))


def read_gemma3(reader: Reader) -> ModelSpec:
    """Every sliding_window_pattern-th block (the sixth) attends to everything; the others turn by another base."""
    step = reader.size("sliding_window_pattern", 6, high=MAX_LAYERS)
    kinds = reader.layer_types("layer_types", reader.layers(), KINDS, lambda i: KINDS[bool((i + 1) % step)])
    return _alternating(
        reader,
        _attention(reader, qk_norm=True),
        kinds,
        POSITIONS_3,
        soft_caps=(None, None),
        peculiar=("windowed blocks have a rotary embedding of their own",),
    )


def _alternating(
    reader: Reader,
    mixer: Attention,
    kinds: list[str],
    positions: int,
    soft_caps: tuple[float | None, float | None],
    peculiar: tuple[str, ...] = (),
) -> ModelSpec:
    window = reader.sliding_window(4096)
    feed = _feed_forward(reader, "hidden_activation")
    blocks = (
        Block(mixer=with_window(mixer, window if kind == "sliding_attention" else None), feed=feed, norms="sandwich")
        for kind in kinds
    )
    peculiar = (*SCALED, *_scores(reader, mixer.head_dim, soft_caps), *peculiar)
    return reader.model(blocks, tied=True, default_positions=positions, peculiar=peculiar)


def _scores(reader: Reader, head_dim: int, soft_caps: tuple[float | None, float | None]) -> list[str]:
    """What is done to scores and logits besides 1 / sqrt(head_dim)."""
    peculiar = []
    scalar = reader.number("query_pre_attn_scalar")
    if (256 if scalar is None else scalar) != head_dim:
        peculiar.append(f"scores are divided by sqrt({256 if scalar is None else scalar:g})")
    named = (("attn_logit_softcapping", "scores"), ("final_logit_softcapping", "logits"))
    for (key, what), default in zip(named, soft_caps, strict=True):
        cap = reader.number(key) if key in reader.config else default
        if cap is not None:
            peculiar.append(f"{what} are soft-capped at {cap:g}")
    return peculiar


FAMILIES = (
    Family(
        model_type="gemma",
        architecture="GemmaForCausalLM",
        required=SIZES | {"num_key_value_heads", "head_dim"},
        optional=OPTIONAL | keys("hidden_act hidden_activation"),
        fixed=ONE_WAY,
        irrelevant=IRRELEVANT,
        read=read_gemma,
    ),
    Family(
        model_type="gemma2",
        architecture="Gemma2ForCausalLM",
        required=(SIZES - {"max_position_embeddings"}) | {"num_key_value_heads"},
        optional=GLOBAL_AND_LOCAL | {"max_position_embeddings"},
        # Published files of 9B and 27B write the window twice (from memory).
        aliases={"sliding_window_size": "sliding_window"},
        fixed=ONE_WAY,
        # hidden_act stands in some files beside hidden_activation; the class does not look at it.
        irrelevant=IRRELEVANT | {"hidden_act"},
        read=read_gemma2,
    ),
    Family(
        model_type="gemma3_text",
        architecture="Gemma3ForCausalLM",
        required=(SIZES - {"max_position_embeddings"}) | {"num_key_value_heads"},
        optional=GLOBAL_AND_LOCAL | {"max_position_embeddings", "sliding_window_pattern"},
        fixed=ONE_WAY,
        irrelevant=IRRELEVANT | {"rope_local_base_freq"},
        # Published files that read images leave these out, 12B's the vocabulary and 4B's all three.
        defaults={"vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4},
        rope_theta=1e6,
        read=read_gemma3,
    ),
)
