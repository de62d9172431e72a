"""The memory of fivefold's trainer: what a rank keeps, and the moments of a step at which it can hold the most.

Every moment is a sum over the categories of the contract; the largest one is the peak. The candidates are the loss, the
head's backward, the backward of a stage's uppermost block with all its micro-batches in flight, and the end of a
micro-batch's backward, where the embedding's gradient and, under ZeRO, gradients that are being reduced are large.
tests/train/test_agreement.py holds the peaks to the trainer's, emulated.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from fivefold.estimate.arrays import distinct, dot
from fivefold.estimate.ledger import Ledger
from fivefold.estimate.trainer_buckets import Buckets, bucket_sizes, part_stages
from fivefold.layout.layout import RECOMPUTE_KINDS, RECOMPUTE_MODULES, SCHEDULES
from fivefold.model.spec import Attention

if TYPE_CHECKING:
    from fivefold.estimate.memory import MemoryModel

_SINGLE = 4
_OF_SPLITS = ("norm at the end", "weight")
_BEFORE_THE_HEAD = ("loss", "gradient of logits", "head")
_FULL = RECOMPUTE_KINDS.index("full")
_TOKEN_BYTES = 8
_MLP, _NORMS = (1 << RECOMPUTE_MODULES.index(name) for name in ("mlp", "layernorm"))

# Boundary tensors beside the one that a rank works on, by schedule: asked for ahead, or sent and not known to have
# arrived where transfers stop nobody. Between 2 and 6 under interleaved, by the rank and the moment.
_AHEAD = {"afab": 0, "1f1b": 0, "interleaved": 5, "zb-h1": 2, "zbv": 2, "dualpipev": 2}

Moment = dict[str, np.ndarray]


class TrainerMemory:
    """The memory of some layouts. [n, C] everywhere: layouts by pipeline ranks; kernel: what knows their tables."""

    def __init__(self, kernel: MemoryModel, rows: np.ndarray) -> None:
        self.kernel, self.rows = kernel, rows
        c, work = kernel.columns, kernel.problem.work
        self.plan, self.which, self.key = kernel.plan[rows], kernel.variant[rows], kernel.key[rows]
        self.width, self.grad = work.compute_bytes, kernel.grad_bytes
        self.whole, _ = kernel.rank_parameters(rows)
        self.zero, self.shards = c.zero[rows][:, None], np.maximum(c.dp_shard[rows], 1)[:, None]
        self.owned = self.whole / self.shards
        self.sharded = self.shards > 1
        self.first, self.last = kernel.table.first[self.plan], kernel.table.last[self.plan]
        self.accumulates = (c.num_micro_batches[rows] > 1)[:, None]
        self.embedding, self.head = kernel.blocks, kernel.blocks + 1
        # The product for a weight's gradient writes it where it is kept (fivefold.train.parallel.fused_gradients).
        self.fused = (self.grad == self.width) & (c.tp[rows] == 1)[:, None]

    def rank_memory(self) -> Moment:
        """Bytes by category at each rank's peak."""
        parts = self.resting()
        moments = list(self.moments())
        most = np.zeros_like(self.whole)
        which = np.full(self.whole.shape, -1)
        for number, moment in enumerate(moments):
            total = sum(moment.values())
            which = np.where(total > most, number, which)
            most = np.maximum(total, most)
        for number in np.unique(which[which >= 0]).tolist():
            here = which == number
            for name, value in moments[number].items():
                parts[name] = np.where(here, parts[name] + value, parts[name])
        return parts

    # ---------------------------------------------------------------- what stays

    def resting(self) -> Moment:
        """Between two steps."""
        kernel, half = self.kernel, self.width < _SINGLE
        zero3 = self.zero == 3
        masters = np.where(zero3 | half, _SINGLE * self.owned, 0.0)
        weights = np.where(zero3, 0.0, self.width * self.whole)
        # With one dtype throughout, ZeRO-3's parts are the weights themselves.
        weights, masters = (weights, masters) if half else (weights + masters, np.zeros_like(masters))
        states = 0.0 if kernel.problem.work.optimizer == "sgd" else kernel.state_bytes(self.rows, self.whole)
        zeros = np.zeros_like(self.whole)
        return {
            "weights": weights,
            "gradients": self.grad * np.where(self.zero >= 2, self.owned, self.whole),
            "master": masters,
            "optimizer": states * self.owned,
            "activations": zeros,
            "logits": zeros,
            "gathered": zeros,
            "buffers": self._batches() + zeros,
            "reserve": zeros + kernel.problem.runtime.workspace_bytes,
        }

    def _batches(self) -> np.ndarray:
        """Tokens, labels and positions of all micro-batches, and this rank's part of them under context parallelism."""
        c, seq = self.kernel.columns, self.kernel.problem.work.seq_len
        one = _TOKEN_BYTES * (2 * c.micro_batch[self.rows] + 1) * seq
        parts = 1 + np.where(c.cp[self.rows] > 1, 1 / c.cp[self.rows], 0)
        return (c.num_micro_batches[self.rows] * one * parts)[:, None]

    # ---------------------------------------------------------------- moments

    def moments(self) -> Iterator[Moment]:
        held, ours = self._held
        boundary = self._boundary
        yield from self._loss(held, boundary)
        for kind in range(self.kernel.blocks):
            yield from self._block(kind, held, boundary)
            yield from self._split(kind, held, boundary)
        yield from self._end(ours)

    @cached_property
    def _held(self) -> tuple[np.ndarray, np.ndarray]:
        """(saved by all micro-batches in flight, by one micro-batch of the first chunk), with rotary tables."""
        kernel, table, v = self.kernel, self.kernel.table, self.kernel.variants
        saved, kept = v.saved[self.which], v.kept[self.which]
        held = dot(table.held_plain[self.plan], saved) + dot(table.held_again[self.plan], kept)
        one = dot(table.newest_plain[self.plan], saved) + dot(table.newest_again[self.plan], kept)
        held = held + sum(
            table.owed[self.plan][..., index] * self._at(ledger.owed_bytes)
            for index, ledger in enumerate(self.kernel.ledgers)
        )
        tables = self._rotary_bytes
        chunks = table.held[self.plan] * kernel.columns.vpp[self.rows][:, None]
        return held + chunks * tables, one + tables

    @cached_property
    def _rotary_bytes(self) -> np.ndarray:
        """Cosines and sines that all blocks of one forward pass share, [n, 1]."""
        c, mixer = self.kernel.columns, self.kernel.problem.model.kinds[0].mixer
        if not isinstance(mixer, Attention) or not mixer.rope:
            return np.zeros((len(self.rows), 1))
        return (self.width * mixer.head_dim * self.kernel.problem.work.seq_len / c.cp[self.rows])[:, None]

    @cached_property
    def _boundary(self) -> np.ndarray:
        """Tensors of the pipeline that lie ready or are asked for while a block runs: what comes next is asked for
        ahead under schedules whose transfers stop nobody."""
        kernel, c = self.kernel, self.kernel.columns
        ahead = np.array([_AHEAD[name] for name in SCHEDULES])[c.schedule[self.rows]]
        return (np.where(c.pp[self.rows] > 1, ahead, 0) * kernel.boundary_bytes(self.rows))[:, None]

    def _ledger(self, index: int) -> Ledger:
        return self.kernel.ledgers[index]

    def _at(self, column) -> np.ndarray:
        """A ledger's column at the layouts' keys, [n, 1]."""
        keys = len(self.kernel.shard)
        return np.broadcast_to(np.asarray(column, dtype=float), (keys,))[self.key][:, None]

    def _size(self, index: int) -> np.ndarray:
        """Parameters of a piece, [n, 1]; of the head with its projection, wherever that is stored."""
        size = self.kernel.variants.dense[self.which, index][:, None]
        if index == self.head and self.kernel.problem.model.tied_embeddings:
            size = size + self.kernel.head_weight[self.key][:, None]
        return size

    @cached_property
    def _head_saved(self) -> np.ndarray:
        """What the head keeps of the micro-batches in flight on the last rank, and nothing on others."""
        table, v = self.kernel.table, self.kernel.variants
        count = (table.held_plain - table.owed)[self.plan][..., self.head]
        return np.minimum(count, 1) * v.saved[self.which, self.head][:, None]

    # ------------------------------------------------------------ the loss and the head

    def _loss(self, held: np.ndarray, boundary: np.ndarray) -> Iterator[Moment]:
        ledger = self._ledger(self.head)
        kept = np.where(self.last, self._at(_row(ledger, "log-probabilities")), 0.0)
        there = self.last & ((self.kernel.table.held_plain - self.kernel.table.owed)[self.plan][..., self.head] > 0)
        before = self._in_reduction_before
        for row in ledger.working:
            at_head = row.name == "head"
            extra_gradient = 0.0 if row.name in _BEFORE_THE_HEAD else self._own_gradient(self._size(self.head))
            extra = self._at(row.bytes)
            moment = {
                "activations": np.where(there, held - kept, 0.0),
                "logits": np.where(there, kept + extra, 0.0),
                "gathered": np.where(there, self._gathered_alone(self.head) if at_head else 0.0, 0.0),
                "buffers": np.where(there, boundary, 0.0),
            }
            # The head's own gradients, being reduced, take the place of those of the micro-batch before.
            yield self._with(moment, there, np.maximum(before, extra_gradient))
            if at_head:
                # Once its weight's gradient is handed on, the whole gradient of the head is there too.
                gone = np.where(self.last & ~self.fused, self._logits_gradient(), 0.0)
                bucket = np.where(self.zero == 2, self.grad * self._buckets.head, 0.0)
                added = self._own_gradient(self._size(self.head)) + bucket - gone
                yield self._with(moment, there, before + added)

    def _logits_gradient(self) -> np.ndarray:
        ledger = self._ledger(self.head)
        product = next(row for row in ledger.gemms if row.name == "output_proj")
        return self.width * self._at(product.m) * self._at(product.n)

    @cached_property
    def _in_reduction_before(self) -> np.ndarray:
        """Gradients of the micro-batch before that are still being reduced while this one runs forward: under ZeRO-3 of
        the unit, under ZeRO-2 of the bucket that backward came to last. Without overlap nothing is."""
        unit = np.where(self.first, self._size(self.embedding), self._size(0))
        last = np.where(self.zero == 3, unit, np.where(self.zero == 2, self._buckets.last, 0.0))
        overlapped = self.kernel.columns.overlap_grad[self.rows][:, None]
        return np.where(self.sharded & self.accumulates & overlapped, last * (1 + 1 / self.shards) * self.grad, 0.0)

    @cached_property
    def _buckets(self) -> Buckets:
        """Sizes of ZeRO-2's buckets, [n, C] elements each."""
        if not (self.zero == 2).any():
            nothing = np.zeros_like(self.whole)
            return Buckets(nothing, nothing, nothing)
        c, model, table = self.kernel.columns, self.kernel.problem.model, self.kernel.table
        numel = self.kernel.problem.runtime.grad_buckets * 4 // self.grad
        first, case = distinct([self.plan, c.tp[self.rows]])
        out = np.zeros((3, len(first), table.exists.shape[1]))
        for at, plan in enumerate(self.plan[first].tolist()):
            part, tp = self.kernel.plans[plan].part, int(c.tp[self.rows[first[at]]])
            for entry in np.flatnonzero(table.exists[plan]).tolist():
                stages = part_stages(part, int(table.rank[plan, entry]))
                out[:, at, entry] = bucket_sizes(model, stages, part.pp * part.vpp - 1, tp, numel)
        out = out[:, case]
        return Buckets(*out)

    # ------------------------------------------------------------ blocks

    def _block(self, kind: int, held: np.ndarray, boundary: np.ndarray) -> Iterator[Moment]:
        kernel, table, v = self.kernel, self.kernel.table, self.kernel.variants
        here = table.count[self.plan][..., kind] > 0
        again = table.again[self.plan][..., kind] > 0
        saved, kept = v.saved[self.which, kind][:, None], v.kept[self.which, kind][:, None]
        refilled = np.where(again, self._refilled(kind, saved - kept), 0.0)
        # Of a rank's blocks the first ones are recomputed: when they are, the others have let go of their tensors.
        plain = (table.count - table.again)[self.plan][..., kind] / kernel.columns.vpp[self.rows][:, None]
        mixed = np.maximum(refilled - plain * saved, 0)
        alone = held - self._head_saved + np.where(again & (plain > 0), mixed, refilled)
        size = self._size(kind)
        per_chunk = table.count[self.plan][..., kind] / kernel.columns.vpp[self.rows][:, None]
        several = per_chunk > 1
        gathered = np.where(self.zero == 3, self.width * size * np.where(several, 2, 1), 0.0)
        gathered = np.where(self.sharded, gathered, np.where(self.zero == 3, self.width * size, 0.0))
        # While the block below is being gathered, this rank's part of it is there in the dtype that computes.
        if self.width < _SINGLE:
            part = np.where(self.sharded & several & (self.zero == 3), self.width * size / self.shards, 0.0)
            boundary = boundary + part
        one = np.where(again, kept, saved)
        # What the micro-batch before left being reduced, unless the head's gradients took its place.
        before = self._in_reduction_before
        for row in self._ledger(kind).working:
            if row.name in _OF_SPLITS:
                continue
            there = np.where(self.fused, True, not row.first)
            own = np.where(there, self._own_gradient(size), 0.0) + self._bucket_gradients(row.first)
            base = {"gathered": gathered, "buffers": boundary}
            yield self._with({**base, "activations": alone + self._at(row.bytes)}, here, own)
            if before.any():
                ours = np.where(self.zero == 2, self.grad * self._buckets.pair * (0.0 if row.first else 0.5), own)
                yield self._with({**base, "activations": alone + self._at(row.bytes)}, here & ~self.last, ours + before)
            if not (self.zero == 3).any():
                continue
            # One block further down the one above is still being reduced, and no longer holds its activations.
            above = self._own_gradient(size) * np.where(self.sharded, 1 + 1 / self.shards, 0.0)
            lower = {**base, "activations": alone - one + self._at(row.bytes)}
            yield self._with(lower, here & several, own + above)

    def _split(self, kind: int, held: np.ndarray, boundary: np.ndarray) -> Iterator[Moment]:
        """A backward that is split lets nothing go that its second half needs: the end of the first half, and the first
        product of the second."""
        kernel, table = self.kernel, self.kernel.table
        if not table.apart.any():
            return
        waiting = table.held_plain[self.plan] - table.owed[self.plan]
        per_chunk = table.count[self.plan][..., kind] / kernel.columns.vpp[self.rows][:, None]
        ledger, head = self._ledger(kind), self._ledger(self.head)
        ends = waiting[..., self.head] > 0
        # The loss's node lives until the first half is over.
        at_head = self._at(head.owed_bytes) + self._at(_row(head, "log-probabilities"))
        arrived = per_chunk * self._at(ledger.owed_bytes) + np.where(ends, at_head, 0.0)
        weight = np.where(ends, self.width * self._size(self.head), self._at(_moment(ledger, "weight")))
        norm = self._at(_moment(ledger, "norm at the end"))
        starts = table.apart[self.plan] & (waiting[..., kind] > 0)
        gathered = np.where(self.zero == 3, self.width * self._size(kind), 0.0)
        moment = {"activations": held + arrived + np.maximum(norm, weight), "buffers": boundary, "gathered": gathered}
        yield self._with(moment, starts, self._in_reduction_before)
        # One block further up the one below is being gathered, with this rank's part in the dtype that computes.
        part = self.width * self._size(kind) / self.shards if self.width < _SINGLE else 0.0
        moment = {
            "activations": held + arrived - self._at(ledger.owed_bytes) + norm,
            "buffers": boundary + np.where(self.zero == 3, part, 0.0),
            "gathered": 2 * gathered,
        }
        sharded = (self.zero == 3) & self.sharded & (per_chunk > 1)
        yield self._with(moment, starts & sharded, self._in_reduction_before)

    def _refilled(self, kind: int, dropped: np.ndarray) -> np.ndarray:
        """What recomputation has brought back when the feed-forward runs backward."""
        c = self.kernel.columns
        mask = c.recompute_modules[self.rows][:, None]
        cost = self.kernel.costs[kind]
        norms = self._at(_row(self._ledger(kind), "feed_norm.output")) if mask.any() else 0.0
        feed = self._at(cost.dropped_bytes[RECOMPUTE_MODULES.index("mlp")])
        chosen = np.where(mask & _MLP, feed, 0.0) + np.where(mask & _NORMS, norms, 0.0)
        return np.where((c.recompute_kind[self.rows] == _FULL)[:, None], dropped, chosen)

    def _own_gradient(self, size: np.ndarray) -> np.ndarray:
        """The whole gradient of a unit that is being filled, beside the parts that are kept: ZeRO-3's."""
        return np.where(self.zero == 3, self.grad * size, 0.0)

    def _bucket_gradients(self, first: bool) -> np.ndarray:
        """ZeRO-2's in the middle of a stage: the whole gradient of the bucket before, being reduced, and of this
        one."""
        if not (self.zero == 2).any():
            return np.zeros_like(self.whole)
        # The one before has a received part too.
        received = np.where(self.sharded, 0.5 / self.shards, 0.0)
        pair = self._buckets.pair * ((0.5 if first else 1.0) + received)
        return np.where(self.zero == 2, self.grad * pair, 0.0)

    def _gathered_alone(self, index: int) -> np.ndarray:
        return np.where(self.zero == 3, self.width * self._size(index), 0.0)

    # ------------------------------------------------------------ the end of a backward

    def _end(self, ours: np.ndarray) -> Iterator[Moment]:
        """The embedding's gradient, when nothing else of its micro-batch is left; reductions that nobody waited for."""
        zero1 = (self.zero == 1) & self.sharded
        received = np.where(zero1, self.grad * self.owned, 0.0)
        yield {"buffers": received}
        yield from self._lowest_block(received)
        ledger = self._ledger(self.embedding)
        others = self._others_in_flight(ours)
        size = self._size(self.embedding)
        in_reduction = np.where(self.sharded, self._own_gradient(self._size(0)) * (1 + 1 / self.shards), 0.0)
        # Under ZeRO-1 gradients are reduced in the last micro-batch alone, beside which nothing is in flight.
        last = np.where(zero1, received * (1 - size / np.maximum(self.whole, 1)), 0.0)
        for waiting, spread in ((others, 0.0), (np.where(zero1, 0.0, others), last)):
            for row in ledger.working:
                moment = {"activations": waiting + self._at(row.bytes), "buffers": spread + np.zeros_like(others)}
                yield self._with(moment, self.first, in_reduction)
            moment = {"activations": waiting, "buffers": spread + np.zeros_like(others)}
            yield self._with(moment, self.first, in_reduction + self._own_gradient(size))

    def _lowest_block(self, received: np.ndarray) -> Iterator[Moment]:
        """The first block of the last micro-batch, when all gradients but its own and the embedding's are being reduced
        and nothing else is in flight."""
        table, v = self.kernel.table, self.kernel.variants
        for kind in range(self.kernel.blocks if received.any() else 0):
            count, again = table.count[self.plan][..., kind], table.again[self.plan][..., kind] > 0
            saved, kept = v.saved[self.which, kind][:, None], v.kept[self.which, kind][:, None]
            alone = np.where(again, kept + self._refilled(kind, saved - kept), saved) + self._rotary_bytes
            left = self._size(kind) + np.where(self.first, self._size(self.embedding), 0.0)
            spread = received * np.maximum(1 - left / np.maximum(self.whole, 1), 0.0)
            for row in (row for row in self._ledger(kind).working if row.name not in _OF_SPLITS):
                yield self._with({"activations": alone + self._at(row.bytes), "buffers": spread}, count > 0, 0.0)

    def _others_in_flight(self, ours: np.ndarray) -> np.ndarray:
        """Saved by micro-batches that wait while the first chunk of one of them ends its backward."""
        held, _ = self._held
        return np.maximum(held - ours, 0.0) - self._head_saved * (held - ours > 0)

    # ------------------------------------------------------------ helpers

    def _with(self, moment: Moment, there: np.ndarray, gradients) -> Moment:
        """The moment where it happens, with gradients beside the ones that are kept."""
        out = {name: np.where(there, value, 0.0) for name, value in moment.items()}
        out["gradients"] = np.where(there, gradients, 0.0)
        return out


def _row(ledger: Ledger, name: str):
    return next((row.bytes for row in ledger.saved if row.name == name), 0.0)


def _moment(ledger: Ledger, name: str):
    return next(row.bytes for row in ledger.working if row.name == name)
