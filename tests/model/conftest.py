"""transformers as the independent reader: the same configuration built by its own classes on the meta device."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def build(config: dict[str, Any], device: str = "meta", **options: Any) -> Any:
    """transformers' causal language model of a config.json's content."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    raw = dict(config)
    model_type = raw.pop("model_type")
    # transformers has no class for kimi_k2; Kimi K2 is published with DeepSeek-V3's code.
    model_type = {"kimi_k2": "deepseek_v3"}.get(model_type, model_type)
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
