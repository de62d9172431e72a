"""Weight gradients added by their own product: the same numbers as through .grad, and where that is not done."""

from __future__ import annotations

import pytest
import torch
from proofs import gpt2, layout_of, llama
from torch import nn

from fivefold.model import ModelSpec
from fivefold.train.build import Setup, build_stages
from fivefold.train.data import Synthetic
from fivefold.train.init import initialise
from fivefold.train.loss import TokenLoss
from fivefold.train.mesh import Mesh
from fivefold.train.model import Decoder
from fivefold.train.parallel.fused_gradients import fuse


def stage_of(spec: ModelSpec, precision: str, **degrees: object) -> tuple[Decoder, object]:
    layout = layout_of(spec, 1, **degrees)
    [stage] = build_stages(spec, layout, Mesh(layout), Setup(precision=precision))
    return stage.module, stage.data


def fused(module: nn.Module) -> set[str]:
    return {name for name, each in module.named_modules() if isinstance(each, nn.Linear) and "forward" in vars(each)}


@pytest.mark.parametrize("spec", [llama(2), gpt2(2)], ids=lambda spec: spec.name)
@pytest.mark.parametrize("zero", [0, 2, 3])
def test_gradients_are_those_of_autograd(spec: ModelSpec, zero: int) -> None:
    module, data = stage_of(spec, "fp64", zero=zero, micro_batch=4)
    plain = Decoder(spec, dtype=torch.float64)
    initialise(plain, spec, 0)
    for tokens, labels, _ in Synthetic(spec.vocab, 16).micro_batches(0, layout_of(spec, 1, micro_batch=4), 0):
        for model in (module, plain):
            TokenLoss(128)(model(tokens), labels).backward()
    rounds = {bucket.rounds_done for bucket in data.buckets}
    data.finish()
    assert rounds == {2}  # each gradient arrived once per micro-batch
    wanted = {name: parameter.grad for name, parameter in plain.named_parameters()}
    got = {piece.name: piece.gradient for piece in data.pieces}
    assert got.keys() == wanted.keys()
    for name, gradient in got.items():
        torch.testing.assert_close(gradient, wanted[name].flatten(), rtol=1e-12, atol=1e-14)


def test_what_is_fused() -> None:
    """All plain linear layers; not a tied head, which shares its gradient with the embedding; none where gradients
    have another dtype than the products."""
    module, _ = stage_of(llama(1), "fp64")
    assert fused(module) == {name for name, each in module.named_modules() if isinstance(each, nn.Linear)}
    tied, _ = stage_of(llama(1, tied=True), "fp64")
    assert fused(tied) == fused(module) - {"lm_head"}
    assert not fused(stage_of(llama(1), "bf16")[0])


def test_the_input_needs_no_gradient() -> None:
    layer = nn.Linear(3, 2)
    added: list[torch.Tensor] = []
    fuse(layer, lambda weight, left, right: added.append(left.t() @ right))
    x = torch.randn(4, 3)
    layer(x).sum().backward()
    assert layer.weight.grad is None
    assert layer.bias.grad is not None
    torch.testing.assert_close(added[0], x.sum(0).expand(2, 3))
