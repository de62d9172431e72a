"""How blocks are cut into pipeline stages in a search: the counts of the first and the last rank that are tried."""

from __future__ import annotations

from itertools import product
from typing import Any, NamedTuple

from fivefold.estimate import Problem
from fivefold.layout.stages import split_policy


class StageCounts(NamedTuple):
    """One way to split blocks over stages: counts of the first and last rank (0: even), what counts as a block."""

    first_stage_layers: int = 0
    last_stage_layers: int = 0
    account_for_embedding: int = 0
    account_for_loss: int = 0


def stage_counts(
    problem: Problem, pp: int, vpp: int, pins: dict[str, tuple[Any, ...]] | None = None
) -> list[StageCounts]:
    """Splits to try for one pipeline, (0, 0, 0, 0) being even; see StageCounts."""
    layers, pins = problem.model.layers, pins or {}
    if any(name in pins for name in StageCounts._fields):
        values = [pins.get(name) or (0,) for name in StageCounts._fields]
        return [StageCounts(*(int(value or 0) for value in each)) for each in product(*values)]
    if split_policy(problem.runtime.name) != "even":
        return [StageCounts()]
    stages = pp * vpp
    counts = {StageCounts()} if layers % stages == 0 else set()
    if pp == 1:
        return [*counts]
    for embedding, loss in ((1, 1), (0, 1), (1, 0)):
        if (layers + embedding + loss) % stages == 0:
            counts.add(StageCounts(account_for_embedding=embedding, account_for_loss=loss))
    if pp > 2 and not counts:
        counts |= _ends_apart(layers, pp, vpp) or _longer_ends(layers, pp, vpp)
    return sorted(counts)


def _ends_apart(layers: int, pp: int, vpp: int) -> set[StageCounts]:
    """First and last counts around equal middle stages, for a number of blocks that nothing else divides."""
    fewest = -(-layers // (pp * vpp)) * vpp
    counts: set[StageCounts] = set()
    for width in (fewest, fewest + vpp):
        spare = layers - width * (pp - 2)
        for first in (spare // (2 * vpp) * vpp, -(-spare // (2 * vpp)) * vpp, width, width - vpp):
            last = spare - first
            if 0 < first <= width and 0 < last <= width and last % vpp == 0:
                counts.add(StageCounts(first, last))
    return counts


def _longer_ends(layers: int, pp: int, vpp: int) -> set[StageCounts]:
    """One or both ends with one block per chunk more than the middle stages.

    For so few blocks left over that longer middle stages would leave none to the ends: 126 blocks on 25 stages are one
    stage of 6 and 24 of 5.
    """
    width = layers // (pp * vpp) * vpp
    if vpp > 1 and width < 2 * vpp:  # twice the blocks in the chunks of an end gives back what interleaving gains
        return set()
    ends = ((width, width + vpp), (width + vpp, width), (width + vpp, width + vpp))
    return {StageCounts(*each) for each in ends if width and sum(each) + width * (pp - 2) == layers}


__all__ = ["StageCounts", "stage_counts"]
