"""Memory and reductions of a model of which adapters alone may be trained; see adapters.py."""

from __future__ import annotations

import numpy as np

from fivefold.cluster import collective_seconds
from fivefold.estimate.adapters import NF4_BYTES
from fivefold.estimate.arrays import dot
from fivefold.estimate.memory import MASTER_BYTES, MemoryModel
from fivefold.estimate.variants import Variants
from fivefold.layout.workload import Workload

_GRADIENT_BYTES = {"fp32": 4, "bf16": 2}


class AdapterModel(MemoryModel):
    """Memory and reductions of a model of which adapters alone may be trained."""

    @property
    def trained_grad_bytes(self) -> int:
        """Bytes of one accumulated gradient of what is trained."""
        return _GRADIENT_BYTES[self.problem.work.grad_dtype]

    def adapter_parameters(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(dense, expert) adapter elements of each pipeline rank, [n, C]."""
        count, v = self.table.count[self.plan[rows]], self.variant[rows]
        return dot(count, self.variants.adapters[v]), dot(count, self.variants.expert_adapters[v])

    def trained_parameters(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(dense, expert) elements that are trained, [n, C]."""
        return self.rank_parameters(rows) if self.trains else self.adapter_parameters(rows)

    def trained_shard(self, rows: np.ndarray) -> np.ndarray:
        """Trained elements whose states each rank holds, [n, C]."""
        dense, expert = self.trained_parameters(rows)
        over_dense, over_expert = self.shards(rows)
        return dense / over_dense + expert / over_expert

    def static_memory(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        parts = super().static_memory(rows)
        work = self.problem.work
        if work.lora is None and work.base_precision != "nf4":
            return parts
        fully = self.problem.fully_sharded
        size, dense_over = work.compute_bytes, self.shards(rows)
        base = sum(self.rank_parameters(rows))
        packed = self._packed(rows)
        if fully:
            # Frozen weights need no fp32 shard: they rest as they are computed with, or in 4 bits.
            sharded = self._over(rows, *self.rank_parameters(rows))
            parts["weights"] = (size * (base - packed) + NF4_BYTES * packed) * sharded / np.maximum(base, 1)
            parts["gathered"] = self._gathered(rows)
        elif work.base_precision == "nf4":
            parts["weights"] = size * (base - packed) + NF4_BYTES * packed
        parts["buffers"] = self.exchange_buffers(rows)
        dense, expert = self.adapter_parameters(rows)
        whole, shard = dense + expert, dense / dense_over[0] + expert / dense_over[1]
        parts["weights"] = parts["weights"] + (0 if fully else size) * whole
        parts["gradients"] = parts["gradients"] + self.trained_grad_bytes * (shard if fully else whole)
        parts["master"] = parts["master"] + MASTER_BYTES * shard
        parts["optimizer"] = parts["optimizer"] + self.optimizer.vector_bytes * shard
        return parts

    def _over(self, rows: np.ndarray, dense: np.ndarray, expert: np.ndarray) -> np.ndarray:
        over_dense, over_expert = self.shards(rows)
        return dense / over_dense + expert / over_expert

    def _packed(self, rows: np.ndarray) -> np.ndarray:
        """Elements of each rank that are held in 4 bits, [n, C]: the matrices of its blocks."""
        if self.problem.work.base_precision != "nf4":
            return np.zeros((len(rows), self.table.count.shape[1]))
        return dot(self.table.count[self.plan[rows]], self.variants.matrix[self.variant[rows]])

    def _gathered(self, rows: np.ndarray) -> np.ndarray:
        """Bytes of gathered base weights, [n, C], 4-bit ones as they are."""
        c, runtime, v = self.columns, self.problem.runtime, self.variant[rows]
        size = self.variants.dense + self.variants.expert
        each = self.problem.work.compute_bytes * size * _packed_ratio(self.variants, self.problem.work)
        counts = self.table.count[self.plan[rows]]
        largest = np.where(counts > 0, each[v][:, None], 0).max(axis=-1)
        whole = dot(counts, each[v])
        window = np.minimum((1 + runtime.prefetch_blocks) * largest, whole)
        return np.where((c.zero[rows] == 3)[:, None], window, whole)

    def _add_gathers(self, table: Variants, rows: np.ndarray) -> None:
        """Gathers of 4-bit weights move 4 bits."""
        dense, expert = table.dense, table.expert
        ratio = _packed_ratio(table, self.problem.work)
        table.dense, table.expert = dense * ratio, expert * ratio
        super()._add_gathers(table, rows)
        table.dense, table.expert = dense, expert

    def adapter_reduction_seconds(self, rows: np.ndarray) -> np.ndarray:
        """Exposed seconds of the adapters' gradient reduction and parameter gather, [n]: their last bucket,
        or all of them where nothing overlaps; over the ranks that shard, then their parts over the replicas."""
        if self.problem.work.lora is None:
            return np.zeros(len(rows))
        groups, cluster, c = self.groups(rows), self.problem.cluster, self.columns
        overlapped = c.overlap_grad[rows] & (c.overlap_param[rows] | (c.zero[rows] == 0))
        seconds = np.zeros(len(rows))
        ranks, replicas = (groups.dense, groups.expert), (groups.dense_replicas, groups.expert_replicas)
        for elements, inside, across, shards in zip(
            self.adapter_parameters(rows), ranks, replicas, self.shards(rows), strict=True
        ):
            most = elements.max(axis=1)
            last = np.where(overlapped, np.minimum(most, self.problem.runtime.grad_buckets), most)
            size = self.trained_grad_bytes * last
            reduce_s = collective_seconds(cluster, "all_reduce", size, inside)
            reduce_s = reduce_s + collective_seconds(cluster, "all_reduce", size / shards[:, 0], across)
            seconds = seconds + np.where(last > 0, reduce_s, 0)
        return seconds

    def _variants(self) -> tuple[np.ndarray, np.ndarray, Variants]:
        inverse, first, table = super()._variants()
        if self.problem.work.lora is not None:
            key = self.key[first]
            for name, expert in (("adapters", False), ("expert_adapters", True)):
                totals = [
                    ledger.total([row.elements for row in ledger.adapters if row.expert is expert])
                    for ledger in self.ledgers
                ]
                setattr(table, name, np.stack([total[key] for total in totals], axis=1))
        return inverse, first, table


def _packed_ratio(table: Variants, work: Workload) -> np.ndarray:
    """[W, P] bytes of a piece's weights over what they have in the compute precision."""
    if work.base_precision != "nf4":
        return np.ones_like(table.dense)
    share = table.matrix / np.maximum(table.dense + table.expert, 1)
    return 1 - share * (1 - NF4_BYTES / work.compute_bytes)
