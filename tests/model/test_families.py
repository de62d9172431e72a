"""Small random models of every family against transformers' own classes: names, shapes, totals, active parameters."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shapes import their_shapes
from small import NEW_ARCHITECTURE, SMALL

from fivefold.errors import FivefoldError
from fivefold.model import Attention, ModelSpec, count_params, load_model, model_tensors
from fivefold.model.families import FAMILIES, MODULES

# Families that other files of these tests search or compare: those that were read before, and a second name.
ELSEWHERE = {
    "llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "gpt2", "deepseek_v2", "deepseek_v3", "kimi_k2",
    "RefinedWeb", "RefinedWebModel",
}  # fmt: skip


def assert_equal(spec: ModelSpec, model: Any) -> None:
    ours = {tensor.name: tensor.shape for tensor in model_tensors(spec)}
    assert ours == their_shapes(model, spec)
    assert count_params(spec).total == sum(parameter.numel() for parameter in model.parameters())


LOCAL = ("sliding_attention", "local")


def their_reach(config: Any, layers: int) -> list[tuple[int | None, int | None]]:
    """Window and chunk of each block by the attributes of transformers' configuration."""
    window = getattr(config, "sliding_window", None) or getattr(config, "window_size", None)
    kinds = getattr(config, "layer_types", None) or getattr(config, "attention_layers", None)
    if kinds is None:
        return [(window, None)] * layers
    chunk = getattr(config, "attention_chunk_size", None)
    return [(window if kind in LOCAL else None, chunk if kind == "chunked_attention" else None) for kind in kinds]


def assert_reach(spec: ModelSpec, config: Any) -> None:
    mixers = [run.block.mixer for run in spec.runs for _ in range(run.count)]
    theirs = their_reach(config, spec.layers)
    if spec.family == "phi3":
        # A window that covers all positions is none.
        theirs = [(None if window and window >= spec.max_position else window, chunk) for window, chunk in theirs]
    for mixer, reach in zip(mixers, theirs, strict=True):
        if isinstance(mixer, Attention):
            assert (mixer.window, mixer.chunk) == reach


def assert_turning(spec: ModelSpec, model: Any) -> None:
    """Blocks without a rotary embedding, where the class decides block by block."""
    layers = getattr(getattr(model, "model", None), "layers", [])
    mixers = [run.block.mixer for run in spec.runs for _ in range(run.count)]
    for layer, mixer in zip(layers, mixers, strict=False):
        theirs = getattr(getattr(layer, "self_attn", None), "use_rope", None)
        if theirs is not None:
            assert isinstance(mixer, Attention)
            assert mixer.rope == bool(theirs)


def test_every_module_is_in_the_table() -> None:
    """A family that is written and not listed would never be read."""
    import fivefold.model.families as package

    files = {path.stem for path in Path(package.__path__[0]).glob("*.py")} - {"__init__", "reader", "rotary", "nested"}
    assert files == set(MODULES.values())
    listed = {
        (family.model_type, module)
        for module in files
        for family in import_module(f"{package.__name__}.{module}").FAMILIES
    }
    assert listed == set(MODULES.items())


def test_every_family_is_searched() -> None:
    assert set(SMALL) | ELSEWHERE == set(FAMILIES)


@pytest.mark.parametrize("family", SMALL)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_model(family: str, data: st.DataObject, transformers_model: Callable[..., Any]) -> None:
    base, choices = SMALL[family]
    # The classes' own padding tokens lie outside such a small vocabulary.
    config = {"model_type": family, "pad_token_id": 0} | base
    for key, values in choices.items():
        # The base's own value is one of the choices.
        value = data.draw(st.sampled_from((config.get(key), *values)), label=key)
        config.pop(key, None)
        if value is not None:
            config[key] = value
    if config.get("moe_layers") is not None:
        config.pop("interleave_moe_layer_step", None)
    if config.get("mlp_bias") and "E" in config.get("hybrid_override_pattern", ""):
        config.pop("mlp_bias")
    spec, model = load_model(config), transformers_model(config)
    assert_equal(spec, model)
    assert_reach(spec, model.config)
    assert_turning(spec, model)


@pytest.mark.parametrize("changes", [{}, {"num_kv_heads": 4}, {"num_ln_in_parallel_attn": 1}, {"bias": True}])
def test_falcons_new_architecture(changes: dict[str, Any], transformers_model: Callable[..., Any]) -> None:
    config = {"model_type": "falcon"} | SMALL["falcon"][0] | NEW_ARCHITECTURE | changes
    assert_equal(load_model(config), transformers_model(config))


WITHOUT_FILES = (
    "gemma", "gptj", "olmo", "qwen2_moe", "cohere2", "glm", "granitemoe", "phi", "qwen3_5_text", "seed_oss", "smollm3"
)  # fmt: skip


@pytest.mark.parametrize("family", WITHOUT_FILES)
def test_class_defaults(family: str, transformers_model: Callable[..., Any]) -> None:
    """Families without a published file here: all keys at the class's own defaults, as transformers writes them."""
    from transformers import AutoConfig

    config = AutoConfig.for_model(family).to_dict() | {"model_type": family}
    written = {key: value for key, value in config.items() if key != "sliding_window"}
    assert_equal(load_model(written), transformers_model(written))


@pytest.mark.parametrize(
    ("family", "changes", "key"),
    [
        ("gpt_neo", {"attention_types": [[["global"], 3]]}, "attention_types"),
        ("gpt_neo", {"attention_types": [[["sideways"], 4]]}, "attention_types"),
        ("gpt_neo", {"attention_types": [[["global"], 10**9]]}, "attention_types"),
        ("gptj", {"rotary_dim": 9}, "rotary_dim"),
        ("falcon", {"new_decoder_architecture": True, "parallel_attn": False}, "parallel_attn"),
        ("falcon", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn"),
        ("falcon", {"multi_query": False, "num_kv_heads": 2}, "num_kv_heads"),
        ("opt", {"word_embed_proj_dim": 12}, "word_embed_proj_dim"),
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before"),
        ("mpt", {"attn_config": {"alibi": False}}, "attn_config.alibi"),
        ("mpt", {"attn_config": {"qk_lm": False}}, "attn_config.qk_lm"),
        ("mpt", {"attn_config": 3}, "attn_config"),
        ("mpt", {"expansion_ratio": 3}, "expansion_ratio"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("olmo3", {"layer_types": ["full_attention"] * 3}, "layer_types"),
        ("qwen3_next", {"linear_num_value_heads": 3}, "linear_num_value_heads"),
        ("deepseek_v32", {"q_lora_rank": None}, "q_lora_rank"),
        ("jamba", {"attn_layer_offset": 2}, "attn_layer_offset"),
        ("nemotron_h", {"hybrid_override_pattern": "MX"}, "hybrid_override_pattern"),
        ("nemotron_h", {"num_hidden_layers": 7}, "hybrid_override_pattern"),
        ("nemotron_h", {"mlp_bias": True}, "mlp_bias"),
        ("falcon_h1", {"projectors_bias": True}, "projectors_bias"),
        ("falcon_h1", {"mamba_d_ssm": 13}, "mamba_d_ssm"),
        ("dbrx", {"tie_word_embeddings": True}, "tie_word_embeddings"),
        ("llama4_text", {"no_rope_layers": [2, 0, 1, 0]}, "no_rope_layers"),
        ("gpt_oss", {"experts_per_token": 3}, "experts_per_token"),
    ],
)
def test_refusals_name_the_key(family: str, changes: dict[str, Any], key: str) -> None:
    with pytest.raises(FivefoldError) as caught:
        load_model({"model_type": family} | SMALL[family][0] | changes)
    assert (caught.value.option or "").endswith(f": {key}")
