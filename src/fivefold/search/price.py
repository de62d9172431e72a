"""Pricing a handful of layouts for an explanation: one kernel for all of them, rules first."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fivefold.estimate import Kernel, Problem
from fivefold.estimate.estimate import rule_context
from fivefold.layout.columns import Columns
from fivefold.layout.layout import Layout
from fivefold.layout.rules import valid_mask, violations


@dataclass(slots=True, frozen=True)
class Priced:
    """One layout's outcome. broken: message of the first rule it breaks; the numbers are then None.

    stage: pipeline rank with the largest peak. reserved_bytes: what the device needs.
    """

    layout: Layout
    broken: str | None
    seconds: float | None
    peak_bytes: int | None
    reserved_bytes: int | None
    stage: int | None
    fits: bool

    @property
    def usable(self) -> bool:
        return self.broken is None and self.fits


def price_all(problem: Problem, runtime: str, layouts: list[Layout]) -> list[Priced]:
    """Price `layouts` in their order."""
    if not layouts:
        return []
    context = rule_context(problem.model, problem.cluster, problem.work, runtime)
    columns = Columns.from_layouts(layouts, problem.cluster.gpus, problem.work)
    valid = valid_mask(columns, context)
    out: list[Priced | None] = [None] * len(layouts)
    for i in np.flatnonzero(~valid).tolist():
        out[i] = Priced(layouts[i], violations(layouts[i], context)[0].message, None, None, None, None, False)
    good = np.flatnonzero(valid)
    if len(good):
        kernel = Kernel(problem, columns.take(good))
        rows = np.arange(len(good))
        seconds = kernel.step_seconds(rows)
        peak = kernel.peak(rows)
        stage = kernel.table.rank[kernel.plan, peak.by_rank.argmax(axis=1)]
        room = kernel.fits(rows, peak.reserved)
        for at, i in enumerate(good.tolist()):
            needs = int(peak.allocated[at]), int(peak.reserved[at])
            out[i] = Priced(layouts[i], None, float(seconds[at]), *needs, int(stage[at]), bool(room[at]))
    return [each for each in out if each is not None]


def step_seconds(problem: Problem, layout: Layout) -> float:
    """Step seconds of one valid layout under a changed problem."""
    columns = Columns.from_layouts([layout], problem.cluster.gpus, problem.work)
    return float(Kernel(problem, columns).step_seconds(np.arange(1))[0])
