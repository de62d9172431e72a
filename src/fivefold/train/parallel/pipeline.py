"""Runs a pipeline schedule: the same action lists that the simulator times, on real stages and process groups.

A `Pipeline` is one rank's part. FORWARD keeps what backward needs, BACKWARD (or INPUT_GRAD and, later, WEIGHT_GRAD)
adds to the parameters' .grad, EXCHANGE posts its transfers together and waits for them where the schedule says so.
Gathers, reductions and the optimizer's step are no actions here: data parallelism does them by the modules' hooks
(sharded.py, data.py). Gradients are sums over micro-batches: the loss of each is its share of the global batch's
(fivefold.train.loss).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from fivefold.errors import FivefoldError
from fivefold.schedule import Action, ActionKind, Placement, RankActions
from fivefold.schedule import Tensor as Kind
from fivefold.train.clock import Clock
from fivefold.train.data import Batch
from fivefold.train.mesh import Group
from fivefold.train.model import Decoder
from fivefold.train.parallel.peers import BoundaryTensor, Key, Peers, releases
from fivefold.train.parallel.split_backward import Owed, input_gradient


@dataclass(frozen=True, slots=True)
class PipelineStage:
    """One virtual stage: number `index` of the `of` that the model is cut into.

    forward: (micro-batch, hidden states from the stage before, None on the first) -> hidden states for the next stage,
             on the last stage the micro-batch's loss, a scalar.
    body:    on the first stage, the module whose input is made of nothing but parameters (the first block, after the
             embedding). Schedules that split the backward run from there up at INPUT_GRAD, and the rest at WEIGHT_GRAD.
             None: the stage's whole backward runs at WEIGHT_GRAD.
    split:   False runs the whole backward at INPUT_GRAD and nothing at WEIGHT_GRAD: for recomputed layers, whose
             activations exist only while their backward runs.
    """

    index: int
    of: int
    forward: Callable[[int, Tensor | None], Tensor]
    body: nn.Module | None = None
    split: bool = True


def decoder_stage(
    decoder: Decoder,
    index: int,
    of: int,
    batch: Callable[[int], Batch],
    loss: Callable[[Tensor, Tensor], Tensor],
    split: bool = True,
) -> PipelineStage:
    """A Decoder that holds stage `index` of `of`, with the embedding on the first and the head on the last.

    batch: a micro-batch's tokens, labels and positions. loss: (logits, labels) -> the micro-batch's share of the
    global batch's loss. split: see PipelineStage.
    """

    def forward(micro_batch: int, received: Tensor | None) -> Tensor:
        tokens, labels, positions = batch(micro_batch)
        out = decoder(tokens if received is None else received, positions)
        return loss(out, labels) if index == of - 1 else out

    return PipelineStage(index, of, forward, next(iter(decoder.layers.values()), None), split)


class Observer(Protocol):
    """Told of every action with its start and end, two moments of its clock; a compute step starts when its input is
    there."""

    clock: Clock

    def __call__(self, action: Action, start: Any, end: Any) -> None: ...


class _Saved(NamedTuple):
    """What FORWARD keeps for one micro-batch. received: the leaf that stands for the stage before, None on the first.

    output is an edge and not the tensor, whose memory goes as soon as it is sent.
    """

    output: GradientEdge
    root: GradientEdge | None
    received: Tensor | None


class Pipeline:
    """One rank's stages under a schedule; `run` does one step.

    lists:     the action list of every rank (fivefold.schedule.actions).
    rank:      this one's place in the pipeline. stages: its chunks, in order.
    placement: of the schedule (fivefold.schedule.placement).
    group:     of the pipeline's ranks, None when there is one.
    boundary:  shape, dtype and device of the tensors between stages.
    observer:  None: nothing is timed.
    Raises FivefoldError when the stages are not those of the schedule, or an action is none that a rank does here.
    """

    def __init__(
        self,
        lists: Sequence[RankActions],
        rank: int,
        stages: Sequence[PipelineStage],
        placement: Placement,
        group: Group,
        boundary: BoundaryTensor,
        observer: Observer | None = None,
    ) -> None:
        self._actions, self._stages = lists[rank], list(stages)
        self.observer = observer
        self._last = len(lists) * len(stages) - 1
        self._peers = Peers(group, boundary, self._last + 1, releases(lists, rank, placement))
        self._here = {stage.index for stage in stages}
        self._steps = {
            ActionKind.FORWARD: self._forward,
            ActionKind.BACKWARD: self._backward,
            ActionKind.INPUT_GRAD: self._input_grad,
            ActionKind.WEIGHT_GRAD: self._weight_grad,
        }
        self._check(len(lists), rank, placement)
        self._saved: dict[tuple[int, int], _Saved] = {}  # by micro-batch and virtual stage
        self._owed: dict[tuple[int, int], Owed] = {}
        self._losses: dict[int, Tensor] = {}

    def run(self) -> list[Tensor]:
        """One step. The micro-batches' losses, detached, on the rank of the last stage; elsewhere an empty list."""
        self._losses = {}
        for action in self._actions:
            self._do(action)
        self._peers.finish()
        return [loss for _, loss in sorted(self._losses.items())]

    @property
    def activations_held(self) -> int:
        """Micro-batches, summed over chunks, of which something is kept for a backward yet to come."""
        return len(self._saved.keys() | self._owed.keys())

    def _do(self, action: Action) -> None:
        do = self._ready(action)
        if self.observer is None:
            do()
            return
        clock = self.observer.clock
        start = clock.now()
        do()
        self.observer(action, start, clock.now())

    def _ready(self, action: Action) -> Callable[[], None]:
        """What the action does, once its input is there."""
        if action.kind is ActionKind.EXCHANGE:
            return partial(self._peers.exchange, action)
        stage, micro_batch = self._stages[action.chunk or 0], action.micro_batch or 0
        received = self._awaited(action.kind, stage, micro_batch)
        return partial(self._steps[action.kind], stage, micro_batch, received)

    def _awaited(self, kind: ActionKind, stage: PipelineStage, micro_batch: int) -> Tensor | None:
        """What a compute step gets from another stage, None at the model's ends."""
        if kind is ActionKind.WEIGHT_GRAD or stage.index == (0 if kind is ActionKind.FORWARD else self._last):
            return None
        tensor = Kind.ACTIVATION if kind is ActionKind.FORWARD else Kind.GRADIENT
        return self._peers.take((tensor, micro_batch, stage.index))

    def _give(self, tensor: Tensor, kind: Kind, micro_batch: int, consumer: int) -> None:
        key: Key = (kind, micro_batch, consumer)
        (self._peers.keep if consumer in self._here else self._peers.offer)(key, tensor)

    # The compute steps

    def _forward(self, stage: PipelineStage, micro_batch: int, received: Tensor | None) -> None:
        if received is not None:
            received.requires_grad_()
        root: list[Tensor] = [] if received is None else [received]
        watch = None
        if received is None and stage.body is not None:
            watch = stage.body.register_forward_pre_hook(lambda _, inputs: root.append(inputs[0]))
        try:
            output = stage.forward(micro_batch, received)
        finally:
            if watch is not None:
                watch.remove()
        edge = get_gradient_edge(root[0]) if root and root[0].requires_grad else None
        self._saved[micro_batch, stage.index] = _Saved(get_gradient_edge(output), edge, received)
        if stage.index == self._last:
            self._losses[micro_batch] = output.detach()
        else:
            self._give(output.detach(), Kind.ACTIVATION, micro_batch, stage.index + 1)

    def _backward(self, stage: PipelineStage, micro_batch: int, received: Tensor | None) -> None:
        saved = self._saved.pop((micro_batch, stage.index))
        torch.autograd.backward([saved.output], [self._arriving(received, micro_batch)])
        if saved.received is not None:
            self._pass_back(saved.received.grad, stage, micro_batch)

    def _input_grad(self, stage: PipelineStage, micro_batch: int, received: Tensor | None) -> None:
        if not stage.split:
            self._backward(stage, micro_batch, received)
            self._owed[micro_batch, stage.index] = Owed()
            return
        saved = self._saved.pop((micro_batch, stage.index))
        gradient, owed = input_gradient(saved.output, self._arriving(received, micro_batch), saved.root)
        self._owed[micro_batch, stage.index] = owed
        if saved.received is not None:
            self._pass_back(gradient, stage, micro_batch)

    def _weight_grad(self, stage: PipelineStage, micro_batch: int, received: None) -> None:
        self._owed.pop((micro_batch, stage.index)).pay()

    def _arriving(self, received: Tensor | None, micro_batch: int) -> Tensor:
        """The gradient of a stage's output; that of the loss is one."""
        return torch.ones_like(self._losses[micro_batch]) if received is None else received

    def _pass_back(self, gradient: Tensor | None, stage: PipelineStage, micro_batch: int) -> None:
        if gradient is None:
            raise FivefoldError(
                f"The output of pipeline stage {stage.index} does not depend on its input, so no gradient goes back.",
                code="disconnected-stage",
            )
        self._give(gradient, Kind.GRADIENT, micro_batch, stage.index - 1)

    def _check(self, p: int, rank: int, placement: Placement) -> None:
        expected = [placement.stage(rank, chunk, p) for chunk in range(len(self._stages))]
        given = [stage.index for stage in self._stages]
        if given != expected or any(stage.of != self._last + 1 for stage in self._stages):
            raise FivefoldError(
                f"Rank {rank} of {p} holds stages {given} and has to hold {expected} of {self._last + 1}.",
                code="wrong-stages",
                value=given,
                legal=expected,
            )
        others = {action.kind for action in self._actions} - self._steps.keys() - {ActionKind.EXCHANGE}
        if others:
            raise FivefoldError(
                f"The schedule has actions that a pipeline does not do: {', '.join(sorted(k.value for k in others))}.",
                code="unhandled-action",
            )


def tied_pair(placement: Placement, p: int, v: int) -> tuple[int, int] | None:
    """The pipeline ranks of the first and the last stage, None when they are one: then both share one Parameter."""
    first, last = placement.home(0, p)[0], placement.home(p * v - 1, p)[0]
    return None if first == last else (first, last)
