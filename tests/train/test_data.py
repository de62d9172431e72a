"""The synthetic source: sample i is sample i under every layout, and there is something to learn in it."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from proofs import llama

from fivefold.layout import Layout, Workload, resolve
from fivefold.train.data import Synthetic, sample_indices
from fivefold.train.loss import IGNORED


@given(dp=st.integers(1, 6), micro=st.integers(1, 4), count=st.integers(1, 5), step=st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_every_layout_sees_the_same_step(dp: int, micro: int, count: int, step: int) -> None:
    batch = dp * micro * count
    layout = resolve(Layout(micro_batch=micro), llama(), dp, Workload(seq_len=8, global_batch=batch))
    seen = [i for d in range(dp) for rows in sample_indices(step, layout, d) for i in rows]
    assert sorted(seen) == list(range(step * batch, (step + 1) * batch))
    assert all(len(rows) == micro for rows in sample_indices(step, layout, 0))


def test_a_sample_does_not_depend_on_its_company() -> None:
    source = Synthetic(50, 12, seed=7, uneven=True)
    tokens, labels = source.samples(range(5, 11))
    for row, index in enumerate(range(5, 11)):
        alone, its_labels = Synthetic(50, 12, seed=7, uneven=True).samples([index])
        assert torch.equal(alone[0], tokens[row])
        assert torch.equal(its_labels[0], labels[row])
    other, _ = Synthetic(50, 12, seed=8).samples(range(5, 11))
    assert not torch.equal(other, tokens)


def test_labels_are_the_next_tokens() -> None:
    tokens, labels = Synthetic(50, 12).samples(range(4))
    assert torch.equal(tokens[:, 1:], labels[:, :-1])


def test_most_tokens_follow_one_permutation() -> None:
    tokens, labels = Synthetic(40, 500, noise=0.1).samples(range(20))
    table = np.zeros((40, 40))
    np.add.at(table, (tokens.flatten().numpy(), labels.flatten().numpy()), 1)
    likely = table.argmax(axis=1)
    assert sorted(likely) == list(range(40))
    share = table.max(axis=1).sum() / table.sum()
    assert abs(share - (0.9 + 0.1 / 40)) < 0.01


def test_uneven_masks_differ_and_leave_tokens_alone() -> None:
    plain, uneven = Synthetic(40, 16), Synthetic(40, 16, uneven=True)
    assert torch.equal(plain.samples(range(64))[0], uneven.samples(range(64))[0])
    valid = (uneven.samples(range(64))[1] != IGNORED).sum(1)
    assert (plain.samples(range(64))[1] != IGNORED).all()
    assert 0 in valid
    assert len(valid.unique()) > 8


def test_micro_batches_carry_positions() -> None:
    layout = resolve(Layout(micro_batch=2), llama(), 2, Workload(seq_len=16, global_batch=8))
    batches = Synthetic(40, 16).micro_batches(0, layout, dp_index=1)
    assert [b.tokens.shape for b in batches] == [(2, 16)] * 2
    assert torch.equal(batches[0].positions, torch.arange(16))
