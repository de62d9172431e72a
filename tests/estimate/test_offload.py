"""Offloading to the host: bytes and seconds by hand, reported cases of host memory, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from fivefold.cluster import Cluster, load_cluster
from fivefold.errors import FivefoldError
from fivefold.estimate import Estimate, estimate
from fivefold.estimate.planfile import load_plan
from fivefold.layout import Layout, Offload, Recompute, Workload
from fivefold.model import load_model
from fivefold.model.spec import ModelSpec
from fivefold.search import plan

MODEL = load_model("llama-3-8b")
WORK = Workload(seq_len=8192, global_batch=128)
ADAM_SHARE = 0.43
PROCESS = 6_000_000_000


def priced(offload: Offload | None = None, cluster: Cluster | None = None, **how) -> Estimate:
    model: ModelSpec = how.pop("model", MODEL)
    runtime, work = how.pop("runtime", "megatron"), how.pop("work", WORK)
    cluster = cluster or load_cluster("h100-sxm", gpus=8)
    return estimate(model, cluster, replace(work, offload=offload or Offload()), Layout(**how), runtime)


def test_optimizer_bytes_move_and_nothing_else() -> None:
    here, there = priced(tp=2), priced(Offload(optimizer=1), tp=2)
    assert here.memory and there.memory
    before, after = here.memory.stages[0].breakdown, there.memory.stages[0].breakdown
    assert after.master == after.optimizer == 0 and before.master > 0
    same = set(before) - {"master", "optimizer"}
    assert {name: before[name] for name in same} == {name: after[name] for name in same}
    # Four ranks share the states of one half of the model: 4 master, 8 moments, 4 of the gradient's copy.
    parameters = (before.master + before.optimizer) / 12
    assert there.memory.host_bytes == pytest.approx(8 * (16 * parameters + PROCESS), rel=1e-6)
    assert here.memory.host_bytes is None


def test_half_moves_half() -> None:
    here, half = priced(tp=2), priced(Offload(optimizer=0.5), tp=2)
    assert here.memory and half.memory
    assert half.memory.stages[0].breakdown.optimizer == pytest.approx(here.memory.stages[0].breakdown.optimizer / 2)


# What crosses the link after backward per parameter: fp32 gradients, or where these left before it 16-bit weights.
@pytest.mark.parametrize(("runtime", "crossing_bytes"), [("megatron", 4), ("deepspeed", 2)])
@pytest.mark.parametrize("memory_per_s", [100e9, 600e9, 1e15])
def test_update_seconds_are_the_slowest_of_three(memory_per_s: float, runtime: str, crossing_bytes: int) -> None:
    cluster = replace(load_cluster("h100-sxm", gpus=8), host_memory_bandwidth_per_s=memory_per_s)
    link = cluster.host_link_bandwidth_per_s
    here, there = (priced(each, cluster, runtime=runtime, tp=2) for each in (None, Offload(optimizer=1)))
    assert here.memory and there.step and link
    parameters = here.memory.stages[0].breakdown.master / 4
    update = parameters * 30 / (ADAM_SHARE * memory_per_s / 8)
    by_hand = max(update, crossing_bytes * parameters / link)
    assert there.step.breakdown_s.optimizer == pytest.approx(by_hand, rel=1e-4)


def test_a_job_on_half_a_node_has_the_whole_hosts_memory_between_its_gpus() -> None:
    slow = replace(load_cluster("h100-sxm", gpus=4, gpus_per_node=8), host_memory_bandwidth_per_s=100e9)
    here, there = (priced(each, slow, tp=2) for each in (None, Offload(optimizer=1)))
    assert here.memory and there.step
    parameters = here.memory.stages[0].breakdown.master / 4
    assert there.step.breakdown_s.optimizer == pytest.approx(parameters * 30 / (ADAM_SHARE * 100e9 / 4), rel=1e-4)


def test_activations_cross_the_link_beside_each_pass() -> None:
    cluster = load_cluster("h100-sxm", gpus=8)
    slow = replace(cluster, host_link_bandwidth_per_s=1e9)
    here, there = priced(cluster=cluster, tp=2), priced(Offload(activations=0.5), slow, tp=2)
    assert here.step and there.step and here.memory and there.memory
    saved = here.memory.stages[0].breakdown.activations
    assert there.memory.stages[0].breakdown.activations < 0.7 * saved
    exposed = there.step.breakdown_s.other - here.step.breakdown_s.other
    moved = (there.memory.host_bytes or 0) / 8 - PROCESS
    # Down once and up once a micro-batch, less what forward and backward hide.
    busy = here.step.breakdown_s.compute + here.step.breakdown_s.tp
    copies = 2 * 32 * moved / 1e9
    assert copies - busy <= exposed <= copies
    fast = replace(cluster, host_link_bandwidth_per_s=1e15)
    free = priced(Offload(activations=0.5), fast, tp=2)
    assert free.step and free.step.seconds.value == pytest.approx(here.step.seconds.value)


def test_the_owners_still_sum_to_the_step() -> None:
    for offload in (Offload(optimizer=1), Offload(activations=1), Offload(optimizer=0.3, activations=0.6)):
        one = priced(offload, tp=4)
        assert one.step and sum(one.step.breakdown_s.values()) == pytest.approx(one.step.seconds.value)


@pytest.mark.parametrize(
    ("name", "gpu", "host_gb", "fits"),
    [
        ("llama-2-70b", "a100-80gb", 1024, False),  # axolotl issue 1439: host memory exhausted
        ("llama-2-70b", "a100-80gb", 1500, True),
        ("llama-1-33b", "a100-40gb", 600, False),  # DeepSpeed issue 3448: out of host memory at 600, works at 750-800
        ("llama-1-33b", "a100-40gb", 775, True),
    ],
)
def test_reported_cases_of_zero_3_with_everything_offloaded(name: str, gpu: str, host_gb: int, fits: bool) -> None:
    if name == "llama-1-33b":
        base = load_model("llama-2-13b")
        run = base.runs[0]
        mixer, feed = run.block.mixer, run.block.feed
        block = replace(
            run.block,
            mixer=replace(mixer, heads=52, kv_heads=52, head_dim=128),
            feed=replace(feed, ffn=17_920),
        )
        model = replace(base, name=name, hidden=6656, runs=(type(run)(60, block),))
    else:
        model = load_model(name)
    cluster = replace(load_cluster(gpu, gpus=8), host_memory_bytes=host_gb * 10**9)
    found = priced(
        Offload(optimizer=1, parameters=1),
        cluster,
        model=model,
        work=Workload(seq_len=2048, global_batch=8),
        runtime="zero-3",
        zero=3,
        recompute=Recompute(kind="full"),
    )
    assert found.valid and found.fits is fits and found.memory
    assert found.memory.reserved_bytes < found.memory.capacity_bytes


@pytest.mark.parametrize(
    ("runtime", "offload", "layout", "rule"),
    [
        ("fivefold", Offload(optimizer=1), {}, "offload-optimizer-runtime"),
        ("megatron", Offload(parameters=1), {}, "offload-parameters-runtime"),
        ("torchtitan", Offload(optimizer=1), {"zero": 3}, "offload-fsdp-together"),
        ("zero-3", Offload(optimizer=0.5, parameters=1), {"zero": 3}, "offload-parameters-whole"),
        ("zero-3", Offload(optimizer=1, parameters=1), {"zero": 2}, "offload-parameters-zero"),
        ("megatron", Offload(optimizer=1), {"zero": 0}, "offload-optimizer-zero"),
        ("megatron", Offload(activations=0.5), {"pp": 2}, "offload-activations-pp"),
        ("megatron", Offload(activations=0.5), {"recompute": Recompute(kind="full")}, "offload-activations-recompute"),
    ],
)
def test_what_no_framework_does_is_refused(runtime: str, offload: Offload, layout: dict, rule: str) -> None:
    found = priced(offload, runtime=runtime, **layout)
    assert rule in {each.id for each in found.violations}


def test_an_unknown_host_and_a_share_above_one_are_bad_input() -> None:
    unknown = replace(load_cluster("h100-sxm", gpus=8), host_memory_bytes=None)
    with pytest.raises(FivefoldError, match="host_memory_bytes"):
        priced(Offload(optimizer=1), unknown)
    with pytest.raises(FivefoldError, match="share"):
        priced(Offload(optimizer=1.5))


def test_the_search_finds_what_only_offloading_fits() -> None:
    model, cluster = load_model("llama-3-70b"), load_cluster("h100-sxm", gpus=8)
    work = Workload(seq_len=8192, global_batch=64)
    assert not plan(model, cluster, work, explain=False).plans
    found = plan(model, cluster, replace(work, offload=Offload(optimizer=1)), top=1)
    assert found.plans and found.plans[0].fits and found.why
    reason = next(each for each in found.why.dimensions if each.axis == "offload")
    assert reason.saves_bytes and reason.saves_bytes > 0 and reason.costs_s and reason.costs_s > 0
    assert "without it the layout does not fit" in reason.message and reason.level == "host link"
    small = replace(cluster, host_memory_bytes=600 * 10**9)
    none = plan(model, small, replace(work, offload=Offload(optimizer=1)), explain=False)
    assert not none.plans and "host memory" in none.advice[0]


def test_a_plan_file_keeps_it(tmp_path: Path) -> None:
    one = priced(Offload(optimizer=0.5), tp=2)
    one.save(tmp_path / "plan.toml")
    again = load_plan(tmp_path / "plan.toml")
    assert again.workload.offload == Offload(optimizer=0.5)
    assert again.estimate().step == one.step


def test_fully_sharded_gradients_leave_beside_backward() -> None:
    """What is left after it: 16-bit weights that come back."""
    cluster = replace(load_cluster("h100-sxm", gpus=8), host_memory_bandwidth_per_s=1e15)
    here, there = (priced(each, cluster, runtime="deepspeed-zero", zero=3) for each in (None, Offload(optimizer=1)))
    assert here.memory and there.step and cluster.host_link_bandwidth_per_s
    parameters = here.memory.stages[0].breakdown.master / 4
    assert there.step.breakdown_s.optimizer == pytest.approx(
        2 * parameters / cluster.host_link_bandwidth_per_s, rel=1e-4
    )
