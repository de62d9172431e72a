"""Mixtral and Qwen3-MoE: grouped-query attention, and experts in place of the feed-forward.

Defaults are those of the classes in transformers 5.24.
"""

from __future__ import annotations

from fivefold.model.families.dense import (
    QWEN_WINDOW,
    SHARED_OPTIONAL,
    SIZES,
    attention,
    feed_forward,
    qwen_window,
    with_window,
)
from fivefold.model.families.reader import MAX_EXPERTS, MAX_LAYERS, ROPE_KEYS, Family, Reader, keys
from fivefold.model.spec import Block, Experts, ModelSpec

ROUTER_KEYS = keys(
    """
    output_router_logits router_aux_loss_coef router_jitter_noise norm_topk_prob
    """
)


def routed(reader: Reader, *, experts_key: str, ffn_key: str, shared_ffn: int = 0) -> Experts:
    num_experts = reader.size(experts_key, high=MAX_EXPERTS)
    top_k = reader.size("num_experts_per_tok", high=MAX_EXPERTS)
    if top_k > num_experts:
        raise reader.error("num_experts_per_tok", f"cannot be more than {experts_key} = {num_experts}")
    return Experts(
        num_experts=num_experts,
        top_k=top_k,
        ffn=reader.size(ffn_key),
        shared_ffn=shared_ffn,
        activation=reader.activation("hidden_act", "silu"),
    )


def read_mixtral(reader: Reader) -> ModelSpec:
    block = Block(
        mixer=with_window(attention(reader), reader.sliding_window(None)),
        feed=routed(reader, experts_key="num_local_experts", ffn_key="intermediate_size"),
    )
    return reader.model([block] * reader.layers())


def read_qwen3_moe(reader: Reader) -> ModelSpec:
    """Block i has experts unless it is in mlp_only_layers or decoder_sparse_step does not divide i + 1.

    The class windows every block when use_sliding_window is true (it does not look at max_window_layers).
    """
    layers = reader.layers()
    bias = reader.flag("attention_bias", False)
    mixer = with_window(attention(reader, qkv_bias=bias, out_bias=bias, qk_norm=True), qwen_window(reader))
    sparse = Block(mixer=mixer, feed=routed(reader, experts_key="num_experts", ffn_key="moe_intermediate_size"))
    dense = Block(mixer=mixer, feed=feed_forward(reader))
    dense_layers = reader.layer_numbers("mlp_only_layers", layers)
    step = reader.size("decoder_sparse_step", 1, high=MAX_LAYERS)
    return reader.model(dense if i in dense_layers or (i + 1) % step else sparse for i in range(layers))


FAMILIES = (
    Family(
        model_type="mixtral",
        architecture="MixtralForCausalLM",
        required=SIZES | {"num_key_value_heads", "num_local_experts", "num_experts_per_tok"},
        optional=SHARED_OPTIONAL | {"head_dim", "sliding_window"},
        fixed={"attention_bias": (False,), "mlp_bias": (False,)},
        irrelevant=ROPE_KEYS | ROUTER_KEYS,
        rope_theta=1e6,
        norm_eps=1e-5,
        read=read_mixtral,
    ),
    Family(
        model_type="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        required=SIZES | {"num_key_value_heads", "num_experts", "num_experts_per_tok", "moe_intermediate_size"},
        optional=SHARED_OPTIONAL
        | (QWEN_WINDOW - {"max_window_layers"})
        | {"head_dim", "attention_bias", "decoder_sparse_step", "mlp_only_layers"},
        # Written by some published files; the class has no shared expert, always norms queries and keys, and takes
        # biases from attention_bias.
        fixed={"shared_expert_intermediate_size": (0, None), "use_qk_norm": (True,), "qkv_bias": (False,)},
        irrelevant=ROPE_KEYS | ROUTER_KEYS | {"max_window_layers"},
        read=read_qwen3_moe,
    ),
)
