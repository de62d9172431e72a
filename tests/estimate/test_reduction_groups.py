"""Which nodes the groups of a reduction touch, against the ranks of a box cut into them (64 GPUs, 8 a node)."""

from __future__ import annotations

import numpy as np
import pytest

from fivefold.cluster import collective_seconds
from fivefold.cluster.groups import Placement
from fivefold.layout import Layout

ONE = np.arange(1)
NODE = 8


def touched(box: np.ndarray, axis: int) -> tuple[int, int]:
    """(ranks of a group, most nodes that one touches) of the groups along an axis of a box of ranks."""
    groups = np.moveaxis(box, axis, -1).reshape(-1, box.shape[axis])
    return groups.shape[1], max(len(set(group // NODE)) for group in groups)


def lies(where: Placement) -> tuple[int, int]:
    return int(where.n[0]), int(where.domains[0, 0])


# ranks: (pipeline, replicas, shards with context parallelism inside, tensor parallelism), and of an expert (pipeline,
# replicas, shards, expert parallelism, its tensor parallelism).
@pytest.mark.parametrize(
    ("layout", "dense", "expert"),
    [
        (Layout(tp=2, dp_replicate=2, zero=3), (1, 2, 16, 2), (1, 2, 32, 1, 1)),
        (Layout(tp=2, cp=2, dp_replicate=4, zero=3), (1, 4, 8, 2), (1, 4, 16, 1, 1)),
        (Layout(ep=4, dp_replicate=2, zero=3), (1, 2, 32, 1), (1, 2, 8, 4, 1)),
        (Layout(tp=2, ep=2, etp=2, pp=2, dp_replicate=2, zero=3), (2, 2, 8, 2), (2, 2, 4, 2, 2)),
    ],
)
def test_shards_lie_inside_replicas(kernel_of, layout, dense, expert):
    kernel = kernel_of("mixtral", [layout], gpus=64, runtime="fsdp")
    groups = kernel.groups(ONE)
    ranks = np.arange(64)
    assert lies(groups.dense) == touched(ranks.reshape(dense), 2)
    assert lies(groups.dense_replicas) == touched(ranks.reshape(dense), 1)
    assert lies(groups.expert) == touched(ranks.reshape(expert), 2)
    assert lies(groups.expert_replicas) == touched(ranks.reshape(expert), 1)


def test_without_zero_one_group_replicates_everything(kernel_of):
    groups = kernel_of("mixtral", [Layout(tp=2, cp=2, ep=4, zero=0)], gpus=64).groups(ONE)
    assert lies(groups.dense) == touched(np.arange(64).reshape(32, 2), 0)
    assert lies(groups.expert) == touched(np.arange(64).reshape(16, 4), 0)
    assert [lies(each) for each in (groups.dense_replicas, groups.expert_replicas)] == [(1, 1), (1, 1)]


@pytest.mark.parametrize(("tp", "cp", "pp", "gpus"), [(2, 2, 2, 8), (1, 4, 2, 8), (1, 2, 4, 8), (2, 4, 2, 16)])
def test_neighbouring_stages_are_a_whole_stage_apart(kernel_of, tp, cp, pp, gpus):
    kernel = kernel_of("llama", [Layout(tp=tp, cp=cp, pp=pp)], gpus=gpus)
    stages = np.arange(gpus).reshape(pp, gpus // pp)
    assert lies(kernel.boundary(ONE)) == touched(stages, 0)


def test_gradients_of_experts_are_reduced_over_their_own_ranks(kernel_of):
    kernel = kernel_of("mixtral", [Layout(tp=2, ep=4)], gpus=64)
    nothing, elements = np.zeros((1, 1)), np.full((1, 1), 1e9)
    groups, cluster = kernel.groups(ONE), kernel.problem.cluster
    for dense, expert, ranks in ((elements, nothing, groups.dense), (nothing, elements, groups.expert)):
        reduce_s, gather_s = kernel.reduction_seconds(ONE, dense, expert)
        assert reduce_s == pytest.approx(collective_seconds(cluster, "reduce_scatter", np.array([4e9]), ranks)[0])
        assert gather_s == pytest.approx(collective_seconds(cluster, "all_gather", np.array([2e9]), ranks)[0])
    both = kernel.reduction_seconds(ONE, elements, elements)[0]
    each = [kernel.reduction_seconds(ONE, *sizes)[0] for sizes in ((elements, nothing), (nothing, elements))]
    assert both == pytest.approx(sum(each))
