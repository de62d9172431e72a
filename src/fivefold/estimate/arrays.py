"""Small numpy pieces of the kernel: sums over pieces, distinct rows, grouping by value."""

from __future__ import annotations

import numpy as np

_TABLE = 8  # places of a lookup table for each row, above which sorting is quicker


def dot(counts: np.ndarray, values: np.ndarray) -> np.ndarray:
    """[n, C, P] counts times [n, P] values, summed over pieces: [n, C]."""
    return np.einsum("ncp,np->nc", counts, values)


def distinct(fields: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """(positions of the first of each distinct combination, index of each row's combination), in the order of the
    combinations. fields: integers from 0 on."""
    rows = len(fields[0])
    code, size = np.zeros(rows, dtype=np.int64), 1
    if rows <= 1:
        return code, code
    for field in fields:
        width = int(field.max()) + 1
        if size * width > _TABLE * rows:
            code, size = _numbered(code, size)
        code, size = code * width + field, size * width
    code, size = _numbered(code, size)
    first = np.empty(size, dtype=np.int64)
    first[code[::-1]] = np.arange(rows - 1, -1, -1)  # of positions that share a place the last one written stays
    return first, code


def _numbered(code: np.ndarray, size: int) -> tuple[np.ndarray, int]:
    """(codes below `size` numbered in their order without gaps, how many there are)."""
    if size > _TABLE * len(code):
        values, code = np.unique(code, return_inverse=True)
        return code.reshape(-1), len(values)
    present = np.zeros(size, dtype=bool)
    present[code] = True
    values = np.flatnonzero(present)
    number = np.empty(size, dtype=np.int64)
    number[values] = np.arange(len(values))
    return number[code], len(values)


def by_value(values: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """(value, positions that hold it) for every distinct value."""
    if len(values) == 1:
        return [(int(values[0]), np.zeros(1, dtype=np.int64))]
    order = np.argsort(values, kind="stable")
    cuts = np.flatnonzero(np.diff(values[order])) + 1
    return [(int(values[part[0]]), part) for part in np.split(order, cuts) if len(part)]


def codes(values: np.ndarray) -> np.ndarray:
    """Small integers that are equal exactly where the values are."""
    if len(values) == 1:
        return np.zeros(1, dtype=np.int64)
    return np.unique(values, return_inverse=True)[1].reshape(-1)
