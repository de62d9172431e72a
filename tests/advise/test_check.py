"""`check` beside what it is made of: the same numbers as an estimate, and changes that are one step away."""

from __future__ import annotations

from pathlib import Path

import pytest

import fivefold as ff
from fivefold.advise.changes import best_of_each, single_changes
from fivefold.advise.check import check
from fivefold.advise.result import Check
from fivefold.advise.waste import wasted
from fivefold.estimate import Problem
from fivefold.interop.megatron.commands import ScriptInputs
from fivefold.interop.megatron.read import Asked, Reading, read_file, read_source
from fivefold.layout.layout import Layout
from fivefold.runtime import load_runtime

SCRIPTS = Path(__file__).parents[1] / "interop" / "scripts"
LLAMA = (
    "torchrun --nproc_per_node 8 --nnodes 8 pretrain_gpt.py --num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 "
    "--num-attention-heads 64 --group-query-attention --num-query-groups 8 --seq-length 8192 --normalization RMSNorm "
    "--max-position-embeddings 8192 --position-embedding-type rope --swiglu --disable-bias-linear --bf16 "
    "--untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 --vocab-size 128256 "
    "--micro-batch-size 1 --global-batch-size 512 --tensor-model-parallel-size 4 --pipeline-model-parallel-size 4 "
    "--context-parallel-size 2 --sequence-parallel {}"
)


def checked(text: str, gpu: str = "h100-sxm", **asked) -> tuple[Check, Reading]:
    reading = read_source(text, "x.sh", None, Asked(**asked))
    return check(reading, ff.load_cluster(gpu, reading.gpus, reading.gpus_per_node)), reading


def test_the_guides_llama_needs_its_distributed_optimizer() -> None:
    """A published example: 4.54B parameters x 18 bytes on stage 0 are 81.7 GB, and 40.9 GB when sharded over 4."""
    without, _ = checked(LLAMA.format(""))
    assert without.starts and not without.fits and not without.good
    with_it, _ = checked(LLAMA.format("--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"))
    assert with_it.good
    assert "run out of memory" in without.summary and "MFU should be about" in with_it.summary
    first = without.changes[0]
    assert all(change.estimate.fits for change in without.changes)
    sharding = next(change for change in without.changes if change.kind == "optimizer sharding")
    assert sharding.options["new"]["--use-distributed-optimizer"] is True
    assert sharding.delta_bytes is not None and sharding.delta_bytes < -30e9
    assert first.estimate.step is not None


def test_numbers_are_those_of_an_estimate() -> None:
    found, reading = checked(LLAMA.format("--use-distributed-optimizer"))
    model = ff.load_model("llama-3-70b")
    cluster, work = ff.load_cluster("h100-sxm", gpus=64), ff.Workload(seq_len=8192, global_batch=512)
    layout = Layout(tp=4, pp=4, cp=2, overlap=ff.Overlap(grad=False, param=False))
    direct = ff.estimate(model, cluster, work, layout)
    assert found.estimate.memory is not None and direct.memory is not None
    assert found.estimate.step is not None and direct.step is not None
    assert found.estimate.memory.stages == direct.memory.stages
    assert found.estimate.step.seconds == direct.step.seconds
    assert found.estimate.params == direct.params
    assert reading.padded_vocab == 128512  # the next multiple of 128 x 4


@pytest.mark.parametrize("name", ["variables.sh", "srun_wrapper.sh", "nemo_overrides.sh"])
def test_every_change_is_priced_as_its_own_options_read_back(name: str) -> None:
    reading = read_file(SCRIPTS / name)
    found = check(reading, ff.load_cluster("h100-sxm", reading.gpus, reading.gpus_per_node))
    now = found.estimate
    assert now.step is not None and now.memory is not None and found.changes
    gains = [change.gain_s for change in found.changes]
    assert gains == sorted(gains, key=lambda gain: -(gain or 0))
    for change in found.changes:
        step, memory = change.estimate.step, change.estimate.memory
        assert step is not None and memory is not None
        assert change.gain_s == now.step.seconds.value - step.seconds.value > 0
        assert change.delta_bytes == memory.reserved_bytes - now.memory.reserved_bytes
        new = {key: value for key, value in change.options["new"].items() if value is not None}
        if any(value is None for value in change.options["new"].values()):
            continue  # taking an option out cannot be said by adding words
        words = " ".join(
            (f"{k}={v}" if "." in k else k if v is True else f"{k} {v}").replace("=True", "=true")
            for k, v in new.items()
        )
        again = read_file(SCRIPTS / name, Asked(extra=words))
        priced = check(again, ff.load_cluster("h100-sxm", again.gpus, again.gpus_per_node), top=1).estimate
        assert priced.layout == change.estimate.layout, change.kind
        assert priced.step is not None and priced.step.seconds == step.seconds


def test_candidates_differ_in_one_thing_and_the_best_is_the_best() -> None:
    reading = read_file(SCRIPTS / "variables.sh")
    cluster = ff.load_cluster("h100-sxm", reading.gpus)
    problem = Problem(reading.model, cluster, reading.work, load_runtime("megatron"))
    candidates = single_changes(problem, reading.layout)
    kinds = {candidate.kind for candidate in candidates}
    assert {"tensor parallelism", "pipeline parallelism", "micro-batch", "recomputation", "optimizer sharding"} <= kinds
    assert len({candidate.layout for candidate in candidates}) == len(candidates)
    for candidate in candidates:
        if candidate.kind == "micro-batch":
            assert {name for name in candidate.layout.__struct_fields__
                    if getattr(candidate.layout, name) != getattr(reading.layout, name)} == {"micro_batch"}  # fmt: skip
    best = {candidate.kind: outcome for candidate, outcome in best_of_each(problem, "megatron", candidates)}
    seconds = []
    for candidate in candidates:
        if candidate.kind == "micro-batch":
            est = ff.estimate(reading.model, cluster, reading.work, candidate.layout)
            if est.valid and est.fits and est.step:
                seconds.append(est.step.seconds.value)
    assert best["micro-batch"].seconds <= min(seconds) * 1.0031


def test_what_would_not_start_is_mended() -> None:
    found, _ = checked(LLAMA.format("--use-distributed-optimizer --tensor-model-parallel-size 3"))
    assert not found.starts and found.estimate.memory is None and not found.estimate.valid
    broken = found.estimate.violations[0]
    assert broken.option == "--tensor-model-parallel-size" and "x.sh:1" in broken.message
    assert "--tp " not in broken.message
    assert found.changes and found.changes[0].gain_s is None
    assert any(change.kind == "tensor parallelism" for change in found.changes)


def test_degrees_beyond_the_gpus_would_not_start() -> None:
    found, _ = checked(LLAMA.format("--use-distributed-optimizer --tensor-model-parallel-size 128"))
    assert not found.good and found.estimate.violations[0].id == "tp-range"


def test_a_broken_option_keeps_the_figures() -> None:
    found, _ = checked(LLAMA.format("--use-distributed-optimizer --save /ckpt"))
    assert not found.starts and not found.estimate.valid
    assert found.estimate.memory is not None and found.estimate.step is not None
    assert found.estimate.violations[0].id == "megatron-save-interval"


def test_older_versions_have_older_rules() -> None:
    """TP 8 on 4 key/value heads: replicated in newer releases of Megatron-Core, refused before."""
    text = LLAMA.format("--use-distributed-optimizer --tensor-model-parallel-size 8 --num-query-groups 4")
    reading = read_source(text, "x.sh", None)
    cluster = ff.load_cluster("h100-sxm", reading.gpus, reading.gpus_per_node)
    assert check(reading, cluster, "megatron").starts
    assert not check(reading, cluster, "megatron@0.14").starts


def test_unknown_options_are_listed() -> None:
    found, _ = checked(LLAMA.format("--use-distributed-optimizer --tensor_model_paralel_size 8 --wow"))
    assert found.unknown_options == ("--tensor_model_paralel_size", "--wow")
    assert found.unknown[0]["place"] == "x.sh:1"


def test_waste_sums_to_the_step() -> None:
    found, _ = checked(LLAMA.format("--use-distributed-optimizer"))
    step = found.estimate.step
    assert step is not None
    shares = {row["owner"]: row["share"] for row in found.waste if row["seconds"] is not None}
    compute = step.breakdown_s["compute"] / step.seconds.value
    assert 0.97 < compute + sum(shares.values()) <= 1.0 + 1e-9
    assert shares["tp"] == pytest.approx(step.breakdown_s["tp"] / step.seconds.value)


def test_a_step_of_small_products_waits_for_the_host() -> None:
    work = ff.Workload(seq_len=1024, global_batch=16)
    first = wasted(ff.estimate(ff.load_model("gpt2"), ff.load_cluster("h100-sxm", gpus=4), work, Layout()))[0]
    assert first["owner"] == "host" and first["share"] > 0.5
    assert "launch" in first["message"]


def test_a_script_with_variables_set_from_outside() -> None:
    reading = read_file(SCRIPTS / "case_if.sh", Asked(script=ScriptInputs(arguments=("13b",))))
    found = check(reading, ff.load_cluster("a100-80g-sxm", reading.gpus), top=3)
    assert found.estimate.layout.tp == 4 and len(found.changes) <= 3


def test_the_verdict_says_what_could_turn_it() -> None:
    words = (
        "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers {layers} --hidden-size 4096 --num-attention-heads 32 "
        "--seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 32 --bf16 "
        "--vocab-size 32000 --fp8-format hybrid --use-distributed-optimizer --fp8-param-gather {more}"
    )
    small, _ = checked(words.format(layers=2, more="--no-such-option 3"))
    assert small.good
    assert "1 option is unknown here" in small.summary
    plain, _ = checked(words.format(layers=2, more=""))
    assert "unknown" not in plain.summary
    large, _ = checked(words.format(layers=90, more=""))
    assert not large.good
    assert "--fp8-param-gather" in large.summary


def test_a_launch_of_megatron_fsdp_is_priced_by_its_profile() -> None:
    fsdp = (
        "--use-megatron-fsdp --ckpt-format fsdp_dtensor --use-distributed-optimizer "
        "--data-parallel-sharding-strategy optim_grads_params"
    )
    text = LLAMA.format(fsdp).replace("--pipeline-model-parallel-size 4 ", "")
    found, reading = checked(text)
    assert (found.runtime, found.starts) == ("megatron-fsdp", True)
    cluster = ff.load_cluster("h100-sxm", gpus=64)
    ours = ff.estimate(reading.model, cluster, reading.work, reading.layout, runtime="megatron-fsdp")
    assert found.estimate.step == ours.step
    assert check(reading, cluster, "megatron@0.14", top=0).runtime == "megatron-fsdp@0.14"
    assert checked(LLAMA.format("--use-distributed-optimizer"))[0].runtime == "megatron"
