"""A synthetic source of tokens that needs no download, can be learned, and does not know the layout.

Sample i is a function of (seed, i) alone. Step k of training takes samples k * global_batch and on; a layout decides
only which rank gets which of them, in which micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fivefold.layout import ResolvedLayout
from fivefold.train.loss import IGNORED


class Batch(NamedTuple):
    """One micro-batch of one rank.

    tokens, labels: [batch, seq], int64. positions: [seq], the place of each token in its sequence; under context
    parallelism a rank has only some of them.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor


class Synthetic:
    """A noisy walk: the next token follows a fixed random permutation of the vocabulary, or, with probability
    `noise`, is any token. A model that learns the permutation comes from ln(vocab) down to the walk's entropy.

    uneven: mask a random number of labels at the end of each sample, in one sample of eight all of them, so that
    replicas and micro-batches have different numbers of valid tokens.
    """

    def __init__(self, vocab: int, seq_len: int, seed: int = 0, noise: float = 0.1, uneven: bool = False) -> None:
        self.vocab, self.seq_len, self.seed, self.noise, self.uneven = vocab, seq_len, seed, noise, uneven
        self._next = np.random.Generator(np.random.Philox(key=[seed, 2**63])).permutation(vocab)

    def samples(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """(tokens, labels) of the given samples, [len(indices), seq_len] each; labels are the tokens one later."""
        generators = [np.random.Generator(np.random.Philox(key=[self.seed, index])) for index in indices]
        jumps = np.stack([g.integers(0, self.vocab, self.seq_len + 1) for g in generators])
        noisy = np.stack([g.random(self.seq_len + 1) < self.noise for g in generators])
        walk = jumps.copy()
        for t in range(1, self.seq_len + 1):
            walk[:, t] = np.where(noisy[:, t], jumps[:, t], self._next[walk[:, t - 1]])
        labels = walk[:, 1:].copy()
        if self.uneven:
            for row, generator in zip(labels, generators, strict=True):
                valid = 0 if generator.random() < 1 / 8 else generator.integers(1, self.seq_len + 1)
                row[valid:] = IGNORED
        return torch.from_numpy(walk[:, :-1].copy()), torch.from_numpy(labels)

    def micro_batches(self, step: int, layout: ResolvedLayout, dp_index: int) -> list[Batch]:
        """The micro-batches of one data-parallel replica in one step, whole sequences, in order."""
        positions = torch.arange(self.seq_len)
        return [Batch(*self.samples(rows), positions) for rows in sample_indices(step, layout, dp_index)]


def sample_indices(step: int, layout: ResolvedLayout, dp_index: int) -> list[range]:
    """Global sample indices of each micro-batch of a replica: micro-batch m of all replicas is one contiguous run, so
    that the whole step is samples [step * global_batch, (step + 1) * global_batch)."""
    size = layout.micro_batch
    first = step * layout.num_micro_batches * layout.dp
    starts = ((first + m * layout.dp + dp_index) * size for m in range(layout.num_micro_batches))
    return [range(start, start + size) for start in starts]
