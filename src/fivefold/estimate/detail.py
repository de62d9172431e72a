"""Everything that is said about one valid layout: memory by rank and tensor, owners of the step, traffic."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fivefold.cluster import bytes_sent_per_rank
from fivefold.cluster.groups import Placement
from fivefold.estimate import by_operation
from fivefold.estimate.counted import flops_per_token
from fivefold.estimate.doubt import doubt
from fivefold.estimate.interval import around
from fivefold.estimate.kernel import Kernel, Problem
from fivefold.estimate.ledger import Column, Ledger
from fivefold.estimate.plans import piece_names
from fivefold.estimate.price import COMMUNICATION, OWNERS
from fivefold.estimate.recomputed import belongs, by_operations, kept_beside_input, runs_again
from fivefold.estimate.result import (
    Memory,
    Mfu,
    Parts,
    Phase,
    StageMemory,
    Step,
    Tensor,
    Traffic,
)
from fivefold.estimate.trainer_traffic import trainer_traffic
from fivefold.estimate.variants import module_bits
from fivefold.layout.columns import Columns, modules_of
from fivefold.layout.layout import RECOMPUTE_KINDS, SCHEDULES, RecomputeKind, ResolvedLayout
from fivefold.layout.stages import homes

_ONE = np.arange(1)
_LARGEST_SHOWN = 6
_ROUNDING = 1e-12


class Detail:
    """Everything that is said about one valid layout; from the kernel's arrays of one row and every pipeline rank."""

    def __init__(self, problem: Problem, columns: Columns, layout: ResolvedLayout) -> None:
        self.problem = problem
        self.layout = layout
        self.columns = columns
        self.kernel = Kernel(problem, self.columns, every_rank=True)
        self.kind: RecomputeKind = RECOMPUTE_KINDS[int(self.columns.recompute_kind[0])]
        self.modules = modules_of(int(self.columns.recompute_modules[0]))
        self.micro_batches = int(self.columns.num_micro_batches[0])
        forward, backward = self.kernel.pass_seconds(_ONE)
        self.slowest = int((forward + backward)[0, : int(columns.pp[0])].argmax())
        self.memory = self._memory()
        self.fits = bool(self.kernel.fits(_ONE, np.array([self.memory.reserved_bytes]))[0])
        self.flops = flops_per_token(problem, self._recompute_flops_per_token())
        self.step = self._step()
        self.traffic = self._traffic()

    def _count(self, name: str, rank: int) -> np.ndarray:
        """[P] pieces of one pipeline rank from the plan table's field `name`."""
        return getattr(self.kernel.table, name)[0, rank]

    # ---------------------------------------------------------------- memory

    def _memory(self) -> Memory:
        kernel = self.kernel
        parts = {name: np.floor(value[0]).astype(np.int64) for name, value in kernel.rank_memory(_ONE).items()}
        total = np.sum([*parts.values()], axis=0)
        entries = [self._peak_entry(rank, total) for rank in range(int(self.columns.pp[0]))]
        stages = tuple(
            StageMemory(
                stage=rank,
                peak_bytes=int(total[entry]),
                in_flight=float(kernel.table.held[0, entry]),
                breakdown=Parts({name: int(part[entry]) for name, part in parts.items()}),
            )
            for rank, entry in enumerate(entries)
        )
        worst = max(stages, key=lambda stage: stage.peak_bytes)
        timeline = self._timeline(worst)
        peak_phase = max(timeline, key=lambda phase: (sum(phase.bytes.values()), phase.phase == "steady_state"))
        return Memory(
            peak_bytes=worst.peak_bytes,
            reserved_bytes=int(kernel.peak(_ONE).reserved[0]),
            capacity_bytes=self.problem.cluster.gpu.memory_bytes,
            peak_stage=worst.stage,
            peak_phase=peak_phase.phase,
            largest=self._largest(worst, entries[worst.stage]),
            stages=stages,
            timeline=timeline,
            outside_allocator=Parts({name: int(value[0]) for name, value in kernel.outside_allocator(_ONE).items()}),
            **self._host(),
        )

    def _host(self) -> dict[str, int | None]:
        if not self.problem.work.offload.anything:
            return {}
        used = int(self.kernel.host_bytes(_ONE)[0])
        return {"host_bytes": used, "host_capacity_bytes": self.problem.cluster.host_memory_bytes}

    def _peak_entry(self, rank: int, total: np.ndarray) -> int:
        """The plan table's entry of a rank with its largest peak: it has several where its chunks differ."""
        mine = np.flatnonzero((self.kernel.table.rank[0] == rank) & self.kernel.table.exists[0])
        return int(mine[total[mine].argmax()])

    def _timeline(self, steady: StageMemory) -> tuple[Phase, ...]:
        """Initialisation allocates weights, master and whole gradient buffers; the first step runs before the
        optimizer has states; the update needs no activations."""
        fully = self.problem.fully_sharded
        peak = steady.breakdown

        def without(*names: str) -> Parts:
            return Parts({name: 0 if name in names else value for name, value in peak.items()})

        late = ("optimizer", "activations", "logits", "gathered", "buffers", *(("gradients",) if fully else ()))
        return (
            Phase(phase="initialisation", bytes=without(*late)),
            Phase(phase="first_forward_backward", bytes=without("optimizer")),
            Phase(phase="optimizer_step", bytes=without("activations", "logits", "gathered")),
            Phase(phase="steady_state", bytes=Parts(peak)),
        )

    def _largest(self, worst: StageMemory, entry: int) -> tuple[Tensor, ...]:
        """The largest kinds of tensors on the peak rank, from the ledgers' rows."""
        plain, again = self._count("held_plain", entry), self._count("held_again", entry)
        names = piece_names(self.problem.model)
        static = ("weights", "gradients", "master", "optimizer", "gathered")
        found = {name: float(worst.breakdown[name]) for name in static}
        for index, ledger in enumerate(self.kernel.ledgers):
            for row, size in zip(ledger.saved, self._kept_sizes(ledger), strict=True):
                label = row.name if self.kernel.blocks == 1 else f"{names[index]}: {row.name}"
                found[label] = found.get(label, 0.0) + _first(row.bytes) * plain[index] + size * again[index]
            if self.kind == "full" and again[index]:
                kept = kept_beside_input(ledger, self.problem.runtime, self.problem.work)
                for name, sizes in (("checkpointed block inputs", [ledger.input_bytes]), ("kept by a policy", kept)):
                    found[name] = found.get(name, 0.0) + sum(map(_first, sizes)) * again[index]
        found["logits and loss"] = float(worst.breakdown["logits"])
        top = sorted(found.items(), key=lambda item: -item[1])[:_LARGEST_SHOWN]
        return tuple(Tensor(name=name, bytes=int(size)) for name, size in top if size >= 1)

    def _kept_sizes(self, ledger: Ledger) -> list[float]:
        """Of every saved tensor of a block that is recomputed, the bytes that are kept beside its input."""
        if self.kind != "selective":
            return [0.0] * len(ledger.saved)
        if by_operations(self.problem.runtime, ledger):
            return [_first(size) for size in by_operation.kept(ledger)]
        dropped = [any(belongs(row.module, each) for each in self.modules) for row in ledger.saved]
        return [0.0 if gone else _first(row.bytes) for row, gone in zip(ledger.saved, dropped, strict=True)]

    # ---------------------------------------------------------------- time

    def _step(self) -> Step:
        problem, kernel = self.problem, self.kernel
        breakdown = self._breakdown()
        seconds = sum(breakdown.values())
        gpus = problem.cluster.gpus
        peak = kernel.peak_flops_per_s() * gpus
        flops = self.flops
        rate = problem.work.tokens_per_batch / seconds
        return Step(
            seconds=around(seconds, problem, float(doubt(kernel, _ONE, np.array([seconds]))[0])),
            breakdown_s=Parts(breakdown),
            tokens_per_s=rate,
            tokens_per_s_per_gpu=rate / gpus,
            mfu=Mfu(
                noncausal=flops.noncausal * rate / peak,
                causal=flops.causal * rate / peak,
                hardware=flops.hardware * rate / peak,
            ),
            slowest_stage=self.slowest,
        )

    def _breakdown(self) -> dict[str, float]:
        """Owners of the step on the slowest rank, summing to the kernel's step seconds. host is what a micro-batch's
        passes wait for launches, recompute whatever running operations again adds, pp what transfers add to the
        pipeline; bubble is the rest of the time that this rank waits."""
        kernel, v, m = self.kernel, self.kernel.variants, self.micro_batches
        count, again = self._count("count", self.slowest), self._count("again", self.slowest)
        once = m * (count @ (v.forward + v.backward)[0])
        redone = m * (again @ v.again[0])
        gathers = m * float(count @ (v.gather_forward + v.gather_backward)[0])
        # The same layout twice, with its transfers and with free ones.
        transfers = np.array([float(kernel.exchange_seconds(_ONE)[0]), 0.0])
        pipeline, free = kernel.pipeline_seconds(np.zeros(2, dtype=np.int64), transfers).tolist()
        copies = m * float(count @ (v.copy_forward + v.copy_backward)[0])
        owners = {owner: float(once[index] + redone[index]) for index, owner in enumerate(OWNERS)}
        # Rounding of the sums above is not a bubble: it goes to `other`, so that the owners add up to the step.
        waiting = free - sum(owners.values()) - gathers - copies
        bubble = waiting if waiting > _ROUNDING * free else 0.0
        at = [index for index, owner in enumerate(OWNERS) if owner not in COMMUNICATION]
        busy = [index for index in at if OWNERS[index] != "host"]
        return {
            "compute": float(once[busy].sum()),
            "host": float(once[OWNERS.index("host")]),
            "recompute": float(redone[at].sum()),
            "tp": owners["tp"],
            "cp": owners["cp"],
            "ep": owners["ep"],
            "pp": pipeline - free,
            "dp": gathers + self._reduction_seconds() + self._tied_seconds(),
            "bubble": bubble,
            "optimizer": float(kernel.optimizer_seconds(_ONE)[0]),
            "other": self.problem.step_overhead_s + copies + waiting - bubble,
        }

    def _reduction_seconds(self) -> float:
        kernel = self.kernel
        return float(kernel.exposed_reduction_seconds(_ONE)[0] + kernel.adapter_reduction_seconds(_ONE)[0])

    def _tied_seconds(self) -> float:
        return float(self.kernel.tied_reduction_seconds(_ONE)[0]) if self.kernel.copies_on_last_stage else 0.0

    def _recompute_flops_per_token(self) -> float:
        """FLOPs per token of forward operations that backward runs again, over the whole model."""
        if self.kind == "none":
            return 0.0
        c, kernel = self.columns, self.kernel
        again = kernel.table.again[0, : int(c.pp[0])].sum(axis=0)
        bits = np.flatnonzero(module_bits(c.recompute_kind, c.recompute_modules)[:, 0])
        per_rank = sum(
            float(again[index] * (cost.full_flops[0] if self.kind == "full" else cost.module_flops[bits, 0].sum()))
            for index, cost in enumerate(kernel.costs)
        )
        return per_rank * int(c.tp[0] * c.cp[0]) / (int(c.micro_batch[0]) * self.problem.work.seq_len)

    # ---------------------------------------------------------------- traffic

    def _traffic(self) -> tuple[Traffic, ...]:
        if self.problem.runtime.sharding == "buckets":
            return tuple(self._trainer_traffic())
        return (*self._block_traffic(), *self._pipeline_traffic(), *self._reduction_traffic())

    def _trainer_traffic(self) -> Iterator[Traffic]:
        """Every collective of the slowest rank; an owner's exposed seconds are shared by its bytes."""
        moved = trainer_traffic(self.kernel, self.layout, self.slowest)
        for each in moved:
            whole = sum(other.bytes_sent for other in moved if other.owner == each.owner)
            exposed = self.step.breakdown_s[each.owner] * each.bytes_sent / whole
            yield self._row(each.axis, each.collective, each.placement, each.count, each.bytes_sent, exposed)

    def _block_traffic(self) -> list[Traffic]:
        """Collectives inside blocks and items on the slowest rank, summed by axis and operation."""
        kernel, runtime = self.kernel, self.problem.runtime
        count, again = self._count("count", self.slowest), self._count("again", self.slowest)
        totals: dict[tuple[str, str], np.ndarray] = {}
        for index, cost in enumerate(kernel.costs):
            for row, exposed in cost.exchanges:
                size = _first(row.bytes)
                repeated = runs_again(row, kernel.ledgers[index], runtime, self.kind, self.modules)
                twice = again[index] if repeated else 0
                runs = self.micro_batches * float(count[index] + twice)
                if size <= 0 or runs == 0:
                    continue
                calls = runs * (_first(row.ring_steps) if row.op == "send" else row.times)
                sent = calls * float(bytes_sent_per_rank(row.op, size, kernel.pricer.placements[row.axis].n)[0])
                entry = totals.setdefault((row.axis, row.op), np.zeros(3))
                entry += (calls, sent, runs * float(exposed[0]))
        return [
            self._row(axis, op, kernel.pricer.placements[axis], *entry.tolist()) for (axis, op), entry in totals.items()
        ]

    def _row(self, axis: str, op: str, placement: Placement, count: float, sent: float, exposed: float) -> Traffic:
        level = int(placement.level[0])
        return Traffic(
            axis=axis,
            grid="expert" if axis in ("ep", "etp", "edp", "edp_replicate") else "dense",
            collective=op,
            count=round(count),
            bytes_sent_per_rank=int(sent),
            level=self.problem.cluster.links[level].name if level >= 0 else "none",
            exposed_s=exposed,
        )

    def _pipeline_traffic(self) -> list[Traffic]:
        pp, vpp = int(self.columns.pp[0]), int(self.columns.vpp[0])
        if pp == 1:
            return []
        where = homes(pp, vpp, SCHEDULES[int(self.columns.schedule[0])])
        # A chunk's activation goes to the next stage and its gradient to the one before, unless this rank has that too.
        neighbours = [stage + step for stage in where[self.slowest] for step in (1, -1)]
        sent = [stage for stage in neighbours if 0 <= stage < pp * vpp and stage not in where[self.slowest]]
        count = self.micro_batches * len(sent)
        size = float(self.kernel.boundary_bytes(_ONE)[0])
        exposed = self.step.breakdown_s["pp"]
        return [self._row("pp", "send", self.kernel.boundary(_ONE), count, count * size, exposed)]

    def _reduction_traffic(self) -> list[Traffic]:
        """Gradient reductions and parameter gathers of the slowest rank; the exposed time is shared by bytes."""
        kernel, c = self.kernel, self.columns
        dense, expert = (float(part[0, self.slowest]) for part in kernel.trained_parameters(_ONE))
        # Frozen weights are gathered where they rest in shards; adapters are summed, and not sharded, elsewhere.
        frozen = not kernel.trains
        whole = [float(part[0, self.slowest]) for part in kernel.rank_parameters(_ONE)]
        gathered = [0.0, 0.0] if frozen and not self.problem.fully_sharded else whole
        zero = int(c.zero[0])
        piped = bool(kernel.reduces_once(_ONE)[0])
        rounds = self.micro_batches if self.problem.fully_sharded else 1
        times = 1 if piped else rounds
        gathers = (2 * rounds if zero == 3 else times) if zero else 0
        over_dense, over_expert = (float(shards[0, 0]) for shards in kernel.shards(_ONE))
        groups = kernel.groups(_ONE)
        whole_sum = frozen or not zero or self.problem.sums_in_full
        reduce = "all_reduce" if whole_sum else "reduce_scatter"
        grad = kernel.trained_grad_bytes
        rows = [
            ("dp", reduce, groups.dense, grad * dense, times),
            ("dp", "all_gather", groups.dense, 2 * gathered[0], gathers),
            ("dp_replicate", "all_reduce", groups.dense_replicas, grad * dense / over_dense, times),
            ("edp", reduce, groups.expert, grad * expert, times),
            ("edp", "all_gather", groups.expert, 2 * gathered[1], gathers),
            ("edp_replicate", "all_reduce", groups.expert_replicas, grad * expert / over_expert, times),
        ]
        rows = [row for row in rows if int(row[2].n[0]) > 1 and row[3] * row[4] > 0]
        moved = [count * float(bytes_sent_per_rank(op, size, group.n)[0]) for _, op, group, size, count in rows]
        tied = float(kernel.tied_bytes(_ONE)[0]) if kernel.copies_on_last_stage else 0.0
        exposed = (self.step.breakdown_s["dp"] - self._tied_seconds()) / max(sum(moved), 1.0)
        out = [
            self._row(axis, op, group, count, sent, sent * exposed)
            for (axis, op, group, _, count), sent in zip(rows, moved, strict=True)
        ]
        if tied:
            out.append(self._row("embedding", "all_reduce", kernel.boundary(_ONE), 1, tied, self._tied_seconds()))
        return out


def _first(column: Column) -> float:
    """The value of a ledger's column that has one key."""
    return float(np.asarray(column).reshape(-1)[0])
