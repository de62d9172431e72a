"""The two grids over one world: which ranks share a group on each axis.

Ranks run in Megatron's order tp-cp-ep-dp-pp, the first fastest (Megatron-Core, parallel_state, RankGenerator;
torchtitan's mesh (pp, dp_replicate, dp_shard, cp, tp) is the same order written slowest first). So every group is
an arithmetic progression, and (size, stride) describes all groups of an axis.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np

from fivefold.errors import FivefoldError
from fivefold.layout.columns import Columns, Ints
from fivefold.layout.layout import ResolvedLayout
from fivefold.layout.rows import rows_of

Axis = Literal[
    "tp", "cp", "dp", "pp", "dp_cp", "shard", "replicate", "etp", "ep", "edp", "expert_shard", "expert_replicate"
]


class Group(NamedTuple):
    """Size and stride of one axis's groups, in ranks; members of rank r's group differ by multiples of stride.

    Arrays of shape [n] over Columns, plain integers over one ResolvedLayout.
    """

    size: Ints
    stride: Ints


def _expert_shard(c: Columns) -> Ints:
    """Ranks that shard one expert's states: expert-DP ranks, cut into the same replicas as the dense parameters."""
    return np.where(c.zero == 0, 1, np.maximum(c.edp // np.maximum(c.dp_replicate, 1), 1))


_GROUPS: dict[str, Callable[[Columns], tuple[Ints, Ints]]] = {
    # dense grid
    "tp": lambda c: (c.tp, np.ones_like(c.tp)),
    "cp": lambda c: (c.cp, c.tp),
    "dp": lambda c: (c.dp, c.tp * c.cp),
    "pp": lambda c: (c.pp, c.tp * c.cp * c.dp),
    # gradients are reduced, and ZeRO shards, over DP and CP ranks together: cp is inside dp, so stride tp
    "dp_cp": lambda c: (c.dp * c.cp, c.tp),
    "shard": lambda c: (c.dp_shard, c.tp),
    "replicate": lambda c: (c.dp_replicate, c.tp * c.dp_shard),
    # expert grid
    "etp": lambda c: (c.etp, np.ones_like(c.etp)),
    "ep": lambda c: (c.ep, c.etp),
    "edp": lambda c: (c.edp, c.etp * c.ep),
    "expert_shard": lambda c: (_expert_shard(c), c.etp * c.ep),
    "expert_replicate": lambda c: (c.edp // _expert_shard(c), c.etp * c.ep * _expert_shard(c)),
}
AXES: tuple[str, ...] = tuple(_GROUPS)
DENSE_GRID: tuple[str, ...] = ("tp", "cp", "dp", "pp")
EXPERT_GRID: tuple[str, ...] = ("etp", "ep", "edp", "pp")


def group(columns: Columns, axis: Axis | str, rows: Ints | None = None) -> Group:
    """(size, stride) of `axis`, arrays of shape [n]: of all layouts, or of those at `rows`. Raises FivefoldError for an
    unknown axis."""
    if axis not in _GROUPS:
        raise FivefoldError(f"Unknown axis '{axis}'. Legal: {', '.join(AXES)}.", value=axis, legal=AXES)
    here = columns if rows is None else rows_of(columns, rows)
    size, stride = _GROUPS[axis](here)
    return Group(size, stride)


def rank_coordinates(layout: ResolvedLayout, rank: int) -> dict[str, int]:
    """Where `rank` sits: its coordinate on every axis of both grids (pp is shared).

    Raises FivefoldError when the world has no such rank.
    """
    _check_rank(layout, rank)
    where: dict[str, int] = {}
    for axis in (*DENSE_GRID, *EXPERT_GRID):
        size, stride = _group_of_one(layout, axis)
        where[axis] = rank // stride % size
    return where


def group_members(layout: ResolvedLayout, axis: Axis | str, rank: int) -> tuple[int, ...]:
    """The ranks of the `axis` group that holds `rank`, ascending."""
    _check_rank(layout, rank)
    size, stride = _group_of_one(layout, axis)
    first = rank - rank // stride % size * stride
    return tuple(range(first, first + size * stride, stride))


def world_size(layout: ResolvedLayout) -> int:
    """Number of ranks in the dense grid."""
    return layout.tp * layout.cp * layout.dp * layout.pp


def _group_of_one(layout: ResolvedLayout, axis: str) -> tuple[int, int]:
    """The same table on plain integers: it asks only for fields that ResolvedLayout has under the same name."""
    if axis not in _GROUPS:
        raise FivefoldError(f"Unknown axis '{axis}'. Legal: {', '.join(AXES)}.", value=axis, legal=AXES)
    size, stride = _GROUPS[axis](layout)  # type: ignore[arg-type]
    return int(size), int(stride)


def _check_rank(layout: ResolvedLayout, rank: int) -> None:
    world = world_size(layout)
    if not 0 <= rank < world:
        raise FivefoldError(
            f"Rank {rank} does not exist: this layout has {world} ranks, 0 to {world - 1}.",
            option="--rank",
            value=rank,
            legal=f"0 to {world - 1}",
        )
