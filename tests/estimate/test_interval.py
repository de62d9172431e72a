"""Intervals: what makes a step less sure, against shares found by moving one constant, and between GPUs."""

from __future__ import annotations

from math import hypot

import numpy as np
import pytest
from msgspec.structs import replace

from fivefold.cluster import Cluster, load_cluster, load_curve_of
from fivefold.cluster.calibration import Calibration, Constant, Fit
from fivefold.cluster.curve import curves, load_curve
from fivefold.estimate import Estimate, Kernel, Problem, estimate
from fivefold.estimate.calibrated import apply
from fivefold.estimate.doubt import WIDTHS, doubt, shares
from fivefold.estimate.price import OWNERS
from fivefold.layout import Columns, Layout, Lora, Overlap, Recompute, Workload
from fivefold.model import load_model
from fivefold.runtime import PROFILES, load_runtime

ONE = np.arange(1)
LLAMA = load_model("llama-3-8b")
WORK = Workload(seq_len=8192, global_batch=64)


def kernel_of(
    layout: Layout, *, runtime: str = "megatron", cluster: Cluster | None = None, work: Workload = WORK
) -> Kernel:
    cluster = cluster or load_cluster("h100-sxm", gpus=16)
    columns = Columns.from_layouts([layout], cluster.gpus, work)
    return Kernel(Problem(LLAMA, cluster, work, load_runtime(runtime)), columns)


def shares_of(kernel: Kernel) -> dict[str, float]:
    return {kind: float(part[0]) for kind, part in shares(kernel, ONE, kernel.step_seconds(ONE)).items()}


def spread_of(found: Estimate) -> float:
    assert found.step is not None
    return found.step.seconds.high / found.step.seconds.value - 1


LAYOUTS = [
    ("megatron", Layout(tp=2, micro_batch=1)),
    ("megatron", Layout(tp=4, pp=4, vpp=2, micro_batch=1, recompute=Recompute(kind="full"))),
    ("nanotron", Layout(tp=8, micro_batch=1, zero=1)),
]


@pytest.mark.parametrize(("runtime", "layout"), LAYOUTS)
def test_the_share_of_memory_is_what_a_slower_memory_costs(runtime: str, layout: Layout) -> None:
    """Fewer bytes a second for elementwise operations alone: the step grows by their share, but for their launches."""
    cluster = load_cluster("h100-sxm", gpus=16)
    slower = load_curve_of(cluster).streaming_efficiency / 1.01
    plain = kernel_of(layout, runtime=runtime)
    moved = kernel_of(layout, runtime=runtime, cluster=replace(cluster, compute={"streaming_efficiency": slower}))
    growth = float(moved.step_seconds(ONE)[0] / plain.step_seconds(ONE)[0] - 1) / 0.01
    assert shares_of(plain)["memory"] == pytest.approx(growth, rel=0.15)


@pytest.mark.parametrize(("runtime", "layout"), [LAYOUTS[0], LAYOUTS[2]])
def test_the_share_of_communication_is_what_slower_links_cost(runtime: str, layout: Layout) -> None:
    """A little slower, because what matrix products or backward hide grows with the links' slowness too."""
    plain = kernel_of(layout, runtime=runtime)
    links: dict[Constant, float] = {"scale_up": 1.01, "network": 1.01}
    cluster, profile = apply(load_cluster("h100-sxm", gpus=16), load_runtime(runtime), links)
    moved = Kernel(Problem(LLAMA, cluster, WORK, profile), plain.columns)
    growth = float(moved.step_seconds(ONE)[0] / plain.step_seconds(ONE)[0] - 1) / 0.01
    assert shares_of(plain)["communication"] == pytest.approx(growth, rel=0.5, abs=0.02)


def test_the_update_belongs_to_memory() -> None:
    """Where hardly anything is computed the update is most of the step, and a slower memory costs its share."""
    cluster, work = load_cluster("h100-sxm", gpus=16), Workload(seq_len=512, global_batch=16)
    slower = replace(cluster, compute={"streaming_efficiency": load_curve_of(cluster).streaming_efficiency / 1.01})
    layout = Layout(micro_batch=1, zero=0, overlap=Overlap(grad=False, param=False))  # or slower passes hide more
    plain, moved = (kernel_of(layout, cluster=each, work=work) for each in (cluster, slower))
    seconds = plain.step_seconds(ONE)[0]
    assert plain.optimizer_seconds(ONE)[0] > 0.2 * seconds
    growth = float(moved.step_seconds(ONE)[0] / seconds - 1) / 0.01
    assert shares_of(plain)["memory"] == pytest.approx(growth, rel=0.05)


@pytest.mark.parametrize(
    ("runtime", "layout"),
    [
        ("megatron", Layout(tp=8, micro_batch=1, recompute=Recompute(kind="full"))),
        ("megatron", Layout(tp=2, micro_batch=1, overlap=Overlap(grad=False, param=False))),
        ("torchtitan", Layout(tp=2, micro_batch=1, zero=3)),
    ],
)
def test_the_share_of_communication_is_that_of_its_owners(runtime: str, layout: Layout) -> None:
    """Of the step as it is told, without a pipeline: collectives, those that recomputation repeats, and reductions."""
    told = estimate(LLAMA, load_cluster("h100-sxm", gpus=16), WORK, layout, runtime=runtime).step
    assert told is not None
    owners = sum(told.breakdown_s[name] for name in ("tp", "cp", "ep", "dp"))
    assert owners > 0.02 * told.seconds.value
    found = shares_of(kernel_of(layout, runtime=runtime))["communication"]
    assert found == pytest.approx(owners / told.seconds.value, rel=1e-6)


def test_the_doubt_is_the_widths_times_the_shares() -> None:
    kernel = kernel_of(Layout(tp=2, micro_batch=1))
    seconds = kernel.step_seconds(ONE)
    found = shares_of(kernel)
    assert set(found) == set(WIDTHS)
    assert 0 < found["memory"] < 0.4
    assert sum(found.values()) < 1
    by_hand = sum(WIDTHS[kind] * share for kind, share in found.items())
    assert float(doubt(kernel, ONE, seconds)[0]) == pytest.approx(by_hand)
    told = estimate(LLAMA, load_cluster("h100-sxm", gpus=16), WORK, Layout(tp=2, micro_batch=1))
    assert spread_of(told) == pytest.approx(hypot(load_runtime("megatron").time_spread, by_hand), rel=1e-6)


def test_rows_are_priced_as_they_are_alone() -> None:
    layouts = [Layout(tp=1, micro_batch=1), Layout(tp=2, pp=2, micro_batch=2), Layout(tp=8, micro_batch=1)]
    columns = Columns.from_layouts(layouts, 16, WORK)
    kernel = Kernel(Problem(LLAMA, load_cluster("h100-sxm", gpus=16), WORK, load_runtime("megatron")), columns)
    rows = np.arange(3)
    together = doubt(kernel, rows, kernel.step_seconds(rows))
    alone = [kernel_of(each) for each in layouts]
    np.testing.assert_allclose(
        together, [float(doubt(each, ONE, each.step_seconds(ONE))[0]) for each in alone], rtol=1e-12
    )


def test_a_step_that_communicates_more_is_less_sure() -> None:
    cluster = load_cluster("h100-sxm", gpus=16)
    inside = estimate(LLAMA, cluster, WORK, Layout(micro_batch=1))
    across = estimate(LLAMA, cluster, WORK, Layout(tp=8, cp=2, micro_batch=1))
    assert spread_of(across) > spread_of(inside) + 0.01


def test_a_step_that_waits_for_its_launches_is_less_sure_than_the_rest_of_it() -> None:
    small = replace(LLAMA, hidden=512)
    work = Workload(seq_len=1024, global_batch=8)
    cluster = load_cluster("h100-sxm", gpus=8)
    profile = load_runtime("megatron")
    columns = Columns.from_layouts([Layout(micro_batch=1)], 8, work)
    waits = Kernel(Problem(small, cluster, work, profile), columns)
    free = Kernel(Problem(small, cluster, work, replace(profile, launch_host_s=0.0)), columns)
    assert shares_of(waits)["host"] > 0.3
    assert shares_of(free)["host"] == 0
    lost = 1 - float(free.step_seconds(ONE)[0] / waits.step_seconds(ONE)[0])
    assert shares_of(waits)["host"] == pytest.approx(lost, rel=0.05)


def test_casts_and_accumulators_are_bound_by_memory() -> None:
    """Quantising operands, and adding gradients in a kernel of its own, move bytes and belong to memory."""
    layout = Layout(micro_batch=1)
    plain, narrow = (kernel_of(layout, work=replace(WORK, precision=precision)) for precision in ("bf16", "fp8"))
    assert shares_of(narrow)["memory"] > shares_of(plain)["memory"] + 0.02
    columns = plain.columns
    runtime = replace(load_runtime("megatron"), wgrad_bytes=12)
    apart = Kernel(Problem(LLAMA, load_cluster("h100-sxm", gpus=16), WORK, runtime), columns)
    assert shares_of(apart)["memory"] > shares_of(plain)["memory"] + 0.02
    # What they take off the owner of matrix products never leaves it negative, adapters included.
    lora = Workload(seq_len=2048, global_batch=16, lora=Lora(rank=8))
    frozen = Kernel(Problem(LLAMA, load_cluster("h100-sxm", gpus=16), lora, runtime), columns)
    for cost in (*apart.costs, *frozen.costs, *narrow.costs):
        assert (cost.forward[OWNERS.index("compute")] >= -1e-12).all()
        assert (cost.backward[OWNERS.index("compute")] >= -1e-12).all()


def test_a_gpu_known_from_its_datasheet_has_a_wider_interval_than_a_measured_one() -> None:
    measured = [name for name in curves() if load_curve(name).in_runs]
    assert {"h100-sxm", "a100-80g-sxm", "b200"} <= set(measured)
    layout, work = Layout(micro_batch=1), Workload(seq_len=4096, global_batch=64)
    widest = max(
        spread_of(estimate(LLAMA, load_cluster(name, gpus=8), work, layout)) for name in ("h100-sxm", "a100-80g-sxm")
    )
    for name in ("h800-sxm", "gh200", "h20-sxm", "a800-80g-sxm", "b300", "gb300-nvl72", "mi300x", "v100-sxm-32g"):
        assert not load_curve(name).in_runs
        work = replace(work, precision="fp16" if name.startswith("v100") else "bf16")
        assert spread_of(estimate(LLAMA, load_cluster(name, gpus=8), work, layout)) > widest, name


@pytest.mark.parametrize(
    ("derived", "base"), [("gh200", "h100-sxm"), ("h800-sxm", "h100-sxm"), ("a800-80g-sxm", "a100-80g-sxm")]
)
def test_runs_on_one_gpu_do_not_speak_for_another_of_its_chip(derived: str, base: str) -> None:
    assert load_curve(base).in_runs
    assert not load_curve(derived).in_runs
    assert load_curve(derived).efficiency == load_curve(base).efficiency


def test_a_mixture_is_less_sure_than_a_dense_model_and_the_trainer_than_any() -> None:
    cluster, layout = load_cluster("h100-sxm", gpus=8), Layout(micro_batch=1)
    mixture = spread_of(estimate(load_model("mixtral-8x7b"), cluster, WORK, replace(layout, ep=8)))
    assert mixture > spread_of(estimate(LLAMA, cluster, WORK, layout)) + 0.1
    others = [profile.time_spread for profile in PROFILES if profile.name != "fivefold"]
    assert load_runtime("fivefold").time_spread > max(others)


def test_runs_of_mixtures_speak_for_mixtures_and_dense_ones_do_not() -> None:
    """Where some run was of one, what is left of all errors is the same share; where none was, 17% come beside."""
    model, cluster, layout = load_model("mixtral-8x7b"), load_cluster("h100-sxm", gpus=8), Layout(micro_batch=1, ep=8)
    plain, known, unknown = (
        spread_of(estimate(model, replace(cluster, calibration=each), WORK, layout))
        for each in (
            None,
            *(
                Calibration(
                    fits=(
                        Fit(gpu="h100-sxm", runtime="megatron", runs=9, factors={}, spread=1.0, scale=0.5, experts=on),
                    )
                )
                for on in (True, False)
            ),
        )
    )
    assert known == pytest.approx(0.5 * plain, rel=1e-9)
    assert unknown == pytest.approx(hypot(0.5 * (plain**2 - 0.17**2) ** 0.5, 0.17), rel=1e-9)


def test_factors_on_links_are_of_the_network_where_there_is_one_and_of_all_their_rates() -> None:
    box = load_cluster("a100-80g-pcie-nvlink", gpus=16)
    inner, outer = (apply(box, load_runtime("megatron"), {name: 2.0})[0].links for name in ("scale_up", "network"))
    assert [was.bandwidth_per_s / now.bandwidth_per_s for was, now in zip(box.links, inner, strict=True)] == [
        *[2] * (len(box.links) - 1),
        1,
    ]
    assert [was.bandwidth_per_s / now.bandwidth_per_s for was, now in zip(box.links, outer, strict=True)] == [
        *[1] * (len(box.links) - 1),
        2,
    ]
    wired = replace(box, links=(replace(box.links[-1], peer_bandwidth_per_s=1e9),))
    alone = apply(wired, load_runtime("megatron"), {"scale_up": 2.0, "network": 8.0})[0].links[0]
    assert (alone.bandwidth_per_s, alone.peer_bandwidth_per_s) == (box.links[-1].bandwidth_per_s / 2, 5e8)
