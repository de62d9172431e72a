"""Stage plans: which pieces each pipeline rank holds, as tables that thousands of layouts index.

A piece is a block kind, the embedding, the head or an MTP module: whatever has a ledger of its own. Virtual stages of
equal contents are one composition, and pipeline ranks of equal compositions are one class, represented by its first
rank, which holds most micro-batches; so a search pays for some four ranks, however deep the pipeline.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from fivefold.layout.columns import ALL_LAYERS
from fivefold.layout.layout import SPLIT_BACKWARD
from fivefold.layout.stages import Policy, Weights, blocks_per_stage, homes
from fivefold.model.spec import ModelSpec
from fivefold.schedule import in_flight_by_chunk, in_flight_moments, split_moments

Runs = tuple[tuple[int, int], ...]
ITEMS = ("embedding", "head", "mtp")


@dataclass(slots=True, frozen=True, eq=False)
class Partition:
    """How blocks and items lie on a pipeline, whatever the schedule. V = pp·vpp virtual stages, P pieces.

    plain, again: [V, P] pieces of each virtual stage run without and with recomputation.
    home: [pp, vpp] the virtual stage of each rank's chunks, which the schedule's placement says.
    of_stage: [V] index of a virtual stage's composition; plain_unique, again_unique: [U, P] the compositions.
    ranks: first rank of every class of equal ranks.
    """

    pp: int
    vpp: int
    home: np.ndarray
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
    schedule: str = "1f1b",
    weights: Weights = (1, 0),
) -> Partition:
    """The partition of a model's runs of (kind index, count).

    recompute_layers: blocks recomputed per pipeline rank, shared by its chunks; -1 all, 0 none. first, last: blocks on
    the first and last rank, 0 for even. account_for_*: whether embedding and head take a block's place. Pieces are the
    kinds in index order, then embedding, head, MTP. weights: as of blocks_per_stage.
    """
    layers = sum(count for _, count in runs)
    per_stage = blocks_per_stage(
        layers, pp, vpp, first or None, last or None, policy, account_for_embedding, account_for_loss, weights
    )
    return partition_of(runs, mtp, pp, vpp, per_stage, recompute_layers, schedule)


def partition_of(
    runs: Runs, mtp: int, pp: int, vpp: int, per_stage: tuple[int, ...], recompute_layers: int, schedule: str = "1f1b"
) -> Partition:
    """The same for any number of blocks on each virtual stage."""
    pieces = _pieces(runs, mtp, np.array(per_stage))
    home = np.array(homes(pp, vpp, schedule))
    again = _recomputed(runs, pieces, vpp, recompute_layers)
    plain = pieces - again
    width = pieces.shape[1]
    unique, of_stage = np.unique(np.concatenate([plain, again], axis=1), axis=0, return_inverse=True)
    of_stage = of_stage.reshape(-1)
    contents = of_stage[home]
    _, ranks = np.unique(contents, axis=0, return_index=True)
    return Partition(
        pp, vpp, home, plain, again, of_stage, unique[:, :width], unique[:, width:], tuple(sorted(ranks.tolist()))
    )


@dataclass(slots=True, frozen=True)
class PlanTable:
    """Ranks of several plans, padded to C per plan. [N, C, P] counts of pieces, [N, C] facts of ranks.

    count, again: pieces on the rank, all and recomputed ones. held_plain, held_again: the same times the micro-batches
    in flight at the rank's peak, by kind of treatment. newest_plain, newest_again: those of one micro-batch of chunk 0.
    before, before_again: pieces of chunk 0 on all earlier ranks. rank: its number; exists: boolean; first, last:
    whether it holds the first and the last virtual stage.
    held: micro-batches in flight, a chunk counting 1 / vpp. owed: pieces, as held_plain, of micro-batches that owe the
    gradients of their weights only, under a schedule that splits the backward; apart: whether such a backward starts.
    """

    count: np.ndarray
    again: np.ndarray
    held_plain: np.ndarray
    held_again: np.ndarray
    newest_plain: np.ndarray
    newest_again: np.ndarray
    owed: np.ndarray
    before: np.ndarray
    before_again: np.ndarray
    rank: np.ndarray
    held: np.ndarray
    first: np.ndarray
    last: np.ndarray
    exists: np.ndarray
    apart: np.ndarray


# What each rank's entry says beside its counts of pieces, which are floats.
_FACTS = {"rank": np.int64, "held": float, "first": bool, "last": bool, "exists": bool, "apart": bool}


class Plan(NamedTuple):
    """A partition under a schedule. split: whether backward is split where the schedule says so."""

    part: Partition
    schedule: str
    micro_batches: int
    split: bool


def plan_table(plans: list[Plan], *, every_rank: bool = False) -> PlanTable:
    """The table of some plans: one representative per class of ranks, or every rank.

    A rank whose chunks differ has one more entry, after all ranks, for each further mix of chunks that it holds at a
    peak moment; its peak is the largest of its entries.
    """
    entries = [_entries(*plan, every_rank) for plan in plans]
    n, c, p = len(plans), max(len(rank) for rank, *_ in entries), plans[0].part.plain.shape[1]
    table = {
        name: np.zeros((n, c), dtype=_FACTS[name]) if name in _FACTS else np.zeros((n, c, p))
        for name in PlanTable.__dataclass_fields__
    }
    for i, (plan, entry) in enumerate(zip(plans, entries, strict=True)):
        for name, values in _rows(plan.part, *entry).items():
            table[name][i, : len(values)] = values
    return PlanTable(**table)


def _rows(part: Partition, at: np.ndarray, in_flight: np.ndarray, owed: np.ndarray) -> dict[str, np.ndarray]:
    """Fields of a PlanTable for one plan's entries: at, in_flight and owed are as `_entries` has them."""
    plain, again = part.plain[part.home.T], part.again[part.home.T]  # [vpp, pp, P]
    ours, ours_again = plain[:, at], again[:, at]
    flying, owing = in_flight.T[:, :, None], owed[:, : part.vpp].T[:, :, None]
    of_first = plain[0] + again[0]
    return {
        "count": (ours + ours_again).sum(axis=0),
        "again": ours_again.sum(axis=0),
        "held_plain": (ours * flying).sum(axis=0),
        "held_again": (ours_again * flying).sum(axis=0),
        "newest_plain": ours[0],
        "newest_again": ours_again[0],
        "owed": (ours * owing).sum(axis=0),
        "before": (np.cumsum(of_first, axis=0) - of_first)[at],
        "before_again": (np.cumsum(again[0], axis=0) - again[0])[at],
        "rank": at,
        "held": in_flight.sum(axis=1) / part.vpp,
        "first": (part.home == 0).any(axis=1)[at],
        "last": (part.home == part.pp * part.vpp - 1).any(axis=1)[at],
        "exists": np.ones(len(at), dtype=bool),
        "apart": owed[:, part.vpp] > 0,
    }


@lru_cache(maxsize=16384)
def _entries(
    part: Partition, schedule: str, m: int, split: bool, every_rank: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(rank of each entry, its micro-batches in flight by chunk [entries, vpp], [entries, vpp + 1] how many of them owe
    the gradients of their weights only and whether a backward that is split starts), one entry per rank first."""
    ranks = np.arange(part.pp) if every_rank else np.array(part.ranks)
    blocks = part.plain.shape[1] - len(ITEMS)
    content = np.concatenate([part.plain[:, :blocks], part.again[:, :blocks]], axis=1)
    content = content[part.home.T][:, ranks]
    # A mix of fewer blocks with the head, whose loss is large, is beaten by none without it.
    with_head = np.concatenate([content, part.plain[part.home.T][:, ranks, blocks + ITEMS.index("head"), None]], axis=2)
    if split and schedule in SPLIT_BACKWARD:
        waiting, owed, apart = split_moments(schedule, part.pp, m, part.vpp)
        moments = np.concatenate([waiting, owed, apart[..., None]], axis=2)[:, ranks]
        return _with_mixes(ranks, with_head, moments, range(len(ranks)))
    first = in_flight_by_chunk(schedule, part.pp, m, part.vpp, split=split)[ranks].copy()
    nothing = np.zeros((len(first), part.vpp + 1), dtype=np.int64)
    uneven = np.flatnonzero((content != content[:1]).any(axis=(0, 2)))
    if not len(uneven):
        return ranks, first, nothing
    moments = in_flight_moments(schedule, part.pp, m, part.vpp, split=split)[:, ranks]
    moments = np.concatenate([moments, np.zeros((*moments.shape[:2], part.vpp + 1), dtype=np.int64)], axis=2)
    moments[0, :, : part.vpp] = first
    return _with_mixes(ranks, with_head, moments, uneven.tolist())


def _with_mixes(
    ranks: np.ndarray, content: np.ndarray, moments: np.ndarray, several: Iterable[int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The entries of ranks of which some hold different mixes at several moments.

    content: [vpp, ranks, pieces]. moments: [K, ranks, 2 vpp + 1]: by chunk what waits for its backward and what owes
    the rest of it, and whether a backward that is split starts. several: the ranks of which every undominated mix
    counts; of the others the first moment.
    """
    vpp = len(content)
    first = moments[0].copy()
    extra_ranks: list[int] = []
    extra: list[np.ndarray] = []
    for i in several:
        mixes = np.unique(moments[:, i], axis=0)
        waiting, owed, apart = mixes[:, :vpp], mixes[:, vpp : 2 * vpp], mixes[:, 2 * vpp :]
        weights = np.concatenate([waiting @ content[:, i], owed @ content[:, i], apart], axis=1)
        mixes = mixes[_undominated(weights)]
        first[i] = mixes[0]
        extra_ranks += [int(ranks[i])] * (len(mixes) - 1)
        extra += [*mixes[1:]]
    if extra_ranks:
        ranks, first = np.append(ranks, extra_ranks), np.concatenate([first, extra])
    return ranks, first[:, :vpp] + first[:, vpp : 2 * vpp], first[:, vpp:]


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
