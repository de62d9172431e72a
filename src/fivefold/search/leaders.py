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
_SAME = 1 + 1e-12  # a step may come out below its own bound by the rounding of sums in another order


class Leaders:
    """Layouts in groups of equal degrees, and the least time and memory known so far in each group.

    group: [n] the number of the group of each of the `rows` of the columns. wanted: how many groups a plan lists.
    """

    def __init__(self, columns: Columns, rows: np.ndarray, wanted: int) -> None:
        names, self.group = _groups(columns, rows)
        self._number = {name: number for number, name in enumerate(names)}
        self._seconds, self._reserved = np.full(len(names), np.inf), np.full(len(names), np.inf)
        self._wanted = wanted

    def groups_of(self, columns: Columns) -> np.ndarray:
        """The groups of other layouts with the same degrees, [n]."""
        names, group = _groups(columns, np.arange(len(columns)))
        return np.array([self._number[name] for name in names], dtype=np.int64)[group]

    def add(self, group: np.ndarray, seconds: np.ndarray | float, reserved: np.ndarray) -> None:
        """Take in layouts of these groups: [n] seconds of a step and reserved bytes."""
        np.minimum.at(self._seconds, group, seconds)
        np.minimum.at(self._reserved, group, reserved)

    def may_lead(self, seconds: np.ndarray, reserved: np.ndarray, group: np.ndarray) -> np.ndarray:
        """[n] bool: whether a layout that takes at least `seconds` and `reserved` bytes can be the fastest or the
        lightest of its group, and that group one of those wanted."""
        return self._first(seconds, self._seconds, group) | self._first(reserved, self._reserved, group)

    def _first(self, bound: np.ndarray, best: np.ndarray, group: np.ndarray) -> np.ndarray:
        last = np.inf if len(best) < self._wanted else np.partition(best, self._wanted - 1)[self._wanted - 1]
        return bound <= _SAME * np.minimum(best, last)[group]


def _groups(columns: Columns, rows: np.ndarray) -> tuple[list[tuple[int, ...]], np.ndarray]:
    """(the degrees of each group, the group of each of the rows)."""
    if not len(rows):
        return [], np.zeros(0, dtype=np.int64)
    degrees = [getattr(columns, name)[rows] for name in DEGREES]
    first, group = distinct(degrees)
    return [*zip(*(values[first].tolist() for values in degrees), strict=True)], group


__all__ = ["DEGREES", "Leaders"]
