"""Which models a framework's own model code covers: what it certainly lacks, by the names of fivefold.layout.features.

Only what is certain is here. Frameworks that train a model of the user's or of transformers (FSDP, accelerate, ZeRO)
lack nothing by themselves; Megatron-Core's layers are composed by its users and by Megatron-Bridge.
"""

from __future__ import annotations

from fivefold.layout.features import PHRASES
from fivefold.layout.rules.context import Context
from fivefold.layout.rules.rule import Rule

_RECURRENT = frozenset({"gated-delta-net", "mamba", "mamba2", "side-by-side", "one-sublayer-blocks"})
_UNUSUAL = frozenset(
    {
        "sparse-attention",
        "chunked-attention",
        "attention-sinks",
        "attention-gate",
        "post-norm",
        "sandwich-norm",
        "latent-experts",
    }
)
# By the name of a profile: what its models lack, and what is lacking in its older versions only.
LACKS: dict[str, frozenset[str]] = {
    "nanotron": _RECURRENT
    | _UNUSUAL
    | {"latent-attention", "alibi", "parallel-blocks", "learned-positions", "embedding-norm", "head-bias"},
    "deepspeed": _RECURRENT | _UNUSUAL | {"latent-attention", "head-bias"},
    "torchtitan": (_RECURRENT - {"gated-delta-net"})
    | {"alibi", "embedding-norm", "head-bias", "parallel-blocks", "post-norm", "sandwich-norm", "fixed-layernorm"}
    | {"latent-experts"},
}
_LACKED_BEFORE: dict[str, tuple[tuple[int, int], frozenset[str]]] = {
    "torchtitan": ((2026, 8), frozenset({"gated-delta-net", "attention-gate"})),
}
_SOURCES = {
    "nanotron": "nanotron 0.5 and 2411b022, src/nanotron/models: llama, qwen2, starcoder2 (from memory)",
    "deepspeed": "Megatron-DeepSpeed megatron/model/transformer.py, GPT, Llama and BLOOM (from memory)",
    "torchtitan": "torchtitan/models: llama3, llama4, qwen3, deepseek_v3, gpt_oss; Qwen3.5 in 2026 (from memory)",
}


def unsupported(x: Context) -> list[str]:
    """What the model has that the runtime's own models lack, in words."""
    name = x.profile.name
    lacking = LACKS.get(name, frozenset())
    before, older = _LACKED_BEFORE.get(name, ((0, 0), frozenset()))
    if (x.version_parts or x.profile.newest) < before:
        lacking |= older
    return [phrase for feature, phrase in PHRASES.items() if feature in lacking & x.features]


MODELS: tuple[Rule, ...] = tuple(
    Rule(
        id=f"{name}-model",
        option="MODEL",
        field=None,
        runtimes=(name,),
        values=lambda c, x: [],
        holds=lambda c, x: not unsupported(x),
        message="{model} has {unsupported}, which no model of {runtime} has. Plan it for another runtime: megatron, "
        "fsdp and deepspeed-zero take it.",
        source=_SOURCES[name],
    )
    for name in LACKS
)
