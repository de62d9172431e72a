"""ZB-H1: 1F1B whose backward is split, with the weights' gradients filling the bubble at 1F1B's memory.

Rank s of p runs w = min(p-1-s, m) forwards ahead as 1F1B does, then one forward and one input gradient in turn. Its
weight gradients lag s micro-batches behind, which is what the forwards it did not run ahead leave room for: every
rank holds min(p, m) micro-batches. In the end the weights' gradients still owed run while others drain. With equal
stages and W <= F, W <= B the bubble is (p-1)(F+B-W) against 1F1B's (p-1)(F+B+W); no schedule here runs W before its B.
Source: Qi et al. 2023 (arXiv 2401.10241), section 2.1 and table 1; the place of each W as in PyTorch 2.13,
torch/distributed/pipelining/schedules.py, ScheduleInterleavedZeroBubble with one stage per rank.
"""

from __future__ import annotations

import numpy as np

from fivefold.schedule.actions import Action, Boundary, RankActions, forward, input_grad, weight_grad
from fivefold.schedule.schedule import Ints, Schedule, only_one_chunk
from fivefold.schedule.split import with_exchanges


def _order(rank: int, p: int, m: int) -> list[Action]:
    warmup = min(p - 1 - rank, m)
    steps = [forward(i) for i in range(warmup)]
    for j in range(m):
        if warmup + j < m:
            steps.append(forward(warmup + j))
        steps.append(input_grad(j))
        if j >= rank:
            steps.append(weight_grad(j - rank))
    return steps + [weight_grad(j) for j in range(max(m - rank, 0), m)]


def _actions(p: int, m: int, v: int) -> list[RankActions]:
    return [with_exchanges(_order(rank, p, m), Boundary(rank, p), m) for rank in range(p)]


def _held(p: int, m: int, v: int, steps: Ints) -> Ints:
    return np.full((len(steps), p, 1), min(p, m), dtype=np.int64)


ZB_H1 = Schedule(
    name="zb-h1",
    illegal=only_one_chunk,
    actions=_actions,
    held=_held,
    cycle=lambda p, m, v: 1,
    splits_backward=True,
)
