"""A plan moved to another cluster: as few changes as possible, and reasons that hold when they are tried."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from fivefold.cluster import load_cluster
from fivefold.estimate import Problem, estimate
from fivefold.layout import Layout, Recompute, Workload
from fivefold.model import load_model
from fivefold.runtime import load_runtime
from fivefold.search.moving import Moved, move

MODEL = load_model("llama-3-8b")
WORK = Workload(seq_len=8192, global_batch=64)
LAYOUT = Layout(tp=2, pp=2, micro_batch=2)


def moved(gpu: str, gpus: int, layout: Layout = LAYOUT, work: Workload = WORK, runtime: str = "megatron") -> Moved:
    old = load_cluster("h100-sxm", gpus=16)
    before = estimate(MODEL, old, work, layout)
    new = load_cluster(gpu, gpus=gpus)
    return move(before, Problem(MODEL, new, work, load_runtime(runtime)), layout, runtime)


def test_a_plan_that_runs_as_it_is_keeps_everything() -> None:
    there = moved("h200-sxm", 32)
    assert there.after and not there.changes
    assert there.after.inputs["layout"] == there.before.inputs["layout"]
    assert {"--tp", "--pp", "--micro-batch"} <= set(there.kept)


@pytest.mark.parametrize(("gpu", "gpus"), [("a100-40gb", 16), ("h100-sxm", 8), ("a100-40gb", 8), ("h100-sxm", 12)])
def test_each_reason_holds_when_it_is_tried(gpu: str, gpus: int) -> None:
    there = moved(gpu, gpus)
    cluster = load_cluster(gpu, gpus=gpus)
    assert there.after and there.after.valid and there.after.fits
    chosen = there.after.inputs["layout"]
    as_it_was = estimate(MODEL, cluster, WORK, LAYOUT)
    assert bool(there.changes) == (not as_it_was.valid or not as_it_was.fits)
    for change in there.changes:
        name = change.option.removeprefix("--").replace("-", "_")
        kept = replace(msg_layout(chosen), **{name: getattr(LAYOUT, name)})
        try:
            alone = estimate(MODEL, cluster, WORK, kept)
        except ValueError:
            assert change.kind == "rule"
            continue
        if change.kind == "rule":
            assert not alone.valid
        elif change.kind == "memory":
            assert alone.valid and not alone.fits
        else:
            assert alone.valid and alone.fits


def msg_layout(fields: dict) -> Layout:
    from msgspec import convert

    return convert(fields, Layout)


def test_one_change_is_the_fastest_single_change() -> None:
    """Against every single change of recomputation, sharding, degrees and micro-batch, priced one by one."""
    there = moved("a100-40gb", 16, replace(LAYOUT, micro_batch=4))
    start = replace(LAYOUT, micro_batch=4)
    cluster = load_cluster("a100-40gb", gpus=16)
    singles = [replace(start, micro_batch=size) for size in (1, 2)]
    singles += [replace(start, tp=4), replace(start, tp=8), replace(start, pp=4), replace(start, cp=2)]
    singles += [replace(start, recompute=Recompute(kind="full", layers=n)) for n in (None, 4, 8)]
    priced = [estimate(MODEL, cluster, WORK, each) for each in singles]
    fitting = [each.step.seconds.value for each in priced if each.fits and each.step]
    assert len(there.changes) == 1 and there.after and there.after.step
    assert there.after.step.seconds.value <= min(fitting) * (1 + 1e-9)


def test_a_precision_that_the_gpu_lacks() -> None:
    work = replace(WORK, precision="fp8")
    there = moved("a100-80gb", 16, work=work)
    assert [(each.option, each.old, each.new) for each in there.changes][:1] == [("--precision", "fp8", "bf16")]
    assert there.after and there.after.inputs["workload"]["precision"] == "bf16"


def test_another_runtime_changes_what_it_has_not() -> None:
    there = moved("h100-sxm", 16, runtime="torchtitan")
    assert there.after and there.after.valid
    assert any(each.option == "--zero" and each.kind == "rule" for each in there.changes)


def test_nothing_near_runs() -> None:
    there = moved("a100-40gb", 1)
    assert there.after is None and not there.changes and "As it was" in there.unchanged
