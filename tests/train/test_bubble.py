"""The executor in a time of its own: what it measures is what the simulator says, to the last digit.

Every tensor carries the moment at which it was made, ranks have a clock each that only their own steps and what they
receive put forward (Lamport 1978), and the numbers are those that a measured step takes. No machine is fast or slow
here. Real seconds, on sleeping stages, are benchmarks/bubble.py's.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from proofs import SEQ, VOCAB, layout_of, llama
from ranks import run_ranks
from torch import Tensor

from fivefold.layout.layout import CHUNKS, SPLIT_BACKWARD
from fivefold.schedule import ActionKind, actions, placement, simulate
from fivefold.train.build import Setup
from fivefold.train.clock import PipelineTimes
from fivefold.train.data import Synthetic
from fivefold.train.measured import Measured
from fivefold.train.mesh import Mesh
from fivefold.train.parallel.peers import BoundaryTensor
from fivefold.train.parallel.pipeline import Pipeline, PipelineStage
from fivefold.train.trainer import Trainer


class LogicalClock:
    """Goes on when it is told to."""

    time_s = 0.0

    def now(self) -> float:
        return self.time_s

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def settle(self) -> None:
        pass


class _Takes(torch.autograd.Function):
    """Puts the clock forward in forward and in backward; values and gradients are moments."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: LogicalClock, forward_s: float, backward_s: float) -> Tensor:
        ctx.clock, ctx.backward_s = clock, backward_s
        clock.time_s += forward_s
        return torch.full_like(x, clock.time_s)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.clock.time_s += ctx.backward_s
        return torch.full_like(grads[0], ctx.clock.time_s), None, None, None


def stage(index: int, of: int, clock: LogicalClock, seconds: tuple[float, float, float]) -> PipelineStage:
    """A stage of (forward, whole backward, the weights' part of it) seconds. Its weight is multiplied in."""
    forward_s, backward_s, weight_s = seconds
    weight = torch.ones(1, dtype=torch.float64, requires_grad=True)

    def forward(micro_batch: int, received: Tensor | None) -> Tensor:
        x = torch.zeros(1, dtype=torch.float64, requires_grad=True) if received is None else received
        out = _Takes.apply(x, clock, forward_s, backward_s - weight_s)
        # Equal to out and to its gradient, whatever the weight's: moments survive.
        out = out + _Takes.apply(weight, clock, 0.0, weight_s) * 0 if weight_s else out
        return out.sum() if index == of - 1 else out

    return PipelineStage(index, of, forward)


class Case(NamedTuple):
    kind: str
    shape: str
    p: int
    m: int

    @property
    def v(self) -> int:
        return CHUNKS[self.kind][0]  # type: ignore[index]

    @property
    def seconds(self) -> list[tuple[float, float, float]]:
        units = [SHAPES[self.shape][i % len(SHAPES[self.shape])] for i in range(self.p * self.v)]
        return [(u, 2 * u, u if self.kind in SPLIT_BACKWARD else 0.0) for u in units]


SHAPES = {"equal": (1.0,), "unequal": (1.0, 0.5, 1.25, 0.75, 2.0)}  # sums of these are exact


def own_times(rank: int, case: Case) -> tuple[float, float]:
    """(end, busy) of this rank."""
    p, v, place = case.p, case.v, placement(case.kind)
    clock = LogicalClock()
    stages = [stage(i, p * v, clock, case.seconds[i]) for i in (place.stage(rank, c, p) for c in range(v))]
    times, boundary = PipelineTimes(clock), BoundaryTensor((1,), torch.float64)
    pipeline = Pipeline(
        actions(case.kind, p, case.m, v), rank, stages, place, dist.group.WORLD, boundary, observer=times
    )
    take = pipeline._peers.take

    def taken(key: Any) -> Tensor:
        tensor = take(key)
        clock.time_s = max(clock.time_s, tensor.item())
        return tensor

    pipeline._peers.take = taken  # type: ignore[method-assign]
    times.begin()
    pipeline.run()
    return times.end_s, times.busy_s


@pytest.mark.parametrize("p", [2, 4])
def test_the_executor_takes_the_time_that_the_simulator_says(p: int) -> None:
    cases = [Case(kind, shape, p, m) for kind in CHUNKS for shape in SHAPES for m in (2 * p, 8)]
    results = run_ranks(p, lambda rank: [own_times(rank, case) for case in cases])
    for place, case in enumerate(cases):
        forward, backward, weight = map(list, zip(*case.seconds, strict=True))
        timeline = simulate(
            actions(case.kind, p, case.m, case.v), forward, backward, placement=placement(case.kind),
            weight_grad_s=weight if case.kind in SPLIT_BACKWARD else None,
        )  # fmt: skip
        found = [rank[place] for rank in results]
        assert max(end for end, _ in found) == timeline.makespan_s, case
        assert [busy for _, busy in found] == timeline.busy_s.tolist(), case


def test_a_step_starts_when_its_input_is_made_and_the_bubble_is_what_is_left() -> None:
    """In real seconds, on the clock that the ranks of one machine share."""
    spec = llama(4)
    layout = layout_of(spec, 2, pp=2, vpp=2, micro_batch=2)

    def run(rank: int) -> Any:
        trainer = Trainer(spec, layout, Mesh(layout), Setup(precision="fp32"))
        with Measured(trainer) as measured:
            before = time.perf_counter()
            trainer.step(0, Synthetic(VOCAB, SEQ).micro_batches(0, layout, 0))
            elapsed = time.perf_counter() - before
            ranks, times = measured.take(elapsed, 0), measured.times
            assert times is not None
            return times._start, times.compute_s(), ranks, elapsed

    results = run_ranks(2, run)
    place = placement("interleaved")
    spans: dict[tuple[ActionKind, int | None, int], tuple[float, float]] = {}
    for rank, (begun, steps, _, _) in enumerate(results):
        for action, start, seconds in steps:
            key = (action.kind, action.micro_batch, place.stage(rank, action.chunk or 0, 2))
            spans[key] = begun + start, begun + start + seconds
    assert len(spans) == 2 * 4 * 4  # forward and backward of four micro-batches on four stages
    for (kind, micro_batch, index), (start, _) in spans.items():
        made_by = (kind, micro_batch, index - 1 if kind is ActionKind.FORWARD else index + 1)
        if made_by in spans:
            assert start >= spans[made_by][1]
    for rank, (_, steps, told, _) in enumerate(results):
        mine = told[rank]
        assert mine.busy_s == pytest.approx(sum(seconds for _, _, seconds in steps))
        assert mine.bubble == pytest.approx(1 - mine.busy_s / mine.pipeline_s)
        assert 0 < mine.bubble < 1
        assert mine.pipeline_s <= max(result[3] for result in results)
    assert results[0][2] == results[1][2]
