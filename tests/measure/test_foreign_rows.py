"""Rows as other people write them: frameworks, GPUs, networks, models and what is left out, against what they mean."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from fivefold.cluster import clusters, load_cluster, load_curve_of
from fivefold.measure import Run, Unconvertible, convert
from fivefold.measure.predict import choose, predict
from fivefold.model import count_params

LLAMA: dict[str, Any] = {
    "model": "llama3-8b", "arch": "dense", "layers": 32, "hidden": 4096, "ffn": 14336, "heads": 32, "kv_heads": 8,
    "head_dim": 128, "vocab": 128256, "gated_mlp": 1,
}  # fmt: skip
SIZES = ("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab", "gated_mlp")
NO_SIZES: dict[str, Any] = dict.fromkeys(SIZES)


def _run(**changes) -> Run:
    fields: dict[str, Any] = {
        "id": "other-1", "framework": "Megatron-LM", "source_date": "2025-06", "seq": 4096, "mbs": 1, "gbs": 128,
        "gpu": "H100-80GB-SXM", "gpus": 64, "gpus_per_node": 8, "interconnect": "NVLink + IB", "tp": 1, "cp": 1,
        "pp": 1, "ep": 1, "precision_kind": "bf16", "recompute_kind": "full", **LLAMA,
    }  # fmt: skip
    return Run(**{**fields, **changes})


def _case(**changes):
    return convert(_run(**changes))


def _block(**changes) -> Any:
    return _case(**changes).model.runs[0].block


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
        ("Optimum Neuron", "megatron-fsdp", 3),
        ("PaLM (Pathways)", "megatron-fsdp", 3),
        ("VeOmni", "fsdp", 3),
        ("ModelLink (Ascend)", "megatron", 1),
        ("verl", "fsdp1", 3),
        ("somebody's own", "megatron", 1),
    ],
)
def test_frameworks_under_other_spellings(framework, runtime, zero):
    case = _case(framework=framework)
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
    case = _case(framework=framework, notes=notes)
    assert (case.runtime, case.layout.zero) == (runtime, zero)


def test_frameworks_without_a_line_ran_plain_pytorch_before_transformer_engine():
    assert _case(framework="Alpa", source_date="2022-06").runtime == "deepspeed"
    assert _case(framework="Alpa", source_date="2024-06").runtime == "megatron"
    assert _case(framework="NeMo Megatron", source_date="2022-08").runtime == "deepspeed"
    assert _case(framework="NeMo Megatron", source_date="2023-08").runtime == "megatron"
    assert _case(framework="metaseq FSDP", source_date="2022-05", zero=3).runtime == "torchtitan"


def test_xla_programs_wait_for_no_host():
    assert _case(framework="MaxText").changes["launch_host_s"] == 0


def test_a_stage_in_its_column_wins_over_the_one_in_a_name():
    assert _case(framework="DeepSpeed ZeRO-3", zero=2).layout.zero == 2


def test_deepspeed_with_other_axes_is_megatrons_and_shards_no_parameters_behind_a_pipeline():
    case = _case(framework="DeepSpeed", tp=2, pp=4)
    assert (case.runtime, case.layout.zero, case.layout.sequence_parallel) == ("deepspeed", 0, False)
    assert _case(framework="PyTorch FSDP", pp=2).layout.zero == 1


def test_what_the_hosts_hold_is_read_from_words():
    held = {
        name: _case(framework=name).work.offload.words for name in ("DeepSpeed ZeRO-3", "ZeRO-Offload", "ZeRO-Infinity")
    }
    assert held == {"DeepSpeed ZeRO-3": "none", "ZeRO-Offload": "optimizer", "ZeRO-Infinity": "optimizer,parameters"}
    assert _case(notes="optimizer states offloaded to CPU").work.offload.words == "optimizer"
    for words in ("act CPU offload=False", "without CPU offload", "optimizer states not offloaded", "offload: none"):
        assert _case(notes=words).work.offload.words == "none"
    assert _case(framework="ZeRO-Offload", notes="no activation offload").work.offload.words == "optimizer"
    on, off = (_case(framework=name, zero=2) for name in ("ZeRO-Offload", "DeepSpeed"))
    assert predict(choose(on)).seconds.value > predict(choose(off)).seconds.value
    assert predict(choose(on)).peak_bytes < predict(choose(off)).peak_bytes


def test_hybrid_shards_lie_inside_a_node():
    assert _case(framework="PyTorch HSDP").layout.dp_replicate == 8
    assert _case(framework="torchtitan", notes="dp_replicate=2").layout.dp_replicate == 2
    assert _case(framework="PyTorch FSDP").layout.dp_replicate == 1
    for words, groups in (("4 replica groups", 4), ("HSDP, 2 groups of 32", 2), ("dp_shard=16", 4), ("8 groups", 1)):
        assert _case(framework="PyTorch FSDP", notes=words).layout.dp_replicate == groups
    for words in ("full sharding, 8 nodes; GQA with 8 groups", "query heads in 8 groups of 4 heads"):
        assert _case(framework="PyTorch FSDP", notes=words).layout.dp_replicate == 1


def test_a_frozen_model_may_be_held_in_4_bits():
    row = {"framework": "Axolotl", "gpus": 8, "gbs": 8}
    lora, qlora = (_case(**row, notes=notes).work for notes in ("LoRA", "QLoRA, 4-bit"))
    assert (lora.base_precision, qlora.base_precision) == ("compute", "nf4")
    assert (qlora.trained, qlora.lora is not None) == ("adapters", True)
    for words in ("nf4 4-bit", "bf16, 4-bit base", "4-bit"):
        assert _case(**row, notes="QLoRA", precision=words, precision_kind=None).work.precision == "bf16"
    assert _case(**row, notes="4-bit optimizer").work.base_precision == "compute"


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
    layout = _case(framework=framework, notes=notes, vpp=vpp, pp=4, dp=16).layout
    assert (layout.schedule, layout.vpp) == expected


def test_ulysses_exchanges_heads():
    assert _case(framework="DeepSpeed-Ulysses", cp=4).layout.cp_kind == "a2a"
    assert _case(framework="torchtitan", cp=4).layout.cp_kind == "p2p"
    assert _case(overlap="cp_comm a2a", cp=4).layout.cp_kind == "a2a"
    # Experts exchange tokens by an all-to-all of their own.
    assert _case(overlap="moe_a2a_overlap=True", cp=4).layout.cp_kind == "p2p"


def test_attention_that_is_said_not_to_be_flash_is_unfused():
    for words in ("without flash attention", "no flash", "flash_attn=False", "not fused", "unfused", "eager", "torch"):
        assert _case(attention=words).work.attention == "unfused"
    for words in ("FlashAttention-2", "fused (cuDNN)", "SDPA", "triton", "cuDNN", "FA3", "torch SDPA"):
        case = _case(attention=words)
        assert (case.work.attention, "attention" in case.assumed) == ("flash", False)


def test_llm_foundry_ran_flash_attention_1_on_ampere_and_2_after_it():
    def rate(gpu, words):
        cluster = _case(framework="llm-foundry", gpu=gpu, attention=words).cluster
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
    case, plain = _case(**changes), _case(framework=changes.get("framework", "Megatron-LM"))
    assert predict(choose(case)).seconds == predict(choose(plain)).seconds


@pytest.mark.parametrize(("hidden", "billions"), [(3, 7.0), (None, 1e9)])
def test_sizes_that_no_model_has_are_refused(hidden, billions):
    with pytest.raises(Unconvertible, match="would take"):
        _case(**{**NO_SIZES, "hidden": hidden}, model="x", params_b=billions)


@pytest.mark.parametrize(
    ("gpu", "system"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100-80g-sxm"),
        ("A100-80GB-PCIe", "a100-80g-pcie"),
        ("H100 80GB PCIe", "h100-pcie"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("H800 PCIe", "h100-pcie"),
        ("AMD Instinct MI300X", "mi300x"),
        ("MI300A", "mi300a"),
        ("MI350X", "mi350x"),
        ("MI210", "mi210"),
        ("MI250X (per GCD)", "mi250x-gcd"),
        ("HL-225", "gaudi2"),
        ("TPU v3", "tpu-v3"),
        ("TPU7x (Ironwood)", "tpu-v7x"),
        ("TPU v7x-128", "tpu-v7x"),
        ("TPU v5p-1792", "tpu-v5p"),
        ("Ascend 910C", "ascend-910c-die"),
        ("Atlas 900 A3 SuperPoD", "ascend-910c-die"),
        ("v5litepod-256", "tpu-v5e"),
        ("v5p-1024", "tpu-v5p"),
        ("trn1.32xlarge", "trainium"),
        ("AWS Trainium2", "trainium2"),
        ("Intel Data Center GPU Max 1550", "max-1550-tile"),
        ("Ascend 910", "ascend-910a"),
        ("Ascend 910B3", "ascend-910b"),
        ("Atlas 800T A2", "ascend-910b"),
        ("A100 SXM4 40 GB", "a100-40g-sxm"),
        ("V100 16 GB", "v100-sxm-16g"),
        ("RTX 6000 Ada", "rtx-6000-ada"),
        ("p4d.24xlarge", "p4d.24xlarge"),
    ],
)
def test_gpus_under_other_spellings(gpu, system):
    name = _case(gpu=gpu, interconnect=None, gpus_per_node=None).cluster.name
    assert name == system
    assert name in clusters() or "." in name


def test_every_system_of_the_catalogue_is_read_by_its_own_name():
    for system in clusters():
        assert _case(gpu=system, interconnect=None, gpus_per_node=None, precision_kind="unknown").cluster.gpus == 64


def test_nodes_that_bridges_do_not_divide_are_the_systems_own():
    case = _case(gpu="H100 NVL", gpus=6, gpus_per_node=6, gbs=24)
    assert (case.cluster.gpus, case.cluster.gpus_per_node) == (6, 8)
    assert "gpus_per_node" in case.assumed


def test_boards_of_four_have_no_switch():
    board = _case(gpu="A100-40GB", gpus=64, gpus_per_node=4).cluster.links[0]
    assert (board.bandwidth_per_s, board.peer_bandwidth_per_s) == (300e9, 100e9)
    assert not _case(gpu="H100-80GB-SXM", gpus=64, gpus_per_node=4).cluster.links[0].in_network
    assert _case(gpu="A100-40GB", gpus=4, gpus_per_node=4, gbs=8).cluster.links[0].peer_bandwidth_per_s == 0
    assert _case(gpu="GB200", gpus=64, gpus_per_node=4).cluster.links[0].in_network


def test_dies_of_one_package_are_nearer_than_others():
    for gpu in ("MI250X", "Max 1550"):
        inside, outside = (
            predict(choose(_case(gpu=gpu, gpus=8, tp=tp, gpus_per_node=None, interconnect=None, gbs=8))).seconds.value
            for tp in (2, 4)
        )
        assert 1.1 * inside < outside


def test_gpus_without_a_precision_run_the_next_one():
    assert _case(gpu="TPU v5p", precision_kind="fp16").work.precision == "bf16"
    assert _case(gpu="V100-32GB", precision_kind="fp8").work.precision == "fp16"


def test_cards_on_pcie_are_not_modules():
    assert _case(gpu="A100-80GB", interconnect="PCIe only, 1x HDR").cluster.name == "a100-80g-pcie"
    assert _case(gpu="A100-80GB", interconnect="PCIe Gen4").cluster.name == "a100-80g-pcie"
    assert _case(gpu="A100-SXM4-80GB", interconnect="PCIe Gen4").cluster.name == "a100-80g-sxm"
    assert _case(gpu="A100-80GB", interconnect="NVLink, PCIe Gen4 to 8x HDR200").cluster.name == "a100-80g-sxm"


@pytest.mark.parametrize(
    ("words", "gigabits"),  # of one GPU of eight
    [
        ("IB HDR", 200), ("InfiniBand EDR 100Gb/s", 100), ("IB NDR", 400), ("NVLink only", 400), ("8xNDR", 400),
        ("2x EDR", 25), ("1x IB HDR 200", 25), ("8x 200Gb/s HDR InfiniBand", 200), ("Slingshot-11", 200),
        ("100GbE", 12.5), ("25 Gbps Ethernet", 3.125), ("Ethernet 100G", 12.5), ("40 Gbps TCP", 5), ("10 Gbps", 1.25),
        ("3.2 Tbps", 400), ("1.6Tb/s RoCE", 200), ("RoCE 4x200G", 100), ("400 Gb/s InfiniBand per node", 50),
        ("InfiniBand 200 Gb/s (1 NIC per node)", 25), ("200Gbps per GPU", 200), ("InfiniBand 1600 Gbps", 200),
        ("Spectrum-X 400GbE", 400), ("dual-rail NDR", 100), ("Dual-rail InfiniBand HDR", 50), ("p5.48xlarge", 400),
        ("NVLink 900 GB/s", 400), ("NVLink 900 GB/s per GPU + IB HDR", 200), ("not stated", 400),
    ],
)  # fmt: skip
def test_networks_as_written(words, gigabits):
    link = _case(interconnect=words).cluster.links[-1]
    assert link.bandwidth_per_s * 8 / 1e9 == pytest.approx(gigabits)


def test_a_rate_of_several_cards_is_a_nodes():
    for gpu, words, gigabits in (
        ("A100-80GB", "800 Gb/s IB", 100),
        ("A100-80GB", "400 Gb/s IB", 200),
        ("V100", "800Gbps", 100),
    ):
        link = _case(gpu=gpu, interconnect=words).cluster.links[-1]
        assert link.bandwidth_per_s * 8 / 1e9 == pytest.approx(gigabits)


@pytest.mark.parametrize(
    ("words", "precision"),
    [
        ("float16", "fp16"), ("half", "fp16"), ("bfloat16", "bf16"), ("float32", "fp32"), ("e4m3 blockwise", "fp8"),
        ("MX-FP8", "fp8"), ("FP8-MX", "fp8"), ("16-mixed", "fp16"), ("bf16-mixed", "bf16"), ("mixed precision", "bf16"),
        ("fp16, no fp8", "fp16"), ("fp8=False, fp16", "fp16"),
    ],
)  # fmt: skip
def test_precisions_in_words(words, precision):
    case = _case(precision=words, precision_kind=None)
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
    case = _case(recompute=words, recompute_kind=None)
    assert ("recompute" in case.assumed) == (kind is None)
    assert kind is None or case.layout.recompute.kind == kind


def test_blocks_and_modules_that_are_recomputed_are_read_from_words():
    for words in ("full block num_layers=5", "block, 5 layers", "full recompute, block 5 layers"):
        assert _case(recompute=words, recompute_kind=None).layout.recompute.layers == 5
    modules = _case(recompute="Selective MLP + mla_up_proj", recompute_kind=None).layout.recompute.modules
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
    assert (_case(source_date=date, framework=framework, seq=2048).work.attention == "unfused") == unfused
    loss = _case(source_date=None, framework=f"NeMo {'25.04' if unfused else '24.07'}").changes.get("loss_moved_bytes")
    assert (loss is not None) == unfused  # fused since 25.02


def test_long_sequences_and_old_gpus_choose_the_attention_that_they_can():
    row = {"framework": "Megatron-DeepSpeed", "gpu": "A100-80GB"}
    assert _case(**row, seq=2048).work.attention == "unfused"
    assert _case(**row, seq=8192).work.attention == "flash"
    assert _case(gpu="V100-32GB", seq=2048).work.attention == "unfused"  # Transformer Engine needs Ampere
    assert (
        _case(gpu="V100-32GB", seq=2048, framework="PyTorch FSDP").work.attention == "flash"
    )  # PyTorch's own does not


# ---------------------------------------------------------------- models


@pytest.mark.parametrize(
    ("model", "billions"),
    [
        ("meta-llama/Meta-Llama-3-70B", 70.6), ("Qwen2.5-7B-Instruct", 7.62), ("GPT-3 175B", 175),
        ("Mixtral 8x7B", 46.7), ("DeepSeek-V3", 671), ("LLaMA-65B", 65.2), ("GPT 2.7B", 2.7), ("deepseek-67b", 67),
        ("gpt-145B", 145),
    ],
)  # fmt: skip
def test_a_name_is_enough_for_a_model(model, billions):
    case = _case(**NO_SIZES, model=model, arch=None)
    assert count_params(case.model).total / 1e9 == pytest.approx(billions, rel=0.04)
    assert {"architecture", "layers"} & set(case.assumed)


@pytest.mark.parametrize("billions", [0.35, 1.3, 7, 13, 20, 30, 70, 175, 1000])
@pytest.mark.parametrize("kind", ["gpt", "llama-like"])
def test_a_number_of_parameters_is_enough_for_a_model(billions, kind):
    case = _case(**NO_SIZES, model=kind, params_b=billions)
    assert count_params(case.model).total / 1e9 == pytest.approx(billions, rel=0.12)
    assert {"layers", "hidden"} <= set(case.assumed)


@pytest.mark.parametrize("column", SIZES)
def test_one_size_that_is_left_out_follows_from_the_name(column):
    assert count_params(_case(**{column: None}).model) == count_params(_case().model)


def test_sizes_that_are_left_out_follow_from_the_number_of_parameters():
    ours = {"model": "ours", "ffn": None, "kv_heads": None, "gated_mlp": None, "vocab": 32000}
    seven = _block(**ours, params_b=6.74)  # Llama 1's: gated, 11,008 wide, as many keys as queries
    assert (seven.feed.gated, seven.feed.ffn, seven.mixer.kv_heads) == (True, 11008, 32)
    mistral = _block(**{**ours, "ffn": 14336}, params_b=7.24)
    assert (mistral.feed.gated, mistral.mixer.kv_heads) == (True, 8)
    gpt = _block(**{**ours, "vocab": 50257}, params_b=6.65)
    assert (gpt.feed.gated, gpt.feed.ffn) == (False, 4 * 4096)


def test_stated_sizes_win_over_the_name():
    assert _block(ffn=8192).feed.ffn == 8192
    assert _case(layers=12).model.layers == 12
    assert _case(layers=None, model="llama3-8b-12L").model.layers == 12


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model": "T5-3B"}, "no decoder"),
        ({"arch": "encoder-decoder"}, "architecture 'encoder-decoder'"),
        ({"model": "mt5-xl", "arch": None}, "no decoder"),
        ({**NO_SIZES, "model": "vit-large", "arch": "vit"}, "architecture 'vit'"),
        ({"model": "mamba-2.8b"}, "no decoder"),
        ({"model": "llama3-8b (reduced layers)", "layers": None}, "not stated: layers"),
    ],
)
def test_what_columns_cannot_say_is_refused_by_name(changes, reason):
    with pytest.raises(Unconvertible, match=reason):
        _case(**changes)


def test_a_model_of_another_name_with_some_of_the_same_sizes_is_not_taken_for_it():
    """Phi-4 has OLMo 2 13B's blocks, width, heads and vocabulary, and other keys and feed-forwards."""
    phi = {"layers": 40, "hidden": 5120, "ffn": 17920, "heads": 40, "kv_heads": 10, "vocab": 100352}
    block = _block(model="phi-4", **phi)
    assert (block.norms, block.feed.ffn, block.mixer.kv_heads, block.mixer.qk_norm) == ("pre", 17920, 10, False)
    olmo = phi | {"ffn": 13824, "kv_heads": 40}
    assert _block(model="ours", **olmo).norms == "post"


def test_what_the_name_says_of_blocks_holds_where_sizes_agree():
    """Side-by-side sublayers, biases on scores: what no column says. A padded vocabulary is no other model."""
    falcon = {"layers": 60, "hidden": 8192, "ffn": 32768, "heads": 128, "kv_heads": 8, "head_dim": 64, "gated_mlp": 0}
    case = _case(model="falcon-40b", vocab=65536, **falcon)
    assert case.model.runs[0].block.parallel
    assert (case.model.vocab, case.model.max_position, case.model.tied_embeddings) == (65536, 4096, True)
    assert not _case(model="falcon-40b", vocab=65536, tied_embeddings=0, **falcon).model.tied_embeddings
    assert _case(model="falcon-40b", vocab=65024, **falcon | {"layers": 6}).model.layers == 6
    assert not _block(model="falcon-40b", vocab=65024, **falcon | {"ffn": 16384}).parallel
    assert not _block(model="falcon-40b", vocab=65024, experts=8, topk=2, **falcon).parallel


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
    case = _case(**NO_SIZES | sizes, model=model, arch=arch)
    assert count_params(case.model).total / 1e9 == pytest.approx(billions, rel=0.01)
    assert predict(choose(case)).seconds.value > 0
    with pytest.raises(Unconvertible, match="cannot be built"):
        _case(**NO_SIZES | {"layers": 118, "hidden": 8192}, model="ours", arch=arch)


@pytest.mark.parametrize(
    ("model", "billions"),
    [
        ("qwen3-vl-30b-a3b", 30.5), ("Qwen2.5-VL-7B-Instruct", 7.62), ("qwen25_vl_7b", 7.62), ("llama31_8b", 8.03),
        ("Qwen3-30B-A3B-Thinking-2507 (MoE)", 30.5), ("Qwen2-72B", 72.7), ("llama-13b", 13.0),
    ],
)  # fmt: skip
def test_names_with_other_versions_and_of_models_that_read_images(model, billions):
    case = _case(**NO_SIZES, model=model.replace("-2507", ""), arch=None)
    assert count_params(case.model).total / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize("model", ["ours-235b-a22b", "ours-8x13b", "ours-moe-16b"])
def test_a_mixture_that_states_no_experts_is_no_dense_model(model):
    with pytest.raises(Unconvertible, match="not stated: experts"):
        _case(**NO_SIZES, model=model, arch=None)


def test_experts_in_every_other_block_follow_from_the_number_of_parameters():
    """DeepSpeed-MoE's 1.3B with 128 experts has 52e9 parameters (Rajbhandari et al. 2022, table 1)."""
    moe = {"layers": 24, "hidden": 2048, "ffn": 8192, "heads": 16, "kv_heads": 16, "head_dim": 128, "vocab": 51200}
    moe |= {"model": "gpt-1.3B-MoE-128", "arch": "moe", "gated_mlp": 0, "experts": 128, "topk": 1, "moe_ffn": 8192}
    every, other, neither = (_case(**moe, ep=64, params_b=billions).model for billions in (104, 52, 20))
    assert [len(every.kinds), len(other.kinds), len(neither.kinds)] == [1, 2, 1]
    assert count_params(other).total / 1e9 == pytest.approx(52, rel=0.03)
    assert [run.block.feed.num_experts for run in other.runs[1::2]] == [128] * 12  # type: ignore[union-attr]


def test_a_cut_down_that_spreads_experts_has_some():
    """Three blocks of DeepSeek-V3 are dense ones, unless the run has expert parallelism."""
    deepseek = NO_SIZES | {"model": "deepseek-v3-proxy", "arch": "mla-moe", "layers": 3}
    assert not _case(**deepseek).model.is_moe
    spread = _case(**deepseek, ep=8)
    assert (spread.model.is_moe, spread.model.layers, spread.layout.ep) == (True, 3, 8)


def test_dense_blocks_before_those_with_experts_are_as_many_as_a_row_says():
    row = NO_SIZES | {"model": "deepseek-v3", "arch": "mla-moe", "layers": 4, "ep": 8}
    for notes, counts in ((None, [3, 1]), ("dense_layers=1", [1, 3]), ("cut down: 1 dense + 3 MoE layers", [1, 3])):
        assert [run.count for run in _case(**row, notes=notes).model.runs] == counts
    moe = {
        "model": "ours",
        "arch": "moe",
        "experts": 8,
        "topk": 2,
        "moe_ffn": 2048,
        "notes": "first_k_dense_replace: 2",
    }
    first, rest = _case(**moe).model.runs
    assert (first.count, first.block.feed.ffn, rest.count) == (2, 14336, 30)  # type: ignore[union-attr]
    assert len(_case(notes="1 dense").model.runs) == 1
    for notes in ("9 dense PFLOPS", "2.5 dense PFLOP/s a GPU"):  # of the GPU
        assert len(_case(**moe | {"notes": notes}).model.runs) == 1


def test_an_encoder_over_patches_is_priced_as_the_decoder_of_its_sizes():
    """ViT-22B has 21.7e9 parameters (Dehghani et al. 2023)."""
    sizes = {"layers": 48, "hidden": 6144, "ffn": 24576, "heads": 48, "kv_heads": 48, "gated_mlp": 0, "vocab": None}
    case = _case(**sizes, model="vit-22b", arch="vit", seq=256)
    assert count_params(case.model).total / 1e9 == pytest.approx(21.7, rel=0.01)
    assert _case(model="gpt5-style").model.layers == 32


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
    case = _case(**bert, head_dim=64, vocab=30522, arch="encoder", seq=512)
    assert count_params(case.model).total / 1e6 == pytest.approx(335, rel=0.03)


# ---------------------------------------------------------------- degrees and batch


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
    case = _case(**changes)
    found = {
        "tp": case.layout.tp, "gpus": case.cluster.gpus, "batch": case.work.global_batch, "seq": case.work.seq_len,
        "micro_batch": case.layout.micro_batch, "ep": case.layout.ep, "etp": case.layout.etp,
        "pp": case.layout.pp, "cp": case.layout.cp,
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected
    assert assumed in case.assumed


def test_experts_are_spread_over_as_few_ranks_as_fit_where_that_is_not_stated():
    row = NO_SIZES | {"model": "mixtral-8x7b", "arch": "moe", "ep": None, "etp": None}
    tight, roomy = (choose(_case(**row, gpu=gpu)).layout for gpu in ("H100-80GB-SXM", "MI325X"))
    assert (tight.ep, roomy.ep) == (8, 2)  # 6 bytes of each of 46.7e9 parameters, and the sharded rest
    assert choose(_case(**row | {"ep": 1}, gpu="H100-80GB-SXM")).layout.ep == 1
    hybrid = choose(_case(**row, framework="torchtitan", notes="dp_replicate=32", gpu="H100-80GB-SXM")).layout
    assert (hybrid.dp_replicate, hybrid.ep) == (32, 2)  # no group has more than two ranks
    whole = _case(**{**row, "ep": 8}, framework="torchtitan", notes="dp_replicate=32", gpu="H100-80GB-SXM").layout
    assert (whole.dp_replicate, whole.ep) == (1, 8)  # no group of two ranks holds eight
    stated = choose(_case(**row | {"etp": 2, "tp": 2, "gpus": 8, "gbs": 8}, gpu="H100-80GB-SXM")).layout
    assert (stated.ep, stated.etp) == (4, 2)


def test_a_pipeline_of_more_stages_than_blocks_is_refused():
    with pytest.raises(Unconvertible, match="64 stages for 32 blocks"):
        _case(pp=64, dp=1)


def test_dies_are_the_devices_of_cards_that_have_two():
    case = _case(gpu="MI250X", gpus=32, gpus_per_node=4, tp=8, dp=8, interconnect=None)
    assert (case.cluster.gpus, case.cluster.gpus_per_node) == (64, 8)


def test_what_is_filled_in_is_not_read_from_performance():
    """A row without a batch: another published rate changes nothing but what it is compared with."""
    slow, fast = (_run(gbs=None, mbs=2, tokens_per_s_per_gpu=rate) for rate in (1000.0, 9000.0))
    first, second = convert(slow), convert(fast)
    assert msgspec.structs.replace(first, run=second.run) == second
    assert predict(choose(first)).seconds == predict(choose(second)).seconds
    assert first.run.measured_s == pytest.approx(9 * (second.run.measured_s or 0))


@pytest.mark.parametrize(
    ("gpu", "gib"),
    [("A100-64GB", 64), ("H20 141GB", 141), ("A100-80GB", 80), ("GH200 480GB", 94.5), ("MI300X-192GB", 192)],
)
def test_memory_in_a_name(gpu, gib):
    assert _case(gpu=gpu).cluster.gpu.memory_bytes / 2**30 == pytest.approx(gib, rel=0.02)


def test_a_width_says_whether_a_feed_forward_is_gated():
    ours = {"model": "ours", "gated_mlp": None}
    assert _block(**ours).feed.gated  # 3.5 times as wide
    assert not _block(**ours, ffn=16384).feed.gated
    assert _block(**ours, ffn=16384, arch="moe", experts=8, topk=2, moe_ffn=2048).feed.gated is False
    assert _block(**ours, ffn=None, arch="moe", experts=8, topk=2, moe_ffn=2048).feed.gated


def test_a_local_batch_of_nine_is_not_cut_into_single_sequences():
    """Whatever divides the batch is tried, not powers of two alone."""
    row = {"mbs": None, "gbs": 9, "gpus": 8, "dp": 1, "tp": 8, "pp": 1, "cp": 1}
    case = choose(_case(framework="Megatron-LM", **row))
    assert case.layout.micro_batch in (3, 9)


def test_dualpipe_runs_exchanges_of_experts_beside_compute():
    assert _case(framework="HAI-LLM (DualPipe)").layout.overlap.ep
    assert _case(framework="HAI-LLM (DualPipe)").changes["tokens_sent_once"]
    assert _case(framework="Megatron-LM", notes="with DualPipeV").layout.overlap.ep
    assert not _case(framework="Megatron-LM").layout.overlap.ep


def test_dualpipe_is_said_to_be_priced_as_another_schedule():
    pipeline = {"pp": 4, "dp": 16}
    assert "schedule" in _case(framework="HAI-LLM (DualPipe)", **pipeline).assumed
    assert "schedule" not in _case(framework="HAI-LLM (DualPipe)").assumed
    assert "schedule" not in _case(framework="Megatron-LM", **pipeline).assumed
