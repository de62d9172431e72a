"""Memory: what each pipeline rank allocates at its peak, by category, and what the device needs beside it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fivefold.estimate.arrays import distinct, dot
from fivefold.estimate.reduction import Reductions
from fivefold.estimate.trainer_memory import TrainerMemory
from fivefold.layout.workload import QUANTISED, QUANTISED_BYTES, SINGLE

MASTER_BYTES = 4
CATEGORIES = (
    "weights",
    "gradients",
    "master",
    "optimizer",
    "activations",
    "logits",
    "gathered",
    "buffers",
    "reserve",
)


@dataclass(frozen=True, slots=True)
class Peak:
    """The steady-state peaks of n layouts.

    by_rank: [n, C] allocated bytes, -1 where a layout has no such rank. allocated: [n] the worst rank's.
    reserved: [n] most bytes that a rank's device must have: fragmentation and what lies outside the allocator too.
    """

    by_rank: np.ndarray
    allocated: np.ndarray
    reserved: np.ndarray


class MemoryModel(Reductions):
    """Reductions and tables that know every rank's memory."""

    def static_memory(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Bytes by category of what stays allocated through the whole step, each [n, C]."""
        c, runtime, table = self.columns, self.problem.runtime, self.table
        fully = self.problem.fully_sharded
        dense, expert = self.rank_parameters(rows)
        whole = dense + expert
        over_dense, over_expert = self.shards(rows)
        sharded = dense / over_dense + expert / over_expert
        single = self.problem.work.precision in SINGLE
        # Where tensors are fp32 the weights are their own masters, whole or in shards.
        weights = (MASTER_BYTES if single and not fully else runtime.weight_bytes) * whole
        if runtime.sharded_weight_bytes and not single:
            weights = weights + np.where((c.zero[rows] == 3)[:, None], runtime.sharded_weight_bytes * sharded, 0.0)
        if self.problem.work.precision in QUANTISED and not fully:
            weights = self._quantised_weights(rows, whole)
        buffers = self.exchange_buffers(rows)
        if runtime.replica_bucket_bytes:
            replicated = ((c.zero[rows] == 0) & (c.dp[rows] * c.cp[rows] > 1))[:, None]
            buffers = buffers + np.where(replicated, runtime.replica_bucket_bytes * whole * self.trains, 0.0)
        if runtime.gather_buffers:
            buffers = buffers + runtime.gather_buffers * self._gathered_bytes(rows)[:, None]
        gathered = np.zeros_like(whole)
        present = table.count[self.plan[rows]] > 0
        v = self.variant[rows]
        if runtime.cached_wgrad_buffers:
            here = present[..., : self.blocks]
            mixer = np.where(here, self.variants.wgrad_mixer[v][:, None, : self.blocks], 0).max(axis=-1)
            feed = np.where(here, self.variants.wgrad_feed[v][:, None, : self.blocks], 0).sum(axis=-1)
            buffers = buffers + mixer + feed
        if fully:
            size = (self.variants.dense + self.variants.expert)[v][:, None]
            largest = np.where(present, size, 0).max(axis=-1)
            window = np.minimum((1 + runtime.prefetch_blocks) * largest, whole)
            gathered = self.problem.work.compute_bytes * np.where((c.zero[rows] == 3)[:, None], window, whole)
            # One piece's gradient, whole, as computed and in the dtype of its reduction, while it is scattered.
            buffers = buffers + (self.problem.work.compute_bytes + self.grad_bytes) * largest
        return {
            "weights": weights,
            "gradients": self.grad_bytes * self._held_gradients(rows, whole, sharded),
            "master": MASTER_BYTES * sharded * self.trains * (fully or not single),
            "optimizer": self.state_bytes(rows, whole) * sharded * self.trains,
            "gathered": gathered,
            "buffers": buffers,
            "reserve": np.full_like(whole, runtime.workspace_bytes),
        }

    def _quantised_weights(self, rows: np.ndarray, whole: np.ndarray) -> np.ndarray:
        """Bytes of weights whose products are quantised, [n, C].

        The matrices of blocks are held as two quantised copies, as they lie and transposed, and in 16 bits too where
        the runtime keeps that; embedding, head, norms and biases in 16 bits alone.
        """
        sixteen, work = self.problem.work.compute_bytes, self.problem.work
        matrices = dot(self.table.count[self.plan[rows]], self.variants.matrix[self.variant[rows]])
        beside = self.problem.runtime.quantised_weight_bytes - 2  # of the profile's two 8-bit copies
        return sixteen * (whole - matrices) + (beside + 2 * QUANTISED_BYTES[work.precision]) * matrices

    def _held_gradients(self, rows: np.ndarray, whole: np.ndarray, sharded: np.ndarray) -> np.ndarray:
        """Parameters whose accumulated gradients each rank holds, [n, C]."""
        if not self.problem.fully_sharded:
            return whole
        piped = (self.columns.pp[rows] > 1)[:, None] & self.problem.runtime.pipeline_keeps_whole_gradients
        return np.where(piped, whole, sharded)

    def exchange_buffers(self, rows: np.ndarray) -> np.ndarray:
        """Bytes of pipeline transfers in flight beside the activations that are counted anyway, [n, C].

        One received tensor on every stage but the first (fit: the stages of 6 single-node B200 runs at pp 2); with
        interleaving also the next activation and gradient, which are received ahead of use.
        """
        table, plan = self.table, self.plan[rows]
        tensors = (~table.first[plan]).astype(np.float64) + 2 * (self.columns.vpp[rows] > 1)[:, None]
        piped = (self.columns.pp[rows] > 1)[:, None]
        return np.where(piped, tensors * self.boundary_bytes(rows)[:, None], 0.0)

    def _gathered_bytes(self, rows: np.ndarray) -> np.ndarray:
        """Bytes of a micro-batch's whole hidden state on a rank that keeps a part of it, [n]; 0 without such parts."""
        key = self.key[rows]
        parted = self.shard.sp[key] & (self.shard.tp[key] > 1)
        return np.where(
            parted, self.problem.work.compute_bytes * self.shard.tokens[key] * self.problem.model.hidden, 0.0
        )

    def activation_memory(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(activations, logits) bytes at each rank's peak in the steady state, [n, C].

        The candidates: the backward of the last block, with all micro-batches in flight; the loss and the head's
        backward, on the last rank; the embedding's backward, on the first, when its micro-batch is otherwise done.
        Layouts that differ only in how they shard states share one answer.
        """
        first, case = distinct([self.plan[rows], self.variant[rows]])
        activations, logits = self._activation_memory(self.plan[rows[first]], self.variant[rows[first]])
        return activations[case], logits[case]

    def _activation_memory(self, plan: np.ndarray, which: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        table, v = self.table, self.variants
        saved_bytes, kept_bytes = v.saved[which], v.kept[which]
        saved = dot(table.held_plain[plan], saved_bytes) + dot(table.held_again[plan], kept_bytes)
        newest = dot(table.newest_plain[plan], saved_bytes) + dot(table.newest_again[plan], kept_bytes)
        embedding, head, mtp = self.blocks, self.blocks + 1, self.blocks + 2
        again = table.again[plan] > 0
        plain = table.count[plan] > table.again[plan]
        working = np.maximum(
            np.where(plain, v.working[which][:, None], 0), np.where(again, v.working_again[which][:, None], 0)
        )
        working[..., embedding] = 0
        working = working.max(axis=-1)
        # The losses of MTP modules wait for backward together with the main one.
        losses = v.logits[which, head][:, None] + table.count[plan][..., mtp] * v.logits[which, mtp][:, None]
        logits = table.last[plan] * losses
        at_loss = logits > working
        activations, logits = saved + np.where(at_loss, 0, working), np.where(at_loss, logits, 0)
        at_embedding = table.first[plan] * (saved - newest + v.working[which, embedding][:, None])
        if self.problem.runtime.micro_batch_grad_bytes:
            # When a micro-batch's backward ends, on any rank: its gradients are all there and its activations gone.
            elements = dot(table.count[plan], (v.dense + v.expert)[which])
            gradients = self.problem.runtime.micro_batch_grad_bytes * self.trains * elements
            at_embedding = np.maximum(at_embedding, saved - newest + gradients)
        better = at_embedding > activations + logits
        return np.where(better, at_embedding, activations), np.where(better, 0, logits)

    def rank_memory(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Bytes by category at each rank's steady-state peak, each [n, C]; categories in contract order."""
        if self.problem.runtime.sharding == "buckets":
            return TrainerMemory(self, rows).rank_memory()
        static = self.static_memory(rows)
        static["activations"], static["logits"] = self.activation_memory(rows)
        return {name: static[name] for name in CATEGORIES}

    def peak(self, rows: np.ndarray) -> Peak:
        """What every rank allocates at its steady-state peak, and the most that a device must have for it."""
        runtime = self.problem.runtime
        exists = self.table.exists[self.plan[rows]]
        parts = self.rank_memory(rows)
        by_rank = np.where(exists, sum(np.floor(part) for part in parts.values()), -1.0)
        fragments = by_rank if runtime.states_fragment else by_rank - _states(parts)
        # Not always the rank that allocates most: of two ranks the one with fewer states may fragment more.
        reserved = np.where(exists, by_rank + runtime.fragmentation * fragments, -1.0).max(axis=1)
        return Peak(by_rank, by_rank.max(axis=1), reserved + sum(self.outside_allocator(rows).values()))

    def peak_memory(self, rows: np.ndarray) -> np.ndarray:
        """Peak allocated bytes of the worst rank in the steady state, [n]."""
        return self.peak(rows).allocated

    def outside_allocator(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Bytes that the device needs beside the caching allocator, each [n]."""
        c, runtime = self.columns, self.problem.runtime
        axes = (c.tp, c.cp, c.pp, c.ep, c.etp, c.dp * c.cp)
        groups = np.sum([axis[rows] > 1 for axis in axes], axis=0)
        return {
            "context": np.full(len(rows), float(runtime.context_bytes)),
            "communicators": groups * float(runtime.nccl_bytes_per_group),
        }


def _states(parts: dict[str, np.ndarray]) -> np.ndarray:
    """Bytes of every rank that stay allocated through the whole step, [n, C]; from rank_memory."""
    return sum(parts.values()) - parts["activations"] - parts["logits"]
