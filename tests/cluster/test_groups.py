"""Groups against brute-force member lists made by walking the rank grid."""

from __future__ import annotations

from collections import Counter

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.cluster import Cluster, Link, load_cluster, place
from fivefold.errors import FivefoldError

degree = st.sampled_from([1, 2, 3, 4, 6, 8])


def grid_groups(sizes: dict[str, int], axes: tuple[str, ...]) -> list[list[int]]:
    """Groups that vary along `axes` only; ranks numbered with the first axis of `sizes` fastest."""
    names = list(sizes)
    ranks = np.arange(int(np.prod(list(sizes.values())))).reshape([sizes[name] for name in reversed(names)])
    order = list(reversed(names))
    fixed = [i for i, name in enumerate(order) if name not in axes]
    moving = [i for i, name in enumerate(order) if name in axes]
    moved = ranks.transpose(fixed + moving)
    return moved.reshape(-1, int(np.prod([ranks.shape[i] for i in moving]))).tolist()


def progression(group: list[int]) -> tuple[int, int]:
    """(size, stride) of a group, whose ranks are that far apart."""
    ranks = sorted(group)
    stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    assert ranks == list(range(ranks[0], ranks[0] + len(ranks) * stride, stride))
    return len(ranks), stride


def cluster_of(world: int, spans: tuple[int, ...]) -> Cluster:
    gpu = load_cluster("h100-sxm").gpu
    links = [Link(name=f"l{span}", span=span, bandwidth_per_s=1e9, latency_s=1e-6) for span in (*spans, 0)]
    return Cluster(name="test", gpu=gpu, gpus=world, gpus_per_node=spans[0], links=tuple(links))


def brute(groups: list[list[int]], span: int) -> tuple[int, int]:
    counts = [Counter(rank // span for rank in group) for group in groups]
    return min(min(c.values()) for c in counts), max(len(c) for c in counts)


@given(tp=degree, cp=degree, dp=degree, pp=degree, span=st.sampled_from([2, 4, 6, 8, 12, 72]))
@settings(max_examples=80, deadline=None)
def test_dense_groups_cross_what_their_members_cross(tp, cp, dp, pp, span):
    world = tp * cp * dp * pp
    cluster = cluster_of(world, (span, 2 * span))
    sizes = {"tp": tp, "cp": cp, "dp": dp, "pp": pp}
    for moving in (("tp",), ("cp",), ("dp",), ("dp", "cp"), ("pp",)):
        expected = grid_groups(sizes, moving)
        placement = place(cluster, *progression(expected[0]))
        for level, width in enumerate(cluster.spans):
            assert (placement.members[level, 0], placement.domains[level, 0]) == brute(expected, width), (moving, level)


@given(etp=degree, ep=degree, edp=degree, pp=degree, span=st.sampled_from([3, 8, 16]))
@settings(max_examples=40, deadline=None)
def test_expert_groups_cross_what_their_members_cross(etp, ep, edp, pp, span):
    cluster = cluster_of(etp * ep * edp * pp, (span,))
    sizes = {"etp": etp, "ep": ep, "edp": edp, "pp": pp}
    for name in sizes:
        expected = grid_groups(sizes, (name,))
        placement = place(cluster, *progression(expected[0]))
        assert (placement.members[0, 0], placement.domains[0, 0]) == brute(expected, cluster.spans[0])


def test_siblings_share_a_node():
    cluster = load_cluster("h100-sxm", gpus=64)
    placement = place(cluster, [8, 8, 16], [1, 8, 4])
    assert placement.siblings[0].tolist() == [1, 8, 4]
    assert placement.members[0].tolist() == [8, 1, 2]
    assert placement.domains[0].tolist() == [1, 8, 8]
    assert placement.level.tolist() == [0, 1, 1]


def test_take_repeats_rows():
    placement = place(load_cluster("gb200-nvl72", gpus=144), [72, 2, 1], [1, 72, 1])
    taken = placement.take([2, 0, 0])
    assert taken.n.tolist() == [1, 72, 72]
    assert taken.members.shape == (2, 3)
    assert np.array_equal(taken.ring_s, placement.ring_s[[2, 0, 0]])


def test_nvl72_domain_is_larger_than_a_node():
    nvl = place(load_cluster("gb200", gpus=144), [48, 144], [1, 1])
    assert nvl.domains[0].tolist() == [2, 2]  # 48 does not divide 72: the middle group straddles the racks
    assert place(load_cluster("gb200", gpus=144), 36, 1).domains[0, 0] == 1


def test_a_group_that_does_not_tile_is_refused():
    with pytest.raises(FivefoldError, match="do not tile 64 GPUs"):
        place(load_cluster("h100", gpus=64), 48, 1)


def test_placement_is_frozen():
    placement = place(load_cluster("h100"), 2, 1)
    with pytest.raises((AttributeError, msgspec.ValidationError)):
        placement.n = np.array([3])  # type: ignore[misc]


@pytest.mark.parametrize(("gpus", "domain"), [(64, 64), (72, 72), (144, 72), (512, 64), (576, 72), (1024, 64)])
def test_a_job_gets_equal_parts_of_racks(gpus: int, domain: int) -> None:
    """Racks of 72 GPUs in hosts of 4: jobs of other sizes are given the same whole hosts of every rack."""
    assert load_cluster("gb200-nvl72", gpus=gpus).spans[0] == domain


def test_a_node_is_never_cut() -> None:
    assert load_cluster("h100-sxm", gpus=12).spans == (8, 12)
