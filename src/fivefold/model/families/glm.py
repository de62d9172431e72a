"""GLM-4, GLM-4 (0414) and GLM-4.5 to 4.7: norms on both sides of the sublayers (0414), DeepSeek-V3's experts behind
grouped-query attention (from 4.5 on).

Defaults are those of GlmConfig, Glm4Config and Glm4MoeConfig in transformers 5.24.
"""

from __future__ import annotations

from fivefold.model.families.deepseek import mtp_modules
from fivefold.model.families.dense import SHARED_OPTIONAL, SIZES, attention, feed_forward
from fivefold.model.families.eleuther import NEIGHBOURS
from fivefold.model.families.moe import ROUTER_KEYS, routed
from fivefold.model.families.reader import MAX_LAYERS, ROPE_KEYS, Family, Reader, keys
from fivefold.model.spec import Block, ModelSpec

OPTIONAL = SHARED_OPTIONAL | {"head_dim", "attention_bias"}


def read_glm(reader: Reader) -> ModelSpec:
    """attention_bias is of queries, keys and values. GLM-4 (0414) norms on both sides, the first GLM-4 (glm) before."""
    block = Block(
        mixer=attention(reader, head_dim=128, qkv_bias=reader.flag("attention_bias", True)),
        feed=feed_forward(reader),
        norms="pre" if reader.family.model_type == "glm" else "sandwich",
    )
    return reader.model([block] * reader.layers(), peculiar=(NEIGHBOURS,))


def read_glm4_moe(reader: Reader) -> ModelSpec:
    mixer = attention(reader, qkv_bias=reader.flag("attention_bias", False), qk_norm=reader.flag("use_qk_norm", False))
    shared = reader.size("n_shared_experts", 1, low=0) * reader.size("moe_intermediate_size")
    experts = routed(reader, experts_key="n_routed_experts", ffn_key="moe_intermediate_size", shared_ffn=shared)
    sparse, dense = Block(mixer=mixer, feed=experts), Block(mixer=mixer, feed=feed_forward(reader))
    first_sparse = reader.size("first_k_dense_replace", low=0, high=MAX_LAYERS)
    return reader.model(
        (dense if i < first_sparse else sparse for i in range(reader.layers())), mtp=mtp_modules(reader)
    )


def _dense(model_type: str, architecture: str) -> Family:
    return Family(
        model_type=model_type,
        architecture=architecture,
        required=SIZES | {"num_key_value_heads"},
        optional=OPTIONAL,
        irrelevant=ROPE_KEYS,
        rope_share=0.5,
        norm_eps=1.5625e-7,
        read=read_glm,
    )


FAMILIES = (
    _dense("glm", "GlmForCausalLM"),
    _dense("glm4", "Glm4ForCausalLM"),
    Family(
        model_type="glm4_moe",
        architecture="Glm4MoeForCausalLM",
        required=SIZES
        | keys(
            """
            num_key_value_heads moe_intermediate_size n_routed_experts n_shared_experts num_experts_per_tok
            first_k_dense_replace
            """
        ),
        optional=OPTIONAL | keys("use_qk_norm num_nextn_predict_layers num_mtp_layers"),
        irrelevant=ROPE_KEYS | ROUTER_KEYS | keys("n_group topk_group routed_scaling_factor scoring_func topk_method"),
        aliases={"num_local_experts": "n_routed_experts"},
        rope_share=0.5,
        norm_eps=1e-5,
        read=read_glm4_moe,
    ),
)
