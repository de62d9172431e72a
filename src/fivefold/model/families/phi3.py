"""Phi-3 and Phi-4-mini: Llama's block with fused projections, and a window as long as its training sequences.

Defaults are those of Phi3Config in transformers 5.24.
"""

from __future__ import annotations

from fivefold.model.families.dense import SHARED_OPTIONAL, SIZES, attention, feed_forward, with_window
from fivefold.model.families.reader import MAX_POSITIONS, ROPE_KEYS, Family, Reader, keys
from fivefold.model.spec import Block, ModelSpec


def read_phi3(reader: Reader) -> ModelSpec:
    """A window that no sequence can outgrow (Phi-4-mini: 262,144 at 131,072 positions) is full attention."""
    window = reader.sliding_window(None)
    if window is not None and window >= reader.size("max_position_embeddings", high=MAX_POSITIONS):
        window = None
    block = Block(mixer=with_window(attention(reader), window), feed=feed_forward(reader))
    return reader.model([block] * reader.layers())


FAMILIES = (
    Family(
        model_type="phi3",
        architecture="Phi3ForCausalLM",
        required=SIZES,
        optional=SHARED_OPTIONAL | {"num_key_value_heads", "sliding_window"},
        fixed={"attention_bias": (False,), "mlp_bias": (False,)},
        irrelevant=ROPE_KEYS | keys("original_max_position_embeddings resid_pdrop embd_pdrop"),
        norm_eps=1e-5,
        read=read_phi3,
    ),
)
