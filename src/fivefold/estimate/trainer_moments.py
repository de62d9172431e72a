"""The moments of a training step at which a rank of fivefold's trainer can hold the most.

The candidates are the loss, the head's backward, the backward of a stage's uppermost block with all its micro-batches
in flight, the two halves of a backward that is split, and the end of a micro-batch's backward, where the embedding's
gradient and, under ZeRO, gradients that are being reduced are large. Each has bytes by the categories of the contract,
beside what stays; [n, C] everywhere: layouts by pipeline ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from fivefold.estimate.ledger import Column, Ledger
from fivefold.layout.layout import RECOMPUTE_KINDS, RECOMPUTE_MODULES

if TYPE_CHECKING:
    from fivefold.estimate.trainer_memory import TrainerMemory

_SINGLE = 4
_OF_SPLITS = ("norm at the end", "weight")
_BEFORE_THE_HEAD = ("loss", "gradient of logits", "head")
_FULL = RECOMPUTE_KINDS.index("full")
_MLP, _NORMS = (1 << RECOMPUTE_MODULES.index(name) for name in ("mlp", "layernorm"))

Moment = dict[str, np.ndarray]


def moments(m: TrainerMemory) -> Iterator[Moment]:
    """All of them."""
    held, ours = m.held
    yield from _loss(m, held, m.boundary_bytes)
    for kind in range(m.kernel.blocks):
        yield from _block(m, kind, held, m.boundary_bytes)
        yield from _split(m, kind, held, m.boundary_bytes)
    yield from _end(m, ours)


def _loss(m: TrainerMemory, held: np.ndarray, boundary: np.ndarray) -> Iterator[Moment]:
    ledger = m.ledger(m.head)
    kept = np.where(m.last, m.at(_row(ledger, "log-probabilities")), 0.0)
    there = m.last & ((m.kernel.table.held_plain - m.kernel.table.owed)[m.plan][..., m.head] > 0)
    before = m.in_reduction_before
    for row in ledger.working:
        at_head = row.name == "head"
        extra_gradient = 0.0 if row.name in _BEFORE_THE_HEAD else m.own_gradient(m.size(m.head))
        extra = m.at(row.bytes)
        moment = {
            "activations": np.where(there, held - kept, 0.0),
            "logits": np.where(there, kept + extra, 0.0),
            "gathered": np.where(there, _gathered_alone(m, m.head) if at_head else 0.0, 0.0),
            "buffers": np.where(there, boundary, 0.0),
        }
        # The head's own gradients, being reduced, take the place of those of the micro-batch before.
        yield m.moment(moment, there, np.maximum(before, extra_gradient))
        if at_head:
            # Once its weight's gradient is handed on, the whole gradient of the head is there too.
            gone = np.where(m.last & ~m.fused, _logits_gradient(m), 0.0)
            bucket = np.where(m.zero == 2, m.grad * m.buckets.head, 0.0)
            added = m.own_gradient(m.size(m.head)) + bucket - gone
            yield m.moment(moment, there, before + added)


def _logits_gradient(m: TrainerMemory) -> np.ndarray:
    ledger = m.ledger(m.head)
    product = next(row for row in ledger.gemms if row.name == "output_proj")
    return m.width * m.at(product.m) * m.at(product.n)


def _block(m: TrainerMemory, kind: int, held: np.ndarray, boundary: np.ndarray) -> Iterator[Moment]:
    kernel, table, v = m.kernel, m.kernel.table, m.kernel.variants
    here = table.count[m.plan][..., kind] > 0
    again = table.again[m.plan][..., kind] > 0
    saved, kept = v.saved[m.which, kind][:, None], v.kept[m.which, kind][:, None]
    refilled = np.where(again, _refilled(m, kind, saved - kept), 0.0)
    # Of a rank's blocks the first ones are recomputed: when they are, the others have let go of their tensors.
    plain = (table.count - table.again)[m.plan][..., kind] / kernel.columns.vpp[m.rows][:, None]
    mixed = np.maximum(refilled - plain * saved, 0)
    alone = held - m.head_saved + np.where(again & (plain > 0), mixed, refilled)
    size = m.size(kind)
    per_chunk = table.count[m.plan][..., kind] / kernel.columns.vpp[m.rows][:, None]
    several = per_chunk > 1
    gathered = np.where(m.zero == 3, m.width * size * np.where(several, 2, 1), 0.0)
    gathered = np.where(m.sharded, gathered, np.where(m.zero == 3, m.width * size, 0.0))
    # While the block below is being gathered, this rank's part of it is there in the dtype that computes.
    if m.width < _SINGLE:
        part = np.where(m.sharded & several & (m.zero == 3), m.width * size / m.shards, 0.0)
        boundary = boundary + part
    one = np.where(again, kept, saved)
    # What the micro-batch before left being reduced, unless the head's gradients took its place.
    before = m.in_reduction_before
    for row in m.ledger(kind).working:
        if row.name in _OF_SPLITS:
            continue
        there = np.where(m.fused, True, not row.first)
        own = np.where(there, m.own_gradient(size), 0.0) + _bucket_gradients(m, row.first)
        base = {"gathered": gathered, "buffers": boundary}
        yield m.moment({**base, "activations": alone + m.at(row.bytes)}, here, own)
        if before.any():
            ours = np.where(m.zero == 2, m.grad * m.buckets.pair * (0.0 if row.first else 0.5), own)
            yield m.moment({**base, "activations": alone + m.at(row.bytes)}, here & ~m.last, ours + before)
        if not (m.zero == 3).any():
            continue
        # One block further down the one above is still being reduced, and no longer holds its activations.
        above = m.own_gradient(size) * np.where(m.sharded, 1 + 1 / m.shards, 0.0)
        lower = {**base, "activations": alone - one + m.at(row.bytes)}
        yield m.moment(lower, here & several, own + above)


def _split(m: TrainerMemory, kind: int, held: np.ndarray, boundary: np.ndarray) -> Iterator[Moment]:
    """A backward that is split lets nothing go that its second half needs: the end of the first half, and the first
    product of the second."""
    kernel, table = m.kernel, m.kernel.table
    if not table.apart.any():
        return
    waiting = table.held_plain[m.plan] - table.owed[m.plan]
    per_chunk = table.count[m.plan][..., kind] / kernel.columns.vpp[m.rows][:, None]
    ledger, head = m.ledger(kind), m.ledger(m.head)
    ends = waiting[..., m.head] > 0
    # The loss's node lives until the first half is over.
    at_head = m.at(head.owed_bytes) + m.at(_row(head, "log-probabilities"))
    arrived = per_chunk * m.at(ledger.owed_bytes) + np.where(ends, at_head, 0.0)
    weight = np.where(ends, m.width * m.size(m.head), m.at(_moment(ledger, "weight")))
    norm = m.at(_moment(ledger, "norm at the end"))
    starts = table.apart[m.plan] & (waiting[..., kind] > 0)
    gathered = np.where(m.zero == 3, m.width * m.size(kind), 0.0)
    moment = {"activations": held + arrived + np.maximum(norm, weight), "buffers": boundary, "gathered": gathered}
    yield m.moment(moment, starts, m.in_reduction_before)
    # One block further up the one below is being gathered, with this rank's part in the dtype that computes.
    part = m.width * m.size(kind) / m.shards if m.width < _SINGLE else 0.0
    moment = {
        "activations": held + arrived - m.at(ledger.owed_bytes) + norm,
        "buffers": boundary + np.where(m.zero == 3, part, 0.0),
        "gathered": 2 * gathered,
    }
    sharded = (m.zero == 3) & m.sharded & (per_chunk > 1)
    yield m.moment(moment, starts & sharded, m.in_reduction_before)


def _refilled(m: TrainerMemory, kind: int, dropped: np.ndarray) -> np.ndarray:
    """What recomputation has brought back when the feed-forward runs backward."""
    c = m.kernel.columns
    mask = c.recompute_modules[m.rows][:, None]
    cost = m.kernel.costs[kind]
    norms = m.at(_row(m.ledger(kind), "feed_norm.output")) if mask.any() else 0.0
    feed = m.at(cost.dropped_bytes[RECOMPUTE_MODULES.index("mlp")])
    chosen = np.where(mask & _MLP, feed, 0.0) + np.where(mask & _NORMS, norms, 0.0)
    return np.where((c.recompute_kind[m.rows] == _FULL)[:, None], dropped, chosen)


def _bucket_gradients(m: TrainerMemory, first: bool) -> np.ndarray:
    """ZeRO-2's in the middle of a stage: the whole gradient of the bucket before, being reduced, and of this
    one."""
    if not (m.zero == 2).any():
        return np.zeros_like(m.whole)
    # The one before has a received part too.
    received = np.where(m.sharded, 0.5 / m.shards, 0.0)
    pair = m.buckets.pair * ((0.5 if first else 1.0) + received)
    return np.where(m.zero == 2, m.grad * pair, 0.0)


def _gathered_alone(m: TrainerMemory, index: int) -> np.ndarray:
    return np.where(m.zero == 3, m.width * m.size(index), 0.0)


def _end(m: TrainerMemory, ours: np.ndarray) -> Iterator[Moment]:
    """The embedding's gradient, when nothing else of its micro-batch is left; reductions that nobody waited for."""
    zero1 = (m.zero == 1) & m.sharded
    received = np.where(zero1, m.grad * m.owned, 0.0)
    yield {"buffers": received}
    yield from _lowest_block(m, received)
    ledger = m.ledger(m.embedding)
    others = _others_in_flight(m, ours)
    size = m.size(m.embedding)
    in_reduction = np.where(m.sharded, m.own_gradient(m.size(0)) * (1 + 1 / m.shards), 0.0)
    # Under ZeRO-1 gradients are reduced in the last micro-batch alone, beside which nothing is in flight.
    last = np.where(zero1, received * (1 - size / np.maximum(m.whole, 1)), 0.0)
    for waiting, spread in ((others, 0.0), (np.where(zero1, 0.0, others), last)):
        for row in ledger.working:
            moment = {"activations": waiting + m.at(row.bytes), "buffers": spread + np.zeros_like(others)}
            yield m.moment(moment, m.first, in_reduction)
        moment = {"activations": waiting, "buffers": spread + np.zeros_like(others)}
        yield m.moment(moment, m.first, in_reduction + m.own_gradient(size))


def _lowest_block(m: TrainerMemory, received: np.ndarray) -> Iterator[Moment]:
    """The first block of the last micro-batch, when all gradients but its own and the embedding's are being reduced
    and nothing else is in flight."""
    table, v = m.kernel.table, m.kernel.variants
    for kind in range(m.kernel.blocks if received.any() else 0):
        count, again = table.count[m.plan][..., kind], table.again[m.plan][..., kind] > 0
        saved, kept = v.saved[m.which, kind][:, None], v.kept[m.which, kind][:, None]
        alone = np.where(again, kept + _refilled(m, kind, saved - kept), saved) + m.rotary_bytes
        left = m.size(kind) + np.where(m.first, m.size(m.embedding), 0.0)
        spread = received * np.maximum(1 - left / np.maximum(m.whole, 1), 0.0)
        for row in (row for row in m.ledger(kind).working if row.name not in _OF_SPLITS):
            yield m.moment({"activations": alone + m.at(row.bytes), "buffers": spread}, count > 0, 0.0)


def _others_in_flight(m: TrainerMemory, ours: np.ndarray) -> np.ndarray:
    """Saved by micro-batches that wait while the first chunk of one of them ends its backward."""
    held, _ = m.held
    return np.maximum(held - ours, 0.0) - m.head_saved * (held - ours > 0)


def _row(ledger: Ledger, name: str) -> Column:
    return next((row.bytes for row in ledger.saved if row.name == name), 0.0)


def _moment(ledger: Ledger, name: str) -> Column:
    return next(row.bytes for row in ledger.working if row.name == name)
