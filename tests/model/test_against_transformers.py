"""Counts, names and shapes of every family against transformers' own classes (5.24 in the development environment)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shapes import their_shapes

from fivefold.model import count_params, load_model, model_tensors, models, mtp_tensors, read_config
from fivefold.model.catalogue import entry
from fivefold.model.families import FAMILIES
from fivefold.model.families.nested import NESTED
from fivefold.model.spec import ModelSpec

PUBLISHED = Path(__file__).parent / "data" / "hf_configs"
# Two models that a spec has no room for, and a file with renamed keys: test_huggingface.py tests the refusals.
REFUSED = {"gemma4-26b-a4b", "deepseek-v4-284b", "deepseek-v3_simai"}
FILES = sorted(path.stem for path in PUBLISHED.glob("*.json") if path.stem not in REFUSED)
# Compared in test_families.py, from their class's own defaults: no file of theirs is at hand.
BY_DEFAULTS = (
    "gemma",
    "gptj",
    "olmo",
    "qwen2_moe",
    "cohere2",
    "glm",
    "granitemoe",
    "phi",
    "qwen3_5_text",
    "seed_oss",
    "smollm3",
)


def their_active(model: Any, spec: ModelSpec) -> int:
    """Active parameters counted from transformers' tensors: the routed experts' share top_k / num_experts."""
    experts = {(b.feed.top_k, b.feed.num_experts) for b in spec.kinds if b.is_moe}
    [(top_k, num_experts)] = experts or {(1, 1)}
    total = 0
    for name, parameter in model.named_parameters():
        numel = parameter.numel()
        total += numel * top_k // num_experts if ".experts." in name else numel
    return total


def assert_equal(spec: ModelSpec, model: Any) -> None:
    ours = {tensor.name: tensor.shape for tensor in model_tensors(spec)}
    assert ours == their_shapes(model, spec)
    counts = count_params(spec)
    assert counts.total == sum(parameter.numel() for parameter in model.parameters())
    assert counts.total == sum(tensor.numel for tensor in model_tensors(spec))
    assert counts.active == their_active(model, spec)


@pytest.mark.parametrize("stem", FILES)
def test_published_files(stem: str, transformers_model: Callable[..., Any]) -> None:
    config = json.loads((PUBLISHED / f"{stem}.json").read_text())
    spec = read_config(PUBLISHED / f"{stem}.json")
    assert spec.name == stem
    assert_equal(spec, transformers_model(config))


def anonymous(spec: ModelSpec) -> ModelSpec:
    return msgspec.structs.replace(spec, name="", source="")


@pytest.fixture(scope="module")
def published() -> frozenset[ModelSpec]:
    """The models that test_published_files compares."""
    return frozenset(anonymous(read_config(PUBLISHED / f"{stem}.json")) for stem in FILES)


@pytest.mark.parametrize("name", models())
def test_catalogue(name: str, published: frozenset[ModelSpec], transformers_model: Callable[..., Any]) -> None:
    spec = load_model(name)
    if anonymous(spec) not in published:
        assert_equal(spec, transformers_model(entry(name).config))


def test_every_family_is_compared() -> None:
    """With a published file or an entry of the catalogue here, else from its class's defaults in test_families.py."""
    families = {entry(name).config["model_type"] for name in models()}
    families |= {json.loads((PUBLISHED / f"{stem}.json").read_text())["model_type"] for stem in FILES}
    families = {NESTED[each].text if each in NESTED else each for each in families}
    assert families | set(BY_DEFAULTS) == {*FAMILIES} - {"RefinedWebModel"}


VARIANTS = {
    "llama-biases": ("llama-3-8b", {"attention_bias": True, "mlp_bias": True, "num_hidden_layers": 2}),
    "llama-null-kv": ("llama-2-7b", {"num_key_value_heads": None, "num_hidden_layers": 2}),
    "llama-tied": ("llama-3-8b", {"tie_word_embeddings": True, "num_hidden_layers": 2}),
    "mistral-head-dim": ("mistral-7b-v0.3", {"head_dim": 96, "num_hidden_layers": 2}),
    "qwen2-head-dim": ("qwen2.5-0.5b", {"head_dim": 48, "num_hidden_layers": 2}),
    "mixtral-head-dim": ("mixtral-8x7b", {"head_dim": 64, "num_hidden_layers": 2}),
    "qwen3-bias": ("qwen3-8b", {"attention_bias": True, "num_hidden_layers": 2}),
    "qwen3-moe-sparse-step": ("qwen3-30b-a3b", {"decoder_sparse_step": 3, "num_hidden_layers": 8}),
    "qwen3-moe-mlp-only": ("qwen3-30b-a3b", {"mlp_only_layers": [1, 4], "num_hidden_layers": 6}),
    "qwen3-moe-bias": ("qwen3-30b-a3b", {"attention_bias": True, "num_hidden_layers": 2}),
    "deepseek-v2-bias": ("deepseek-v2", {"attention_bias": True, "num_hidden_layers": 3}),
    "deepseek-v3-no-q-lora": ("deepseek-v3", {"q_lora_rank": None, "num_hidden_layers": 5}),
    "deepseek-v3-all-dense": ("deepseek-v3", {"num_hidden_layers": 2}),
    "gpt2-inner": ("gpt2", {"n_inner": 1000, "n_layer": 2}),
    "gpt2-untied": ("gpt2", {"tie_word_embeddings": False, "n_layer": 2}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants(name: str, transformers_model: Callable[..., Any]) -> None:
    base, changes = VARIANTS[name]
    config = {**entry(base).config, **changes}
    assert_equal(load_model(config), transformers_model(config))


ABSENT = {
    "llama": ("llama-2-7b", ["num_key_value_heads", "tie_word_embeddings", "hidden_act"]),
    "mistral": ("mistral-7b-v0.1", ["sliding_window", "hidden_act"]),
    "qwen3": ("qwen3-8b", ["head_dim", "tie_word_embeddings"]),
    "qwen3_moe": ("qwen3-30b-a3b", ["head_dim", "decoder_sparse_step", "mlp_only_layers", "sliding_window"]),
    "gpt2": ("gpt2", ["activation_function"]),
    "mixtral": ("mixtral-8x7b", ["sliding_window"]),
    "deepseek_v3": ("deepseek-v3", ["num_key_value_heads", "moe_layer_freq", "num_nextn_predict_layers"]),
}


@pytest.mark.parametrize("family", ABSENT)
def test_defaults_of_absent_keys(family: str, transformers_model: Callable[..., Any]) -> None:
    """Where a key is left out we take the class's own default, windows included."""
    base, keys = ABSENT[family]
    config = {key: value for key, value in entry(base).config.items() if key not in keys}
    spec, model = load_model(config), transformers_model(config)
    assert_equal(spec, model)
    window = getattr(model.config, "sliding_window", None)
    assert {getattr(block.mixer, "window", None) for block in spec.kinds} == {window}


@pytest.mark.parametrize(
    ("base", "changes"),
    [
        ("qwen2.5-0.5b", {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 3}),
        ("qwen2.5-0.5b", {"use_sliding_window": False, "sliding_window": 512, "max_window_layers": 3}),
        ("qwen3-0.6b", {"use_sliding_window": True, "sliding_window": 512}),
        ("qwen3-0.6b", {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}),
        (
            "qwen3-0.6b",
            {
                "use_sliding_window": True,
                "sliding_window": 64,
                "num_hidden_layers": 3,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
        ),
        ("qwen3-30b-a3b", {"use_sliding_window": True, "sliding_window": 256, "num_hidden_layers": 2}),
        ("mistral-7b-v0.1", {"num_hidden_layers": 2}),
        ("mixtral-8x7b", {"sliding_window": 128, "num_hidden_layers": 2}),
    ],
)
def test_windows_per_block(base: str, changes: dict[str, Any], transformers_model: Callable[..., Any]) -> None:
    config = {**entry(base).config, **changes}
    spec, model = load_model(config), transformers_model(config)
    ours = [run.block.mixer.window for run in spec.runs for _ in range(run.count)]  # type: ignore[union-attr]
    everywhere = getattr(model.config, "sliding_window", None)
    theirs = [getattr(layer.self_attn, "sliding_window", everywhere) for layer in model.model.layers]
    assert ours == theirs


def test_router_bias_of_deepseek_v3_is_a_buffer(transformers_model: Callable[..., Any]) -> None:
    model = transformers_model({**entry("deepseek-v3").config, "num_hidden_layers": 4})
    assert any("e_score_correction_bias" in name for name, _ in model.named_buffers())
    assert not any("e_score_correction_bias" in name for name, _ in model.named_parameters())


def test_mtp_module(transformers_model: Callable[..., Any]) -> None:
    """Norms and projection against transformers' MtpModel, the block against the main model's last."""
    import torch
    from transformers.modeling_layers import MtpModel

    config = {**entry("deepseek-v3").config, "num_hidden_layers": 4, "n_routed_experts": 8}
    main = transformers_model(config)
    with torch.device("meta"):
        layer = MtpModel(main, 1).layers[0]
    theirs = {name: tuple(p.shape) for name, p in layer.named_parameters() if not name.startswith("mtp_block.")}
    theirs["norm.weight"] = theirs.pop("post_norm.weight")
    spec = load_model(config, mtp=True)
    # The kind of its block follows from a block number in transformers; by DeepSeek-V3's paper it is a sparse one.
    last = "layers.3."
    theirs |= {
        "block." + name.removeprefix(last): shape
        for name, shape in their_shapes(main, spec).items()
        if name.startswith(last)
    }
    assert {tensor.name: tensor.shape for tensor in mtp_tensors(spec)} == theirs
    with_mtp, without = count_params(spec), count_params(load_model(config))
    assert with_mtp.total - without.total == with_mtp.mtp == sum(tensor.numel for tensor in mtp_tensors(spec))
    assert without.mtp == 0


llama_configs = st.builds(
    lambda groups, kv, head_dim, explicit, **rest: {
        "model_type": "llama",
        "num_attention_heads": groups * kv,
        "num_key_value_heads": kv,
        "hidden_size": groups * kv * head_dim,
        **({"head_dim": 2 * head_dim} if explicit else {}),
        **rest,
    },
    groups=st.integers(1, 4),
    kv=st.integers(1, 4),
    head_dim=st.sampled_from([2, 4, 6]),
    explicit=st.booleans(),
    vocab_size=st.integers(1, 50),
    intermediate_size=st.integers(1, 40),
    num_hidden_layers=st.integers(1, 4),
    max_position_embeddings=st.integers(1, 64),
    tie_word_embeddings=st.booleans(),
    attention_bias=st.booleans(),
    mlp_bias=st.booleans(),
)

deepseek_configs = st.builds(
    lambda heads, experts, **rest: {
        "model_type": "deepseek_v3",
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "n_routed_experts": experts,
        "num_experts_per_tok": 1 + experts // 3,
        **rest,
    },
    heads=st.integers(1, 4),
    experts=st.integers(1, 7),
    hidden_size=st.sampled_from([8, 24]),
    vocab_size=st.integers(1, 50),
    intermediate_size=st.integers(1, 40),
    moe_intermediate_size=st.integers(1, 20),
    n_shared_experts=st.integers(1, 3),
    first_k_dense_replace=st.integers(0, 5),
    num_hidden_layers=st.integers(1, 4),
    max_position_embeddings=st.integers(1, 64),
    q_lora_rank=st.one_of(st.none(), st.integers(1, 9)),
    kv_lora_rank=st.integers(1, 9),
    qk_nope_head_dim=st.integers(1, 6),
    qk_rope_head_dim=st.sampled_from([2, 4]),
    v_head_dim=st.integers(1, 6),
    tie_word_embeddings=st.booleans(),
    attention_bias=st.booleans(),
)

quick = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@quick
@given(config=llama_configs)
def test_any_llama(config: dict[str, Any], transformers_model: Callable[..., Any]) -> None:
    assert_equal(load_model(config), transformers_model(config))


@quick
@given(config=deepseek_configs)
def test_any_deepseek_v3(config: dict[str, Any], transformers_model: Callable[..., Any]) -> None:
    assert_equal(load_model(config), transformers_model(config))
