"""One search: every layout enumerated, those that cannot run or fit dropped, the rest priced.

Candidates are pruned by rules, by memory, and by a lower bound on the step time that cannot remove an optimum; what is
left is priced by the same kernel that `estimate` uses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fivefold.estimate import Kernel, Problem
from fivefold.estimate.estimate import rule_context
from fivefold.layout.columns import Columns
from fivefold.layout.rules import valid_mask
from fivefold.search.front import Front, outermost
from fivefold.search.leaders import Leaders
from fivefold.search.prune import in_chunks, reserved_bytes
from fivefold.search.space import LISTED, MOST_ENUMERATED, Space

# Layouts priced at least, in order of their bounds, so that the Pareto front sees more than the very fastest.
_PRICED_AT_LEAST = 20_000
_CHUNK = 8192
_FRONT_CHUNK = 256


@dataclass(slots=True)
class Found:
    """The raw outcome of one search.

    candidates: all that divides; searched: their number, with those that were set aside in groups; columns: the valid
    ones. rows, seconds, reserved: the fitting ones that were priced, fastest first, as positions in columns, step
    seconds and device bytes. bounded_rows: fitting, but excluded by their bound. unfit_rows, unfit_reserved: the ones
    that need more memory than there is. fitting: how many fit.
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


def search(
    problem: Problem,
    runtime: str,
    pins: dict[str, tuple[Any, ...]],
    wanted: int = LISTED,
    most: int = MOST_ENUMERATED,
) -> Found:
    """Enumerate, prune and price; see Found, and Space for `wanted` and `most`."""
    space = Space(problem, pins, runtime, wanted, most)
    candidates = space.columns()
    valid = valid_mask(candidates, rule_context(problem.model, problem.cluster, problem.work, runtime))
    columns = candidates.take(np.flatnonzero(valid))
    searched = len(candidates) + space.set_aside
    if not len(columns):
        empty, none = np.zeros(0), np.zeros(0, dtype=np.int64)
        return Found(
            problem=problem, candidates=candidates, searched=searched, columns=columns, rows=none, seconds=empty,
            reserved=empty, bounded_rows=none, unfit_rows=none, unfit_reserved=empty, fitting=0,
        )  # fmt: skip
    kernel = Kernel(problem, columns)
    everyone = np.arange(len(columns))
    reserved = in_chunks(kernel, reserved_bytes)
    fits = kernel.fits(everyone, reserved)
    fitting, unfit = everyone[fits], everyone[~fits]
    rows, seconds, weights, bounded = _Pricing(kernel, fitting, reserved[fitting]).run(wanted)
    return Found(
        problem=problem, candidates=candidates, searched=searched, columns=columns, rows=rows, seconds=seconds,
        reserved=weights, bounded_rows=bounded, unfit_rows=unfit, unfit_reserved=reserved[unfit], fitting=len(fitting),
    )  # fmt: skip


class _Pricing:
    """The fitting layouts of one search, of which no more are priced than can matter.

    fitting: [n] positions in the kernel's columns; reserved, bound, seconds: [n] device bytes, least seconds of a step,
    and seconds, NaN until priced.
    """

    def __init__(self, kernel: Kernel, fitting: np.ndarray, reserved: np.ndarray) -> None:
        self._kernel, self._fitting, self._reserved = kernel, fitting, reserved
        self._bound = kernel.lower_bound(fitting)
        self._seconds = np.full(len(fitting), np.nan)

    def run(self, wanted: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """(rows fastest first, their seconds and reserved bytes, rows that their bound excluded)."""
        order = np.argsort(self._bound, kind="stable")
        done = self._until_none_can_win(order)
        self._front_and_leaders(order[:done], order[done:], wanted)
        priced = np.flatnonzero(~np.isnan(self._seconds))
        seconds, reserved = self._seconds[priced], self._reserved[priced]
        # Times that differ by rounding alone are equal, and the lighter layout comes first.
        rounded = np.round(seconds / seconds.min(initial=np.inf), 12)
        fastest = np.lexsort((reserved, rounded))
        bounded = self._fitting[np.isnan(self._seconds)]
        return self._fitting[priced[fastest]], seconds[fastest], reserved[fastest], bounded

    def _until_none_can_win(self, order: np.ndarray) -> int:
        """Price in the order of the bounds until the next one lies beyond the best time and all that could tie with it;
        returns how many that takes."""
        tie = 1 + self._kernel.problem.runtime.tie_spread
        done, best = 0, np.inf
        while done < len(order):
            take = order[done : done + (_PRICED_AT_LEAST if done == 0 else _CHUNK)]
            if done and self._bound[take[0]] > best * tie:
                break
            best = min(best, float(self._price(take).min()))
            done += len(take)
        return done

    def _front_and_leaders(self, take: np.ndarray, left: np.ndarray, wanted: int) -> None:
        """Of what is `left`, price all that could lie on the front of memory and time, or be among the fastest or the
        lightest `wanted` sets of degrees. take: what was priced last."""
        front, leaders = Front(), Leaders(self._kernel.columns, self._fitting, wanted)
        leaders.add(leaders.group, np.inf, self._reserved)
        while len(take):
            front.add(self._seconds[take], self._reserved[take])
            leaders.add(leaders.group[take], self._seconds[take], self._reserved[take])
            leading = leaders.may_lead(self._bound[left], self._reserved[left], leaders.group[left])
            keep = leading | ~front.beats(self._bound[left], self._reserved[left])
            left, leading = left[keep], leading[keep]
            light = outermost(self._bound[left], self._reserved[left], _FRONT_CHUNK)
            take = left[np.union1d(light, np.flatnonzero(leading)[:_FRONT_CHUNK])]
            self._price(take)
            left = left[np.isnan(self._seconds[left])]

    def _price(self, take: np.ndarray) -> np.ndarray:
        self._seconds[take] = self._kernel.step_seconds(self._fitting[take])
        return self._seconds[take]
