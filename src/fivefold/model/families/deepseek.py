"""DeepSeek-V2, V3 and V3.2 and Kimi K2: latent attention, dense first blocks, routed and shared experts.

Facts: DeepSeek-V2 (arXiv 2405.04434) section 2.1, DeepSeek-V3 (arXiv 2412.19437) section 2, the classes in
transformers 5.24, and for moe_layer_freq, which those classes ignore, DeepSeek's own modelling code (from memory):
block i has experts when i >= first_k_dense_replace and i % moe_layer_freq == 0.
The router's e_score_correction_bias is a buffer (transformers: nn.Buffer), not a parameter, and is not counted.
"""

from __future__ import annotations

import msgspec

from fivefold.model.families.dense import SHARED_OPTIONAL, SIZES, feed_forward
from fivefold.model.families.moe import routed
from fivefold.model.families.reader import MAX_LAYERS, MAX_POSITIONS, ROPE_KEYS, Family, Reader, keys
from fivefold.model.spec import Block, Indexer, LatentAttention, ModelSpec

REQUIRED = SIZES | keys(
    """
    q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim n_routed_experts
    n_shared_experts num_experts_per_tok moe_intermediate_size first_k_dense_replace
    """
)
OPTIONAL = SHARED_OPTIONAL | keys(
    """
    num_key_value_heads attention_bias moe_layer_freq num_nextn_predict_layers num_mtp_layers
    qk_head_dim
    """
)
# Routing and balancing rules decide which experts a token takes, not how many. head_dim is written by
# transformers as a copy of qk_rope_head_dim.
IRRELEVANT = ROPE_KEYS | keys(
    """
    n_group topk_group topk_method scoring_func norm_topk_prob routed_scaling_factor seq_aux
    aux_loss_alpha router_aux_loss_coef output_router_logits ep_size pretraining_tp head_dim
    """
)


def latent_attention(reader: Reader) -> LatentAttention:
    heads = reader.size("num_attention_heads")
    if reader.size("num_key_value_heads", heads) != heads:
        raise reader.error("num_key_value_heads", f"latent attention has one per head: must be {heads}", [heads])
    mixer = LatentAttention(
        heads=heads,
        q_lora_rank=reader.optional_size("q_lora_rank"),
        kv_lora_rank=reader.size("kv_lora_rank"),
        qk_nope_head_dim=reader.size("qk_nope_head_dim"),
        qk_rope_head_dim=reader.size("qk_rope_head_dim"),
        v_head_dim=reader.size("v_head_dim"),
        bias=reader.flag("attention_bias", False),
    )
    if reader.size("qk_head_dim", mixer.qk_head_dim) != mixer.qk_head_dim:
        raise reader.error("qk_head_dim", f"must be qk_nope_head_dim + qk_rope_head_dim = {mixer.qk_head_dim}")
    return mixer


def _sparse_attention(reader: Reader, mixer: LatentAttention) -> LatentAttention:
    """With V3.2's indexer where the family has one; it reads the query latent, so that must exist."""
    if "index_topk" not in reader.family.required:
        return mixer
    if mixer.q_lora_rank is None:
        raise reader.error("q_lora_rank", "the indexer reads the query latent: must be a whole number")
    indexer = Indexer(
        heads=reader.size("index_n_heads"),
        head_dim=reader.size("index_head_dim"),
        top_k=reader.size("index_topk", high=MAX_POSITIONS),
    )
    return msgspec.structs.replace(mixer, indexer=indexer)


def mtp_modules(reader: Reader) -> int:
    """Multi-token-prediction modules that the file states (num_mtp_layers is transformers' newer spelling)."""
    older = reader.size("num_nextn_predict_layers", 0, low=0, high=MAX_LAYERS)
    newer = reader.size("num_mtp_layers", older, low=0, high=MAX_LAYERS)
    if newer != older and reader.config.get("num_nextn_predict_layers") is not None:
        raise reader.error("num_mtp_layers", f"contradicts num_nextn_predict_layers = {older}")
    return newer


def read_deepseek(reader: Reader) -> ModelSpec:
    layers = reader.layers()
    mixer = _sparse_attention(reader, latent_attention(reader))
    shared = reader.size("n_shared_experts", 0, low=0) * reader.size("moe_intermediate_size")
    sparse = Block(
        mixer=mixer,
        feed=routed(reader, experts_key="n_routed_experts", ffn_key="moe_intermediate_size", shared_ffn=shared),
    )
    dense = Block(mixer=mixer, feed=feed_forward(reader))
    first_sparse = reader.size("first_k_dense_replace", low=0, high=MAX_LAYERS)
    step = reader.size("moe_layer_freq", 1, high=MAX_LAYERS)
    return reader.model(
        (sparse if i >= first_sparse and i % step == 0 else dense for i in range(layers)), mtp=mtp_modules(reader)
    )


FAMILIES = (
    Family(
        model_type="deepseek_v2",
        architecture="DeepseekV2ForCausalLM",
        required=REQUIRED,
        optional=OPTIONAL,
        fixed={"mlp_bias": (False,)},
        irrelevant=IRRELEVANT,
        read=read_deepseek,
    ),
    Family(
        model_type="deepseek_v3",
        architecture="DeepseekV3ForCausalLM",
        required=REQUIRED,
        optional=OPTIONAL,
        irrelevant=IRRELEVANT,
        read=read_deepseek,
    ),
    # Kimi K2 is published with DeepSeek-V3's modelling code and other sizes; transformers has no class of its own.
    Family(
        model_type="kimi_k2",
        architecture="DeepseekV3ForCausalLM",
        required=REQUIRED,
        optional=OPTIONAL,
        irrelevant=IRRELEVANT,
        read=read_deepseek,
    ),
    Family(
        model_type="deepseek_v32",
        architecture="DeepseekV32ForCausalLM",
        required=REQUIRED | keys("index_n_heads index_head_dim index_topk"),
        optional=OPTIONAL,
        fixed={"mlp_bias": (False,)},
        irrelevant=IRRELEVANT,
        read=read_deepseek,
    ),
)
