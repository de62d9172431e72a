"""Jamba: Mamba blocks with an attention block in every eight and experts in every second, no positions at all.

Defaults are those of JambaConfig in transformers 5.24.
"""

from __future__ import annotations

import msgspec

from fivefold.model.families.dense import SHARED_OPTIONAL, SIZES, attention, feed_forward
from fivefold.model.families.moe import ROUTER_KEYS, routed
from fivefold.model.families.reader import MAX_EXPERTS, MAX_LAYERS, Family, Reader, keys
from fivefold.model.spec import Block, Mamba, ModelSpec, Rotary


def read_jamba(reader: Reader) -> ModelSpec:
    """Blocks with one expert have a plain feed-forward, as in the class."""
    attends = _period(reader, "attn_layer_period", "attn_layer_offset", 8, 4)
    routes = _period(reader, "expert_layer_period", "expert_layer_offset", 2, 1)
    full = msgspec.structs.replace(attention(reader), rope=False)
    state_space, dense = _mamba(reader), feed_forward(reader)
    many = reader.size("num_experts", 16, high=MAX_EXPERTS) > 1
    sparse = routed(reader, experts_key="num_experts", ffn_key="intermediate_size") if many else dense
    blocks = (
        Block(
            mixer=full if i % attends[0] == attends[1] else state_space,
            feed=sparse if i % routes[0] == routes[1] else dense,
        )
        for i in range(reader.layers())
    )
    return reader.model(blocks, rotary=Rotary())


def _period(reader: Reader, period_key: str, offset_key: str, period: int, offset: int) -> tuple[int, int]:
    every = reader.size(period_key, period, high=MAX_LAYERS)
    first = reader.size(offset_key, offset, low=0, high=MAX_LAYERS)
    if first >= every:
        raise reader.error(offset_key, f"must be smaller than {period_key} = {every}", f"0..{every - 1}")
    return every, first


def _mamba(reader: Reader) -> Mamba:
    hidden = reader.size("hidden_size")
    automatic = reader.config.get("mamba_dt_rank") in (None, "auto")
    return Mamba(
        inner=reader.size("mamba_expand", 2) * hidden,
        state=reader.size("mamba_d_state", 16),
        conv=reader.size("mamba_d_conv", 4),
        dt_rank=-(-hidden // 16) if automatic else reader.size("mamba_dt_rank"),
        conv_bias=reader.flag("mamba_conv_bias", True),
        proj_bias=reader.flag("mamba_proj_bias", False),
        inner_norms=True,
    )


FAMILIES = (
    Family(
        model_type="jamba",
        architecture="JambaForCausalLM",
        required=SIZES | keys("num_key_value_heads num_experts num_experts_per_tok"),
        optional=SHARED_OPTIONAL
        | keys(
            """
            attn_layer_period attn_layer_offset expert_layer_period expert_layer_offset mamba_d_state mamba_d_conv
            mamba_expand mamba_dt_rank mamba_conv_bias mamba_proj_bias
            """
        ),
        fixed={"sliding_window": (None,), "mamba_inner_layernorms": (True,)},
        irrelevant=ROUTER_KEYS
        | keys("use_mamba_kernels use_mambapy use_associative_scan num_logits_to_keep calc_logits_for_entire_prompt"),
        # n_ctx is the first published file's word (from memory).
        aliases={"num_local_experts": "num_experts", "n_ctx": "max_position_embeddings"},
        read=read_jamba,
    ),
)
