"""Dropout: masks that do not know the layout, and are what the hash says, as often as the rate says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from msgspec.structs import replace
from proofs import BATCH, gpt2, layout_of, llama, proof_of
from ranks import run_ranks
from torch.utils.checkpoint import noop_context_fn

from fivefold.errors import FivefoldError
from fivefold.layout import Recompute
from fivefold.model import ModelSpec
from fivefold.train.dropout import Draw, Dropout, _Drop, _hash64, kept, token_hashes, token_numbers
from fivefold.train.init import seed_of
from fivefold.train.mesh import Mesh
from fivefold.train.verify import Verdict, compare, observe, run_reference

RATE = 0.3
FULL = Recompute(kind="full")
LAYOUTS: list[tuple[ModelSpec, int, dict[str, Any]]] = [
    (gpt2(2), 1, {"micro_batch": 2}),
    (gpt2(2), 2, {"micro_batch": 2, "zero": 2}),
    (gpt2(2), 2, {"tp": 2, "micro_batch": 4}),
    (gpt2(2), 2, {"tp": 2, "sequence_parallel": False, "micro_batch": 4}),
    (llama(2), 2, {"cp": 2, "micro_batch": 4}),
    (llama(2), 4, {"cp": 2, "cp_kind": "a2a", "zero": 3, "micro_batch": 2}),
    (gpt2(4), 2, {"pp": 2, "vpp": 2, "micro_batch": 2, "recompute": FULL}),
    (gpt2(2), 2, {"pp": 2, "schedule": "zb-h1", "micro_batch": 2}),
    (gpt2(4), 2, {"pp": 2, "vpp": 2, "schedule": "zbv", "micro_batch": 2}),
    (gpt2(2), 4, {"tp": 2, "pp": 2, "micro_batch": 2, "recompute": FULL, "zero": 3}),
    (llama(2), 2, {"tp": 2, "micro_batch": 2, "recompute": Recompute(kind="selective", modules=("mlp", "layernorm"))}),
    (gpt2(2), 8, {"tp": 2, "cp": 2, "micro_batch": 2}),
]


def proven(spec: ModelSpec, ranks: int, dropout: float = RATE, **degrees: Any) -> Verdict:
    proof = replace(proof_of(spec), dropout=RATE)
    layout = layout_of(spec, ranks, **degrees)
    theirs = replace(proof, dropout=dropout)
    reports = run_ranks(ranks, lambda rank: observe(theirs, layout, Mesh(layout)))
    return compare(spec, layout, run_reference(proof), reports)


@pytest.mark.parametrize(("spec", "ranks", "degrees"), LAYOUTS, ids=lambda x: getattr(x, "name", str(x)))
def test_every_layout_drops_what_one_process_drops(spec: ModelSpec, ranks: int, degrees: dict[str, Any]) -> None:
    verdict = proven(spec, ranks, **degrees)
    assert verdict.passed, verdict.failures()


def test_the_proof_sees_masks_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not proven(gpt2(1), 1, dropout=0.31, micro_batch=4).passed
    # A rank that takes the first part of the sequence, whichever it holds.
    whole = Dropout.__init__
    monkeypatch.setattr(
        Dropout, "__init__", lambda self, rate, seed, part=(0, 1): whole(self, rate, seed, (0, part[1]))
    )
    assert not proven(gpt2(1), 2, tp=2, micro_batch=8).passed


def test_recomputation_in_a_pipeline_needs_the_masks_of_its_own_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Dropout, "contexts", lambda self: noop_context_fn())
    assert not proven(gpt2(2), 2, pp=2, micro_batch=2, recompute=FULL).passed


def finalised(value: int, bits: int, rounds: tuple[tuple[int, int], ...]) -> int:
    """The hash in whole numbers of Python."""
    for shift, factor in rounds:
        value = ((value ^ (value >> shift)) * factor) % 2**bits
    return value


def test_the_mask_is_the_hash() -> None:
    draw = Draw(token_numbers(range(5, 7), torch.tensor([3, 2**20])), "7/11")
    rows, columns = token_hashes(draw, "site"), _hash64(torch.arange(9), "site")
    mask = kept(rows, columns, RATE)

    def hashed(number: int, stream: str) -> int:
        rounds = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))
        return finalised(number ^ seed_of(0, stream), 64, rounds) >> 32

    for i, sample in enumerate((5, 6)):
        for j, position in enumerate((3, 2**20)):
            row = hashed(sample * 2**32 + position, "7/11/site")
            for channel in range(9):
                mixed = (row + hashed(channel, "site")) % 2**32
                number = finalised(mixed, 32, ((16, 0x7FEB352D), (15, 0x846CA68B)))
                signed = number - 2**32 if number >= 2**31 else number
                assert mask[i, j, channel].item() == (signed >= round(RATE * 2**32) - 2**31)


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_masks_look_random(rate: float) -> None:
    """Shares of a million draws: as the rate says, for every token and channel, and without a tie between neighbours,
    samples, sites and steps; five standard deviations each."""
    positions = torch.arange(64)

    def mask(step: int = 0, site: str = "layers.0.attention") -> torch.Tensor:
        rows = token_hashes(Draw(token_numbers(range(16), positions), f"0/{step}"), site)
        return kept(rows, _hash64(torch.arange(1024), site), rate).double()

    first = mask()
    deviation = (rate * (1 - rate)) ** 0.5
    assert abs(first.mean() - (1 - rate)) < 5 * deviation / 1024
    assert (first.mean((0, 1)) - (1 - rate)).abs().max() < 6 * deviation / 32  # 1,024 channels: the worst of them
    assert (first.mean(2) - (1 - rate)).abs().max() < 6 * deviation / 32
    others = {
        "channel": first.roll(1, 2), "position": first.roll(1, 1), "far position": first.roll(32, 1),
        "sample": first.roll(1, 0), "step": mask(1), "site": mask(site="layers.0.feed_forward"),
        "layer": mask(site="layers.1.attention"),
    }  # fmt: skip
    for name, other in others.items():
        correlation = ((first - (1 - rate)) * (other - (1 - rate))).mean() / deviation**2
        assert abs(correlation) < 5 / 1024, name


def test_gradient() -> None:
    x = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    rows, columns = torch.randint(-(2**31), 2**31, (2, 3), dtype=torch.int32), _hash64(torch.arange(8), "x")
    assert torch.autograd.gradcheck(lambda y: _Drop.apply(y, rows, columns, RATE), (x,))
    out = _Drop.apply(x, rows, columns, RATE)
    mask = kept(rows, columns, RATE)
    assert torch.equal(out, x * mask / (1 - RATE)) and 0 < mask.sum() < mask.numel()


@pytest.mark.parametrize("rate", [-0.1, 1.0, float("nan")])
def test_a_rate_that_is_none_is_refused(rate: float) -> None:
    with pytest.raises(FivefoldError, match="below 1"):
        Dropout(rate, 0)


def test_without_dropout_there_is_no_code_in_the_path() -> None:
    from fivefold.train.build import Setup, build_stages

    spec = llama(1)
    layout = layout_of(spec, 1, micro_batch=BATCH)
    [stage] = build_stages(spec, layout, Mesh(layout), Setup(precision="fp32"))
    assert stage.dropout is None
    [dropping] = build_stages(spec, layout, Mesh(layout), Setup(precision="fp32", dropout=0.1))
    hooks = [sum(len(m._forward_hooks) for m in s.module.modules()) for s in (stage, dropping)]
    assert hooks[1] - hooks[0] == 2
