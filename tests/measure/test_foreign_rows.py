"""Rows as other people write them: frameworks, words, and what is left out, against what they mean."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from foreign import NO_SIZES, read, written

from fivefold.cluster import load_cluster, load_curve_of
from fivefold.layout import Recompute
from fivefold.measure import Unconvertible, convert
from fivefold.measure.predict import choose, predict
from fivefold.runtime.profile import Profile


@pytest.mark.parametrize(
    ("framework", "runtime", "zero"),
    [
        ("Megatron-LM (ROCm fork)", "megatron", 1),
        ("AMD Megatron-LM", "megatron", 1),
        ("Primus/Megatron (AMD)", "megatron", 1),
        ("Primus/TorchTitan", "torchtitan", 3),
        ("TorchTitan (Primus)", "torchtitan", 3),
        ("NVIDIA NeMo 24.09", "megatron", 1),
        ("NeMo AutoModel (FSDP2)", "fsdp", 3),
        ("Megatron-FSDP", "megatron-fsdp", 3),
        ("Pai-Megatron-Patch", "megatron", 1),
        ("Microsoft DeepSpeed ZeRO-1", "deepspeed", 1),
        ("DeepSpeed (ZeRO stage 2)", "deepspeed-zero", 2),
        ("ZeRO-Infinity", "deepspeed-zero", 3),
        ("LLaMA-Factory + DeepSpeed ZeRO-3", "deepspeed-zero", 3),
        ("LLaMAFactory", "fsdp1", 3),
        ("Hugging Face Transformers Trainer", "fsdp1", 3),
        ("FSDP1", "fsdp1", 3),
        ("PyTorch FSDP2", "fsdp", 3),
        ("FSDP-256", "fsdp1", 3),
        ("torch FSDP SHARD_GRAD_OP", "fsdp1", 2),
        ("PyTorch DDP", "deepspeed", 0),
        ("torchtune", "fsdp", 3),
        ("LLM Foundry", "torchtitan", 3),
        ("EleutherAI gpt-neox", "deepspeed", 1),
        ("PyTorch/XLA SPMD", "megatron-fsdp", 3),
        ("mesh-transformer-jax", "megatron-fsdp", 3),
        ("ColossalAI Gemini", "deepspeed-zero", 3),
        ("Colossal-AI", "deepspeed", 0),
        ("Optimum Habana", "fsdp1", 3),
        ("Optimum Neuron", "megatron", 1),
        ("NeuronX Distributed (NxD)", "megatron", 1),
        ("neuronx-nemo-megatron", "megatron", 1),
        ("PaLM (Pathways)", "megatron-fsdp", 3),
        ("VeOmni", "fsdp", 3),
        ("ModelLink (Ascend)", "megatron", 1),
        ("verl", "fsdp1", 3),
        ("somebody's own", "megatron", 1),
    ],
)
def test_frameworks_under_other_spellings(framework, runtime, zero):
    case = read(framework=framework)
    assert (case.runtime, case.layout.zero) == (runtime, zero)


@pytest.mark.parametrize(
    ("framework", "notes", "runtime", "zero"),
    [
        ("LLaMA-Factory", "full fine-tuning; DeepSpeed ZeRO-2", "deepspeed-zero", 2),
        ("ms-swift", "DeepSpeed", "deepspeed-zero", 3),
        ("Axolotl", "fsdp_version: 2", "fsdp", 3),
        ("Axolotl", None, "fsdp1", 3),
        ("PyTorch FSDP", "1.3x faster than DDP", "fsdp1", 3),
        ("PyTorch FSDP", "NO_SHARD", "deepspeed", 0),
        ("Megatron-LM", "compared with DeepSpeed ZeRO-3", "megatron", 1),
    ],
)
def test_what_a_trainer_runs_its_steps_by_is_in_the_notes(framework, notes, runtime, zero):
    case = read(framework=framework, notes=notes)
    assert (case.runtime, case.layout.zero) == (runtime, zero)


def test_frameworks_without_a_line_ran_plain_pytorch_before_transformer_engine():
    assert read(framework="Alpa", source_date="2022-06").runtime == "deepspeed"
    assert read(framework="Alpa", source_date="2024-06").runtime == "megatron"
    assert read(framework="NeMo Megatron", source_date="2022-08").runtime == "deepspeed"
    assert read(framework="NeMo Megatron", source_date="2023-08").runtime == "megatron"
    assert read(framework="metaseq FSDP", source_date="2022-05", zero=3).runtime == "torchtitan"


@pytest.mark.parametrize(
    ("framework", "overlap", "grad_dtype"),
    [
        ("PyTorch FSDP", None, "bf16"),
        ("Hugging Face Transformers Trainer", None, "bf16"),
        ("OLMo", None, "fp32"),
        ("OLMo (FSDP)", None, "fp32"),
        ("torchtitan", None, "fp32"),
        ("llm-foundry/Composer FSDP", "MP Mode=PURE; act CPU offload=False", "bf16"),
        ("llm-foundry/Composer FSDP", "MP Mode=DEFAULT; act CPU offload=False", "fp32"),
    ],
)
def test_fsdp1_reduces_in_16_bit_unless_told_otherwise(framework, overlap, grad_dtype):
    case = read(framework=framework, overlap=overlap, zero=3)
    assert case.work.grad_dtype == grad_dtype


def test_composers_gathers_wait_in_backward():
    assert read(framework="llm-foundry", zero=3).changes["backward_gathers_wait"]
    assert "backward_gathers_wait" not in read(framework="PyTorch FSDP", zero=3).changes


def test_gradients_that_are_reduced_in_16_bit_are_cast_as_shards_only():
    narrow, wide = read(framework="PyTorch FSDP", zero=3), read(framework="OLMo", zero=3)
    assert narrow.changes["scatter_copy_bytes"] == 4
    assert "scatter_copy_bytes" not in wide.changes
    assert predict(choose(narrow)).seconds.value < predict(choose(wide)).seconds.value


def test_xla_programs_wait_for_no_host():
    changes = read(framework="MaxText").changes
    waits = [name for name in Profile.__struct_fields__ if name.endswith("_host_s")]
    assert len(waits) > 3 and [changes[name] for name in waits] == [0.0] * len(waits)


def test_torchtitan_accumulates_what_does_not_fit_at_once():
    """Its stages take the local batch in as many micro-batches, and all of it without a pipeline."""
    row: dict[str, Any] = {"framework": "torchtitan", "mbs": None, "recompute_kind": None}
    assert choose(read(**row, gbs=128)).layout.micro_batch == 2
    assert choose(read(**row, gbs=128, pp=2)).layout.micro_batch == 2
    large = choose(read(**row, gbs=64 * 32, gpu="A100-40GB"))
    told = predict(large)
    assert large.layout.micro_batch < 32
    assert told.peak_bytes + told.outside_bytes <= large.cluster.gpu.memory_bytes


def test_single_precision_before_bf16_is_priced():
    """Volta's fp32 has an eighth of the rate of its fp16."""
    row: dict[str, Any] = {"gpu": "V100-SXM2-32GB", "framework": "PyTorch DDP", "source_date": "2020-05", "tp": 8}
    single, half = (predict(read(**row, precision_kind=kind)).seconds.value for kind in ("fp32", "fp16"))
    assert 3 < single / half < 8


def test_tf32_runs_products_of_fp32_tensors_on_matrix_units():
    """At half the rate of bf16 on Ampere and later, with twice the bytes; before, and where a row denies it, at that of
    the vector units, an eighth of it."""
    row: dict[str, Any] = {"framework": "PyTorch DDP", "gpus": 8, "gbs": 64, "mbs": 8, "gpu": "A100-80GB"}
    half, tensor, vector = (
        predict(read(**row, precision_kind=kind)).seconds.value for kind in ("bf16", "tf32", "fp32")
    )
    assert 1.7 < tensor / half < 2.3
    assert 5 < vector / tensor < 8
    assert read(**row, precision_kind="fp32", precision="TF32").work.precision == "tf32"
    assert read(**row, precision_kind="fp32", precision="FP32, no TF32").work.precision == "fp32"
    older = read(**{**row, "gpu": "V100-32GB"}, precision_kind="tf32")
    assert older.work.precision == "fp32" and "precision" in older.assumed


@pytest.mark.parametrize("kind", ["tf32", "fp32"])
def test_fp32_weights_are_their_own_masters(kind):
    """Weights, gradients and two moments: 16 bytes a parameter of a replica, where bf16 has 2 more, and no gradient is
    reduced in 16 bit."""
    case = read(framework="PyTorch DDP", gpus=8, gbs=8, seq=16, gpu="A100-80GB", precision_kind=kind)
    assert predict(case).peak_bytes == pytest.approx(16 * 8.03e9, rel=0.05)
    assert read(framework="HF FSDP", precision_kind=kind).work.grad_dtype == "fp32"
    assert read(framework="HF FSDP", precision_kind="bf16").work.grad_dtype == "bf16"


def test_a_missing_micro_batch_is_weighed_with_what_it_recomputes():
    """Over one slow card a node, gathers of ZeRO-3 cost more than recomputing all for eight times as few of them."""
    row: dict[str, Any] = {"framework": "DeepSpeed ZeRO-3", "mbs": None, "gbs": 1024, "interconnect": "100 Gb/s"}
    plain, free = (choose(read(**row, recompute_kind=kind)) for kind in ("none", None))
    assert free.layout.recompute.kind == "full"
    assert free.layout.micro_batch > plain.layout.micro_batch
    assert predict(free).seconds.value < 0.8 * predict(plain).seconds.value


def test_chunks_that_are_not_stated_leave_room_to_recompute_in_part():
    """Eight chunks of one block each recompute all or none of them: a little too little memory costs a third."""
    sizes = {"model": "llama3.1-405b", **NO_SIZES, "seq": 8192}
    row: dict[str, Any] = {"gpus": 8192, "tp": 8, "pp": 16, "gbs": 1024, "recompute_kind": None, **sizes}
    free, stated = (choose(read(**row, vpp=vpp)) for vpp in (None, 8))
    assert (stated.layout.vpp, stated.layout.recompute) == (8, Recompute(kind="full", layers=8))
    assert (free.layout.vpp, free.layout.recompute) == (4, Recompute(kind="full", layers=4))
    assert predict(free).seconds.value < predict(stated).seconds.value
    assert choose(read(**row, framework="NeMo", gpu="H200")).layout.vpp == 8  # which has room for all


def test_replicas_that_do_not_fit_shard_their_optimizer():
    """Megatron-DeepSpeed has no ZeRO by default: 18 bytes a parameter of 8B on every GPU, or 12 of them over 64."""
    row: dict[str, Any] = {"framework": "Megatron-DeepSpeed", "recompute_kind": None}
    assert choose(read(**row)).layout.zero == 1
    assert choose(read(**row, tp=8)).layout.zero == 0
    assert choose(read(**row, zero=0)).layout.zero == 0
    assert choose(read(**row, model="llama3-70b", **NO_SIZES)).layout.zero == 0  # shards do not fit either
    assert choose(read(framework="DDP")).layout.zero == 0


@pytest.mark.parametrize("framework", ["Hugging Face Trainer", "DeepSpeed ZeRO-3", "LLaMA-Factory"])
def test_trainers_of_transformers_checkpoint_all_blocks_or_none(framework):
    kinds = [choose(read(framework=framework, recompute_kind=None, seq=seq)).layout.recompute for seq in (2048, 16384)]
    assert kinds == [Recompute(), Recompute(kind="full")]
    assert choose(read(framework="torchtitan", recompute_kind=None, seq=16384)).layout.recompute.layers


def test_a_stage_in_its_column_wins_over_the_one_in_a_name():
    assert read(framework="DeepSpeed ZeRO-3", zero=2).layout.zero == 2


def test_deepspeed_with_other_axes_is_megatrons_and_shards_no_parameters_behind_a_pipeline():
    case = read(framework="DeepSpeed", tp=2, pp=4)
    assert (case.runtime, case.layout.zero, case.layout.sequence_parallel) == ("deepspeed", 0, False)
    case = read(framework="PyTorch FSDP", pp=2)  # who says both composed them, as torchtitan does
    assert (case.runtime, case.layout.zero) == ("torchtitan", 2)


def test_what_the_hosts_hold_is_read_from_words():
    held = {
        name: read(framework=name).work.offload.words for name in ("DeepSpeed ZeRO-3", "ZeRO-Offload", "ZeRO-Infinity")
    }
    assert held == {"DeepSpeed ZeRO-3": "none", "ZeRO-Offload": "optimizer", "ZeRO-Infinity": "optimizer,parameters"}
    assert read(notes="optimizer states offloaded to CPU").work.offload.words == "optimizer"
    for words in ("act CPU offload=False", "without CPU offload", "optimizer states not offloaded", "offload: none"):
        assert read(notes=words).work.offload.words == "none"
    assert read(framework="ZeRO-Offload", notes="no activation offload").work.offload.words == "optimizer"
    on, off = (read(framework=name, zero=2) for name in ("ZeRO-Offload", "DeepSpeed"))
    assert predict(choose(on)).seconds.value > predict(choose(off)).seconds.value
    assert predict(choose(on)).peak_bytes < predict(choose(off)).peak_bytes


def test_hybrid_shards_lie_inside_a_node():
    assert read(framework="PyTorch HSDP").layout.dp_replicate == 8
    assert read(framework="torchtitan", notes="dp_replicate=2").layout.dp_replicate == 2
    assert read(framework="PyTorch FSDP").layout.dp_replicate == 1
    for words, groups in (("4 replica groups", 4), ("HSDP, 2 groups of 32", 2), ("dp_shard=16", 4), ("8 groups", 1)):
        assert read(framework="PyTorch FSDP", notes=words).layout.dp_replicate == groups
    for words in ("full sharding, 8 nodes; GQA with 8 groups", "query heads in 8 groups of 4 heads"):
        assert read(framework="PyTorch FSDP", notes=words).layout.dp_replicate == 1


def test_a_frozen_model_may_be_held_in_4_bits():
    row = {"framework": "Axolotl", "gpus": 8, "gbs": 8}
    lora, qlora = (read(**row, notes=notes).work for notes in ("LoRA", "QLoRA, 4-bit"))
    assert (lora.base_precision, qlora.base_precision) == ("compute", "nf4")
    assert (qlora.trained, qlora.lora is not None) == ("adapters", True)
    for words in ("nf4 4-bit", "bf16, 4-bit base", "4-bit"):
        assert read(**row, notes="QLoRA", precision=words, precision_kind=None).work.precision == "bf16"
    assert read(**row, notes="4-bit optimizer").work.base_precision == "compute"


@pytest.mark.parametrize(
    ("framework", "notes", "vpp", "expected"),
    [
        ("torchtitan", "DualPipeV", None, ("dualpipev", 2)), ("torchtitan", "ZBVZeroBubble", None, ("zbv", 2)),
        ("Megatron-LM", "zero bubble", 1, ("zb-h1", 1)), ("Megatron-LM", "zero bubble", 2, ("zbv", 2)),
        ("Megatron-LM", "zero bubble", None, ("zbv", 2)), ("GPipe", None, None, ("afab", 1)),
        ("Megatron-LM", "no zero bubble", 2, (None, 2)), ("Megatron-LM", "1F1B", None, (None, 1)),
    ],
)  # fmt: skip
def test_schedules_in_words(framework, notes, vpp, expected):
    layout = read(framework=framework, notes=notes, vpp=vpp, pp=4, dp=16).layout
    assert (layout.schedule, layout.vpp) == expected


def test_ulysses_exchanges_heads():
    assert read(framework="DeepSpeed-Ulysses", cp=4).layout.cp_kind == "a2a"
    assert read(framework="torchtitan", cp=4).layout.cp_kind == "p2p"
    assert read(overlap="cp_comm a2a", cp=4).layout.cp_kind == "a2a"
    # Experts exchange tokens by an all-to-all of their own.
    assert read(overlap="moe_a2a_overlap=True", cp=4).layout.cp_kind == "p2p"


def test_attention_that_is_said_not_to_be_flash_is_unfused():
    for words in ("without flash attention", "no flash", "flash_attn=False", "not fused", "unfused", "eager", "torch"):
        assert read(attention=words).work.attention == "unfused"
    for words in ("FlashAttention-2", "fused (cuDNN)", "SDPA", "triton", "cuDNN", "FA3", "torch SDPA"):
        case = read(attention=words)
        assert (case.work.attention, "attention" in case.assumed) == ("flash", False)


def test_llm_foundry_ran_flash_attention_1_on_ampere_and_2_after_it():
    def rate(gpu, words):
        cluster = read(framework="llm-foundry", gpu=gpu, attention=words).cluster
        return (
            load_curve_of(cluster).attention["fa2"].forward[1]
            / load_curve_of(load_cluster(cluster.name)).attention["fa2"].forward[1]
        )

    assert rate("H100-80GB", "flash") == 1
    assert rate("H100-80GB", "triton") == rate("A100-80GB", "flash") == pytest.approx(1 / 1.7)


@pytest.mark.parametrize(
    "changes",
    [
        {"interconnect": f"{'9' * 5000}x100G"}, {"interconnect": "0x100G NIC"}, {"interconnect": "00 Gbps per node"},
        {"framework": "torchtitan", "notes": f"dp_replicate={'9' * 5000}"}, {"notes": f"mtp={'9' * 5000}"},
        {"framework": "PyTorch HSDP", "notes": f"(FSDP={'9' * 5000})"},
        {"recompute": f"full block num_layers={'9' * 5000}"},
    ],
)  # fmt: skip
def test_numbers_in_words_that_cannot_be_are_not_read(changes):
    case, plain = read(**changes), read(framework=changes.get("framework", "Megatron-LM"))
    assert predict(choose(case)).seconds == predict(choose(plain)).seconds


@pytest.mark.parametrize(
    ("words", "precision"),
    [
        ("float16", "fp16"), ("half", "fp16"), ("bfloat16", "bf16"), ("float32", "fp32"), ("e4m3 blockwise", "fp8"),
        ("MX-FP8", "fp8"), ("FP8-MX", "fp8"), ("16-mixed", "fp16"), ("bf16-mixed", "bf16"), ("mixed precision", "bf16"),
        ("fp16, no fp8", "fp16"), ("fp8=False, fp16", "fp16"), ("TF32", "tf32"), ("fp32 (TF32)", "tf32"),
        ("fp32, no TF32", "fp32"), ("float32, allow_tf32=False", "fp32"), ("TF32 and bf16 mixed", "bf16"),
    ],
)  # fmt: skip
def test_precisions_in_words(words, precision):
    case = read(precision=words, precision_kind=None)
    assert case.work.precision == precision
    assert "precision" in case.assumed


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("no", "none"), ("disabled", "none"), ("full activation checkpointing", "full"), ("True", "full"),
        ("selective (core attention)", "selective"), ("none set in recipe override (model default)", None),
        ("no activation checkpointing", "none"), ("gradient_checkpointing=False", "none"),
        ("activation checkpointing: off", "none"), ("w/o recomputation", "none"),
        ("recompute-granularity full", "full"), ("activation checkpointing, no offload", "full"),
        ("activation recomputation", "full"), ("AC", "full"), ("remat", "full"), ("remat_policy=full", "full"),
        ("nothing_saveable", "full"), ("remat: none", "none"), ("save_qkv_proj", "selective"), ("minimal", "selective"),
        ("op-level AC", "selective"), ("--recompute-activations", "selective"), ("mla_up_proj", "selective"),
        ("block 10 layers", "full"), ("partial", None),
        ("none (it fits)", "none"), ("selective, no full recompute", "selective"), ("no recomputation, mlp", "none"),
    ],
)  # fmt: skip
def test_recomputation_in_words(words, kind):
    case = read(recompute=words, recompute_kind=None)
    assert ("recompute" in case.assumed) == (kind is None)
    assert kind is None or case.layout.recompute.kind == kind


def test_blocks_and_modules_that_are_recomputed_are_read_from_words():
    for words in ("full block num_layers=5", "block, 5 layers", "full recompute, block 5 layers"):
        assert read(recompute=words, recompute_kind=None).layout.recompute.layers == 5
    modules = read(recompute="Selective MLP + mla_up_proj", recompute_kind=None).layout.recompute.modules
    assert set(modules) == {"mlp", "mla_up_proj"}


@pytest.mark.parametrize(
    ("date", "framework", "unfused"),
    [
        ("2022/06", "Megatron-LM", True), ("2022.06", "Megatron-LM", True), ("2022-6", "Megatron-LM", True),
        ("20220615", "Megatron-LM", True), ("2022-23", "Megatron-LM", True), ("v25.05.05", "Megatron-LM", False),
        ("2023.02", "Megatron-LM", False), (None, "NeMo 24.07", False),
    ],
)  # fmt: skip
def test_dates_as_people_write_them(date, framework, unfused):
    assert (read(source_date=date, framework=framework, seq=2048).work.attention == "unfused") == unfused
    loss = read(source_date=None, framework=f"NeMo {'25.04' if unfused else '24.07'}").changes.get("loss_moved_bytes")
    assert (loss is not None) == unfused  # fused since 25.02


def test_long_sequences_and_old_gpus_choose_the_attention_that_they_can():
    row = {"framework": "Megatron-DeepSpeed", "gpu": "A100-80GB"}
    assert read(**row, seq=2048).work.attention == "unfused"
    assert read(**row, seq=8192).work.attention == "flash"
    assert read(gpu="V100-32GB", seq=2048).work.attention == "unfused"  # Transformer Engine needs Ampere
    assert read(gpu="V100-32GB", seq=2048, framework="PyTorch FSDP").work.attention == "flash"  # PyTorch's own does not


@pytest.mark.parametrize(
    ("changes", "assumed", "expected"),
    [
        ({"tp": None, "dp": 8, "pp": 2}, "tp", {"tp": 4, "gpus": 64}),
        ({"tp": None}, "tp", {"tp": 1, "gpus": 64}),
        ({"gpus": None, "tp": 2, "dp": 16}, "gpus", {"tp": 2, "gpus": 32}),
        ({"tp": 2, "pp": None, "dp": 8}, "pp", {"tp": 2, "pp": 4, "cp": 1}),
        ({"tp": 2, "pp": 2, "cp": None, "dp": 8}, "cp", {"tp": 2, "pp": 2, "cp": 2}),
        ({"pp": None, "cp": None, "gpus": 4096, "dp": 1, "gbs": 4096}, "dp", {"pp": 1, "cp": 1}),
        ({"tp": 2, "pp": None, "cp": None, "dp": 32}, "pp", {"tp": 2, "pp": 1, "cp": 1}),
        ({"framework": "PyTorch HSDP", "pp": None, "cp": None, "dp": 8}, "dp", {"pp": 1, "cp": 1, "gpus": 64}),
        ({"tp": 2, "dp": 64}, "dp", {"tp": 2, "gpus": 64}),
        ({"gbs": None, "mbs": 2}, "gbs", {"batch": 128}),
        ({"gbs": 4_194_304}, "gbs", {"batch": 1024}),
        ({"gbs": 1000}, "gbs", {"batch": 1024}),
        ({"seq": None}, "seq", {"seq": 8192}),
        ({"mbs": 6, "gbs": 512}, "micro_batch", {"micro_batch": 4}),
        ({"tp": 4, "pp": 4, "arch": "moe", "experts": 64, "topk": 2, "ep": 32}, "ep", {"ep": 16, "etp": 1}),
        ({"tp": 4, "arch": "moe", "experts": 64, "topk": 2, "ep": 32, "etp": 4}, "etp", {"ep": 32, "etp": 1}),
    ],
)
def test_what_follows_from_the_rest_of_a_row(changes, assumed, expected):
    case = read(**changes)
    found = {
        "tp": case.layout.tp, "gpus": case.cluster.gpus, "batch": case.work.global_batch, "seq": case.work.seq_len,
        "micro_batch": case.layout.micro_batch, "ep": case.layout.ep, "etp": case.layout.etp,
        "pp": case.layout.pp, "cp": case.layout.cp,
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected
    assert assumed in case.assumed


def test_experts_are_spread_over_the_ranks_that_are_fastest_where_that_is_not_stated():
    """As a brute force over stated ranks finds; where parameters are fully sharded, over as few as fit."""
    row = NO_SIZES | {"model": "mixtral-8x7b", "arch": "moe", "ep": None, "etp": None}
    tight, roomy = (choose(read(**row, gpu=gpu)).layout for gpu in ("H100-80GB-SXM", "MI325X"))
    seconds = {ep: predict(choose(read(**row | {"ep": ep}, gpu="MI325X"))).seconds.value for ep in (1, 2, 4, 8)}
    assert roomy.ep == min(seconds, key=seconds.__getitem__)
    assert tight.ep == 8  # 6 bytes of each of 46.7e9 parameters, and the sharded rest
    assert choose(read(**row | {"ep": 1}, gpu="H100-80GB-SXM")).layout.ep == 1
    assert choose(read(**row, framework="torchtitan", gpu="MI325X")).layout.ep == 1
    hybrid = choose(read(**row, framework="torchtitan", notes="dp_replicate=32", gpu="H100-80GB-SXM")).layout
    assert (hybrid.dp_replicate, hybrid.ep) == (32, 2)  # no group has more than two ranks
    whole = read(**{**row, "ep": 8}, framework="torchtitan", notes="dp_replicate=32", gpu="H100-80GB-SXM").layout
    assert (whole.dp_replicate, whole.ep) == (1, 8)  # no group of two ranks holds eight
    stated = choose(read(**row | {"etp": 2, "tp": 2, "gpus": 8, "gbs": 8}, gpu="H100-80GB-SXM")).layout
    assert (stated.ep, stated.etp) == (4, 2)


def test_a_pipeline_of_more_stages_than_blocks_is_refused():
    with pytest.raises(Unconvertible, match="64 stages for 32 blocks"):
        read(pp=64, dp=1)


def test_what_is_filled_in_is_not_read_from_performance():
    """A row without a batch: another published rate changes nothing but what it is compared with."""
    slow, fast = (written(gbs=None, mbs=2, tokens_per_s_per_gpu=rate) for rate in (1000.0, 9000.0))
    first, second = convert(slow), convert(fast)
    assert msgspec.structs.replace(first, run=second.run) == second
    assert predict(choose(first)).seconds == predict(choose(second)).seconds
    assert first.run.measured_s == pytest.approx(9 * (second.run.measured_s or 0))


def test_a_local_batch_of_nine_is_not_cut_into_single_sequences():
    """Whatever divides the batch is tried, not powers of two alone."""
    row = {"mbs": None, "gbs": 9, "gpus": 8, "dp": 1, "tp": 8, "pp": 1, "cp": 1}
    case = choose(read(framework="Megatron-LM", **row))
    assert case.layout.micro_batch in (3, 9)


def test_dualpipe_runs_exchanges_of_experts_beside_compute():
    assert read(framework="HAI-LLM (DualPipe)").layout.overlap.ep
    assert read(framework="HAI-LLM (DualPipe)").changes["tokens_sent_once"]
    assert read(framework="Megatron-LM", notes="with DualPipeV").layout.overlap.ep
    assert not read(framework="Megatron-LM").layout.overlap.ep


def test_dualpipe_is_said_to_be_priced_as_another_schedule():
    pipeline = {"pp": 4, "dp": 16}
    assert "schedule" in read(framework="HAI-LLM (DualPipe)", **pipeline).assumed
    assert "schedule" not in read(framework="HAI-LLM (DualPipe)").assumed
    assert "schedule" not in read(framework="Megatron-LM", **pipeline).assumed
