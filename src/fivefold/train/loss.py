"""The loss: cross-entropy summed over valid tokens and divided by the number of them in the whole global batch.

That number is known before the first backward, so the contributions of micro-batches, data-parallel replicas and
sequence parts simply add up: every reduction of gradients in this trainer is a sum, and uneven masks need no care.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

from fivefold.errors import FivefoldError
from fivefold.train.mesh import Group, all_reduce

IGNORED = -100  # label of a token that no loss is taken of (PyTorch's and transformers' ignore_index)


class CrossEntropy(Protocol):
    """Logits [batch, seq, vocab] or a part of the vocabulary, labels [batch, seq] -> the sum over valid tokens."""

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor: ...


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Summed cross-entropy of whole logits, in at least fp32; a scalar. Saves the log-probabilities, which the one
    backward that it has turns into the gradient in place."""
    return _CrossEntropySum.apply(logits, labels)


class _CrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        exact = torch.float64 if logits.dtype == torch.float64 else torch.float32
        log_probabilities = torch.log_softmax(logits, dim=-1, dtype=exact)
        valid = labels != IGNORED
        target = labels.masked_fill(~valid, 0)[..., None]
        ctx.save_for_backward(log_probabilities, target, valid)
        ctx.dtype = logits.dtype
        return -log_probabilities.gather(-1, target)[..., 0].masked_fill(~valid, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        log_probabilities, target, valid = ctx.saved_tensors
        scale = (grads[0] * valid)[..., None]
        # In place: autograd's version counter refuses a second backward.
        grad = log_probabilities.exp_().mul_(scale).scatter_add_(-1, target, -scale)
        return grad.to(ctx.dtype), None


def global_valid_tokens(labels: Iterable[Tensor], group: Group) -> int:
    """Valid labels in all micro-batches of all ranks of `group` (the mesh's "dp_cp"). A collective call.

    Raises FivefoldError when there is none, since the mean over no token is not a number.
    """
    counts = [(label != IGNORED).sum() for label in labels]
    total = int(all_reduce(torch.stack(counts).sum(), group).item())
    if total == 0:
        raise FivefoldError(
            f"The global batch has no valid token: every label is {IGNORED}. Check the masks of the data.",
            code="no-valid-token",
            option="labels",
            value=IGNORED,
        )
    return total


class TokenLoss:
    """One micro-batch's contribution to the mean loss of the global batch.

    valid_tokens: of the whole global batch. cross_entropy: how a sum is taken of (a part of) the logits; tensor
    parallelism brings its own. scale: multiplies what backward starts from (fp16's loss scale), not what is reported.
    """

    def __init__(self, valid_tokens: int, cross_entropy: CrossEntropy = cross_entropy_sum, scale: float = 1.0) -> None:
        self.valid_tokens = valid_tokens
        self.scale = scale
        self._cross_entropy = cross_entropy

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The contribution, times the scale: what backward is called on."""
        return self._cross_entropy(logits, labels) * (self.scale / self.valid_tokens)

    def reported(self, loss: Tensor) -> Tensor:
        """The contribution without the scale, detached."""
        return loss.detach() / self.scale
