"""What a checkpointed block of a program compiled by XLA keeps, by a row's own words or its framework's recipes; and
what else its framework's line says."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
from foreign import read

from fivefold.layout import Recompute
from fivefold.layout.layout import Overlap
from fivefold.measure import Run, convert
from fivefold.measure.frameworks import FRAMEWORKS
from fivefold.measure.policies import KEPT, stated_policy
from fivefold.measure.predict import choose, kernel_of, predict

FULL = Recompute(kind="full")
PRODUCTS = {"qkv_proj", "out_proj", "mlp.fc1", "mlp.fc2"}
# GPT-3 as PaxML's recipes train it, and Llama 3 70B.
SMALL: dict[str, Any] = {"model": "gpt3-5b", "layers": 24, "hidden": 4096, "ffn": 16384, "heads": 32, "kv_heads": 32,
                         "head_dim": 128, "vocab": 50304, "gated_mlp": 0}  # fmt: skip
LARGE: dict[str, Any] = {**SMALL, "model": "gpt3-175b", "layers": 96, "hidden": 12288, "ffn": 49152, "heads": 96,
                         "kv_heads": 96}  # fmt: skip
LLAMA: dict[str, Any] = {"model": "llama3-70b", "layers": 80, "hidden": 8192, "ffn": 28672, "heads": 64, "kv_heads": 8,
                         "head_dim": 128, "vocab": 128256, "gated_mlp": 1}  # fmt: skip


def _run(framework: str, model: dict[str, Any], **changes: Any) -> Run:
    fields: dict[str, Any] = {
        "id": "other-1", "framework": framework, "source_date": "2025-06", "arch": "dense", "seq": 2048, "mbs": 2,
        "gpu": "H100-80GB-SXM", "gpus": 128, "gpus_per_node": 8, "interconnect": "NVLink + IB", "tp": 1, "cp": 1,
        "pp": 1, "dp": 128, "gbs": 256, "zero": 3, "precision_kind": "bf16", "recompute_kind": "unknown", **model,
    }  # fmt: skip
    return Run(**{**fields, **changes})


def _kept(framework: str, model: dict[str, Any] = SMALL, **changes: Any) -> set[str]:
    case = choose(convert(_run(framework, model, **changes)))
    assert case.layout.recompute == FULL
    return set(case.changes["checkpoint_keeps"])


def test_a_row_without_recomputation_has_the_policy_of_its_frameworks_recipes():
    """dgxc-benchmarking's: PaxML's for 5B and for 175B, MaxText's for 70B; a smaller model keeps all products."""
    assert _kept("PaxML", precision_kind="fp8", mbs=4, gbs=512) == PRODUCTS
    assert _kept("PaxML", LARGE, precision_kind="fp8") == {"qkv_proj", "out_proj"}
    assert _kept("MaxText", LLAMA, seq=8192) == {"qkv_proj"}
    assert _kept("MaxText") == {*PRODUCTS, "core_attention"}


def test_a_framework_that_always_recomputes_does_so_however_much_memory_there_is():
    assert _kept("Levanter") == set()
    assert _kept("EasyLM") == set()


def test_one_that_keeps_attention_does_so_however_little_memory_there_is():
    assert _kept("AXLearn", {**LARGE, "layers": 400}) == {"qkv_proj", "core_attention", "out_proj"}


def test_nothing_is_chosen_by_what_was_measured():
    run = _run("PaxML", LARGE, notes="FSDP+DP", mbs=None)
    measured = msgspec.structs.replace(run, step_time_s=1.0, peak_mem_gb=1.0, tflops_per_gpu=1.0)
    assert choose(convert(run)).layout == choose(convert(measured)).layout
    assert choose(convert(run)).changes == choose(convert(measured)).changes


def test_a_policy_that_is_stated_is_the_rows_own():
    for words in (
        {"recompute": "save_qkv_proj"},
        {"notes": "remat_policy=save_qkv_proj"},
        {"recompute": "SAVE_QKV_PROJ"},
    ):
        case = choose(convert(_run("MaxText", SMALL, **words)))
        assert (case.layout.recompute, case.changes["checkpoint_keeps"]) == (FULL, ("qkv_proj",))
        assert "recompute" not in case.assumed
    minimal = convert(_run("MaxText", SMALL, recompute="minimal_flash", recompute_kind="selective"))
    assert set(minimal.changes["checkpoint_keeps"]) == {*PRODUCTS, "core_attention"}


def test_a_kind_that_is_stated_stays():
    full = choose(convert(_run("MaxText", SMALL, recompute_kind="full", recompute="full")))
    assert (full.layout.recompute, full.changes.get("checkpoint_keeps", ())) == (FULL, ())
    none = choose(convert(_run("MaxText", SMALL, recompute_kind="none", recompute="save_nothing")))
    assert none.layout.recompute == Recompute()
    assert "recompute" not in full.assumed


def test_other_frameworks_have_no_policies():
    case = convert(_run("NeMo", SMALL, zero=1, recompute="minimal", recompute_kind="selective"))
    assert case.layout.recompute.kind == "selective"
    assert "checkpoint_keeps" not in case.changes


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        ("save_dot_except_mlpwi", ("qkv_proj", "out_proj", "mlp.fc2")),
        ("remat_policy: save_dot_with_no_batch_dims", tuple(KEPT["minimal"])),
        ("minimal_flash", KEPT["minimal_flash"]),
        ("full", None),
        ("minimally", None),
        ("", None),
    ],
)
def test_names_of_policies_are_read_whole(words, kept):
    assert stated_policy(_run("MaxText", SMALL, recompute=words)) == kept


def test_policies_of_a_line_are_known_and_keep_less_and_less():
    for line in FRAMEWORKS:
        kept = [set(KEPT[name]) for name in line.policies]
        assert all(more > less for more, less in itertools.pairwise(kept)), line.starts


def test_what_is_kept_is_not_computed_again_and_takes_its_bytes():
    def priced(policy: str):
        case = convert(_run("MaxText", SMALL, recompute=policy))
        k = kernel_of(case)
        return predict(case), k.costs[0]

    (nothing, without), (kept, cost) = priced("save_nothing"), priced("save_qkv_proj")
    assert kept.seconds.value < nothing.seconds.value
    outputs = 24 * 2 * 2048 * 2 * 3 * 4096  # blocks, sequences of tokens, 16-bit queries, keys and values
    assert kept.peak_bytes - nothing.peak_bytes == pytest.approx(outputs, rel=0.01)
    assert (without.full_flops - cost.full_flops)[0] == 2 * 2 * 2048 * 4096 * 3 * 4096


# ---------------------------------------------------------------- where shards lie, what is reduced, what is hidden


def test_fsdp_beside_replicas_spans_the_fewest_of_its_recipes_nodes_that_hold_the_model():
    notes = "table title 'GPT (FSDP+DP, MBS=2)'"
    groups = {
        size["model"]: choose(convert(_run("PaxML", size, notes=notes, gpus=256, dp=256, gbs=512))).layout.dp_replicate
        for size in (SMALL, LARGE)
    }
    assert groups == {"gpt3-5b": 32, "gpt3-175b": 2}
    stated = convert(_run("PaxML", SMALL, notes=f"{notes} (FSDP=64 GBS=512)", gpus=256, dp=256, gbs=512))
    assert (stated.layout.dp_replicate, "shard_groups" in stated.assumed) == (4, False)
    assert choose(convert(_run("PaxML", SMALL, notes="FSDP"))).layout.dp_replicate == 1
    assert "shard_groups" in convert(_run("PaxML", SMALL, notes=notes)).assumed


def test_tensor_parallelism_runs_beside_nothing():
    changes = convert(_run("MaxText", LLAMA, tp=8, dp=16)).changes
    assert (changes["tp_beside_dgrad_hidden"], changes["wgrad_bytes"]) == (0, 2)


@pytest.mark.parametrize("gpu", ["TPU v5p", "TPU-v4", "v5p", "v5e-256", "v4-512", "Trillium"])
def test_tpus_run_collectives_beside_compute(gpu):
    """What held PaxML's container back, and MaxText's tensor parallelism, is of XLA's programs for GPUs."""
    for name in ("PaxML", "MaxText"):
        case = convert(_run(name, LLAMA, gpu=gpu, tp=8, dp=16))
        assert case.layout.overlap == Overlap(grad=True, param=None, tp=True)
        assert "tp_beside_dgrad_hidden" not in case.changes and case.changes["launch_host_s"] == 0
    assert not convert(_run("MaxText", LLAMA, tp=8, dp=16)).layout.overlap.tp


def test_easylm_materialises_scores():
    assert convert(_run("EasyLM", SMALL)).work.attention == "unfused"
    assert convert(_run("Levanter", SMALL)).work.attention == "flash"


def test_collectives_of_paxmls_container_run_beside_nothing():
    pax, max_text = (convert(_run(name, SMALL)).layout.overlap for name in ("PaxML", "MaxText"))
    assert (pax.grad, pax.param) == (False, False)
    assert (max_text.grad, max_text.param) == (True, None)


def test_xla_reduces_gradients_as_wide_as_the_weights_that_were_cast():
    assert convert(_run("MaxText", SMALL)).work.grad_dtype == "bf16"
    assert convert(_run("torchtitan", SMALL)).work.grad_dtype == "fp32"
    assert convert(_run("NeMo", SMALL)).work.grad_dtype == "fp32"  # Megatron-FSDP's


def test_a_remat_in_notes_is_a_policy_or_a_kind():
    row = {"framework": "MaxText", "recompute_kind": None}
    case = read(**row, notes="ici_fsdp=64; remat=save_out_proj")
    assert case.changes["checkpoint_keeps"] == KEPT["save_out_proj"] and "recompute" not in case.assumed
    whole = read(**row, notes="remat_policy full; ici_fsdp=64")
    assert whole.layout.recompute.kind == "full" and "recompute" not in whole.assumed
    assert read(**row, notes="remat: none").layout.recompute.kind == "none"
