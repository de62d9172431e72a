"""Sequence parallelism's collectives beside the products of the same layer, in pieces (Wang et al. 2023, "Overlap
communication with dependent computation via decomposition", ASPLOS; from memory). Megatron-LM's tp-comm-overlap.

A gather goes on while the rank's own part is multiplied, which is there already; a reduce-scatter of the first half of
every rank's part goes on while the second half is computed. What is summed is the same, so that results differ from
those without overlap by the order of a product's rows at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.train.parallel.collectives import start_gather, start_reduce_scatter

PIECES = 2  # of a reduce-scatter; as many collectives


def gathered_products(
    x: Tensor, group: dist.ProcessGroup, rights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> tuple[list[Tensor], Tensor]:
    """whole @ right + bias for each right [w, n] and bias [n], where whole [b, s, w] is gathered from the ranks'
    x [b, s / t, w]; and whole itself."""
    ranks, own = group.size(), group.rank()
    pending = start_gather(x, group)
    batch, part, _ = x.shape
    outs = [x.new_empty((ranks, batch, part, right.shape[1])) for right in rights]
    for out, right, bias in zip(outs, rights, biases, strict=True):
        _product(x, right, bias, out[own])
    whole = pending.wait()
    for rank, theirs in enumerate(whole.chunk(ranks, dim=1)):
        if rank != own:
            for out, right, bias in zip(outs, rights, biases, strict=True):
                _product(theirs, right, bias, out[rank])
    # With one sequence in the batch this is a view.
    return [out.transpose(0, 1).flatten(1, 2) for out in outs], whole


def scattered_product(x: Tensor, right: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's part [b, s / t, n] of the sum over the ranks of x @ right, x [b, s, w], right [w, n]."""
    parts = x.unflatten(1, (group.size(), -1))  # [b, t, s / t, w]
    pieces = parts.tensor_split(min(PIECES, parts.shape[2]), dim=2)
    pending = []
    for piece in pieces:
        product = piece.flatten(0, -2) @ right
        pending.append(start_reduce_scatter(product.view(x.shape[0], -1, right.shape[1]), group))
    return torch.cat([each.wait() for each in pending], dim=1)


def _product(x: Tensor, right: Tensor, bias: Tensor | None, out: Tensor) -> None:
    rows, into = x.flatten(0, -2), out.view(-1, right.shape[1])
    torch.mm(rows, right, out=into) if bias is None else torch.addmm(bias, rows, right, out=into)


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return scattered_product(x, weight.t(), group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        (grad_x,), whole = gathered_products(grads[0].contiguous(), ctx.group, [weight], [None])
        return grad_x, whole.flatten(0, -2).t() @ x.flatten(0, -2), None


def row_product(x: Tensor, weight: Tensor, group: dist.ProcessGroup) -> Tensor:
    """A row-cut layer's output: this rank's part [b, s / t, out] of the sum over ranks of x @ weight^T, for
    x [b, s, in / t] and weight [out, in / t]."""
    return cast(Tensor, _Row.apply(x, weight, group))
