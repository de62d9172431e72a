"""The verdict: what it says of a layout that is right, and of one that is not (the layouts themselves: test_matrix)."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from proofs import layout_of, llama, reference_of, reports_of, verdict_of
from ranks import RankFailure, run_ranks

from fivefold.train.mesh import Mesh
from fivefold.train.verify import Part, compare
from fivefold.train.verify.controls import Site, Sums


def test_what_is_missing_or_wrong_is_found() -> None:
    spec = llama(1)
    layout = layout_of(spec, 2)
    [first, second] = reports_of(spec, layout, 2)
    reference = reference_of(spec)
    good = compare(spec, layout, reference, [first, second])
    assert good.passed
    lost = compare(spec, layout, reference, [first._replace(gradients=first.gradients[1:]), second])
    assert [p.error for p in lost.parameters if not p.passed] == [torch.inf]
    # One replica's weights go their own way: the copies of the other do not cover it up.
    part = second.after_adamw[0]
    astray = second._replace(after_adamw=[Part(*part[:3], part.values + 1e-6), *second.after_adamw[1:]])
    assert [p.name for p in compare(spec, layout, reference, [first, astray]).parameters if not p.passed] == [part.name]
    number = compare(spec, layout, reference, [first, second._replace(grad_norms=[0.0, *second.grad_norms[1:]])])
    assert not number.passed
    assert "gradient norm 0" in number.failures()[0]
    nan = Part(*part[:3], part.values * torch.nan)
    assert not compare(
        spec, layout, reference, [first, second._replace(after_adamw=[nan, *second.after_adamw[1:]])]
    ).passed


def test_the_contract() -> None:
    spec = llama(1)
    answer = verdict_of(spec, 1).to_dict()
    assert {"layout", "passed", "parameters", "losses", "grad_norm"} <= set(answer)
    assert {"name", "error", "bound"} <= set(answer["parameters"][0])
    assert set(answer["grad_norm"]) == {"reference", "layout"}
    assert len(answer["losses"]) == 4


def test_relative_errors_are_the_bounds_without_the_tolerance() -> None:
    spec = llama(1)
    layout = layout_of(spec, 1)
    [report] = reports_of(spec, layout, 1)
    name, reference = "norm.weight", reference_of(spec)
    [place] = [i for i, part in enumerate(report.after_sgd) if part.name == name]
    moved = list(report.after_sgd)
    moved[place] = Part(name, 0, 0, moved[place].values * (1 + 1e-6))
    relative = compare(spec, layout, reference, [report._replace(after_sgd=moved)]).relative
    assert relative.weights == pytest.approx(1e-6)
    assert max(relative.gradients, relative.norm, relative.losses) < 1e-12
    wrong = report._replace(losses=[2 * report.losses[0], *report.losses[1:]])
    assert compare(spec, layout, reference, [wrong]).relative.losses == pytest.approx(1)


def test_a_sum_is_found_with_its_axis() -> None:
    def sites(rank: int) -> list[Site]:
        mesh = Mesh(layout_of(llama(1), 4, tp=2, micro_batch=4))
        with Sums(mesh) as sums:
            for axis in ("tp", "dp"):
                dist.all_reduce(torch.ones(1), group=mesh.group(axis))
            dist.all_reduce(torch.ones(1), op=dist.ReduceOp.MAX)  # no sum
            dist.all_reduce(torch.ones(1), group=mesh.world_group)
        return list(sums.sites)

    assert [site.axis for site in run_ranks(4, sites)[0]] == ["tp", "dp", "world"]


def test_a_sum_that_no_control_could_spoil_is_an_error() -> None:
    def unknown(rank: int) -> None:
        with Sums():
            dist.reduce(torch.ones(1), dst=0)

    with pytest.raises(RankFailure, match="has no control"):
        run_ranks(2, unknown)
