"""Sizes of the gradient buckets of fivefold's trainer, for what ZeRO-2 holds of them at a time."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from fivefold.estimate.plans import ITEMS, Partition
from fivefold.estimate.trainer_parameters import buckets_of, parameters_of
from fivefold.model.spec import ModelSpec


class Buckets(NamedTuple):
    """Of a rank's stages: the bucket that backward comes to last, the one with the head or else the first, and the
    largest two that follow each other among the blocks."""

    last: np.ndarray
    head: np.ndarray
    pair: np.ndarray


def part_stages(part: Partition, rank: int) -> tuple[tuple[int, int, int], ...]:
    """(virtual stage, first block, last block + 1) of each chunk of a rank."""
    blocks = (part.plain + part.again)[:, : -len(ITEMS)].sum(axis=1)
    ends = np.cumsum(blocks)
    return tuple((int(stage), int(ends[stage] - blocks[stage]), int(ends[stage])) for stage in part.home[rank])


@lru_cache(maxsize=4096)
def bucket_sizes(
    model: ModelSpec, stages: tuple[tuple[int, int, int], ...], end: int, tp: int, numel: int
) -> tuple[int, int, int]:
    """The sizes of Buckets for one rank, over its chunks. end: the model's last virtual stage."""
    last = head = pair = 0
    for parameters in parameters_of(model, stages, end, tp):
        sizes = [
            (b.numel, all(p.name.startswith("layers") for p in b.parameters))
            for b in buckets_of(parameters, 2, 1, numel, model.tied_embeddings)
        ]
        last, head = max(last, sizes[-1][0]), max(head, sizes[0][0])
        inner = [size for size, of_blocks in sizes if of_blocks]
        pair = max([pair, *(a + b for a, b in pairwise(inner)), *inner])
    return last, head, pair
