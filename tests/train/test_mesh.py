"""Process groups against a grid of ranks written down independently; what a world that does not fit is told."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from proofs import layout_of, llama
from ranks import RankFailure, run_ranks

from fivefold.errors import FivefoldError
from fivefold.train.mesh import AXES, Mesh, all_gather, all_reduce

GRIDS: list[tuple[int, dict[str, Any]]] = [
    (8, {"tp": 2, "cp": 2, "pp": 2}),
    (8, {"tp": 2, "pp": 2}),
    (8, {"cp": 2, "dp_replicate": 2}),
    (6, {"pp": 3, "zero": 0}),
    (1, {}),
]


@pytest.mark.parametrize(("ranks", "degrees"), GRIDS, ids=str)
def test_groups_sum_over_the_right_ranks(ranks: int, degrees: dict[str, Any]) -> None:
    layout = layout_of(llama(), ranks, **degrees)

    def sums(rank: int) -> dict[str, tuple[int, int, int]]:
        mesh = Mesh(layout)
        total = {axis: int(all_reduce(torch.tensor(10**rank), mesh.group(axis)).item()) for axis in AXES}
        return {axis: (total[axis], mesh.index(axis), mesh.size(axis)) for axis in AXES}

    # The grid as one array view, slowest axis first.
    grid = np.arange(ranks).reshape(layout.pp, layout.dp, layout.cp, layout.tp)
    flat = grid.reshape(layout.pp, layout.dp_replicate, layout.dp_shard, layout.tp)
    views = {
        "tp": grid, "cp": grid.swapaxes(2, 3), "dp": grid.swapaxes(1, 3), "pp": grid.swapaxes(0, 3),
        "dp_cp": grid.reshape(layout.pp, -1, layout.tp).swapaxes(1, 2), "shard": flat.swapaxes(2, 3),
        "replicate": flat.swapaxes(1, 3),
    }  # fmt: skip
    for rank, found in enumerate(run_ranks(ranks, sums)):
        for axis, view in views.items():
            [row] = [row for row in view.reshape(-1, view.shape[-1]) if rank in row]
            assert found[axis] == (sum(10 ** int(r) for r in row), list(row).index(rank), len(row)), (rank, axis)


def test_gather_and_scatter_along_the_first_dimension() -> None:
    layout = layout_of(llama(), 4)

    def gathered(rank: int) -> list[float]:
        return all_gather(torch.full((1, 2), float(rank)), Mesh(layout).group("dp"))[:, 0].tolist()

    assert run_ranks(4, gathered) == [[0, 1, 2, 3]] * 4


def test_one_rank_has_no_groups() -> None:
    mesh = Mesh(layout_of(llama(), 1))
    tensor = torch.ones(3)
    assert all(mesh.group(axis) is None for axis in AXES)
    assert all_reduce(tensor, None) is tensor
    assert all_gather(tensor, None) is tensor


def test_axes_are_named_for_their_group() -> None:
    layout = layout_of(llama(), 4, tp=2)

    def name(rank: int) -> list[str | None]:
        mesh = Mesh(layout)
        return [mesh.axis_of(mesh.group(axis)) for axis in ("tp", "dp", "shard", "pp")]

    assert run_ranks(4, name)[0] == ["tp", "dp", "dp", None]


def test_a_world_of_another_size_is_refused() -> None:
    with pytest.raises(FivefoldError, match="for 4 ranks"):
        Mesh(layout_of(llama(), 4))


def test_the_harness_reports_the_failing_rank() -> None:
    def fail(rank: int) -> None:
        if rank == 1:
            raise ValueError("this one")
        torch.distributed.barrier()

    with pytest.raises(RankFailure, match=r"rank 1 failed(.|\n)*this one"):
        run_ranks(3, fail)


def test_the_harness_ends_a_hang() -> None:
    def forever(rank: int) -> None:
        import time

        time.sleep(30 if rank else 0)

    with pytest.raises(RankFailure, match="did not finish"):
        run_ranks(2, forever, timeout=1)
