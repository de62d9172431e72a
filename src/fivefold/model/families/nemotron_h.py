"""Nemotron-H: blocks of one sublayer each, by a pattern of M (Mamba 2), * (attention), - (feed-forward), E (experts).

Defaults are those of NemotronHConfig in transformers 5.24, and so is what the class does not look at.
"""

from __future__ import annotations

import msgspec

from fivefold.model.families.deepseek import mtp_modules
from fivefold.model.families.dense import attention
from fivefold.model.families.reader import MAX_EXPERTS, MAX_LAYERS, Family, Reader, keys
from fivefold.model.spec import Attention, Block, Experts, FeedForward, Mamba2, ModelSpec, Rotary

_MTP = "*E"
LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}


def read_nemotron_h(reader: Reader) -> ModelSpec:
    makers = {"linear_attention": _mamba, "full_attention": _attention, "mlp": _feed_forward, "moe": _experts}
    kinds = _kinds(reader)
    blocks = {kind: makers[kind](reader) for kind in dict.fromkeys(kinds)}
    return reader.model((blocks[kind] for kind in kinds), rotary=Rotary(), mtp=_mtp(reader, kinds))


def _mtp(reader: Reader, kinds: list[str]) -> int:
    """Modules of attention and experts, as the last sublayers of the model are."""
    modules, pattern = mtp_modules(reader), reader.config.get("mtp_hybrid_override_pattern")
    if modules and (pattern != _MTP or kinds[-1] != LETTERS[_MTP[1]] or LETTERS[_MTP[0]] not in kinds):
        raise reader.error("mtp_hybrid_override_pattern", f"must be {_MTP} of a model with such blocks", [_MTP])
    return modules


def _kinds(reader: Reader) -> list[str]:
    """By layers_block_type or else by the pattern, which must agree with num_hidden_layers where that is given."""
    listed, pattern = reader.config.get("layers_block_type"), reader.config.get("hybrid_override_pattern")
    if listed is not None:
        key, kinds = "layers_block_type", listed
        if not isinstance(kinds, list) or not all(kind in LETTERS.values() for kind in kinds):
            raise reader.error(key, f"must list {', '.join(LETTERS.values())}", list(LETTERS.values()))
    else:
        key = "hybrid_override_pattern"
        if not isinstance(pattern, str) or not set(pattern) <= set(LETTERS):
            raise reader.error(key, f"must be a text of {' '.join(LETTERS)}, one letter a block", list(LETTERS))
        kinds = [LETTERS[letter] for letter in pattern]
    if not 1 <= len(kinds) <= MAX_LAYERS:
        raise reader.error(key, f"must have 1 to {MAX_LAYERS} blocks")
    if reader.size("num_hidden_layers", len(kinds), high=MAX_LAYERS) != len(kinds):
        raise reader.error(key, f"has {len(kinds)} blocks, num_hidden_layers another number")
    return kinds


def _mamba(reader: Reader) -> Block:
    mixer = Mamba2(
        heads=reader.size("mamba_num_heads", 128),
        head_dim=reader.size("mamba_head_dim", 64),
        groups=reader.size("n_groups", 8),
        state=reader.size("ssm_state_size", 128),
        conv=reader.size("conv_kernel", 4),
        chunk=reader.size("chunk_size", 128),
        conv_bias=reader.flag("use_conv_bias", True),
        proj_bias=reader.flag("use_bias", False),
    )
    if mixer.heads % mixer.groups:
        raise reader.error("n_groups", f"must divide mamba_num_heads = {mixer.heads}")
    return Block(mixer=mixer, feed=None)


def _attention(reader: Reader) -> Block:
    mixer: Attention = attention(reader, head_dim=128)
    return Block(mixer=msgspec.structs.replace(mixer, rope=False), feed=None)


def _feed_forward(reader: Reader) -> Block:
    feed = FeedForward(
        ffn=reader.size("intermediate_size"),
        gated=False,
        bias=reader.flag("mlp_bias", False),
        activation=reader.activation("mlp_hidden_act", "relu2"),
    )
    return Block(mixer=None, feed=feed)


def _experts(reader: Reader) -> Block:
    if reader.flag("mlp_bias", False):
        raise reader.error("mlp_bias", "biases of shared experts are not modelled", [False])
    num_experts = reader.size("n_routed_experts", 8, high=MAX_EXPERTS)
    top_k = reader.size("num_experts_per_tok", 2, high=MAX_EXPERTS)
    if top_k > num_experts:
        raise reader.error("num_experts_per_tok", f"cannot be more than n_routed_experts = {num_experts}")
    feed = Experts(
        num_experts=num_experts,
        top_k=top_k,
        ffn=reader.size("moe_intermediate_size", 7688),
        shared_ffn=reader.size("moe_shared_expert_intermediate_size", 7688),
        gated=False,
        activation=reader.activation("mlp_hidden_act", "relu2"),
        latent=reader.size("moe_latent_size", 0, low=0),
    )
    return Block(mixer=None, feed=feed)


FAMILIES = (
    Family(
        model_type="nemotron_h",
        architecture="NemotronHForCausalLM",
        required=keys(
            """
            vocab_size hidden_size intermediate_size num_attention_heads num_key_value_heads max_position_embeddings
            """
        ),
        optional=keys(
            """
            num_hidden_layers hybrid_override_pattern layers_block_type head_dim tie_word_embeddings mlp_bias
            mlp_hidden_act mamba_num_heads mamba_head_dim n_groups ssm_state_size conv_kernel chunk_size use_conv_bias
            use_bias n_routed_experts num_experts_per_tok moe_intermediate_size moe_shared_expert_intermediate_size
            moe_latent_size num_nextn_predict_layers num_mtp_layers mtp_hybrid_override_pattern
            """
        ),
        fixed={
            "attention_bias": (False,),
            "mamba_proj_bias": (False,),
            "sliding_window": (None,),
            "mamba_hidden_act": ("silu",),
        },
        irrelevant=keys(
            """
            expand use_mamba_kernels time_step_min time_step_max time_step_limit time_step_floor time_step_rank
            mamba_ssm_cache_dtype output_router_logits n_shared_experts moe_shared_expert_overlap routed_scaling_factor
            n_group topk_group norm_topk_prob residual_in_fp32 rescale_prenorm_residual num_logits_to_keep
            """
        ),
        aliases={
            "layer_types": "layers_block_type",
            "attention_head_dim": "head_dim",
            "num_local_experts": "n_routed_experts",
            "mamba_n_groups": "n_groups",
            "mamba_d_conv": "conv_kernel",
            "mamba_conv_bias": "use_conv_bias",
            "mamba_chunk_size": "chunk_size",
        },
        norm_eps=1e-5,
        read=read_nemotron_h,
    ),
)
