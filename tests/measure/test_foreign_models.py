"""Models as other people write them: names, sizes and numbers of parameters."""

from __future__ import annotations

from typing import Any

import pytest
from foreign import NO_SIZES, SIZES, block_of, read

from fivefold.measure import Unconvertible
from fivefold.measure.predict import choose, predict
from fivefold.model import count_params


@pytest.mark.parametrize(("hidden", "billions"), [(3, 7.0), (None, 1e9)])
def test_sizes_that_no_model_has_are_refused(hidden, billions):
    with pytest.raises(Unconvertible, match="would take"):
        read(**{**NO_SIZES, "hidden": hidden}, model="x", params_b=billions)


@pytest.mark.parametrize(
    ("model", "billions"),
    [
        ("meta-llama/Meta-Llama-3-70B", 70.6), ("Qwen2.5-7B-Instruct", 7.62), ("GPT-3 175B", 175),
        ("Mixtral 8x7B", 46.7), ("DeepSeek-V3", 671), ("LLaMA-65B", 65.2), ("GPT 2.7B", 2.7), ("deepseek-67b", 67),
        ("gpt-145B", 145),
    ],
)  # fmt: skip
def test_a_name_is_enough_for_a_model(model, billions):
    case = read(**NO_SIZES, model=model, arch=None)
    assert count_params(case.model).total / 1e9 == pytest.approx(billions, rel=0.04)
    assert {"architecture", "layers"} & set(case.assumed)


@pytest.mark.parametrize("billions", [0.35, 1.3, 7, 13, 20, 30, 70, 175, 1000])
@pytest.mark.parametrize("kind", ["gpt", "llama-like"])
def test_a_number_of_parameters_is_enough_for_a_model(billions, kind):
    case = read(**NO_SIZES, model=kind, params_b=billions)
    assert count_params(case.model).total / 1e9 == pytest.approx(billions, rel=0.12)
    assert {"layers", "hidden"} <= set(case.assumed)


@pytest.mark.parametrize("column", SIZES)
def test_one_size_that_is_left_out_follows_from_the_name(column):
    assert count_params(read(**{column: None}).model) == count_params(read().model)


def test_sizes_that_are_left_out_follow_from_the_number_of_parameters():
    ours = {"model": "ours", "ffn": None, "kv_heads": None, "gated_mlp": None, "vocab": 32000}
    seven = block_of(**ours, params_b=6.74)  # Llama 1's: gated, 11,008 wide, as many keys as queries
    assert (seven.feed.gated, seven.feed.ffn, seven.mixer.kv_heads) == (True, 11008, 32)
    mistral = block_of(**{**ours, "ffn": 14336}, params_b=7.24)
    assert (mistral.feed.gated, mistral.mixer.kv_heads) == (True, 8)
    gpt = block_of(**{**ours, "vocab": 50257}, params_b=6.65)
    assert (gpt.feed.gated, gpt.feed.ffn) == (False, 4 * 4096)


@pytest.mark.parametrize(
    "sizes",
    [
        {"layers": 16, "hidden": 2048, "heads": 32, "kv_heads": 32, "ffn": 8192, "vocab": 131072, "tied_embeddings": 1},
        {"layers": 30, "hidden": 3072, "heads": 24, "kv_heads": 8, "ffn": 8192, "vocab": 128256, "gated_mlp": 1},
        {"layers": 44, "hidden": 6144, "heads": 48, "kv_heads": 48, "ffn": 24576, "vocab": 50257, "gated_mlp": 0},
        {"layers": 24, "hidden": 2048, "heads": 16, "kv_heads": 4, "moe_ffn": 1024, "experts": 64, "topk": 8},
    ],
)
def test_blocks_that_are_left_out_follow_from_the_width_and_the_number_of_parameters(sizes):
    row = NO_SIZES | {"model": "ours", "head_dim": None, **sizes}
    billions = count_params(read(**row).model).total / 1e9
    for pp in (1, 2):
        case = read(**row | {"layers": None}, params_b=billions, pp=pp)
        assert case.model.layers == sizes["layers"]
        assert "layers" in case.assumed


def test_stated_sizes_win_over_the_name():
    assert block_of(ffn=8192).feed.ffn == 8192
    assert read(layers=12).model.layers == 12
    assert read(layers=None, model="llama3-8b-12L").model.layers == 12


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": "T5-3B"}, "no decoder"),
        ({"arch": "encoder-decoder"}, "architecture 'encoder-decoder'"),
        ({"model": "mt5-xl", "arch": None}, "no decoder"),
        ({**NO_SIZES, "model": "vit-large", "arch": "vit"}, "architecture 'vit'"),
        ({"model": "mamba-2.8b"}, "no decoder"),
        ({"model": "SDXL", "arch": "unet"}, "architecture 'unet'"),
        ({"model": "flux-12b", "arch": None}, "no decoder"),
        ({"model": "llama3-8b (reduced layers)", "layers": None}, "not stated: layers"),
    ],
)
def test_what_columns_cannot_say_is_refused_by_name(changes, reason):
    with pytest.raises(Unconvertible, match=reason):
        read(**changes)


def test_a_model_of_another_name_with_some_of_the_same_sizes_is_not_taken_for_it():
    """Phi-4 has OLMo 2 13B's blocks, width, heads and vocabulary, and other keys and feed-forwards."""
    phi = {"layers": 40, "hidden": 5120, "ffn": 17920, "heads": 40, "kv_heads": 10, "vocab": 100352}
    block = block_of(model="phi-4", **phi)
    assert (block.norms, block.feed.ffn, block.mixer.kv_heads, block.mixer.qk_norm) == ("pre", 17920, 10, False)
    olmo = phi | {"ffn": 13824, "kv_heads": 40}
    assert block_of(model="ours", **olmo).norms == "post"


def test_what_the_name_says_of_blocks_holds_where_sizes_agree():
    """Side-by-side sublayers, biases on scores: what no column says. A padded vocabulary is no other model."""
    falcon = {"layers": 60, "hidden": 8192, "ffn": 32768, "heads": 128, "kv_heads": 8, "head_dim": 64, "gated_mlp": 0}
    case = read(model="falcon-40b", vocab=65536, **falcon)
    assert case.model.runs[0].block.parallel
    assert (case.model.vocab, case.model.max_position, case.model.tied_embeddings) == (65536, 4096, True)
    assert not read(model="falcon-40b", vocab=65536, tied_embeddings=0, **falcon).model.tied_embeddings
    assert read(model="falcon-40b", vocab=65024, **falcon | {"layers": 6}).model.layers == 6
    assert not block_of(model="falcon-40b", vocab=65024, **falcon | {"ffn": 16384}).parallel
    assert not block_of(model="falcon-40b", vocab=65024, experts=8, topk=2, **falcon).parallel


@pytest.mark.parametrize(
    ("model", "arch", "sizes", "billions"),
    [
        ("nemotronh-56b", "hybrid", {"layers": 118, "hidden": 8192, "ffn": 32768, "heads": 64, "vocab": 131072}, 56.3),
        ("Nemotron_3_Nano", "hybrid/moe", {}, 31.6),
        ("Nemotron_3_Nano", "hybrid/moe", {"experts": 128, "topk": 6, "moe_ffn": 1856, "shared_experts": 1}, 31.6),
        ("nemotron-nano-9b-v2", "hybrid", {}, 8.9),
        ("Nemotron_3_Super", "hybrid/moe", {}, 120.7),
        ("Nemotron_3_Ultra", "hybrid/moe", {}, 549.3),
    ],
)
def test_hybrids_of_the_catalogue_are_read_whatever_their_architecture_is_called(model, arch, sizes, billions):
    case = read(**NO_SIZES | sizes, model=model, arch=arch)
    assert count_params(case.model).total / 1e9 == pytest.approx(billions, rel=0.01)
    assert predict(choose(case)).seconds.value > 0
    with pytest.raises(Unconvertible, match="cannot be built"):
        read(**NO_SIZES | {"layers": 118, "hidden": 8192}, model="ours", arch=arch)


@pytest.mark.parametrize(
    ("model", "billions"),
    [
        ("qwen3-vl-30b-a3b", 30.5), ("Qwen2.5-VL-7B-Instruct", 7.62), ("qwen25_vl_7b", 7.62), ("llama31_8b", 8.03),
        ("Qwen3-30B-A3B-Thinking-2507 (MoE)", 30.5), ("Qwen2-72B", 72.7), ("llama-13b", 13.0),
        ("Llama4 Maverick 17B-128E", 400.7), ("Llama-4-Scout-17B-16E-Instruct", 107.8),
    ],
)  # fmt: skip
def test_names_with_other_versions_and_of_models_that_read_images(model, billions):
    case = read(**NO_SIZES, model=model.replace("-2507", ""), arch=None)
    assert count_params(case.model).total / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize("model", ["ours-235b-a22b", "ours-8x13b", "ours-moe-16b"])
def test_a_mixture_that_states_no_experts_is_no_dense_model(model):
    with pytest.raises(Unconvertible, match="not stated: experts"):
        read(**NO_SIZES, model=model, arch=None)


def test_experts_in_every_other_block_follow_from_the_number_of_parameters():
    """DeepSpeed-MoE's 1.3B with 128 experts has 52e9 parameters (Rajbhandari et al. 2022, table 1)."""
    moe = {"layers": 24, "hidden": 2048, "ffn": 8192, "heads": 16, "kv_heads": 16, "head_dim": 128, "vocab": 51200}
    moe |= {"model": "gpt-1.3B-MoE-128", "arch": "moe", "gated_mlp": 0, "experts": 128, "topk": 1, "moe_ffn": 8192}
    every, other, neither = (read(**moe, ep=64, params_b=billions).model for billions in (104, 52, 20))
    assert [len(every.kinds), len(other.kinds), len(neither.kinds)] == [1, 2, 1]
    assert count_params(other).total / 1e9 == pytest.approx(52, rel=0.03)
    assert [run.block.feed.num_experts for run in other.runs[1::2]] == [128] * 12  # type: ignore[union-attr]


def test_whether_experts_are_gated_follows_from_the_number_of_parameters():
    sizes: dict[str, Any] = {
        **NO_SIZES, "model": "gpt-moe", "arch": "moe", "layers": 60, "hidden": 4096, "heads": 32, "kv_heads": 8,
        "vocab": 65536, "experts": 32, "topk": 3, "moe_ffn": 14336,
    }  # fmt: skip
    for billions, gated in ((352, True), (228, False), (None, False), (1000, False)):
        assert read(**sizes, params_b=billions).model.runs[0].block.feed.gated == gated
    assert not read(**{**sizes, "gated_mlp": 0}, params_b=352).model.runs[0].block.feed.gated


def test_a_cut_down_that_spreads_experts_has_some():
    """Three blocks of DeepSeek-V3 are dense ones, unless the run has expert parallelism."""
    deepseek = NO_SIZES | {"model": "deepseek-v3-proxy", "arch": "mla-moe", "layers": 3}
    assert not read(**deepseek).model.is_moe
    spread = read(**deepseek, ep=8)
    assert (spread.model.is_moe, spread.model.layers, spread.layout.ep) == (True, 3, 8)


def test_dense_blocks_before_those_with_experts_are_as_many_as_a_row_says():
    row = NO_SIZES | {"model": "deepseek-v3", "arch": "mla-moe", "layers": 4, "ep": 8}
    for notes, counts in ((None, [3, 1]), ("dense_layers=1", [1, 3]), ("cut down: 1 dense + 3 MoE layers", [1, 3])):
        assert [run.count for run in read(**row, notes=notes).model.runs] == counts
    moe = {
        "model": "ours",
        "arch": "moe",
        "experts": 8,
        "topk": 2,
        "moe_ffn": 2048,
        "notes": "first_k_dense_replace: 2",
    }
    first, rest = read(**moe).model.runs
    assert (first.count, first.block.feed.ffn, rest.count) == (2, 14336, 30)  # type: ignore[union-attr]
    assert len(read(notes="1 dense").model.runs) == 1
    for notes in ("9 dense PFLOPS", "2.5 dense PFLOP/s a GPU"):  # of the GPU
        assert len(read(**moe | {"notes": notes}).model.runs) == 1


def test_an_encoder_over_patches_is_priced_as_the_decoder_of_its_sizes():
    """ViT-22B has 21.7e9 parameters (Dehghani et al. 2023)."""
    sizes = {"layers": 48, "hidden": 6144, "ffn": 24576, "heads": 48, "kv_heads": 48, "gated_mlp": 0, "vocab": None}
    case = read(**sizes, model="vit-22b", arch="vit", seq=256)
    assert count_params(case.model).total / 1e9 == pytest.approx(21.7, rel=0.01)
    assert read(model="gpt5-style").model.layers == 32


def test_an_encoder_is_priced_as_the_decoder_of_its_sizes():
    bert = {
        "model": "bert-large",
        "layers": 24,
        "hidden": 1024,
        "ffn": 4096,
        "heads": 16,
        "kv_heads": 16,
        "gated_mlp": 0,
    }
    case = read(**bert, head_dim=64, vocab=30522, arch="encoder", seq=512)
    assert count_params(case.model).total / 1e6 == pytest.approx(335, rel=0.03)


def test_a_width_says_whether_a_feed_forward_is_gated():
    ours = {"model": "ours", "gated_mlp": None}
    assert block_of(**ours).feed.gated  # 3.5 times as wide
    assert not block_of(**ours, ffn=16384).feed.gated
    assert block_of(**ours, ffn=16384, arch="moe", experts=8, topk=2, moe_ffn=2048).feed.gated is False
    assert block_of(**ours, ffn=None, arch="moe", experts=8, topk=2, moe_ffn=2048).feed.gated
