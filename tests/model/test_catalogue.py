"""The catalogue's names, their published sizes, and that loading one is quick."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fivefold.errors import FivefoldError
from fivefold.model import count_params, load_model, models
from fivefold.model.catalogue import ALIASES, _plain, entry, resolve

EXPECTED = [
    "llama-2-7b",
    "llama-2-13b",
    "llama-2-70b",
    "llama-3-8b",
    "llama-3-70b",
    "llama-3.1-8b",
    "llama-3.1-70b",
    "llama-3.1-405b",
    "mistral-7b-v0.3",
    "qwen2.5-1.5b",
    "qwen2.5-7b",
    "qwen2.5-14b",
    "qwen2.5-32b",
    "qwen2.5-72b",
    "qwen3-0.6b",
    "qwen3-8b",
    "qwen3-14b",
    "qwen3-32b",
    "qwen3-30b-a3b",
    "qwen3-235b-a22b",
    "gpt2",
    "gpt2-xl",
    "gpt3-175b",
    "gpt-1t",
    "mixtral-8x7b",
    "mixtral-8x22b",
    "deepseek-v2-lite",
    "deepseek-v3",
    "kimi-k2",
]


def test_expected_names() -> None:
    assert set(EXPECTED) <= set(models())


@pytest.mark.parametrize("name", models())
def test_published_totals(name: str) -> None:
    """Publishers round (Kimi K2's 1.04T by 1.3%): 3% catches a wrong width, layer count or vocabulary."""
    found, counts = entry(name), count_params(load_model(name))
    assert found.source
    assert found.published_total is not None
    assert counts.total / 1e9 == pytest.approx(found.published_total, rel=0.03)
    if found.published_active is not None:
        # Some publishers leave the embedding table out of "active" (DeepSeek-V2-Lite's 2.4B), some keep it in.
        low, high = (counts.active - counts.embedding) / 1e9, counts.active / 1e9
        assert low * 0.97 <= found.published_active <= high * 1.03


def test_exact_totals_from_the_weights_files() -> None:
    exact = {
        "llama-3.1-8b": 8_030_261_248,
        "gpt2": 124_439_808,
        "qwen2.5-0.5b": 494_032_768,
        "qwen2.5-3b": 3_085_938_688,
    }
    assert {name: count_params(load_model(name)).total for name in exact} == exact


def test_llama_3_and_3_1_differ_in_positions_only() -> None:
    old, new = load_model("llama-3-70b"), load_model("llama-3.1-70b")
    assert (old.max_position, new.max_position) == (8192, 131072)
    assert old.runs == new.runs


@pytest.mark.parametrize("alias", ["llama3-70b", "Llama-3-70B", "llama_3_70b", "LLAMA3-70B "])
def test_spellings(alias: str) -> None:
    assert load_model(alias) == load_model("llama-3-70b")


def test_aliases_lead_to_models_and_no_two_names_collide() -> None:
    import json

    aliases = json.loads(ALIASES.read_text())
    names = [*models(), *aliases]
    assert len({_plain(name) for name in names}) == len(names)
    assert all(resolve(alias) == name and name in models() for alias, name in aliases.items())
    assert resolve("qwen2-57b") is None
    assert (resolve("gpt2-2B"), resolve("GPT_22B")) == (None, "gpt-22b")


@pytest.mark.parametrize("name", ["lama-3-70b", "gpt4", "", "../configs/gpt2", "\x00", "x" * 10_000])
def test_unknown_names(name: str) -> None:
    with pytest.raises(FivefoldError) as caught:
        load_model(name)
    assert len(caught.value.message) < 12_000
    if name == "lama-3-70b":
        assert "llama-3-70b" in caught.value.message


def test_catalogue_wins_over_a_folder_of_the_same_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gpt2").mkdir()
    monkeypatch.chdir(tmp_path)
    assert load_model("gpt2").layers == 12
    with pytest.raises(FivefoldError, match=r"config\.json: no such file"):
        load_model("./gpt2")


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("meta-llama/Llama-3.1-70B", "llama-3.1-70b"),
        ("meta-llama/Meta-Llama-3-8B", "llama-3-8b"),
        ("deepseek-ai/DeepSeek-V3", "deepseek-v3"),
        ("Qwen/Qwen3-30B-A3B", "qwen3-30b-a3b"),
    ],
)
def test_a_publishers_name_is_answered_with_the_catalogues(name: str, near: str) -> None:
    with pytest.raises(FivefoldError, match="nothing is downloaded") as caught:
        load_model(name)
    assert near in caught.value.message


@pytest.mark.parametrize("path", ["./llama-3-70b", "somewhere/config.json", "../llama-3-70b", "/gpt2", "a/b/gpt2"])
def test_a_path_that_is_not_there_is_no_publishers_name(path: str) -> None:
    with pytest.raises(FivefoldError, match="no such file"):
        load_model(path)


def test_the_room_imports_neither_torch_nor_transformers() -> None:
    code = "import sys, fivefold.model; print([m for m in ('torch', 'transformers', 'scipy') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
