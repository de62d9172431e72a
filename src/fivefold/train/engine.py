"""How forward and backward run through the stages of a rank: one after the other, or by a pipeline's schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from fivefold.layout import ResolvedLayout
from fivefold.schedule.registry import actions, placement
from fivefold.train.build import Stage
from fivefold.train.clock import PipelineTimes
from fivefold.train.data import Batch
from fivefold.train.dropout import Dropout
from fivefold.train.loss import TokenLoss
from fivefold.train.mesh import Mesh
from fivefold.train.parallel.peers import BoundaryTensor
from fivefold.train.parallel.pipeline import Pipeline, PipelineStage, decoder_stage


class Engine(Protocol):
    """Runs all micro-batches of a step; every parameter's gradient is accumulated once per micro-batch.

    run() returns the sum of loss.reported over the micro-batches, a scalar, zero on ranks without a head.
    time_with(): from now on tell these times what the pipeline does, where there is one; None: no longer.
    """

    def run(self, batches: Sequence[Batch], loss: TokenLoss) -> Tensor: ...

    def time_with(self, times: PipelineTimes | None) -> None: ...


class OneStage:
    """No pipeline: each micro-batch forward and backward."""

    def __init__(self, stage: Stage) -> None:
        self._module, self._dropout = stage.module, stage.dropout

    def time_with(self, times: PipelineTimes | None) -> None:
        """There is no pipeline."""

    def run(self, batches: Sequence[Batch], loss: TokenLoss) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=batches[0].tokens.device)
        for micro_batch, batch in enumerate(batches):
            if self._dropout is not None:
                self._dropout.start(micro_batch)
            contribution = loss(self._module(batch.tokens, batch.positions), batch.labels)
            contribution.backward()
            total += loss.reported(contribution)
            # With it goes the graph, whose hooks hold recomputed tensors, before the next forward.
            del contribution
        return total


class Pipelined:
    """The action list of the layout's schedule, over the mesh's "pp" group."""

    def __init__(self, stages: Sequence[Stage], layout: ResolvedLayout, mesh: Mesh) -> None:
        self._stages, self._layout, self._mesh = stages, layout, mesh
        self._lists = actions(layout.schedule, layout.pp, layout.num_micro_batches, layout.vpp)
        self._pipelines: dict[tuple[int, ...], Pipeline] = {}
        self._batches: Sequence[Batch] = ()
        self._loss: TokenLoss | None = None
        self._times: PipelineTimes | None = None

    def time_with(self, times: PipelineTimes | None) -> None:
        self._times = times
        for pipeline in self._pipelines.values():
            pipeline.observer = times

    def run(self, batches: Sequence[Batch], loss: TokenLoss) -> Tensor:
        self._batches, self._loss = batches, loss
        pipeline = self._pipeline(batches[0].tokens)
        if self._times is not None:
            self._times.begin()
        losses = [loss.reported(each) for each in pipeline.run()]
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
            _dropping(decoder_stage(s.module, s.virtual, count, self._batch, self._contribution, split), s.dropout)
            for s in self._stages
        ]
        where = placement(layout.schedule)
        return Pipeline(self._lists, mesh.index("pp"), stages, where, mesh.group("pp"), boundary, observer=self._times)

    def _batch(self, micro_batch: int) -> Batch:
        return self._batches[micro_batch]

    def _contribution(self, logits: Tensor, labels: Tensor) -> Tensor:
        if self._loss is None:
            raise RuntimeError("a pipeline stage ran outside Pipelined.run")
        return self._loss(logits, labels)


def _dropping(stage: PipelineStage, dropout: Dropout | None) -> PipelineStage:
    """The stage, which tells its dropout whose forward it runs."""
    if dropout is None:
        return stage

    def forward(micro_batch: int, received: Tensor | None) -> Tensor:
        dropout.start(micro_batch)
        return stage.forward(micro_batch, received)

    return replace(stage, forward=forward)


def engine_for(stages: Sequence[Stage], layout: ResolvedLayout, mesh: Mesh) -> Engine:
    if layout.pp * layout.vpp == 1:
        return OneStage(stages[0])
    return Pipelined(stages, layout, mesh)
