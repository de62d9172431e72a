"""The vocabulary over tensor-parallel ranks: embedding, and cross-entropy without whole logits.

Rank i of n holds rows [i · r, (i + 1) · r) of the embedding and of the head, r = ceil(vocab / n); rows beyond the
vocabulary are padding that no token names and no logit counts (Shoeybi et al. 2019, arXiv 1909.08053, section 3).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - the name everybody uses

from fivefold.train.loss import IGNORED
from fivefold.train.mesh import Group, Mesh, all_reduce
from fivefold.train.parallel.collectives import reduce_partial


class VocabEmbedding(nn.Module):
    """Tokens [batch, seq] to hidden states [batch, seq, hidden], or with sequence parallelism to this rank's part
    [batch, seq / tp, hidden]. Each rank looks up the rows that it holds; the sum over ranks completes the rest."""

    def __init__(self, weight: nn.Parameter, group: Group, index: int, sequence_parallel: bool) -> None:
        super().__init__()
        self.weight = weight
        self.group, self.index, self.sequence_parallel = group, index, sequence_parallel

    def forward(self, tokens: Tensor) -> Tensor:
        local, elsewhere = local_rows(tokens, self.index, self.weight.shape[0])
        partial = F.embedding(local, self.weight).masked_fill(elsewhere[..., None], 0.0)
        return reduce_partial(partial, self.group, self.sequence_parallel)


def local_rows(tokens: Tensor, index: int, rows: int) -> tuple[Tensor, Tensor]:
    """(row in this rank's part, 0 where another rank holds it; whether another rank holds it)."""
    local = tokens - index * rows
    elsewhere = (local < 0) | (local >= rows)
    return local.masked_fill(elsewhere, 0), elsewhere


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, group: Group, index: int, vocab: int) -> Tensor:
        exact = torch.float64 if logits.dtype == torch.float64 else torch.float32
        rows = logits.shape[-1]
        padding = max((index + 1) * rows - vocab, 0)  # the last rows, on the last ranks
        scores = logits.to(exact)
        if padding:
            scores = scores.clone() if scores is logits else scores
            scores[..., max(rows - padding, 0) :] = -torch.inf
        largest = all_reduce(scores.amax(-1), group, dist.ReduceOp.MAX)
        scores = scores - largest[..., None]
        target, elsewhere = local_rows(labels, index, rows)
        own = scores.gather(-1, target[..., None])[..., 0].masked_fill(elsewhere, 0.0)
        exponentials = scores.exp_()
        total, own = all_reduce(torch.stack((exponentials.sum(-1), own)), group)
        valid = labels != IGNORED
        ctx.save_for_backward(exponentials, total, target, elsewhere, valid)
        ctx.dtype = logits.dtype
        return torch.where(valid, total.log() - own, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        exponentials, total, target, elsewhere, valid = ctx.saved_tensors
        scale = grads[0] * valid  # [b, s]
        # In place: autograd's version counter refuses a second backward.
        grad = exponentials.mul_((scale / total)[..., None])
        grad.scatter_add_(-1, target[..., None], -scale.masked_fill(elsewhere, 0.0)[..., None])
        return grad.to(ctx.dtype), None, None, None, None


class VocabCrossEntropy:
    """Cross-entropy over the parts of the vocabulary that the tp ranks of `mesh` hold (a fivefold.train.loss
    CrossEntropy). vocab: rows of the vocabulary without padding.

    logits: this rank's columns, [batch, seq, ceil(vocab / tp)]. labels: [batch, seq], in [0, vocab) where they count.
    Gives the sum over valid tokens of -log softmax(logits)[label], the same scalar on every rank. Two all-reduces, of
    one number and of two per token; fp32 inside for half-precision logits.
    """

    def __init__(self, mesh: Mesh, vocab: int) -> None:
        self.group, self.index, self.vocab = mesh.group("tp"), mesh.index("tp"), vocab

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        return _CrossEntropy.apply(logits, labels, self.group, self.index, self.vocab)
