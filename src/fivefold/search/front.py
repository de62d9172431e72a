"""The front of time and memory: the layouts that no other one beats in both."""

from __future__ import annotations

import numpy as np


class Front:
    """The layouts priced so far that none beats in both time and memory, fastest first."""

    def __init__(self) -> None:
        self.seconds = np.zeros(0)
        self.reserved = np.zeros(0)

    def add(self, seconds: np.ndarray, reserved: np.ndarray) -> None:
        seconds, reserved = np.concatenate([self.seconds, seconds]), np.concatenate([self.reserved, reserved])
        order = np.lexsort((reserved, seconds))
        seconds, reserved = seconds[order], reserved[order]
        before = np.concatenate([[np.inf], np.minimum.accumulate(reserved)[:-1]])
        self.seconds, self.reserved = seconds[reserved < before], reserved[reserved < before]

    def beats(self, seconds: np.ndarray, reserved: np.ndarray) -> np.ndarray:
        """[n] bool: whether some layout on the front is faster than `seconds` and no heavier than `reserved`."""
        faster = np.searchsorted(self.seconds, seconds, side="left")
        found = faster > 0
        if not found.any():
            return found
        return found & (self.reserved[np.maximum(faster - 1, 0)] <= reserved)


def outermost(seconds: np.ndarray, reserved: np.ndarray, wanted: int) -> np.ndarray:
    """Positions of the points that no other point beats, then of those that are beaten by these alone, and so on, until
    `wanted` are found or all are."""
    left = np.lexsort((reserved, seconds))
    layers: list[np.ndarray] = []
    while len(left) and sum(map(len, layers)) < wanted:
        weights = reserved[left]
        lightest = np.concatenate([[np.inf], np.minimum.accumulate(weights)[:-1]])
        layers.append(left[weights < lightest])
        left = left[weights >= lightest]
    return np.concatenate([*layers, left[:0]])[:wanted]


__all__ = ["Front", "outermost"]
