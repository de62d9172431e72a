"""What rows say in notes, options and remarks, in other frameworks' words, against what they mean."""

from __future__ import annotations

from typing import Any

import msgspec
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


def test_metaseqs_tensor_parallelism_shards_no_sequences():
    assert not read(framework="metaseq", source_date="2022-05", tp=8, gbs=128).layout.sequence_parallel


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
    assert "runtime" in case.assumed and not case.changes["repeats_keys_and_values"]
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
    assert compiled.changes["scatter_copy_bytes"] == case.changes["scatter_copy_bytes"] == 4  # FSDP1's, compiled or not
    casts = msgspec.structs.replace(case, changes=case.changes | {"compiled_casts": True})
    assert predict(choose(case)).seconds.value < predict(choose(casts)).seconds.value


@pytest.mark.parametrize(
    ("words", "kind", "layers"),  # of 16 blocks of a pipeline rank
    [
        ("selective AC every 3rd block", "full", 5), ("every other layer", "full", 8), ("50% of layers", "full", 8),
        ("selective (every 2 layers)", "full", 8), ("8 of 32 layers", "full", 4), ("1/2 of blocks", "full", 8),
        ("recompute_num_layers=4 block", "full", 4), ("full (12 layers)", "full", 12), ("12 layers", "full", 12),
        ("full (uniform, 1 layer)", "full", None), ("act-ckpt", "full", None), ("grad ckpt", "full", None),
        ("AC: full", "full", None), ("per-layer recompute", "full", None), ("unsloth", "full", None),
        ("not used", "none", None), ("N", "none", None), ("memory budget 0.5", "selective", None),
        ("attention only", "selective", None),
    ],
)  # fmt: skip
def test_blocks_that_are_recomputed_in_other_words(words, kind, layers):
    for stated in (None, "unknown", "selective" if kind == "full" and layers else None):
        recompute = read(recompute=words, recompute_kind=stated, pp=2, gbs=128).layout.recompute
        assert (recompute.kind, recompute.layers) == (kind, layers)


@pytest.mark.parametrize(
    ("notes", "kind"),
    [
        ("FSDP; gradient checkpointing", "full"), ("FSDP, full AC, compile", "full"), ("per-op SAC", "selective"),
        ("no activation checkpointing; 8 nodes", "none"), ("selective AC + compile", "selective"),
        ("recompute not stated (activation checkpointing used in scripts)", None), ("act ckpt null", None),
        ("recompute not in csv", None),
    ],
)  # fmt: skip
def test_a_phrase_of_its_own_in_notes_says_what_is_recomputed(notes, kind):
    case = read(recompute_kind=None, notes=notes)
    assert ("recompute" in case.assumed) == (kind is None)
    assert kind is None or case.layout.recompute.kind == kind
    assert read(recompute="none", recompute_kind=None, notes=notes).layout.recompute.kind == "none"


@pytest.mark.parametrize(
    ("framework", "notes", "held"),
    [
        ("LLaMA-Factory", "ds_z3_offload", "optimizer,parameters"),
        ("DeepSpeed", "ZeRO-3 offload (optimizer + params)", "optimizer,parameters"),
        ("DeepSpeed", "ZeRO-3 offload (optimizer)", "optimizer"),
        ("DeepSpeed", "ZeRO-2 + offload", "optimizer"),
        ("Megatron-DeepSpeed ZeRO-3 + CPU offload", "optimizer states offloaded to CPU", "optimizer"),
        ("HF Trainer + DeepSpeed", "table cols {'Zero': '3', 'Opt Offl': 'Y', 'Par Offl': 'N'}", "optimizer"),
        ("HF Trainer + DeepSpeed", "table cols {'Opt Offl': 'N', 'Par Offl': 'N'}", "none"),
        ("torchtune", "CPU offload", "optimizer,parameters"),
        ("PyTorch FSDP", "full AC; CPU offload=False", "none"),
    ],
)
def test_what_the_hosts_hold_in_other_words(framework, notes, held):
    assert read(framework=framework, notes=notes).work.offload.words == held


@pytest.mark.parametrize(
    ("framework", "words", "groups"),  # of 64 ranks, 8 a node
    [
        ("torchtitan", "HSDP: shard 16, replicate 4", 4), ("torchtitan", "data_parallel_shard_degree=8", 8),
        ("torchtitan", "data_parallel_replicate_degree = 2", 2), ("OLMo-core", "hsdp, 2 replicas of 32", 2),
        ("PyTorch FSDP", "hybrid sharding: 2 nodes per shard group", 4), ("AXLearn", "mesh: data=8 fsdp=8", 8),
        ("MaxText", "ici_fsdp_parallelism=8 dcn_data_parallelism=8", 8), ("MaxText", "ici_fsdp_parallelism=64", 1),
        ("torchtitan", "FSDP; 2 replicas of the service", 1),
    ],
)  # fmt: skip
def test_groups_of_shards_in_other_words(framework, words, groups):
    assert read(framework=framework, notes=words).layout.dp_replicate == groups


def test_what_is_sent_in_8_bits_is_no_precision_of_products():
    for words in ("bf16 with fp8 dispatch", "bf16; FP8 all-gather", "8-bit AdamW, bf16"):
        assert read(precision=words, precision_kind=None).work.precision == "bf16"
    assert read(precision="float8 (float8 all-gather)", precision_kind=None).work.precision == "fp8"
    assert read(precision="MXFP4", precision_kind=None, gpu="B200").work.precision == "nvfp4"


def test_schedules_that_no_profile_has_are_marked():
    for words in ("ZB-2p", "V-Half", "Hanayo", "Chimera"):
        case = read(notes=words, pp=4, vpp=1, gbs=128)
        assert case.layout.schedule is None and "schedule" in case.assumed
    assert "schedule" not in read(notes="1F1B", pp=4, vpp=1, gbs=128).assumed


def test_kernels_by_other_names_are_no_materialised_scores():
    row: dict[str, Any] = {"framework": "Megatron-DeepSpeed", "gated_mlp": 0, "seq": 2048}
    for words in ("FlexAttention", "pallas", "aiter (CK)"):
        assert read(**row, attention=words).work.attention == "flash"
    assert read(framework="torchtitan", attention="w/o FA").work.attention == "unfused"


@pytest.mark.parametrize(
    ("framework", "words", "grad", "param", "tp"),
    [
        ("Megatron-LM", "--overlap-grad-reduce --overlap-param-gather --tp-comm-overlap", True, True, True),
        ("Megatron-LM", "overlap_grad_reduce", True, False, False),
        ("Megatron-LM", "DP overlap; TP overlap", True, True, True),
        ("Megatron-LM", "tp-comm-overlap off, no p2p overlap", False, False, False),
        ("Megatron-LM", "no overlap-grad-reduce", False, False, False),
        ("Megatron-LM", "overlap-grad-reduce=False; tp_comm_overlap=True", False, False, True),
        ("NeMo 25.04", "no overlap", False, False, False),
        ("NeMo 25.04", "ub_tp_comm_overlap off", True, None, True),
        ("DeepSpeed ZeRO-1", "overlap_comm=False", False, False, False),
        ("torchtitan", "vanilla TP", True, None, False),
        ("torchtitan", "async TP", True, None, True),
    ],
)
def test_overlap_in_options_and_in_words(framework, words, grad, param, tp):
    overlap = read(framework=framework, overlap=words, tp=2, gbs=128).layout.overlap
    assert (overlap.grad, overlap.param, overlap.tp) == (grad, param, tp)


def test_what_is_said_not_to_be_compiled_is_not():
    for words, compiled in (("torch.compile", True), ("eager, no torch.compile", False), ("compile=False", False)):
        assert ("ring_waits" in read(framework="torchtitan", notes=words).changes) == compiled


@pytest.mark.parametrize("notes", ["GA=4", "grad_accum=4", "gradient accumulation: 4", "4 accumulation steps"])
def test_accumulation_in_notes_makes_the_batch_or_the_micro_batch(notes):
    case = read(notes=notes, mbs=2, gbs=None)
    assert (case.work.global_batch, "gbs" in case.assumed) == (4 * 2 * 64, False)
    case = read(notes=notes, mbs=None, gbs=512)
    assert (case.layout.micro_batch, "micro_batch" in case.assumed) == (2, False)
    assert read(notes=notes, mbs=1, gbs=512).layout.micro_batch == 1  # columns win
    assert "micro_batch" in read(notes="GA=3", mbs=None, gbs=512).assumed


def test_hybrid_shards_span_as_few_nodes_as_hold_them():
    row: dict[str, Any] = {"framework": "OLMo-core", "notes": "HSDP", "recompute_kind": None}
    small = choose(read(**row))
    assert (small.layout.dp_replicate, "shard_groups" in small.assumed) == (8, True)
    large: dict[str, Any] = {"layers": 80, "hidden": 8192, "ffn": 28672, "heads": 64, "model": "llama3-70b"}
    found = choose(read(**row, **large))
    told = predict(found)
    assert 1 <= found.layout.dp_replicate < 8
    assert told.peak_bytes + told.outside_bytes <= found.cluster.gpu.memory_bytes
    assert choose(read(**{**row, "notes": "HSDP, 2 groups of 32"}, **large)).layout.dp_replicate == 2


def test_who_rings_exchanges_no_heads():
    for framework, notes, kind in (
        ("Axolotl", "ring-flash-attention; DeepSpeed ZeRO-3", "p2p"),
        ("XTuner", "DeepSpeed ZeRO-3", "a2a"),
        ("VeOmni", None, "a2a"),
        ("torchtitan", "ring attention", "p2p"),
    ):
        assert read(framework=framework, notes=notes, cp=4).layout.cp_kind == kind


@pytest.mark.parametrize(
    ("framework", "notes", "optimizer", "assumed"),
    [
        ("torchtune", "PagedAdamW8bit", "adamw8bit", False),
        ("torchtune", "adamw_bnb_8bit", "adamw8bit", False),
        ("torchtitan", "8-bit Adam", "adamw8bit", False),
        ("Megatron-LM", "Muon", "muon", False),
        ("torchtitan", "Adafactor, no warm-up", "adafactor", False),
        ("DeepSpeed", "Adafactor", "adamw", True),
        ("torchtune", "no 8-bit Adam", "adamw", False),
        ("torchtitan", None, "adamw", False),
    ],
)
def test_optimizers_in_notes(framework, notes, optimizer, assumed):
    case = read(framework=framework, notes=notes)
    assert (case.work.optimizer, "optimizer" in case.assumed) == (optimizer, assumed)
    assert predict(choose(case)).seconds.value > 0


def test_replicas_of_profiles_that_shard_are_groups_of_one_rank():
    for framework in ("torchtitan", "MaxText"):
        alone, sharded = (choose(read(framework=framework, zero=zero)) for zero in (0, 3))
        assert (alone.layout.dp_replicate, sharded.layout.dp_replicate) == (64, 1)
        assert read(framework=framework, zero=0, tp=2, cp=2, gbs=16).layout.dp_replicate == 16
        assert predict(alone).peak_bytes > predict(sharded).peak_bytes
    assert read(framework="Megatron-LM", zero=0).layout.dp_replicate == 1
