"""The answer of a search: which layouts to show, the front of memory and time, and the reasons."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from fivefold.errors import FivefoldError
from fivefold.estimate import Estimate, Kernel, Problem, estimate
from fivefold.estimate.estimate import inputs_of
from fivefold.layout import dp_headroom, unusual
from fivefold.layout.columns import Columns
from fivefold.search.advice import changes_that_fit, missing_memory, why_nothing_is_valid
from fivefold.search.explain import reasons
from fivefold.search.found import Found, search
from fivefold.search.leaders import DEGREES
from fivefold.search.limits import memory_limit
from fivefold.search.result import Limit, Objective, Plan, Why, budget_of
from fivefold.search.words import layout_words

_PARETO_SHOWN = 8
_SAME = 1e-12  # seconds that differ by less are the same, summed in another order
_UNFIT_TRIED, _UNFIT_CHUNK = 16_384, 2048


def answer(
    found: Found,
    runtime: str,
    top: int,
    objective: Objective,
    pins: dict[str, tuple[Any, ...]],
    explain: bool,
    advise: bool,
) -> Plan:
    """The Plan of a search, without the seconds that it took.

    top: how many layouts with other degrees. pins: as checked. explain: also the reasons for the first. advise: also
    what would help where nothing fits, for which changed problems are searched.
    """
    problem = found.problem
    rows = _distinct_degrees(found, _ranked(found, objective), top)
    chosen = [_estimate(found, runtime, row) for row in rows]
    plans, pareto = _with_pareto(found, runtime, chosen, [at for at, row in enumerate(rows) if not _beaten(found, row)])
    nearest, advice = (None, ()) if plans or not advise else _nothing_fits(found, runtime, pins)
    why = _why(found, runtime, rows[0], plans) if plans and explain else None
    return Plan(
        searched=found.searched,
        valid=len(found.columns),
        fitting=found.fitting,
        priced=len(found.rows),
        bounded=len(found.bounded_rows),
        seconds_used=0.0,
        objective=objective,
        gpus=problem.cluster.gpus,
        plans=tuple(plans),
        fastest=_fastest(plans),
        pareto=pareto,
        why=why,
        budget=budget_of(problem.work, plans[0]) if plans else None,
        nearest=nearest,
        advice=advice,
        notes=_batch_notes(problem, plans),
        inputs={
            **inputs_of(problem, runtime),
            "pins": {name: list(value) for name, value in pins.items()},
            "top": top,
            "objective": objective,
        },
    )


def _ranked(found: Found, objective: Objective) -> np.ndarray:
    """Positions in `found.rows` by the objective, the choice first."""
    if not len(found.rows):
        return np.zeros(0, dtype=np.int64)
    if objective == "memory":
        return np.lexsort((found.seconds, found.reserved))
    by_time = np.arange(len(found.rows))
    tied = np.flatnonzero(found.seconds <= found.seconds[0] * (1 + found.problem.runtime.tie_spread))
    rows = found.rows[tied]
    # Fewest axes; of those the fewest chunks, whose transfers the model takes to be free; then the fastest.
    simplest = tied[np.lexsort((found.seconds[tied], found.columns.vpp[rows], active_axes(found.columns, rows)))[0]]
    return np.concatenate([[simplest], by_time[by_time != simplest]])


def active_axes(columns: Columns, rows: np.ndarray) -> np.ndarray:
    """How many axes a layout uses beside plain data parallelism, [n]. TP without sequence parallelism counts as one
    more: it is the unusual choice of the two."""
    c = columns
    axes = (c.tp, c.cp, c.pp, c.ep, c.etp, np.where(c.zero > 0, c.dp_replicate, 1), c.vpp)
    count = sum((axis[rows] > 1).astype(np.int64) for axis in axes)
    return count + (c.recompute_kind[rows] > 0) + ((c.tp[rows] > 1) & ~c.sp[rows])


def _distinct_degrees(found: Found, ranked: np.ndarray, top: int) -> list[int]:
    """The first `top` rows that differ in their degrees; options such as recomputation alone do not make another."""
    c = found.columns
    seen: set[tuple[int, ...]] = set()
    out: list[int] = []
    for position in ranked:
        row = int(found.rows[position])
        degrees = tuple(int(getattr(c, name)[row]) for name in DEGREES)
        if degrees not in seen:
            seen.add(degrees)
            out.append(row)
        if len(out) == top:
            break
    return out


def _pareto_rows(found: Found) -> list[int]:
    """Rows of the priced layouts that none beats in both memory and time, thinned to a few, fastest first."""
    best, out = np.inf, []
    for position in range(len(found.rows)):
        if int(found.reserved[position]) < best:
            best = int(found.reserved[position])
            out.append(int(found.rows[position]))
    if len(out) <= _PARETO_SHOWN:
        return out
    picks = np.unique(np.linspace(0, len(out) - 1, _PARETO_SHOWN).astype(int))
    return [out[pick] for pick in picks]


def _beaten(found: Found, row: int) -> bool:
    """Whether any layout is better than this one in time or memory, and no worse in the other."""
    at = np.flatnonzero(found.rows == row)[0]
    seconds, reserved = found.seconds[at], found.reserved[at]
    faster, no_slower = (found.seconds < seconds * (1 - _SAME), found.seconds <= seconds * (1 + _SAME))
    return bool(((faster & (found.reserved <= reserved)) | (no_slower & (found.reserved < reserved))).any())


def _with_pareto(
    found: Found, runtime: str, chosen: list[Estimate], unbeaten: list[int]
) -> tuple[list[Estimate], tuple[int, ...]]:
    """The plans with some of the Pareto front appended, and the indices of all that are on it. unbeaten: those of the
    chosen."""
    plans = list(chosen)
    index = set(unbeaten)
    for row in _pareto_rows(found) if chosen else []:
        candidate = _estimate(found, runtime, row)
        at = next((i for i, known in enumerate(plans) if known.layout == candidate.layout), None)
        if at is None:
            plans.append(candidate)
            at = len(plans) - 1
        index.add(at)
    return plans, tuple(sorted(index))


def _why(found: Found, runtime: str, row: int, plans: list[Estimate]) -> Why:
    problem, best = found.problem, found.columns.row(row)
    why = reasons(problem, runtime, best, plans[0], _among_ties(found, plans[0]))
    more = _more_memory(found, plans[0])
    return why if more is None else msgspec.structs.replace(why, limits=(*why.limits, more))


def _among_ties(found: Found, first: Estimate) -> str:
    """How the choice was made among plans that cannot be told apart."""
    spread = found.problem.runtime.tie_spread
    ties = int((found.seconds <= found.seconds[0] * (1 + spread)).sum())
    if first.step is None or ties <= 1:
        return "No other layout comes within the tie interval."
    behind = first.step.seconds.value / float(found.seconds[0]) - 1
    choice = (
        "It is also the fastest." if behind < 1e-12 else f"The fastest of them is {behind:.2%} faster with more axes."
    )
    return f"{ties} layouts lie within {spread:.0%} of the fastest; the one with fewest active axes was taken. {choice}"


def _more_memory(found: Found, first: Estimate) -> Limit | None:
    """The least memory that would make a difference: of the layouts that do not fit, the smallest faster one."""
    if first.step is None:
        return None
    target = first.step.seconds.value * (1 - found.problem.runtime.tie_spread)
    lightest = np.argsort(found.unfit_reserved, kind="stable")
    # What the host alone has no room for is not helped by memory of the GPU.
    lightest = lightest[found.unfit_reserved[lightest] > found.problem.cluster.gpu.memory_bytes][:_UNFIT_TRIED]
    for at in range(0, len(lightest), _UNFIT_CHUNK):
        chunk = lightest[at : at + _UNFIT_CHUNK]
        kernel = Kernel(found.problem, found.columns.take(found.unfit_rows[chunk]))
        hopeful = np.flatnonzero(kernel.lower_bound(np.arange(len(chunk))) < target)
        seconds = kernel.step_seconds(hopeful) if len(hopeful) else np.zeros(0)
        faster = np.flatnonzero(seconds < target)
        if len(faster):
            position = chunk[hopeful[faster[0]]]
            words = layout_words(found.columns.row(int(found.unfit_rows[position])))
            reserved = float(found.unfit_reserved[position])
            return memory_limit(float(seconds[faster[0]]), reserved, first.step.seconds.value, words)
    return None


def _nothing_fits(
    found: Found, runtime: str, pins: dict[str, tuple[Any, ...]]
) -> tuple[Estimate | None, tuple[str, ...]]:
    """The layout that misses by least, and what would help."""
    problem = found.problem
    if not len(found.columns):
        return None, why_nothing_is_valid(problem, runtime, found.candidates)
    least = int(found.unfit_reserved.argmin())
    nearest = _estimate(found, runtime, int(found.unfit_rows[least]))

    def fits(changed: Problem) -> bool:
        try:
            return bool(search(changed, runtime, pins, most=0).fitting)
        except FivefoldError:
            return False

    changes = changes_that_fit(problem, fits, float(found.unfit_reserved[least]))
    return nearest, (missing_memory(problem, nearest), *changes)


def _estimate(found: Found, runtime: str, row: int) -> Estimate:
    problem = found.problem
    return estimate(problem.model, problem.cluster, problem.work, found.columns.row(row), runtime)


def _fastest(plans: list[Estimate]) -> int | None:
    times = [each.step.seconds.value if each.step else np.inf for each in plans]
    return int(np.argmin(times)) if times else None


def _batch_notes(problem: Problem, plans: list[Estimate]) -> tuple[str, ...]:
    """What is unusual about the batch, and how much data parallelism it still allows."""
    notes = list(unusual(problem.work, problem.model))
    if plans:
        layout = plans[0].layout
        headroom = dp_headroom(problem.work.global_batch, layout.micro_batch, layout.dp)
        notes.append(
            f"DP headroom: gbs / (mbs x dp) = {problem.work.global_batch} / ({layout.micro_batch} x {layout.dp}) = "
            f"{headroom:g}; "
            + (
                f"data parallelism can grow {headroom:g} times before the batch ends it."
                if headroom > 1
                else "data parallelism cannot grow: every replica has one micro-batch, and the batch has no more."
            )
        )
    return tuple(notes)
