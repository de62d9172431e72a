"""How forward and backward run through the stages of a rank: one after the other, or by a pipeline's schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from fivefold.layout import ResolvedLayout
from fivefold.schedule.registry import actions, placement
from fivefold.train.build import Stage
from fivefold.train.data import Batch
from fivefold.train.loss import TokenLoss
from fivefold.train.mesh import Mesh
from fivefold.train.parallel.peers import BoundaryTensor
from fivefold.train.parallel.pipeline import Pipeline, decoder_stage


class Engine(Protocol):
    """Runs all micro-batches of a step; every parameter's gradient is accumulated once per micro-batch.

    Returns the sum of loss.reported over the micro-batches, a scalar, zero on ranks without a head.
    """

    def run(self, batches: Sequence[Batch], loss: TokenLoss) -> Tensor: ...


class OneStage:
    """No pipeline: each micro-batch forward and backward."""

    def __init__(self, stage: Stage) -> None:
        self._module = stage.module

    def run(self, batches: Sequence[Batch], loss: TokenLoss) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=batches[0].tokens.device)
        for batch in batches:
            contribution = loss(self._module(batch.tokens, batch.positions), batch.labels)
            contribution.backward()
            total += loss.reported(contribution)
        return total


class Pipelined:
    """The action list of the layout's schedule, over the mesh's "pp" group."""

    def __init__(self, stages: Sequence[Stage], layout: ResolvedLayout, mesh: Mesh) -> None:
        self._stages, self._layout, self._mesh = stages, layout, mesh
        self._lists = actions(layout.schedule, layout.pp, layout.num_micro_batches, layout.vpp)
        self._pipelines: dict[tuple[int, ...], Pipeline] = {}
        self._batches: Sequence[Batch] = ()
        self._loss: TokenLoss | None = None

    def run(self, batches: Sequence[Batch], loss: TokenLoss) -> Tensor:
        self._batches, self._loss = batches, loss
        losses = [loss.reported(each) for each in self._pipeline(batches[0].tokens).run()]
        zero = torch.zeros((), dtype=torch.float64, device=batches[0].tokens.device)
        return torch.stack([zero, *(each.double() for each in losses)]).sum()

    def _pipeline(self, tokens: Tensor) -> Pipeline:
        """The pipeline for micro-batches of this shape."""
        shape = tuple(tokens.shape)
        if shape not in self._pipelines:
            self._pipelines[shape] = self._new_pipeline(tokens)
        return self._pipelines[shape]

    def _new_pipeline(self, tokens: Tensor) -> Pipeline:
        layout, mesh = self._layout, self._mesh
        module = self._stages[0].module
        sequence = tokens.shape[1] // (layout.tp if layout.sequence_parallel else 1)
        dtype = next(module.parameters()).dtype
        boundary = BoundaryTensor((tokens.shape[0], sequence, module.spec.hidden), dtype, tokens.device)
        count = layout.pp * layout.vpp
        split = layout.recompute.kind == "none"
        stages = [
            decoder_stage(s.module, s.virtual, count, self._batch, self._contribution, split) for s in self._stages
        ]
        where = placement(layout.schedule)
        return Pipeline(self._lists, mesh.index("pp"), stages, where, mesh.group("pp"), boundary)

    def _batch(self, micro_batch: int) -> Batch:
        return self._batches[micro_batch]

    def _contribution(self, logits: Tensor, labels: Tensor) -> Tensor:
        if self._loss is None:
            raise RuntimeError("a pipeline stage ran outside Pipelined.run")
        return self._loss(logits, labels)


def engine_for(stages: Sequence[Stage], layout: ResolvedLayout, mesh: Mesh) -> Engine:
    if layout.pp * layout.vpp == 1:
        return OneStage(stages[0])
    return Pipelined(stages, layout, mesh)
