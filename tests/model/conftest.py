"""transformers as the independent reader: the same configuration built by its own classes on the meta device."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("HF_HUB_OFFLINE", "1")


# transformers has no class for kimi_k2 (Kimi K2 is published with DeepSeek-V3's code) and knows Falcon-40B by its name.
SAME_CLASS = {"kimi_k2": "deepseek_v3", "RefinedWeb": "falcon", "RefinedWebModel": "falcon"}
LEGACY_FALCON = {
    "n_layer": "num_hidden_layers", "n_head": "num_attention_heads", "n_head_kv": "num_kv_heads"
}  # fmt: skip


def as_transformers_reads(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part, with what its class in transformers 5.24 cannot take as published set right."""
    raw = dict(config)
    if "text_config" in raw:
        outer = {key: value for key, value in raw.items() if key.startswith("tie_word")}
        raw = outer | raw["text_config"]
    model_type = raw["model_type"] = SAME_CLASS.get(raw["model_type"], raw["model_type"])
    if model_type == "falcon":
        raw = {LEGACY_FALCON.get(key, key): value for key, value in raw.items()}
    if model_type == "dbrx" and "ffn_config" in raw:
        # The class wants a float; the published file has 1.
        norm = raw["ffn_config"].get("moe_normalize_expert_weights", 1)
        raw["ffn_config"] = raw["ffn_config"] | {"moe_normalize_expert_weights": float(norm)}
    if model_type == "falcon_h1" and "mamba_d_ssm" not in raw:
        # The class's default of 1,024 contradicts the file's heads and their width.
        raw["mamba_d_ssm"] = raw["mamba_n_heads"] * raw["mamba_d_head"]
    return raw


def build(config: dict[str, Any], device: str = "meta", **options: Any) -> Any:
    """transformers' causal language model of a config.json's content."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    raw = as_transformers_reads(config)
    model_type = raw.pop("model_type")
    hf_config = AutoConfig.for_model(model_type, **raw)
    if device == "meta":
        with torch.device("meta"), no_init_weights():
            model = AutoModelForCausalLM.from_config(hf_config, **options)
        model.tie_weights()  # skipped together with the initialisation
        return model
    return AutoModelForCausalLM.from_config(hf_config, **options)


@pytest.fixture(scope="session")
def transformers_model() -> Callable[..., Any]:
    return build
