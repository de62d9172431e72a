"""Small numpy pieces of the kernel: sums over pieces, distinct rows, grouping by value."""

from __future__ import annotations

import numpy as np


def dot(counts: np.ndarray, values: np.ndarray) -> np.ndarray:
    """[n, C, P] counts times [n, P] values, summed over pieces: [n, C]."""
    return np.einsum("ncp,np->nc", counts, values)


def distinct(fields: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """(positions of the first of each distinct combination, index of each row's combination)."""
    if len(fields[0]) == 1:
        zero = np.zeros(1, dtype=np.int64)
        return zero, zero
    packed = np.zeros(len(fields[0]), dtype=np.int64)
    for field in fields:
        packed = packed * (int(field.max()) + 1) + field
    _, first, inverse = np.unique(packed, return_index=True, return_inverse=True)
    return first, inverse.reshape(-1)


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
