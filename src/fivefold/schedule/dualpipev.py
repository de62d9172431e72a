"""DualPipeV: two stages per rank in a V, a forward beside every backward, some backwards split to fill the ends.

Rank r of p holds stages r (chunk 0) and 2p-1-r (chunk 1). Phases: 2(p-1-r) forwards of chunk 0; r+1 pairs of
forwards (chunk 0, chunk 1); p-1-r times input gradient, weight gradient and forward of chunk 1; the steady part:
forward of chunk 0 with backward of chunk 1, forward of chunk 1 with backward of chunk 0; p-1-r times backward of
chunk 1, then forward of chunk 1 with backward of chunk 0; r+1 pairs of backwards (chunk 1, chunk 0) of which the later
half is split; p-1-r times an owed weight gradient and an input gradient of chunk 0; the weight gradients still owed.
A rank holds up to 2p+1 chunk activations, and every rank has the same number. Where the original runs a forward and a
backward at once, to hide the communication inside layers, this list has the forward first and the backward after it.
Source: DeepSeek-AI's DualPipe repository (README: bubble (p-1)(F&B + B - 3W), from memory) and, for the phases, PyTorch
2.13, torch/distributed/pipelining/schedules.py, ScheduleDualPipeV.
"""

from __future__ import annotations

from collections import deque

from fivefold.schedule.actions import Action, backward, forward, input_grad, weight_grad
from fivefold.schedule.v_shape import two_chunks_in_a_v, v_schedule


def _illegal(p: int, m: int, v: int) -> str | None:
    if (reason := two_chunks_in_a_v(p, m, v)) is not None:
        return reason
    if m < 2 * p:
        return f"it needs at least as many micro-batches as stages, {2 * p}, and m = {m}"
    return None


class _Steps:
    """The compute steps of one rank; the weights' gradients owed are paid oldest first, whatever their chunk."""

    def __init__(self) -> None:
        self.taken: list[Action] = []
        self._forwards, self._backwards = [0, 0], [0, 0]
        self._owed: deque[Action] = deque()

    def f(self, chunk: int) -> None:
        self.taken.append(forward(self._forwards[chunk], chunk))
        self._forwards[chunk] += 1

    def back(self, chunk: int, split: bool = False) -> None:
        j = self._backwards[chunk]
        self._backwards[chunk] += 1
        self.taken.append(input_grad(j, chunk) if split else backward(j, chunk))
        if split:
            self._owed.append(weight_grad(j, chunk))

    def pay(self) -> None:
        if self._owed:
            self.taken.append(self._owed.popleft())


def _order(rank: int, p: int, m: int) -> list[Action]:
    steps, after = _Steps(), p - 1 - rank
    for _ in range(2 * after):
        steps.f(0)
    for _ in range(rank + 1):
        steps.f(0)
        steps.f(1)
    for _ in range(after):
        steps.back(1, split=True)
        steps.pay()
        steps.f(1)
    for _ in range(m - 2 * p + rank + 1):
        steps.f(0)
        steps.back(1)
        steps.f(1)
        steps.back(0)
    for _ in range(after):
        steps.back(1)
        steps.f(1)
        steps.back(0)
    for i in range(2 * (rank + 1)):
        # The later half, counted in single backwards, and one more where the half is odd.
        steps.back(1 - i % 2, split=i >= rank + 1)
    for _ in range(after):
        steps.pay()
        steps.back(0, split=True)
    for _ in range(rank + 1):
        steps.pay()
    return steps.taken


DUALPIPEV = v_schedule("dualpipev", _illegal, _order)
