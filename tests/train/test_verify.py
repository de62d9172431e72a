"""The proof passes where axes are combined, and fails wherever a sum is dropped or doubled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from proofs import gpt2, layout_of, llama, proof_of, reference_of, reports_of, verdict_of
from ranks import run_ranks

from fivefold.layout import Recompute
from fivefold.model import ModelSpec
from fivefold.train.mesh import Mesh
from fivefold.train.verify import Part, Verdict, compare, observe
from fivefold.train.verify.controls import Spoil, Spoiled, Sums

FULL = Recompute(kind="full")
COMBINED: list[tuple[ModelSpec, int, dict[str, Any]]] = [
    (llama(2, tied=True), 2, {"tp": 2, "micro_batch": 4}),
    (gpt2(2), 4, {"tp": 2, "zero": 2, "micro_batch": 2}),
    (llama(2), 4, {"tp": 4, "recompute": FULL, "micro_batch": 4}),
    (llama(2), 4, {"cp": 2, "zero": 2, "micro_batch": 2}),
    (gpt2(2), 4, {"pp": 2, "zero": 2}),
    (llama(4), 2, {"pp": 2, "vpp": 2, "recompute": FULL}),
    (llama(2, tied=True), 4, {"pp": 2, "tp": 2, "micro_batch": 4}),
    (llama(2), 8, {"pp": 2, "tp": 2, "cp": 2, "cp_kind": "a2a", "micro_batch": 4}),
]


@pytest.mark.parametrize(("spec", "ranks", "degrees"), COMBINED, ids=lambda x: getattr(x, "name", str(x)))
def test_axes_together_equal_one_process(spec: ModelSpec, ranks: int, degrees: dict[str, Any]) -> None:
    verdict = verdict_of(spec, ranks, **degrees)
    assert verdict.passed, verdict.failures()


CONTROLS: list[tuple[ModelSpec, int, dict[str, Any], set[str]]] = [
    (
        gpt2(1), 2, {"tp": 2, "micro_batch": 8},
        {
            "parallel.data.sum_pieces", "parallel.tensor.RowLinear.forward",
            "parallel.tensor._Columns.backward", "parallel.vocabulary.VocabEmbedding.forward",
            "parallel.vocabulary._CrossEntropy.forward", "trainer.Trainer.gradients",
        },
    ),
    (
        gpt2(2), 2, {"pp": 2, "zero": 0, "micro_batch": 4},
        {"parallel.data.sum_pieces", "trainer.Trainer.gradients"},
    ),
    (
        llama(1), 4, {"zero": 2, "dp_replicate": 2, "micro_batch": 2},
        {
            "loss.global_valid_tokens", "parallel.data.Bucket.finish", "parallel.data.Bucket.reduce",
            "trainer.Trainer.gradients",
        },
    ),
    (
        llama(1), 2, {"zero": 0, "micro_batch": 4},
        {"loss.global_valid_tokens", "parallel.data.Bucket.reduce", "trainer.Trainer.gradients"},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "ranks", "degrees", "expected"), CONTROLS, ids=["tp", "pp-tied", "hsdp", "dp"])
def test_every_sum_has_a_control(spec: ModelSpec, ranks: int, degrees: dict[str, Any], expected: set[str]) -> None:
    """Sums are collected by tracing: one that is not in the table fails, and each of them, spoiled, fails the proof."""
    layout = layout_of(spec, ranks, **degrees)
    proof = proof_of(spec)

    def traced(rank: int) -> list[Any]:
        with Sums() as sums:
            observe(proof, layout, Mesh(layout))
        return list(sums.sites)

    def spoiled(site: Any, how: Spoil) -> Verdict:
        def run(rank: int) -> Any:
            with Spoiled(site, how):
                return observe(proof, layout, Mesh(layout))

        return compare(spec, layout, reference_of(spec), run_ranks(ranks, run))

    sites = {site for rank in run_ranks(ranks, traced) for site in rank}
    assert {f"{site.module}.{site.function}" for site in sites} == expected
    for site in sites:
        for how in ("drop", "double"):
            assert not spoiled(site, how).passed, f"{how} {site} went unnoticed"


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


def test_clipping_is_active_in_the_proof() -> None:
    clip = proof_of(llama(1)).adamw.clip
    assert clip is not None
    assert all(norm > clip for norm in reference_of(llama(1)).grad_norms)
