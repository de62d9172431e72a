"""The model families that are read exactly, one table keyed by model_type.

A family is a declaration of its config.json's keys and a function that makes a ModelSpec from them; a new one is
added by writing those two and listing it here. A family's module is imported when its model_type is asked for: a
command reads one model, and the two dozen modules take longer to import than to use.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module

from fivefold.model.families.reader import Family, Reader

MODULES: dict[str, str] = {
    "bloom": "bloom",
    "cohere": "cohere",
    "cohere2": "cohere",
    "dbrx": "dbrx",
    "deepseek_v2": "deepseek",
    "deepseek_v3": "deepseek",
    "deepseek_v32": "deepseek",
    "falcon": "falcon",
    "falcon_h1": "falcon_h1",
    "gemma": "gemma",
    "gemma2": "gemma",
    "gemma3_text": "gemma",
    "glm": "glm",
    "glm4": "glm",
    "glm4_moe": "glm",
    "gpt2": "gpt2",
    "gpt_bigcode": "gpt2",
    "gpt_neo": "eleuther",
    "gpt_neox": "eleuther",
    "gpt_oss": "gpt_oss",
    "gptj": "eleuther",
    "granite": "granite",
    "granitemoe": "granite",
    "jamba": "jamba",
    "kimi_k2": "deepseek",
    "llama": "dense",
    "llama4_text": "llama4",
    "minimax_m2": "moe",
    "mistral": "dense",
    "mixtral": "moe",
    "mpt": "mpt",
    "nemotron_h": "nemotron_h",
    "olmo": "olmo",
    "olmo2": "olmo",
    "olmo3": "olmo",
    "olmoe": "olmo",
    "opt": "opt",
    "phi": "phi",
    "phi3": "phi3",
    "qwen2": "dense",
    "qwen2_moe": "moe",
    "qwen3": "dense",
    "qwen3_5_moe_text": "qwen_next",
    "qwen3_5_text": "qwen_next",
    "qwen3_moe": "moe",
    "qwen3_next": "qwen_next",
    "seed_oss": "seed_oss",
    "smollm3": "smollm3",
    "starcoder2": "starcoder2",
}
# What Falcon-40B and 7B were called before transformers had their class.
SAME: dict[str, str] = {"RefinedWeb": "falcon", "RefinedWebModel": "falcon"}

# Known, and not read: what the model has that a ModelSpec has no room for.
NOT_READ: dict[str, str] = {
    "deepseek_v4": "its residual stream is several streams wide and mixed by hyper-connections, keys and values are "
    "compressed over 4 or 128 tokens, and the output projection is grouped and of low rank",
    "gemma4": "its blocks run a dense feed-forward and experts side by side behind norms of their own, and full "
    "attention takes its values from the keys",
}


class _Families(Mapping[str, Family]):
    """Families by model_type, each imported when it is asked for."""

    def __getitem__(self, model_type: str) -> Family:
        own = SAME.get(model_type, model_type)
        families = import_module(f"{__name__}.{MODULES[own]}").FAMILIES
        return next(family for family in families if family.model_type == own)

    def __iter__(self) -> Iterator[str]:
        return iter((*MODULES, *SAME))

    def __len__(self) -> int:
        return len(MODULES) + len(SAME)


FAMILIES = _Families()

__all__ = ["FAMILIES", "MODULES", "NOT_READ", "SAME", "Family", "Reader"]
