"""Rows of the matrix on forked ranks, set beside one process."""

from __future__ import annotations

import time
from functools import cache
from typing import NamedTuple

from matrix import SEQ, VOCAB, Masks, Row, row
from ranks import run_ranks

from fivefold.train.data import Synthetic
from fivefold.train.mesh import Mesh
from fivefold.train.refuse import refuse
from fivefold.train.verify import Proof, RankReport, Reference, Verdict, compare, observe, run_reference
from fivefold.train.verify.compare import TOLERANCES
from fivefold.train.verify.controls import Site, Sums

TIMEOUT_S = 240.0  # of one row, on a machine that does other things too


class Outcome(NamedTuple):
    """verdict: of the comparison. sites: every sum over ranks that was made. seconds_s: of the ranks alone."""

    verdict: Verdict
    sites: frozenset[Site]
    seconds_s: float


def proof_of(row: Row, precision: str = "fp64") -> Proof:
    data = Synthetic(VOCAB, SEQ, uneven=row.masks == "uneven")
    return Proof(spec=row.spec, data=data, global_batch=row.global_batch, precision=precision, dropout=row.dropout)


def reference_of(row: Row, precision: str = "fp64") -> Reference:
    """One process's training, once per model, batch and precision."""
    return _reference(row.model, row.layers, row.global_batch, row.masks, row.dropout, precision)


@cache
def _reference(model: str, layers: int, global_batch: int, masks: Masks, dropout: float, precision: str) -> Reference:
    same = row(model=model, layers=layers, micro_batches=1, micro_batch=global_batch, masks=masks, dropout=dropout)
    return run_reference(proof_of(same, precision))


def prove(
    row: Row,
    precision: str = "fp64",
    exact: str | None = None,
) -> Outcome:
    """Train under the row's layout on forked ranks and compare; every sum over ranks is noted on the way.

    exact: precision of the reference, by default the layout's.
    Raises FivefoldError for a row that a rule or a limit of the trainer refuses.
    """
    refuse(row.job)
    layout, proof = row.resolved, proof_of(row, precision)
    reference = reference_of(row, exact or precision)

    def one_rank(rank: int) -> tuple[RankReport, list[Site]]:
        mesh = Mesh(layout)
        sums = Sums(mesh)
        return observe(proof, layout, mesh, watch=lambda: sums), list(sums.sites)

    start = time.monotonic()
    found = run_ranks(row.ranks, one_rank, timeout=TIMEOUT_S)
    seconds_s = time.monotonic() - start
    verdict = compare(proof.spec, layout, reference, [report for report, _ in found], TOLERANCES.get(precision, 1.0))
    return Outcome(verdict, frozenset(site for _, sites in found for site in sites), seconds_s)
