"""DBRX: grouped-query attention and fine-grained experts, LayerNorm without biases.

Defaults are those of DbrxConfig, DbrxAttentionConfig and DbrxFFNConfig in transformers 5.24; sizes have none here,
because that class's own are of no published model.
"""

from __future__ import annotations

from fivefold.model.families.eleuther import heads_of
from fivefold.model.families.reader import ACTIVATIONS, MAX_EXPERTS, ROPE_KEYS, Family, Reader, keys
from fivefold.model.spec import Attention, Block, Experts, ModelSpec


def read_dbrx(reader: Reader) -> ModelSpec:
    heads, head_dim = heads_of(reader, "n_heads", "d_model")
    kv_heads = reader.size("attn_config.kv_n_heads")
    if heads % kv_heads:
        raise reader.error("attn_config.kv_n_heads", f"must divide n_heads = {heads}")
    block = Block(
        mixer=Attention(heads=heads, kv_heads=kv_heads, head_dim=head_dim), feed=_experts(reader), norm="layernorm"
    )
    clip = reader.number("attn_config.clip_qkv")
    told = () if clip is None else (f"queries, keys and values are clipped to {clip:g}",)
    return reader.model(
        [block] * reader.layers("n_layers"),
        hidden="d_model",
        positions="max_seq_len",
        tied_embeddings=False,
        final_norm="layernorm",
        peculiar=told,
    )


def _experts(reader: Reader) -> Experts:
    num_experts = reader.size("ffn_config.moe_num_experts", high=MAX_EXPERTS)
    top_k = reader.size("ffn_config.moe_top_k", high=MAX_EXPERTS)
    if top_k > num_experts:
        raise reader.error("ffn_config.moe_top_k", f"cannot be more than moe_num_experts = {num_experts}")
    activation = reader.config.get("ffn_config.ffn_act_fn")
    name = activation.get("name") if isinstance(activation, dict) else "silu" if activation is None else None
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise reader.error("ffn_config.ffn_act_fn", f"its name must be one of {', '.join(ACTIVATIONS)}")
    return Experts(
        num_experts=num_experts,
        top_k=top_k,
        ffn=reader.size("ffn_config.ffn_hidden_size"),
        activation=ACTIVATIONS[name],
    )


FAMILIES = (
    Family(
        model_type="dbrx",
        architecture="DbrxForCausalLM",
        required=keys(
            """
            vocab_size d_model n_heads n_layers max_seq_len attn_config.kv_n_heads ffn_config.ffn_hidden_size
            ffn_config.moe_num_experts ffn_config.moe_top_k
            """
        ),
        optional=keys("attn_config.clip_qkv ffn_config.ffn_act_fn"),
        fixed={"tie_word_embeddings": (False,)},
        irrelevant=ROPE_KEYS
        | keys(
            """
            resid_pdrop emb_pdrop output_router_logits router_aux_loss_coef attn_config.attn_pdrop
            attn_config.model_type ffn_config.model_type ffn_config.moe_jitter_eps ffn_config.moe_loss_weight
            ffn_config.moe_normalize_expert_weights ffn_config.uniform_expert_assignment
            """
        ),
        aliases={
            "hidden_size": "d_model",
            "num_attention_heads": "n_heads",
            "num_hidden_layers": "n_layers",
            "max_position_embeddings": "max_seq_len",
            "attn_config.rope_theta": "rope_theta",
        },
        tables=("attn_config", "ffn_config"),
        norm_eps=1e-5,
        norm_eps_keys=frozenset(),
        read=read_dbrx,
    ),
)
