"""`plan`: search the whole space of layouts for one model, cluster and workload.

Candidates are pruned by rules, by memory, and by a lower bound on the step time that cannot remove an optimum; what is
left is priced by the same kernel that `estimate` uses.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import Any

import msgspec
import numpy as np

from fivefold.cluster import Cluster
from fivefold.cluster.calibration import Calibration
from fivefold.errors import FivefoldError
from fivefold.estimate import Estimate, Kernel, Problem, estimate
from fivefold.estimate.calibrated import with_calibration
from fivefold.estimate.estimate import check_inputs, inputs_of, rule_context
from fivefold.estimate.host import check_host
from fivefold.layout.columns import Columns
from fivefold.layout.rules import valid_mask
from fivefold.layout.workload import Workload
from fivefold.model.spec import ModelSpec
from fivefold.runtime import load_runtime
from fivefold.search.advice import (
    batch_notes,
    changes_that_fit,
    missing_memory,
    why_nothing_is_valid,
    with_gpus,
)
from fivefold.search.explain import memory_limit, reasons
from fivefold.search.pins import checked_pins
from fivefold.search.result import Limit, Objective, Plan, Why, budget_of
from fivefold.search.space import MOST_ENUMERATED, Space
from fivefold.search.words import layout_words

OBJECTIVES: tuple[Objective, ...] = ("tokens_per_s", "gpus", "memory", "time", "cost")
# Layouts priced at least, in order of their bounds, so that the Pareto front sees more than the very fastest.
_PRICED_AT_LEAST = 20_000
_CHUNK = 8192
_FRONT_CHUNK = 256
_MEMORY_CHUNK = 16_384  # layouts whose memory is computed at once: what stays in the processor's cache
_PARETO_SHOWN = 8
_UNFIT_TRIED, _UNFIT_CHUNK = 16_384, 2048


@dataclass(slots=True)
class Found:
    """The raw outcome of one search.

    candidates: all that divides; searched: their number, with those that were set aside in groups; columns: the valid
    ones. rows, seconds, reserved: the fitting ones that were priced, fastest first, as positions in columns, step
    seconds and device bytes. bounded_rows: fitting, but excluded by their bound. unfit_rows, unfit_reserved: the ones
    that need more memory than there is.
    """

    problem: Problem
    candidates: Columns
    searched: int
    columns: Columns
    rows: np.ndarray
    seconds: np.ndarray
    reserved: np.ndarray
    bounded_rows: np.ndarray
    unfit_rows: np.ndarray
    unfit_reserved: np.ndarray
    fitting: int


def plan(
    model: ModelSpec,
    cluster: Cluster,
    work: Workload,
    runtime: str = "megatron",
    top: int = 5,
    pins: dict[str, Any] | None = None,
    objective: Objective = "tokens_per_s",
    explain: bool = True,
    calibration: Calibration | None = None,
) -> Plan:
    """The best layouts and the reasons for the first.

    pins: option name to one value or several, e.g. {"tp": [4, 8], "zero": 1}. objective: "tokens_per_s" (default),
    "memory" (least peak), "gpus" (fewest GPUs that fit, then fastest), "time" or "cost" of work.tokens. calibration:
    factors fitted to the user's own runs; None: the cluster's, if it has one.
    A question without an answer gives a Plan without plans, whose `advice` says what is missing. Raises FivefoldError
    for bad input.
    """
    start = perf_counter()
    check_inputs(model, cluster, work)
    _check(objective, top, work)
    cluster = with_calibration(cluster, calibration)
    problem = Problem(model, cluster, work, load_runtime(runtime))
    check_host(problem)
    checked = checked_pins(pins)
    if objective == "gpus":
        problem = _fewest_gpus(problem, runtime, checked)
    found = search(problem, runtime, checked)
    return _answer(found, runtime, top, objective, checked, explain, start)


@dataclass(slots=True)
class Searched:
    """A search, which took `seconds`, and can answer more than once: shortly, and then with reasons."""

    found: Found
    runtime: str
    pins: dict[str, tuple[Any, ...]]
    seconds: float

    def plan(self, top: int, *, explain: bool) -> Plan:
        """The plan for most tokens per second."""
        start = perf_counter() - self.seconds
        return _answer(self.found, self.runtime, top, "tokens_per_s", self.pins, explain, start)


def searched(
    model: ModelSpec, cluster: Cluster, work: Workload, runtime: str, pins: dict[str, Any] | None = None
) -> Searched:
    """The search of `plan` without its answer yet. Raises FivefoldError as plan does."""
    start = perf_counter()
    check_inputs(model, cluster, work)
    problem = Problem(model, cluster, work, load_runtime(runtime))
    check_host(problem)
    checked = checked_pins(pins)
    return Searched(search(problem, runtime, checked), runtime, checked, perf_counter() - start)


def search(problem: Problem, runtime: str, pins: dict[str, tuple[Any, ...]], most: int = MOST_ENUMERATED) -> Found:
    """Enumerate, prune and price; see Found, and Space for `most`."""
    space = Space(problem, pins, runtime, most)
    candidates = space.columns()
    valid = valid_mask(candidates, rule_context(problem.model, problem.cluster, problem.work, runtime))
    columns = candidates.take(np.flatnonzero(valid))
    searched = len(candidates) + space.set_aside
    if not len(columns):
        empty, none = np.zeros(0), np.zeros(0, dtype=np.int64)
        return Found(problem, candidates, searched, columns, none, empty, empty, none, none, empty, 0)
    kernel = Kernel(problem, columns)
    everyone = np.arange(len(columns))
    parts = [everyone[at : at + _MEMORY_CHUNK] for at in range(0, len(everyone), _MEMORY_CHUNK)]
    reserved = np.concatenate([kernel.reserved(part, kernel.peak_memory(part)) for part in parts])
    fits = kernel.fits(everyone, reserved)
    fitting, unfit = everyone[fits], everyone[~fits]
    rows, seconds, weights, bounded = _price(kernel, fitting, reserved[fitting])
    return Found(
        problem, candidates, searched, columns, rows, seconds, weights, bounded, unfit, reserved[unfit], len(fitting)
    )


def _price(
    kernel: Kernel, fitting: np.ndarray, reserved: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(rows fastest first, their seconds and reserved bytes, rows that their bound excluded).

    Layouts are priced in the order of their lower bounds, until the next bound lies beyond the best time and all that
    could tie with it; then those that could still lie on the front of memory and time.
    """
    bound = kernel.lower_bound(fitting)
    order = np.argsort(bound, kind="stable")
    tie = 1 + kernel.problem.runtime.tie_spread
    seconds = np.full(len(fitting), np.nan)
    done, best = 0, np.inf
    while done < len(order):
        take = order[done : done + (_PRICED_AT_LEAST if done == 0 else _CHUNK)]
        if done and bound[take[0]] > best * tie:
            break
        seconds[take] = kernel.step_seconds(fitting[take])
        best = min(best, float(seconds[take].min()))
        done += len(take)
    while len(take := _maybe_on_front(bound, seconds, reserved)):
        seconds[take] = kernel.step_seconds(fitting[take])
    priced = np.flatnonzero(~np.isnan(seconds))
    # Times that differ by rounding alone are equal, and the lighter layout comes first.
    rounded = np.round(seconds[priced] / best, 12)
    fastest = priced[np.lexsort((reserved[priced], rounded))]
    return fitting[fastest], seconds[fastest], reserved[fastest], fitting[np.isnan(seconds)]


def _maybe_on_front(bound: np.ndarray, seconds: np.ndarray, reserved: np.ndarray) -> np.ndarray:
    """Up to a chunk of the positions without a time that no priced layout beats for certain, lightest first.

    bound, reserved: of every fitting layout. seconds: nan where it is not priced.
    """
    left = np.flatnonzero(np.isnan(seconds))
    priced = np.flatnonzero(~np.isnan(seconds))
    if not len(left) or not len(priced):
        return left
    by_time = priced[np.argsort(seconds[priced], kind="stable")]
    lightest = np.minimum.accumulate(reserved[by_time])
    faster = np.searchsorted(seconds[by_time], bound[left], side="right")
    beaten = (faster > 0) & (lightest[np.maximum(faster - 1, 0)] <= reserved[left])
    left = left[~beaten]
    return left[np.lexsort((bound[left], reserved[left]))][:_FRONT_CHUNK]


def _fewest_gpus(problem: Problem, runtime: str, pins: dict[str, tuple[Any, ...]]) -> Problem:
    """The same problem on the fewest GPUs, at most those given, on which some layout fits."""
    most = problem.cluster.gpus
    node = problem.cluster.gpus_per_node
    counts = [n for n in range(1, most + 1) if _usable(n, node, most)]
    for gpus in counts:
        smaller = with_gpus(problem, gpus)
        try:
            found = search(smaller, runtime, pins)
        except FivefoldError:
            continue
        if len(found.rows):
            return smaller
    return problem


def _usable(gpus: int, node: int, most: int) -> bool:
    """Part of one node in powers of two, then whole nodes in steps that a batch can divide."""
    if gpus < node:
        return gpus & (gpus - 1) == 0
    nodes, rest = divmod(gpus, node)
    return rest == 0 and (nodes & (nodes - 1) == 0 or (nodes % 3 == 0 and (nodes // 3) & (nodes // 3 - 1) == 0))


# ---------------------------------------------------------------- the answer


def _answer(
    found: Found,
    runtime: str,
    top: int,
    objective: Objective,
    pins: dict[str, tuple[Any, ...]],
    explain: bool,
    start: float,
) -> Plan:
    problem = found.problem
    rows = _distinct_degrees(found, _ranked(found, objective), top)
    chosen = [_estimate(found, runtime, row) for row in rows]
    plans, pareto = _with_pareto(found, runtime, chosen)
    nearest, advice = (None, ()) if plans else _nothing_fits(found, runtime, pins)
    why = _why(found, runtime, rows[0], plans) if plans and explain else None
    return Plan(
        searched=found.searched,
        valid=len(found.columns),
        fitting=found.fitting,
        priced=len(found.rows),
        bounded=len(found.bounded_rows),
        seconds_used=perf_counter() - start,
        objective=objective,
        gpus=problem.cluster.gpus,
        plans=tuple(plans),
        fastest=_fastest(plans),
        pareto=pareto,
        why=why,
        budget=budget_of(problem.work, plans[0]) if plans else None,
        nearest=nearest,
        advice=advice,
        notes=batch_notes(problem, plans),
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
        degrees = tuple(int(column[row]) for column in (c.tp, c.cp, c.pp, c.ep, c.etp))
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


def _with_pareto(found: Found, runtime: str, chosen: list[Estimate]) -> tuple[list[Estimate], tuple[int, ...]]:
    """The plans with those of the Pareto front appended, and the front's indices."""
    plans = list(chosen)
    index: set[int] = set()
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
            return bool(search(changed, runtime, pins).fitting)
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


def _check(objective: str, top: int, work: Workload) -> None:
    if objective not in OBJECTIVES:
        raise FivefoldError(
            f"--objective {objective} is not known. Legal: {', '.join(OBJECTIVES)}.",
            code="unknown-objective",
            option="--objective",
            value=objective,
            legal=list(OBJECTIVES),
        )
    if not 1 <= top <= 100:
        raise FivefoldError(
            f"--top {top} is out of range: ask for 1 to 100 plans.",
            code="bad-top",
            option="--top",
            value=top,
            legal="1 to 100",
        )
    needs = {"time": ("tokens",), "cost": ("tokens", "price")}.get(objective, ())
    for name in needs:
        if getattr(work, name) is None:
            raise FivefoldError(
                f"--objective {objective} needs --{name}: the token budget"
                + (" and the price of one GPU for one hour." if objective == "cost" else "."),
                code="missing-option",
                option=f"--{name}",
            )
