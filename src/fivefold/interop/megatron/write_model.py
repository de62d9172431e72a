"""A ModelSpec as Megatron-LM's options, or the sentence that says why its command line cannot express it.

Options and what they switch: Megatron-LM megatron/training/arguments.py, read at 000c4ac24f; llama3's stretching of
rotary frequencies: Megatron-Core 0.16.1, rotary_pos_embedding.py, whose other numbers are constants.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

from fivefold.errors import FivefoldError
from fivefold.interop.launch.job import Need, Options, Value, Variable
from fivefold.layout.features import PHRASES, features
from fivefold.model.spec import Attention, Block, Experts, FeedForward, LatentAttention, ModelSpec

# What these options say beyond Llama's blocks. Norms and biases have their own sentences below.
_EXPRESSED = frozenset(
    {
        "experts",
        "shared-experts",
        "expert-bias",
        "mixed-feed",
        "latent-attention",
        "window",
        "qk-norm",
        "learned-positions",
        "layernorm-without-bias",
        "squared-relu",
        "partial-rotary",
        "scaled-rotary",
        "mtp",
    }
)

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_positions": 8192}
# What a spec does not hold of YaRN, which it names only.
YARN = (
    Need("YARN_FACTOR", "the scaling factor of YaRN in the configuration of the model"),
    Need("YARN_MSCALE", "mscale of YaRN in the configuration of the model"),
    Need("YARN_MSCALE_ALL_DIM", "mscale_all_dim of YaRN in the configuration of the model"),
)


def model_options(model: ModelSpec, seq_len: int) -> tuple[dict[str, Value], tuple[Need, ...]]:
    """The architecture's options, and what of it the spec does not hold. Raises FivefoldError."""
    _refuse_features(model)
    first = model.kinds[0]
    mixer = _same_mixer(model)
    stretched, needs = _rotary(model, mixer)
    options: dict[str, Value | None] = {
        "--num-layers": str(model.layers),
        "--hidden-size": str(model.hidden),
        "--num-attention-heads": str(mixer.heads),
        **_attention(mixer),
        **_windows(model),
        **_feed(model),
        **_biases(model, mixer),
        **_norms(model, first),
        **_positions(model, mixer, seq_len),
        **stretched,
        "--untie-embeddings-and-output-weights": not model.tied_embeddings,
        "--vocab-size": str(model.vocab),
        "--make-vocab-size-divisible-by": "128",
        "--mtp-num-layers": str(model.mtp) if model.mtp else None,
        "--attention-dropout": "0.0",
        "--hidden-dropout": "0.0",
    }
    return {name: value for name, value in options.items() if value is not None and value is not False}, needs


def _cannot(what: str, key: str, value: Any, legal: Any) -> FivefoldError:
    return FivefoldError(
        f"This model is not written for Megatron-LM's command line: {what}. Write its specification in "
        "Python; degrees, batch and step time of the plan are of the same model.",
        code="megatron-cannot-express",
        option=key,
        value=str(value)[:100],
        legal=legal,
    )


def _refuse_features(model: ModelSpec) -> None:
    """Raises FivefoldError where the model has what no option here says."""
    missing = features(model) - _EXPRESSED
    words = [phrase for name, phrase in PHRASES.items() if name in missing and name != "peculiar"]
    found = [f"it has {', '.join(words)}"] if words else []
    if "peculiar" in missing:
        found.append(f"{'besides, ' if words else ''}{', '.join(model.peculiar)}")
    if found:
        raise _cannot("; ".join(found), "MODEL", ", ".join(sorted(missing)), sorted(_EXPRESSED))


# ---------------------------------------------------------------- attention


def _same_mixer(model: ModelSpec) -> Attention | LatentAttention:
    """The attention of every block, windows aside."""
    mixers = {_windowless(block.mixer) for block in model.kinds if isinstance(block.mixer, Attention | LatentAttention)}
    if len(mixers) > 1:
        raise _cannot("its blocks have different attentions", "attention", len(mixers), [1])
    return mixers.pop()


def _windowless(mixer: Attention | LatentAttention) -> Attention | LatentAttention:
    if isinstance(mixer, LatentAttention) or mixer.window is None:
        return mixer
    return Attention(**{name: getattr(mixer, name) for name in Attention.__struct_fields__ if name != "window"})


def _attention(mixer: Attention | LatentAttention) -> dict[str, Value | None]:
    if isinstance(mixer, LatentAttention):
        return {
            "--multi-latent-attention": True,
            "--q-lora-rank": None if mixer.q_lora_rank is None else str(mixer.q_lora_rank),
            "--kv-lora-rank": str(mixer.kv_lora_rank),
            "--qk-head-dim": str(mixer.qk_nope_head_dim),
            "--qk-pos-emb-head-dim": str(mixer.qk_rope_head_dim),
            "--v-head-dim": str(mixer.v_head_dim),
            "--kv-channels": str(mixer.v_head_dim),
            # The norms of the two compressed vectors, which latent attention always has, hang on this switch.
            "--qk-layernorm": True,
        }
    grouped = mixer.kv_heads != mixer.heads
    return {
        "--group-query-attention": grouped,
        "--num-query-groups": str(mixer.kv_heads) if grouped else None,
        "--kv-channels": str(mixer.head_dim),
        "--qk-layernorm": mixer.qk_norm,
    }


def _windows(model: ModelSpec) -> dict[str, Value | None]:
    per_block = [getattr(run.block.mixer, "window", None) for run in model.runs for _ in range(run.count)]
    sizes = {window for window in per_block if window is not None}
    if not sizes:
        return {}
    if len(sizes) > 1:
        raise _cannot("its attention has windows of several sizes", "window", sorted(sizes), ["one size"])
    pattern = [int(window is not None) for window in per_block]
    return {
        # Transformer Engine counts the tokens to the left, without the token itself.
        "--window-size": f"{sizes.pop() - 1},0",
        "--window-attn-skip-freq": None if all(pattern) else pattern_text(pattern),
    }


def pattern_text(pattern: list[int]) -> str:
    """[0, 0, 1] as ([0]*2+[1]*1), the form of --moe-layer-freq."""
    return "(" + "+".join(f"[{value}]*{len([*run])}" for value, run in groupby(pattern)) + ")"


# ---------------------------------------------------------------- feed-forward


def _feed(model: ModelSpec) -> dict[str, Value | None]:
    dense = {kind.feed for kind in model.kinds if isinstance(kind.feed, FeedForward)}
    sparse = {kind.feed for kind in model.kinds if isinstance(kind.feed, Experts)}
    for name, feeds in (("feed-forward networks", dense), ("experts", sparse)):
        if len(feeds) > 1:
            raise _cannot(f"its blocks have different {name}", name, len(feeds), [1])
    feed, experts = next(iter(dense), None), next(iter(sparse), None)
    shapes = {(each.gated, each.activation.removesuffix("_tanh")) for each in (feed, experts) if each is not None}
    if len(shapes) > 1:
        raise _cannot("its experts and its dense blocks have different activations", "activation", shapes, ["one"])
    width = feed.ffn if feed is not None else experts.ffn if experts is not None else 0
    options = {"--ffn-hidden-size": str(width), **_activation(*shapes.pop())}
    return options if experts is None else {**options, **_experts(model, experts)}


def _activation(gated: bool, activation: str) -> dict[str, Value | None]:
    if (gated, activation) == (True, "silu"):
        return {"--swiglu": True}
    if (gated, activation) == (False, "gelu"):
        return {}
    if (gated, activation) == (False, "relu2"):
        return {"--squared-relu": True}
    words = f"a {'gated ' if gated else ''}{activation} feed-forward network"
    raise _cannot(f"it has {words}", "activation", activation, ["gated silu", "gelu", "relu2"])


def _experts(model: ModelSpec, experts: Experts) -> dict[str, Value | None]:
    pattern = [int(run.block.is_moe) for run in model.runs for _ in range(run.count)]
    return {
        "--num-experts": str(experts.num_experts),
        "--moe-router-topk": str(experts.top_k),
        # A softmax over the one chosen expert would always give 1, so Megatron-Core refuses it.
        "--moe-router-pre-softmax": experts.top_k == 1,
        "--moe-ffn-hidden-size": str(experts.ffn),
        "--moe-shared-expert-intermediate-size": str(experts.shared_ffn) if experts.shared_ffn else None,
        "--moe-layer-freq": None if all(pattern) else pattern_text(pattern),
        "--moe-token-dispatcher-type": "alltoall",
    }


# ---------------------------------------------------------------- biases, norms, positions


def _biases(model: ModelSpec, mixer: Attention | LatentAttention) -> dict[str, Value | None]:
    """One switch for all linear layers, and one for queries, keys and values alone."""
    feeds = [kind.feed.bias for kind in model.kinds if isinstance(kind.feed, FeedForward)]
    experts = [kind.feed for kind in model.kinds if isinstance(kind.feed, Experts)]
    # Shared experts have no biases in Megatron-Core either, which refuses them beside others that have (from memory).
    rest = [*feeds, *(each.bias for each in experts), *([False] if any(each.shared_ffn for each in experts) else [])]
    if isinstance(mixer, LatentAttention):
        qkv = out = mixer.bias
    else:
        qkv, out = mixer.qkv_bias, mixer.out_bias
    everywhere = [out, *rest]
    if len(set(everywhere)) > 1 or (out and not qkv):
        raise _cannot("some of its linear layers have biases and others have none", "bias", everywhere, ["all", "none"])
    if out:
        return {}
    return {"--disable-bias-linear": True, "--add-qkv-bias": qkv}


def _norms(model: ModelSpec, first: Block) -> dict[str, Value | None]:
    norms = {(kind.norm, kind.norm_bias) for kind in model.kinds} | {(model.final_norm, model.final_norm_bias)}
    if norms not in ({("rmsnorm", False)}, {("layernorm", True)}):
        raise _cannot(
            "its norms differ, or are LayerNorms without a bias", "norm", sorted(norms), ["rmsnorm", "layernorm"]
        )
    return {
        "--normalization": "RMSNorm" if first.norm == "rmsnorm" else "LayerNorm",
        "--norm-epsilon": number(model.norm_eps),
    }


def _positions(model: ModelSpec, mixer: Attention | LatentAttention, seq_len: int) -> dict[str, Value | None]:
    rotary = isinstance(mixer, LatentAttention) or mixer.rope
    if rotary and model.learned_positions:
        raise _cannot("it has learned and rotary positions at once", "positions", "both", ["one"])
    kind = "rope" if rotary else "learned_absolute" if model.learned_positions else "none"
    longest = model.learned_positions or max(model.max_position, seq_len)
    return {"--position-embedding-type": kind, "--max-position-embeddings": str(longest)}


def _rotary(model: ModelSpec, mixer: Attention | LatentAttention) -> tuple[Options, tuple[Need, ...]]:
    rotary = model.rotary
    if isinstance(mixer, Attention) and not mixer.rope:
        return {}, ()
    if rotary.theta != int(rotary.theta):
        raise _cannot(
            f"its rotary base {rotary.theta} is not a whole number", "rope_theta", rotary.theta, "whole numbers"
        )
    latent = isinstance(mixer, LatentAttention)
    options: dict[str, Value] = {"--rotary-base": str(int(rotary.theta))}
    if rotary.share != 1.0:
        options["--rotary-percent"] = number(rotary.share)
    if rotary.scaling == "default":
        return ({**options, "--rope-type": "rope"} if latent else options), ()
    if rotary.scaling == "llama3" and not latent:
        held = {name: getattr(rotary, name) for name in _LLAMA3}
        if held != _LLAMA3:
            raise _cannot("its llama3 scaling has other frequency factors", "rope_scaling", held, _LLAMA3)
        return {**options, "--use-rope-scaling": True, "--rope-scaling-factor": number(rotary.factor or 8.0)}, ()
    if rotary.scaling == "yarn" and latent:
        names = ("--rotary-scaling-factor", "--mscale", "--mscale-all-dim")
        values = {name: Variable(need.name) for name, need in zip(names, YARN, strict=True)}
        return {**options, "--rope-type": "yarn", **values}, YARN
    raise _cannot(
        f"its rotary frequencies are scaled by {rotary.scaling[:40]}, of which a plan holds the name alone",
        "rope_scaling",
        rotary.scaling,
        ["default", "llama3", "yarn with latent attention"],
    )


def number(value: float) -> str:
    """A float as argparse reads it back exactly."""
    return repr(float(value))
