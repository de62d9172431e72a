"""What is refused, and that the refusal names the key."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small import NEW_ARCHITECTURE, SMALL

from fivefold.errors import FivefoldError, UnknownModelTypeError
from fivefold.model import first_layers, load_model, read_config
from fivefold.model.catalogue import entry
from fivefold.model.families import FAMILIES, Reader
from fivefold.model.families.reader import ROPE_KEYS
from fivefold.model.huggingface import MAX_CONFIG_BYTES

PUBLISHED = Path(__file__).parent / "data" / "hf_configs"


def changed(base: str = "llama-3-8b", **changes: Any) -> dict[str, Any]:
    return {**entry(base).config, **changes}


def without(base: str, *keys: str) -> dict[str, Any]:
    return {key: value for key, value in entry(base).config.items() if key not in keys}


def refusal(config: Any, **options: Any) -> FivefoldError:
    with pytest.raises(FivefoldError) as caught:
        read_config(config, **options)
    return caught.value


def test_renamed_keys_of_a_published_file() -> None:
    """transformers takes this file without a word and builds another model."""
    error = refusal(PUBLISHED / "deepseek-v3_simai.json")
    assert error.code == "unknown-config-key"
    assert "num_routed_experts (did you mean n_routed_experts" in error.message
    assert "num_shared_experts" in error.message
    assert "missing: n_routed_experts, n_shared_experts" in error.message


@pytest.mark.parametrize(
    ("stem", "reason"), [("gemma4-26b-a4b", "values from the keys"), ("deepseek-v4-284b", "hyper-connections")]
)
def test_families_without_room_are_refused_with_the_reason(stem: str, reason: str) -> None:
    config = json.loads((PUBLISHED / f"{stem}.json").read_text())
    with pytest.raises(UnknownModelTypeError, match=reason) as caught:
        read_config(PUBLISHED / f"{stem}.json")
    assert config["model_type"] in caught.value.message
    assert all(family in caught.value.message for family in FAMILIES)


NESTED_FILE = PUBLISHED / "gemma3-4b.json"


def test_language_models_of_image_readers() -> None:
    config = json.loads(NESTED_FILE.read_text())
    spec = read_config(NESTED_FILE)
    assert spec.family == "gemma3_text"
    assert any("not counted" in each for each in spec.peculiar)
    inner = read_config(config["text_config"])
    assert inner.runs == spec.runs
    assert not any("not counted" in each for each in inner.peculiar)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"text_config": None}, "text_config"),
        ({"text_config": {"model_type": "llama"}}, "text_config"),
        ({"text_config": {3: "llama", "a": 1}}, "text_config"),
        ({"architectures": ["Gemma3ForCausalLM"]}, "architectures"),
        ({"hidden_size": 3}, "hidden_size"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    ],
)
def test_outer_keys_of_image_readers(changes: dict[str, Any], key: str) -> None:
    error = refusal(json.loads(NESTED_FILE.read_text()) | changes)
    assert (error.option or "").endswith(f": {key}")


def test_two_spellings_of_one_key_must_agree() -> None:
    config = json.loads((PUBLISHED / "falcon-40b.json").read_text())
    assert read_config(config).kinds[0].mixer.kv_heads == 8  # type: ignore[union-attr]
    error = refusal(config | {"n_head_kv": 16})
    assert "n_head_kv" in error.message
    assert "num_kv_heads" in error.message


@pytest.mark.parametrize("model_type", [None, 7, ["llama"], {"a": 1}, "LLAMA", ""])
def test_model_type_of_any_kind(model_type: Any) -> None:
    with pytest.raises(UnknownModelTypeError):
        read_config(changed(model_type=model_type))


@pytest.mark.parametrize(
    "base", ["llama-3-8b", "mistral-7b-v0.1", "qwen2.5-7b", "qwen3-8b", "gpt2", "mixtral-8x7b", "qwen3-30b-a3b",
             "deepseek-v2", "deepseek-v3", "kimi-k2"]
)  # fmt: skip
def test_each_required_key_is_missed_by_name(base: str) -> None:
    required = FAMILIES[entry(base).config["model_type"]].required
    for key in required:
        error = refusal(without(base, key))
        assert error.code == "missing-config-key"
        assert key in error.message


def test_unknown_key_is_named_with_near_ones() -> None:
    error = refusal(changed(num_atention_heads=3))
    assert error.option == "config: num_atention_heads"
    assert "num_attention_heads" in error.message
    assert "num_attention_heads" in (error.legal or [])


def test_many_unknown_keys_stay_short() -> None:
    error = refusal(changed(**{f"x{i}" * 50: i for i in range(1000)}))
    assert "and 995 more" in error.message
    assert len(error.message) < 2000


@pytest.mark.parametrize(
    ("base", "key", "value"),
    [
        ("llama-3-8b", "hidden_size", True),
        ("llama-3-8b", "hidden_size", 4096.0),
        ("llama-3-8b", "hidden_size", "4096"),
        ("llama-3-8b", "hidden_size", None),
        ("llama-3-8b", "hidden_size", 0),
        ("llama-3-8b", "hidden_size", -1),
        ("llama-3-8b", "hidden_size", 10**30),
        ("llama-3-8b", "num_hidden_layers", 10**9),
        ("llama-3-8b", "num_key_value_heads", 5),
        ("llama-3-8b", "hidden_act", "mish"),
        ("llama-3-8b", "hidden_act", ["silu"]),
        ("llama-3-8b", "tie_word_embeddings", "yes"),
        ("llama-3-8b", "architectures", ["LlamaForSequenceClassification"]),
        ("llama-3-8b", "is_encoder_decoder", True),
        ("mistral-7b-v0.1", "attention_bias", True),
        ("mistral-7b-v0.1", "layer_types", ["sliding_attention"] * 32),
        ("qwen2.5-7b", "attention_bias", False),
        ("qwen2.5-7b", "layer_types", ["full_attention"] * 3),
        ("qwen2.5-7b", "layer_types", ["linear_attention"] * 28),
        ("qwen3-30b-a3b", "shared_expert_intermediate_size", 512),
        ("qwen3-30b-a3b", "mlp_only_layers", [48]),
        ("qwen3-30b-a3b", "mlp_only_layers", [True]),
        ("qwen3-30b-a3b", "mlp_only_layers", [0] * 10**5),
        ("qwen3-30b-a3b", "num_experts_per_tok", 129),
        ("qwen3-30b-a3b", "decoder_sparse_step", 0),
        ("gpt2", "add_cross_attention", True),
        ("gpt2", "n_head", 7),
        ("deepseek-v3", "num_key_value_heads", 8),
        ("deepseek-v3", "qk_head_dim", 128),
        ("deepseek-v3", "num_mtp_layers", 3),
        ("deepseek-v2", "mlp_bias", True),
        ("deepseek-v2", "q_lora_rank", 0),
    ],
)
def test_bad_values_are_named(base: str, key: str, value: Any) -> None:
    error = refusal(changed(base, **{key: value}))
    assert key in error.message
    assert error.option is not None
    assert error.option.endswith(key)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": "a" * 500_000},
        {"architectures": ["a" * 500_000]},
        {"model_type": "a" * 500_000},
        {"rope_scaling": [0] * 200_000},
        {"is_encoder_decoder": "a" * 500_000},
        {"a" * 500_000: 1},
    ],
)
def test_huge_values_are_not_said_back(changes: dict[str, Any]) -> None:
    error = refusal(changed(**changes))
    assert len(json.dumps(error.to_dict())) < 4000


def test_hidden_size_that_heads_do_not_divide() -> None:
    config = {**without("llama-2-7b", "num_key_value_heads"), "num_attention_heads": 33}
    assert "hidden_size" in refusal(config).message


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"3", b"null", b"{", b"model_type: llama", b"\x80\x04K\x01.", b"\xff\xfe", b"[" * 100_000,
     b'{"a":' * 100_000, b'{"hidden_size": NaN}'],
)  # fmt: skip
def test_hostile_files(tmp_path: Path, content: bytes) -> None:
    assert refusal(write(tmp_path / "config.json", content)).code == "bad-config-file"


def test_huge_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(MAX_CONFIG_BYTES * 1000)
    assert "larger" in refusal(path).message


def test_pipe_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    assert refusal(tmp_path / "config.json").code == "no-such-file"


@pytest.mark.parametrize("config", [{1: 2, "model_type": "llama"}, {None: 1, 2: 3, "a": 4, "model_type": "gpt2"}])
def test_keys_that_json_cannot_have(config: dict[Any, Any]) -> None:
    assert refusal(config).code == "bad-config-file"


def test_missing_file(tmp_path: Path) -> None:
    assert refusal(tmp_path).code == "no-such-file"


def test_file_folder_and_dict_agree(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    path = write(folder / "config.json", json.dumps(entry("llama-3-8b").config).encode())
    by_file, by_folder, by_dict = load_model(path), load_model(str(folder)), load_model(entry("llama-3-8b").config)
    assert by_file == by_folder
    assert by_file.name == "my-model"
    assert by_file.source == str(path)
    assert by_dict.runs == by_file.runs == load_model("llama-3-8b").runs


def test_moe_layer_freq_as_in_deepseeks_own_code() -> None:
    spec = read_config(changed("deepseek-v2", num_hidden_layers=9, first_k_dense_replace=2, moe_layer_freq=3))
    sparse = [run.block.is_moe for run in spec.runs for _ in range(run.count)]
    assert sparse == [i >= 2 and i % 3 == 0 for i in range(9)]


def test_no_shared_experts() -> None:
    spec = read_config(changed("deepseek-v3", n_shared_experts=None))
    assert spec.runs[-1].block.feed.shared_ffn == 0  # type: ignore[union-attr]


def test_mtp_only_when_asked_and_stated() -> None:
    assert load_model("deepseek-v3").mtp == 0
    assert load_model("deepseek-v3", mtp=True).mtp == 1
    assert read_config({**without("deepseek-v3", "num_nextn_predict_layers"), "num_mtp_layers": 2}, mtp=True).mtp == 2
    for name in ("llama-3-8b", "kimi-k2"):
        with pytest.raises(FivefoldError, match="multi-token"):
            load_model(name, mtp=True)


def test_first_layers() -> None:
    full = load_model("deepseek-v3")
    cut = load_model("deepseek-v3", layers=5)
    assert [run.count for run in cut.runs] == [3, 2]
    assert cut.kinds == full.kinds
    assert cut.name == "deepseek-v3-5l"
    assert first_layers(full, 61) == full
    assert load_model(full, layers=2) == load_model("deepseek-v3", layers=2)
    for layers in (0, -1, 62, True, 2.0):
        with pytest.raises(FivefoldError, match="61"):
            load_model("deepseek-v3", layers=layers)  # type: ignore[arg-type]
    with pytest.raises(FivefoldError, match="multi-token"):
        load_model("deepseek-v3", mtp=True, layers=3)
    assert load_model("deepseek-v3", mtp=True, layers=4).mtp == 1


class Recording(dict[str, Any]):
    """A configuration that remembers which keys were looked at."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.seen: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.seen.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.seen.add(key)
        return super().__getitem__(key)


def variants(model_type: str) -> list[dict[str, Any]]:
    """Configurations of a family that between them have every key its reader may look at."""
    model_type = {"RefinedWeb": "falcon", "RefinedWebModel": "falcon"}.get(model_type, model_type)
    if model_type in SMALL:
        base, choices = SMALL[model_type]
        caps = {"final_logit_softcapping": 3.0, "attn_logit_softcapping": 4.0, "sliding_window": 5}
        listed = {"layers_block_type": ["mlp"], "num_hidden_layers": 1}
        ways = {
            "falcon": [NEW_ARCHITECTURE, {"multi_query": False}],
            "nemotron_h": [listed],
            "gemma": [{"hidden_activation": "gelu"}],
            "gemma2": [caps],
            "gemma3_text": [caps],
            "qwen2_moe": [{"use_sliding_window": True, "sliding_window": 5}],
        }
        changes = [{key: value} for key, values in choices.items() for value in values] + ways.get(model_type, [])
        return [flat(base | change) for change in [{}, *changes]]
    bases = {"qwen2": "qwen2.5-0.5b", "qwen3": "qwen3-0.6b", "qwen3_moe": "qwen3-30b-a3b", "mixtral": "mixtral-8x7b"}
    bases |= {"llama": "llama-2-7b", "mistral": "mistral-7b-v0.1", "gpt2": "gpt2", "kimi_k2": "kimi-k2"}
    bases |= {"deepseek_v2": "deepseek-v2", "deepseek_v3": "deepseek-v3"}
    config = dict(entry(bases[model_type]).config)
    if "use_sliding_window" in FAMILIES[model_type].optional:
        config |= {"use_sliding_window": True, "sliding_window": 128}
    return [config]


def flat(config: dict[str, Any]) -> dict[str, Any]:
    tables = {key: value for key, value in config.items() if key in ("attn_config", "ffn_config")}
    inner = {f"{key}.{name}": each for key, value in tables.items() for name, each in value.items()}
    return {key: value for key, value in config.items() if key not in tables} | inner


@pytest.mark.parametrize("model_type", FAMILIES)
def test_declared_keys_are_used_and_used_keys_declared(model_type: str) -> None:
    """A key that is declared as used but never read would be accepted and ignored."""
    family = FAMILIES[model_type]
    seen: set[str] = set()
    for variant in variants(model_type):
        config = Recording(variant)
        family.read(Reader(config, family, "name", "where"))
        seen |= config.seen
    assert seen <= family.required | family.optional | ROPE_KEYS | family.norm_eps_keys
    assert seen >= (family.required | family.optional) - {"model_type"}


def test_key_lists_do_not_overlap() -> None:
    for family in FAMILIES.values():
        used = family.required | family.optional
        assert not used & family.irrelevant
        assert not used & set(family.all_fixed)
        assert not family.irrelevant & set(family.all_fixed)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


BASES = ("llama-3-8b", "qwen3-8b", "gpt2", "qwen3-30b-a3b", "deepseek-v3", *SMALL)


@settings(max_examples=600, deadline=None)
@given(data=st.data(), base=st.sampled_from(BASES))
def test_any_value_of_any_key_reads_or_refuses(data: st.DataObject, base: str) -> None:
    """Never another exception, and never a model with a size that is not in the file's range."""
    config = {"model_type": base} | SMALL[base][0] if base in SMALL else dict(entry(base).config)
    key = data.draw(st.sampled_from(sorted(FAMILIES[config["model_type"]].known)))
    config[key] = data.draw(json_values)
    try:
        spec = read_config(config)
    except FivefoldError:
        return
    assert 1 <= spec.layers <= 4096
    assert spec.hidden >= 1
