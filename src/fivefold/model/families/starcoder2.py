"""StarCoder 2: grouped-query attention with rotary embedding, LayerNorm and a plain feed-forward with biases.

Defaults are those of Starcoder2Config in transformers 5.24.
"""

from __future__ import annotations

from fivefold.model.families.dense import SIZES, attention, with_window
from fivefold.model.families.eleuther import LAYERNORM
from fivefold.model.families.reader import ROPE_KEYS, Family, Reader, keys
from fivefold.model.spec import Block, FeedForward, ModelSpec


def read_starcoder2(reader: Reader) -> ModelSpec:
    bias = reader.flag("use_bias", True)
    block = Block(
        mixer=with_window(attention(reader, qkv_bias=bias, out_bias=bias), reader.sliding_window(None)),
        feed=FeedForward(
            ffn=reader.size("intermediate_size"),
            gated=False,
            bias=bias,
            activation=reader.activation("hidden_act", "gelu_pytorch_tanh"),
        ),
        norm="layernorm",
        norm_bias=True,
    )
    return reader.model([block] * reader.layers(), tied=True, **LAYERNORM)


FAMILIES = (
    Family(
        model_type="starcoder2",
        architecture="Starcoder2ForCausalLM",
        required=SIZES | {"num_key_value_heads"},
        optional=keys("use_bias sliding_window hidden_act tie_word_embeddings head_dim"),
        fixed={"mlp_type": ("default",), "norm_type": ("layer_norm",), "scale_attn_weights": (True,)},
        # The last three are of the class that the models were trained with, and 7B's and 15B's files have them.
        irrelevant=ROPE_KEYS
        | keys(
            """
            residual_dropout embedding_dropout activation_function
            layer_norm_epsilon attention_softmax_in_fp32 scale_attention_softmax_in_fp32
            """
        ),
        norm_eps=1e-5,
        norm_eps_keys=keys("norm_epsilon"),
        read=read_starcoder2,
    ),
)
