"""BLOOM: attention with linear biases instead of positions, and a norm right after the embedding.

Defaults are those of BloomConfig in transformers 5.24, which has no maximum of positions; 2,048 are the tokens of its
training sequences (Le Scao et al. 2022, arXiv 2211.05100, table 3).
"""

from __future__ import annotations

from fivefold.model.families.eleuther import LAYERNORM, heads_of
from fivefold.model.families.reader import Family, Reader, keys
from fivefold.model.spec import Attention, Block, FeedForward, ModelSpec, Rotary

POSITIONS = 2048


def read_bloom(reader: Reader) -> ModelSpec:
    heads, head_dim = heads_of(reader, "n_head", "hidden_size")
    block = Block(
        mixer=Attention(
            heads=heads, kv_heads=heads, head_dim=head_dim, qkv_bias=True, out_bias=True, rope=False, alibi=True
        ),
        feed=FeedForward(ffn=4 * reader.size("hidden_size"), gated=False, bias=True, activation="gelu_tanh"),
        norm="layernorm",
        norm_bias=True,
    )
    after_norm = reader.flag("apply_residual_connection_post_layernorm", False)
    return reader.model(
        [block] * reader.layers("n_layer"),
        positions="seq_length",
        default_positions=POSITIONS,
        tied=True,
        embedding_norm=True,
        rotary=Rotary(),
        peculiar=("residuals are taken after the norms",) if after_norm else (),
        **LAYERNORM,
    )


FAMILIES = (
    Family(
        model_type="bloom",
        architecture="BloomForCausalLM",
        required=keys("vocab_size hidden_size n_layer n_head"),
        optional=keys("seq_length tie_word_embeddings apply_residual_connection_post_layernorm"),
        irrelevant=keys(
            """
            pretraining_tp slow_but_exact offset_alibi masked_softmax_fusion bias_dropout_fusion
            attention_softmax_in_fp32 skip_bias_add skip_bias_add_qkv unk_token_id n_inner
            """
        ),
        aliases={"n_embed": "hidden_size", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"},
        norm_eps=1e-5,
        read=read_bloom,
    ),
)
