"""The fastest and the lightest sets of degrees: what a plan lists, so that the search must not lose them although
others beat them.

A layout that is slower and heavier than another is on no front; as the fastest with its degrees it is still one of the
answers, and as the lightest where memory is asked for. Layouts of the same degrees, which differ in options such as
recomputation, are one group here.
"""

from __future__ import annotations

import numpy as np

from fivefold.estimate.arrays import distinct
from fivefold.layout.columns import Columns

DEGREES = ("tp", "cp", "pp", "ep", "etp")
_SAME = 1 + 1e-12  # a step of nothing but its bound may be a little faster than it, summed in another order


class Leaders:
    """The groups of some layouts, and the least time and memory that are known in each.

    group: [n] of each of the layouts. wanted: how many groups are listed.
    """

    def __init__(self, columns: Columns, wanted: int) -> None:
        names, self.group = _groups(columns)
        self._number = {name: number for number, name in enumerate(names)}
        self._seconds, self._reserved = np.full(len(names), np.inf), np.full(len(names), np.inf)
        self._wanted = wanted

    def add(self, columns: Columns, seconds: np.ndarray, reserved: np.ndarray) -> None:
        """Layouts of the same groups have been priced."""
        if len(columns):
            names, group = _groups(columns)
            numbers = np.array([self._number[name] for name in names])[group]
            np.minimum.at(self._seconds, numbers, seconds)
            np.minimum.at(self._reserved, numbers, reserved)

    def may_lead(self, seconds: np.ndarray, reserved: np.ndarray, group: np.ndarray) -> np.ndarray:
        """[n] bool: whether a layout that takes at least `seconds` and `reserved` bytes can be the fastest or the
        lightest of its group, and that group one of those wanted."""
        return self._first(seconds, self._seconds, group) | self._first(reserved, self._reserved, group)

    def _first(self, bound: np.ndarray, best: np.ndarray, group: np.ndarray) -> np.ndarray:
        last = np.inf if len(best) < self._wanted else np.partition(best, self._wanted - 1)[self._wanted - 1]
        return bound <= _SAME * np.minimum(best, last)[group]


def _groups(columns: Columns) -> tuple[list[tuple[int, ...]], np.ndarray]:
    """(the degrees of each group, the group of each layout)."""
    degrees = [getattr(columns, name) for name in DEGREES]
    first, group = distinct(degrees)
    return [*zip(*(values[first].tolist() for values in degrees), strict=True)], group


__all__ = ["DEGREES", "Leaders"]
