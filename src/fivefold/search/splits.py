"""Blocks of each virtual stage as tuples of counts: all of them, the neighbours of one, and their text for Megatron-LM.

Stages between the first and the last hold at least one block; these two may hold the embedding or the head alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, groupby, pairwise
from math import comb

import numpy as np

Counts = tuple[int, ...]

_ALL_MOVES = 24  # virtual stages up to which a block may move between any two


def number_of_splits(layers: int, stages: int) -> int:
    """How many splits there are: at least one block on every stage between the ends, any number on these."""
    free = layers - (stages - 2)
    return comb(free + stages - 1, stages - 1)


def every_split(layers: int, stages: int) -> Iterator[Counts]:
    """All splits, by where the borders between stages lie."""
    free = layers - (stages - 2)
    for borders in combinations(range(free + stages - 1), stages - 1):
        marks = (-1, *borders, free + stages - 1)
        counts = [b - a - 1 for a, b in pairwise(marks)]
        yield (counts[0], *(count + 1 for count in counts[1:-1]), counts[-1])


def moves(counts: Counts) -> Iterator[Counts]:
    """Every split that differs by one block on another stage; of long pipelines neighbours and ends only."""
    last = len(counts) - 1
    for giver in range(len(counts)):
        if counts[giver] <= (0 if giver in (0, last) else 1):
            continue
        for taker in range(len(counts)):
            near = abs(giver - taker) == 1 or giver in (0, last) or taker in (0, last)
            if taker != giver and (near or len(counts) <= _ALL_MOVES):
                moved = list(counts)
                moved[giver] -= 1
                moved[taker] += 1
                yield tuple(moved)


def filled(times: np.ndarray, ends: tuple[float, float], stages: int, most: float) -> Counts | None:
    """Stages filled from the front with what `most` seconds hold; None where blocks are left over."""
    counts, at = [], 0
    for stage in range(stages):
        room = most - (ends[0] if stage == 0 else 0.0) - (ends[1] if stage == stages - 1 else 0.0)
        if room < 0:
            return None
        left = stages - 2 - stage  # stages between this one and the last, which need a block each
        taken = 0
        while at + taken < len(times) - max(left, 0) and times[at : at + taken + 1].sum() <= room:
            taken += 1
        if taken == 0 and 0 < stage < stages - 1:
            return None
        counts.append(taken)
        at += taken
    return tuple(counts) if at == len(times) else None


def layout_text(counts: Counts, mtp: int) -> str:
    """Counts as --pipeline-model-parallel-layout: E, t*n and m, L by stage, equal stages in (...)*n."""
    last = len(counts) - 1
    stages = [
        ("E" if at == 0 else "") + _repeated("t", count) + (_repeated("m", mtp) + "L" if at == last else "")
        for at, count in enumerate(counts)
    ]
    words = []
    for stage, run in groupby(stages[:-1]):
        times = len([*run])
        words.append(f"{stage}|" if times == 1 else f"({stage}|)*{times}")
    return "".join(words) + stages[-1]


def _repeated(letter: str, times: int) -> str:
    return letter * times if times < 2 else f"{letter}*{times}"
