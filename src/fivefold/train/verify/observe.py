"""What one rank of a layout has after the steps of a proof, in a form that can be sent to another process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from fivefold.layout import ResolvedLayout
from fivefold.train.build import Setup
from fivefold.train.mesh import Mesh
from fivefold.train.optimizer import Recipe
from fivefold.train.trainer import Trainer
from fivefold.train.verify.reference import ADAMW_STEPS, Proof

MakeTrainer = Callable[[Mesh, Setup], Trainer]


class Part(NamedTuple):
    """Elements [start, start + len(values)) of the flattened part of tensor `name` that place tp_index of tp holds."""

    name: str
    tp_index: int
    start: int
    values: torch.Tensor


class RankReport(NamedTuple):
    """One rank's gradients (of the pieces that it owns) and weights (of every parameter that it computes with), and
    the losses and gradient norms that it was told, as in Reference."""

    gradients: list[Part]
    after_sgd: list[Part]
    after_adamw: list[Part]
    losses: list[float]
    grad_norms: list[float]


def observe(
    proof: Proof,
    layout: ResolvedLayout,
    mesh: Mesh,
    make: MakeTrainer | None = None,
    watch: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> RankReport:
    """Run the proof's steps on this rank. Every rank of the layout calls it; one process calls it for one rank.

    make: builds the trainer, where the layout needs another engine than the default. watch: makes what is entered
    around the step of SGD and around the first of AdamW, the ones after which do the same again.
    """

    def trainer(recipe: Recipe) -> Trainer:
        setup = Setup(
            precision=proof.precision, recipe=recipe, seed=proof.seed, bucket_bytes=2**14, dropout=proof.dropout
        )
        return make(mesh, setup) if make is not None else Trainer(proof.spec, layout, mesh, setup)

    def batches(step: int) -> list:
        return proof.data.micro_batches(step, layout, mesh.index("dp"))

    first = trainer(proof.sgd)
    with watch():
        loss, norm, _ = first.gradients(batches(0))
        gradients = [
            Part(first.tensor(p.name).name, mesh.index("tp"), p.start, p.gradient.detach().clone())
            for p in first.pieces
        ]
        first.update(0, norm)
        after_sgd = _weights(first)
    losses, norms = [loss], [norm]

    second = trainer(proof.adamw)
    for step in range(ADAMW_STEPS):
        with watch() if step == 0 else nullcontext():
            result = second.step(step, batches(step))
        losses.append(result.loss)
        norms.append(result.grad_norm)
    return RankReport(gradients, after_sgd, _weights(second), losses, norms)


def _weights(trainer: Trainer) -> list[Part]:
    trainer.wait()
    index = trainer.mesh.index("tp")
    return [
        Part(trainer.tensor(name).name, index, 0, parameter.detach().flatten().clone())
        for stage in trainer.stages
        for name, parameter in stage.module.named_parameters()
    ]
