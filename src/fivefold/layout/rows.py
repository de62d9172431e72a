"""Some rows of Columns, each column cut only when it is asked for: a rule reads two or three of twenty-seven."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from fivefold.layout.columns import Columns


def rows_of(columns: Columns, index: NDArray[np.int64] | None = None) -> Columns:
    """The rows at `index`, of all columns where it is None, to be read as Columns are."""
    return cast(Columns, _Rows(columns, index))


class _Rows:
    def __init__(self, columns: Columns, index: NDArray[np.int64] | None) -> None:
        self._columns, self._index = columns, index

    def __getattr__(self, name: str) -> NDArray[Any]:
        whole = getattr(self._columns, name)
        column = whole if self._index is None else whole[self._index]
        self.__dict__[name] = column  # so that the next one who asks does not come here
        return column
