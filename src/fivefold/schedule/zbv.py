"""ZBV: two stages per rank in a V, backward split, no bubble when forward and both halves of backward cost the same.

Rank r of p holds stages r (chunk 0) and 2p-1-r (chunk 1), so the rank that starts a micro-batch also has its loss
and starts its backward without waiting for the way back. Phases of rank r: 2(p-r)-1 forwards of chunk 0; r pairs of
forwards (chunk 1, chunk 0); p-r times forward, input and weight gradient of chunk 1; then in turn chunk 0's and
chunk 1's forward, input gradient, weight gradient; r pairs of input gradients (chunk 0, chunk 1); p-r times input
gradient and an owed weight gradient of chunk 0; the weights' gradients still owed. A rank holds 2p chunk activations.
Source: Qi et al. 2023 (arXiv 2401.10241), section 6; the lengths of the phases as in PyTorch 2.13,
torch/distributed/pipelining/schedules.py, ScheduleZBVZeroBubble. Fewer than 2p-1 micro-batches run the order of 2p-1
with the missing ones left out, as there.
"""

from __future__ import annotations

from collections.abc import Callable

from fivefold.schedule.actions import Action, forward, input_grad, weight_grad
from fivefold.schedule.v_shape import two_chunks_in_a_v, v_schedule

_Make = Callable[[int, int], Action]  # of a micro-batch and a chunk


class _Steps:
    """The compute steps of one rank, each kind and chunk counting its own micro-batches."""

    def __init__(self) -> None:
        self.taken: list[Action] = []
        self._next: dict[tuple[_Make, int], int] = {
            (make, chunk): 0 for make in (forward, input_grad, weight_grad) for chunk in (0, 1)
        }

    def f(self, chunk: int) -> None:
        self._take(forward, chunk)

    def b(self, chunk: int) -> None:
        self._take(input_grad, chunk)

    def w(self, chunk: int) -> None:
        self._take(weight_grad, chunk)

    def bw(self, chunk: int) -> None:
        self.b(chunk)
        self.w(chunk)

    def forwards(self, chunk: int) -> int:
        return self._next[forward, chunk]

    def owed(self, chunk: int) -> int:
        """Weight gradients whose input gradient is done."""
        return self._next[input_grad, chunk] - self._next[weight_grad, chunk]

    def _take(self, make: _Make, chunk: int) -> None:
        self.taken.append(make(self._next[make, chunk], chunk))
        self._next[make, chunk] += 1


def _order(rank: int, p: int, m: int) -> list[Action]:
    steps, full = _Steps(), max(m, 2 * p - 1)
    for _ in range(2 * (p - rank) - 1):
        steps.f(0)
    for _ in range(rank):
        steps.f(1)
        steps.f(0)
    for _ in range(p - rank):
        steps.f(1)
        steps.bw(1)
    while steps.forwards(1) < full:
        if steps.forwards(0) < full:
            steps.f(0)
        steps.bw(0)
        steps.f(1)
        steps.bw(1)
    for _ in range(rank):
        steps.b(0)
        steps.b(1)
    for _ in range(p - rank):
        steps.bw(0)
    for chunk in (1, 0):
        for _ in range(steps.owed(chunk)):
            steps.w(chunk)
    return [action for action in steps.taken if action.micro_batch is not None and action.micro_batch < m]


ZBV = v_schedule("zbv", two_chunks_in_a_v, _order)
