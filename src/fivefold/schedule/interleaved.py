"""Interleaved 1F1B, in Megatron-Core's order, with point-to-point transfers overlapped (`overlap_p2p_comm`).

Rank r of p holds v chunks. Its k-th forward takes micro-batches in groups of p, each group through chunk 0, then
chunk 1, ...; backwards likewise with the chunks reversed. w = min(2(p-1-r) + (v-1)p, m*v) forwards run ahead. After
each step its output is sent and the next input of that direction is awaited, neither of which stops the rank.
Source: Megatron-LM, megatron/core/pipeline_parallel/schedules.py, get_schedule_table, get_pp_rank_microbatches and
forward_backward_pipelining_with_interleaving, in the form that has `microbatch_group_size_per_vp_stage` (here p, its
default). Older versions ran all forwards first when m == p; this form does not. Megatron's warm-up exchanges block
unless `overlap_p2p_comm_warmup_flush` is set; here they do not block.
"""

from __future__ import annotations

from typing import Self

import numpy as np

from fivefold.schedule.actions import Boundary, RankActions, backward, exchange, forward
from fivefold.schedule.schedule import Floats, Ints, Schedule
from fivefold.schedule.sweep import Sweep, finish_exactly


def _illegal(p: int, m: int, v: int) -> str | None:
    if p < 2:
        return f"interleaving needs at least 2 pipeline ranks, and p = {p}"
    if v < 2:
        return f"interleaving needs at least 2 chunks per rank, and v = {v}; use 1f1b"
    if m % p:
        return f"the number of micro-batches has to be a multiple of the {p} pipeline ranks, and m = {m}"
    return None


def _warmup(rank: int, p: int, m: int, v: int) -> int:
    return min(2 * (p - 1 - rank) + (v - 1) * p, m * v)


def _place(k: int, p: int, v: int) -> tuple[int, int]:
    """(micro-batch, chunk) of the k-th forward; the k-th backward has chunk v-1-chunk."""
    group, within = divmod(k, p * v)
    chunk, offset = divmod(within, p)
    return group * p + offset, chunk


def _rank_actions(rank: int, p: int, m: int, v: int) -> RankActions:
    edge = Boundary(rank, p, v)
    total, warmup = m * v, _warmup(rank, p, m, v)

    def back(j: int) -> tuple[int, int]:
        micro_batch, chunk = _place(j, p, v)
        return micro_batch, v - 1 - chunk

    def run_forward(k: int) -> RankActions:
        here = _place(k, p, v)
        next_input = edge.recv_activation(*_place(k + 1, p, v)) if k + 1 < total else None
        return [forward(*here), *exchange(edge.send_activation(*here), next_input, blocking=False)]

    def run_backward(j: int) -> RankActions:
        here = back(j)
        next_input = edge.recv_gradient(*back(j + 1)) if j + 1 < total else None
        return [backward(*here), *exchange(edge.send_gradient(*here), next_input, blocking=False)]

    steps = exchange(edge.recv_activation(0, 0), blocking=False)
    for k in range(warmup):
        steps += run_forward(k)
    steps += exchange(edge.recv_gradient(*back(0)), blocking=False)
    for k in range(warmup, total):
        steps += [*run_forward(k), *run_backward(k - warmup)]
    for j in range(total - warmup, total):
        steps += run_backward(j)
    return steps


def _actions(p: int, m: int, v: int) -> list[RankActions]:
    return [_rank_actions(rank, p, m, v) for rank in range(p)]


def _held(p: int, m: int, v: int, steps: Ints) -> Ints:
    """Micro-batches whose forward is done and whose backward is not, after forward w + step and before its backward."""
    chunks = np.arange(v)
    warmup = np.minimum(2 * (p - 1 - np.arange(p)) + (v - 1) * p, m * v)
    # A rank that runs fewer steps than asked repeats its first moment.
    step = np.where(warmup + steps[:, None] < m * v, steps[:, None], 0)[..., None]
    forwards = np.minimum(warmup[:, None] + step + 1, m * v)

    def through(count: Ints, chunk: Ints) -> Ints:
        """How many of the first `count` forwards are of this chunk."""
        return p * (count // (p * v)) + np.clip(count % (p * v) - chunk * p, 0, p)

    return through(forwards, chunks) - through(step, v - 1 - chunks)


class _StaggeredSweep(Sweep):
    """Level by level: at each level l all ranks run one forward, then all run one backward.

    Rank r runs forward k = l + (p-1-r) and backward j = l - (v-1)p - (p-1-r). What either waits for ended one level
    before: on the neighbour (the last rank's neighbour is the first), and on the rank itself, where the post of the
    receive followed the previous step of that direction.
    """

    def __init__(self, forward: Floats, backward: Floats, exchange: Floats) -> None:
        """forward, backward: [v, p, R] seconds; exchange: [R] seconds."""
        v, p, columns = forward.shape
        self._p, self._v, self.period = p, v, p
        self._forward, self._backward, self._c = forward, backward, exchange
        busy = p * (forward.sum(axis=0) + backward.sum(axis=0))
        self.slope = busy.max(axis=0)
        self.critical = np.concatenate([busy >= self.slope] * 2)
        self._level = -(p - 1)
        self._set_ends(np.zeros((p, columns)), np.zeros((p, columns)))

    def _set_ends(self, forward_ends: Floats, backward_ends: Floats) -> None:
        """Ends of each rank's last forward and backward, with the neighbour of the outermost rank beside them.

        Until a rank's first backward its backward end is when it posted the receive for that one.
        """
        self._f = np.concatenate([forward_ends[-1:], forward_ends])
        self._b = np.concatenate([backward_ends, backward_ends[:1]])
        self._start = np.empty(forward_ends.shape)

    def state(self) -> Floats:
        return np.concatenate([self._f[1:], self._b[:-1]])

    def take(self, columns: np.ndarray, keep: np.ndarray | None = None) -> Self:
        other = object.__new__(type(self))
        other._p, other._v, other.period, other._level = self._p, self._v, self.period, self._level
        other._forward, other._backward = self._forward[..., columns], self._backward[..., columns]
        other._c, other.slope, other.critical = self._c[columns], self.slope[columns], self.critical[:, columns]
        ends = self.state() if keep is None else np.where(keep, self.state(), -np.inf)
        other._set_ends(*np.split(ends[:, columns], 2))
        return other

    def advance(self, micro_batches: int) -> None:
        self._run(micro_batches * self._v - (self._p - 1), micro_batches)

    def finish(self, micro_batches: int) -> Floats:
        self._run((micro_batches + self._p) * self._v - 1, micro_batches)
        return np.maximum(self._f.max(axis=0, keepdims=True), self._b.max(axis=0, keepdims=True))

    def _run(self, stop: int, m: int) -> None:
        total = m * self._v
        posts = self._first_backward_posts(m)
        for level in range(self._level, stop):
            self._forward_level(level, total)
            for rank in posts.get(level, ()):
                self._b[rank] = self._f[rank + 1]
            self._backward_level(level, total)
        self._level = max(self._level, stop)

    def _first_backward_posts(self, m: int) -> dict[int, list[int]]:
        """Level -> ranks whose last warm-up forward it is: they post the receive for their first backward."""
        posts: dict[int, list[int]] = {}
        for rank in range(self._p):
            last_warmup = _warmup(rank, self._p, m, self._v) - 1
            posts.setdefault(last_warmup - (self._p - 1 - rank), []).append(rank)
        return posts

    def _forward_level(self, level: int, total: int) -> None:
        p = self._p
        k0 = level + p - 1  # the forward of rank 0
        first, stop = max(0, k0 - total + 1), min(p, k0 + 1)
        if first >= stop:
            return
        chunk, offset = divmod(k0 % (p * self._v), p)
        start = self._start[first:stop]
        np.maximum(self._f[first:stop], self._f[first + 1 : stop + 1], out=start)
        np.add(start, self._c, out=start)
        if first == 0 and chunk == 0:
            start[0] = self._f[1]  # the model's own input: nothing to wait for
        np.maximum(start, self._b[first:stop], out=start)
        # Ranks up to `offset` are in the chunk of rank 0, those after it still in the one before.
        split = min(max(offset + 1, first), stop)
        self._add(self._forward[chunk], first, split, self._f[1:])
        self._add(self._forward[chunk - 1], split, stop, self._f[1:])
        self._f[0] = self._f[p]

    def _backward_level(self, level: int, total: int) -> None:
        p, v = self._p, self._v
        j_last = level - (v - 1) * p  # the backward of the last rank
        first, stop = max(0, p - 1 - j_last), min(p, total - j_last + p - 1)
        if first >= stop:
            return
        group, offset = divmod(j_last % (p * v), p)
        chunk = v - 1 - group
        start = self._start[first:stop]
        np.maximum(self._b[first:stop], self._b[first + 1 : stop + 1], out=start)
        np.add(start, self._c, out=start)
        if stop == p and group == 0:
            start[-1] = self._b[p - 1]  # the loss: nothing to wait for
        np.maximum(start, self._f[first + 1 : stop + 1], out=start)
        split = min(max(p - 1 - offset, first), stop)
        self._add(self._backward[(chunk + 1) % v], first, split, self._b)
        self._add(self._backward[chunk], split, stop, self._b)
        self._b[p] = self._b[0]

    def _add(self, seconds: Floats, first: int, stop: int, ends: Floats) -> None:
        if first < stop:
            np.add(self._start[first:stop], seconds[first:stop], out=ends[first:stop])


def _seconds(p: int, m: int, v: int, forward: Floats, backward: Floats, exchange: Floats) -> Floats:
    # Steady from 2 periods on: rank 0 starts its first backward at level v*p - 1.
    return finish_exactly(_StaggeredSweep(forward, backward, exchange), m, first=3)[0]


INTERLEAVED = Schedule(
    name="interleaved",
    illegal=_illegal,
    actions=_actions,
    held=_held,
    cycle=lambda p, m, v: p * v,
    seconds=_seconds,
)
