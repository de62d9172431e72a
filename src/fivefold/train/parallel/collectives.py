"""Collectives with gradients along the sequence, and collectives in flight.

Tensors are [batch, sequence, width]; the sequence is dimension 1, and rank i of a group holds its i-th part. A group
of None has one rank, and every function here then returns its input. Each forward has the backward that is its
transpose: a sum over ranks goes with a copy, a gather with a reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.train.mesh import Group, gather_into, reduce_scatter_into


class Pending:
    """A collective in flight; wait() blocks until it is done and gives its result."""

    def __init__(self, work: dist.Work | None, buffer: Tensor, arrange: Callable[[Tensor], Tensor] | None = None):
        self._work, self._buffer, self._arrange = work, buffer, arrange

    def wait(self) -> Tensor:
        if self._work is not None:
            self._work.wait()
        return self._buffer if self._arrange is None else self._arrange(self._buffer)


def start_gather(x: Tensor, group: Group) -> Pending:
    """[b, s / n, w] on each of n ranks to [b, s, w] on all."""
    if group is None:
        return Pending(None, x)
    ranks = group.size()
    buffer = x.new_empty((ranks * x.shape[0], *x.shape[1:]))
    work = gather_into(buffer, x.contiguous(), group=group, async_op=True)
    # With one sequence in the batch the parts already lie in order, and this is a view.
    return Pending(work, buffer, lambda parts: parts.unflatten(0, (ranks, -1)).transpose(0, 1).flatten(1, 2))


def start_reduce_scatter(x: Tensor, group: Group) -> Pending:
    """[b, s, w], different on each of n ranks, to this rank's part [b, s / n, w] of the sum."""
    if group is None:
        return Pending(None, x)
    parts = x.unflatten(1, (group.size(), -1)).transpose(0, 1).flatten(0, 1).contiguous()
    buffer = parts.new_empty((x.shape[0], *parts.shape[1:]))
    return Pending(reduce_scatter_into(buffer, parts, group=group, async_op=True), buffer)


def start_all_reduce(x: Tensor, group: Group) -> Pending:
    """The sum over the group, in place."""
    if group is None:
        return Pending(None, x)
    return Pending(dist.all_reduce(x, group=group, async_op=True), x)


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.mark_dirty(x)
        return start_all_reduce(x, group).wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return start_reduce_scatter(x, group).wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return start_gather(grads[0], ctx.group).wait(), None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _AllToAll.apply(grads[0], ctx.group), None


def reduce_partial(x: Tensor, group: Group, scatter: bool) -> Tensor:
    """The sum of the ranks' partial [b, s, w]: whole on every rank, or with `scatter` its part of the sequence.

    Without `scatter` the sum overwrites x, which has to be a fresh result that nothing saved for backward.
    """
    if group is None:
        return x
    return _ReduceScatter.apply(x, group) if scatter else _Reduce.apply(x, group)


def all_to_all(x: Tensor, group: Group) -> Tensor:
    """Part i of dimension 0 goes to rank i; what comes back is in the order of the senders."""
    return x if group is None else _AllToAll.apply(x, group)
