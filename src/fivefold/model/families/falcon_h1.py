"""Falcon-H1: attention and Mamba 2 side by side in every block.

Defaults are those of FalconH1Config in transformers 5.24. Where mamba_d_ssm is absent the width of the state space is
heads times their width, which the file has to state; the class's default of 1,024 contradicts most models.
"""

from __future__ import annotations

from fivefold.model.families.dense import SHARED_OPTIONAL, SIZES, attention, feed_forward
from fivefold.model.families.reader import ROPE_KEYS, Family, Reader, is_number, keys
from fivefold.model.spec import Block, Mamba2, ModelSpec, SideBySide

MULTIPLIERS = keys(
    """
    embedding_multiplier lm_head_multiplier key_multiplier attention_in_multiplier attention_out_multiplier
    ssm_in_multiplier ssm_out_multiplier mlp_multipliers ssm_multipliers
    """
)

# ssm_multipliers: of gate, x, B, C and step size.
_PARTS = 5


def read_falcon_h1(reader: Reader) -> ModelSpec:
    bias = reader.flag("attention_bias", False)
    block = Block(
        mixer=SideBySide(attention=attention(reader, qkv_bias=bias, out_bias=bias), state_space=_mamba(reader)),
        feed=feed_forward(reader, bias=reader.flag("mlp_bias", False)),
    )
    scaled = tuple(f"{key} = {value}" for key in sorted(MULTIPLIERS) if (value := _multiplier(reader, key)) is not None)
    return reader.model([block] * reader.layers(), peculiar=scaled)


def _multiplier(reader: Reader, key: str) -> object:
    """A number, or a list of one for each part of a projection; None where it changes nothing."""
    value = reader.config.get(key)
    if value is None:
        return None
    parts = value if isinstance(value, list) else [value]
    if len(parts) > _PARTS or not all(is_number(part) for part in parts):
        raise reader.error(key, f"must be a number or a list of up to {_PARTS}")
    return None if all(part == 1 for part in parts) else value


def _mamba(reader: Reader) -> Mamba2:
    heads = reader.size("mamba_n_heads")
    width = reader.optional_size("mamba_d_ssm")
    automatic = reader.config.get("mamba_d_head") in (None, "auto")
    if automatic and (width is None or width % heads):
        raise reader.error(
            "mamba_d_ssm", f"must be given and a multiple of mamba_n_heads = {heads} without mamba_d_head"
        )
    head_dim = (width or 0) // heads if automatic else reader.size("mamba_d_head")
    if width is not None and heads * head_dim != width:
        raise reader.error("mamba_d_ssm", f"must be mamba_n_heads x mamba_d_head = {heads * head_dim}")
    groups = reader.size("mamba_n_groups", 1)
    if heads % groups:
        raise reader.error("mamba_n_groups", f"must divide mamba_n_heads = {heads}")
    bias = reader.flag("mamba_proj_bias", False)
    if reader.flag("projectors_bias", False) != bias:
        raise reader.error(
            "projectors_bias", f"must be mamba_proj_bias = {bias}: one without the other is not modelled"
        )
    return Mamba2(
        heads=heads,
        head_dim=head_dim,
        groups=groups,
        state=reader.size("mamba_d_state", 256),
        conv=reader.size("mamba_d_conv", 4),
        chunk=reader.size("mamba_chunk_size", 256),
        conv_bias=reader.flag("mamba_conv_bias", True),
        proj_bias=bias,
        norm=reader.flag("mamba_rms_norm", False),
    )


FAMILIES = (
    Family(
        model_type="falcon_h1",
        architecture="FalconH1ForCausalLM",
        required=SIZES | keys("num_key_value_heads mamba_n_heads"),
        optional=SHARED_OPTIONAL
        | MULTIPLIERS
        | keys(
            """
            head_dim attention_bias mlp_bias projectors_bias mamba_d_ssm mamba_d_head mamba_n_groups mamba_d_state
            mamba_d_conv mamba_chunk_size mamba_conv_bias mamba_proj_bias mamba_rms_norm
            """
        ),
        fixed={"attn_layer_indices": (None,), "mamba_use_mlp": (True,)},
        # The class takes the width from mamba_d_ssm; the others order a norm or bound a step size.
        irrelevant=ROPE_KEYS
        | keys(
            "mamba_expand mamba_norm_before_gate time_step_limit time_step_min time_step_max time_step_floor "
            "num_logits_to_keep"
        ),
        norm_eps=1e-5,
        read=read_falcon_h1,
    ),
)
