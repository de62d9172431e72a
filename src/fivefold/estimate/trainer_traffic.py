"""The traffic of one rank of fivefold's trainer as an estimate tells it: every collective of the step, by axis."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fivefold.cluster.groups import Placement, place
from fivefold.estimate.kernel import Kernel
from fivefold.estimate.trainer_account import TrainerAccount
from fivefold.layout import group
from fivefold.layout.layout import ResolvedLayout

# Whose exposed seconds of the step an axis shares, by its bytes.
OWNERS = {"tp": "tp", "cp": "cp", "pp": "pp"}


@dataclass(frozen=True, slots=True)
class Moved:
    """All collectives of one kind on one axis. owner: of the step's breakdown."""

    axis: str
    collective: str
    count: int
    bytes_sent: float
    placement: Placement
    owner: str


def trainer_traffic(kernel: Kernel, layout: ResolvedLayout, pipeline_rank: int) -> list[Moved]:
    """What the first rank of a pipeline stage sends in a step. kernel: of that layout alone, with every rank."""
    rank = pipeline_rank * layout.tp * layout.cp * layout.dp
    totals: dict[tuple[str, str], tuple[int, float]] = {}
    for each, count in TrainerAccount(kernel, layout).of(rank).collectives.items():
        calls, sent = totals.get((each.axis, each.collective), (0, 0.0))
        sent += count * each.bytes_sent_per_rank
        totals[each.axis, each.collective] = calls + count, sent
    where = _placements(kernel)
    return [
        Moved(axis, collective, count, sent, where[axis], OWNERS.get(axis, "dp"))
        for (axis, collective), (count, sent) in totals.items()
    ]


def _placements(kernel: Kernel) -> dict[str, Placement]:
    """Where the groups of each axis lie."""
    one = np.arange(1)
    groups, cluster, c = kernel.groups(one), kernel.problem.cluster, kernel.columns
    return {
        "tp": kernel.pricer.placements["tp"],
        "cp": kernel.pricer.placements["cp"],
        **{axis: place(cluster, *(part[one] for part in group(c, axis))) for axis in ("dp", "dp_cp", "replicate")},
        "shard": groups.dense,
        "pp": kernel.boundary(one),
        "world": place(cluster, np.array([cluster.gpus]), np.ones(1, dtype=np.int64)),
    }
