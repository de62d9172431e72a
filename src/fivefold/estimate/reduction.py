"""Gradient reduction and parameter gathers: which groups they span and what they take, unhidden."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fivefold.cluster import Cluster, collective_seconds
from fivefold.cluster.beside import WAITED, unhidden
from fivefold.cluster.compute import streaming_seconds
from fivefold.cluster.groups import Placement, place
from fivefold.estimate.problem import Problem
from fivefold.estimate.tables import Tables
from fivefold.estimate.variants import Variants
from fivefold.layout.columns import Columns
from fivefold.layout.grids import group
from fivefold.layout.layout import SCHEDULES, V_SHAPED
from fivefold.layout.workload import QUANTISED, QUANTISED_BYTES

# PyTorch FSDPParam.accumulate_unsharded_grad_if_needed: a 16-bit gradient is read and added to the whole fp32 one.
_ACCUMULATED_BYTES = 10.0
_IS_V = np.array([name in V_SHAPED for name in SCHEDULES])


@dataclass(slots=True, frozen=True)
class ReductionGroups:
    """Where the groups lie that shard dense and expert parameters, and the replicas of their shards (HSDP)."""

    dense: Placement
    dense_replicas: Placement
    expert: Placement
    expert_replicas: Placement

    def of(self, expert: bool) -> tuple[Placement, Placement]:
        """Of one of the two grids: where its parameters are sharded, and the replicas of their shards."""
        return (self.expert, self.expert_replicas) if expert else (self.dense, self.dense_replicas)


class Queue(NamedTuple):
    """Collectives beside compute, one after the other, [n, C] seconds: all, and the one that is exposed."""

    seconds: np.ndarray
    end: np.ndarray


class Reductions(Tables):
    """Tables that know what data parallelism moves.

    unit_seconds: of frameworks that move pieces one by one, what each one's gradients and parameters take, unhidden,
        [W, P].
    """

    unit_seconds: tuple[np.ndarray, np.ndarray]

    def __init__(self, problem: Problem, columns: Columns, *, every_rank: bool = False) -> None:
        super().__init__(problem, columns, every_rank=every_rank)
        if problem.by_unit:
            self._add_gathers(self.variants, self.variant_rows)

    def _add_gathers(self, table: Variants, rows: np.ndarray) -> None:
        """Each piece's parameters are gathered while the piece before computes and its gradients scattered while the
        next one does; what compute does not hide, or may not be overlapped, is exposed. ZeRO-2 gathers once, in
        forward; ZeRO-3 in both passes. fivefold's trainer gathers under ZeRO-3 alone, and scatters every micro-batch
        there and, beside compute, under ZeRO-2. What a pipeline moves once a step is left to the step's ends."""
        reduce_s, gather = self.reduction_seconds(rows, *self._units(rows, table))
        share = self._gathered_share(gather.shape[1])
        gather = share * gather
        self.unit_seconds = reduce_s, gather
        zero = self.columns.zero[rows][:, None]
        piped = self.reduces_once(rows)[:, None]
        reduce_s, gather = np.where(piped, 0, reduce_s), np.where(piped & (zero < 3), 0, gather)
        param, grad = (on[rows][:, None] for on in (self.columns.overlap_param, self.columns.overlap_grad))
        if not self.problem.fully_sharded:
            every_round = (zero == 3) | ((zero == 2) & grad)
            gather, reduce_s = np.where(zero == 3, gather, 0), np.where(every_round, reduce_s, 0)
        regather = np.where(zero == 3, gather, 0)
        elements = table.dense + table.expert
        after_gather, before_scatter = self._copy_seconds(elements, zero == 3)
        after_gather = share * after_gather
        before_scatter = np.where(piped, self._streamed(_ACCUMULATED_BYTES * self.trains * elements), before_scatter)
        waited = 0.0 if self.problem.runtime.registered_buffers else WAITED
        table.gather_forward = _exposed(waited, table.forward, (gather, param)) + after_gather
        again = param & (not self.problem.runtime.backward_gathers_wait)
        table.gather_backward = _exposed(waited, table.backward, (regather, again), (reduce_s, grad))
        table.gather_backward = table.gather_backward + after_gather + before_scatter
        table.total()

    def _units(self, rows: np.ndarray, table: Variants) -> tuple[np.ndarray, np.ndarray]:
        """(dense, expert) parameters of each piece, [W, P], experts among the dense where one unit has both."""
        joined = self.problem.runtime.experts_in_block & (self.columns.ep[rows] == 1)[:, None]
        inside = np.where(joined, table.expert, 0)
        return table.dense + inside, table.expert - inside

    def reduces_once(self, rows: np.ndarray) -> np.ndarray:
        """Whether whole gradients wait for the last of a pipeline's micro-batches; under ZeRO-2 the parameters that the
        first one gathered stay too, [n]."""
        return (self.columns.pp[rows] > 1) & self.problem.runtime.pipeline_keeps_whole_gradients

    def _gathered_share(self, pieces: int) -> np.ndarray:
        """[P] of a gather in 16 bit, what it is where blocks' parameters are quantised before; what lies beside the
        blocks is not."""
        work, runtime = self.problem.work, self.problem.runtime
        quantised = runtime.quantised_parameters and work.precision in QUANTISED
        share = QUANTISED_BYTES[work.precision] / work.compute_bytes if quantised else 1.0
        return np.where(np.arange(pieces) < self.blocks, share, 1.0)

    def _copy_seconds(self, elements: np.ndarray, copies: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Seconds on compute's own stream, [W, P]: parameters copied out of a gathered buffer, and gradients into the
        one that is scattered."""
        runtime = self.problem.runtime
        gather, scatter = (
            np.where(copies & (moved > 0), self._streamed(moved * elements), 0.0)
            for moved in (runtime.gather_copy_bytes, runtime.scatter_copy_bytes)
        )
        return gather, scatter

    def _streamed(self, moved: np.ndarray) -> np.ndarray:
        """Seconds of kernels that move so many bytes on compute's own stream."""
        curve = self.pricer.curve
        return curve.in_step * streaming_seconds(curve, self.problem.cluster.gpu, moved)

    def groups(self, rows: np.ndarray) -> ReductionGroups:
        """Where the groups lie over which gradients are reduced; without ZeRO one group replicates everything."""
        cluster, unsharded = self.problem.cluster, self.columns.zero[rows] == 0
        dense, dense_replicas, expert, expert_replicas, every_dense, every_expert = (
            group(self.columns, axis, rows)
            for axis in ("shard", "replicate", "expert_shard", "expert_replicate", "dp_cp", "edp")
        )
        return ReductionGroups(
            dense=place(cluster, np.where(unsharded, every_dense.size, dense.size), dense.stride),
            dense_replicas=place(cluster, np.where(unsharded, 1, dense_replicas.size), dense_replicas.stride),
            expert=place(cluster, np.where(unsharded, every_expert.size, expert.size), expert.stride),
            expert_replicas=place(cluster, np.where(unsharded, 1, expert_replicas.size), expert_replicas.stride),
        )

    def reduction_seconds(
        self, rows: np.ndarray, dense: np.ndarray, expert: np.ndarray, groups: ReductionGroups | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Seconds to reduce each rank's gradients and to gather its parameters, unhidden, [n, C]. groups: those of the
        rows, where they are known already."""
        groups = groups or self.groups(rows)
        reduce_s, gather_s = self._grid_seconds(rows, dense, False, groups)
        if not self.problem.model.is_moe:
            return reduce_s, gather_s
        expert_reduce_s, expert_gather_s = self._grid_seconds(rows, expert, True, groups)
        return reduce_s + expert_reduce_s, gather_s + expert_gather_s

    def _grid_seconds(
        self, rows: np.ndarray, elements: np.ndarray, expert: bool, groups: ReductionGroups
    ) -> tuple[np.ndarray, np.ndarray]:
        """The same of the parameters that one of the two grids shards, [n, k]."""
        cluster, grad = self.problem.cluster, self.grad_bytes
        ranks, replicas = groups.of(expert)
        sharded = (self.columns.zero[rows] >= 1)[:, None]
        scattered = sharded & (not self.problem.sums_in_full)
        reduce_s = _seconds(cluster, "reduce_scatter", grad * elements, ranks)
        if not scattered.all():
            reduce_s = np.where(scattered, reduce_s, _seconds(cluster, "all_reduce", grad * elements, ranks))
        if (replicas.n > 1).any():
            part = grad * elements / self.shards(rows)[expert]
            reduce_s = reduce_s + _seconds(cluster, "all_reduce", part, replicas)
        gathered = self.problem.work.compute_bytes * elements * (self.trains or self.problem.fully_sharded)
        return reduce_s, np.where(sharded, _seconds(cluster, "all_gather", gathered, ranks), 0)

    def bucketed_seconds(
        self, rows: np.ndarray, held: tuple[np.ndarray, np.ndarray], groups: ReductionGroups, chunks: np.ndarray
    ) -> tuple[Queue, Queue]:
        """Gradients and parameters of each rank, [n, C], bucket after bucket beside compute: all of them, and the last
        bucket of gradients or the first of parameters, which nothing runs beside. held: dense and expert parameters;
        chunks: [n, 1] into which a rank's gradients are cut by the schedule.

        Dense parameters and experts lie in buffers of their own, each cut into buckets of its own and reduced over its
        own ranks (Megatron-Core distributed_data_parallel.py and param_and_grad_buffer.py, read at 001199898c), or
        share buckets, out of which each goes to its own ranks (Profile.shared_buckets). Buckets are filled against the
        order of the parameters and no tensor is cut, so that the last one holds the whole embedding, whose gradient
        backward makes last.
        """
        total = held[0] + held[1]
        shared = np.isin(self.columns.zero[rows], self.problem.runtime.shared_buckets)[:, None]
        seconds, ends = np.zeros((2, *total.shape)), np.zeros((2, *total.shape))
        for expert, elements in enumerate(held if self.problem.model.is_moe else held[:1]):
            # Chunks after the first are one bucket each.
            of_first = np.maximum(np.where(shared, total, elements) / chunks / self.bucket_elements(rows), 1)
            whole = np.ceil(of_first) + chunks - 1
            embedding = np.zeros_like(total) if expert else self.embedding_elements(rows)
            last = np.maximum(elements / chunks / of_first, embedding)
            sizes = np.concatenate([elements / whole, last], axis=1)
            each, end = np.split(np.stack(self._grid_seconds(rows, sizes, bool(expert), groups)), 2, axis=2)
            each = whole * each
            # Interleaved, the first chunk's gradients are reduced after all backwards.
            share = (embedding + (elements - embedding) / chunks) / np.maximum(elements, 1)
            end[0] = np.where(chunks > 1, np.maximum(end[0], share * each[0]), end[0])
            seconds, ends = seconds + each, ends + end
        return Queue(seconds[0], ends[0]), Queue(seconds[1], ends[1])

    def bucket_elements(self, rows: np.ndarray) -> np.ndarray:
        """Parameters per gradient bucket, [n, C]: the larger of a constant and so many per replica; where only the
        first rank of a pipeline cuts its gradients into buckets, all of them on the others."""
        runtime = self.problem.runtime
        most = np.maximum(runtime.grad_buckets, runtime.grad_bucket_growth * self.columns.dp[rows])[:, None]
        cut = self.table.rank[self.plan[rows]] == 0 if runtime.first_rank_buckets else True
        return np.where(cut, most, np.inf)

    def embedding_elements(self, rows: np.ndarray) -> np.ndarray:
        """Parameters of the input embedding on each rank, [n, C]."""
        count = self.table.count[..., self.blocks][self.plan[rows]]
        return count * self.variants.dense[self.variant[rows], self.blocks][:, None]

    def tied_reduction_seconds(self, rows: np.ndarray) -> np.ndarray:
        """Seconds to sum the gradients of weights that the first and the last stage both hold, [n].

        A ring of two ranks moves the tensor once each way at the same time, after all other gradients.
        """
        return collective_seconds(self.problem.cluster, "send", self.tied_bytes(rows), self.boundary(rows))

    def tied_bytes(self, rows: np.ndarray) -> np.ndarray:
        """Bytes of gradients that two ranks both hold, those of the first and the last stage, [n]; 0 where one rank
        holds both stages."""
        shared = self.grad_bytes * self.copies_on_last_stage * self.head_weight[self.key[rows]]
        apart = (self.columns.pp[rows] > 1) & ~_IS_V[self.columns.schedule[rows]]
        return np.where(apart, shared, 0.0)

    def boundary(self, rows: np.ndarray) -> Placement:
        """Where the pipeline groups lie."""
        return place(self.problem.cluster, *group(self.columns, "pp", rows))


def _exposed(waited: float, compute: np.ndarray, *parts: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """Seconds that a pass waits, [W, P]: for what is not overlapped all of it, for the rest what its [W, P, owners] of
    compute do not hide, and what these fall behind. Each part is its seconds, and whether it is overlapped; waited: as
    of `unhidden`."""
    beside = sum(np.where(overlapped, seconds, 0.0) for seconds, overlapped in parts)
    alone = sum(np.where(overlapped, 0.0, seconds) for seconds, overlapped in parts)
    return unhidden(beside, compute.sum(axis=2), waited) + alone


def _seconds(cluster: Cluster, op: str, size: np.ndarray, placement: Placement) -> np.ndarray:
    """Collective seconds of [n, k] sizes in [n] groups; nothing moves in no time."""
    seconds = collective_seconds(cluster, op, size.T, placement).T
    return np.where(size > 0, seconds, 0.0)
