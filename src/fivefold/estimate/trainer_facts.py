"""What the planner says about single ranks of fivefold's trainer, in the terms in which a rank can be watched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fivefold.estimate.kernel import Kernel, Problem
from fivefold.estimate.trainer_account import TrainerAccount
from fivefold.layout.columns import Columns
from fivefold.layout.grids import rank_coordinates
from fivefold.layout.layout import Layout
from fivefold.layout.stages import resolve_row

# (axis, collective, ranks, payload bytes) -> how many in a step
Sent = dict[tuple[str, str, int, int], int]


@dataclass(frozen=True, slots=True)
class Facts:
    """One rank's step. flops: forward, backward, recomputed. saved_bytes: of one block and micro-batch, by the index of
    its kind, what autograd keeps. peak_bytes, parts: at the fullest moment, parts by category."""

    flops: tuple[float, float, float]
    sent: Sent
    saved_bytes: dict[int, float]
    peak_bytes: float
    parts: dict[str, float]


def rank_facts(problem: Problem, layout: Layout, ranks: Sequence[int]) -> list[Facts]:
    """Facts about some ranks of a layout that the trainer runs; problem.runtime: fivefold's."""
    columns = Columns.from_layouts([layout], problem.cluster.gpus, problem.work)
    kernel = Kernel(problem, columns, every_rank=True)
    resolved = resolve_row(columns, problem.model, problem.runtime.name)
    account = TrainerAccount(kernel, resolved)
    memory = {name: part[0] for name, part in kernel.rank_memory(np.arange(1)).items()}
    total = np.sum([*memory.values()], axis=0)
    out = []
    for rank in ranks:
        place = rank_coordinates(resolved, rank)["pp"]
        entries = np.flatnonzero((kernel.table.rank[0] == place) & kernel.table.exists[0])
        at = int(entries[total[entries].argmax()])
        step = account.of(rank)
        out.append(
            Facts(
                flops=(step.forward_flops, step.backward_flops, step.recompute_flops),
                sent={tuple(key): count for key, count in step.collectives.items()},  # type: ignore[misc]
                saved_bytes={kind: _saved(kernel, place, kind) for kind in range(kernel.blocks)},
                peak_bytes=float(total[at]),
                parts={name: float(part[at]) for name, part in memory.items() if part[at]},
            )
        )
    return out


def _saved(kernel: Kernel, place: int, kind: int) -> float:
    """Of a block of this kind, recomputed where the rank's first one is."""
    v, which = kernel.variants, int(kernel.variant[0])
    again = kernel.table.again[0, place, kind] > 0
    return float((v.kept if again else v.saved)[which, kind])
