"""Options of known models and layouts, what is refused with a sentence, and what a plan leaves open."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from fivefold.cluster import load_cluster
from fivefold.errors import FivefoldError
from fivefold.interop.launch.job import Job, Variable
from fivefold.interop.megatron.options import OPTIONS
from fivefold.interop.megatron.write import Data, megatron_job
from fivefold.interop.megatron.write_model import pattern_text
from fivefold.layout import Layout, Overlap, Recompute, Workload, plan_ramp_up, resolve
from fivefold.model import load_model, models
from fivefold.model.spec import Block, BlockRun, Mamba2, ModelSpec, Rotary


def job(
    model: ModelSpec | str, layout: Layout | None = None, gpus: int = 64, gpu: str = "h100-sxm", **more: Any
) -> Job:
    work = {"seq_len": 4096, "global_batch": 512} | more.pop("work", {})
    spec = load_model(model) if isinstance(model, str) else model
    return megatron_job(spec, load_cluster(gpu, gpus=gpus), Workload(**work), layout or Layout(), **more)


def options(model: ModelSpec | str, layout: Layout | None = None, **more: Any) -> dict[str, Any]:
    return {name: value for _, group in job(model, layout, **more).groups for name, value in group.items()}


def test_llama_3_70b_has_the_guide_s_options() -> None:
    """Megatron-Core's user guide: Llama-3-70B on 64 GPUs with TP4 PP4 CP2 and sequence parallelism."""
    found = options("llama-3-70b", Layout(tp=4, pp=4, cp=2), work={"seq_len": 8192})
    expected = {
        "--tensor-model-parallel-size": "4",
        "--pipeline-model-parallel-size": "4",
        "--context-parallel-size": "2",
        "--sequence-parallel": True,
        "--use-distributed-optimizer": True,
        "--overlap-grad-reduce": True,
        "--overlap-param-gather": True,
        "--num-layers": "80",
        "--hidden-size": "8192",
        "--ffn-hidden-size": "28672",
        "--num-attention-heads": "64",
        "--group-query-attention": True,
        "--num-query-groups": "8",
        "--rotary-base": "500000",
        "--swiglu": True,
        "--seq-length": "8192",
        "--global-batch-size": "512",
        "--micro-batch-size": "1",
        "--bf16": True,
    }
    assert {name: found.get(name) for name in expected} == expected


def test_deepseek_v3_has_latent_attention_experts_and_dense_first_blocks() -> None:
    found = options("deepseek-v3", Layout(pp=16, ep=64, first_stage_layers=4, last_stage_layers=1), gpus=2048)
    expected = {
        "--multi-latent-attention": True,
        "--q-lora-rank": "1536",
        "--kv-lora-rank": "512",
        "--num-experts": "256",
        "--moe-router-topk": "8",
        "--moe-ffn-hidden-size": "2048",
        "--moe-shared-expert-intermediate-size": "2048",
        "--moe-layer-freq": "([0]*3+[1]*58)",
        "--moe-grouped-gemm": True,
        "--expert-model-parallel-size": "64",
        "--expert-tensor-parallel-size": "1",
        "--decoder-first-pipeline-num-layers": "4",
        "--decoder-last-pipeline-num-layers": "1",
        "--rope-type": "yarn",
    }
    assert {name: found.get(name) for name in expected} == expected


@pytest.mark.parametrize("name", models())
def test_every_model_of_the_catalogue_is_written_or_refused_with_a_sentence(name: str) -> None:
    """And every option written is one that the table of options knows, with as many values as its kind takes."""
    try:
        found = options(name, gpus=8)
    except FivefoldError as error:
        assert error.code == "megatron-cannot-express"
        assert "is not written for Megatron-LM" in error.message
        return
    for option, value in found.items():
        kind = OPTIONS[option].kind
        assert (value is True or value is False) == (kind in ("flag", "off")), option
        assert isinstance(value, tuple) <= (kind in ("texts", "ints")), option


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        (Layout(pp=4, vpp=5), {"--num-layers-per-virtual-pipeline-stage": "4"}),
        (
            Layout(pp=4, vpp=5, first_stage_layers=15, last_stage_layers=25),
            {"--num-virtual-stages-per-pipeline-rank": "5", "--decoder-first-pipeline-num-layers": "15"},
        ),
        (Layout(tp=2, overlap=Overlap(tp=True)), {"--tp-comm-overlap": True}),
        (Layout(zero=0), {"--use-distributed-optimizer": None, "--overlap-param-gather": None}),
        (
            Layout(pp=4, recompute=Recompute(kind="full", layers=5)),
            {"--recompute-granularity": "full", "--recompute-method": "block", "--recompute-num-layers": "5"},
        ),
        (
            Layout(recompute=Recompute(kind="selective", modules=("core_attn", "mlp"))),
            {"--recompute-granularity": "selective", "--recompute-modules": ("core_attn", "mlp")},
        ),
        (Layout(cp=2, cp_kind="a2a"), {"--cp-comm-type": ("a2a",)}),
        (Layout(dp_replicate=2), {"--num-distributed-optimizer-instances": "2"}),
    ],
)
def test_layouts_become_options(layout: Layout, expected: dict[str, Any]) -> None:
    found = options("llama-3-70b", layout)
    assert {name: found.get(name) for name in expected} == expected


def test_a_ramp_counts_in_samples() -> None:
    model, work = load_model("llama-3-8b"), Workload(seq_len=4096, global_batch=512)
    layout = Layout()
    ramp = plan_ramp_up("128:512:1G", work, resolve(layout, model, 64, work))
    made = job("llama-3-8b", layout, ramp=ramp)
    found = {name: value for _, group in made.groups for name, value in group.items()}
    start, increment, samples = found["--rampup-batch-size"]
    assert (start, int(samples)) == ("128", round(1e9 / 4096))
    assert (512 - 128) % int(increment) == 0
    assert found["--train-samples"] == Variable("TRAIN_SAMPLES")
    assert "--train-iters" not in found
    assert "TRAIN_SAMPLES" in [need.name for need in made.needs]


def test_a_token_budget_fixes_the_length() -> None:
    found = options("llama-3-8b", work={"tokens": 1.4e12})
    assert found["--train-samples"] == str(round(1.4e12 / 4096))


def test_measurements_train_a_fixed_number_of_steps_and_keep_nothing() -> None:
    made = job("llama-3-8b", data=Data(mock=True, steps=20))
    found = {name: value for _, group in made.groups for name, value in group.items()}
    assert found["--train-iters"] == "20"
    assert "--save" not in found
    assert found["--mock-data"] is True
    assert [need.name for need in made.needs if need.default is None] == ["MEGATRON_DIR"]
    assert not made.resumes


def test_mock_data_s_tokenizer_adds_a_token() -> None:
    assert options("llama-3-8b", data=Data(mock=True))["--vocab-size"] == "128255"
    assert options("llama-3-8b")["--vocab-size"] == "128256"


@pytest.mark.parametrize(
    ("layout", "gpu", "expected"),
    [
        (Layout(tp=2), "h100-sxm", "1"),
        (Layout(), "h100-sxm", "1"),
        (Layout(tp=2), "b200-sxm", None),
        (Layout(ep=2, overlap=Overlap(ep=True)), "h100-sxm", "32"),
    ],
)
def test_connections_follow_the_gpu_and_the_overlap(layout: Layout, gpu: str, expected: str | None) -> None:
    """arguments.py: 1 with TP or CP before Blackwell, more with overlapped expert exchanges."""
    made = job("mixtral-8x7b", layout, gpu=gpu)
    assert made.environment.get("CUDA_DEVICE_MAX_CONNECTIONS") == expected


def test_the_router_s_own_options_are_said_to_be_open() -> None:
    assert any("router" in line for line in job("mixtral-8x7b").about)
    assert not any("router" in line for line in job("llama-3-8b").about)


def test_patterns_are_run_lengths() -> None:
    assert pattern_text([0, 0, 0, 1, 1, 0]) == "([0]*3+[1]*2+[0]*1)"


# ---------------------------------------------------------------- refusals


def changed(**fields: Any) -> ModelSpec:
    """llama-3-8b with other fields, of its block where the block has them."""
    model = load_model("llama-3-8b")
    block = model.runs[0].block
    for name in ("mixer", "feed"):
        part = getattr(block, name)
        own = {key: fields.pop(key) for key in [*fields] if key in type(part).__struct_fields__}
        block = replace(block, **{name: replace(part, **own)})
    own = {key: fields.pop(key) for key in [*fields] if key in type(block).__struct_fields__}
    block = replace(block, **own)
    return replace(model, runs=(BlockRun(model.layers, block),), **fields)


def hybrid() -> ModelSpec:
    """llama-3-8b with a state space alone in its first blocks."""
    model = load_model("llama-3-8b")
    space = Block(mixer=Mamba2(heads=64, head_dim=64, groups=8, state=128, conv=4), feed=None)
    return replace(model, runs=(BlockRun(8, space), BlockRun(24, model.runs[0].block)))


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (changed(activation="gelu"), "gated gelu"),
        (changed(activation="relu", gated=False), "relu"),
        (changed(out_bias=True), "biases"),
        (changed(norm="layernorm"), "norms differ"),
        (changed(rotary=Rotary(scaling="linear")), "scaled by linear"),
        (changed(rotary=Rotary(scaling="llama3", factor=8.0, low_freq_factor=2.0)), "other frequency factors"),
        (changed(rotary=Rotary(theta=0.5)), "not a whole number"),
        (changed(sinks=True), "it has attention sinks"),
        (changed(gate=True, chunk=512), "attention within chunks, a gate on attention's output"),
        (changed(qk_norm=True, qk_norm_over="all"), "a norm over all heads"),
        (changed(norms="post"), "norms after its sublayers"),
        (changed(parallel=True), "attention and feed-forward side by side"),
        (changed(embedding_norm=True, head_bias=True), "a norm after its embedding, a bias in its output projection"),
        (changed(peculiar=("scores are soft-capped",)), "scores are soft-capped"),
        (hybrid(), "Mamba 2 blocks, blocks of a mixer or a feed-forward alone"),
    ],
)
def test_what_the_command_line_cannot_express_is_refused(model: ModelSpec, said: str) -> None:
    with pytest.raises(FivefoldError, match=said) as caught:
        job(model)
    assert caught.value.code == "megatron-cannot-express"


def test_different_attentions_are_refused() -> None:
    first, other = changed(), changed(head_dim=64)
    mixed = replace(first, runs=(BlockRun(16, first.runs[0].block), BlockRun(16, other.runs[0].block)))
    with pytest.raises(FivefoldError, match="different attentions"):
        job(mixed)


@pytest.mark.parametrize("work", [{"trained": "adapters"}, {"optimizer": "adafactor"}, {"precision": "mxfp8"}], ids=str)
def test_work_without_options_is_refused(work: dict[str, Any]) -> None:
    with pytest.raises(FivefoldError, match="Megatron-LM's command line cannot run this plan"):
        job("llama-3-8b", work=work)


def test_part_filled_nodes_are_refused() -> None:
    with pytest.raises(FivefoldError, match="12 fill 1 node of 8 and 4 GPUs of"):
        job("llama-3-8b", gpus=12)


def test_real_and_mock_data_at_once_are_refused() -> None:
    with pytest.raises(FivefoldError, match="random tokens"):
        job("llama-3-8b", data=Data(mock=True, path="/data/set"))
