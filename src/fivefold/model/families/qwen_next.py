"""Qwen3-Next and Qwen3.5, dense and MoE: three blocks of gated delta net to one of gated attention; experts
with a gated shared one beside them, or a dense feed-forward.

Defaults are those of Qwen3NextConfig, Qwen3_5TextConfig and Qwen3_5MoeTextConfig in transformers 5.24.
"""

from __future__ import annotations

from typing import Any

import msgspec

from fivefold.model.families.deepseek import mtp_modules
from fivefold.model.families.dense import SHARED_OPTIONAL, SIZES, attention, feed_forward
from fivefold.model.families.moe import ROUTER_KEYS, shared_and_routed, sparse_layers
from fivefold.model.families.reader import MAX_LAYERS, ROPE_KEYS, Family, Reader, keys
from fivefold.model.spec import Block, Feed, GatedDeltaNet, ModelSpec

FULL, LINEAR = "full_attention", "linear_attention"
PECULIAR = ("norms multiply by 1 + weight",)
REQUIRED = (SIZES - {"intermediate_size"}) | keys(
    """
    num_key_value_heads num_experts num_experts_per_tok moe_intermediate_size shared_expert_intermediate_size
    """
)
OPTIONAL = SHARED_OPTIONAL | keys(
    """
    head_dim attention_bias layer_types full_attention_interval linear_conv_kernel_dim linear_key_head_dim
    linear_value_head_dim linear_num_key_heads linear_num_value_heads
    """
)
MTP = keys("mtp_num_hidden_layers num_nextn_predict_layers num_mtp_layers")
# Keys of Qwen3.5's published files that the class does not look at: no block is an exception, attention has a gate.
ALWAYS: dict[str, tuple[Any, ...]] = {
    "mlp_only_layers": ([], None),
    "attn_output_gate": (True,),
    "mtp_use_dedicated_embeddings": (False,),
}


def _delta_net(reader: Reader) -> GatedDeltaNet:
    net = GatedDeltaNet(
        key_heads=reader.size("linear_num_key_heads", 16),
        value_heads=reader.size("linear_num_value_heads", 32),
        key_dim=reader.size("linear_key_head_dim", 128),
        value_dim=reader.size("linear_value_head_dim", 128),
        conv=reader.size("linear_conv_kernel_dim", 4),
    )
    if net.value_heads % net.key_heads:
        raise reader.error("linear_num_value_heads", f"must be a multiple of linear_num_key_heads = {net.key_heads}")
    return net


def _read(reader: Reader, feeds: list[Feed], mtp: int = 0) -> ModelSpec:
    bias = reader.flag("attention_bias", False)
    full = attention(reader, head_dim=256, qkv_bias=bias, out_bias=bias, qk_norm=True)
    full = msgspec.structs.replace(full, gate=True)
    net = _delta_net(reader)
    step = reader.size("full_attention_interval", 4, high=MAX_LAYERS)
    kinds = reader.layer_types("layer_types", len(feeds), (FULL, LINEAR), lambda i: LINEAR if (i + 1) % step else FULL)
    blocks = (Block(mixer=full if kind == FULL else net, feed=feed) for kind, feed in zip(kinds, feeds, strict=True))
    return reader.model(blocks, mtp=mtp, peculiar=PECULIAR)


def read_qwen3_next(reader: Reader) -> ModelSpec:
    sparse = sparse_layers(reader)
    experts = shared_and_routed(reader)
    return _read(reader, [experts if each else feed_forward(reader) for each in sparse])


def read_qwen3_5(reader: Reader) -> ModelSpec:
    return _read(reader, [feed_forward(reader)] * reader.layers(), _mtp(reader))


def read_qwen3_5_moe(reader: Reader) -> ModelSpec:
    return _read(reader, [shared_and_routed(reader)] * reader.layers(), _mtp(reader))


def _mtp(reader: Reader) -> int:
    return reader.size("mtp_num_hidden_layers", 0, low=0, high=MAX_LAYERS) or mtp_modules(reader)


FAMILIES = (
    Family(
        model_type="qwen3_next",
        architecture="Qwen3NextForCausalLM",
        required=REQUIRED,
        optional=OPTIONAL | keys("decoder_sparse_step mlp_only_layers intermediate_size"),
        irrelevant=ROPE_KEYS | ROUTER_KEYS,
        rope_share=0.25,
        read=read_qwen3_next,
    ),
    Family(
        model_type="qwen3_5_moe_text",
        architecture="Qwen3_5MoeForCausalLM",
        required=REQUIRED,
        optional=OPTIONAL | MTP,
        fixed=ALWAYS,
        # The precision that the recurrent state is kept in.
        irrelevant=ROPE_KEYS | ROUTER_KEYS | {"mamba_ssm_dtype"},
        rope_share=0.25,
        read=read_qwen3_5_moe,
    ),
    Family(
        model_type="qwen3_5_text",
        architecture="Qwen3_5ForCausalLM",
        required=SIZES | {"num_key_value_heads"},
        optional=OPTIONAL | MTP,
        fixed=ALWAYS,
        irrelevant=ROPE_KEYS | {"mamba_ssm_dtype"},
        rope_share=0.25,
        read=read_qwen3_5,
    ),
)
