"""What rows say in notes, options and remarks, in other frameworks' words, against what they mean."""

from __future__ import annotations

from typing import Any

import pytest
from foreign import read

from fivefold.measure.predict import choose, predict


@pytest.mark.parametrize(
    ("framework", "notes", "runtime", "zero"),
    [
        ("FSDP (ZeRO-2 / SHARD_GRAD_OP)", None, "fsdp1", 2),
        ("PyTorch FSDP (ZeRO-3)", None, "fsdp1", 3),
        ("HF Trainer", "DeepSpeed ZeRO-2", "deepspeed-zero", 2),
        ("HF Trainer", "DDP", "deepspeed", 0),
        ("HF Trainer", "FSDP; 1.2x faster than DDP", "fsdp1", 3),
        ("XTuner", "DeepSpeed ZeRO-3", "deepspeed-zero", 3),
        ("llama-recipes", None, "fsdp1", 3),
        ("lit-llama", None, "fsdp1", 3),
        ("nanochat", None, "deepspeed", 0),
        ("in-house", "FSDP2 + compile", "fsdp", 3),
        ("in-house", "DeepSpeed, ZeRO-2", "deepspeed-zero", 2),
        ("in-house", "1.4x faster than DeepSpeed ZeRO-3", "megatron", 1),
        ("in-house", "Megatron-style 3D", "megatron", 1),
        (None, "FSDP", "fsdp1", 3),
        ("Megatron-LM", "no distributed optimizer", "megatron", 0),
        ("Megatron-LM", "--use-distributed-optimizer", "megatron", 1),
        ("Megatron-LM", "--use-megatron-fsdp", "megatron-fsdp", 3),
        ("Megatron-LM", "vs. --use-megatron-fsdp", "megatron", 1),
        ("NeMo 2.0", "FSDP=1; dp derived", "megatron-fsdp", 3),
        ("NeMo 2.0", "FSDP=0; dp derived", "megatron", 1),
        ("Colossal-AI", "zero2(dp8)", "deepspeed-zero", 2),
        ("nanotron", "zero 0", "nanotron", 0),
        ("llm.c", "ZeRO-1", "deepspeed", 1),
        ("PaddleNLP", "sharding stage 3", "torchtitan", 3),
        ("metaseq", None, "torchtitan", 3),
    ],
)
def test_a_stage_or_a_backend_in_notes(framework, notes, runtime, zero):
    case = read(framework=framework, notes=notes)
    assert (case.runtime, case.layout.zero) == (runtime, zero)


def test_options_state_the_stage_too():
    assert read(framework="Megatron-Bridge", overlap="use_megatron_fsdp=True").runtime == "megatron-fsdp"
    assert read(framework="Megatron-Bridge", overlap="use_megatron_fsdp=False").runtime == "megatron"
    assert read(framework="Megatron-LM", dist_opt=0, notes="--use-distributed-optimizer").layout.zero == 0


@pytest.mark.parametrize(
    ("framework", "gpu", "runtime"),
    [
        ("MLPerf v4.1 (Dell)", "XE9680 8xH200-SXM-141GB", "megatron"),
        ("MLPerf v4.1 (Google)", "TPU v6e", "megatron-fsdp"),
        ("in-house", "TPU v5p", "megatron-fsdp"),
    ],
)
def test_who_names_no_framework_runs_that_of_the_device(framework, gpu, runtime):
    assert read(framework=framework, gpu=gpu, gpus_per_node=None).runtime == runtime
    assert read(framework="MLPerf (Dell)").work.grad_dtype == "bf16"  # NeMo's recipes


def test_trainium_runs_neurons_software():
    assert not read(framework="in-house", gpu="trn2", gpus_per_node=16).layout.overlap.grad


def test_shards_of_parameters_behind_a_pipeline_are_torchtitans():
    row: dict[str, Any] = {"framework": "Meta (PyTorch FSDP + TP/PP)", "tp": 8, "pp": 4, "gbs": 16, "mbs": 1}
    case = read(**row, zero=2)
    assert (case.runtime, case.layout.zero, case.layout.vpp) == ("torchtitan", 2, 8)  # a large bubble is interleaved
    assert "runtime" in case.assumed
    assert read(**{**row, "pp": 1}).runtime == "fsdp1"


def test_deepspeed_shards_no_parameters_of_experts():
    mixture: dict[str, Any] = {"experts": 8, "topk": 2, "model": "some-moe", "moe_ffn": 14336}
    assert read(framework="DeepSpeed-MoE", **mixture, ep=8).layout.zero == 2
    assert read(framework="DeepSpeed-MoE", **mixture, ep=8, zero=1).layout.zero == 1
    assert read(framework="DeepSpeed", **mixture).layout.zero == 3


def test_llm_foundrys_8_bit_layers_are_transformer_engines():
    """They are not compiled, keep their inputs in 8 bit and are gathered in 16."""
    row: dict[str, Any] = {"framework": "llm-foundry/Composer FSDP", "precision_kind": "fp8", "gated_mlp": 0}
    case = read(**row)
    assert not case.changes["compiled_casts"]
    assert "ring_waits" not in case.changes
    assert case.changes["loss_bytes_per_logit"] == 4
    compiled = read(**{**row, "framework": "PyTorch FSDP"})
    assert compiled.changes["ring_waits"]
    assert "compiled_casts" not in compiled.changes
    assert predict(choose(case)).seconds.value < predict(choose(compiled)).seconds.value
