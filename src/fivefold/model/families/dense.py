"""Llama, Mistral, Qwen2 and Qwen3: pre-norm blocks of grouped-query attention and a gated feed-forward.

Defaults are those of the classes in transformers 5.24 (src/transformers/models/<family>/configuration_<family>.py).
"""

from __future__ import annotations

import msgspec

from fivefold.model.families.reader import MAX_LAYERS, ROPE_KEYS, Family, Reader, keys
from fivefold.model.spec import Attention, Block, FeedForward, ModelSpec

SIZES = keys(
    """
    vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
    max_position_embeddings
    """
)
SHARED_OPTIONAL = keys("hidden_act tie_word_embeddings")
LAYER_TYPES = ("full_attention", "sliding_attention")


def attention(
    reader: Reader,
    *,
    head_dim: int | None = None,
    qkv_bias: bool = False,
    out_bias: bool = False,
    qk_norm: bool = False,
) -> Attention:
    """Grouped-query attention without a window.

    head_dim: the class's own default; None stands for hidden_size / num_attention_heads.
    num_key_value_heads null means num_attention_heads in all these classes.
    """
    heads = reader.size("num_attention_heads")
    kv_heads = reader.size("num_key_value_heads", heads)
    if heads % kv_heads:
        raise reader.error("num_key_value_heads", f"must divide num_attention_heads = {heads}")
    return Attention(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=_head_dim(reader, heads, head_dim),
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        qk_norm=qk_norm,
    )


def _head_dim(reader: Reader, heads: int, default: int | None) -> int:
    given = reader.optional_size("head_dim") if "head_dim" in reader.family.optional else None
    if given is not None:
        return given
    if default is not None:
        return default
    hidden = reader.size("hidden_size")
    if hidden % heads:
        raise reader.error("num_attention_heads", f"must divide hidden_size = {hidden} where head_dim is not given")
    return hidden // heads


def feed_forward(reader: Reader, *, bias: bool = False) -> FeedForward:
    return FeedForward(
        ffn=reader.size("intermediate_size"), bias=bias, activation=reader.activation("hidden_act", "silu")
    )


def with_window(mixer: Attention, window: int | None) -> Attention:
    return msgspec.structs.replace(mixer, window=window)


def read_llama(reader: Reader) -> ModelSpec:
    bias = reader.flag("attention_bias", False)
    block = Block(
        mixer=attention(reader, qkv_bias=bias, out_bias=bias),
        feed=feed_forward(reader, bias=reader.flag("mlp_bias", False)),
    )
    return reader.model([block] * reader.layers())


def read_mistral(reader: Reader) -> ModelSpec:
    """sliding_window null is full attention; absent is 4096, the class's default (as in the first Mistral 7B)."""
    block = Block(mixer=with_window(attention(reader), reader.sliding_window(4096)), feed=feed_forward(reader))
    return reader.model([block] * reader.layers())


def read_qwen2(reader: Reader) -> ModelSpec:
    """Queries, keys and values always have a bias and the output never; no key of the class says so."""
    return _read_qwen(reader, attention(reader, qkv_bias=True))


def read_qwen3(reader: Reader) -> ModelSpec:
    bias = reader.flag("attention_bias", False)
    return _read_qwen(reader, attention(reader, head_dim=128, qkv_bias=bias, out_bias=bias, qk_norm=True))


def _read_qwen(reader: Reader, mixer: Attention) -> ModelSpec:
    feed = feed_forward(reader)
    windows = _windows(reader)
    return reader.model(Block(mixer=with_window(mixer, window), feed=feed) for window in windows)


def _windows(reader: Reader) -> list[int | None]:
    """Window of each block: by layer_types if given, else the blocks from max_window_layers (default 28) on."""
    layers = reader.layers()
    window = qwen_window(reader)
    first_windowed = reader.size("max_window_layers", 28, low=0, high=MAX_LAYERS)
    kinds = reader.layer_types(
        "layer_types", layers, LAYER_TYPES, lambda i: LAYER_TYPES[1] if i >= first_windowed else LAYER_TYPES[0]
    )
    return [window if kind == "sliding_attention" else None for kind in kinds]


def qwen_window(reader: Reader) -> int | None:
    """Qwen classes drop sliding_window unless use_sliding_window is true; its default is 4096."""
    return reader.sliding_window(4096) if reader.flag("use_sliding_window", False) else None


QWEN_WINDOW = keys("use_sliding_window sliding_window max_window_layers")

FAMILIES = (
    Family(
        model_type="llama",
        architecture="LlamaForCausalLM",
        # The spellings of the first converted files (from memory).
        other_architectures=("LLaMAForCausalLM",),
        aliases={"max_sequence_length": "max_position_embeddings"},
        required=SIZES,
        optional=SHARED_OPTIONAL | {"num_key_value_heads", "head_dim", "attention_bias", "mlp_bias"},
        irrelevant=ROPE_KEYS | {"pretraining_tp"},
        read=read_llama,
    ),
    Family(
        model_type="mistral",
        architecture="MistralForCausalLM",
        # The class's own default of 8 is Mistral 7B's, not a rule.
        required=SIZES | {"num_key_value_heads"},
        optional=SHARED_OPTIONAL | {"head_dim", "sliding_window"},
        # The class has no biases: transformers ignores these keys.
        fixed={"attention_bias": (False,), "mlp_bias": (False,)},
        irrelevant=ROPE_KEYS,
        read=read_mistral,
    ),
    Family(
        model_type="qwen2",
        architecture="Qwen2ForCausalLM",
        required=SIZES | {"num_key_value_heads"},
        optional=SHARED_OPTIONAL | QWEN_WINDOW | {"layer_types", "head_dim"},
        # The bias is part of the architecture; transformers ignores a key that says otherwise.
        # use_mrope is of the models that read images, and written, as false, into Qwen2.5's files (from memory).
        fixed={"attention_bias": (True,), "qkv_bias": (True,), "use_mrope": (False,)},
        irrelevant=ROPE_KEYS,
        read=read_qwen2,
    ),
    Family(
        model_type="qwen3",
        architecture="Qwen3ForCausalLM",
        required=SIZES | {"num_key_value_heads"},
        optional=SHARED_OPTIONAL | QWEN_WINDOW | {"layer_types", "head_dim", "attention_bias"},
        irrelevant=ROPE_KEYS,
        read=read_qwen3,
    ),
)
