"""A small configuration of every family that has no entry in the catalogue, and values to vary it with."""

from __future__ import annotations

from typing import Any

LLAMA_LIKE = {
    "vocab_size": 33,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
FLAG = (True, False)
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 3,
}
QWEN_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 10,
    "shared_expert_intermediate_size": 14,
}
NEOX = {key: value for key, value in LLAMA_LIKE.items() if key != "num_key_value_heads"}
# Family: a small configuration, and the values that a search may put in its place; None leaves a key out.
SMALL: dict[str, tuple[dict[str, Any], dict[str, tuple[Any, ...]]]] = {
    "phi3": (LLAMA_LIKE, {"num_key_value_heads": (None, 1, 4), "sliding_window": (None, 5, 100)}),
    "gemma": (LLAMA_LIKE | {"head_dim": 8}, {"attention_bias": FLAG, "tie_word_embeddings": (None, False, True)}),
    "gemma2": (
        LLAMA_LIKE | {"head_dim": 8},
        {"attention_bias": FLAG, "tie_word_embeddings": (None, False), "head_dim": (None, 6), "sliding_window": (9,)},
    ),
    "gemma3_text": (
        LLAMA_LIKE | {"head_dim": 8},
        {
            "attention_bias": FLAG,
            "tie_word_embeddings": (None, False),
            "head_dim": (None, 6),
            "sliding_window_pattern": (None, 2, 3),
            "layer_types": (None, ["full_attention"] * 3 + ["sliding_attention"]),
        },
    ),
    "gpt_neo": (
        {
            "vocab_size": 33,
            "hidden_size": 24,
            "num_layers": 4,
            "num_heads": 4,
            "max_position_embeddings": 64,
            "attention_types": [[["global", "local"], 2]],
        },
        {"intermediate_size": (None, 20), "attention_types": ([[["local"], 3], [["global"], 1]],)},
    ),
    "gptj": (
        {"vocab_size": 33, "n_embd": 32, "n_head": 4, "n_layer": 3, "n_positions": 64, "rotary_dim": 4},
        {"n_inner": (None, 20), "rotary_dim": (2, 8)},
    ),
    "gpt_neox": (
        NEOX,
        {
            "attention_bias": (None, False),
            "use_parallel_residual": (None, False),
            "tie_word_embeddings": (None, True),
            "rotary_pct": (None, 1.0),
        },
    ),
    "gpt_bigcode": (
        {"vocab_size": 33, "n_embd": 24, "n_head": 4, "n_layer": 3, "n_positions": 64},
        {"n_inner": (None, 20), "multi_query": (None, False), "tie_word_embeddings": (None, False)},
    ),
    "falcon": (
        {"vocab_size": 33, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4},
        {
            "bias": FLAG,
            "multi_query": (None, False),
            "alibi": FLAG,
            "parallel_attn": (None, False),
            "ffn_hidden_size": (None, 20),
            "tie_word_embeddings": (None, False),
        },
    ),
    "bloom": ({"vocab_size": 33, "hidden_size": 24, "n_layer": 3, "n_head": 4}, {"tie_word_embeddings": (None, False)}),
    "opt": (
        {
            "vocab_size": 33,
            "hidden_size": 24,
            "ffn_dim": 20,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "max_position_embeddings": 64,
        },
        {"enable_bias": (None, False), "tie_word_embeddings": (None, False)},
    ),
    "mpt": (
        {"vocab_size": 33, "d_model": 24, "n_heads": 4, "n_layers": 3, "max_seq_len": 64},
        {"tie_word_embeddings": (None, False)},
    ),
    "starcoder2": (
        LLAMA_LIKE,
        {"use_bias": (None, False), "tie_word_embeddings": (None, False), "sliding_window": (7,)},
    ),
    "olmo": (LLAMA_LIKE, {"attention_bias": FLAG, "num_key_value_heads": (None, 1), "clip_qkv": (None, 8.0)}),
    "olmo2": (LLAMA_LIKE, {"attention_bias": FLAG, "num_key_value_heads": (None, 1)}),
    "olmo3": (LLAMA_LIKE, {"attention_bias": FLAG, "num_key_value_heads": (None, 1), "sliding_window": (8,)}),
    "olmoe": (
        LLAMA_LIKE | {"num_experts": 4, "num_experts_per_tok": 2},
        {"attention_bias": FLAG, "num_key_value_heads": (None, 1)},
    ),
    "qwen2_moe": (
        LLAMA_LIKE | QWEN_EXPERTS,
        {
            "qkv_bias": (None, False),
            "use_sliding_window": FLAG,
            "max_window_layers": (None, 2),
            "decoder_sparse_step": (None, 2),
            "mlp_only_layers": (None, [0, 2]),
        },
    ),
    "qwen3_next": (
        LLAMA_LIKE | QWEN_EXPERTS | LINEAR | {"head_dim": 8},
        {
            "attention_bias": FLAG,
            "full_attention_interval": (None, 2),
            "decoder_sparse_step": (None, 2),
            "mlp_only_layers": (None, [1]),
            "linear_num_key_heads": (4,),
        },
    ),
    "qwen3_5_moe_text": (
        {key: value for key, value in LLAMA_LIKE.items() if key != "intermediate_size"}
        | QWEN_EXPERTS
        | LINEAR
        | {"head_dim": 8},
        {"attention_bias": FLAG, "full_attention_interval": (None, 2), "tie_word_embeddings": (None, True)},
    ),
    "qwen3_5_text": (
        LLAMA_LIKE | LINEAR | {"head_dim": 8},
        {"attention_bias": FLAG, "full_attention_interval": (None, 2), "tie_word_embeddings": (None, True)},
    ),
    "glm4": (LLAMA_LIKE | {"head_dim": 8}, {"attention_bias": (None, False), "head_dim": (None, 6)}),
    "glm4_moe": (
        LLAMA_LIKE
        | {
            "moe_intermediate_size": 10,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
        },
        {
            "attention_bias": FLAG,
            "use_qk_norm": (None, True),
            "head_dim": (None, 8),
            "first_k_dense_replace": (0, 3, 9),
            "n_shared_experts": (2,),
        },
    ),
    "glm": (LLAMA_LIKE | {"head_dim": 8}, {"attention_bias": (None, False), "head_dim": (None, 6)}),
    "smollm3": (
        LLAMA_LIKE,
        {
            "attention_bias": FLAG,
            "mlp_bias": FLAG,
            "tie_word_embeddings": (None, False),
            "no_rope_layer_interval": (None, 2),
            "no_rope_layers": (None, [1, 0, 1, 0]),
            "use_sliding_window": FLAG,
            "sliding_window": (None, 9),
            "head_dim": (None, 8),
        },
    ),
    "phi": (NEOX | {"num_attention_heads": 2}, {"num_key_value_heads": (None, 1), "tie_word_embeddings": (None, True)}),
    "seed_oss": (
        LLAMA_LIKE,
        {"attention_bias": (None, False), "attention_out_bias": FLAG, "mlp_bias": FLAG, "head_dim": (None, 8)},
    ),
    "gpt_oss": (
        LLAMA_LIKE | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
        {"head_dim": (None,), "attention_bias": (None, False), "sliding_window": (None, 9)},
    ),
    "granite": (LLAMA_LIKE, {"attention_bias": FLAG, "mlp_bias": FLAG, "residual_multiplier": (None, 0.5)}),
    "granitemoe": (
        LLAMA_LIKE | {"num_local_experts": 4, "num_experts_per_tok": 2},
        {"attention_bias": FLAG, "logits_scaling": (None, 2.0)},
    ),
    "cohere2": (
        LLAMA_LIKE,
        {
            "attention_bias": FLAG,
            "tie_word_embeddings": (None, False),
            "sliding_window": (None, 9),
            "sliding_window_pattern": (None, 2),
        },
    ),
    "cohere": (LLAMA_LIKE, {"attention_bias": FLAG, "use_qk_norm": FLAG, "tie_word_embeddings": (None, False)}),
    "dbrx": (
        {
            "vocab_size": 33,
            "d_model": 24,
            "n_heads": 4,
            "n_layers": 3,
            "max_seq_len": 64,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4},
            "ffn_config": {"ffn_hidden_size": 10, "moe_num_experts": 4, "moe_top_k": 2},
        },
        {"vocab_size": (34,)},
    ),
    "minimax_m2": (
        LLAMA_LIKE | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
        {"rotary_dim": (None, 4), "head_dim": (None, 6)},
    ),
    "deepseek_v32": (
        LLAMA_LIKE
        | {
            "num_key_value_heads": 4,
            "q_lora_rank": 6,
            "kv_lora_rank": 5,
            "qk_nope_head_dim": 4,
            "qk_rope_head_dim": 2,
            "v_head_dim": 3,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 10,
            "first_k_dense_replace": 1,
            "index_n_heads": 2,
            "index_head_dim": 4,
            "index_topk": 3,
        },
        {"attention_bias": FLAG, "index_n_heads": (1, 3), "first_k_dense_replace": (0, 2)},
    ),
    "llama4_text": (
        LLAMA_LIKE | {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 28, "head_dim": 8},
        {
            "interleave_moe_layer_step": (None, 2),
            "moe_layers": (None, [0, 3]),
            "attention_bias": FLAG,
            "attention_chunk_size": (5,),
            "no_rope_layers": (None, [1, 0, 1, 0]),
        },
    ),
    "jamba": (
        LLAMA_LIKE | {"num_experts": 4, "num_experts_per_tok": 2, "attn_layer_period": 2, "attn_layer_offset": 1},
        {
            "attn_layer_period": (3,),
            "expert_layer_period": (None, 3),
            "mamba_dt_rank": (None, "auto", 3),
            "mamba_d_state": (None, 5),
            "mamba_conv_bias": FLAG,
            "mamba_proj_bias": FLAG,
            "num_experts": (2,),
        },
    ),
    "nemotron_h": (
        LLAMA_LIKE
        | {
            "hybrid_override_pattern": "M-*E",
            "head_dim": 6,
            "mamba_num_heads": 4,
            "mamba_head_dim": 3,
            "n_groups": 2,
            "ssm_state_size": 5,
            "moe_intermediate_size": 7,
            "moe_shared_expert_intermediate_size": 9,
            "n_routed_experts": 4,
        },
        {
            "hybrid_override_pattern": ("MM*-", "-*-M"),
            "use_conv_bias": FLAG,
            "use_bias": FLAG,
            "n_groups": (1, 4),
        },
    ),
    "falcon_h1": (
        LLAMA_LIKE
        | {"mamba_n_heads": 4, "mamba_d_head": 3, "mamba_d_ssm": 12, "mamba_d_state": 5, "mamba_n_groups": 2},
        {
            "attention_bias": FLAG,
            "mlp_bias": FLAG,
            "mamba_conv_bias": FLAG,
            "mamba_rms_norm": FLAG,
            "head_dim": (None, 8),
            "mamba_d_head": ("auto",),
        },
    ),
}
NEW_ARCHITECTURE = {"new_decoder_architecture": True, "num_kv_heads": 2}
