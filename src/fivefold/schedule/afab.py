"""All forward, all backward (GPipe): every rank runs its m forwards, then its m backwards.

Each step is receive, compute, send, and every exchange blocks the rank. Backwards run in the order of the forwards.
Source of the idea: Huang et al. 2019 (GPipe), from memory. Receive, compute, send per micro-batch: picotron,
pipeline_parallel.py, train_step_pipeline_afab (forward half read; the backward half and nanotron's engine from memory).
"""

from __future__ import annotations

from typing import Self

import numpy as np

from fivefold.schedule.actions import Boundary, RankActions, backward, exchange, forward
from fivefold.schedule.schedule import Floats, Ints, Schedule, only_one_chunk
from fivefold.schedule.sweep import Sweep, finish_exactly


def _rank_actions(rank: int, p: int, m: int) -> RankActions:
    edge = Boundary(rank, p)
    steps: RankActions = []
    for i in range(m):
        steps += [*exchange(edge.recv_activation(i)), forward(i), *exchange(edge.send_activation(i))]
    for j in range(m):
        steps += [*exchange(edge.recv_gradient(j)), backward(j), *exchange(edge.send_gradient(j))]
    return steps


def _actions(p: int, m: int, v: int) -> list[RankActions]:
    return [_rank_actions(rank, p, m) for rank in range(p)]


def _held(p: int, m: int, v: int, steps: Ints) -> Ints:
    return np.full((len(steps), p, 1), m, dtype=np.int64)


class _OneWaySweep(Sweep):
    """m micro-batches through p ranks in one direction. Step (s, i) is at level 2i+s.

    After its step rank s meets rank s+1, which has sent micro-batch i-1 away one level before.
    """

    period = 1

    def __init__(self, work: Floats, exchange: Floats) -> None:
        """work: [p, R] seconds of one micro-batch; exchange: [R] seconds."""
        self._p, self._c, self._work = len(work), exchange, work
        neighbours = np.full((len(work), 1), 2.0)
        neighbours[0] -= 1
        neighbours[-1] -= 1
        busy = work + neighbours * exchange
        self.slope = busy.max(axis=0)
        self.critical = busy >= self.slope
        self._level = 0
        self._free = np.zeros(work.shape)

    def state(self) -> Floats:
        return self._free.copy()

    def take(self, columns: np.ndarray, keep: np.ndarray | None = None) -> Self:
        other = object.__new__(type(self))
        other._p, other._level, other._c = self._p, self._level, self._c[columns]
        other._work, other.slope = self._work[:, columns], self.slope[columns]
        other.critical = self.critical[:, columns]
        free = self._free if keep is None else np.where(keep, self._free, -np.inf)
        other._free = np.ascontiguousarray(free[:, columns])
        return other

    def advance(self, micro_batches: int) -> None:
        self._run(2 * micro_batches, micro_batches)

    def finish(self, micro_batches: int) -> Floats:
        """[p, R]: when each rank has sent its last micro-batch."""
        self._run(2 * micro_batches + self._p - 2, micro_batches)
        return self._free.copy()

    def _run(self, stop: int, m: int) -> None:
        p, free = self._p, self._free
        for level in range(self._level, stop):
            first = max(level & 1, level - 2 * (m - 1))
            last = min(p - 1, level)
            free[first : last + 1 : 2] += self._work[first : last + 1 : 2]
            count = (min(last, p - 2) - first) // 2 + 1
            if count > 0:
                both = free[first : first + 2 * count].reshape(count, 2, -1)
                both[...] = (np.maximum(both[:, 0], both[:, 1]) + self._c)[:, None]
        self._level = max(self._level, stop)


def _seconds(p: int, m: int, v: int, forward: Floats, backward: Floats, exchange: Floats) -> Floats:
    """Read backwards in time the backward half is a forward half, so both are swept together as columns.

    Every path from start to end crosses from one half to the other on exactly one rank.
    """
    sweep = _OneWaySweep(np.concatenate([forward[0], backward[0]], axis=1), np.concatenate([exchange, exchange]))
    ends = finish_exactly(sweep, m, first=2 * p + 2)
    before, after = np.split(ends, 2, axis=1)
    return (before + after).max(axis=0)


AFAB = Schedule(
    name="afab",
    illegal=only_one_chunk,
    actions=_actions,
    held=_held,
    cycle=lambda p, m, v: 1,
    seconds=_seconds,
)
