"""1F1B without interleaving, in Megatron-Core's order.

Rank s of p runs w = min(p-1-s, m) forwards ahead, then one forward and one backward in turn, then the backwards left.
In the steady part the activation to the next rank and the gradient from it travel in one grouped exchange, and every
exchange blocks the rank. Source: Megatron-LM, megatron/core/pipeline_parallel/schedules.py,
forward_backward_pipelining_without_interleaving (order of steps read at commit 4dabc62385).
"""

from __future__ import annotations

from typing import Self

import numpy as np

from fivefold.schedule.actions import Boundary, RankActions, backward, exchange, forward
from fivefold.schedule.schedule import Floats, Ints, Schedule, only_one_chunk
from fivefold.schedule.sweep import Sweep, finish_exactly


def _rank_actions(rank: int, p: int, m: int) -> RankActions:
    edge = Boundary(rank, p)
    warmup = min(p - 1 - rank, m)
    steps: RankActions = []
    for i in range(warmup):
        steps += [*exchange(edge.recv_activation(i)), forward(i), *exchange(edge.send_activation(i))]
    if warmup < m:
        steps += exchange(edge.recv_activation(warmup))
    for i in range(warmup, m):
        j = i - warmup
        next_input = edge.recv_activation(i + 1) if i + 1 < m else None
        steps += [forward(i), *exchange(edge.send_activation(i), edge.recv_gradient(j))]
        steps += [backward(j), *exchange(edge.send_gradient(j), next_input)]
    for j in range(m - warmup, m):
        steps += [*exchange(edge.recv_gradient(j)), backward(j), *exchange(edge.send_gradient(j))]
    return steps


def _actions(p: int, m: int, v: int) -> list[RankActions]:
    return [_rank_actions(rank, p, m) for rank in range(p)]


def _held(p: int, m: int, v: int, steps: Ints) -> Ints:
    held = np.minimum(m, p - np.arange(p))
    return np.broadcast_to(held[None, :, None], (len(steps), p, 1)).copy()


class _LockstepSweep(Sweep):
    """1F1B level by level. F(s, i) is at level 2i-(p-1-s), B(s, j) at 2j+1+(p-1-s).

    Within a level the steps are independent: ranks of one parity run forward, the others backward. Then each pair
    (s, s+1) with s just after its forward meets in one exchange, which both leave at the same time. Because exchanges
    are grouped and blocking, that shared time is the only edge between ranks.
    """

    period = 1

    def __init__(self, forward: Floats, backward: Floats, exchange: Floats) -> None:
        """forward, backward: [p, R] seconds; exchange: [R] seconds."""
        p = len(forward)
        self._p, self._c = p, exchange
        # Seconds of each rank at a level where the ranks s = o, o+2, ... run forward, for o = 0, 1.
        self._work = np.stack([forward, forward])
        self._work[0, 1::2] = backward[1::2]
        self._work[1, 0::2] = backward[0::2]
        neighbours = np.full((p, 1), 2.0)
        neighbours[0] -= 1
        neighbours[-1] -= 1
        busy = forward + backward + neighbours * exchange
        self.slope = busy.max(axis=0)
        self.critical = busy >= self.slope
        self._level = -(p - 1)
        self._set_free(np.zeros(forward.shape))

    def _set_free(self, free: Floats) -> None:
        self._free = free
        self._meet = np.empty((max(1, self._p // 2), free.shape[1]))
        self._all_pairs = [self._pairs(o, (self._p - o) // 2) for o in (0, 1)]

    def _pairs(self, first: int, count: int) -> tuple[Floats, Floats, Floats, Floats] | None:
        """Views: the upper rank of each pair, the lower, both at once, and room for their meeting times."""
        if count <= 0:
            return None
        both = self._free[first : first + 2 * count].reshape(count, 2, -1)
        return both[:, 0], both[:, 1], both, self._meet[:count]

    def state(self) -> Floats:
        return self._free.copy()

    def take(self, columns: np.ndarray, keep: np.ndarray | None = None) -> Self:
        other = object.__new__(type(self))
        other._p, other._level, other._c = self._p, self._level, self._c[columns]
        other._work, other.slope = self._work[:, :, columns], self.slope[columns]
        other.critical = self.critical[:, columns]
        free = self._free if keep is None else np.where(keep, self._free, -np.inf)
        other._set_free(np.ascontiguousarray(free[:, columns]))
        return other

    def advance(self, micro_batches: int) -> None:
        self._run(2 * micro_batches - (self._p - 1), micro_batches)

    def finish(self, micro_batches: int) -> Floats:
        self._run(2 * micro_batches + self._p - 1, micro_batches)
        return self._free.max(axis=0, keepdims=True)

    def _run(self, stop: int, m: int) -> None:
        p, free = self._p, self._free
        for level in range(self._level, stop):
            o = (level + p - 1) & 1
            if p <= level <= 2 * m - p:
                np.add(free, self._work[o], out=free)
                pairs = self._all_pairs[o]
            else:
                pairs = self._partial_level(level, m, o)
            if pairs is not None:
                upper, lower, both, meet = pairs
                np.maximum(upper, lower, out=meet)
                np.add(meet, self._c, out=meet)
                both[...] = meet[:, None]
        self._level = max(self._level, stop)

    def _partial_level(self, level: int, m: int, o: int) -> tuple[Floats, Floats, Floats, Floats] | None:
        """The same at the ends of the pipeline, where only some ranks have a step: 0 <= i < m and 0 <= j < m."""
        p, free, work = self._p, self._free, self._work[o]
        forwards = _every_other(level + p - 2 * m, level + p, o, p)
        backwards = _every_other(p - level, p - level + 2 * m, 1 - o, p)
        for ranks in (forwards, backwards):
            if ranks:
                rows = slice(ranks.start, ranks.stop, 2)
                free[rows] += work[rows]
        if not forwards and not backwards:
            return None
        # The two ranges of meeting ranks always touch: before the last forward both end at the last rank.
        first = min(ranks[0] - shift for ranks, shift in ((forwards, 0), (backwards, 1)) if ranks)
        last = max(ranks[-1] - shift for ranks, shift in ((forwards, 0), (backwards, 1)) if ranks)
        first = max(first, o)
        last = last if last <= p - 2 else last - 2
        return self._pairs(first, (last - first) // 2 + 1)


def _every_other(first: int, stop: int, parity: int, p: int) -> range:
    """The ranks of one parity in [first, stop), cut to [0, p)."""
    first = max(first, 0)
    return range(first + ((first ^ parity) & 1), min(stop, p), 2)


def _seconds(p: int, m: int, v: int, forward: Floats, backward: Floats, exchange: Floats) -> Floats:
    sweep = _LockstepSweep(forward[0], backward[0], exchange)
    return finish_exactly(sweep, m, first=2 * p + 2)[0]


ONE_F_ONE_B = Schedule(
    name="1f1b",
    illegal=only_one_chunk,
    actions=_actions,
    held=_held,
    cycle=lambda p, m, v: 1,
    seconds=_seconds,
)
