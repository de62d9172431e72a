"""Falcon: one or a few key-value heads, attention and feed-forward side by side, through one norm (7B) or two (40B).

Defaults and the two decoder architectures are those of FalconConfig and modeling_falcon.py in transformers 5.24; the
keys of the files older than that class (RefinedWeb) are its aliases.
"""

from __future__ import annotations

from fivefold.model.families.eleuther import LAYERNORM, heads_of
from fivefold.model.families.reader import ROPE_KEYS, Family, Reader, keys
from fivefold.model.spec import Attention, Block, FeedForward, ModelSpec

# The class's own; sequences of 2,048 tokens (Penedo et al. 2023, arXiv 2306.01116).
POSITIONS = 2048


def read_falcon(reader: Reader) -> ModelSpec:
    heads, head_dim = heads_of(reader, "num_attention_heads", "hidden_size")
    bias = reader.flag("bias", False)
    alibi = reader.flag("alibi", False)
    parallel, norms = reader.flag("parallel_attn", True), _norms(reader)
    block = Block(
        mixer=Attention(
            heads=heads,
            kv_heads=_kv_heads(reader, heads),
            head_dim=head_dim,
            qkv_bias=bias,
            out_bias=bias,
            rope=not alibi,
            alibi=alibi,
        ),
        feed=FeedForward(
            ffn=_ffn(reader),
            gated=False,
            bias=bias,
            activation=reader.activation("activation", "gelu"),
        ),
        norm="layernorm",
        norm_bias=True,
        parallel=parallel,
        shared_norm=parallel and norms == 1,
    )
    return reader.model([block] * reader.layers(), tied=True, default_positions=POSITIONS, **LAYERNORM)


def _ffn(reader: Reader) -> int:
    """ff_factor, which Falcon-11B's file has beside the width (from memory) and the class ignores, has to agree."""
    hidden = reader.size("hidden_size")
    ffn = reader.size("ffn_hidden_size", 4 * hidden)
    factor = reader.optional_size("ff_factor")
    if factor is not None and factor * hidden != ffn:
        raise reader.error("ff_factor", f"must be ffn_hidden_size = {ffn} over hidden_size = {hidden}")
    return ffn


def _kv_heads(reader: Reader, heads: int) -> int:
    """The new architecture has num_kv_heads of them (default: all), the old one 1 or, without multi_query, all."""
    if reader.flag("new_decoder_architecture", False):
        kv_heads = reader.size("num_kv_heads", heads)
        if heads % kv_heads:
            raise reader.error("num_kv_heads", f"must divide num_attention_heads = {heads}")
        return kv_heads
    if reader.flag("multi_query", True):
        return 1
    if reader.size("num_kv_heads", heads) != heads:
        raise reader.error("num_kv_heads", f"without multi_query the old architecture has {heads}", [heads])
    return heads


def _norms(reader: Reader) -> int:
    """Norms in front of attention and feed-forward: the new architecture's default is one each."""
    new = reader.flag("new_decoder_architecture", False)
    if new and not reader.flag("parallel_attn", True):
        raise reader.error("parallel_attn", "the new decoder architecture is parallel", [True])
    norms = reader.size("num_ln_in_parallel_attn", 2 if new else 1, high=2)
    if norms == 2 and not new:
        raise reader.error("num_ln_in_parallel_attn", "the old decoder architecture has one", [1, None])
    return norms


FALCON = Family(
    model_type="falcon",
    architecture="FalconForCausalLM",
    other_architectures=("RWForCausalLM",),
    required=keys("vocab_size hidden_size num_hidden_layers num_attention_heads"),
    optional=keys(
        """
        num_kv_heads bias alibi parallel_attn multi_query new_decoder_architecture num_ln_in_parallel_attn
        ffn_hidden_size ff_factor activation tie_word_embeddings max_position_embeddings
        """
    ),
    fixed={"apply_residual_connection_post_layernorm": (False,)},
    irrelevant=ROPE_KEYS,
    aliases={
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_head_kv": "num_kv_heads",
        "n_embed": "hidden_size",
    },
    norm_eps=1e-5,
    read=read_falcon,
)
FAMILIES = (FALCON,)
