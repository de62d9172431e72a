"""Keys that published files have and transformers' classes do not read, or leave to the class: read where they say what
the class does, refused where they say otherwise. The files are written from memory, their sizes are the publishers'."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fivefold.errors import FivefoldError
from fivefold.model import count_params, load_model, read_config
from fivefold.model.catalogue import entry

COMMAND_R7B = {
    "model_type": "cohere2", "architectures": ["Cohere2ForCausalLM"], "attention_bias": False, "head_dim": 128,
    "cache_implementation": "hybrid", "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
    "layer_norm_eps": 1e-5, "layer_switch": 4, "logit_scale": 0.25, "max_position_embeddings": 8192,
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "rope_scaling": None,
    "order_of_interleaved_layers": "local_attn_first", "position_embedding_type": "rope_gptj", "rope_theta": 50000,
    "rotary_pct": 1.0, "sliding_window": 4096, "sliding_window_pattern": 4, "use_embedding_sharing": True,
    "use_gated_activation": True, "use_parallel_block": True, "use_parallel_embedding": True, "vocab_size": 256_000,
}  # fmt: skip
FALCON_11B = {
    "model_type": "falcon", "architectures": ["FalconForCausalLM"], "activation": "gelu", "alibi": False, "bias": False,
    "apply_residual_connection_post_layernorm": False, "ff_factor": 4, "ffn_hidden_size": 16384, "hidden_size": 4096,
    "layer_norm_epsilon": 1e-5, "max_position_embeddings": 8192, "multi_query": True, "new_decoder_architecture": True,
    "num_attention_heads": 32, "num_hidden_layers": 60, "num_kv_heads": 8, "num_ln_in_parallel_attn": 1,
    "parallel_attn": True, "rope_theta": 500042.0, "tie_word_embeddings": False, "vocab_size": 65024,
}  # fmt: skip
STARCODER2_15B = {
    "model_type": "starcoder2", "architectures": ["Starcoder2ForCausalLM"], "activation_function": "gelu",
    "attention_softmax_in_fp32": True, "embedding_dropout": 0.1, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 6144,
    "intermediate_size": 24576, "layer_norm_epsilon": 1e-5, "max_position_embeddings": 16384, "mlp_type": "default",
    "norm_epsilon": 1e-5, "norm_type": "layer_norm", "num_attention_heads": 48, "num_hidden_layers": 40,
    "num_key_value_heads": 4, "residual_dropout": 0.1, "rope_theta": 100_000, "scale_attention_softmax_in_fp32": True,
    "scale_attn_weights": True, "sliding_window": 4096, "use_bias": True, "vocab_size": 49152,
}  # fmt: skip
GEMMA2_9B = {
    "model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "attention_bias": False, "head_dim": 256,
    "attn_logit_softcapping": 50.0, "cache_implementation": "hybrid", "final_logit_softcapping": 30.0,
    "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 3584,
    "intermediate_size": 14336, "max_position_embeddings": 8192, "num_attention_heads": 16, "num_hidden_layers": 42,
    "num_key_value_heads": 8, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "sliding_window": 4096, "sliding_window_size": 4096, "vocab_size": 256_000,
}  # fmt: skip
FILES = [(COMMAND_R7B, 8.03), (FALCON_11B, 11.1), (STARCODER2_15B, 15.66), (GEMMA2_9B, 9.24)]


@pytest.mark.parametrize(("config", "billions"), FILES, ids=[str(file["model_type"]) for file, _ in FILES])
def test_as_transformers_counts(
    config: dict[str, Any], billions: float, transformers_model: Callable[..., Any]
) -> None:
    total = count_params(read_config(config)).total
    assert total == sum(parameter.numel() for parameter in transformers_model(config).parameters())
    assert total / 1e9 == pytest.approx(billions, abs=0.05)


@pytest.mark.parametrize(
    ("config", "key", "value"),
    [
        (COMMAND_R7B, "layer_switch", 2),
        (COMMAND_R7B, "use_parallel_block", False),
        (COMMAND_R7B, "use_embedding_sharing", False),
        (COMMAND_R7B, "rotary_pct", 0.5),
        (COMMAND_R7B, "position_embedding_type", "alibi"),
        (FALCON_11B, "ff_factor", 2),
        (STARCODER2_15B, "scale_attn_weights", False),
        (GEMMA2_9B, "sliding_window_size", 1024),
    ],
)
def test_what_contradicts_the_class_is_refused(config: dict[str, Any], key: str, value: Any) -> None:
    with pytest.raises(FivefoldError, match=key):
        read_config(config | {key: value})


def test_layer_switch_alone_is_the_pattern() -> None:
    spec = read_config({key: value for key, value in COMMAND_R7B.items() if key != "sliding_window_pattern"})
    assert spec.runs == read_config(COMMAND_R7B).runs
    assert [run.count for run in spec.runs] == [3, 1] * 8


def test_sizes_that_gemma3s_files_leave_to_the_class(transformers_model: Callable[..., Any]) -> None:
    """The text_config of the published 4B, whole."""
    text = {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    }  # fmt: skip
    spec = read_config(
        {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    )
    assert (spec.vocab, spec.max_position, spec.kinds[0].mixer.heads) == (262_208, 131_072, 8)  # type: ignore[union-attr]
    model = transformers_model({**text, "architectures": ["Gemma3ForCausalLM"]})
    assert count_params(spec).total == sum(parameter.numel() for parameter in model.parameters())
    with pytest.raises(FivefoldError, match="vocab_size"):
        read_config({**text, "vocab_size": None})


@pytest.mark.parametrize(("given", "tuned"), [(4, True), (True, True), (0, False), (False, False)])
def test_llama4s_temperature_as_a_number_and_as_a_flag(given: int, tuned: bool) -> None:
    config = json.loads(json.dumps(entry("llama-4-maverick").config))
    inner = config.get("text_config", config)
    inner["attn_temperature_tuning"] = given
    spec = read_config(config)
    assert spec.runs == load_model("llama-4-maverick").runs
    assert any("scaled by their position" in told for told in spec.peculiar) is tuned
    for wrong in (-1, 4.0, "4"):
        inner["attn_temperature_tuning"] = wrong
        with pytest.raises(FivefoldError, match="attn_temperature_tuning"):
            read_config(config)


@pytest.mark.parametrize("where", ["top", "table"])
def test_a_key_given_twice_is_refused(tmp_path: Path, where: str) -> None:
    """Otherwise the second of two num_hidden_layers would win without a word."""
    text = json.dumps(entry("llama-2-7b").config)
    table = '"rope_scaling": {"rope_type": "linear", "factor": 2.0, "factor": 4.0}'
    added = '"num_hidden_layers": 80' if where == "top" else table
    path = tmp_path / "config.json"
    path.write_text(f"{text[:-1]}, {added}}}")
    with pytest.raises(FivefoldError, match="more than once") as caught:
        read_config(path)
    assert caught.value.code == "bad-config-file"


@pytest.mark.parametrize(
    ("base", "given", "instead"),
    [
        ("qwen2.5-7b", {"use_mrope": False}, ()),
        ("gpt-neox-20b", {"attention_probs_dropout_prob": 0, "hidden_dropout_prob": 0}, ()),
        ("jamba-v0.1", {"n_ctx": 262_144, "calc_logits_for_entire_prompt": False}, ("max_position_embeddings",)),
        ("santacoder-1.1b", {"runner_max_sequence_length": None}, ()),
        (
            "llama-2-7b",
            {"architectures": ["LLaMAForCausalLM"], "max_sequence_length": 4096},
            ("max_position_embeddings",),
        ),
        (
            "minimax-m2",
            {"attn_type_list": [1] * 62, "mtp_transformer_layers": 1, "num_mtp_modules": 3, "use_mtp": True},
            (),
        ),
    ],
)
def test_spellings_that_change_nothing(base: str, given: dict[str, Any], instead: tuple[str, ...]) -> None:
    config = {key: value for key, value in entry(base).config.items() if key not in instead} | given
    spec, known = read_config(config), load_model(base)
    assert (spec.runs, spec.max_position, spec.vocab) == (known.runs, known.max_position, known.vocab)


@pytest.mark.parametrize(
    ("base", "key", "value"),
    [
        ("qwen2.5-7b", "use_mrope", True),
        ("minimax-m2", "attn_type_list", [1] * 61 + [0]),
        ("minimax-m2", "attn_type_list", "full"),
        ("minimax-m2", "mtp_transformer_layers", 2),
        ("minimax-m2", "num_mtp_modules", -1),
        ("llama-2-7b", "max_sequence_length", 2048),
    ],
)
def test_spellings_that_would_change_the_model_are_refused(base: str, key: str, value: Any) -> None:
    with pytest.raises(FivefoldError, match=key):
        read_config({**entry(base).config, key: value})


def test_minimax_states_its_prediction_modules() -> None:
    config = {**entry("minimax-m2").config, "num_mtp_modules": 3}
    assert (read_config(config).mtp, read_config(config, mtp=True).mtp) == (0, 3)
    with pytest.raises(FivefoldError, match="multi-token"):
        read_config({**config, "use_mtp": False}, mtp=True)
