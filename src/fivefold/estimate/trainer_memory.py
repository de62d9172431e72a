"""The memory of fivefold's trainer: what a rank keeps, and what the moments of a step (trainer_moments) are made of.

Every moment is a sum over the categories of the contract; the largest one is the peak. tests/train/test_agreement.py
holds the peaks to the trainer's, emulated.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from fivefold.estimate.arrays import distinct, dot
from fivefold.estimate.ledger import Column, Ledger
from fivefold.estimate.trainer_buckets import Buckets, bucket_sizes, part_stages
from fivefold.estimate.trainer_moments import Moment, moments
from fivefold.layout.layout import SCHEDULES
from fivefold.model.spec import Attention

if TYPE_CHECKING:
    from fivefold.estimate.memory import MemoryModel

_SINGLE = 4
_TOKEN_BYTES = 8

# Boundary tensors beside the one that a rank works on, by schedule: asked for ahead, or sent and not known to have
# arrived where transfers stop nobody. Between 2 and 6 under interleaved, by the rank and the moment.
_AHEAD = {"afab": 0, "1f1b": 0, "interleaved": 5, "zb-h1": 2, "zbv": 2, "dualpipev": 2}


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
        found = list(moments(self))
        most = np.zeros_like(self.whole)
        which = np.full(self.whole.shape, -1)
        for number, moment in enumerate(found):
            total = sum(moment.values())
            which = np.where(total > most, number, which)
            most = np.maximum(total, most)
        for number in np.unique(which[which >= 0]).tolist():
            here = which == number
            for name, value in found[number].items():
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

    # ---------------------------------------------------------------- what its moments are made of

    @cached_property
    def held(self) -> tuple[np.ndarray, np.ndarray]:
        """(saved by all micro-batches in flight, by one micro-batch of the first chunk), with rotary tables."""
        kernel, table, v = self.kernel, self.kernel.table, self.kernel.variants
        saved, kept = v.saved[self.which], v.kept[self.which]
        held = dot(table.held_plain[self.plan], saved) + dot(table.held_again[self.plan], kept)
        one = dot(table.newest_plain[self.plan], saved) + dot(table.newest_again[self.plan], kept)
        held = held + sum(
            table.owed[self.plan][..., index] * self.at(ledger.owed_bytes)
            for index, ledger in enumerate(self.kernel.ledgers)
        )
        tables = self.rotary_bytes
        chunks = table.held[self.plan] * kernel.columns.vpp[self.rows][:, None]
        return held + chunks * tables, one + tables

    @cached_property
    def rotary_bytes(self) -> np.ndarray:
        """Cosines and sines that all blocks of one forward pass share, [n, 1]."""
        c, mixer = self.kernel.columns, self.kernel.problem.model.kinds[0].mixer
        if not isinstance(mixer, Attention) or not mixer.rope:
            return np.zeros((len(self.rows), 1))
        return (self.width * mixer.head_dim * self.kernel.problem.work.seq_len / c.cp[self.rows])[:, None]

    @cached_property
    def boundary_bytes(self) -> np.ndarray:
        """Tensors of the pipeline that lie ready or are asked for while a block runs: what comes next is asked for
        ahead under schedules whose transfers stop nobody."""
        kernel, c = self.kernel, self.kernel.columns
        ahead = np.array([_AHEAD[name] for name in SCHEDULES])[c.schedule[self.rows]]
        return (np.where(c.pp[self.rows] > 1, ahead, 0) * kernel.boundary_bytes(self.rows))[:, None]

    def ledger(self, index: int) -> Ledger:
        return self.kernel.ledgers[index]

    def at(self, column: Column) -> np.ndarray:
        """A ledger's column at the layouts' keys, [n, 1]."""
        keys = len(self.kernel.shard)
        return np.broadcast_to(np.asarray(column, dtype=float), (keys,))[self.key][:, None]

    def size(self, index: int) -> np.ndarray:
        """Parameters of a piece, [n, 1]; of the head with its projection, wherever that is stored."""
        size = self.kernel.variants.dense[self.which, index][:, None]
        if index == self.head and self.kernel.problem.model.tied_embeddings:
            size = size + self.kernel.head_weight[self.key][:, None]
        return size

    @cached_property
    def head_saved(self) -> np.ndarray:
        """What the head keeps of the micro-batches in flight on the last rank, and nothing on others."""
        table, v = self.kernel.table, self.kernel.variants
        count = (table.held_plain - table.owed)[self.plan][..., self.head]
        return np.minimum(count, 1) * v.saved[self.which, self.head][:, None]

    @cached_property
    def in_reduction_before(self) -> np.ndarray:
        """Gradients of the micro-batch before that are still being reduced while this one runs forward: under ZeRO-3 of
        the unit, under ZeRO-2 of the bucket that backward came to last. Without overlap nothing is."""
        unit = np.where(self.first, self.size(self.embedding), self.size(0))
        last = np.where(self.zero == 3, unit, np.where(self.zero == 2, self.buckets.last, 0.0))
        overlapped = self.kernel.columns.overlap_grad[self.rows][:, None]
        return np.where(self.sharded & self.accumulates & overlapped, last * (1 + 1 / self.shards) * self.grad, 0.0)

    @cached_property
    def buckets(self) -> Buckets:
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

    def own_gradient(self, size: np.ndarray) -> np.ndarray:
        """The whole gradient of a unit that is being filled, beside the parts that are kept: ZeRO-3's."""
        return np.where(self.zero == 3, self.grad * size, 0.0)

    def moment(self, moment: Moment, there: np.ndarray, gradients: np.ndarray | float) -> Moment:
        """The moment where it happens, with gradients beside the ones that are kept."""
        out = {name: np.where(there, value, 0.0) for name, value in moment.items()}
        out["gradients"] = np.where(there, gradients, 0.0)
        return out
