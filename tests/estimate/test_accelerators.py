"""Frameworks and accelerators: what certainly does not run is said or refused, and everything else is priced."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from fivefold.cluster import clusters, gpus, load_cluster, load_gpu
from fivefold.cluster.curve import load_curve
from fivefold.estimate import estimate
from fivefold.layout import Layout, Workload
from fivefold.model import load_model
from fivefold.runtime.accelerators import caveat, why_not
from fivefold.search import plan

RUNTIMES = ("megatron", "nanotron", "torchtitan", "deepspeed", "fsdp", "fivefold")


def precision(name: str) -> Any:
    return "bf16" if "bf16" in load_gpu(name).peak_flops_per_s else "fp16"


def test_nothing_is_said_of_nvidia_and_amd():
    for name in gpus():
        vendor = load_gpu(name).vendor
        if vendor in ("nvidia", "amd"):
            assert all(caveat(runtime, vendor) is None for runtime in RUNTIMES), name


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_no_framework_of_these_runs_on_a_tpu(runtime):
    assert "XLA" in (why_not(runtime, "google") or "")


def test_ports_are_not_refused():
    for vendor in ("intel", "huawei"):
        megatron = "megatron"
        assert why_not(megatron, vendor) is None
        assert "port" in (caveat(megatron, vendor) or "")
        assert caveat("deepspeed", vendor) is None
        assert why_not("nanotron", vendor)


@pytest.mark.parametrize("name", [*gpus(), *sorted(set(clusters()) - set(gpus()))])
def test_every_system_prices_a_layout_and_says_what_it_takes_for_granted(name):
    cluster = load_cluster(name, gpus=16)
    work = Workload(seq_len=2048, global_batch=64, precision=precision(cluster.gpu.name))
    answer = estimate(load_model("llama-3-8b"), cluster, work, Layout(tp=2, pp=4))
    assert answer.valid and answer.step is not None and answer.memory is not None
    assert 0.05 < answer.step.mfu.causal < 0.8
    said = [row for row in answer.assumptions if row.field == "runtime.hardware"]
    assert bool(said) == (cluster.gpu.vendor not in ("nvidia", "amd"))
    listed = {row.field: row.source for row in answer.assumptions if row.field.startswith("cluster.")}
    assert set(listed) == {
        "cluster.host_work_ratio", "cluster.gpu_spread", "cluster.slower_beside_collectives"
    }  # fmt: skip
    assert all(listed.values())


def test_each_framework_runs_the_attention_kernel_that_its_libraries_ship_for_the_chip():
    """Transformer Engine's: cuDNN's on NVIDIA's chips, AMD's assembly on AMD's; plain PyTorch never sees the latter."""
    model, work = load_model("llama-3-8b"), Workload(seq_len=8192, global_batch=64)

    def slower_with(chip: str, runtime: str, kernel: str) -> float:
        """Step over step when one kernel of the chip takes twice as long."""
        rates = load_curve(chip).attention[kernel]
        halved = {side: [rate / 2 for rate in getattr(rates, side)] for side in ("forward", "backward")}
        plain, zero = load_cluster(chip, gpus=16), 3 if runtime == "torchtitan" else 1
        steps = [
            estimate(model, cluster, work, Layout(tp=2, zero=zero), runtime=runtime).step
            for cluster in (msgspec.structs.replace(plain, compute={"attention": {kernel: halved}}), plain)
        ]
        assert steps[0] and steps[1]
        return steps[0].seconds.value / steps[1].seconds.value

    assert slower_with("mi300x", "megatron", "aiter") > 1.05
    assert slower_with("mi300x", "megatron", "ck") == 1
    assert slower_with("mi300x", "torchtitan", "aiter") == 1
    assert slower_with("mi300x", "torchtitan", "ck") > 1.05
    assert slower_with("h100-sxm", "megatron", "cudnn") > 1.05


@pytest.mark.parametrize("name", gpus())
def test_plan_finds_a_layout_on_every_accelerator(name):
    cluster = load_cluster(name, gpus=16 if load_gpu(name).memory_bytes > 14e9 else 64)
    work = Workload(seq_len=2048, global_batch=64, precision=precision(name))
    pins = {"cp": [1], "tp": [1, 2], "recompute": ["none", "full"], "zero": [1]}
    found = plan(load_model("llama-3-8b"), cluster, work, top=1, pins=pins)
    assert found.plans and found.plans[0].fits
