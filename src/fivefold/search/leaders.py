"""The fastest sets of degrees: what a plan lists, so that the search must not lose them although others beat them.

A layout that is slower and heavier than another is on no front; as the fastest with its degrees it is still one of the
answers. Layouts of the same degrees, which differ in options such as recomputation, are one group here.
"""

from __future__ import annotations

import numpy as np

from fivefold.estimate.arrays import distinct
from fivefold.layout.columns import Columns

DEGREES = ("tp", "cp", "pp", "ep", "etp")


class Leaders:
    """The groups of some layouts and the fastest time that is known in each.

    group: [n] of each of the layouts. wanted: how many groups are listed.
    """

    def __init__(self, columns: Columns, wanted: int) -> None:
        names, self.group = _groups(columns)
        self._number = {name: number for number, name in enumerate(names)}
        self._best = np.full(len(names), np.inf)
        self._wanted = wanted

    def add(self, columns: Columns, seconds: np.ndarray) -> None:
        """Layouts of the same groups have been priced."""
        if len(columns):
            names, group = _groups(columns)
            numbers = np.array([self._number[name] for name in names])
            np.minimum.at(self._best, numbers[group], seconds)

    def may_lead(self, bound: np.ndarray, group: np.ndarray) -> np.ndarray:
        """[n] bool: whether a layout that takes at least `bound` seconds can be the fastest of its group, and that
        group one of those wanted."""
        if len(self._best) < self._wanted:
            return bound < self._best[group]
        slowest = np.partition(self._best, self._wanted - 1)[self._wanted - 1]
        return (bound < self._best[group]) & (bound <= slowest)


def _groups(columns: Columns) -> tuple[list[tuple[int, ...]], np.ndarray]:
    """(the degrees of each group, the group of each layout)."""
    degrees = [getattr(columns, name) for name in DEGREES]
    first, group = distinct(degrees)
    return [*zip(*(values[first].tolist() for values in degrees), strict=True)], group


__all__ = ["DEGREES", "Leaders"]
