"""GPT-2 and its like (GPT-3, Megatron's GPT, GPT-BigCode): learned positions, LayerNorm, biases everywhere, GELU, tied
embeddings.

Defaults are those of GPT2Config and GPTBigCodeConfig in transformers 5.24.
"""

from __future__ import annotations

from fivefold.model.families.reader import MAX_POSITIONS, MAX_VOCAB, Family, Reader, keys, runs
from fivefold.model.spec import Attention, Block, FeedForward, ModelSpec


def read_gpt2(reader: Reader) -> ModelSpec:
    return _read(reader, kv_heads=reader.size("n_head"), activation="gelu_new")


def read_gpt_bigcode(reader: Reader) -> ModelSpec:
    """With multi_query all heads share one of keys and values."""
    kv_heads = 1 if reader.flag("multi_query", True) else reader.size("n_head")
    return _read(reader, kv_heads=kv_heads, activation="gelu_pytorch_tanh")


def _read(reader: Reader, kv_heads: int, activation: str) -> ModelSpec:
    hidden = reader.size("n_embd")
    heads = reader.size("n_head")
    positions = reader.size("n_positions", high=MAX_POSITIONS)
    if hidden % heads:
        raise reader.error("n_head", f"must divide n_embd = {hidden}")
    block = Block(
        mixer=Attention(
            heads=heads, kv_heads=kv_heads, head_dim=hidden // heads, qkv_bias=True, out_bias=True, rope=False
        ),
        feed=FeedForward(
            ffn=reader.size("n_inner", 4 * hidden),
            gated=False,
            bias=True,
            activation=reader.activation("activation_function", activation),
        ),
        norm="layernorm",
        norm_bias=True,
    )
    return ModelSpec(
        name=reader.name,
        family=reader.family.model_type,
        hidden=hidden,
        vocab=reader.size("vocab_size", high=MAX_VOCAB),
        runs=runs([block] * reader.layers("n_layer")),
        max_position=positions,
        learned_positions=positions,
        norm_eps=reader.norm_eps(),
        tied_embeddings=reader.flag("tie_word_embeddings", True),
        final_norm="layernorm",
        final_norm_bias=True,
        source=reader.where,
    )


# What GPT-2 and what descends from it call the sizes, their dropouts, and the options of a classifier's head.
SPELLINGS = {
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "max_position_embeddings": "n_positions",
}
DROPOUTS = keys("resid_pdrop embd_pdrop attn_pdrop")
SUMMARY = keys("summary_type summary_use_proj summary_activation summary_proj_to_labels summary_first_dropout")

FAMILIES = (
    Family(
        model_type="gpt2",
        architecture="GPT2LMHeadModel",
        required=keys("vocab_size n_embd n_head n_layer n_positions"),
        optional=keys("n_inner activation_function tie_word_embeddings"),
        # n_ctx repeats n_positions in old files.
        irrelevant=DROPOUTS
        | SUMMARY
        | keys(
            "n_ctx scale_attn_weights scale_attn_by_inverse_layer_idx reorder_and_upcast_attn gradient_checkpointing"
        ),
        norm_eps=1e-5,
        read=read_gpt2,
    ),
    Family(
        model_type="gpt_bigcode",
        architecture="GPTBigCodeForCausalLM",
        required=keys("vocab_size n_embd n_head n_layer n_positions"),
        optional=keys("n_inner activation_function tie_word_embeddings multi_query"),
        fixed={"scale_attn_weights": (True,)},
        irrelevant=DROPOUTS
        | SUMMARY
        | keys(
            """
            attention_softmax_in_fp32 scale_attention_softmax_in_fp32 inference_runner validate_runner_input
            runner_max_sequence_length pad_key_length pre_allocate_kv_cache max_sequence_length max_batch_size
            """
        ),
        aliases=SPELLINGS,
        norm_eps=1e-5,
        read=read_gpt_bigcode,
    ),
)
