"""MPT: attention with linear biases, no other bias anywhere.

Defaults, and the options that the class ignores and that are therefore refused, are those of MptConfig and
modeling_mpt.py in transformers 5.24. learned_pos_emb has no effect beside alibi there, nor in llm-foundry (from
memory).
"""

from __future__ import annotations

from fivefold.model.families.eleuther import heads_of
from fivefold.model.families.reader import MAX_POSITIONS, Family, Reader, keys
from fivefold.model.spec import Attention, Block, FeedForward, ModelSpec, Rotary

EXPANSION = 4


def read_mpt(reader: Reader) -> ModelSpec:
    heads, head_dim = heads_of(reader, "n_heads", "d_model")
    block = Block(
        mixer=Attention(heads=heads, kv_heads=heads, head_dim=head_dim, rope=False, alibi=True),
        feed=FeedForward(ffn=EXPANSION * reader.size("d_model"), gated=False, activation="gelu"),
        norm="layernorm",
    )
    reader.size("max_seq_len", high=MAX_POSITIONS)
    return reader.model(
        [block] * reader.layers("n_layers"),
        hidden="d_model",
        positions="max_seq_len",
        tied=True,
        rotary=Rotary(),
        final_norm="layernorm",
        peculiar=_peculiar(reader),
    )


def _peculiar(reader: Reader) -> tuple[str, ...]:
    told = []
    clip = reader.number("attn_config.clip_qkv")
    if clip is not None:
        told.append(f"queries, keys and values are clipped to {clip:g}")
    scale = reader.number("attn_config.softmax_scale")
    if scale is not None:
        told.append(f"scores are scaled by {scale:g}")
    slope = reader.number("attn_config.alibi_bias_max")
    if slope not in (None, 8):
        told.append(f"linear biases reach {slope:g}")
    return tuple(told)


FAMILIES = (
    Family(
        model_type="mpt",
        architecture="MptForCausalLM",
        other_architectures=("MPTForCausalLM",),
        required=keys("vocab_size d_model n_heads n_layers max_seq_len"),
        optional=keys(
            """
            tie_word_embeddings attn_config.clip_qkv attn_config.softmax_scale attn_config.alibi_bias_max
            """
        ),
        fixed={
            "expansion_ratio": (EXPANSION,),
            "no_bias": (True,),
            "norm_type": ("low_precision_layernorm",),
            "embedding_fraction": (1.0,),
            "logit_scale": (None,),
            "attn_config.alibi": (True,),
            "attn_config.attn_type": ("multihead_attention",),
            "attn_config.qk_ln": (False,),
            "attn_config.prefix_lm": (False,),
        },
        irrelevant=keys(
            """
            learned_pos_emb init_device resid_pdrop emb_pdrop verbose init_config tokenizer_name
            attn_config.attn_impl attn_config.attn_pdrop attn_config.attn_uses_sequence_id attn_config.model_type
            """
        ),
        aliases={
            "hidden_size": "d_model",
            "num_attention_heads": "n_heads",
            "num_hidden_layers": "n_layers",
        },
        tables=("attn_config",),
        norm_eps=1e-5,
        read=read_mpt,
    ),
)
