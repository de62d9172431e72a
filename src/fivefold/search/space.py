"""The space of layouts: every combination of the options' values, built column by column.

Each step crosses what there is with one option's values and drops at once what cannot divide and what a rule on the
options so far refuses, so that a million candidates cost some tenths of a second. Nothing here is a preference.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from fivefold.errors import FivefoldError, option_of
from fivefold.estimate import Problem
from fivefold.estimate.estimate import rule_context
from fivefold.layout.columns import ALL_LAYERS, COLUMN_NAMES, CORE_ATTENTION_MASK, Columns, mask_of
from fivefold.layout.divisors import divisors
from fivefold.layout.layout import CP_KINDS, RECOMPUTE_KINDS, SCHEDULES
from fivefold.layout.mixers import largest_tp
from fivefold.layout.rules import Context, rules_for, valid_mask
from fivefold.search.pins import divides_nothing, runs_chunks
from fivefold.search.prune import promising
from fivefold.search.stage_counts import stage_counts
from fivefold.search.table import Ints, Known, NotYetKnownError, Table, crossed, kept, stacked
from fivefold.search.values import SEARCHED_SCHEDULES, fewest_experts, recompute_parts

# Micro-batches beyond this many sequences only add memory: the matrix products have long been full.
_LARGEST_MICRO_BATCH = 64
_MOST_TOKENS = 131_072  # of a micro-batch on one rank
MOST_ENUMERATED = 1_500_000
LISTED = 5  # sets of degrees that a plan names unless it is asked for more
_REFUSED_SHOWN = 2000  # candidates kept when every one is refused
_FULL, _SELECTIVE = RECOMPUTE_KINDS.index("full"), RECOMPUTE_KINDS.index("selective")
_1F1B, _INTERLEAVED = (SCHEDULES.index(name) for name in ("1f1b", "interleaved"))


@dataclass(slots=True)
class Space:
    """The values that are searched, by option; a pinned option has only the user's.

    runtime: as the user names it, with its version; the problem's profile by default. wanted: sets of degrees that will
    be listed. most: candidates from which on combinations are set aside before recomputation is enumerated. set_aside:
    how many candidates that left out.
    settled: ids of the rules that the table obeys, as the options that they ask for were known at an earlier step.
    refused: whether some step left nothing that obeys its rules, so that the rows only explain the refusal.
    """

    problem: Problem
    pins: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    runtime: str = ""
    wanted: int = LISTED
    most: int = MOST_ENUMERATED
    set_aside: int = 0
    settled: set[str] = field(default_factory=set)
    refused: bool = False

    def columns(self) -> Columns:
        """Every candidate whose degrees divide the GPUs and the batch. FivefoldError when pins leave none."""
        table = self._degrees()
        table = self._expert_degrees(table)
        table = self._legal(self._sequence_parallel(table))
        table = self._micro_batches(table)
        table = self._legal(self._schedules(table))
        table = self._legal(self._uneven_stages(table))
        table = self._legal(self._sharding(table))
        table = self._legal(self._overlaps(table), whole=True)
        if not len(table["tp"]):
            raise self._empty()
        if not self.refused:
            table = self._promising(table)
        table = self._recompute(table)
        if not len(table["tp"]):
            raise self._empty()
        return self._built(table)

    def _built(self, table: Table) -> Columns:
        return Columns.build(self.problem.cluster.gpus, self.problem.work, **table)

    def _promising(self, table: Table) -> Table:
        """Of too many rows those whose recomputation is worth enumerating; see prune.py."""
        if len(table["tp"]) * len(self._recompute_options()) <= self.most:
            return table

        def expand(positions: Ints) -> Columns:
            columns = self._built(self._recompute(kept(table, positions)))
            return columns.take(np.flatnonzero(valid_mask(columns, self._context())))

        parts = [mask or CORE_ATTENTION_MASK for kind, _, mask in self._recompute_options() if kind == _SELECTIVE]
        hopeful = promising(self.problem, self._built(table), parts, expand, self.wanted)
        self.set_aside = self._count_recomputed(table) - self._count_recomputed(kept(table, hopeful))
        return kept(table, hopeful)

    def _count_recomputed(self, table: Table) -> int:
        """How many rows `_recompute` makes of a table."""
        deepest = int(table["vpp"].max(initial=1)) + 1
        counts = np.bincount(table["pp"] * deepest + table["vpp"])
        pp, vpp = np.divmod(np.flatnonzero(counts), deepest)
        each = {"pp": pp, "vpp": vpp, "rows": counts[counts > 0]}
        return int(self._recompute(each)["rows"].sum())

    # ---------------------------------------------------------------- steps

    def _degrees(self) -> Table:
        world, model = self.problem.cluster.gpus, self.problem.model
        heads = largest_tp(model.kinds, model.hidden)
        table = {"pp": self._values("pp", [d for d in divisors(world) if d <= model.layers])}
        table = crossed(table, tp=self._values("tp", [d for d in divisors(world) if d <= heads]))
        table = kept(table, world % (table["pp"] * table["tp"]) == 0)
        table = crossed(table, cp=self._values("cp", [d for d in divisors(world) if d <= self._largest_cp()]))
        table = kept(table, world % (table["pp"] * table["tp"] * table["cp"]) == 0)
        kinds = np.array([CP_KINDS.index(kind) for kind in self.pins.get("cp_kind", CP_KINDS)])
        table = crossed(table, cp_kind=kinds)
        return kept(table, (table["cp"] > 1) | (table["cp_kind"] == kinds[0]))

    def _largest_cp(self) -> int:
        """Beyond it a rank has fewer than 128 tokens of a sequence, less than one attention tile of queries."""
        return max(self.problem.work.seq_len // 128, 1)

    def _expert_degrees(self, table: Table) -> Table:
        model, world = self.problem.model, self.problem.cluster.gpus
        experts = fewest_experts(model)
        table = crossed(table, ep=self._values("ep", [d for d in divisors(world) if experts % d == 0]))
        etp = self._values("etp", divisors(int(table["tp"].max(initial=1))) if model.is_moe else [1])
        table = crossed(table, etp=etp)
        # Expert-TP other than none or the dense TP has no implementation that fivefold knows.
        if "etp" not in self.pins:
            table = kept(table, (table["etp"] == 1) | (table["etp"] == table["tp"]))
        return kept(table, world % (table["ep"] * table["etp"] * table["pp"]) == 0)

    def _micro_batches(self, table: Table) -> Table:
        batch, world = self.problem.work.global_batch, self.problem.cluster.gpus
        sizes = self._values("micro_batch", [d for d in divisors(batch) if d <= _LARGEST_MICRO_BATCH])
        table = crossed(table, micro_batch=sizes)
        dp = world // (table["tp"] * table["cp"] * table["pp"])
        table = kept(table, batch % (table["micro_batch"] * dp) == 0)
        if "micro_batch" in self.pins:
            return table
        tokens = table["micro_batch"] * self.problem.work.seq_len // table["cp"]
        return kept(table, (table["micro_batch"] == 1) | (tokens <= _MOST_TOKENS))

    def _schedules(self, table: Table) -> Table:
        layers = self.problem.model.layers
        names = self.pins.get("schedule", SEARCHED_SCHEDULES)
        chunks = self._values("vpp", [v for v in range(1, layers + 1) if self._chunks_possible(v)])
        options = [(SCHEDULES.index(name), int(v)) for name in names for v in chunks if runs_chunks(name, v)]
        if not options:
            raise self._empty()
        schedule, vpp = np.array(options).T
        pipelines, pipeline = np.unique(table["pp"], return_inverse=True)
        possible = [[self._pipeline_runs(int(pp), *option) for option in options] for pp in pipelines]
        runs = np.array(possible, dtype=bool).reshape(-1, len(options))
        dp = self.problem.cluster.gpus // (table["tp"] * table["cp"] * table["pp"])
        m = self.problem.work.global_batch // (table["micro_batch"] * dp)
        in_groups = (m % table["pp"] == 0)[:, None] | (schedule != _INTERLEAVED)
        return crossed(table, runs[pipeline] & in_groups, schedule=schedule, vpp=vpp)

    def _pipeline_runs(self, pp: int, schedule: int, vpp: int) -> bool:
        """Whether blocks can be split so; without a pipeline one schedule stands for all."""
        if pp == 1:
            named = self.pins.get("schedule", SEARCHED_SCHEDULES)
            return vpp == 1 and (schedule == _1F1B or SCHEDULES[_1F1B] not in named)
        fills = vpp == 1 or pp * vpp <= self.problem.model.layers
        return fills and bool(stage_counts(self.problem, pp, vpp, self.pins))

    def _chunks_possible(self, chunks: int) -> bool:
        """Two stages is the shallowest pipeline, and no chunk is empty."""
        layers = self.problem.model.layers
        return chunks == 1 or 2 * chunks <= layers

    def _uneven_stages(self, table: Table) -> Table:
        """First and last stages with fewer blocks, for layers that do not divide and to balance embedding and head."""
        parts: list[Table] = []
        for pp, vpp in sorted({*zip(table["pp"].tolist(), table["vpp"].tolist(), strict=True)}):
            counts = stage_counts(self.problem, pp, vpp, self.pins)
            if counts:
                first, last, embedding, loss = np.array(counts).T
                here = kept(table, (table["pp"] == pp) & (table["vpp"] == vpp))
                parts.append(
                    crossed(
                        here,
                        first_stage_layers=first,
                        last_stage_layers=last,
                        account_for_embedding=embedding > 0,
                        account_for_loss=loss > 0,
                    )
                )
        if not parts:
            raise self._empty()
        return stacked(parts)

    def _sharding(self, table: Table) -> Table:
        stages = self._values("zero", self.problem.runtime.zero_stages)
        table = crossed(table, zero=stages)
        world, span = self.problem.cluster.gpus, self.problem.cluster.spans[0]
        ranks = world // (table["tp"] * table["pp"])  # dp x cp
        if "dp_replicate" in self.pins:
            values = self._values("dp_replicate", [1])
            # Where nothing is sharded, one replica is written for as many as there are ranks.
            same = (table["zero"] == 0) & (ranks > 1) & (1 in values)
            copies = [np.where(same & (ranks == value), 0, value) for value in values]
        else:
            # Hybrid sharding: shards inside one scale-up domain, or eight of them; replicas outside.
            inside = np.maximum(span // table["tp"], 1)
            copies = [np.ones_like(ranks), *(self._hybrid(ranks, inside * times, table) for times in (1, 8))]
        counts = np.stack(copies, axis=1)
        ours, copy = np.nonzero((counts > 0) & (ranks[:, None] % np.maximum(counts, 1) == 0))
        return {**kept(table, ours), "dp_replicate": counts[ours, copy]}

    @staticmethod
    def _hybrid(ranks: Ints, shard: Ints, table: Table) -> Ints:
        """Replicas for shards of `shard` of the dp x cp ranks; 0 where that is no hybrid."""
        useful = (ranks % shard == 0) & (shard < ranks) & (shard > 1) & (table["zero"] > 0)
        return np.where(useful, ranks // shard, 0)

    def _recompute(self, table: Table) -> Table:
        kinds, layers, modules = np.array(self._recompute_options()).T
        table = crossed(table, recompute_kind=kinds, recompute_layers=layers, recompute_modules=modules)
        if "recompute_layers" in self.pins:
            return table
        # The searched counts are per chunk; a layout counts the whole rank.
        every = table["recompute_layers"] == ALL_LAYERS
        table["recompute_layers"] = np.where(every, ALL_LAYERS, table["recompute_layers"] * table["vpp"])
        return kept(table, every | (table["recompute_layers"] < -(-self.problem.model.layers // table["pp"])))

    def _recompute_options(self) -> list[tuple[int, int, int]]:
        """(kind, layers, module mask) to try."""
        kinds = self.pins.get("recompute", RECOMPUTE_KINDS)
        options: list[tuple[int, int, int]] = []
        if "none" in kinds:
            options.append((0, ALL_LAYERS, 0))
        if "selective" in kinds:
            options += [(_SELECTIVE, ALL_LAYERS, mask_of(parts)) for parts in self._parts()]
        if "full" in kinds:
            options += [(_FULL, layers, 0) for layers in self._recomputed_layers()]
        return options

    def _parts(self) -> list[tuple[str, ...]]:
        if "recompute_modules" in self.pins:
            return [tuple(parts) for parts in self.pins["recompute_modules"]]
        return [*recompute_parts(self.problem.model)]

    def _recomputed_layers(self) -> list[int]:
        """All blocks, and 1, 2, 3, 4, 6, 8, 12, ...: steps of at most one half."""
        if "recompute_layers" in self.pins:
            return [ALL_LAYERS if value is None else int(value) for value in self.pins["recompute_layers"]]
        steps = sorted({1, *(base << power for base in (2, 3) for power in range(9))})
        return [ALL_LAYERS, *(step for step in steps if step < self.problem.model.layers)]

    def _sequence_parallel(self, table: Table) -> Table:
        wanted = self.pins.get("sequence_parallel", (True, False))
        table = crossed(table, sp=np.array([bool(value) for value in wanted]))
        return kept(table, (table["tp"] > 1) | ~table["sp"] | (not any(not value for value in wanted)))

    def _overlaps(self, table: Table) -> Table:
        """Overlaps keep their defaults unless pinned."""
        for name in ("overlap_grad", "overlap_param", "overlap_tp", "overlap_ep"):
            if name in self.pins:
                table = crossed(table, **{name: np.array([bool(value) for value in self.pins[name]])})
        return table

    def _legal(self, table: Table, *, whole: bool = False) -> Table:
        """The rows that no rule refuses whatever the options still to come; of a table without any, some rows, from
        which the refusal can be explained. whole: of a table that lacks nothing but recomputation."""
        if whole:
            columns = self._built(table)
            known = Known({name: getattr(columns, name) for name in COLUMN_NAMES if not name.startswith("recompute_")})
        else:
            known = Known.of(table, self.problem.cluster.gpus, self.problem.work.global_batch)
        alive = np.ones(len(table["tp"]), dtype=bool)
        context = self._context()
        obeyed: set[str] = set()
        for rule in rules_for(context):
            if rule.id not in self.settled:
                try:
                    alive &= rule.holds(cast(Columns, known), context)
                except NotYetKnownError:
                    continue
                obeyed.add(rule.id)
        if alive.any() or not len(alive):
            self.settled |= obeyed
            return kept(table, alive)
        self.refused = True  # and the same rules refuse the rows of the next step, which are thinned in turn
        return kept(table, np.unique(np.linspace(0, len(alive) - 1, _REFUSED_SHOWN).astype(int)))

    def _context(self) -> Context:
        problem = self.problem
        return rule_context(problem.model, problem.cluster, problem.work, self.runtime or problem.runtime.name)

    # ---------------------------------------------------------------- values

    def _values(self, name: str, otherwise: Iterable[int]) -> Ints:
        return np.array(sorted({int(value) for value in self.pins.get(name) or otherwise}), dtype=np.int64)

    def _empty(self) -> FivefoldError:
        alone = divides_nothing(self.pins, self.problem.cluster.gpus, self.problem.work.global_batch)
        if alone is not None:
            return alone
        pinned = ", ".join(f"{name}={'/'.join(map(str, values))}" for name, values in self.pins.items()) or "nothing"
        gpus, batch = self.problem.cluster.gpus, self.problem.work.global_batch
        return FivefoldError(
            f"No layout divides {gpus} GPUs and a global batch of {batch} sequences with {pinned} pinned. "
            "tp x cp x pp has to divide the GPUs, and micro-batch x dp the global batch; unpin one option, or choose a "
            "batch with more divisors.",
            code="empty-space",
            option=option_of(next(iter(self.pins), "gbs")),
            value=pinned,
        )
