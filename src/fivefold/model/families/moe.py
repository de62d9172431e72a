"""Mixtral, Qwen2-MoE, Qwen3-MoE and MiniMax-M2: grouped-query attention, and experts in place of the feed-forward.

Defaults are those of the classes in transformers 5.24.
"""

from __future__ import annotations

import msgspec

from fivefold.model.families.dense import (
    LAYER_TYPES,
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


def shared_and_routed(reader: Reader) -> Experts:
    """Qwen's experts: routed ones and a shared one whose output a sigmoid scales."""
    shared = reader.size("shared_expert_intermediate_size")
    experts = routed(reader, experts_key="num_experts", ffn_key="moe_intermediate_size", shared_ffn=shared)
    return msgspec.structs.replace(experts, shared_gate=True)


def sparse_layers(reader: Reader) -> list[bool]:
    """Block i has experts unless it is in mlp_only_layers or decoder_sparse_step does not divide i + 1."""
    layers = reader.layers()
    dense = reader.layer_numbers("mlp_only_layers", layers)
    step = reader.size("decoder_sparse_step", 1, high=MAX_LAYERS)
    return [i not in dense and (i + 1) % step == 0 for i in range(layers)]


def read_mixtral(reader: Reader) -> ModelSpec:
    block = Block(
        mixer=with_window(attention(reader), reader.sliding_window(None)),
        feed=routed(reader, experts_key="num_local_experts", ffn_key="intermediate_size"),
    )
    return reader.model([block] * reader.layers())


def read_qwen2_moe(reader: Reader) -> ModelSpec:
    """With use_sliding_window every other block below max_window_layers has the window."""
    layers = reader.layers()
    mixer = attention(reader, qkv_bias=reader.flag("qkv_bias", True))
    window, below = qwen_window(reader), reader.size("max_window_layers", 28, low=0, high=MAX_LAYERS)
    windowed = window is not None
    kinds = reader.layer_types(
        "layer_types",
        layers,
        LAYER_TYPES,
        lambda i: "sliding_attention" if windowed and (i + 1) % 2 and i < below else "full_attention",
    )
    sparse, dense, experts = sparse_layers(reader), feed_forward(reader), shared_and_routed(reader)
    return reader.model(
        Block(
            mixer=with_window(mixer, window if kind == "sliding_attention" else None),
            feed=experts if has_experts else dense,
        )
        for kind, has_experts in zip(kinds, sparse, strict=True)
    )


def read_qwen3_moe(reader: Reader) -> ModelSpec:
    """The class windows every block when use_sliding_window is true (it does not look at max_window_layers)."""
    bias = reader.flag("attention_bias", False)
    mixer = with_window(attention(reader, qkv_bias=bias, out_bias=bias, qk_norm=True), qwen_window(reader))
    sparse = Block(mixer=mixer, feed=routed(reader, experts_key="num_experts", ffn_key="moe_intermediate_size"))
    dense = Block(mixer=mixer, feed=feed_forward(reader))
    return reader.model(sparse if has_experts else dense for has_experts in sparse_layers(reader))


def read_minimax_m2(reader: Reader) -> ModelSpec:
    """Queries and keys are normed over all heads together."""
    mixer = msgspec.structs.replace(attention(reader, head_dim=128, qk_norm=True), qk_norm_over="all")
    block = Block(mixer=mixer, feed=routed(reader, experts_key="num_local_experts", ffn_key="intermediate_size"))
    turned = reader.optional_size("rotary_dim", high=mixer.head_dim)
    layers = reader.layers()
    kinds = reader.config.get("attn_type_list")
    if kinds is not None and kinds != [1] * layers:
        raise reader.error("attn_type_list", f"must be 1 (full attention) for each of {layers} blocks", [1])
    modules = reader.size("num_mtp_modules", 0, low=0, high=MAX_LAYERS)
    model = reader.model([block] * layers, mtp=modules if reader.flag("use_mtp", True) else 0)
    if turned is None:
        return model
    return msgspec.structs.replace(model, rotary=msgspec.structs.replace(model.rotary, share=turned / mixer.head_dim))


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
    Family(
        model_type="qwen2_moe",
        architecture="Qwen2MoeForCausalLM",
        required=SIZES
        | keys(
            """
            num_key_value_heads num_experts num_experts_per_tok moe_intermediate_size shared_expert_intermediate_size
            """
        ),
        optional=SHARED_OPTIONAL
        | QWEN_WINDOW
        | keys("head_dim qkv_bias layer_types decoder_sparse_step mlp_only_layers"),
        irrelevant=ROPE_KEYS | ROUTER_KEYS,
        read=read_qwen2_moe,
    ),
    Family(
        model_type="minimax_m2",
        architecture="MiniMaxM2ForCausalLM",
        required=SIZES | keys("num_key_value_heads num_local_experts num_experts_per_tok"),
        optional=SHARED_OPTIONAL | keys("head_dim rotary_dim attn_type_list num_mtp_modules use_mtp"),
        # Keys of the published file that say what the class always does (from memory).
        fixed={
            "use_qk_norm": (True,),
            "qk_norm_type": ("per_layer",),
            "shared_intermediate_size": (0,),
            "mtp_transformer_layers": (1,),
        },
        irrelevant=ROPE_KEYS | ROUTER_KEYS | keys("scoring_func use_routing_bias"),
        aliases={"num_experts": "num_local_experts"},
        rope_theta=5e6,
        read=read_minimax_m2,
    ),
)
