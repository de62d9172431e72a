"""Layouts that nobody chose: drawn at random, legal by the rules, and equal to one process all the same."""

from __future__ import annotations

from typing import Any

import proving
import pytest
from controls import CONTROLLED
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from matrix import CHUNKS, MODELS, NO_OVERLAP, RECOMPUTE, Row, row

from fivefold.errors import FivefoldError
from fivefold.layout import CP_KINDS, SCHEDULES, Overlap, Recompute
from fivefold.train.refuse import refuse


def degrees(most: int) -> list[tuple[int, int, int, int]]:
    """All (tp, cp, pp, dp) of at most so many ranks, the ones with more axes last."""
    sizes = range(1, most + 1)
    found = [
        (tp, cp, pp, dp) for tp in sizes for cp in sizes for pp in sizes for dp in sizes if tp * cp * pp * dp <= most
    ]
    return sorted(found, key=lambda four: (sum(n > 1 for n in four), four))


@st.composite
def legal_rows(draw: st.DrawFn, most: int) -> Row:
    """Of at most so many ranks. What the rules refuse is thrown away, after choices that mostly obey them."""
    tp, cp, pp, dp = draw(st.sampled_from(degrees(most)))
    options: dict[str, Any] = {"model": draw(st.sampled_from(list(MODELS))), "dp": dp}
    options |= {"tp": tp, "cp": cp, "pp": pp, "zero": draw(st.integers(0, 3))}
    if tp > 1:
        options["sequence_parallel"] = draw(st.booleans())
    if cp > 1:
        options["cp_kind"] = draw(st.sampled_from(CP_KINDS))
    if dp * cp > 1 and options["zero"]:
        options["dp_replicate"] = draw(st.sampled_from([n for n in range(1, dp * cp + 1) if dp * cp % n == 0]))
    if pp > 1:
        options |= draw(_pipeline(pp))
    options.setdefault("layers", pp * options.get("vpp", 1) + draw(st.integers(0, 3)))
    options["recompute"] = draw(st.sampled_from([Recompute(), Recompute(), *RECOMPUTE]))
    options["overlap"] = draw(st.sampled_from([Overlap(), Overlap(), *NO_OVERLAP]))
    options["micro_batch"] = draw(st.integers(1, 3))
    options["masks"] = draw(st.sampled_from(["uneven", "uneven", "full"]))
    options["dropout"] = draw(st.sampled_from([0.0, 0.0, 0.3]))
    options.setdefault("micro_batches", draw(st.integers(1, 4)))
    drawn = row("random", **options)
    assume(drawn.global_batch >= 3)  # fewer sequences may have no valid token at all
    try:
        refuse(drawn.job)
    except FivefoldError:
        assume(False)
    return drawn


@st.composite
def _pipeline(draw: st.DrawFn, pp: int) -> dict[str, Any]:
    """Schedule, chunks per rank, number of micro-batches, and for some uneven stages."""
    kind = draw(st.sampled_from(SCHEDULES))
    chunks = draw(st.integers(2, 3)) if kind == "interleaved" else CHUNKS.get(kind, 1)
    count = draw(st.integers(1, 2 * pp + 2))
    count = {"interleaved": pp * draw(st.integers(1, 2)), "dualpipev": 2 * pp + count % 3}.get(kind, count)
    options: dict[str, Any] = {"schedule": kind, "vpp": chunks, "micro_batches": count}
    uneven = draw(st.sampled_from(["", "", "ends", "account_for_embedding", "account_for_loss"]))
    if uneven == "ends" and chunks == 1:
        first, last = draw(st.integers(1, 3)), draw(st.integers(1, 3))
        middle = draw(st.integers(1, 2)) * (pp - 2)
        options |= {"first_stage_layers": first, "last_stage_layers": last, "layers": first + middle + last}
    elif uneven.startswith("account"):
        options[uneven] = True
    return options


def check(drawn: Row) -> None:
    verdict, sites, _ = proving.prove(drawn)
    assert verdict.passed, verdict.failures()
    assert sites <= CONTROLLED, sites - CONTROLLED


QUICK = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)


@given(drawn=legal_rows(4))
@QUICK
def test_a_random_layout_equals_one_process(drawn: Row) -> None:
    check(drawn)


@pytest.mark.exhaustive
@given(drawn=legal_rows(8))
@settings(QUICK, max_examples=200)
def test_many_random_layouts_equal_one_process(drawn: Row) -> None:
    check(drawn)
