"""GPT-Neo, GPT-J and GPT-NeoX: LayerNorm and plain feed-forwards; the last two add attention and feed-forward to the
residual side by side.

Defaults are those of the classes in transformers 5.24; what is peculiar is read from their modelling code.
"""

from __future__ import annotations

from fivefold.model.families.gpt2 import DROPOUTS, SPELLINGS, SUMMARY
from fivefold.model.families.reader import MAX_LAYERS, MAX_POSITIONS, ROPE_KEYS, Family, Reader, keys
from fivefold.model.spec import Attention, Block, FeedForward, ModelSpec, Rotary

LAYERNORM = {"final_norm": "layernorm", "final_norm_bias": True}
NEIGHBOURS = "rotary embedding turns neighbouring dimensions"
_ATTENTION_KINDS = ("global", "local")


def heads_of(reader: Reader, heads_key: str, hidden_key: str) -> tuple[int, int]:
    """Heads and their width where it is hidden / heads."""
    heads, hidden = reader.size(heads_key), reader.size(hidden_key)
    if hidden % heads:
        raise reader.error(heads_key, f"must divide {hidden_key} = {hidden}")
    return heads, hidden // heads


def read_gpt_neo(reader: Reader) -> ModelSpec:
    """attention_types is a list of [kinds, times]: [[["global", "local"], 12]] for 24 blocks that alternate."""
    heads, head_dim = heads_of(reader, "num_heads", "hidden_size")
    hidden, window = reader.size("hidden_size"), reader.size("window_size", 256)
    positions = reader.size("max_position_embeddings", high=MAX_POSITIONS)
    feed = FeedForward(
        ffn=reader.size("intermediate_size", 4 * hidden),
        gated=False,
        bias=True,
        activation=reader.activation("activation_function", "gelu_new"),
    )
    blocks = (
        Block(
            mixer=Attention(
                heads=heads,
                kv_heads=heads,
                head_dim=head_dim,
                out_bias=True,
                rope=False,
                window=window if kind == "local" else None,
            ),
            feed=feed,
            norm="layernorm",
            norm_bias=True,
        )
        for kind in _attention_types(reader, reader.layers("num_layers"))
    )
    return reader.model(
        blocks,
        tied=True,
        learned_positions=positions,
        rotary=Rotary(),
        peculiar=("scores are not scaled by 1 / sqrt(head_dim)",),
        **LAYERNORM,
    )


def _attention_types(reader: Reader, layers: int) -> list[str]:
    given = reader.config.get("attention_types")
    if given is None:
        given = [[list(_ATTENTION_KINDS), 12]]
    kinds: list[str] = []
    for item in given if isinstance(given, list) else [None]:
        if not isinstance(item, list) or len(item) != 2 or not isinstance(item[0], list) or not item[0]:
            raise reader.error("attention_types", "must be a list of [[kinds], times]")
        names, times = item
        if not isinstance(times, int) or isinstance(times, bool) or not 1 <= times <= MAX_LAYERS:
            raise reader.error("attention_types", f"its times must be whole numbers from 1 to {MAX_LAYERS}")
        if len(names) * times > layers or not all(name in _ATTENTION_KINDS for name in names):
            raise reader.error("attention_types", f"must name global or local for each of {layers} blocks")
        kinds += names * times
    if len(kinds) != layers:
        raise reader.error("attention_types", f"must name global or local for each of {layers} blocks")
    return kinds


def read_gptj(reader: Reader) -> ModelSpec:
    heads, head_dim = heads_of(reader, "n_head", "n_embd")
    turned = reader.size("rotary_dim", 64, high=head_dim)
    block = Block(
        mixer=Attention(heads=heads, kv_heads=heads, head_dim=head_dim),
        feed=FeedForward(
            ffn=reader.size("n_inner", 4 * reader.size("n_embd")),
            gated=False,
            bias=True,
            activation=reader.activation("activation_function", "gelu_new"),
        ),
        norm="layernorm",
        norm_bias=True,
        parallel=True,
        shared_norm=True,
    )
    return reader.model(
        [block] * reader.layers("n_layer"),
        hidden="n_embd",
        positions="n_positions",
        head_bias=True,
        rotary=Rotary(share=turned / head_dim),
        peculiar=(NEIGHBOURS,),
        **LAYERNORM,
    )


def read_gpt_neox(reader: Reader) -> ModelSpec:
    """The feed-forward always has biases; attention's follow attention_bias."""
    heads, head_dim = heads_of(reader, "num_attention_heads", "hidden_size")
    bias = reader.flag("attention_bias", True)
    block = Block(
        mixer=Attention(heads=heads, kv_heads=heads, head_dim=head_dim, qkv_bias=bias, out_bias=bias),
        feed=FeedForward(
            ffn=reader.size("intermediate_size"),
            gated=False,
            bias=True,
            activation=reader.activation("hidden_act", "gelu"),
        ),
        norm="layernorm",
        norm_bias=True,
        parallel=reader.flag("use_parallel_residual", True),
    )
    return reader.model([block] * reader.layers(), **LAYERNORM)


# The classes differ in their spelling, and files carry each other's.
_DROPOUTS = DROPOUTS | keys("resid_dropout embed_dropout classifier_dropout")
_OF_GPT2 = _DROPOUTS | SUMMARY | {"gradient_checkpointing"}

FAMILIES = (
    Family(
        model_type="gpt_neo",
        architecture="GPTNeoForCausalLM",
        required=keys("vocab_size hidden_size num_layers num_heads max_position_embeddings attention_types"),
        optional=keys("intermediate_size window_size activation_function tie_word_embeddings"),
        # attention_layers is attention_types written out, by transformers.
        irrelevant=_OF_GPT2 | {"attention_layers"},
        aliases={"num_attention_heads": "num_heads", "num_hidden_layers": "num_layers"},
        norm_eps=1e-5,
        read=read_gpt_neo,
    ),
    Family(
        model_type="gptj",
        architecture="GPTJForCausalLM",
        required=keys("vocab_size n_embd n_head n_layer n_positions"),
        optional=keys("n_inner activation_function tie_word_embeddings rotary_dim"),
        # n_ctx repeats n_positions in old files; rotary and scale_attn_weights say what the class always does.
        fixed={"rotary": (True,), "scale_attn_weights": (True,)},
        irrelevant=_OF_GPT2 | {"n_ctx"},
        aliases=SPELLINGS,
        norm_eps=1e-5,
        read=read_gptj,
    ),
    Family(
        model_type="gpt_neox",
        architecture="GPTNeoXForCausalLM",
        required=keys(
            """
            vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads max_position_embeddings
            """
        ),
        optional=keys("hidden_act tie_word_embeddings use_parallel_residual attention_bias"),
        # The last two are in the 20B's file (from memory).
        irrelevant=ROPE_KEYS | _DROPOUTS | keys("attention_probs_dropout_prob hidden_dropout_prob"),
        aliases={"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"},
        rope_share=0.25,
        norm_eps=1e-5,
        norm_eps_keys=keys("layer_norm_eps"),
        read=read_gpt_neox,
    ),
)
