"""What a schedule has to provide. Each schedule file ends in one `Schedule`; registry.py lists them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fivefold.schedule.actions import Placement, RankActions

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Schedule:
    """One way to order the micro-batches of a pipeline of p ranks, m micro-batches, v chunks per rank.

    illegal:  (p, m, v) -> why this combination cannot run, or None. p, m and v are at least 1 when it is called.
    actions:  (p, m, v) -> one list of actions per rank.
    held:     (p, m, v, steps [K]) -> [K, p, v] micro-batches of each chunk held by each rank right after a forward at
              which the rank holds most; step 0 is the first such moment of the rank, step 1 its next forward, ...
    cycle:    (p, m, v) -> after how many steps `held` repeats.
    seconds:  (p, m, v, forward [v, p, R], backward [v, p, R], exchange [R]) -> [R] seconds of R pipelines,
              equal to the simulator's makespan. None where no fast cost is written: cost.py then simulates.
    placement: which rank holds which virtual stage.
    splits_backward: whether it uses INPUT_GRAD and WEIGHT_GRAD, so that its cost needs the seconds of both.
    """

    name: str
    illegal: Callable[[int, int, int], str | None]
    actions: Callable[[int, int, int], list[RankActions]]
    held: Callable[[int, int, int, Ints], Ints]
    cycle: Callable[[int, int, int], int]
    seconds: Callable[[int, int, int, Floats, Floats, Floats], Floats] | None = None
    placement: Placement = Placement.LOOP
    splits_backward: bool = False


def only_one_chunk(p: int, m: int, v: int) -> str | None:
    """The rule of schedules that know no virtual stages."""
    return None if v == 1 else f"it runs one chunk of layers per rank, and v = {v} were asked; use interleaved"
