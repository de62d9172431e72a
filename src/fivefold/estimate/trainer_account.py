"""What one rank of fivefold's trainer multiplies and sends in a step: the ledger's rows, and what no block knows of.

Blocks, embedding and head come from the ledger. Data parallelism follows from the buckets, the pipeline from where the
stages lie, and a few scalars and partial gradients are summed once a step. Sizes and counts are exact.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fivefold.cluster import bytes_sent_per_rank
from fivefold.estimate.kernel import Kernel
from fivefold.estimate.ledger import Column, Exchange
from fivefold.estimate.trainer_parameters import (
    EMBEDDING,
    HEAD,
    Bucket,
    Parameter,
    buckets_of,
    copies,
    is_partial,
    stage_parameters,
    unit_of,
)
from fivefold.estimate.variants import module_bits
from fivefold.layout.grids import group_members, rank_coordinates, world_size
from fivefold.layout.layout import RECOMPUTE_KINDS, RECOMPUTE_MODULES, ResolvedLayout
from fivefold.layout.stages import homes

_BACKWARD_OF_PRODUCTS, _BACKWARD_OF_ATTENTION = 2.0, 2.5  # in units of the forward FLOPs
_AXES = ("tp", "cp", "dp", "dp_cp", "shard", "replicate", "pp")  # fivefold.train.mesh's, in its order
_ROW_OUTPUTS, _OVERLAP_PIECES = ("scatter out_proj output", "scatter mlp.fc2 output"), 2
_VALID_TOKENS_BYTES, _TOTALS_BYTES = 8, 16  # one int64; loss and squared norm in fp64


# (members of the group, collective, payload bytes, how many in a step).
_Row = tuple[tuple[int, ...], str, float, int]


class Collective(NamedTuple):
    """Equal collectives of a step. axis: as fivefold.train.traffic names it. payload_bytes: of one, the whole
    tensor."""

    axis: str
    collective: str
    ranks: int
    payload_bytes: int

    @property
    def bytes_sent_per_rank(self) -> float:
        return float(np.asarray(bytes_sent_per_rank(self.collective, float(self.payload_bytes), self.ranks)))


@dataclass(frozen=True, slots=True)
class Account:
    """One rank's step. forward, backward, recompute_flops: as executed. collectives: with how many of each."""

    forward_flops: float
    backward_flops: float
    recompute_flops: float
    collectives: dict[Collective, int]


class TrainerAccount:
    """Accounts for the ranks of one layout. kernel: of that layout alone, with every pipeline rank."""

    def __init__(self, kernel: Kernel, layout: ResolvedLayout) -> None:
        self._kernel, self._layout = kernel, layout
        self._model, self._work = kernel.problem.model, kernel.problem.work
        self._kind = RECOMPUTE_KINDS[int(kernel.columns.recompute_kind[0])]
        bits = module_bits(kernel.columns.recompute_kind, kernel.columns.recompute_modules)[:, 0]
        self._modules = {name for name, on in zip(RECOMPUTE_MODULES, bits, strict=True) if on}

    def of(self, rank: int) -> Account:
        place = rank_coordinates(self._layout, rank)["pp"]
        forward, backward, again = self._flops(place)
        found: Counter[Collective] = Counter()
        for group, collective, payload, count in self._rows(rank, place):
            if count and payload > 0 and len(group) > 1:
                found[Collective(self._axis(group, rank), collective, len(group), round(payload))] += count
        return Account(forward, backward, again, dict(found))

    # ---------------------------------------------------------------- FLOPs

    def _flops(self, place: int) -> tuple[float, float, float]:
        kernel, m = self._kernel, self._layout.num_micro_batches
        count, again = kernel.table.count[0, place], kernel.table.again[0, place]
        forward = backward = recomputed = 0.0
        for index, ledger in enumerate(kernel.ledgers):
            products = sum(_first(2.0 * row.m * row.n * row.k * row.groups) for row in ledger.gemms)
            attention = sum(_first(row.flops) for row in ledger.attends)
            forward += count[index] * (products + attention)
            backward += count[index] * (_BACKWARD_OF_PRODUCTS * products + _BACKWARD_OF_ATTENTION * attention)
            recomputed += again[index] * self._recomputed_flops(index)
        return m * forward, m * backward, m * recomputed

    def _recomputed_flops(self, index: int) -> float:
        cost = self._kernel.costs[index]
        if self._kind == "full":
            return float(cost.full_flops[0])
        at = [RECOMPUTE_MODULES.index(name) for name in self._modules]
        return float(cost.module_flops[at, 0].sum())

    # ---------------------------------------------------------------- collectives

    def _rows(self, rank: int, place: int) -> Iterator[_Row]:
        layout = self._layout
        yield from self._of_the_ledger(rank, place)
        yield from self._of_the_pipeline(rank, place)
        yield from self._of_the_gradients(rank, place)
        yield group_members(layout, "dp_cp", rank), "all_reduce", _VALID_TOKENS_BYTES, 1
        yield tuple(range(world_size(layout))), "all_reduce", _TOTALS_BYTES, 1

    def _of_the_ledger(self, rank: int, place: int) -> Iterator[_Row]:
        table, m = self._kernel.table, self._layout.num_micro_batches
        for index, ledger in enumerate(self._kernel.ledgers):
            count, again = int(table.count[0, place, index]), int(table.again[0, place, index])
            for row in ledger.exchanges:
                runs = count + (again if self._repeats(row) else 0)
                steps = round(_first(row.ring_steps)) if row.op == "send" else 1
                pieces = self._pieces(row)
                size, calls = _first(row.bytes) / pieces, m * runs * steps * pieces
                yield group_members(self._layout, row.axis, rank), row.op, size, calls

    def _pieces(self, row: Exchange) -> int:
        """Overlapped, a row layer's output is summed in pieces (fivefold.train.parallel.overlap)."""
        ends_in_pieces = row.op == "reduce_scatter" and row.when == "forward" and row.name in _ROW_OUTPUTS
        return _OVERLAP_PIECES if self._layout.overlap.tp and ends_in_pieces else 1

    def _repeats(self, row: Exchange) -> bool:
        """Whether recomputation runs the exchange again."""
        if row.when != "forward" or row.ends_block:
            return False
        return self._kind == "full" or row.module in self._modules

    def _of_the_pipeline(self, rank: int, place: int) -> Iterator[_Row]:
        layout = self._layout
        here = homes(layout.pp, layout.vpp, layout.schedule)[place]
        neighbours = [stage + step for stage in here for step in (1, -1)]
        sends = [stage for stage in neighbours if 0 <= stage < layout.pp * layout.vpp and stage not in here]
        size = float(self._kernel.boundary_bytes(np.arange(1))[0])
        yield group_members(layout, "pp", rank), "send", size, layout.num_micro_batches * len(sends)

    def _of_the_gradients(self, rank: int, place: int) -> Iterator[_Row]:
        layout, grad = self._layout, self._kernel.grad_bytes
        numel = self._kernel.problem.runtime.grad_buckets * 4 // grad
        index = group_members(layout, "shard", rank).index(rank)
        tied: dict[str, int] = {}
        for parameters in stage_parameters(self._model, layout, place):
            buckets = buckets_of(parameters, layout.zero, layout.dp_shard, numel, self._model.tied_embeddings)
            for bucket in buckets:
                yield from self._of_a_bucket(rank, bucket)
            owned: dict[str, int] = {}
            for bucket in buckets:
                owned |= bucket.owned(index, layout.dp_shard)
            yield from self._of_partial_gradients(rank, parameters, owned)
            tied |= {name: size for name, size in owned.items() if name in (EMBEDDING, HEAD)}
        pair = self._tied_pair()
        if pair is not None and place in pair:
            ends = tuple(sorted(group_members(layout, "pp", rank)[each] for each in pair))
            yield ends, "all_reduce", grad * sum(tied.values()), 1

    def _of_a_bucket(self, rank: int, bucket: Bucket) -> Iterator[_Row]:
        """Reduction over the sharding ranks, the replicas of their parts, and the parameters' way back."""
        layout, grad, width = self._layout, self._kernel.grad_bytes, self._work.compute_bytes
        shard, replicate = (group_members(layout, axis, rank) for axis in ("shard", "replicate"))
        m = layout.num_micro_batches
        every_round = layout.zero == 3 or (layout.zero == 2 and layout.overlap.grad)
        rounds = m if every_round else 1
        yield shard, "reduce_scatter", grad * bucket.padded, rounds
        yield replicate, "all_reduce", grad * bucket.part(layout.dp_shard), 1
        gathers = 1 if layout.zero < 3 else m * self._gathers(bucket)
        yield shard, "all_gather", width * bucket.padded, gathers

    def _gathers(self, unit: Bucket) -> int:
        """Per micro-batch: before forward and before backward, which a table does not need. A tied embedding is
        gathered for the embedding's forward and for the head's forward and backward."""
        names = {parameter.name for parameter in unit.parameters}
        module = unit_of(next(iter(names)))
        if module == "embed_tokens":
            alone = self._layout.pp * self._layout.vpp == 1
            return 3 if self._model.tied_embeddings and alone else 1
        return 1 if module == "embed_positions" else 2

    def _of_partial_gradients(
        self, rank: int, parameters: Sequence[Parameter], owned: dict[str, int]
    ) -> Iterator[_Row]:
        layout, grad = self._layout, self._kernel.grad_bytes
        tp = group_members(layout, "tp", rank)
        whole = sum(owned.get(each.name, 0) for each in parameters if is_partial(each, layout))
        yield tp, "all_reduce", grad * whole, 1
        shared = [each for each in parameters if copies(each, layout.tp) > 1]
        if shared:
            size = copies(shared[0], layout.tp)
            first = tp.index(rank) - tp.index(rank) % size
            elements = sum(owned.get(each.name, 0) for each in shared)
            yield tp[first : first + size], "all_reduce", grad * elements, 1

    def _tied_pair(self) -> tuple[int, int] | None:
        """The pipeline ranks of the first and the last stage, where they hold one tensor and are two."""
        layout = self._layout
        if not self._model.tied_embeddings:
            return None
        where = homes(layout.pp, layout.vpp, layout.schedule)
        first, last = (
            next(rank for rank, stages in enumerate(where) if stage in stages)
            for stage in (0, layout.pp * layout.vpp - 1)
        )
        return None if first == last else (first, last)

    def _axis(self, group: tuple[int, ...], rank: int) -> str:
        """The axis with these members, else the narrowest that they are a part of, else the world."""
        around = {axis: group_members(self._layout, axis, rank) for axis in _AXES}
        fitting = [axis for axis in _AXES if set(group) <= set(around[axis])]
        return min(fitting, key=lambda axis: len(around[axis]), default="world")


def _first(column: Column) -> float:
    return float(np.asarray(column, dtype=float).reshape(-1)[0])
