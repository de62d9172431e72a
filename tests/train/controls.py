"""Every sum over ranks that the trainer makes, and what happens to the proof when it is spoiled.

The table is checked from both sides: a row of the matrix whose layout makes a sum that is not here fails
(test_matrix.py), and a control whose layout does not make its sum any more fails (test_controls.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import matrix
import proving
from ranks import run_ranks

from fivefold.layout import Overlap
from fivefold.train.mesh import Mesh
from fivefold.train.verify import Relative, Verdict, compare, observe
from fivefold.train.verify.controls import Site, Spoil, Spoiled, Sums

HOW: tuple[Spoil, ...] = ("drop", "double")


class Control(NamedTuple):
    """A sum and the smallest layout that makes it."""

    site: Site
    row: matrix.Row

    @property
    def name(self) -> str:
        return f"{self.site.function}-{self.site.collective}-{self.site.axis}".replace(" ", ".")


def _control(where: str, collective: str, axis: str, **options: Any) -> Control:
    module, _, function = where.partition(":")
    return Control(Site(module, function, collective, axis), matrix.row("controls", **options))


_AR, _RS = "all_reduce", "reduce_scatter"
_REDUCE, _FINISH, _PIECES = (f"parallel.bucket:{name}" for name in ("Bucket.reduce", "Bucket.finish", "sum_pieces"))
_ROW, _COLUMNS = "parallel.tensor:RowLinear.forward", "parallel.tensor:_Columns.backward"
_PIECEWISE = "parallel.overlap:scattered_product"
_EMBEDDING, _LOSS = "parallel.vocabulary:VocabEmbedding.forward", "parallel.vocabulary:_CrossEntropy.forward"
_VALID, _NORM = "loss:global_valid_tokens", "trainer:Trainer.gradients"
_NO_SP = {"tp": 2, "sequence_parallel": False}

CONTROLS: tuple[Control, ...] = (
    _control(_VALID, _AR, "dp", dp=2),
    _control(_VALID, _AR, "cp", cp=2),
    _control(_VALID, _AR, "dp_cp", dp=2, cp=2),
    _control(_NORM, _AR, "dp", dp=2),
    _control(_NORM, _AR, "cp", cp=2),
    _control(_NORM, _AR, "tp", tp=2),
    _control(_NORM, _AR, "pp", pp=2),
    _control(_NORM, _AR, "dp_cp", dp=2, cp=2),
    _control(_NORM, _AR, "world", dp=2, tp=2),
    _control(_REDUCE, _AR, "dp", dp=2, zero=0),
    _control(_REDUCE, _AR, "cp", cp=2, zero=0),
    _control(_REDUCE, _AR, "dp_cp", dp=2, cp=2, zero=0),
    _control(_REDUCE, _RS, "dp", dp=2),
    _control(_REDUCE, _RS, "cp", cp=2),
    _control(_REDUCE, _RS, "dp_cp", dp=2, cp=2),
    _control(_REDUCE, _RS, "shard", dp=4, dp_replicate=2),
    _control(_FINISH, _AR, "dp", dp=2, dp_replicate=2, zero=3),
    _control(_FINISH, _AR, "cp", cp=2, dp_replicate=2, zero=3),
    _control(_FINISH, _AR, "dp_cp", dp=2, cp=2, dp_replicate=4, zero=3),
    _control(_FINISH, _AR, "replicate", dp=4, dp_replicate=2),
    _control(_ROW, _RS, "tp", tp=2),
    _control(_ROW, _AR, "tp", **_NO_SP),
    _control(_PIECEWISE, _RS, "tp", tp=2, overlap=Overlap(tp=True)),
    _control(_COLUMNS, _RS, "tp", tp=2),
    _control(_COLUMNS, _AR, "tp", **_NO_SP),
    _control(_EMBEDDING, _RS, "tp", tp=2),
    _control(_EMBEDDING, _AR, "tp", **_NO_SP),
    _control(_LOSS, _AR, "tp", tp=2),
    _control(_PIECES, _AR, "tp", tp=2),
    _control(_PIECES, _AR, "part of tp", tp=4, micro_batches=1, micro_batch=4),
    _control(_PIECES, _AR, "pp", pp=2, model="tied"),
    _control(_PIECES, _AR, "part of pp", pp=4, model="tied"),
)
CONTROLLED = frozenset(control.site for control in CONTROLS)


class Spoiling(NamedTuple):
    """made: whether the layout made the sum at all. verdicts: of the proof with it spoiled, for each of HOW."""

    made: bool
    verdicts: dict[Spoil, Verdict]


def spoil(control: Control) -> Spoiling:
    """Run the control's layout once as it is, to see the sum, and once spoiled in each way."""
    row = control.row
    proof, layout = proving.proof_of(row), row.resolved
    reference = proving.reference_of(row)

    def one_rank(rank: int) -> list[Any]:
        mesh = Mesh(layout)
        with Sums(mesh) as sums:
            observe(proof, layout, mesh)
        reports: list[Any] = [control.site in sums.sites]
        for how in HOW:
            with Spoiled(control.site, how, mesh):
                reports.append(observe(proof, layout, mesh))
        return reports

    made, *spoiled = zip(*run_ranks(row.ranks, one_rank, timeout=proving.TIMEOUT_S), strict=True)
    verdicts: dict[Spoil, Verdict] = {
        how: compare(proof.spec, layout, reference, reports) for how, reports in zip(HOW, spoiled, strict=True)
    }
    return Spoiling(any(made), verdicts)


def beyond(relative: Relative, tolerance: float) -> float:
    """By how many times the worst error is over the tolerance."""
    return max(relative) / tolerance
