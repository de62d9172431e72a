"""Tables of what is distinct in a set of layouts: keys, variants, plans, and what a rank holds of the model."""

from __future__ import annotations

import numpy as np

from fivefold.estimate.arrays import distinct, dot
from fivefold.estimate.calibrated import calibrated
from fivefold.estimate.optimizers import OPTIMIZERS
from fivefold.estimate.plans import Plan, PlanTable, kind_runs, partition, plan_table
from fivefold.estimate.priced import priced_keys
from fivefold.estimate.problem import Problem
from fivefold.estimate.shard import distinct_shards
from fivefold.estimate.variants import Variants, variants
from fivefold.layout.columns import Columns
from fivefold.layout.grids import group
from fivefold.layout.layout import RECOMPUTE_KINDS, SCHEDULES, V_SHAPED
from fivefold.layout.stages import split_policy, stage_weights

_NONE = RECOMPUTE_KINDS.index("none")
_GRAD_BYTES = {"fp32": 4, "bf16": 2}


class Tables:
    """The tables of `columns`. Methods take `rows`, positions of layouts, and answer in their order: [n] layouts,
    [n, C] their distinguishable pipeline ranks, P pieces."""

    def __init__(self, problem: Problem, columns: Columns, *, every_rank: bool = False) -> None:
        self.problem = problem = calibrated(problem).dispatched()
        self.columns = columns
        self.optimizer = OPTIMIZERS[problem.work.optimizer]
        # 0 where adapters alone are trained: their own states and gradients are taken to cost nothing.
        self.trains = int(problem.work.trained == "all")
        self.grad_bytes = _GRAD_BYTES[problem.work.grad_dtype] * self.trains
        self.shard, self.key = distinct_shards(columns, problem.work.seq_len)
        priced = priced_keys(problem, self.shard)
        self.ledgers, self.costs, self.pricer = priced.ledgers, priced.costs, priced.pricer
        self.head_weight = priced.head_weight
        self.blocks = len(problem.model.kinds)
        # The last stage of a pipeline holds its own copy of a tied head, or of the embedding that MTP looks up.
        self.copies_on_last_stage = int(problem.model.tied_embeddings or problem.model.mtp > 0)
        self.variant, self.variant_rows, self.variants = self._variants()
        self.plan, self.plans = self._plans()
        self.table: PlanTable = plan_table(self.plans, every_rank=every_rank)

    def _variants(self) -> tuple[np.ndarray, np.ndarray, Variants]:
        """(variant of each layout, a layout of each variant, the variants)."""
        c = self.columns
        fields = [self.key, c.recompute_kind, c.recompute_modules]
        if self.problem.by_unit:
            fields += [c.zero, c.dp_shard, c.dp_replicate, c.edp, c.overlap_grad, c.overlap_param, c.pp > 1]
        first, inverse = distinct(fields)
        table = variants(self.costs, self.key[first], c.recompute_kind[first], c.recompute_modules[first])
        return inverse, first, table

    def _plans(self) -> tuple[np.ndarray, list[Plan]]:
        c, model = self.columns, self.problem.model
        layers = np.where(c.recompute_kind == _NONE, 0, c.recompute_layers)
        # Recomputed activations exist only while their backward runs, so that nothing of it can wait (fivefold).
        splits = c.recompute_kind == _NONE
        stages = [c.pp, c.vpp, c.first_stage_layers, c.last_stage_layers, c.account_for_embedding, c.account_for_loss]
        fields = [*stages, layers + 1, c.schedule, splits.astype(np.int64), c.num_micro_batches]
        first, inverse = distinct(fields)
        runs, policy = kind_runs(model), split_policy(self.problem.runtime.name)
        weights = stage_weights(model)
        plans: list[Plan] = []
        for *where, again, schedule, split, m in zip(*(field[first].tolist() for field in fields), strict=True):
            part = partition(runs, model.mtp, *where, policy, again - 1, _placed_like(SCHEDULES[schedule]), weights)
            plans.append(Plan(part, SCHEDULES[schedule], m, bool(split)))
        return inverse, plans

    def rank_parameters(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(dense, expert) parameter elements of each pipeline rank, [n, C]."""
        count, v = self.table.count[self.plan[rows]], self.variant[rows]
        dense = dot(count, self.variants.dense[v])
        if self.copies_on_last_stage:
            apart = self.table.last[self.plan[rows]] & (self.columns.pp[rows] > 1)[:, None]
            dense = dense + self.copies_on_last_stage * apart * self.head_weight[self.key[rows]][:, None]
        return dense, dot(count, self.variants.expert[v])

    def shards(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Ranks that share the optimizer states of a dense and of an expert parameter, [n, 1]."""
        dense, expert = (group(self.columns, axis, rows).size for axis in ("shard", "expert_shard"))
        return np.maximum(dense, 1)[:, None], expert[:, None]

    def state_bytes(self, rows: np.ndarray, whole: np.ndarray) -> np.ndarray:
        """Mean optimizer bytes per parameter beside the master copy, [n, C] or a number."""
        optimizer = self.optimizer
        if optimizer.uniform:
            return np.asarray(optimizer.matrix_bytes)
        count, v = self.table.count[self.plan[rows]], self.variant[rows]
        if optimizer.factored:
            return 4 * dot(count, self.variants.factored[v]) / np.maximum(whole, 1)
        matrices = dot(count, self.variants.matrix[v]) / np.maximum(whole, 1)
        return optimizer.matrix_bytes * matrices + optimizer.vector_bytes * (1 - matrices)

    def boundary_bytes(self, rows: np.ndarray) -> np.ndarray:
        """Bytes of a micro-batch's hidden state as one rank sends it to the next stage, [n]."""
        return self.problem.work.compute_bytes * self.shard.norm_tokens[self.key[rows]] * self.problem.model.hidden


def _placed_like(schedule: str) -> str:
    """One schedule for all that place their stages alike, so that they share partitions."""
    return "zbv" if schedule in V_SHAPED else "1f1b"
