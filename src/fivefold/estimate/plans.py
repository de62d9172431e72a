"""Stage plans: which pieces each pipeline rank holds, as tables that thousands of layouts index.

A piece is a block kind, the embedding, the head or an MTP module: whatever has a ledger of its own. Virtual stages of
equal contents are one composition, and pipeline ranks of equal compositions are one class, represented by its first
rank, which holds most micro-batches; so a search pays for some four ranks, however deep the pipeline.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from fivefold.layout.columns import ALL_LAYERS
from fivefold.layout.stages import Policy, blocks_per_stage
from fivefold.model.spec import ModelSpec
from fivefold.schedule import in_flight_by_chunk, in_flight_moments

Runs = tuple[tuple[int, int], ...]
ITEMS = ("embedding", "head", "mtp")


@dataclass(slots=True, frozen=True, eq=False)
class Partition:
    """How blocks and items lie on a pipeline, whatever the schedule. V = pp·vpp virtual stages, P pieces.

    plain, again: [V, P] pieces of each virtual stage run without and with recomputation.
    of_stage: [V] index of a virtual stage's composition; plain_unique, again_unique: [U, P] the compositions.
    ranks: first rank of every class of equal ranks.
    """

    pp: int
    vpp: int
    plain: np.ndarray
    again: np.ndarray
    of_stage: np.ndarray
    plain_unique: np.ndarray
    again_unique: np.ndarray
    ranks: tuple[int, ...]


@lru_cache(maxsize=16384)
def partition(
    runs: Runs,
    mtp: int,
    pp: int,
    vpp: int,
    first: int,
    last: int,
    account_for_embedding: bool,
    account_for_loss: bool,
    policy: Policy,
    recompute_layers: int,
) -> Partition:
    """The partition of a model's runs of (kind index, count).

    recompute_layers: blocks recomputed per pipeline rank, shared by its chunks; -1 all, 0 none. first, last: blocks on
    the first and last rank, 0 for even. account_for_*: whether embedding and head take a block's place. Pieces are the
    kinds in index order, then embedding, head, MTP.
    """
    layers = sum(count for _, count in runs)
    per_stage = blocks_per_stage(
        layers, pp, vpp, first or None, last or None, policy, account_for_embedding, account_for_loss
    )
    pieces = _pieces(runs, mtp, np.array(per_stage))
    again = _recomputed(runs, pieces, vpp, recompute_layers)
    plain = pieces - again
    width = pieces.shape[1]
    unique, of_stage = np.unique(np.concatenate([plain, again], axis=1), axis=0, return_inverse=True)
    of_stage = of_stage.reshape(-1)
    contents = of_stage.reshape(vpp, pp).T
    _, ranks = np.unique(contents, axis=0, return_index=True)
    return Partition(
        pp, vpp, plain, again, of_stage, unique[:, :width], unique[:, width:], tuple(sorted(ranks.tolist()))
    )


@dataclass(slots=True, frozen=True)
class PlanTable:
    """Ranks of several plans, padded to C per plan. [N, C, P] counts of pieces, [N, C] facts of ranks.

    count, again: pieces on the rank, all and recomputed ones. held_plain, held_again: the same times the micro-batches
    in flight at the rank's peak, by kind of treatment. newest_plain, newest_again: those of one micro-batch of chunk 0.
    before, before_again: pieces of chunk 0 on all earlier ranks. rank: its number; first, last, exists: booleans.
    held: micro-batches in flight, a chunk counting 1 / vpp.
    """

    count: np.ndarray
    again: np.ndarray
    held_plain: np.ndarray
    held_again: np.ndarray
    newest_plain: np.ndarray
    newest_again: np.ndarray
    before: np.ndarray
    before_again: np.ndarray
    rank: np.ndarray
    held: np.ndarray
    first: np.ndarray
    last: np.ndarray
    exists: np.ndarray


def plan_table(plans: list[tuple[Partition, str, int]], *, every_rank: bool = False) -> PlanTable:
    """The table of (partition, schedule, micro-batches) plans: one representative per class, or every rank.

    A rank whose chunks differ has one more entry, after all ranks, for each further mix of chunks that it holds at a
    peak moment; its peak is the largest of its entries.
    """
    entries = [_entries(part, schedule, m, every_rank) for part, schedule, m in plans]
    n, c, p = len(plans), max(len(rank) for rank, _ in entries), plans[0][0].plain.shape[1]
    wide = np.zeros((8, n, c, p))
    facts = np.zeros((5, n, c))
    for i, (part, _, _) in enumerate(plans):
        at, in_flight = entries[i]
        plain = part.plain.reshape(part.vpp, part.pp, p)
        again = part.again.reshape(part.vpp, part.pp, p)
        ours, ours_again = plain[:, at], again[:, at]
        k = len(at)
        wide[0, i, :k] = (ours + ours_again).sum(axis=0)
        wide[1, i, :k] = ours_again.sum(axis=0)
        wide[2, i, :k] = (ours * in_flight.T[:, :, None]).sum(axis=0)
        wide[3, i, :k] = (ours_again * in_flight.T[:, :, None]).sum(axis=0)
        wide[4, i, :k] = ours[0]
        wide[5, i, :k] = ours_again[0]
        wide[6, i, :k] = (np.cumsum(plain[0] + again[0], axis=0) - plain[0] - again[0])[at]
        wide[7, i, :k] = (np.cumsum(again[0], axis=0) - again[0])[at]
        facts[0, i, :k] = at
        facts[1, i, :k] = in_flight.sum(axis=1) / part.vpp
        facts[2, i, :k] = at == 0
        facts[3, i, :k] = at == part.pp - 1
        facts[4, i, :k] = 1
    return PlanTable(
        *wide,
        rank=facts[0].astype(np.int64),
        held=facts[1],
        first=facts[2] > 0,
        last=facts[3] > 0,
        exists=facts[4] > 0,
    )


@lru_cache(maxsize=16384)
def _entries(part: Partition, schedule: str, m: int, every_rank: bool) -> tuple[np.ndarray, np.ndarray]:
    """(rank of each entry, its micro-batches in flight by chunk [entries, vpp]), one entry per rank first."""
    ranks = np.arange(part.pp) if every_rank else np.array(part.ranks)
    held = in_flight_by_chunk(schedule, part.pp, m, part.vpp)[ranks].copy()
    blocks = part.plain.shape[1] - len(ITEMS)
    content = np.concatenate([part.plain[:, :blocks], part.again[:, :blocks]], axis=1)
    content = content.reshape(part.vpp, part.pp, -1)[:, ranks]
    uneven = (content != content[:1]).any(axis=(0, 2))
    if not uneven.any():
        return ranks, held
    moments = in_flight_moments(schedule, part.pp, m, part.vpp)
    extra_ranks: list[int] = []
    extra_held: list[np.ndarray] = []
    for i in np.flatnonzero(uneven).tolist():
        mixes = np.unique(moments[:, ranks[i]], axis=0)
        mixes = mixes[_undominated(mixes @ content[:, i])]
        held[i] = mixes[0]
        extra_ranks += [int(ranks[i])] * (len(mixes) - 1)
        extra_held += [*mixes[1:]]
    if not extra_ranks:
        return ranks, held
    return np.append(ranks, extra_ranks), np.concatenate([held, extra_held])


def _undominated(vectors: np.ndarray) -> np.ndarray:
    """Indices of the vectors that no other one exceeds or equals everywhere (of equal ones the first)."""
    at_least = (vectors[:, None] >= vectors[None]).all(axis=2)
    earlier = np.arange(len(vectors))
    beaten = at_least & (~at_least.T | (earlier[:, None] < earlier[None]))
    return np.flatnonzero(~beaten.any(axis=0))


def piece_names(model: ModelSpec) -> tuple[str, ...]:
    """Names of the pieces in the order of their columns."""
    return (*(f"block {index}" for index in range(len(model.kinds))), *ITEMS)


def kind_runs(model: ModelSpec) -> Runs:
    """The model's runs as (kind index, count)."""
    kinds = model.kinds
    return tuple((kinds.index(run.block), run.count) for run in model.runs)


def _pieces(runs: Runs, mtp: int, per_stage: np.ndarray) -> np.ndarray:
    """[V, P] pieces per virtual stage, from its number of blocks."""
    number = 1 + max(kind for kind, _ in runs)
    pieces = np.zeros((len(per_stage), number + len(ITEMS)), dtype=np.int64)
    ends = np.cumsum(per_stage)
    start = 0
    for kind, count in runs:
        overlap = np.minimum(ends, start + count) - np.maximum(ends - per_stage, start)
        pieces[:, kind] += np.maximum(overlap, 0)
        start += count
    pieces[0, number] = 1
    pieces[-1, number + 1] = 1
    pieces[-1, number + 2] = mtp
    return pieces


def _recomputed(runs: Runs, pieces: np.ndarray, vpp: int, layers: int) -> np.ndarray:
    """[V, P] of `pieces` that are recomputed: blocks only, the first of every virtual stage.

    layers: blocks per rank, shared evenly by its chunks (Megatron's block method counts per chunk).
    """
    number = pieces.shape[1] - len(ITEMS)
    again = np.zeros_like(pieces)
    if layers == ALL_LAYERS:
        again[:, :number] = pieces[:, :number]
        return again
    left = np.full(len(pieces), layers // vpp)
    for kind in dict.fromkeys(kind for kind, _ in runs):
        again[:, kind] = np.minimum(left, pieces[:, kind])
        left = left - again[:, kind]
    return again
