"""The loss: contributions that add up to the mean over all valid tokens, however they are spread."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_ranks
from torch.nn import functional as F  # noqa: N812

from fivefold.errors import FivefoldError
from fivefold.train.loss import IGNORED, TokenLoss, cross_entropy_sum, global_valid_tokens


def batch(seed: int, rows: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, 5, 11, dtype=torch.float64, generator=generator)
    labels = torch.randint(0, 11, (rows, 5), generator=generator)
    labels[torch.rand(rows, 5, generator=generator) < 0.4] = IGNORED
    labels[0, 0] = 3
    return logits, labels


@given(seed=st.integers(0, 10_000), cut=st.integers(1, 5))
@settings(max_examples=40, deadline=None)
def test_contributions_add_up(seed: int, cut: int) -> None:
    logits, labels = batch(seed)
    valid = global_valid_tokens([labels[:cut], labels[cut:]], None)
    loss = TokenLoss(valid)
    total = loss(logits[:cut], labels[:cut]) + loss(logits[cut:], labels[cut:])
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
    assert torch.allclose(total, expected, rtol=1e-13)


def test_a_scale_multiplies_the_gradient_only() -> None:
    logits, labels = batch(1)
    logits.requires_grad_()
    plain, scaled = TokenLoss(7), TokenLoss(7, scale=1024.0)
    assert torch.allclose(scaled.reported(scaled(logits, labels)), plain.reported(plain(logits, labels)))
    (a,) = torch.autograd.grad(plain(logits, labels), logits)
    (b,) = torch.autograd.grad(scaled(logits, labels), logits)
    assert torch.allclose(b, 1024 * a)


def test_half_precision_logits_are_summed_in_fp32() -> None:
    logits, labels = batch(2)
    half = cross_entropy_sum(logits.bfloat16(), labels)
    assert half.dtype == torch.float32
    assert torch.allclose(half.double(), cross_entropy_sum(logits.bfloat16().double(), labels), rtol=1e-6)


def test_no_valid_token_is_refused() -> None:
    with pytest.raises(FivefoldError, match="no valid token"):
        global_valid_tokens([torch.full((2, 3), IGNORED)], None)


def test_the_count_is_global() -> None:
    def count(rank: int) -> int:
        labels = torch.full((2, 4), IGNORED)
        labels[0, : rank + 1] = 1  # 1 + 2 + 3 valid tokens
        return global_valid_tokens([labels, labels], torch.distributed.group.WORLD)

    assert run_ranks(3, count) == [12, 12, 12]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_cross_entropy_is_pytorchs(dtype: torch.dtype) -> None:
    logits, labels = batch(4)
    logits = (30 * logits).to(dtype).requires_grad_()
    exact = logits.detach().double().requires_grad_()
    got = cross_entropy_sum(logits, labels)
    wanted = F.cross_entropy(exact.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    bound = 4 * torch.finfo(dtype).eps
    assert abs(got.item() - wanted.item()) <= bound * abs(wanted.item())
    (a,), (b,) = torch.autograd.grad(0.3 * got, logits), torch.autograd.grad(0.3 * wanted, exact)
    assert a.dtype == dtype
    assert (a - b).norm() <= bound * b.norm()


def test_a_second_backward_is_refused() -> None:
    logits, labels = batch(5)
    loss = cross_entropy_sum(logits.requires_grad_(), labels)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()
