"""Conversion of published runs, against the published parameter counts and the sources' own statements."""

from __future__ import annotations

import math

import msgspec
import pytest
from published import RUNS, changed, experts

from fivefold.cluster import load_cluster, load_curve_of
from fivefold.layout import resolve
from fivefold.measure import Run, Unconvertible, convert
from fivefold.measure.predict import choose, kernel_of, predict
from fivefold.model import count_params, load_model


@pytest.mark.parametrize(
    "run", [run for run in RUNS.values() if run.group == "llmfoundry" and run.params_b], ids=lambda run: run.id
)
def test_parameters_are_those_that_the_source_counted(run):
    assert run.params_b is not None
    assert count_params(convert(run).model).total == round(run.params_b * 1e9)


@pytest.mark.parametrize("run", [run for run in RUNS.values() if run.group == "nanotron"], ids=lambda run: run.id)
def test_rounded_parameter_counts_of_nanotron(run):
    assert count_params(convert(run).model).total / 1e9 == pytest.approx(run.params_b, abs=0.011)


def test_every_shipped_run_converts():
    for run in RUNS.values():
        case = convert(run)
        world = case.layout.tp * case.layout.cp * case.layout.pp * (run.dp or 1)
        assert world == case.cluster.gpus == run.gpus
        assert case.model.layers == run.layers


def test_sources_go_to_their_runtimes_and_clusters():
    simumax, mpt, nanotron = (convert(RUNS[f"{name}"]) for name in ("simumax-0001", "llmfoundry-0090", "nanotron-0001"))
    assert (simumax.runtime, simumax.cluster.gpu.name) == ("megatron", "b200")
    assert (mpt.runtime, mpt.cluster.gpu.name, mpt.layout.zero) == ("torchtitan", "a100-80g-sxm", 3)
    assert mpt.layout.recompute.kind == "full"
    assert (nanotron.runtime, nanotron.cluster.name) == ("nanotron", "aws-p5")
    assert "runtime" in mpt.assumed
    assert "runtime" not in nanotron.assumed
    assert "runtime" not in simumax.assumed


def test_what_is_not_stated_is_named():
    nanotron = convert(RUNS["nanotron-0001"])
    assert {"recompute", "stages", "overlap"} <= set(nanotron.assumed)
    assert "tied_embeddings" in convert(RUNS["simumax-0001"]).assumed
    assert "sequence_parallel" in convert(changed("simumax-0002", sp=None)).assumed
    assert "precision" in convert(changed("simumax-0002", precision_kind="unknown")).assumed


def test_overlap_that_megatron_lm_does_not_list_was_off():
    off = convert(RUNS["simumax-0001"]).layout.overlap
    assert (off.grad, off.param, off.tp) == (False, False, False)
    text = "overlap-grad-reduce; overlap-param-gather; --tp-comm-overlap"
    on = convert(changed("simumax-0001", overlap=text)).layout.overlap
    assert (on.grad, on.param, on.tp) == (True, True, True)
    silent = convert(changed("simumax-0001", overlap=None))
    assert silent.layout.overlap.grad
    assert "overlap" in silent.assumed


def test_asynchronous_tensor_parallelism_is_read_from_the_techniques_in_the_notes():
    stated = {"framework": "torchtitan", "tp": 4, "sp": 1, "dp": 2, "zero": 3, "overlap": None}
    for notes, on in (("2D + AsyncTP + compile", True), ("async TP", True), ("2D + compile", False), (None, False)):
        assert convert(changed("simumax-0002", notes=notes, **stated)).layout.overlap.tp is on


def test_groups_that_share_parameters_are_read_from_the_notes():
    stated = {"framework": "MaxText", "zero": 3, "dp": 8, "tp": 1, "sp": 0, "pp": 1, "gpus": 8, "gbs": 8}
    for notes, replicas in (("column '8x GPUs (FSDP=4 GBS=8)'", 2), ("FSDP=4", 1), ("(FSDP=3)", 1), (None, 1)):
        assert convert(changed("simumax-0001", notes=notes, **stated)).layout.dp_replicate == replicas


def test_scanned_blocks_are_all_recomputed_alike():
    case = convert(changed("simumax-0001", framework="PaxML", zero=3, recompute=None, recompute_kind=None))
    assert not case.recomputes_in_part
    assert case.changes["checkpoint_stops_early"]


def test_context_parallelism_kind_is_read():
    assert convert(RUNS["simumax-0037"]).layout.cp_kind == "a2a"


def _greedy(layers: int, block: int, head: int, pp: int) -> list[int]:
    """nanotron's loop, written out: a stage is closed by the block that exceeds its threshold."""
    total = layers * block + head
    per_stage, done = [0], 0
    for _ in range(layers):
        done += block
        per_stage[-1] += 1
        if done > total * len(per_stage) / pp and len(per_stage) < pp:
            per_stage.append(0)
    return per_stage


@pytest.mark.parametrize("run", [r for r in RUNS.values() if r.group == "nanotron" and r.pp != 1], ids=lambda r: r.id)
def test_nanotron_stages_follow_its_loop(run):
    case = convert(run)
    block = 4 * run.hidden**2 + 3 * run.hidden * run.ffn
    expected = _greedy(run.layers, block, run.vocab * run.hidden, run.pp)
    (plan,) = kernel_of(case).plans
    assert plan.part.plain[:, 0].tolist() == expected
    resolved = resolve(case.layout, case.model, case.cluster.gpus, case.work, case.runtime)
    assert [high - low for ((low, high),) in resolved.stages] == expected


_126_BLOCKS = {"layers": 126, "pp": 8, "tp": 1, "dp": 1, "vpp": None, "framework": "NeMo 24.07"}


def test_126_blocks_run_with_embedding_and_head_counted():
    layout = convert(changed("simumax-0001", **_126_BLOCKS, recompute_kind="none")).layout
    assert layout.account_for_embedding
    assert layout.account_for_loss


@pytest.mark.parametrize("runtime", ["nanotron", "torchtitan"])
def test_a_profile_that_splits_by_itself_is_given_no_counts(runtime):
    case = convert(changed("simumax-0001", **_126_BLOCKS, recompute_kind="none"), runtime)
    assert not case.layout.account_for_embedding
    assert not case.layout.account_for_loss
    assert "stages" in case.assumed


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"gpu": "Cerebras WSE-3"}, "GPU 'Cerebras WSE-3'"),
        ({"layers": None, "hidden": None, "model": "ours", "params_b": None}, "layers, hidden"),
        ({"layers": None, "model": "llama3-70b (reduced layers)"}, "not stated: layers"),
        ({"gpus": None, "dp": None}, "not stated: gpus"),
        ({"arch": "hybrid/moe"}, "architecture"),
        ({"arch": "moe", "model": "ours"}, "not stated: experts"),
        ({"tp": 3}, "do not divide"),
    ],
)
def test_what_is_not_modelled_is_refused_with_a_reason(changes, reason):
    with pytest.raises(Unconvertible, match=reason):
        convert(changed("simumax-0001", **changes))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"framework": None}, "runtime"),
        ({"framework": "MaxText"}, "runtime"),
        ({"vocab": None}, "vocab"),
        ({"heads": None, "kv_heads": None, "head_dim": None}, "heads"),
        ({"mbs": None}, "micro_batch"),
        ({"precision_kind": None}, "precision"),
        ({"attention": None}, "attention"),
        ({"recompute_kind": "unknown"}, "recompute"),
        ({"gpu": "H100"}, "gpu"),
        ({"gated_mlp": None}, "gated_mlp"),
        ({"mbs": 3}, "micro_batch"),
        ({"gpu": "V100-SXM2-32GB"}, "precision"),
    ],
)
def test_what_is_missing_is_assumed_and_named(changes, field):
    assert field not in convert(RUNS["simumax-0001"]).assumed
    assert field in convert(changed("simumax-0001", **changes)).assumed


@pytest.mark.parametrize(
    ("name", "system", "memory_gb"),
    [
        ("H800", "h800-sxm", 80),
        ("NVIDIA A800-SXM4-80GB", "a800-80g-sxm", 80),
        ("A100-SXM4-40GB", "a100-40g-sxm", 40),
        ("A100-PCIe-80GB", "a100-80g-pcie", 80),
        ("H100-PCIe", "h100-pcie", 80),
        ("H100-96GB-HBM2e", "h100-96g-500w", 100),
        ("H100-96GB", "h100-96g", 100),
        ("GB300", "gb300-nvl72", 288),
        ("B300", "b300", 288),
        ("AMD Instinct MI300X", "mi300x", 192),
        ("V100-SXM2-16GB", "v100-sxm-16g", 16),
        ("TPU v5p", "tpu-v5p", 102),
        ("Intel Gaudi 2", "gaudi2", 96),
        ("V100-32GB (DGX-2)", "v100-sxm-32g", 32),
    ],
)
def test_published_names_of_gpus(name, system, memory_gb):
    gpu = convert(changed("simumax-0001", gpu=name)).cluster.gpu
    assert gpu.name == system
    assert gpu.memory_bytes / 1e9 == pytest.approx(memory_gb, rel=0.1)


def test_frameworks_before_flash_attention_materialise_scores():
    def attention(**changes):
        return convert(changed("simumax-0001", attention=None, **changes)).work.attention

    assert attention(framework="Megatron-LM", source_date="2021-04") == "unfused"
    assert attention(framework="Megatron-LM", source_date="2025-04") == "flash"
    assert attention(framework="Megatron-DeepSpeed", source_date="2024-09") == "unfused"
    assert attention(framework="NeMo 24.07") == "flash"
    stated = convert(changed("simumax-0001", attention="unfused (fused softmax kernel)"))
    assert (stated.work.attention, "attention" in stated.assumed) == ("unfused", False)


def test_models_that_columns_cannot_build_come_from_the_catalogue():
    row = changed(
        "simumax-0001", model="deepseek-v3", arch="mla-moe", layers=61, hidden=7168, heads=128, vocab=129280,
        experts=256, topk=8, moe_ffn=2048, shared_experts=1, ep=1,
    )  # fmt: skip
    case = convert(row)
    assert count_params(case.model).total / 1e9 == pytest.approx(671, rel=0.01)
    assert "architecture" in case.assumed
    smaller = convert(msgspec.structs.replace(row, model="ours", layers=8, vocab=1000))
    assert smaller.model.kinds[0].mixer.kv_lora_rank == 512  # type: ignore[union-attr]
    assert "latent_sizes" in smaller.assumed


def test_adapters_freeze_the_model():
    case = convert(changed("simumax-0001", notes="LoRA Performance"))
    assert case.work.trained == "adapters"
    whole, frozen = predict(choose(convert(RUNS["simumax-0001"]))), predict(choose(case))
    assert 0.6 < frozen.seconds.value / whole.seconds.value < 0.72  # no weight gradients: two passes of three
    assert frozen.peak_bytes < whole.peak_bytes


def test_adapters_of_a_published_run_cost_time_and_overlap_in_8_bit_only():
    row = {"framework": "NeMo 24.07", "tp": 2, "sp": 1, "dp": 4, "notes": "LoRA; container NeMo 24.07"}
    case = convert(changed("simumax-0001", **row))
    assert case.work.lora is not None and set(case.work.lora.targets) == {"q", "k", "v"}
    free = msgspec.structs.replace(case, work=msgspec.structs.replace(case.work, lora=None))
    assert 1.005 < predict(choose(case)).seconds.value / predict(choose(free)).seconds.value < 1.1
    assert not case.layout.overlap.tp
    assert convert(changed("simumax-0001", **row, precision="fp8", precision_kind="fp8")).layout.overlap.tp
    assert convert(changed("simumax-0001", **(row | {"notes": "SFT"}))).layout.overlap.tp


def test_fine_tuning_attends_within_the_documents_that_its_recipe_packs():
    def documents(**changes: str) -> float | None:
        return convert(changed("simumax-0001", **changes)).work.document_length

    for notes in ("SFT; container NeMo 24.07", "LoRA Performance", "Llama3 70b Finetuning", "fine-tuned"):
        assert documents(framework="NeMo 24.07", notes=notes) == pytest.approx(200)
    assert documents(framework="NeMo 24.07", notes="pretrain") is None
    assert documents(framework="NeMo 24.07", model="llama2-7b (SFT)") == pytest.approx(200)
    assert documents(framework="Megatron-LM", notes="SFT") is None  # packs what its user gives it
    whole, packed = (
        predict(choose(convert(changed("simumax-0001", framework="NeMo 24.07", notes=notes)))).seconds.value
        for notes in ("pretrain", "SFT")
    )
    assert 0.9 < packed / whole < 0.99


def test_least_recomputation_that_fits_is_chosen():
    """Where activations overflow a little, a few blocks are recomputed, and not where they fit."""
    fits = choose(convert(changed("llmfoundry-0112", recompute_kind="unknown")))
    assert fits.layout.recompute.kind == "none"
    over = choose(convert(changed("llmfoundry-0112", recompute_kind="unknown", mbs=48, gbs=8 * 48)))
    assert over.layout.recompute.kind == "full"
    assert 0 < (over.layout.recompute.layers or 0) < 24
    assert predict(over).reserved_bytes - predict(over).outside_bytes < 1.07 * over.cluster.gpu.memory_bytes


def test_mixture_of_experts_are_built_from_the_row():
    case = convert(
        changed("simumax-0002", arch="moe", experts=8, topk=2, moe_ffn=1024, shared_experts=1, ep=2, gated_mlp=1)
    )
    feed = case.model.runs[0].block.feed
    assert case.model.is_moe
    assert msgspec.to_builtins(feed)["shared_ffn"] == 1024
    assert (case.layout.ep, case.layout.etp) == (2, 2)  # Megatron-LM's default: as tp
    assert "etp" in case.assumed


def test_an_empty_row_is_refused():
    with pytest.raises(Unconvertible):
        convert(Run(id="x-1"))


def test_attention_kernels_of_other_frameworks():
    mpt = convert(RUNS["llmfoundry-0090"]).cluster
    plain, slow = load_curve_of(load_cluster("a100-80g-sxm")), load_curve_of(mpt)
    for kernel in slow.attention.values():  # whichever the runtime picks
        assert math.isclose(plain.attention["fa2"].forward[0] / kernel.forward[0], 1.7)
    assert convert(RUNS["simumax-0001"]).cluster.compute == {}


@pytest.mark.parametrize(
    ("text", "per_gpu_gbits"),
    [
        ("1600 Gbps node-node RoCE", 200),
        ("NVLink + 8x200Gb/s HDR IB", 200),
        ("Selene: NVSwitch + 8x HDR200 IB per node", 200),
        ("NVLink3 + 4x Omni-Path100", 50),
        ("NVLink + 400Gb/s CX-7 per GPU", 400),
        ("inter-node 800 Gbps", 100),
    ],
)
def test_stated_networks_replace_the_reference_design(text, per_gpu_gbits):
    links = convert(changed("llmfoundry-0150", gpus=16, dp=16, interconnect=text)).cluster.links
    assert links[-1].bandwidth_per_s == pytest.approx(per_gpu_gbits * 1e9 / 8)
    assert links[0].bandwidth_per_s == 300e9


def test_a_missing_micro_batch_is_the_fastest_that_fits():
    case = choose(convert(changed("nanotron-0017", mbs=None)))
    assert case.layout.micro_batch in (1, 2, 4, 8)
    for size in (1, 2, 4):
        other = msgspec.structs.replace(case, layout=msgspec.structs.replace(case.layout, micro_batch=size))
        there = predict(other)
        fits = there.peak_bytes + there.outside_bytes <= case.cluster.gpu.memory_bytes
        assert not fits or predict(case).seconds.value <= there.seconds.value


def test_hardware_flops_become_seconds():
    """Narayanan et al. 2021, table 1: 145B on 1,536 GPUs at 148 TFLOP/s, a batch of 2,304."""
    run = Run(
        id="x-1", layers=80, hidden=12288, vocab=51200, seq=2048, gbs=2304, gpus=1536, tflops_per_gpu=148,
        flops_convention="hardware flops 96BSlh^2(1+s/6h+V/16lh) incl. full recompute",
    )  # fmt: skip
    flops = 96 * 2304 * 2048 * 80 * 12288**2 * (1 + 2048 / (6 * 12288) + 51200 / (16 * 80 * 12288))
    assert run.measured_s == pytest.approx(flops / (148e12 * 1536))
    assert msgspec.structs.replace(run, flops_convention="unclear").measured_s is None


def test_nanotron_gives_a_stage_the_block_beyond_its_share():
    """1.34B: sixteen blocks and a head that weighs four of them; ten are exactly half, so the eleventh is the last."""
    (plan,) = kernel_of(convert(RUNS["nanotron-0001"])).plans
    assert plan.part.plain[:, 0].tolist() == [11, 5]


def test_functional_tests_list_whether_embeddings_are_tied_and_their_modules_of_mtp():
    listed = "overlap-grad-reduce; untie-embeddings-and-output-weights"
    for overlap, notes, tied, modules in (("overlap-grad-reduce", "mtp=", True, 0), (listed, "moe; mtp=1;", False, 1)):
        given = {"vocab": None, "tied_embeddings": None, "gated_mlp": 1, "overlap": overlap, "notes": notes}
        model = convert(changed("simumax-0002", framework="Megatron-LM CI (TE)", **given)).model
        assert (model.tied_embeddings, model.mtp, model.vocab) == (tied, modules, 50_257)
    published = RUNS["simumax-0002"].vocab
    assert convert(changed("simumax-0002", vocab=None)).model.vocab == published == 128_256  # by the model's name
    assert convert(changed("simumax-0002", model="ours", vocab=None)).model.vocab == 32_000


def test_norms_of_queries_and_keys_are_the_catalogues():
    qwen = load_model("qwen3-30b-a3b")
    block = qwen.runs[0].block
    run = experts(model="qwen", layers=qwen.layers, hidden=qwen.hidden, vocab=qwen.vocab, heads=block.mixer.heads)
    run = msgspec.structs.replace(run, experts=block.feed.num_experts, topk=block.feed.top_k, moe_ffn=block.feed.ffn)
    run = msgspec.structs.replace(run, kv_heads=block.mixer.kv_heads, head_dim=block.mixer.head_dim)
    case = convert(run)
    assert case.model.runs[0].block.mixer.qk_norm
    assert "architecture" in case.assumed
    for other in ({"hidden": 4096}, {"kv_heads": 8}, {"moe_ffn": 1024}):
        assert not convert(msgspec.structs.replace(run, **other)).model.runs[0].block.mixer.qk_norm


@pytest.mark.parametrize(
    ("framework", "gbs", "notes", "vpp"),
    [("Meta", 16, None, 8), ("Meta", 256, None, 1), ("Meta", 16, "1F1B", 1), ("Megatron-DeepSpeed", 16, None, 1)],
)
def test_a_large_bubble_is_taken_to_be_interleaved(framework, gbs, notes, vpp):
    """126 blocks, embedding and head on 16 ranks are eight places each; a bubble of 15 / 16 makes them eight chunks."""
    run = changed("simumax-0001", framework=framework, tp=1, pp=16, dp=1, gpus=16, mbs=1, gbs=gbs, vpp=None, layers=126)
    assert convert(msgspec.structs.replace(run, notes=notes, overlap=None)).layout.vpp == vpp


@pytest.mark.parametrize(("framework", "in_part"), [("Megatron-LM", True), ("Megatron-DeepSpeed", False)])
def test_recomputation_in_part_is_the_frameworks(framework, in_part):
    """Two of twelve blocks would do for this one, where the framework can recompute some and not others."""
    unknown = {"recompute": None, "recompute_kind": "unknown", "attention": "flash", "mbs": 12, "gbs": 96}
    recompute = choose(convert(changed("simumax-0001", framework=framework, **unknown))).layout.recompute
    assert recompute.kind == "full"
    assert (recompute.layers is not None) is in_part


def test_a_micro_batch_is_chosen_of_those_that_interleave():
    """32 sequences a replica on 16 ranks with eight chunks: micro-batches of one or two leave whole groups of 16."""
    run = changed("simumax-0001", framework="Meta", tp=1, pp=16, dp=1, gpus=16, mbs=None, gbs=32, vpp=None, layers=126)
    chosen = choose(convert(msgspec.structs.replace(run, notes=None, overlap=None, gpus_per_node=8)))
    assert chosen.layout.vpp == 8
    assert chosen.layout.micro_batch in (1, 2)
    assert predict(chosen).seconds.value > 0
