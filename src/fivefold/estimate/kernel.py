"""The batched kernel: memory, a lower bound and step time of many layouts at once.

`Kernel` prices the distinct keys and variants of a set of layouts once (tables.py) and then assembles reductions
(reduction.py), memory (memory.py) and, here, pipelines and steps by arithmetic over numpy columns: [n] layouts, [n, C]
their distinguishable pipeline ranks, P pieces. `ff.estimate` is this kernel with one layout; there is no second path.
"""

from __future__ import annotations

import numpy as np

from fivefold.cluster import collective_seconds
from fivefold.cluster.beside import unhidden
from fivefold.cluster.compute import streaming_seconds
from fivefold.estimate.arrays import by_value, codes, distinct, dot
from fivefold.estimate.host import HostModel
from fivefold.estimate.memory import MASTER_BYTES
from fivefold.estimate.plans import Partition
from fivefold.estimate.problem import Problem
from fivefold.layout.layout import SCHEDULES, SPLIT_BACKWARD
from fivefold.schedule import pipeline_seconds

_INTERLEAVED = SCHEDULES.index("interleaved")
# Norm, clipping, update and zeros, each over all tensors at once: their launches are microseconds of a step.
_UPDATE_KERNELS = 4
_SPLIT = [SCHEDULES.index(schedule) for schedule in SPLIT_BACKWARD]


class Kernel(HostModel):
    """Prices `columns` of one problem. Methods take `rows`, positions of layouts, and answer in their order."""

    def peak_flops_per_s(self) -> float:
        """Dense peak of one GPU at the compute precision."""
        return self.problem.cluster.gpu.peak_flops_per_s[self.problem.work.precision]

    def pass_seconds(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Forward and backward seconds of one micro-batch through all chunks of each rank, [n, C]."""
        plan, v = self.plan[rows], self.variant[rows]
        count, again = self.table.count[plan], self.table.again[plan]
        forward = dot(count, self.variants.forward_s[v])
        backward = dot(count, self.variants.backward_s[v]) + dot(again, self.variants.again_s[v])
        return forward, backward

    def lower_bound(self, rows: np.ndarray) -> np.ndarray:
        """Seconds that no schedule can beat, [n]: the busiest rank's own work after its first micro-batch has come and
        before its last backward has left through the ranks before it. Where backward is split, the rest of it may
        fill the latter, and only a rank's own work counts."""
        forward, backward = self.pass_seconds(rows)
        busy = self.columns.num_micro_batches[rows][:, None] * (forward + backward)
        waits = ~np.isin(self.columns.schedule[rows], _SPLIT)[:, None]
        busy = busy + waits * (self._forward_before(rows) + self._backward_before(rows))
        return (busy * self.table.exists[self.plan[rows]]).max(axis=1) + self.problem.step_overhead_s

    def step_seconds(self, rows: np.ndarray) -> np.ndarray:
        """Seconds of one optimizer step, [n]."""
        pipeline = self.pipeline_seconds(rows)
        reduction = self.exposed_reduction_seconds(rows)
        if self.copies_on_last_stage:
            reduction = reduction + self.tied_reduction_seconds(rows)
        reduction = reduction + self.adapter_reduction_seconds(rows)
        return pipeline + reduction + self.optimizer_seconds(rows) + self.problem.step_overhead_s

    def exchange_seconds(self, rows: np.ndarray) -> np.ndarray:
        """Seconds of one pipeline transfer between neighbouring stages, [n]."""
        return collective_seconds(self.problem.cluster, "send", self.boundary_bytes(rows), self.boundary(rows))

    def pipeline_seconds(self, rows: np.ndarray, transfer: np.ndarray | None = None) -> np.ndarray:
        """Seconds from the first forward to the last backward, [n]; one schedule sweep per shape of pipeline.

        transfer: [n] seconds of one transfer between stages instead of the modelled ones.
        """
        transfer = self.exchange_seconds(rows) if transfer is None else transfer
        first, case = distinct([self.plan[rows], self.variant[rows], codes(transfer)])
        shapes: dict[tuple[str, int, int, int], list[tuple[np.ndarray, ...]]] = {}
        for number, at in by_value(self.plan[rows[first]]):
            part, schedule, m, _ = self.plans[number]
            stage_s = self.stage_seconds(part, self.variant[rows[first[at]]])
            shapes.setdefault((schedule, part.pp, m, part.vpp), []).append((at, *stage_s))
        seconds = np.empty(len(first))
        for shape, members in shapes.items():
            at, forward, backward, weight = (np.concatenate(columns) for columns in zip(*members, strict=True))
            apart = {"weight_grad_s": weight} if shape[0] in SPLIT_BACKWARD else {}
            seconds[at] = pipeline_seconds(*shape, forward, backward, transfer[first[at]], **apart)
        return seconds[case]

    def stage_seconds(self, part: Partition, variant: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Forward and backward seconds of one micro-batch on every virtual stage, and the part of backward that a
        schedule which splits it can put off, each [n, V]."""
        v = self.variants
        every = part.plain_unique + part.again_unique
        forward = v.forward_s[variant] @ every.T
        backward = v.backward_s[variant] @ every.T + v.again_s[variant] @ part.again_unique.T
        weight = v.weight_grad_s[variant] @ every.T
        return forward[:, part.of_stage], backward[:, part.of_stage], weight[:, part.of_stage]

    def exposed_reduction_seconds(self, rows: np.ndarray) -> np.ndarray:
        """Seconds of gradient reduction and parameter gather that neither backward nor forward hides, worst rank, [n].

        A rank further down the pipeline ends its last backward earlier and starts its first forward later, by the
        chunk 0 work of the ranks before it. The last bucket of gradients and the first of parameters cannot overlap
        (bucketed_seconds).

        Interleaved, a chunk's gradients are reduced when its last micro-batch is through, while pp micro-batches pass
        each chunk before it, those of chunk 0 after all backwards, because the ranks of a pipeline start together; and
        its parameters are gathered while as many pass each chunk before it (Megatron-Core
        pipeline_parallel/schedules.py, read at 00611e6eeb: backward_step_helper_postprocess and
        forward_step_helper_preprocess; --no-align-grad-reduce, which is not usual, starts chunk 0 earlier).
        """
        if self.problem.fully_sharded:
            piped = self.reduces_once(rows)
            ends = self._ends_of_step(rows)
            return np.where(piped, self._ends_of_pipeline(rows), ends) if piped.any() else ends
        c = self.columns
        forward, backward = self.pass_seconds(rows)
        held, groups = self.rank_parameters(rows), self.groups(rows)
        chunks = self._turns(rows)
        turns = ((chunks - 1) * c.pp[rows][:, None] + 1) / chunks
        reduced, gathered = self.bucketed_seconds(rows, held, groups, chunks)
        alone = (c.zero[rows] != 0) & self.problem.runtime.sharded_reduced_at_once
        exposed = np.zeros_like(forward)
        overlapped = [on[rows] & ~alone for on in (c.overlap_grad, c.overlap_param)]
        for on, (seconds, tail), late, beside in (
            (overlapped[0], reduced, self._backward_before(rows), turns * backward),
            (overlapped[1], gathered, self._forward_before(rows), turns * forward),
        ):
            hidden = np.maximum(tail - late, 0) + unhidden(np.maximum(seconds - np.maximum(tail, late), 0), beside)
            exposed = exposed + np.where(on[:, None], hidden, 0)
        if not np.all(overlapped):
            for on, seconds in zip(overlapped, self.reduction_seconds(rows, *held, groups), strict=True):
                exposed = exposed + np.where(on[:, None], 0, seconds)
        if self.problem.runtime.unpack_host_s:
            exposed = exposed + self._unpacking_seconds(rows)
        worst = (exposed * self.table.exists[self.plan[rows]]).max(axis=1)
        by_unit = self.problem.by_unit & (c.zero[rows] == 3)
        return np.where(by_unit, self._ends_of_step(rows), worst) if by_unit.any() else worst

    def _unpacking_seconds(self, rows: np.ndarray) -> np.ndarray:
        """Host seconds to lay out the parameters that ranks gathered after an update, [n, C]."""
        each = self.problem.runtime.unpack_host_s * self.problem.cluster.host_work_ratio
        ranks = np.where(self.columns.dp_shard[rows] > 1, self.columns.dp_shard[rows], 0)
        tensors = np.array([len(ledger.weights) for ledger in self.ledgers])
        tensors[self.blocks + 1] += not self.problem.model.tied_embeddings
        return each * ranks[:, None] * (self.table.count[self.plan[rows]] @ tensors)

    def _forward_before(self, rows: np.ndarray) -> np.ndarray:
        """Seconds of one forward through the first chunks of the ranks before each, by which its first starts later,
        [n, C]."""
        return dot(self.table.before[self.plan[rows]], self.variants.forward_s[self.variant[rows]])

    def _backward_before(self, rows: np.ndarray) -> np.ndarray:
        """Seconds of one backward through the first chunks of the ranks before each, by which its last ends earlier,
        [n, C]."""
        plan, v, table = self.plan[rows], self.variant[rows], self.table
        before, again = table.before[plan], table.before_again[plan]
        return dot(before, self.variants.backward_s[v]) + dot(again, self.variants.again_s[v])

    def _turns(self, rows: np.ndarray) -> np.ndarray:
        """Chunks that a rank's micro-batches pass in groups of pp, [n, 1]."""
        whole = self.problem.runtime.sharding == "distributed_optimizer"
        return np.where(whole & (self.columns.schedule[rows] == _INTERLEAVED), self.columns.vpp[rows], 1)[:, None]

    def _ends_of_step(self, rows: np.ndarray) -> np.ndarray:
        """Fully sharded: the first gather of a step and its last scatter have nothing to hide behind, [n]."""
        dense_group = self.groups(rows).dense
        present = self.table.count[self.plan[rows]][:, 0] > 0
        largest = np.where(present, self.variants.dense[self.variant[rows]], 0).max(axis=1)
        cluster = self.problem.cluster
        gather = collective_seconds(cluster, "all_gather", self.problem.work.compute_bytes * largest, dense_group)
        return gather + collective_seconds(cluster, "reduce_scatter", self.grad_bytes * largest, dense_group)

    def _ends_of_pipeline(self, rows: np.ndarray) -> np.ndarray:
        """Fully sharded stages that reduce once, worst rank, [n]: gradients after a rank's last backward, which ends
        earlier down the pipeline, and under ZeRO-2 parameters beside its first forward, the first of them before it.

        PyTorch 2.13 distributed/pipelining/stage.py, backward_maybe_with_nosync: no stage reduces before
        perform_reduce_grad, nor reshards; torchtitan reshards behind no pipeline's forward either.
        """
        plan, v, table = self.plan[rows], self.variant[rows], self.table
        reduce_s, gather_s = (dot(table.count[plan], seconds[v]) for seconds in self.unit_seconds)
        units = np.where(table.count[plan] > 0, self.unit_seconds[1][v][:, None], 0).max(axis=2)
        forward, _ = self.pass_seconds(rows)
        late = self._backward_before(rows)
        beside = np.where(self.columns.overlap_param[rows][:, None], forward, 0)
        kept = (self.columns.zero[rows] < 3)[:, None]
        gathers = units + np.where(kept, np.maximum(gather_s - units - beside, 0), 0)
        return ((np.maximum(reduce_s - late, 0) + gathers) * table.exists[plan]).max(axis=1)

    def optimizer_seconds(self, rows: np.ndarray) -> np.ndarray:
        """Seconds of gradient norm, update and clearing of gradients on the worst rank, [n]; of the offloaded share of
        the states on the host instead, after the GPU's."""
        share = self.problem.work.offload.optimizer
        here = self.device_update_seconds(rows)
        return (1 - share) * here + share * self.host_update_seconds(rows) if share else here

    def separate_update_bytes(self) -> float:
        """Per element, what an update that is not one kernel moves beyond the fused one's bytes: the division (twice
        the gradient), fp32 gradients in the norm and the update; the copy to fp32 of 16-bit gradients (6); under fp16
        the unscaling of fp32 ones (8)."""
        if not self.problem.runtime.separate_update:
            return 0.0
        grad, fp32 = self.trained_grad_bytes, MASTER_BYTES
        copied = grad + fp32 if grad < fp32 else 0
        unscaled = 2 * fp32 if self.problem.work.precision == "fp16" else 0
        return 2 * grad + 2 * (fp32 - grad) + copied + unscaled

    def whole_gradient_bytes(self, rows: np.ndarray) -> np.ndarray:
        """Per parameter that a rank holds, moved over its gradients before they are reduced, [n, 1]."""
        runtime = self.problem.runtime
        replicated = self.columns.dp[rows] * self.columns.cp[rows] > 1
        passes = 1.0 * runtime.gradients_checked + 2 * (runtime.gradients_scaled & replicated)
        return self.trained_grad_bytes * passes[:, None]

    def device_update_seconds(self, rows: np.ndarray) -> np.ndarray:
        """The same if no state is offloaded, [n]."""
        if not self.trains and self.problem.work.lora is None:
            return np.zeros(len(rows))
        dense, expert = self.trained_parameters(rows)
        over_dense, over_expert = self.shards(rows)
        sharded = dense / over_dense + expert / over_expert
        states = self.state_bytes(rows, dense + expert)
        # The norm reads gradients; the update reads them, reads and writes master and states; another kernel reads the
        # master again and writes the 16-bit weight.
        grad, clipped = self.trained_grad_bytes, self.problem.runtime.whole_clip_bytes
        norm = clipped * (dense + expert) if clipped else grad * sharded
        copied = bool(self.problem.runtime.weight_bytes) and self.problem.work.compute_bytes < MASTER_BYTES
        update = grad + 2 * (MASTER_BYTES + states) + self.problem.work.compute_bytes + copied * MASTER_BYTES
        if self.problem.work.optimizer == "adamw" and self.problem.runtime.adamw_update_bytes:
            update = self.problem.runtime.adamw_update_bytes
        moved = norm + sharded * (update + self.separate_update_bytes())
        moved = moved + self.whole_gradient_bytes(rows) * (dense + expert)
        cleared = grad * (sharded if self.problem.fully_sharded else dense + expert)
        seconds = streaming_seconds(
            self.pricer.curve, self.problem.cluster.gpu, (moved + cleared).max(axis=1), _UPDATE_KERNELS
        )
        if self.optimizer.newton_schulz and self.trains:
            count, v = self.table.count[self.plan[rows]], self.variant[rows]
            # The ranks of a sharding group share the matrices among them.
            work = dot(count, self.variants.newton_schulz[v]) / over_dense
            seconds = seconds + work.max(axis=1) / self.pricer.product_flops_per_s()
        return seconds


__all__ = ["Kernel", "Problem"]
