"""LoRA and QLoRA: counts that PEFT prints for well-known models, bytes by hand, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from fivefold.cluster import collective_seconds, load_cluster, place
from fivefold.errors import FivefoldError
from fivefold.estimate import Estimate, Kernel, Problem, estimate
from fivefold.estimate.adapters import NF4_BYTES, count_adapters
from fivefold.estimate.planfile import load_plan
from fivefold.layout import Columns, Layout, Lora, Offload, Overlap, Recompute, Workload
from fivefold.model import load_model
from fivefold.runtime import load_runtime

ALL = ("q", "k", "v", "o", "gate", "up", "down")
WORK = Workload(seq_len=4096, global_batch=32, trained="adapters", lora=Lora(rank=16))


def priced(
    model: str = "llama-3-8b", runtime: str = "megatron", gpus: int = 8, work: Workload = WORK, **how
) -> Estimate:
    return estimate(load_model(model), load_cluster("h100-sxm", gpus=gpus), work, Layout(**how), runtime)


@pytest.mark.parametrize(
    ("model", "rank", "targets", "printed"),
    [
        ("llama-3-8b", 16, ALL, 41_943_040),
        ("llama-3-70b", 16, ALL, 207_093_760),
        ("mistral-7b", 16, ALL, 41_943_040),
        ("llama-2-7b", 8, ("q", "v"), 4_194_304),
        ("llama-2-7b", 64, ALL, 159_907_840),
    ],
)
def test_counts_that_peft_prints(model: str, rank: int, targets: tuple[str, ...], printed: int) -> None:
    lora = Lora(rank=rank, targets=targets)
    assert count_adapters(load_model(model), lora, load_runtime("fsdp"))[0] == printed


@pytest.mark.parametrize("runtime", ["megatron", "fsdp"])
@pytest.mark.parametrize("model", ["llama-3-8b", "mixtral-8x7b", "qwen3-8b", "gpt2"])
@pytest.mark.parametrize("targets", [ALL, ("q",), ("gate", "down"), ("k", "v", "o")])
def test_the_ledgers_hold_what_is_counted(runtime: str, model: str, targets: tuple[str, ...]) -> None:
    """The closed count of the whole model beside the rows of one rank without TP."""
    spec, lora = load_model(model), Lora(rank=8, targets=targets)
    work = replace(WORK, seq_len=512, lora=lora)
    problem = Problem(spec, load_cluster("h100-sxm", gpus=8), work, load_runtime(runtime))
    kernel = Kernel(problem, Columns.from_layouts([Layout(zero=0)], 8, work))
    dense, expert = kernel.adapter_parameters(np.arange(1))
    assert float(dense.sum() + expert.sum()) == count_adapters(spec, lora, problem.runtime)[0]


def test_states_are_those_of_the_adapters() -> None:
    full, lora = priced(work=replace(WORK, trained="all", lora=None)), priced()
    assert full.memory and lora.memory
    count = lora.params.trained or 0
    parts, whole = lora.memory.stages[0].breakdown, full.memory.stages[0].breakdown
    assert parts.gradients == pytest.approx(4 * count, abs=1)
    assert parts.master == pytest.approx(4 * count / 8, abs=1)
    assert parts.optimizer == pytest.approx(8 * count / 8, abs=1)
    assert parts.weights == pytest.approx(whole.weights + 2 * count, abs=2)
    assert parts.activations > whole.activations


def test_frozen_layers_compute_no_weight_gradients() -> None:
    full, lora = priced(work=replace(WORK, trained="all", lora=None), micro_batch=4), priced(micro_batch=4)
    assert full.step and lora.step
    assert 0.65 < lora.step.breakdown_s.compute / full.step.breakdown_s.compute < 1
    # Two thirds of the layers' work, all of attention's, and the adapters' own.
    linear = 6 * (full.params.total - 128_256 * 4096)
    attention = full.flops_per_token.noncausal - linear
    expected = linear * 2 / 3 + attention + 6 * (lora.params.trained or 0)
    assert lora.flops_per_token.noncausal == pytest.approx(expected, rel=1e-3)


def test_a_larger_rank_costs_more() -> None:
    small, large = priced(), priced(work=replace(WORK, lora=Lora(rank=256)))
    assert small.step and large.step and small.memory and large.memory
    assert large.step.seconds.value > small.step.seconds.value
    assert large.memory.peak_bytes > small.memory.peak_bytes


def test_four_bit_weights_by_hand() -> None:
    """Llama 3 70B over four ranks: matrices of blocks in 4 bits, embedding, head and norms in 16."""
    work = replace(WORK, seq_len=2048, global_batch=4, base_precision="nf4")
    how = {"model": "llama-3-70b", "runtime": "fsdp", "gpus": 4, "zero": 3, "recompute": Recompute(kind="full")}
    found = priced(work=work, **how)
    assert found.memory and found.fits
    others = 2 * 128_256 * 8192 + 161 * 8192
    by_hand = (NF4_BYTES * (70_553_706_496 - others) + 2 * others) / 4
    assert found.memory.stages[0].breakdown.weights == pytest.approx(by_hand, rel=1e-6)
    sixteen = priced(work=replace(work, base_precision="compute"), **how)
    assert sixteen.step and found.step and sixteen.memory
    assert found.step.breakdown_s.compute > sixteen.step.breakdown_s.compute  # unpacking is not free
    assert found.memory.peak_bytes < sixteen.memory.peak_bytes / 2


def test_the_guide_s_four_24_gb_gpus() -> None:
    """bitsandbytes issue 1252 quotes a guide: 70B with QLoRA and offloading takes 22 GB on each of four 24 GB GPUs."""
    work = Workload(
        seq_len=3072, global_batch=4, trained="adapters", lora=Lora(rank=16), base_precision="nf4",
        offload=Offload(optimizer=1, parameters=1),
    )  # fmt: skip
    cluster = load_cluster("rtx-4090", gpus=4)
    layout = Layout(zero=3, recompute=Recompute(kind="full"))
    there = estimate(load_model("llama-3-70b"), cluster, work, layout, "fsdp")
    assert there.memory and there.fits and 10e9 < there.memory.reserved_bytes < 24e9
    assert there.memory.host_bytes and 36e9 < there.memory.host_bytes < 127e9


@pytest.mark.parametrize(
    ("runtime", "model", "changes", "rule"),
    [
        ("nanotron", "llama-3-8b", {}, "lora-runtime"),
        ("fivefold", "llama-3-8b", {}, "lora-runtime"),
        ("megatron", "llama-3-8b", {"base_precision": "nf4"}, "base-precision-runtime"),
        ("megatron", "deepseek-v3", {}, "lora-targets-attention"),
        ("megatron", "llama-3-8b", {"optimizer": "muon"}, "lora-optimizer"),
    ],
)
def test_what_no_framework_does_is_refused(runtime: str, model: str, changes: dict, rule: str) -> None:
    found = priced(model, runtime, work=replace(WORK, **changes))
    assert rule in {each.id for each in found.violations}


@pytest.mark.parametrize(
    "changes",
    [
        {"trained": "all"},
        {"lora": Lora(rank=0)},
        {"lora": Lora(rank=4, targets=("w",))},
        {"lora": Lora(rank=4, targets=())},
    ],
)
def test_contradictions_are_bad_input(changes: dict) -> None:
    with pytest.raises(FivefoldError):
        priced(work=replace(WORK, **changes))


def test_a_plan_file_keeps_it(tmp_path: Path) -> None:
    one = priced(tp=2)
    one.save(tmp_path / "plan.toml")
    again = load_plan(tmp_path / "plan.toml")
    assert again.workload == WORK and again.estimate().step == one.step


def test_replicas_of_shards_sum_the_adapters_parts_too() -> None:
    """Two nodes of eight, a shard of the model on each: inside a node the whole gradient, across them an eighth."""
    cluster, work = load_cluster("h100-sxm", gpus=16), replace(WORK, lora=Lora(rank=16))
    problem = Problem(load_model("llama-3-8b"), cluster, work, load_runtime("fsdp"))
    layout = Layout(zero=3, dp_replicate=2, overlap=Overlap(grad=False, param=False))
    kernel = Kernel(problem, Columns.from_layouts([layout], 16, work))
    size = kernel.trained_grad_bytes * 41_943_040
    inside, across = (
        float(collective_seconds(cluster, "all_reduce", part, place(cluster, n, stride))[0])
        for part, n, stride in ((size, 8, 1), (size / 8, 2, 8))
    )
    assert kernel.adapter_reduction_seconds(np.arange(1))[0] == pytest.approx(inside + across, rel=1e-9)


def test_all_buckets_but_the_last_of_the_adapters_gradients_are_reduced_beside_backward() -> None:
    """207M adapters, in buckets of 40M."""
    cluster, work = load_cluster("h100-sxm", gpus=16), replace(WORK, lora=Lora(rank=16))
    problem = Problem(load_model("llama-3-70b"), cluster, work, load_runtime("megatron"))
    kernel = Kernel(problem, Columns.from_layouts([Layout()], 16, work))
    bucket = kernel.trained_grad_bytes * 40e6
    alone = float(collective_seconds(cluster, "all_reduce", bucket, place(cluster, 16, 1))[0])
    assert kernel.adapter_reduction_seconds(np.arange(1))[0] == pytest.approx(alone, rel=1e-9)
