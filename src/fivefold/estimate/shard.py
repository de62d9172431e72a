"""Keys: the part of a layout that a block's ledger depends on, as columns.

A block's ledger depends on tp, sequence parallelism, cp and its kind, ep, etp, the micro-batch and the overlap of
tp and ep; not on pp, dp, ZeRO or recomputation, which are arithmetic on top. A whole search has some hundred keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fivefold.estimate.arrays import distinct
from fivefold.layout.columns import Columns

_FIELDS = ("tp", "sp", "cp", "cp_kind", "ep", "etp", "micro_batch", "overlap_tp", "overlap_ep")


@dataclass(slots=True, frozen=True)
class Shard:
    """One entry per distinct key. Attention sees `tokens` tokens per rank, norms see `norm_tokens` (SP shards them)."""

    tp: np.ndarray
    sp: np.ndarray
    cp: np.ndarray
    ulysses: np.ndarray
    ep: np.ndarray
    etp: np.ndarray
    micro_batch: np.ndarray
    overlap_tp: np.ndarray
    overlap_ep: np.ndarray
    tokens: np.ndarray
    norm_tokens: np.ndarray

    def __len__(self) -> int:
        return len(self.tp)


def distinct_shards(columns: Columns, seq_len: int) -> tuple[Shard, np.ndarray]:
    """The distinct keys of `columns` and, per layout, the index of its key."""
    raw = [np.asarray(getattr(columns, name), dtype=np.int64) for name in _FIELDS]
    first, inverse = distinct(raw)
    tp, sp, cp, cp_kind, ep, etp, micro_batch, overlap_tp, overlap_ep = (column[first] for column in raw)
    tokens = micro_batch * seq_len / cp
    return (
        Shard(
            tp=tp,
            sp=sp.astype(bool),
            cp=cp,
            ulysses=cp_kind == 1,
            ep=ep,
            etp=etp,
            micro_batch=micro_batch,
            overlap_tp=overlap_tp.astype(bool),
            overlap_ep=overlap_ep.astype(bool),
            tokens=tokens,
            norm_tokens=np.where(sp.astype(bool), tokens / tp, tokens),
        ),
        inverse,
    )
