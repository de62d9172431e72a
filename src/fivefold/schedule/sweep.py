"""Long pipelines from short ones, exactly: the driver behind the fast cost of every schedule.

A schedule's steady state repeats after a period of some micro-batches. One period maps the vector x of times at
which the ranks become free to the next one, x' = A(x), with A built from max and + only. So A is monotone, and adding
a constant to x adds it to A(x). Two facts follow, and nothing else is used:

* if A(x) <= x + s in every component, then n more periods take at most n*s more;
* if some component i always gains s or more per period (a rank that does s of work in each), then n more periods take
  at least x[i] + (what follows on i) + n*s.

Where the longest path already runs through such an i both bounds meet, and m micro-batches cost what n cost plus the
remaining periods times s. When they do not meet the sweep simply goes on, at the worst through all m.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self

import numpy as np

from fivefold.schedule.schedule import Floats

# Rounding of a few thousand additions stays under 1e-12; the promise to callers is 1e-9.
_TOLERANCE = 1e-11


class Sweep(ABC):
    """R pipelines swept together, level by level, one column each.

    period:   micro-batches after which the steady state repeats.
    slope:    [R] seconds of work per period of the busiest rank.
    critical: [S, R] state components on a rank whose work per period is `slope`.
    """

    period: int
    slope: Floats
    critical: np.ndarray

    @abstractmethod
    def state(self) -> Floats:
        """[S, R] all that the future depends on, a copy."""

    @abstractmethod
    def take(self, columns: np.ndarray, keep: np.ndarray | None = None) -> Self:
        """An independent copy of some columns; state outside the mask keep [S, R] becomes -inf ("never binds")."""

    @abstractmethod
    def advance(self, micro_batches: int) -> None:
        """Go on to where a pipeline of so many micro-batches stops being steady."""

    @abstractmethod
    def finish(self, micro_batches: int) -> Floats:
        """Go on to the end of so many micro-batches; [K, R] the times that matter there."""


def finish_exactly(sweep: Sweep, m: int, first: int) -> Floats:
    """[K, R] end times after m micro-batches; `first` is a length, in periods, whose last period is steady."""
    n = first * sweep.period
    rows = np.arange(len(sweep.slope))
    result: Floats | None = None
    # Below this the two extra drains cost about what they save.
    while m >= 3 * n:
        sweep.advance(n - sweep.period)
        before = sweep.state()
        sweep.advance(n)
        settled, end = _settle(sweep, sweep.state() - before, n, m)
        if result is None:
            result = np.empty((end.shape[0], len(rows)))
        result[:, rows[settled]] = end[:, settled]
        left = np.flatnonzero(~settled)
        if not len(left):
            return result
        rows = rows[left]
        sweep = sweep.take(left)
        n *= 2
    end = sweep.finish(m)
    if result is None:
        return end
    result[:, rows] = end
    return result


def _settle(sweep: Sweep, growth: Floats, n: int, m: int) -> tuple[np.ndarray, Floats]:
    """Which columns are proven linear from n micro-batches on, [R], and their end times at m, [K, R]."""
    columns = np.arange(len(sweep.slope))
    fastest = growth.max(axis=0)
    # Every component moved by the same amount: linear whatever the cause, be it work or transfers.
    uniform = growth.min(axis=0) >= fastest * (1 - _TOLERANCE)
    bounded = fastest <= sweep.slope * (1 + _TOLERANCE)
    slope = np.where(bounded, sweep.slope, fastest)
    candidates = uniform | bounded
    end = np.empty((1, len(columns))) if not candidates.any() else sweep.take(columns).finish(n)
    if not candidates.any():
        return candidates, end
    settled = uniform
    if not uniform[candidates].all():
        through_critical = sweep.take(columns, keep=sweep.critical).finish(n)
        settled = uniform | (bounded & (through_critical >= end * (1 - _TOLERANCE)).all(axis=0))
    return settled, end + (m - n) / sweep.period * slope
