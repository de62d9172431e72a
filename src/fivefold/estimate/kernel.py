"""The batched kernel: memory, a lower bound and step time of many layouts at once.

`Kernel` prices the distinct keys and variants of a set of layouts once and then assembles ranks, pipelines and steps by
arithmetic over numpy columns: [n] layouts, [n, C] their distinguishable pipeline ranks, P pieces.
`ff.estimate` is this kernel with one layout; there is no second path.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fivefold.cluster import Cluster, collective_seconds
from fivefold.cluster.compute import streaming_seconds
from fivefold.cluster.groups import Placement, place
from fivefold.estimate.blocks import BlockWriter
from fivefold.estimate.optimizers import OPTIMIZERS
from fivefold.estimate.plans import Partition, PlanTable, kind_runs, partition, plan_table
from fivefold.estimate.price import OWNERS, Cost, Pricer
from fivefold.estimate.shard import distinct_shards
from fivefold.estimate.variants import Variants, variants
from fivefold.layout.columns import Columns
from fivefold.layout.layout import RECOMPUTE_KINDS, SCHEDULES
from fivefold.layout.stages import split_policy
from fivefold.layout.workload import Workload
from fivefold.model.spec import ModelSpec
from fivefold.runtime import Profile
from fivefold.schedule import pipeline_seconds

_NONE = RECOMPUTE_KINDS.index("none")
_GRAD_BYTES = {"fp32": 4, "bf16": 2}
_MASTER_BYTES = 4
_WEIGHT_BYTES = 2  # of a parameter as it is gathered for compute
# Under the fp8 recipes Transformer Engine keeps an fp8 copy of each weight and its transpose for all micro-batches.
_FP8_WEIGHT_COPIES = 2
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


@dataclass(slots=True, frozen=True)
class Problem:
    """What is planned, on what, for how much work, by which framework."""

    model: ModelSpec
    cluster: Cluster
    work: Workload
    runtime: Profile

    @property
    def fully_sharded(self) -> bool:
        return self.runtime.sharding == "fully_sharded"


@dataclass(slots=True, frozen=True)
class ReductionGroups:
    """Where the groups lie that shard dense and expert parameters, and the replicas of their shards (HSDP)."""

    dense: Placement
    dense_replicas: Placement
    expert: Placement
    expert_replicas: Placement


class Kernel:
    """Prices `columns` of one problem. Methods take `rows`, positions of layouts, and answer in their order."""

    def __init__(self, problem: Problem, columns: Columns, *, every_rank: bool = False) -> None:
        self.problem = problem
        self.columns = columns
        self.optimizer = OPTIMIZERS[problem.work.optimizer]
        self.grad_bytes = _GRAD_BYTES[problem.work.grad_dtype]
        self.shard, self.key = distinct_shards(columns, problem.work.seq_len)
        self.writer = BlockWriter(problem.model, problem.work, problem.runtime, self.shard)
        self.pricer = Pricer(problem.cluster, problem.runtime, problem.work.precision, self.shard)
        self.ledgers = self._ledgers()
        self.costs: tuple[Cost, ...] = tuple(self.pricer.price(ledger) for ledger in self.ledgers)
        self.blocks = len(problem.model.kinds)
        self.head_weight = self.writer.head_weight()
        # The last stage of a pipeline holds its own copy of a tied head, or of the embedding that MTP looks up.
        self.copies_on_last_stage = int(problem.model.tied_embeddings or problem.model.mtp > 0)
        if not problem.model.tied_embeddings:
            self.costs[self.blocks + 1].dense[:] += self.head_weight
            self.costs[self.blocks + 1].factored[:] += self.head_weight / problem.model.hidden + problem.model.hidden
        self.variant, self.variants = self._variants()
        self.plan, self.plans = self._plans()
        self.table: PlanTable = plan_table(self.plans, every_rank=every_rank)

    # ---------------------------------------------------------------- tables

    def _ledgers(self):
        writer, model = self.writer, self.problem.model
        mtp = writer.mtp() if model.mtp else writer.nothing("mtp")
        return (*(writer.block(kind) for kind in model.kinds), writer.embedding(), writer.head(), mtp)

    def _variants(self) -> tuple[np.ndarray, Variants]:
        c = self.columns
        fields = [self.key, c.recompute_kind, c.recompute_modules]
        if self.problem.fully_sharded:
            fields += [c.zero, c.dp_shard, c.dp_replicate, c.edp]
        first, inverse = _distinct(fields)
        table = variants(self.costs, self.key[first], c.recompute_kind[first], c.recompute_modules[first])
        if self.problem.fully_sharded:
            self._add_gathers(table, first)
        return inverse, table

    def _plans(self) -> tuple[np.ndarray, list[tuple[Partition, str, int]]]:
        c, model = self.columns, self.problem.model
        layers = np.where(c.recompute_kind == _NONE, 0, c.recompute_layers)
        split = [c.pp, c.vpp, c.first_stage_layers, c.last_stage_layers, c.account_for_embedding, c.account_for_loss]
        fields = [*split, layers + 1, c.schedule, c.num_micro_batches]
        first, inverse = _distinct(fields)
        runs, policy = kind_runs(model), split_policy(self.problem.runtime.name)
        plans: list[tuple[Partition, str, int]] = []
        for *where, again, schedule, m in zip(*(field[first].tolist() for field in fields), strict=True):
            part = partition(runs, model.mtp, *where, policy, again - 1)
            plans.append((part, SCHEDULES[schedule], m))
        return inverse, plans

    def _add_gathers(self, table: Variants, rows: np.ndarray) -> None:
        """Each piece's parameters are gathered while the piece before computes and its gradients scattered while the
        next one does; what compute does not hide is exposed. ZeRO-2 gathers once, in forward; ZeRO-3 in both passes."""
        reduce_s, gather = self.reduction_seconds(rows, table.dense, table.expert)
        regather = np.where((self.columns.zero[rows] == 3)[:, None], gather, 0)
        table.gather_forward = np.maximum(gather - table.forward.sum(axis=2), 0)
        table.gather_backward = np.maximum(regather + reduce_s - table.backward.sum(axis=2), 0)
        table.total()

    def groups(self, rows: np.ndarray) -> ReductionGroups:
        """Where the groups lie over which gradients are reduced; without ZeRO one group replicates everything."""
        c, cluster = self.columns, self.problem.cluster
        unsharded = c.zero[rows] == 0
        replicas = np.where(unsharded, 1, c.dp_replicate[rows])
        shard = np.where(unsharded, c.dp[rows] * c.cp[rows], c.dp_shard[rows])
        expert_stride, expert_shard = c.ep[rows] * c.etp[rows], c.edp[rows] // replicas
        return ReductionGroups(
            dense=place(cluster, shard, c.tp[rows]),
            dense_replicas=place(cluster, replicas, c.tp[rows] * shard),
            expert=place(cluster, expert_shard, expert_stride),
            expert_replicas=place(cluster, replicas, expert_stride * expert_shard),
        )

    # ---------------------------------------------------------------- parameters and memory

    def rank_parameters(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(dense, expert) parameter elements of each pipeline rank, [n, C]."""
        count, v = self.table.count[self.plan[rows]], self.variant[rows]
        dense = _dot(count, self.variants.dense[v])
        if self.copies_on_last_stage:
            apart = self.table.last[self.plan[rows]] & (self.columns.pp[rows] > 1)[:, None]
            dense = dense + self.copies_on_last_stage * apart * self.head_weight[self.key[rows]][:, None]
        return dense, _dot(count, self.variants.expert[v])

    def shards(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Ranks that share the optimizer states of a dense and of an expert parameter, [n, 1]."""
        c = self.columns
        dense = np.maximum(c.dp_shard[rows], 1)
        replicas = np.maximum(c.dp_replicate[rows], 1)
        expert = np.where(c.zero[rows] == 0, 1, np.maximum(c.edp[rows] // replicas, 1))
        return dense[:, None], expert[:, None]

    def static_memory(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Bytes by category of what stays allocated through the whole step, each [n, C]."""
        c, runtime, table = self.columns, self.problem.runtime, self.table
        fully = self.problem.fully_sharded
        dense, expert = self.rank_parameters(rows)
        whole = dense + expert
        over_dense, over_expert = self.shards(rows)
        sharded = dense / over_dense + expert / over_expert
        weights = runtime.weight_bytes * whole
        if self.problem.work.precision == "fp8" and not fully:
            weights = weights + _FP8_WEIGHT_COPIES * whole
        buffers = self.exchange_buffers(rows)
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
            gathered = _WEIGHT_BYTES * np.where((c.zero[rows] == 3)[:, None], window, whole)
            # One piece's gradient, whole, as computed and in the dtype of its reduction, while it is scattered.
            buffers = buffers + (_WEIGHT_BYTES + self.grad_bytes) * largest
        return {
            "weights": weights,
            "gradients": self.grad_bytes * (sharded if fully else whole),
            "master": _MASTER_BYTES * sharded,
            "optimizer": self.state_bytes(rows, whole) * sharded,
            "gathered": gathered,
            "buffers": buffers,
            "reserve": np.full_like(whole, runtime.workspace_bytes),
        }

    def exchange_buffers(self, rows: np.ndarray) -> np.ndarray:
        """Bytes of pipeline transfers in flight beside the activations that are counted anyway, [n, C].

        One received tensor on every stage but the first (fit: the stages of 6 single-node B200 runs at pp 2); with
        interleaving also the next activation and gradient, which are received ahead of use.
        """
        table, plan = self.table, self.plan[rows]
        tensors = (~table.first[plan]).astype(np.float64) + 2 * (self.columns.vpp[rows] > 1)[:, None]
        piped = (self.columns.pp[rows] > 1)[:, None]
        return np.where(piped, tensors * self.boundary_bytes(rows)[:, None], 0.0)

    def state_bytes(self, rows: np.ndarray, whole: np.ndarray) -> np.ndarray:
        """Mean optimizer bytes per parameter beside the master copy, [n, C] or a number."""
        optimizer = self.optimizer
        if optimizer.uniform:
            return np.asarray(optimizer.matrix_bytes)
        count, v = self.table.count[self.plan[rows]], self.variant[rows]
        if optimizer.factored:
            return 4 * _dot(count, self.variants.factored[v]) / np.maximum(whole, 1)
        matrices = _dot(count, self.variants.matrix[v]) / np.maximum(whole, 1)
        return optimizer.matrix_bytes * matrices + optimizer.vector_bytes * (1 - matrices)

    def boundary_bytes(self, rows: np.ndarray) -> np.ndarray:
        """Bytes of a micro-batch's hidden state as one rank sends it to the next stage, [n]."""
        return 2 * self.shard.norm_tokens[self.key[rows]] * self.problem.model.hidden

    def activation_memory(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(activations, logits) bytes at each rank's peak in the steady state, [n, C].

        The candidates: the backward of the last block, with all micro-batches in flight; the loss and the head's
        backward, on the last rank; the embedding's backward, on the first, when its micro-batch is otherwise done.
        Layouts that differ only in how they shard states share one answer.
        """
        first, case = _distinct([self.plan[rows], self.variant[rows]])
        activations, logits = self._activation_memory(self.plan[rows[first]], self.variant[rows[first]])
        return activations[case], logits[case]

    def _activation_memory(self, plan: np.ndarray, which: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        table, v = self.table, self.variants
        saved_bytes, kept_bytes = v.saved[which], v.kept[which]
        saved = _dot(table.held_plain[plan], saved_bytes) + _dot(table.held_again[plan], kept_bytes)
        newest = _dot(table.newest_plain[plan], saved_bytes) + _dot(table.newest_again[plan], kept_bytes)
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
        better = at_embedding > activations + logits
        return np.where(better, at_embedding, activations), np.where(better, 0, logits)

    def rank_memory(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Bytes by category at each rank's steady-state peak, each [n, C]; categories in contract order."""
        static = self.static_memory(rows)
        static["activations"], static["logits"] = self.activation_memory(rows)
        return {name: static[name] for name in CATEGORIES}

    def peak_memory(self, rows: np.ndarray) -> np.ndarray:
        """Peak allocated bytes of the worst rank in the steady state, [n]."""
        total = sum(np.floor(part) for part in self.rank_memory(rows).values())
        return np.where(self.table.exists[self.plan[rows]], total, 0).max(axis=1)

    def peak_stage(self, rows: np.ndarray) -> np.ndarray:
        """Pipeline rank of the worst peak, [n]; of equal ranks the first."""
        total = sum(np.floor(part) for part in self.rank_memory(rows).values())
        plan = self.plan[rows]
        worst = np.where(self.table.exists[plan], total, -1).argmax(axis=1)
        return self.table.rank[plan, worst]

    def outside_allocator(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Bytes that the device needs beside the caching allocator, each [n]."""
        c, runtime = self.columns, self.problem.runtime
        axes = (c.tp, c.cp, c.pp, c.ep, c.etp, c.dp * c.cp)
        groups = np.sum([axis[rows] > 1 for axis in axes], axis=0)
        return {
            "context": np.full(len(rows), float(runtime.context_bytes)),
            "communicators": groups * float(runtime.nccl_bytes_per_group),
        }

    def reserved(self, rows: np.ndarray, peak: np.ndarray) -> np.ndarray:
        """Bytes that the device must have for a peak allocation: fragmentation and what lies outside, [n]."""
        return peak * (1 + self.problem.runtime.fragmentation) + sum(self.outside_allocator(rows).values())

    # ---------------------------------------------------------------- time

    def peak_flops_per_s(self) -> float:
        """Dense peak of one GPU at the compute precision."""
        return self.problem.cluster.gpu.peak_flops_per_s[self.problem.work.precision]

    def pass_seconds(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Forward and backward seconds of one micro-batch through all chunks of each rank, [n, C]."""
        plan, v = self.plan[rows], self.variant[rows]
        count, again = self.table.count[plan], self.table.again[plan]
        overhead = self.problem.runtime.micro_batch_overhead_s / 2 * self.columns.vpp[rows][:, None]
        forward = _dot(count, self.variants.forward_s[v]) + overhead
        backward = _dot(count, self.variants.backward_s[v]) + _dot(again, self.variants.again_s[v]) + overhead
        return forward, backward

    def lower_bound(self, rows: np.ndarray) -> np.ndarray:
        """Seconds that no schedule can beat: the busiest rank's own work and its optimizer, [n]."""
        forward, backward = self.pass_seconds(rows)
        busy = self.columns.num_micro_batches[rows][:, None] * (forward + backward)
        return (busy * self.table.exists[self.plan[rows]]).max(axis=1) + self.problem.runtime.step_overhead_s

    def step_seconds(self, rows: np.ndarray) -> np.ndarray:
        """Seconds of one optimizer step, [n]."""
        pipeline = self.pipeline_seconds(rows)
        reduction = self.exposed_reduction_seconds(rows)
        if self.copies_on_last_stage:
            reduction = reduction + self.tied_reduction_seconds(rows)
        return pipeline + reduction + self.optimizer_seconds(rows) + self.problem.runtime.step_overhead_s

    def exchange_seconds(self, rows: np.ndarray) -> np.ndarray:
        """Seconds of one pipeline transfer between neighbouring stages, [n]."""
        return collective_seconds(self.problem.cluster, "send", self.boundary_bytes(rows), self.boundary(rows))

    def boundary(self, rows: np.ndarray) -> Placement:
        """Where the pipeline groups lie."""
        c = self.columns
        return place(self.problem.cluster, c.pp[rows], c.tp[rows] * c.cp[rows] * c.dp[rows])

    def pipeline_seconds(self, rows: np.ndarray, transfer: np.ndarray | None = None) -> np.ndarray:
        """Seconds from the first forward to the last backward, [n]; one schedule sweep per shape of pipeline.

        transfer: [n] seconds of one transfer between stages instead of the modelled ones.
        """
        transfer = self.exchange_seconds(rows) if transfer is None else transfer
        first, case = _distinct([self.plan[rows], self.variant[rows], _codes(transfer)])
        shapes: dict[tuple[str, int, int, int], list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = {}
        for number, at in _by_value(self.plan[rows[first]]):
            part, schedule, m = self.plans[number]
            stage_s = self.stage_seconds(part, self.variant[rows[first[at]]])
            shapes.setdefault((schedule, part.pp, m, part.vpp), []).append((at, *stage_s))
        seconds = np.empty(len(first))
        for shape, members in shapes.items():
            at, forward, backward = (np.concatenate(columns) for columns in zip(*members, strict=True))
            seconds[at] = pipeline_seconds(*shape, forward, backward, transfer[first[at]])
        return seconds[case]

    def stage_seconds(self, part: Partition, variant: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Forward and backward seconds of one micro-batch on every virtual stage, each [n, V]."""
        v, overhead = self.variants, self.problem.runtime.micro_batch_overhead_s / 2
        every = part.plain_unique + part.again_unique
        forward = v.forward_s[variant] @ every.T + overhead
        backward = v.backward_s[variant] @ every.T + v.again_s[variant] @ part.again_unique.T + overhead
        return forward[:, part.of_stage], backward[:, part.of_stage]

    def exposed_reduction_seconds(self, rows: np.ndarray) -> np.ndarray:
        """Seconds of gradient reduction and parameter gather that neither backward nor forward hides, worst rank, [n].

        A rank further down the pipeline ends its last backward earlier and starts its first forward later, by the
        chunk 0 work of the ranks before it; the last bucket of gradients and the first of parameters cannot overlap.
        """
        if self.problem.fully_sharded:
            return self._ends_of_step(rows)
        c, table, v = self.columns, self.table, self.variants
        plan, which = self.plan[rows], self.variant[rows]
        forward, backward = self.pass_seconds(rows)
        before, before_again = table.before[plan], table.before_again[plan]
        late_forward = _dot(before, v.forward_s[which])
        late_backward = _dot(before, v.backward_s[which]) + _dot(before_again, v.again_s[which])
        dense, expert = self.rank_parameters(rows)
        reduce_s, gather_s = self.reduction_seconds(rows, dense, expert)
        buckets = np.maximum((dense + expert) / self.bucket_elements(rows)[:, None], 1)
        exposed = np.zeros_like(dense)
        for seconds, overlapped, passing, late in (
            (reduce_s, c.overlap_grad[rows], backward, late_backward),
            (gather_s, c.overlap_param[rows], forward, late_forward),
        ):
            tail = np.maximum(seconds / buckets - late, 0)
            hidden = np.maximum(seconds - passing - late, tail)
            exposed = exposed + np.where(overlapped[:, None], hidden, seconds)
        return (exposed * table.exists[plan]).max(axis=1)

    def bucket_elements(self, rows: np.ndarray) -> np.ndarray:
        """Parameters per gradient bucket, [n] (Megatron-LM: the larger of a constant and 1,000,000 per replica)."""
        return np.maximum(self.problem.runtime.grad_buckets, 1_000_000 * self.columns.dp[rows])

    def reduction_seconds(
        self, rows: np.ndarray, dense: np.ndarray, expert: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Seconds to reduce each rank's gradients and to gather its parameters, unhidden, [n, C]."""
        cluster, grad, groups = self.problem.cluster, self.grad_bytes, self.groups(rows)
        sharded = (self.columns.zero[rows] >= 1)[:, None]
        grids = [(dense, groups.dense, groups.dense_replicas, self.shards(rows)[0])]
        if self.problem.model.is_moe:
            grids.append((expert, groups.expert, groups.expert_replicas, self.shards(rows)[1]))
        reduce_s, gather_s = np.zeros_like(dense), np.zeros_like(dense)
        for elements, group, replicas, shards in grids:
            scatter = _seconds(cluster, "reduce_scatter", grad * elements, group)
            reduce_s += np.where(sharded, scatter, _seconds(cluster, "all_reduce", grad * elements, group))
            if (replicas.n > 1).any():
                reduce_s += _seconds(cluster, "all_reduce", grad * elements / shards, replicas)
            gather_s += np.where(sharded, _seconds(cluster, "all_gather", _WEIGHT_BYTES * elements, group), 0)
        return reduce_s, gather_s

    def tied_reduction_seconds(self, rows: np.ndarray) -> np.ndarray:
        """Seconds to sum the gradients of weights that the first and the last stage both hold, [n].

        A ring of two ranks moves the tensor once each way at the same time, after all other gradients.
        """
        return collective_seconds(self.problem.cluster, "send", self.tied_bytes(rows), self.boundary(rows))

    def tied_bytes(self, rows: np.ndarray) -> np.ndarray:
        """Bytes of gradients that the first and the last stage both hold, [n]; 0 without a pipeline."""
        shared = self.grad_bytes * self.copies_on_last_stage * self.head_weight[self.key[rows]]
        return np.where(self.columns.pp[rows] > 1, shared, 0.0)

    def _ends_of_step(self, rows: np.ndarray) -> np.ndarray:
        """Fully sharded: the first gather of a step and its last scatter have nothing to hide behind, [n]."""
        dense_group = self.groups(rows).dense
        present = self.table.count[self.plan[rows]][:, 0] > 0
        largest = np.where(present, self.variants.dense[self.variant[rows]], 0).max(axis=1)
        cluster = self.problem.cluster
        gather = collective_seconds(cluster, "all_gather", _WEIGHT_BYTES * largest, dense_group)
        return gather + collective_seconds(cluster, "reduce_scatter", self.grad_bytes * largest, dense_group)

    def optimizer_seconds(self, rows: np.ndarray) -> np.ndarray:
        """Seconds of gradient norm, update and clearing of gradients on the worst rank, [n]."""
        dense, expert = self.rank_parameters(rows)
        over_dense, over_expert = self.shards(rows)
        sharded = dense / over_dense + expert / over_expert
        states = self.state_bytes(rows, dense + expert)
        # The norm reads gradients; the update reads them, reads and writes master and states, writes the weight.
        moved = sharded * (2 * self.grad_bytes + 2 * (_MASTER_BYTES + states) + _WEIGHT_BYTES)
        cleared = self.grad_bytes * (sharded if self.problem.fully_sharded else dense + expert)
        seconds = streaming_seconds(self.pricer.curve, self.problem.cluster.gpu, (moved + cleared).max(axis=1), 4)
        if self.optimizer.newton_schulz:
            count, v = self.table.count[self.plan[rows]], self.variant[rows]
            # The ranks of a sharding group share the matrices among them.
            work = _dot(count, self.variants.newton_schulz[v]) / over_dense
            seconds = seconds + work.max(axis=1) / self.pricer.product_flops_per_s()
        return seconds


def _dot(counts: np.ndarray, values: np.ndarray) -> np.ndarray:
    """[n, C, P] counts times [n, P] values, summed over pieces: [n, C]."""
    return np.einsum("ncp,np->nc", counts, values)


def _seconds(cluster: Cluster, op: str, size: np.ndarray, placement: Placement) -> np.ndarray:
    """Collective seconds of [n, k] sizes in [n] groups; nothing moves in no time."""
    seconds = collective_seconds(cluster, op, size.T, placement).T
    return np.where(size > 0, seconds, 0.0)


def _distinct(fields: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """(positions of the first of each distinct combination, index of each row's combination)."""
    if len(fields[0]) == 1:
        zero = np.zeros(1, dtype=np.int64)
        return zero, zero
    packed = np.zeros(len(fields[0]), dtype=np.int64)
    for field in fields:
        packed = packed * (int(field.max()) + 1) + field
    _, first, inverse = np.unique(packed, return_index=True, return_inverse=True)
    return first, inverse.reshape(-1)


def _by_value(values: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """(value, positions that hold it) for every distinct value."""
    if len(values) == 1:
        return [(int(values[0]), np.zeros(1, dtype=np.int64))]
    order = np.argsort(values, kind="stable")
    cuts = np.flatnonzero(np.diff(values[order])) + 1
    return [(int(values[part[0]]), part) for part in np.split(order, cuts) if len(part)]


def _codes(values: np.ndarray) -> np.ndarray:
    """Small integers that are equal exactly where the values are."""
    if len(values) == 1:
        return np.zeros(1, dtype=np.int64)
    return np.unique(values, return_inverse=True)[1].reshape(-1)


__all__ = ["CATEGORIES", "OWNERS", "Kernel", "Problem"]
