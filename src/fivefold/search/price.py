"""What a handful of layouts cost, for explanations and advice: one kernel for all of them, rules first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeGuard

import numpy as np

from fivefold.estimate import Kernel, Problem
from fivefold.estimate.estimate import rule_context
from fivefold.layout.columns import Columns
from fivefold.layout.layout import Layout
from fivefold.layout.rules import valid_mask, violations


@dataclass(slots=True, frozen=True)
class Priced:
    """A layout that would start. seconds: of a step. reserved_bytes: what the fullest device needs. stage: the pipeline
    rank of that device. fits: whether device and host have so much."""

    layout: Layout
    seconds: float
    reserved_bytes: int
    stage: int
    fits: bool


@dataclass(slots=True, frozen=True)
class Refused:
    """A layout that would not start. message: of the first rule that it breaks."""

    layout: Layout
    message: str


Outcome = Priced | Refused


def usable(outcome: Outcome) -> TypeGuard[Priced]:
    """Whether the layout starts and fits."""
    return isinstance(outcome, Priced) and outcome.fits


def price_all(problem: Problem, runtime: str, layouts: list[Layout]) -> list[Outcome]:
    """The outcome of each layout, in their order."""
    if not layouts:
        return []
    context = rule_context(problem.model, problem.cluster, problem.work, runtime)
    columns = Columns.from_layouts(layouts, problem.cluster.gpus, problem.work)
    valid = np.flatnonzero(valid_mask(columns, context))
    priced = dict(zip(valid.tolist(), _priced(problem, columns.take(valid), [layouts[i] for i in valid]), strict=True))
    return [
        priced[i] if i in priced else Refused(layout, violations(layout, context)[0].message)
        for i, layout in enumerate(layouts)
    ]


def _priced(problem: Problem, columns: Columns, layouts: list[Layout]) -> list[Priced]:
    if not layouts:
        return []
    kernel, rows = Kernel(problem, columns), np.arange(len(layouts))
    seconds, peak = kernel.step_seconds(rows), kernel.peak(rows)
    stage = kernel.table.rank[kernel.plan, peak.by_rank.argmax(axis=1)]
    fits = kernel.fits(rows, peak.reserved)
    return [
        Priced(layout, float(seconds[at]), int(peak.reserved[at]), int(stage[at]), bool(fits[at]))
        for at, layout in enumerate(layouts)
    ]


def step_seconds(problem: Problem, layout: Layout) -> float:
    """Step seconds of one valid layout under a changed problem."""
    columns = Columns.from_layouts([layout], problem.cluster.gpus, problem.work)
    return float(Kernel(problem, columns).step_seconds(np.arange(1))[0])
