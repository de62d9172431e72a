"""Updates against PyTorch's own optimizers and schedulers; clipping, loss scaling and precision policies."""

from __future__ import annotations

import math
from copy import deepcopy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fivefold.errors import FivefoldError
from fivefold.train.optimizer import (
    Constant,
    Cosine,
    Optimizer,
    Recipe,
    WarmupStableDecay,
    clip_factor,
    decays,
    squared_norm,
)
from fivefold.train.parallel.bucket import Piece
from fivefold.train.precision import LossScale, precision


def pieces(seed: int = 0) -> list[Piece]:
    """A matrix cut in two pieces, and a vector."""
    torch.manual_seed(seed)
    matrix, vector = (nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in ((4, 3), (5,)))
    flat = matrix.data.flatten()
    cut = [("m", matrix, 0, flat[:7]), ("m", matrix, 7, flat[7:]), ("v", vector, 0, vector.data)]
    return [Piece(*place, master, torch.randn_like(master)) for *place, master in cut]


def theirs(ours: list[Piece]) -> tuple[nn.Parameter, nn.Parameter]:
    matrix = nn.Parameter(torch.cat([ours[0].master, ours[1].master]).clone())
    return matrix, nn.Parameter(ours[2].master.clone())


@pytest.mark.parametrize("schedule", [Constant(), Cosine(total=6, warmup=2), WarmupStableDecay(total=6, decay=3)])
def test_adamw_equals_pytorch(schedule) -> None:
    recipe = Recipe(rate=0.05, betas=(0.8, 0.9), eps=1e-3, decay=0.3, schedule=schedule)
    ours = pieces()
    matrix, vector = theirs(ours)
    optimizer = Optimizer(ours, recipe)
    reference = torch.optim.AdamW(
        [{"params": [matrix], "weight_decay": 0.3}, {"params": [vector], "weight_decay": 0.0}],
        lr=0.05, betas=(0.8, 0.9), eps=1e-3, foreach=False,
    )  # fmt: skip
    for step in range(6):
        for piece in ours:
            piece.gradient.copy_(torch.randn_like(piece.gradient))
        matrix.grad = 0.5 * torch.cat([ours[0].gradient, ours[1].gradient])
        vector.grad = 0.5 * ours[2].gradient
        for group in reference.param_groups:
            group["lr"] = 0.05 * schedule.factor(step)
        reference.step()
        assert optimizer.step(step, gradient_factor=0.5) == pytest.approx(0.05 * schedule.factor(step))
        assert torch.allclose(torch.cat([ours[0].master, ours[1].master]), matrix, rtol=1e-13)
        assert torch.allclose(ours[2].master, vector, rtol=1e-13)


def test_sgd_steps_against_the_gradient_and_decays_matrices() -> None:
    ours = pieces()
    matrix, vector = theirs(ours)
    Optimizer(ours, Recipe(kind="sgd", rate=0.1, decay=0.5)).step(0)
    assert torch.allclose(ours[0].master, matrix[:7] * (1 - 0.05) - 0.1 * ours[0].gradient)
    assert torch.allclose(ours[2].master, vector - 0.1 * ours[2].gradient)
    assert [decays(piece) for piece in ours] == [True, True, False]


def test_state_can_be_saved_and_loaded() -> None:
    first, second = pieces(), pieces()
    a, b = Optimizer(first, Recipe()), Optimizer(second, Recipe())
    a.step(0)
    for piece, other in zip(first, second, strict=True):
        other.master.copy_(piece.master)
    b.load_state_dict(deepcopy(a.state_dict()))
    for optimizer, held in ((a, first), (b, second)):
        for piece in held:
            piece.gradient.fill_(0.3)
        optimizer.step(1)
    assert all(torch.equal(p.master, q.master) for p, q in zip(first, second, strict=True))


def test_no_pieces_and_unknown_optimizers() -> None:
    assert Optimizer([], Recipe(rate=0.1)).step(0) == 0.1
    with pytest.raises(FivefoldError, match="muon"):
        Optimizer(pieces(), Recipe(kind="muon"))  # type: ignore[arg-type]


@given(total=st.integers(1, 200), warmup=st.integers(0, 50))
@settings(max_examples=50, deadline=None)
def test_cosine_equals_pytorch(total: int, warmup: int) -> None:
    ours = Cosine(total=warmup + total, warmup=warmup, floor=0.1)
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total, eta_min=0.1)
    optimizer.step()
    for step in range(total):
        assert ours.factor(warmup + step) == pytest.approx(scheduler.get_last_lr()[0])
        scheduler.step()
    assert ours.factor(warmup + total + 7) == pytest.approx(0.1)
    assert [ours.factor(s) for s in range(warmup)] == pytest.approx([(s + 1) / warmup for s in range(warmup)])


def test_warmup_stable_decay() -> None:
    schedule = WarmupStableDecay(total=10, warmup=2, decay=4, floor=0.2)
    expected = [0.5, 1, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2, 0.2]
    assert [schedule.factor(step) for step in range(12)] == pytest.approx(expected)


@given(scale=st.floats(1e-3, 1e3), limit=st.floats(1e-2, 1e2))
@settings(max_examples=30, deadline=None)
def test_clipping_equals_pytorch(scale: float, limit: float) -> None:
    held = pieces()
    for piece in held:
        piece.gradient.mul_(scale)
    parameters = [nn.Parameter(torch.zeros_like(piece.gradient)) for piece in held]
    for parameter, piece in zip(parameters, held, strict=True):
        parameter.grad = piece.gradient.clone()
    norm = math.sqrt(squared_norm(held, lambda _: True).item())
    total = torch.nn.utils.clip_grad_norm_(parameters, limit)
    assert norm == pytest.approx(total.item(), rel=1e-12)
    for parameter, piece in zip(parameters, held, strict=True):
        assert torch.allclose(parameter.grad, piece.gradient * clip_factor(norm, limit), rtol=1e-12)
    assert clip_factor(norm, None) == 1.0
    assert squared_norm(held, lambda _: False).item() == 0.0


def test_the_loss_scale_halves_and_doubles() -> None:
    scale = LossScale(enabled=True, scale=8.0, interval=3)
    scale.update(overflowed=True)
    assert scale.value == 4.0
    for expected in (4.0, 4.0, 8.0, 8.0):
        scale.update(overflowed=False)
        assert scale.value == expected
    scale.update(overflowed=True)
    for expected in (4.0, 4.0, 8.0):  # an overflow starts the count again
        scale.update(overflowed=False)
        assert scale.value == expected
    off = LossScale(enabled=False)
    off.update(overflowed=True)
    assert off.value == 1.0


def test_precisions() -> None:
    assert precision("bf16").master == torch.float32
    assert precision("bf16", "bf16").gradient == torch.bfloat16
    assert precision("fp16").scaled
    with pytest.raises(FivefoldError, match="fp8"):
        precision("fp8")
    with pytest.raises(FivefoldError, match="bf16 gradients"):
        precision("fp32", "bf16")
