"""What a framework and its release run, where a row does not say: measure/frameworks/ and measure/recipes.py."""

from __future__ import annotations

import msgspec
import pytest
from published import RUNS, changed, experts

from fivefold.layout import Layout
from fivefold.layout.layout import CpKind
from fivefold.layout.rules import Context, violations
from fivefold.measure import convert
from fivefold.measure.frameworks.profiles import EXCHANGES_HEADS
from fivefold.measure.predict import choose, predict
from fivefold.runtime import load_runtime, runtimes

SIZES = ("ffn", "heads", "kv_heads", "head_dim", "vocab", "gated_mlp", "tied_embeddings", "params_b")
_SCALINGS = ("rowwise", "tensorwise")


def test_compiled_rings_are_waited_for():
    for notes, waits in (("compile", True), ("", None)):
        case = convert(changed("simumax-0002", framework="torchtitan", zero=3, dp=4, tp=2, notes=notes))
        assert case.changes.get("ring_waits") is waits


def test_scales_by_row_are_read_from_the_precision():
    stated = {"framework": "torchtitan", "zero": 3, "dp": 4, "tp": 2, "precision_kind": "fp8"}
    by_row, whole = (convert(changed("simumax-0002", precision=f"float8 {name}", **stated)) for name in _SCALINGS)
    assert by_row.changes["scaled_by_row"]
    assert not by_row.changes["quantised_gathers"]
    assert "scaled_by_row" not in whole.changes
    nemo = convert(changed("simumax-0002", framework="NeMo", precision_kind="fp8", precision="float8 rowwise"))
    assert "scaled_by_row" not in nemo.changes


def test_what_torchtitan_compiles():
    """A row that says so, one with asynchronous tensor parallelism, which it refuses without, and one in 8 bits. Then
    elementwise chains are one kernel."""
    stated = {"framework": "torchtitan", "zero": 3, "dp": 4, "tp": 2}
    rows = (
        ({"notes": "FSDP"}, False),
        ({"notes": "vanilla TP"}, False),
        ({"notes": "FSDP + torch.compile"}, True),
        ({"overlap": "Async TP"}, True),
        ({"precision": "float8", "precision_kind": "fp8"}, True),
    )
    for changes, compiled in rows:
        case = convert(changed("simumax-0002", **stated, **changes))
        assert ("fused_glu" in case.changes) is compiled, changes
        assert case.changes.get("input_gradient_bytes") == (2.0 if compiled else None), changes
    megatron = convert(changed("simumax-0002", notes="compile", precision_kind="fp8", precision="fp8"))
    assert "fused_glu" not in megatron.changes


def test_updates_of_adamw_became_one_kernel():
    """torchtitan's in February 2025; PyTorch's own stay one for each operation unless asked, litgpt asks."""

    def moved(**changes):
        case = convert(changed("simumax-0002", **{"zero": 3, "dp": 8, "tp": 1} | changes))
        return case.changes.get("adamw_update_bytes", load_runtime(case.runtime).adamw_update_bytes)

    assert moved(framework="torchtitan", source_date="2024-12") == 80
    assert moved(framework="torchtitan", source_date="2025-06") == 0
    assert moved(framework="FSDP", tp=1, dp=8, source_date="2025-06") == 80
    assert moved(framework="litgpt", tp=1, dp=8) == 0


@pytest.mark.parametrize(
    ("framework", "date", "kernel"),
    [
        ("torchtitan", "2025-06", "fa2"),
        ("torchtitan", "2026-09", "cudnn"),
        ("torchtitan", None, "fa2"),
        ("FSDP", "2025-06", "fa2"),
        ("HF Trainer", "2026-09", "cudnn"),
        ("FSDP", None, "fa2"),
    ],
)
def test_pytorch_attends_by_cudnn_since_2026(framework, date, kernel):
    case = convert(changed("simumax-0002", framework=framework, zero=3, dp=8, tp=1, source_date=date))
    profile = msgspec.structs.replace(load_runtime(case.runtime), **case.changes)
    assert profile.attention_kernels[0] == kernel


def test_parameters_are_gathered_in_8_bits_where_torchtitan_documents_it():
    stated = {"framework": "torchtitan", "zero": 3, "dp": 4, "tp": 2}
    eight = {"precision_kind": "fp8", "precision": "float8"}
    assert convert(changed("simumax-0002", **stated, **eight)).changes["quantised_parameters"]
    assert "quantised_parameters" not in convert(changed("simumax-0002", **stated)).changes
    by_row = convert(changed("simumax-0002", **stated, **eight | {"precision": "float8 rowwise"}))
    assert not by_row.changes["quantised_parameters"]


def test_recipes_overlap_tensor_parallelism():
    assert convert(changed("simumax-0002", framework="NeMo 24.07", overlap=None)).layout.overlap.tp
    assert not convert(changed("simumax-0001", framework="NeMo 24.07", overlap=None)).layout.overlap.tp  # tp 1
    assert not convert(changed("simumax-0002", overlap=None)).layout.overlap.tp  # Megatron-LM's switch is opt-in


def test_zero_2_of_megatron_is_its_distributed_optimizer():
    """Which scatters the sums of gradients and shards none between micro-batches."""

    def layout(**changes):
        case = convert(changed("simumax-0002", zero=2, **changes))
        return case.runtime, case.layout.zero

    assert layout(framework="Megatron-LM") == ("megatron", 1)
    assert layout(framework="Megatron-LM", pp=2, tp=2, dp=2) == ("megatron", 1)
    assert layout(framework="Megatron-FSDP") == ("megatron-fsdp", 2)
    assert layout(framework="Megatron-DeepSpeed", pp=2, tp=2, dp=2) == ("deepspeed", 1)
    assert layout(framework="Megatron-DeepSpeed", pp=1) == ("deepspeed-zero", 2)
    assert layout(framework="torchtitan", pp=2, tp=2, dp=2) == ("torchtitan", 2)


def test_llm_foundry_computes_its_loss_in_two_kernels_over_16_bit_logits_and_two_metrics():
    """Each metric: 16-bit logits read, their log-softmax written, read and written in fp32."""
    case = convert(RUNS["llmfoundry-0112"])
    assert case.changes["loss_moved_bytes"] == (2, 2 + 2 + 2 * (2 + 2 + 2 + 4))
    plain = msgspec.structs.replace(case, changes=case.changes | {"loss_moved_bytes": (22.0, 26.0)})
    assert predict(choose(case)).seconds.value < 0.99 * predict(choose(plain)).seconds.value


def test_fully_sharded_recipes_of_nemo_register_their_buffers():
    changes = {zero: convert(changed("simumax-0002", framework="NeMo 25.07", zero=zero)).changes for zero in (1, 3)}
    assert changes[3]["registered_buffers"] and "registered_buffers" not in changes[1]
    assert "registered_buffers" not in convert(changed("simumax-0002", framework="Megatron-FSDP", zero=3)).changes


def test_graphs_replay_launches():
    run = changed(
        "simumax-0002", framework="Megatron-Bridge", overlap="cuda_graph_impl=local; cuda_graph_scope=full_iteration"
    )
    assert convert(run).changes["launch_host_s"] == 0
    part = changed(
        "simumax-0002",
        framework="Megatron-Bridge",
        overlap="cuda_graph_impl=transformer_engine; cuda_graph_scope=['moe_router']",
    )
    assert 0 < convert(part).changes["launch_host_s"] < load_runtime("megatron").launch_host_s
    assert "launch_host_s" not in convert(changed("simumax-0002", overlap="cuda_graph_impl=none")).changes


@pytest.mark.parametrize(("date", "fused"), [("2024-09", False), ("25.09", True)])
def test_recipes_fuse_the_loss_since_2025(date, fused):
    changes = convert(changed("simumax-0002", framework="NeMo", source_date=date)).changes
    assert ("loss_moved_bytes" in changes) is fused
    assert "loss_moved_bytes" not in convert(changed("simumax-0002", source_date=date)).changes  # Megatron-LM's own


@pytest.mark.parametrize(("framework", "overlap", "each"), [
    ("Megatron-LM", "overlap-grad-reduce; cross-entropy-loss-fusion", 10),
    ("Megatron-LM", "overlap-grad-reduce", None),
    ("NeMo", "cross-entropy-loss-fusion", 2),  # its recipes say Transformer Engine's
])  # fmt: skip
def test_megatron_cores_own_fused_loss_writes_a_tensor_more(framework, overlap, each):
    run = changed("simumax-0002", framework=framework, overlap=overlap, source_date="2026-08-22")
    assert convert(run).changes.get("loss_bytes_per_logit") == each


@pytest.mark.parametrize(("changes", "dropped"), [
    ({"framework": "Megatron-LM CI (TE)", "gated_mlp": 0}, True),
    ({"framework": "Megatron-LM CI (TE)", "gated_mlp": 1}, False),
    ({"framework": "Megatron-LM", "gated_mlp": 0, "source_date": "2021-04"}, True),
    ({"framework": "Megatron-LM", "gated_mlp": 0, "source_date": "2024-04"}, False),
    ({"framework": "Megatron-DeepSpeed", "gated_mlp": 0, "source_date": "2024-04"}, True),
])  # fmt: skip
def test_gpts_of_old_and_of_megatrons_defaults_are_dropped_out(changes, dropped):
    assert convert(changed("simumax-0002", **changes)).work.dropout is dropped


def test_colossal_ai_reduces_gradients_in_the_parameters_dtype():
    case = convert(changed("simumax-0002", framework="Colossal-AI"))
    assert (case.work.grad_dtype, "grad_dtype" in case.assumed, "runtime" in case.assumed) == ("bf16", True, True)


def test_flexible_dispatchers_send_a_token_once():
    sent = convert(changed("simumax-0002", overlap="moe_flex_dispatcher_backend=deepep")).changes
    assert sent["tokens_sent_once"]
    assert "tokens_sent_once" not in convert(changed("simumax-0002", overlap=None)).changes


def test_dropped_tokens_are_not_counted_by_the_host():
    """Nor padded; the recipes of Blackwell replay whole blocks with them."""
    blackwell = convert(experts(source_date="25.09", notes="model note=(tokendrop)", overlap=None)).changes
    spelled = convert(experts(source_date="25.09", notes="(TokenDrop)", overlap=None, gpu="gb200")).changes
    assert spelled == blackwell
    hopper = convert(experts(source_date="25.09", notes="(tokendrop)", overlap=None, gpu="H100")).changes
    for changes in (blackwell, hopper):
        assert (changes["dispatch_host_s"], changes["experts_padded"]) == (0, False)
    assert blackwell["launch_host_s"] == 0
    assert "launch_host_s" not in hopper
    assert "dispatch_host_s" not in convert(experts(source_date="25.09", overlap=None)).changes


@pytest.mark.parametrize(
    ("date", "gpu", "kind", "whole"),
    [
        ("26.08", "GB200", "mxfp8", True),
        ("26.08", "gb200", "mxfp8", True),
        ("26.04", "GB200", "mxfp8", False),
        ("26.08", "B200", "mxfp8", False),
        ("26.08", "GB300", "bf16", False),
    ],
)
def test_recipes_of_racks_replay_whole_steps(date, gpu, kind, whole):
    case = convert(experts(source_date=date, gpu=gpu, precision_kind=kind, overlap=None))
    assert case.layout.overlap.ep is whole
    assert ("fused_experts" in case.changes) is whole
    assert ("tokens_sent_once" in case.changes) is whole
    stated = convert(experts(source_date=date, gpu=gpu, precision_kind=kind, overlap="cuda_graph_impl=none"))
    assert "fused_experts" not in stated.changes


def test_recipes_fuse_the_permutation():
    assert convert(experts(source_date="25.11")).changes["fused_permutation"]
    assert "fused_permutation" not in convert(experts(source_date="24.07")).changes


@pytest.mark.parametrize(
    ("date", "notes", "unfused"),
    [("2024-12", None, True), ("2024-12", "torch.compile", False), ("2026-02", None, None)],
)
def test_norms_of_eager_torchtitan_are_unfused_before_pytorch_had_a_kernel(date, notes, unfused):
    run = changed("llmfoundry-0096", framework="torchtitan", source_date=date, notes=notes, overlap=None)
    assert convert(run).changes.get("unfused_norms") is unfused
    assert "unfused_norms" not in convert(RUNS["llmfoundry-0096"]).changes  # it stands in for Composer


def test_megatron_lms_eight_bit_example_keeps_eight_bit_weights():
    plain, eight = (convert(changed("simumax-0002", precision_kind=kind)) for kind in ("bf16", "fp8"))
    assert (plain.work.grad_dtype, eight.work.grad_dtype) == ("fp32", "bf16")
    assert eight.changes["quantised_weight_bytes"] == 2
    assert "quantised_weight_bytes" not in plain.changes


@pytest.mark.parametrize(("date", "bytes_per_logit"), [("2024-12", (12, 16)), ("2025-06", (4, 10))])
def test_compiled_torchtitan_compiles_its_loss_since_2025(date, bytes_per_logit):
    run = changed("llmfoundry-0096", framework="torchtitan", source_date=date, notes="torch.compile", overlap=None)
    profile = msgspec.structs.replace(load_runtime("torchtitan"), **convert(run).changes)
    assert (profile.loss_bytes_per_logit, profile.sharded_loss_bytes_per_logit) == bytes_per_logit
    compiled = profile.loss_moved_bytes == (4, 4), profile.sharded_loss_moved_bytes == (18, 6)
    assert compiled == (date > "2025",) * 2


@pytest.mark.parametrize(("date", "fused"), [("2021-04", False), ("2022-05", True)])
def test_megatron_lm_fuses_accumulation_since_its_third_release(date, fused):
    case = convert(changed("simumax-0002", source_date=date))
    assert case.runtime == "deepspeed"  # stands in for what was before Transformer Engine
    assert (case.changes.get("wgrad_bytes") == 8) is fused


@pytest.mark.parametrize(("date", "overlapped"), [("2021-04", False), ("2023-06", False), ("2024-07", True)])
def test_older_megatron_lm_reduces_gradients_after_backward(date, overlapped):
    assert convert(changed("simumax-0002", overlap=None, source_date=date)).layout.overlap.grad is overlapped


@pytest.mark.parametrize(
    ("date", "kind", "grad_dtype"),
    [
        ("2021-04", "fp16", "bf16"),
        ("2021-04", "bf16", "fp32"),
        ("2022-05", "fp16", "fp32"),
        ("2024-07", "fp16", "fp32"),
    ],
)
def test_older_megatron_lm_keeps_the_gradients_of_fp16_in_16_bit(date, kind, grad_dtype):
    case = convert(changed("simumax-0002", source_date=date, precision_kind=kind))
    assert case.work.grad_dtype == grad_dtype


def test_megatron_lm_has_no_bf16_optimizer_of_deepspeeds():
    case = convert(changed("simumax-0002", source_date="2021-04", precision_kind="bf16"))
    assert case.runtime == "deepspeed"
    assert (case.changes["bf16_wgrad_bytes"], case.changes["bf16_all_reduces"]) == (0, False)
    assert "bf16_wgrad_bytes" not in convert(changed("simumax-0002", framework="Megatron-DeepSpeed")).changes


@pytest.mark.parametrize(("pp", "reduces_beside"), [(1, True), (2, False)])
def test_gpt_neox_is_deepspeed_with_megatrons_layers(pp, reduces_beside):
    """As its configs/20B.yml: ZeRO-1, overlap_comm, fp16; the pipeline engine reduces after the last backward."""
    case = convert(
        changed(
            "simumax-0002",
            framework="GPT-NeoX",
            pp=pp,
            tp=2,
            dp=8 // (2 * pp),
            precision_kind="fp16",
            overlap=None,
            sp=None,
        )
    )
    overlap = case.layout.overlap
    assert (overlap.grad, overlap.param) == (reduces_beside, False)
    assert (case.layout.zero, case.layout.sequence_parallel, case.work.grad_dtype) == (1, False, "bf16")


@pytest.mark.parametrize(
    ("date", "separate", "beside"), [("2021-04", True, None), ("2022-05", True, 1.0), ("2024-07", None, None)]
)
def test_megatron_lm_before_transformer_engine_is_priced_with_its_own_update_and_overlap(date, separate, beside):
    changes = convert(changed("simumax-0002", source_date=date)).changes
    assert (changes.get("separate_update"), changes.get("tp_beside_wgrad_hidden")) == (separate, beside)
    assert ("gradients_scaled" in changes) is (separate is True)  # which is one of its kernels


def test_recipes_interleave_where_a_row_does_not_say():
    """Twelve blocks on each of two ranks: twelve chunks of one."""
    run = changed("simumax-0001", framework="NeMo", tp=1, pp=2, dp=4, gpus=8, mbs=1, gbs=16, vpp=None, layers=24)
    assert convert(run).layout.vpp == 12
    assert convert(msgspec.structs.replace(run, vpp=1)).layout.vpp == 1
    assert convert(msgspec.structs.replace(run, framework="Megatron-LM")).layout.vpp == 1


DEEPSEEK = {
    "model": "deepseek-v3", "arch": "mla-moe", "layers": 61, "hidden": 7168, "heads": 128, "vocab": 129_280,
    "experts": 256, "topk": 8, "moe_ffn": 2048, "shared_experts": 1, "ffn": 18_432, "kv_heads": 128, "head_dim": None,
    "tp": 1, "ep": 8, "etp": 1, "gpus": 128, "gbs": 1024, "mbs": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("framework", "notes", "modules"),
    [
        ("Megatron-Bridge", None, 1), ("NeMo/Megatron-Core", None, 1), ("HAI-LLM", None, 1), ("Megatron-LM", None, 0),
        ("Megatron-LM", "with MTP", 1), ("Megatron-Bridge", "without MTP", 0), ("torchtitan", None, 0),
        ("Megatron-LM", "bias=yes; mtp=; moe", 0), ("Megatron-Bridge", "mtp=0", 0),
    ],
)  # fmt: skip
def test_recipes_train_the_modules_of_multi_token_prediction(framework, notes, modules):
    case = convert(changed("simumax-0001", framework=framework, notes=notes, pp=1, dp=128, **DEEPSEEK))
    assert case.model.mtp == modules
    assert ("mtp" in case.assumed) == (modules > 0 and notes is None)


def test_recipes_train_a_module_that_a_configuration_does_not_state():
    row = {"layers": None, "hidden": None, "notes": None, "model": "qwen3-next-80b-a3b", **dict.fromkeys(SIZES)}
    for framework, modules in (("Megatron-Bridge", 1), ("Megatron-LM", 0)):
        assert convert(changed("simumax-0001", framework=framework, **row)).model.mtp == modules


def test_words_of_mtp_do_nothing_where_a_model_has_no_modules():
    row = {"layers": None, "hidden": None, "framework": "Megatron-Bridge", "notes": "mtp"}
    assert convert(changed("simumax-0001", model="gpt-oss-20b", **row, **dict.fromkeys(SIZES))).model.mtp == 0


@pytest.mark.parametrize(("pp", "vpp", "last"), [(4, 1, 13), (8, 1, 5), (4, 2, 13), (16, 1, 1), (8, 2, 5), (4, 4, 13)])
def test_modules_and_head_lie_with_fewer_blocks(pp, vpp, last):
    """DeepSeek-V3's layouts in Megatron-Bridge's recipes; all ranks but the last have equal stages."""
    row = {**DEEPSEEK, "pp": pp, "vpp": vpp, "dp": 128 // pp, "framework": "Megatron-Bridge"}
    layout = convert(changed("simumax-0001", **row)).layout
    assert layout.last_stage_layers == last
    assert (61 - last) % ((pp - 1) * vpp) == 0
    assert convert(changed("simumax-0001", **row | {"framework": "Megatron-LM"})).layout.last_stage_layers is None
    assert convert(changed("simumax-0001", notes="no MTP", **row)).layout.last_stage_layers == last  # as Kimi K2's


def test_recipes_of_hybrids_replay_modules_and_send_tokens_once():
    row = {"framework": "Megatron-Bridge", "model": "Nemotron_3_Nano", "ep": 8, "layers": None, "hidden": None}
    row |= dict.fromkeys(SIZES) | {"tp": 1, "dp": 8}
    changes = convert(changed("simumax-0001", overlap=None, **row)).changes
    assert changes["tokens_sent_once"]
    assert changes["launch_host_s"] < load_runtime("megatron").launch_host_s
    assert "launch_host_s" not in convert(changed("simumax-0001", overlap="cuda_graph_impl=none", **row)).changes
    for dense in ("Nemotron-340B", "Nemotron-3-8B"):
        case = convert(changed("simumax-0001", model=dense, overlap=None, framework="Megatron-Bridge"))
        assert "launch_host_s" not in case.changes


def test_experts_are_split_as_dense_layers_where_megatron_is_not_told_otherwise():
    row = {"arch": "moe", "experts": 8, "topk": 2, "moe_ffn": 1024, "tp": 4, "dp": 2, "ep": 2, "etp": None}
    frameworks = {
        "Megatron-LM": 4,
        "NeMo 2.0/Megatron-Core": 4,
        "Megatron-Bridge": 1,
        "torchtitan": 1,
        "Primus/Megatron": 4,
    }
    for framework, etp in frameworks.items():
        case = convert(changed("simumax-0002", framework=framework, **row))
        assert (case.layout.ep, case.layout.etp) == (2, etp)
        assert "etp" in case.assumed
    assert convert(changed("simumax-0002", framework="Megatron-LM", **row | {"etp": 1})).layout.etp == 1


def test_first_recipes_for_deepseek_on_h100_overlap_exchanges():
    row = {**DEEPSEEK, "pp": 1, "dp": 128, "gpu": "H100", "overlap": None}
    for framework, date, overlaps in (
        ("Megatron-Bridge", "25.09", True), ("Megatron-Bridge", "26.04", False), ("NeMo", "25.09", False),
    ):  # fmt: skip
        case = convert(changed("simumax-0001", framework=framework, source_date=date, **row))
        assert (case.layout.overlap.ep, case.changes.get("tokens_sent_once", False)) == (overlaps, overlaps)


def test_tables_of_megatron_bridge_state_where_it_interleaves():
    row = {"pp": 2, "dp": 4, "tp": 1, "vpp": None, "gbs": 64}
    for framework, interleaves in (("Megatron-Bridge", False), ("NeMo 24.07", True)):
        assert (convert(changed("simumax-0001", framework=framework, **row)).layout.vpp > 1) is interleaves


def test_recipes_for_mixtures_overlap_no_tensor_parallelism():
    row = {**DEEPSEEK, "tp": 2, "sp": 1, "pp": 1, "dp": 64, "overlap": None}
    for framework, overlaps in (("Megatron-Bridge", False), ("NeMo/Megatron-Core", True)):
        assert convert(changed("simumax-0001", framework=framework, **row)).layout.overlap.tp is overlaps
    dense = {"framework": "Megatron-Bridge", "overlap": None}
    assert convert(changed("simumax-0002", **dense)).layout.overlap.tp


def test_heads_are_exchanged_where_the_rules_refuse_a_ring():
    case = convert(changed("simumax-0002"))

    def starts(runtime: str, kind: CpKind) -> bool:
        context = Context(
            model=case.model, cluster_gpus=8, gpus_per_node=8, scale_up_size=8, work=case.work, runtime=runtime
        )
        return not violations(Layout(cp=2, cp_kind=kind, zero=max(load_runtime(runtime).zero_stages)), context)

    assert {name for name in runtimes() if starts(name, "a2a") and not starts(name, "p2p")} == EXCHANGES_HEADS


@pytest.mark.parametrize(("framework", "pp", "zero"), [("torchtitan", 1, 3), ("torchtitan", 2, 2), ("MaxText", 2, 3)])
def test_torchtitan_keeps_what_it_gathered_in_a_pipeline(framework, pp, zero):
    case = convert(changed("simumax-0002", framework=framework, zero=None, pp=pp, tp=2, dp=None))
    assert case.layout.zero == zero
