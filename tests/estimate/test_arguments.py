"""A caller's mistakes are named, not priced: fractions, words, wrong kinds of things; and a result's attributes."""

from __future__ import annotations

import pytest

import fivefold as ff
from fivefold.errors import FivefoldError


@pytest.fixture(scope="module")
def asked():
    return ff.load_model("llama-3-8b"), ff.load_cluster("h100-sxm", gpus=8), {"seq_len": 4096, "global_batch": 64}


@pytest.mark.parametrize(
    "layout",
    [{"tp": 2.5}, {"tp": "2"}, {"tp": True}, {"micro_batch": 1.5}, {"recompute": "full"}, {"overlap": {"tp": True}}],
    ids=str,
)
def test_layouts_of_the_wrong_type(asked, layout) -> None:
    model, cluster, work = asked
    with pytest.raises(FivefoldError):
        ff.estimate(model, cluster, ff.Workload(**work), ff.Layout(**layout))


@pytest.mark.parametrize(
    "change",
    [
        {"seq_len": 8192.5},
        {"seq_len": "8192"},
        {"global_batch": 0},
        {"precision": "int4"},
        {"optimizer": "lion"},
        {"grad_dtype": "x"},
        {"moe_imbalance": float("nan")},
        {"tokens": -5.0},
        {"price": -1.0},
    ],
    ids=str,
)
def test_workloads_that_mean_nothing(asked, change) -> None:
    model, cluster, work = asked
    with pytest.raises(FivefoldError):
        ff.estimate(model, cluster, ff.Workload(**work | change), ff.Layout())
    with pytest.raises(FivefoldError):
        ff.plan(model, cluster, ff.Workload(**work | change))


def test_names_instead_of_loaded_things(asked) -> None:
    model, cluster, work = asked
    with pytest.raises(FivefoldError, match="load_model"):
        ff.estimate("llama-3-8b", cluster, ff.Workload(**work), ff.Layout())
    with pytest.raises(FivefoldError, match="load_cluster"):
        ff.estimate(model, "h100-sxm", ff.Workload(**work), ff.Layout())
    with pytest.raises(FivefoldError, match="Layout"):
        ff.estimate(model, cluster, ff.Workload(**work), {"tp": 2})


def test_parts_are_attributes_too(asked) -> None:
    model, cluster, work = asked
    est = ff.estimate(model, cluster, ff.Workload(**work), ff.Layout(pp=2))
    stage = est.memory.stages[0]
    assert stage.breakdown.weights == stage.breakdown["weights"] > 0
    assert est.step.breakdown_s.compute == est.to_dict()["step"]["breakdown_s"]["compute"]
    with pytest.raises(AttributeError, match="weights"):
        _ = stage.breakdown.wieghts


@pytest.mark.parametrize("layout", [ff.Layout(), ff.Layout(tp=8), ff.Layout(tp=2), ff.Layout(pp=2)], ids=str)
def test_owners_are_never_negative(asked, layout) -> None:
    model, cluster, work = asked
    step = ff.estimate(model, cluster, ff.Workload(**work), layout).step
    assert min(step.breakdown_s.values()) >= 0
    assert sum(step.breakdown_s.values()) == step.seconds.value
    assert (step.breakdown_s.bubble > 0) == (layout.pp > 1)
