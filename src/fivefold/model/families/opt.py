"""OPT: GPT-3's block with ReLU.

Defaults are those of OPTConfig in transformers 5.24. The table of positions has two rows more than there are
positions (OPTLearnedPositionalEmbedding). OPT-350m, which norms after its sublayers and projects its embeddings, is not
read.
"""

from __future__ import annotations

from fivefold.model.families.eleuther import LAYERNORM, heads_of
from fivefold.model.families.reader import MAX_POSITIONS, Family, Reader, keys
from fivefold.model.spec import Attention, Block, FeedForward, ModelSpec, Rotary

OFFSET = 2


def read_opt(reader: Reader) -> ModelSpec:
    heads, head_dim = heads_of(reader, "num_attention_heads", "hidden_size")
    hidden = reader.size("hidden_size")
    if reader.size("word_embed_proj_dim", hidden) != hidden:
        raise reader.error("word_embed_proj_dim", f"projected embeddings are not modelled: must be {hidden}", [hidden])
    bias = reader.flag("enable_bias", True)
    block = Block(
        mixer=Attention(heads=heads, kv_heads=heads, head_dim=head_dim, qkv_bias=bias, out_bias=bias, rope=False),
        feed=FeedForward(
            ffn=reader.size("ffn_dim"),
            gated=False,
            bias=bias,
            activation=reader.activation("activation_function", "relu"),
        ),
        norm="layernorm",
        norm_bias=True,
    )
    return reader.model(
        [block] * reader.layers(),
        tied=True,
        learned_positions=reader.size("max_position_embeddings", high=MAX_POSITIONS) + OFFSET,
        rotary=Rotary(),
        peculiar=(f"position i takes row i + {OFFSET} of the table of positions",),
        **LAYERNORM,
    )


FAMILIES = (
    Family(
        model_type="opt",
        architecture="OPTForCausalLM",
        required=keys("vocab_size hidden_size ffn_dim num_hidden_layers num_attention_heads max_position_embeddings"),
        optional=keys("word_embed_proj_dim activation_function enable_bias tie_word_embeddings"),
        fixed={
            "do_layer_norm_before": (True,),
            "_remove_final_layer_norm": (False,),
            "layer_norm_elementwise_affine": (True,),
        },
        irrelevant=keys("dropout activation_dropout layerdrop init_std"),
        # The class has no key for it: torch's own default.
        norm_eps=1e-5,
        norm_eps_keys=frozenset(),
        read=read_opt,
    ),
)
