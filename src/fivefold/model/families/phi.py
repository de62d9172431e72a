"""Phi-1, 1.5 and 2: attention and feed-forward side by side behind one LayerNorm, biases everywhere, the head's too.

Defaults are those of PhiConfig in transformers 5.24.
"""

from __future__ import annotations

from fivefold.model.families.dense import SIZES, attention
from fivefold.model.families.eleuther import LAYERNORM
from fivefold.model.families.reader import ROPE_KEYS, Family, Reader, keys
from fivefold.model.spec import Block, FeedForward, ModelSpec


def read_phi(reader: Reader) -> ModelSpec:
    block = Block(
        mixer=attention(reader, qkv_bias=True, out_bias=True),
        feed=FeedForward(
            ffn=reader.size("intermediate_size"),
            gated=False,
            bias=True,
            activation=reader.activation("hidden_act", "gelu_new"),
        ),
        norm="layernorm",
        norm_bias=True,
        parallel=True,
        shared_norm=True,
    )
    return reader.model([block] * reader.layers(), head_bias=True, **LAYERNORM)


FAMILIES = (
    Family(
        model_type="phi",
        architecture="PhiForCausalLM",
        required=SIZES,
        optional=keys("num_key_value_heads hidden_act tie_word_embeddings"),
        # Its norms have biases, which a spec's norms of queries and keys have not.
        fixed={"qk_layernorm": (False,)},
        irrelevant=ROPE_KEYS | keys("resid_pdrop embd_pdrop"),
        rope_share=0.5,
        norm_eps=1e-5,
        norm_eps_keys=keys("layer_norm_eps"),
        read=read_phi,
    ),
)
