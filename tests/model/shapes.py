"""transformers' parameters under this project's names, whatever the family calls them.

Fused projections are taken apart in the order in which the class splits them; where a class interleaves heads inside
a fused projection only the sizes are meant.
"""

from __future__ import annotations

import re
from typing import Any

from fivefold.model import Attention, Experts, GatedDeltaNet, ModelSpec, SideBySide

# (pattern, replacement), applied in order to every name.
OUTSIDE = (
    (r"^(transformer|model\.decoder|model|gpt_neox)\.", ""),
    (r"^(wte|word_embeddings|embed_in|embeddings)\.", "embed_tokens."),
    (r"^wpe\.", "embed_positions."),
    (r"^word_embeddings_layernorm\.", "embed_layernorm."),
    (r"^(ln_f|final_layer_norm|norm_f|final_layernorm)\.", "norm."),
    (r"^(h|blocks)\.", "layers."),
)
INSIDE = (
    (r"^(ln_1|self_attn_layer_norm|norm_1|norm_attn_norm\.norm_1|ln_attn)\.", "input_layernorm."),
    (r"^(ln_2|final_layer_norm|norm_2|norm_attn_norm\.norm_2|ln_mlp|pre_ff_layernorm)\.", "post_attention_layernorm."),
    (r"^(attn\.attention|norm_attn_norm\.attn|attn|self_attention|attention)\.", "self_attn."),
    (r"^self_attn\.(out_proj|dense|c_proj)\.", "self_attn.o_proj."),
    (r"^self_attn\.(query_key_value|c_attn|Wqkv)\.", "self_attn.qkv_proj."),
    (r"^(feed_forward|ffn|block_sparse_moe)\.", "mlp."),
    (r"^fc1\.", "mlp.up_proj."),
    (r"^fc2\.", "mlp.down_proj."),
    (r"^mlp\.(dense_h_to_4h|c_fc|fc_in|fc1)\.", "mlp.up_proj."),
    (r"^mlp\.(dense_4h_to_h|c_proj|fc_out|fc2)\.", "mlp.down_proj."),
    (r"^mlp\.shared_expert\.", "mlp.shared_experts."),
    (r"^mlp\.router\.(layer\.)?", "mlp.gate."),
)
GLM4 = {
    "post_self_attn_layernorm": "post_attention_layernorm",
    "post_attention_layernorm": "pre_feedforward_layernorm",
    "post_mlp_layernorm": "post_feedforward_layernorm",
}
# GPT-2's Conv1D and the experts of these two hold their matrices the other way round.
TRANSPOSED = {"gpt2": (".c_attn.", ".c_proj.", ".c_fc."), "gpt_oss": (".experts.",), "llama4_text": (".experts.",)}
NEMOTRON = {"M": "mamba", "*": "self_attn", "-": "mlp", "E": "mlp"}


def renamed(name: str, family: str, kinds: list[str]) -> str:
    """kinds: of each block of nemotron_h, whose mixers all have one name."""
    for pattern, new in OUTSIDE:
        name = re.sub(pattern, new, name)
    if not name.startswith("layers."):
        return name
    _, index, inner = name.split(".", 2)
    if family == "nemotron_h":
        kind = kinds[int(index)]
        norm = "post_attention_layernorm." if kind in "-E" else "input_layernorm."
        inner = re.sub(r"^mixer\.", NEMOTRON[kind] + ".", re.sub(r"^norm\.", norm, inner))
    if family == "glm4":
        first, rest = inner.split(".", 1)
        inner = f"{GLM4.get(first, first)}.{rest}"
    for pattern, new in INSIDE:
        inner = re.sub(pattern, new, inner)
    return f"layers.{index}.{inner}"


def their_shapes(model: Any, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Shapes of transformers' parameters by this project's names."""
    blocks = [run.block for run in spec.runs for _ in range(run.count)]
    kinds = ["M" if b.feed is None and not isinstance(b.mixer, Attention) else "*" if b.feed is None
             else "E" if isinstance(b.feed, Experts) else "-" for b in blocks]  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {}
    for theirs, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        if any(part in theirs for part in TRANSPOSED.get(spec.family, ())) and not theirs.endswith("bias"):
            shape = (*shape[:-2], shape[-1], shape[-2])
        name = renamed(theirs, spec.family, kinds)
        block = blocks[int(name.split(".")[1])] if name.startswith("layers.") else None
        shapes |= apart(name, shape, block)
    return shapes


def apart(name: str, shape: tuple[int, ...], block: Any) -> dict[str, tuple[int, ...]]:
    """A fused projection's parts, or the tensor as it is."""
    stacked = ".experts." in name
    if "gate_up_proj" in name:
        at = 1 if stacked else 0
        half = (*shape[:at], shape[at] // 2, *shape[at + 1 :])
        return {name.replace("gate_up_proj", part): half for part in ("gate_proj", "up_proj")}
    if ".experts.mlp." in name:  # dbrx lays all experts in one matrix
        prefix, part = name.split(".mlp.experts.mlp.")
        experts, width = block.feed.num_experts, shape[1]
        wide = (experts, shape[0] // experts, width)
        down = (experts, width, shape[0] // experts)
        ours = {"w1": ("gate_proj", wide), "v1": ("up_proj", wide), "w2": ("down_proj", down)}
        return {f"{prefix}.mlp.experts.{ours[part][0]}": ours[part][1]}
    if block is None:
        return {name: shape}
    mixer = block.mixer.attention if isinstance(block.mixer, SideBySide) else block.mixer
    if ".qkv_proj." in name:
        wide, narrow = mixer.heads * mixer.head_dim, mixer.kv_heads * mixer.head_dim
        parts = {"q_proj": wide, "k_proj": narrow, "v_proj": narrow}
        return _rows(name, "qkv_proj", shape, parts)
    if ".self_attn.q_proj." in name and isinstance(mixer, Attention) and mixer.gate:
        wide = mixer.heads * mixer.head_dim
        return _rows(name, "q_proj", shape, {"q_proj": wide, "q_gate_proj": wide})
    if isinstance(mixer, GatedDeltaNet):
        qkv = 2 * mixer.key_width + mixer.value_width
        if ".in_proj_qkvz." in name:
            return _rows(name, "in_proj_qkvz", shape, {"in_proj_qkv": qkv, "in_proj_z": mixer.value_width})
        if ".in_proj_ba." in name:
            heads = {"in_proj_b": mixer.value_heads, "in_proj_a": mixer.value_heads}
            return _rows(name, "in_proj_ba", shape, heads)
    return {name: shape}


def _rows(name: str, fused: str, shape: tuple[int, ...], parts: dict[str, int]) -> dict[str, tuple[int, ...]]:
    assert sum(parts.values()) == shape[0], (name, shape, parts)
    return {name.replace(fused, part): (rows, *shape[1:]) for part, rows in parts.items()}
