"""The rotary numbers and the norms' epsilon, against transformers' own configuration classes and by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conftest import as_transformers_reads
from fivefold.errors import FivefoldError
from fivefold.model import Attention, LatentAttention, ModelSpec, Rotary, load_model, read_config
from fivefold.model.catalogue import entry, models

BASE = {
    "model_type": "llama", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 128,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
WITHOUT_CLASS = ("kimi_k2",)


def read(tmp_path: Path, **changes: Any) -> ModelSpec:
    (tmp_path / "config.json").write_text(json.dumps({**BASE, **changes}))
    return read_config(tmp_path / "config.json")


EPSILONS = ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_epsilon")
# The classes have no key for it: torch's default, or fixed in the norm's own code.
EPSILON_IN_CODE = {"opt": 1e-5, "olmo": 1e-5, "dbrx": 1e-5}


def turns(model: ModelSpec) -> bool:
    """Whether any block of the model has a rotary embedding."""
    mixers = [getattr(block.mixer, "attention", block.mixer) for block in model.kinds]
    return any(isinstance(m, LatentAttention) or (isinstance(m, Attention) and m.rope) for m in mixers)


@pytest.mark.parametrize("name", models())
def test_equal_transformers(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    if load_model(name).family in WITHOUT_CLASS:
        pytest.skip("transformers has no class for it")
    config = as_transformers_reads(entry(name).config)
    kind = config.pop("model_type")
    theirs = transformers.AutoConfig.for_model(kind, **config)
    ours = load_model(name)
    epsilons = [getattr(theirs, key) for key in EPSILONS if hasattr(theirs, key)] or [EPSILON_IN_CODE[kind]]
    assert {ours.norm_eps} == {*epsilons}
    if not turns(ours):
        assert ours.rotary == Rotary()
        return
    if kind == "gptj":
        assert ours.rotary == Rotary(share=theirs.rotary_dim / (theirs.n_embd // theirs.n_head))
        return
    expected = theirs.rope_parameters
    expected = expected.get("full_attention", expected)
    # The class drops the base that dbrx's file has under attn_config.
    theta = entry(name).config["attn_config"]["rope_theta"] if kind == "dbrx" else expected["rope_theta"]
    assert (ours.rotary.theta, ours.rotary.scaling) == (theta, expected["rope_type"])
    assert ours.rotary.share == expected.get("partial_rotary_factor", 1.0)
    if ours.rotary.scaling == "llama3":
        assert ours.rotary.original_positions == expected["original_max_position_embeddings"]
        assert ours.rotary.factor == expected["factor"]


def test_both_spellings_are_one(tmp_path: Path) -> None:
    old = read(tmp_path, rope_theta=5e5, rope_scaling=LLAMA3)
    new = read(tmp_path, rope_parameters={**LLAMA3, "rope_theta": 5e5})
    assert old.rotary == new.rotary
    assert old.rotary == Rotary(
        theta=5e5, scaling="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_positions=128
    )
    assert read(tmp_path).rotary == Rotary()
    assert read(tmp_path, rope_scaling=None, rope_theta=None).rotary == Rotary()
    assert read(tmp_path, rope_scaling={"type": "linear", "factor": 2.0}).rotary.scaling == "linear"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rope_theta": -1.0}, "rope_theta"),
        ({"rope_theta": True}, "rope_theta"),
        ({"rope_theta": "1e4"}, "rope_theta"),
        ({"rope_scaling": [1]}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "a b"}}, "rope_type"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "factor"),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 0.5}}, "high_freq_factor"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
    ],
)
def test_errors_name_the_key(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(FivefoldError, match=named):
        read(tmp_path, **changes)
