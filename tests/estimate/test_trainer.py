"""The estimate of fivefold's own trainer: schedules that split the backward, precisions, devices, what recomputation
does to a split. What it says about bytes and FLOPs is held to the trainer in tests/train/test_agreement.py."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from fivefold.estimate.kernel import Kernel, Problem
from fivefold.layout import Columns, Layout, Recompute, Workload
from fivefold.runtime import load_runtime
from fivefold.schedule import actions, simulate

ONE = np.arange(1)
FULL = Recompute(kind="full")


@pytest.fixture
def even(small):
    """Stages of equal blocks, beside which embedding and head cost next to nothing."""
    return replace(small["llama"], vocab=128)


def stage_seconds(kernel: Kernel) -> tuple[float, float, float]:
    """Forward, input-gradient and weight-gradient seconds of the mean stage of a pipeline."""
    forward, backward, weight = (float(each.mean()) for each in kernel.stage_seconds(kernel.plans[0].part, ONE * 0))
    return forward, backward - weight, weight


@pytest.mark.parametrize(("pp", "m"), [(2, 8), (4, 8), (4, 32)])
def test_zb_h1_has_the_published_bubble(pp, m, even, price, kernel_of):
    """(p - 1)(F + B - W) where W <= F and W <= B (Qi et al. 2023, table 1), against 1F1B's (p - 1)(F + B + W)."""
    layout = Layout(pp=pp, schedule="zb-h1")
    forward, back, weight = stage_seconds(kernel_of(even, [layout], gpus=pp, runtime="fivefold", global_batch=m))
    assert 0 < weight <= forward
    split, whole = (
        price(even, each, gpus=pp, runtime="fivefold", global_batch=m).step.breakdown_s["bubble"]
        for each in (layout, Layout(pp=pp))
    )
    assert split == pytest.approx((pp - 1) * (forward + back - weight), rel=0.1)
    assert whole == pytest.approx((pp - 1) * (forward + back + weight), rel=0.1)


@pytest.mark.parametrize("schedule", ["zbv", "dualpipev"])
def test_a_v_has_less_bubble_than_interleaving(schedule, even, price):
    def bubble(**degrees):
        est = price(even, Layout(pp=4, vpp=2, **degrees), gpus=4, runtime="fivefold", global_batch=32)
        return est.step.breakdown_s["bubble"]

    assert bubble(schedule=schedule) < bubble()


@pytest.mark.parametrize(
    "layout",
    [
        Layout(pp=4, schedule="zb-h1"),
        Layout(pp=2, tp=2, schedule="zb-h1"),
        Layout(pp=4, vpp=2, schedule="zbv"),
        Layout(pp=4, vpp=2, schedule="dualpipev"),
        Layout(pp=4, vpp=2, schedule="zbv", recompute=FULL),
    ],
    ids=lambda each: f"{each.schedule}-tp{each.tp}-{each.recompute.kind}",
)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_pipeline_seconds_are_the_simulators(layout, family, small, price, kernel_of):
    model = small[family]
    est = price(model, layout, runtime="fivefold")
    kernel = kernel_of(model, [layout], runtime="fivefold")
    plan = kernel.plans[0]
    forward, backward, weight = (each[0].tolist() for each in kernel.stage_seconds(plan.part, ONE * 0))
    transfer = float(kernel.exchange_seconds(ONE)[0])
    from fivefold.schedule import placement

    timeline = simulate(
        actions(layout.schedule, layout.pp, est.layout.num_micro_batches, layout.vpp), forward, backward, transfer,
        weight_grad_s=weight, placement=placement(layout.schedule),
    )  # fmt: skip
    assert kernel.pipeline_seconds(ONE)[0] == pytest.approx(timeline.makespan_s, rel=1e-12)
    assert (sum(weight) > 0) == (layout.recompute.kind == "none")


def test_first_and_last_stage_are_one_rank_of_a_v(small, price):
    """A tied embedding lies twice on it, and its gradients need no collective; on a line of stages they do."""
    v, line = (
        price("gpt2", Layout(pp=2, vpp=2, schedule=schedule), gpus=2, runtime="fivefold")
        for schedule in ("zbv", "interleaved")
    )
    assert [row.collective for row in v.traffic if row.axis == "pp"] == ["send", "all_reduce"]  # of loss and norm
    assert sum(row.count for row in line.traffic if (row.axis, row.collective) == ("pp", "all_reduce")) == 2
    assert v.memory.stages[0].breakdown.weights > v.memory.stages[1].breakdown.weights
    assert v.layout.stages[0] == ((0, 4), (12, 16))


def test_recomputation_splits_nothing_and_holds_as_1f1b(price):
    split, whole = (
        price("llama", Layout(pp=4, schedule=name, recompute=FULL), gpus=4, runtime="fivefold", global_batch=16)
        for name in ("zb-h1", "1f1b")
    )
    assert [stage.in_flight for stage in split.memory.stages] == [stage.in_flight for stage in whole.memory.stages]


def test_fp32_is_a_precision_of_the_trainer_alone(price, small):
    half, single = (price("llama", Layout(), runtime="fivefold@cpu", precision=each) for each in ("bf16", "fp32"))
    a, b = (each.memory.stages[0].breakdown for each in (half, single))
    assert b.weights == 2 * a.weights
    assert b.master == 0 < a.master
    assert b.gradients == a.gradients
    assert b.activations > 1.9 * a.activations
    assert single.step.seconds.value > 2 * half.step.seconds.value


def test_devices_differ_by_the_listed_tensors_alone(small):
    model = small["gpt2"]
    work = Workload(seq_len=2048, global_batch=64)
    from fivefold.cluster import load_cluster

    ledgers = {}
    for device in ("cpu", "cuda"):
        problem = Problem(model, load_cluster("h100-sxm", gpus=2), work, load_runtime(f"fivefold@{device}"))
        kernel = Kernel(problem, Columns.from_layouts([Layout(tp=2)], 2, work))
        rows = [row for ledger in kernel.ledgers for row in ledger.saved]
        ledgers[device] = {
            f"{ledger.name}/{row.name}": float(np.asarray(row.bytes).reshape(-1)[0])
            for ledger in kernel.ledgers
            for row in ledger.saved
        }
        assert rows
    cpu, cuda = ledgers["cpu"], ledgers["cuda"]
    changed = {name.partition("/")[2] for name in cuda if cuda[name] != cpu.get(name, 0.0)}
    assert changed == {"input_norm.statistics", "feed_norm.statistics", "final_norm.statistics", "random state"}
    listed = {each.field for each in load_runtime("fivefold@cuda").device_tensors}
    assert listed == {"layernorm_statistic_bytes", "attention_state_bytes"}
    assert not load_runtime("fivefold@cpu").device_tensors


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_a_batch_of_layouts_is_its_layouts_one_by_one(zero, kernel_of):
    layouts = [
        Layout(zero=zero, tp=tp, pp=pp, schedule=schedule, vpp=vpp, recompute=recompute)
        for tp in (1, 2)
        for pp, vpp, schedule in ((1, 1, "1f1b"), (2, 1, "zb-h1"), (2, 2, "zbv"), (4, 2, "interleaved"))
        for recompute in (Recompute(), FULL)
    ]
    together = kernel_of("llama", layouts, runtime="fivefold")
    rows = np.arange(len(layouts))
    memory, seconds = together.peak_memory(rows), together.step_seconds(rows)
    for at, layout in enumerate(layouts):
        alone = kernel_of("llama", [layout], runtime="fivefold", every_rank=True)
        assert alone.peak_memory(ONE)[0] == pytest.approx(memory[at], rel=1e-12)
        assert alone.step_seconds(ONE)[0] == pytest.approx(seconds[at], rel=1e-12)
