"""One process that trains the whole model: what every layout is compared with.

It shares the model and its initial weights with the trainer and nothing else: gradients are autograd's, the norm,
clipping and updates are PyTorch's own.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the name everybody uses

from fivefold.model import ModelSpec
from fivefold.train.data import Synthetic
from fivefold.train.dropout import Dropout, token_numbers
from fivefold.train.init import initialise
from fivefold.train.loss import IGNORED
from fivefold.train.model import Decoder
from fivefold.train.optimizer import Recipe
from fivefold.train.precision import precision

ADAMW_STEPS = 3


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """What is trained to compare a layout with one process.

    precision: fp64 or fp32. global_batch: sequences per step. sgd, adamw: the two recipes; eps is large so that noise
    in gradients that are mathematically zero does not become a step, and AdamW's clipping is small enough to be active.
    dropout: see fivefold.train.dropout.
    """

    spec: ModelSpec
    data: Synthetic
    global_batch: int
    precision: str = "fp64"
    seed: int = 0
    dropout: float = 0.0
    sgd: Recipe = Recipe(kind="sgd", rate=0.1, decay=0.0, clip=None)
    adamw: Recipe = Recipe(rate=1e-3, eps=1e-3, clip=0.1)


class Reference(NamedTuple):
    """gradients, after_sgd, after_adamw: full tensors by name. losses: of the SGD step, then of each AdamW step, and
    grad_norms likewise, before clipping."""

    gradients: dict[str, Tensor]
    after_sgd: dict[str, Tensor]
    after_adamw: dict[str, Tensor]
    losses: list[float]
    grad_norms: list[float]


def run_reference(proof: Proof) -> Reference:
    """Train in this process: one step of SGD, and from the same weights three of AdamW."""
    model, dropout = _model(proof)
    losses, norms = [_backward(model, proof, 0, dropout)], [_norm(model)]
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    _optimizer(model, proof.sgd).step()
    after_sgd = _weights(model)

    model, dropout = _model(proof)
    optimizer = _optimizer(model, proof.adamw)
    for step in range(ADAMW_STEPS):
        optimizer.zero_grad()
        losses.append(_backward(model, proof, step, dropout))
        norms.append(_norm(model))
        if proof.adamw.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), proof.adamw.clip)
        for group in optimizer.param_groups:
            group["lr"] = proof.adamw.rate * proof.adamw.schedule.factor(step)
        optimizer.step()
    return Reference(gradients, after_sgd, _weights(model), losses, norms)


def _model(proof: Proof) -> tuple[Decoder, Dropout]:
    model = Decoder(proof.spec, dtype=precision(proof.precision).compute)
    initialise(model, proof.spec, proof.seed)
    dropout = Dropout(proof.dropout, proof.seed)
    if proof.dropout:
        dropout.apply(model)
    return model, dropout


def _optimizer(model: Decoder, recipe: Recipe) -> torch.optim.Optimizer:
    if recipe.kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=recipe.rate, weight_decay=recipe.decay)
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": recipe.decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=recipe.rate, betas=recipe.betas, eps=recipe.eps, foreach=False)


def _backward(model: Decoder, proof: Proof, step: int, dropout: Dropout) -> float:
    """The mean loss over the valid tokens of one global batch, taken as one batch."""
    dropout.begin(step, [token_numbers(range(proof.global_batch), torch.arange(proof.data.seq_len))])
    dropout.start(0)
    tokens, labels = proof.data.samples(range(step * proof.global_batch, (step + 1) * proof.global_batch))
    loss = F.cross_entropy(model(tokens).flatten(0, -2), labels.flatten(), ignore_index=IGNORED)
    loss.backward()
    return loss.item()


def _norm(model: Decoder) -> float:
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in grads])).item()


def _weights(model: Decoder) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
