"""Every rule on options, kept and broken by a launch of its own, and the checks that need no layout."""

from __future__ import annotations

import pytest

from fivefold.errors import FivefoldError
from fivefold.interop.megatron.layout_options import layout_options
from fivefold.interop.megatron.read import Asked, read_source
from fivefold.interop.megatron.rules import RULES

MOE = "--num-experts 8 --expert-model-parallel-size 2 "
MAX1 = "export CUDA_DEVICE_MAX_CONNECTIONS=1"
FSDP2 = "--use-torch-fsdp2 --no-gradient-accumulation-fusion --untie-embeddings-and-output-weights "
FSDP = "--use-megatron-fsdp --ckpt-format fsdp_dtensor --data-parallel-sharding-strategy "

# Rule -> (options that break it, options next to them that keep it). A pair may add what stands before the launch.
CASES: dict[str, tuple[object, object]] = {
    "one-precision": ("--fp16", ""),
    "one-scaling": ("--fp4-format e2m1 --fp8-format hybrid", "--fp8-format hybrid"),
    "mtp-positions": ("--mtp-num-layers 1", "--mtp-num-layers 1 --position-embedding-type rope"),
    "no-positions": ("--no-position-embedding", "--no-position-embedding --use-rotary-position-embeddings"),
    "one-data-source": ("--mock-data --data-path x", "--mock-data"),
    "deterministic": ("--deterministic-mode --use-flash-attn", "--deterministic-mode"),
    "replication": ("--replication", "--replication --replication-jump 2"),
    "main-params": ("--load-main-params-from-ckpt", "--load-main-params-from-ckpt --no-load-optim"),
    "max-position": ("--max-position-embeddings 1024", "--max-position-embeddings 4096"),
    "heads-kv": ("--group-query-attention --num-query-groups 3", "--group-query-attention --num-query-groups 4"),
    "mla-excludes-gqa": ("--multi-latent-attention --group-query-attention", "--multi-latent-attention"),
    "activation": ("--swiglu --squared-relu", "--swiglu"),
    "connections": (
        ("--tensor-model-parallel-size 2", "export CUDA_DEVICE_MAX_CONNECTIONS=8"),
        ("--tensor-model-parallel-size 2", MAX1),
    ),
    "fsdp-connections": ((FSDP2, MAX1), ("", MAX1)),
    "fsdp2-pipeline": (FSDP2 + "--pipeline-model-parallel-size 2", "--pipeline-model-parallel-size 2"),
    "fsdp2-experts": (FSDP2 + MOE, MOE),
    "fsdp2-optimizer": (FSDP2 + "--use-distributed-optimizer", "--use-distributed-optimizer"),
    "fsdp2-fusion": ("--use-torch-fsdp2 --untie-embeddings-and-output-weights", ""),
    "fsdp2-tied": ("--use-torch-fsdp2 --no-gradient-accumulation-fusion", ""),
    "fsdp2-fp16": (FSDP2 + "--fp16", ""),
    "fsdp2-checkpoint": (FSDP2 + "--ckpt-format torch", ""),
    "mfsdp-overlap": (FSDP + "optim_grads", FSDP + "optim_grads --overlap-grad-reduce"),
    "mfsdp-checkpoint": ("--use-megatron-fsdp", ""),
    "one-chunk-option": (
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2 "
        "--num-virtual-stages-per-pipeline-rank 2",
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2",
    ),
    "chunks-of-uneven": (
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2 "
        "--decoder-first-pipeline-num-layers 4",
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
        "--decoder-first-pipeline-num-layers 4",
    ),
    "chunk-divides": (
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3",
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2",
    ),
    "chunks-without-overlap": (
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2 --no-overlap-p2p-communication",
        "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 1 --no-overlap-p2p-communication",
    ),
    "chunk-group": (
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2 "
        "--microbatch-group-size-per-virtual-pipeline-stage 1",
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2 "
        "--microbatch-group-size-per-virtual-pipeline-stage 4",
    ),
    "full-needs-method": (
        "--recompute-granularity full --recompute-num-layers 1",
        "--recompute-granularity full --recompute-num-layers 1 --recompute-method uniform",
    ),
    "selective-has-no-method": ("--recompute-activations --recompute-method block", "--recompute-activations"),
    "distributed-checkpoints": (
        "--distribute-saved-activations",
        "--distribute-saved-activations --tensor-model-parallel-size 2 --recompute-granularity full "
        "--recompute-num-layers 1 --recompute-method uniform",
    ),
    "ep-fp16": (MOE + "--fp16", MOE),
    "grouped-gemm": (("--moe-grouped-gemm --fp16", "", "--bf16"), "--moe-grouped-gemm"),
    "moe-act-grouped": (
        MOE + "--recompute-granularity selective --recompute-modules moe_act",
        MOE + "--recompute-granularity selective --recompute-modules moe_act --moe-grouped-gemm",
    ),
    "one-expert-softmax": (MOE + "--moe-router-topk 1", MOE + "--moe-router-topk 1 --moe-router-pre-softmax"),
    "ep-overlap-dispatcher": (
        MOE + "--overlap-moe-expert-parallel-comm",
        MOE + "--overlap-moe-expert-parallel-comm --moe-token-dispatcher-type alltoall",
    ),
    "ep-overlap-shared": (
        MOE + "--overlap-moe-expert-parallel-comm --moe-shared-expert-overlap --moe-token-dispatcher-type alltoall",
        MOE + "--moe-shared-expert-overlap",
    ),
    "deepep-flex": (MOE + "--moe-enable-deepep", MOE + "--moe-enable-deepep --moe-token-dispatcher-type flex"),
    "fp8-gather": ("--fp8-format hybrid --fp8-param-gather", "--fp8-param-gather --use-distributed-optimizer"),
    "offload-precision": ("--optimizer-cpu-offload", "--optimizer-cpu-offload --use-precision-aware-optimizer"),
    "muon-checkpoint": ("--optimizer muon --ckpt-format zarr", "--optimizer muon"),
    "hierarchical-cp": (
        "--context-parallel-size 4 --hierarchical-context-parallel-sizes 2 4",
        "--context-parallel-size 4 --hierarchical-context-parallel-sizes 2 2",
    ),
    "graphs-recompute": (
        "--cuda-graph-impl local --recompute-granularity full --recompute-num-layers 1 --recompute-method uniform",
        "--cuda-graph-impl local",
    ),
    "graphs-allocator": (
        ("--enable-cuda-graph", "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"),
        ("", "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"),
    ),
    "one-length": ("--train-iters 5 --train-samples 5", "--train-iters 5"),
    "ramp-by-samples": ("--train-iters 5 --rampup-batch-size 8 8 100", "--train-samples 5 --rampup-batch-size 8 8 100"),
    "decay-by-iterations": ("--train-iters 5 --lr-decay-samples 3", "--train-iters 5 --lr-decay-iters 3"),
    "decay-by-samples": ("--train-samples 5 --lr-decay-iters 3", "--train-samples 5 --lr-decay-samples 3"),
    "warmup-by-iterations": ("--train-iters 5 --lr-warmup-samples 3", "--train-iters 5 --lr-warmup-iters 3"),
    "warmup-by-samples": ("--train-samples 5 --lr-warmup-iters 3", "--train-samples 5 --lr-warmup-samples 3"),
    "save-interval": ("--save /x", "--save /x --save-interval 5"),
    "learning-rates": ("--lr 1e-4 --min-lr 2e-4", "--lr 1e-4 --min-lr 1e-5"),
    "eval-batch": ("--eval-global-batch-size 12", "--eval-global-batch-size 16"),
}


def ids(read, case: object) -> set[str]:
    """Broken rules of a launch; one that is refused afterwards broke none of them."""
    options, before, without = (
        case
        if isinstance(case, tuple) and len(case) == 3
        else (*case, "")
        if isinstance(case, tuple)
        else (case, "", "")
    )
    try:
        return {each.id for each in read(options, before=before, without=without).violations}
    except FivefoldError as error:
        assert error.code == "not-modelled", error.message
        return set()


@pytest.mark.parametrize("rule", [rule.id for rule in RULES if rule.id != "max-position-given"])
def test_every_rule_is_kept_and_broken(read, rule: str) -> None:
    breaking, keeping = CASES[rule]
    assert f"megatron-{rule}" in ids(read, breaking)
    assert f"megatron-{rule}" not in ids(read, keeping)


def test_max_position_has_to_be_given(read) -> None:
    found = read(without="--max-position-embeddings").violations
    assert [each.id for each in found] == ["megatron-max-position-given"]


def test_every_violation_names_option_and_source(read) -> None:
    for breaking, _ in CASES.values():
        options = breaking if isinstance(breaking, str) else breaking[0]  # type: ignore[index]
        try:
            found = read(options).violations
        except FivefoldError:
            continue
        for each in found:
            assert each.option.startswith("--") or each.option.isupper()
            assert "Megatron" in each.source and each.message.endswith((".", ")"))


def test_connections_are_free_on_blackwell(read) -> None:
    options, before = "--tensor-model-parallel-size 2", "export CUDA_DEVICE_MAX_CONNECTIONS=32"
    assert read(options, before=before).violations
    assert not read(options, before=before, gpu="b200").violations
    assert any(each.field == "CUDA_DEVICE_MAX_CONNECTIONS" for each in read(options).assumed)


def test_groups_that_are_ignored_are_silent_and_said(read) -> None:
    (found,) = read("--num-query-groups 4").violations
    assert found.silent and "16 key/value heads" in found.message


@pytest.mark.parametrize(
    "options",
    ["--use-megatron-fsdp --ckpt-format fsdp_dtensor", FSDP + "optim", "--data-parallel-sharding-strategy optim", FSDP2,
     "--spec a b", "--hybrid-override-pattern M-M*", "--skip-train", "--encoder-num-layers 3",
     "--checkpoint-activations"],
)  # fmt: skip
def test_another_kind_of_run_is_refused_with_its_line(read, options: str) -> None:
    with pytest.raises(FivefoldError) as caught:
        read(options)
    assert caught.value.code == "not-modelled"
    assert "x.sh:2" in caught.value.message


def test_a_strategy_of_sharding_that_is_none_is_refused_without_fsdp_too(read) -> None:
    (found,) = read("--data-parallel-sharding-strategy all").violations
    assert found.option == "--data-parallel-sharding-strategy" and "optim_grads" in found.legal


def test_where_a_rule_is_broken_the_figures_say_what_they_leave_out(read) -> None:
    found = read("--use-torch-fsdp2")
    assert found.violations
    assert any(note.startswith("--use-torch-fsdp2 at x.sh:2") and "without it" in note for note in found.notes)


def test_experts_keep_the_dense_tp_unless_told(read) -> None:
    options = MOE + "--tensor-model-parallel-size 2 --sequence-parallel "
    found = read(options, before=MAX1)
    assert found.layout.etp == 2
    assert "--expert-tensor-parallel-size" in {each.field for each in found.assumed}
    assert read(options + "--expert-tensor-parallel-size 1", before=MAX1).layout.etp == 1
    assert read("--tensor-model-parallel-size 2", before=MAX1).layout.etp == 1  # no experts to split


def test_quantised_recipes(read) -> None:
    assert read("--fp8-format hybrid").work.precision == "fp8"
    assert read("--fp8-format e4m3 --fp8-recipe mxfp8").work.precision == "mxfp8"
    assert read("--fp4-format e2m1").work.precision == "nvfp4"
    assert read("--attention-backend unfused").work.attention == "unfused"
    assert [read(words).work.dropout for words in ("--hidden-dropout 0.1", "--hidden-dropout 0.0")] == [True, False]
    assert read("--grad-reduce-in-bf16").work.grad_dtype == "bf16"


def test_what_the_figures_leave_out_is_said(read) -> None:
    notes = " ".join(read("--enable-cuda-graph --optimizer-cpu-offload --use-precision-aware-optimizer").notes)
    assert "--enable-cuda-graph" in notes and "--use-precision-aware-optimizer" in notes
    offloaded = read("--optimizer-cpu-offload --use-precision-aware-optimizer --optimizer-offload-fraction 0.5")
    assert offloaded.work.offload.optimizer == 0.5 and "--overlap-cpu-optimizer-d2h-h2d" in " ".join(offloaded.notes)


@pytest.mark.parametrize(("strategy", "zero"), [("optim_grads", 2), ("optim_grads_params", 3)])
def test_megatron_fsdp_is_read_and_written(read, strategy: str, zero: int) -> None:
    """Where it shards everything it overlaps whatever is asked for; a change to less has to ask."""
    found = read(FSDP + strategy + " --overlap-grad-reduce --use-distributed-optimizer")
    assert (found.runtime, found.layout.zero, found.violations) == ("megatron-fsdp", zero, [])
    assert read(f"--use-distributed-optimizer {FSDP}{strategy}").layout.overlap.param is (zero == 3)
    options = layout_options(found.layout, 8, False)
    words = " ".join(name if value is True else f"{name} {value}" for name, value in options.items())
    again = read(f"{words} --ckpt-format fsdp_dtensor")
    assert again.layout == found.layout and again.runtime == found.runtime
    assert ("--overlap-grad-reduce" in options) == (zero == 2)


def test_megatron_fsdp_by_its_older_name_and_in_a_recipe(read) -> None:
    assert read("--use-custom-fsdp --data-parallel-sharding-strategy optim_grads_params").layout.zero == 3
    recipe = (
        "torchrun --nproc_per_node 8 pretrain.py model.tensor_model_parallel_size=1 ddp.use_megatron_fsdp=true "
        "model.pipeline_model_parallel_size=1 train.micro_batch_size=1 train.global_batch_size=32 "
        "model.seq_length=2048 ddp.data_parallel_sharding_strategy=optim_grads_params"
    )
    found = read_source(recipe, "x.sh", None, Asked(model="llama-3-8b"))
    assert (found.style, found.runtime, found.layout.zero) == ("bridge", "megatron-fsdp", 3)
