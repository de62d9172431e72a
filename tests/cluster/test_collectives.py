"""Collective costs against hand-computed cases, measured bandwidths and rules that any cost has to obey."""

from __future__ import annotations

import csv
import time
from collections import defaultdict
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fivefold.cluster import (
    OPERATIONS,
    Cluster,
    Link,
    bytes_sent_per_rank,
    collective_seconds,
    dispatch_seconds,
    load_cluster,
    place,
)
from fivefold.errors import FivefoldError

MEASURED = Path(__file__).parent / "data" / "collectives.csv"
# nccl-tests' bus bandwidth = bytes x factor / seconds (its PERFORMANCE.md).
BUS_FACTOR = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "ring_all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
}
IDEAL = (
    Link(name="inner", span=4, bandwidth_per_s=100e9, latency_s=1e-6),
    Link(name="outer", span=0, bandwidth_per_s=10e9, latency_s=10e-6),
)


def ideal(gpus: int = 16, **changes) -> Cluster:
    gpu = load_cluster("h100-sxm").gpu
    base = Cluster(name="ideal", gpu=gpu, gpus=gpus, gpus_per_node=4, links=IDEAL, launch_s=0.0)
    return msgspec.structs.replace(base, **changes)


def seconds(cluster: Cluster, op: str, size: float, n: int, stride: int = 1) -> float:
    return float(collective_seconds(cluster, op, size, place(cluster, n, stride))[0])


# ----------------------------------------------------------------------------------------------- by hand, 1 GB
def test_ring_inside_a_domain():
    # 3 steps of 1 us, 3/4 GB at 100 GB/s
    assert seconds(ideal(), "all_gather", 1e9, 4) == pytest.approx(3e-6 + 7.5e-3)
    assert seconds(ideal(), "reduce_scatter", 1e9, 4) == pytest.approx(3e-6 + 7.5e-3)
    assert seconds(ideal(), "ring_all_reduce", 1e9, 4) == pytest.approx(6e-6 + 15e-3)


def test_ring_over_domains():
    # 16 ranks, 4 domains: of the 16 edges 4 cross, mean latency (12 x 1 + 4 x 10) / 16 us; four cards carry the ring.
    mean = (12 * 1e-6 + 4 * 10e-6) / 16
    assert seconds(ideal(), "all_gather", 1e9, 16) == pytest.approx(15 * mean + 15 / 16 / 40, rel=1e-9)
    # one rank per domain: its own card, every edge crosses
    assert seconds(ideal(), "all_gather", 1e9, 4, stride=4) == pytest.approx(3 * 10e-6 + 0.75 / 10, rel=1e-9)


def test_tree_over_domains():
    cluster = ideal(algorithms=("ring", "tree"))
    # up and down: a chain of 3 inner steps and 2 outer ones; an inner rank sends the tensor twice at 0.92 x 40 GB/s
    small = place(cluster, 16, 1)
    assert float(small.tree_s[0]) == pytest.approx(2 * (3 * 1e-6 + 2 * 10e-6))
    assert float(small.tree_s_per_byte[0]) == pytest.approx(2 / 40e9 / 0.92)
    assert seconds(cluster, "all_reduce", 1e3, 16) == pytest.approx(
        float(small.tree_s[0] + 1e3 * small.tree_s_per_byte[0])
    )
    assert seconds(cluster, "all_reduce", 1e10, 16) == seconds(ideal(), "all_reduce", 1e10, 16)  # the ring's


def test_two_domains_favour_the_tree():
    # Between two nodes a tree sends the tensor once where a ring sends it nearly twice.
    cluster = ideal(gpus=8, algorithms=("ring", "tree"))
    assert seconds(cluster, "all_reduce", 1e9, 8) == pytest.approx(2 * (3e-6 + 10e-6) + 1 / 40 / 0.92, rel=1e-6)


def test_hierarchical_is_the_sum_of_its_three_parts():
    cluster = ideal(algorithms=("ring", "hierarchical"))
    inside = seconds(cluster, "reduce_scatter", 1e9, 4) + seconds(cluster, "all_gather", 1e9, 4)
    across = seconds(cluster, "ring_all_reduce", 0.25e9, 4, stride=4)
    row = place(cluster, 16, 1)
    assert float(row.hierarchical_s[0] + row.hierarchical_s_per_byte[0] * 1e9) == pytest.approx(inside + across)


def test_in_network_reduction():
    switch = msgspec.structs.replace(IDEAL[0], in_network=True, in_network_latency_s=5e-6)
    cluster = ideal(links=(switch, IDEAL[1]))
    assert seconds(cluster, "all_reduce", 1e9, 4) == pytest.approx(2e-6 + 5e-6 + 1.25 / 100)
    off = ideal(links=(switch, IDEAL[1]), algorithms=("ring", "tree"))
    assert seconds(off, "all_reduce", 1e9, 4) == pytest.approx(seconds(off, "ring_all_reduce", 1e9, 4))


def test_rooted_and_point_to_point():
    assert seconds(ideal(), "broadcast", 1e9, 4) == pytest.approx(3e-6 + 10e-3)
    assert seconds(ideal(), "gather", 1e9, 4) == pytest.approx(1e-6 + 7.5e-3)
    assert seconds(ideal(), "gather", 1e9, 16) == pytest.approx(10e-6 + 0.75 / 10)  # 12/16 through the root's card
    assert seconds(ideal(), "send", 1e9, 4, stride=4) == pytest.approx(10e-6 + 0.1)
    assert seconds(ideal(), "send", 1e9, 4) == pytest.approx(1e-6 + 0.01)


def test_all_to_all_inside_and_across_in_parallel():
    assert seconds(ideal(), "all_to_all", 1e9, 4) == pytest.approx(1e-6 + 0.75 / 100)
    # 12/16 of the buffer leaves through the rank's own card, meanwhile 3/16 moves inside
    assert seconds(ideal(), "all_to_all", 1e9, 16) == pytest.approx(1e-6 + 2 * 10e-6 + 0.75 / 10)


def test_oversubscribed_spine():
    leaf = msgspec.structs.replace(IDEAL[1], name="leaf", span=8)
    spine = Link(name="spine", span=0, bandwidth_per_s=10e9, oversubscription=4, latency_s=20e-6)
    tapered, flat = ideal(gpus=32, links=(IDEAL[0], leaf, spine)), ideal(gpus=32)
    assert seconds(tapered, "all_gather", 1e9, 8) == pytest.approx(seconds(flat, "all_gather", 1e9, 8))
    # ring across leaves: 8 members a leaf, each with a quarter of its card
    across = seconds(tapered, "all_gather", 1e10, 32)
    assert across == pytest.approx(31 / 32 * 1e10 / (8 * 2.5e9), rel=0.01)


def test_pairwise_links_give_small_groups_less():
    mesh = msgspec.structs.replace(IDEAL[0], span=8, peer_bandwidth_per_s=20e9, bandwidth_per_s=140e9)
    cluster = ideal(gpus=8, links=(mesh, IDEAL[1]))
    pair, all_of_them = seconds(cluster, "all_gather", 1e9, 2), seconds(cluster, "all_gather", 1e9, 8)
    assert pair == pytest.approx(1e-6 + 0.5 / 20)
    assert all_of_them == pytest.approx(7e-6 + 0.875 / 140)


def test_shared_network_card():
    # A rank per node has one GPU's share of the network; a group with 4 members a node has four shares.
    cluster = ideal(gpus=64)
    one, four = place(cluster, 16, 4), place(cluster, 64, 1)
    assert float(one.ring_s_per_byte[0]) == pytest.approx(4 * float(four.ring_s_per_byte[0]))


def test_the_one_message_that_leaves_a_node_has_a_whole_card():
    # Two cards of 20 GB/s for four GPUs: a ring over nodes crosses each once, four rings cross it together.
    two = msgspec.structs.replace(IDEAL[1], cards=2, card_bits_per_s=160e9)
    cluster = ideal(gpus=64, links=(IDEAL[0], two))
    assert seconds(cluster, "send", 1e9, 64) == pytest.approx(10e-6 + 0.05)
    assert seconds(cluster, "send", 1e9, 32, stride=2) == pytest.approx(10e-6 + 0.05)
    assert seconds(cluster, "send", 1e9, 16, stride=4) == pytest.approx(10e-6 + 0.1)
    each = msgspec.structs.replace(two, cards=4, card_bits_per_s=80e9)
    assert seconds(ideal(gpus=64, links=(IDEAL[0], each)), "send", 1e9, 64) == pytest.approx(10e-6 + 0.1)


def test_sockets_of_a_pcie_node():
    # SimuMax's fits for 8x A100 PCIe: 12.5, 13.5, 11.1 and 8.3 GB/s of bus bandwidth; 20.8 inside a socket
    cluster = load_cluster("a100-80g-pcie")
    for op, n, measured in [
        ("all_reduce", 8, 12.53),
        ("all_gather", 8, 13.49),
        ("reduce_scatter", 8, 11.06),
        ("all_to_all", 8, 8.26),
        ("all_reduce", 4, 20.77),
        ("all_to_all", 4, 19.14),
    ]:
        bandwidth = 1e10 * BUS_FACTOR[op](n) / seconds(cluster, op, 1e10, n) / 1e9
        assert bandwidth == pytest.approx(measured, rel=0.15), (op, n)


# ----------------------------------------------------------------------------------------------- rules
CLUSTERS = ["h100-sxm", "a100-80g-pcie", "mi300x", "gb200-nvl72", "aws-p5", "v100-sxm"]
sizes = st.floats(1, 1e11)


@given(name=st.sampled_from(CLUSTERS), op=st.sampled_from(sorted(OPERATIONS)), log_n=st.integers(0, 8), size=sizes)
@settings(max_examples=120, deadline=None)
def test_more_bytes_and_more_ranks_never_cost_less(name, op, log_n, size):
    cluster = load_cluster(name, gpus=144 * 64)
    here = place(cluster, [2**log_n], [1])
    t = collective_seconds(cluster, op, size, here)[0]
    assert np.isfinite(t) and t >= 0
    assert (t == 0) == (log_n == 0)
    assert collective_seconds(cluster, op, size * 2, here)[0] >= t
    # More ranks may cost less where they bring links of their own, and where switches reduce: each rank then multicasts
    # a smaller part (measured too: 8 GiB take 33.2 ms on 5 H200s and 31.8 ms on 8).
    gains = cluster.links[0].peer_bandwidth_per_s or (cluster.links[0].in_network and op == "all_reduce")
    if op != "all_to_all" and not gains:
        assert collective_seconds(cluster, op, size, place(cluster, 2 ** (log_n + 1), 1))[0] >= t * (1 - 1e-9)


@given(name=st.sampled_from(CLUSTERS), log_n=st.integers(1, 10), size=sizes)
@settings(max_examples=60, deadline=None)
def test_half_an_all_reduce(name, log_n, size):
    cluster = load_cluster(name, gpus=144 * 64)
    row = place(cluster, 2**log_n, 1)
    scatter, gather, ring, best = (
        collective_seconds(cluster, op, size, row)[0]
        for op in ("reduce_scatter", "all_gather", "ring_all_reduce", "all_reduce")
    )
    assert scatter < ring
    assert scatter == gather
    assert best <= ring
    assert scatter + gather == pytest.approx(ring + cluster.launch_s)


@given(st.sampled_from(CLUSTERS), st.lists(st.integers(0, 5), min_size=1, max_size=9), sizes)
@settings(max_examples=40, deadline=None)
def test_many_rows_are_the_rows_one_by_one(name, logs, size):
    cluster = load_cluster(name, gpus=144 * 64)
    n = np.array([2**log for log in logs])
    stride = n[::-1].copy()
    for op in OPERATIONS:
        whole = collective_seconds(cluster, op, size, place(cluster, n, stride))
        single = [seconds(cluster, op, size, int(a), int(b)) for a, b in zip(n, stride, strict=True)]
        assert np.allclose(whole, single, rtol=1e-12)


def test_a_thousand_ranks_differ_from_two():
    cluster = load_cluster("h100-sxm", gpus=1024)
    assert seconds(cluster, "all_gather", 1e6, 1024) > 50 * seconds(cluster, "all_gather", 1e6, 2)
    assert seconds(cluster, "barrier", 0, 1024) > 2 * seconds(cluster, "barrier", 0, 2)


def test_tensor_parallel_across_nodes_is_much_slower():
    cluster = load_cluster("h100-sxm", gpus=64)
    assert seconds(cluster, "all_reduce", 1e8, 8, stride=8) > 5 * seconds(cluster, "all_reduce", 1e8, 8)


def test_bytes_sent():
    assert bytes_sent_per_rank("all_reduce", 8, 4) == 12
    assert bytes_sent_per_rank("reduce_scatter", 8, np.array([1, 2, 8])).tolist() == [0, 4, 7]
    assert bytes_sent_per_rank("send", 8, np.array([1, 2])).tolist() == [0, 8]


def test_unknown_operation_is_refused():
    cluster = load_cluster("h100")
    with pytest.raises(FivefoldError, match="no collective 'alltoall'"):
        collective_seconds(cluster, "alltoall", 1, place(cluster, 2, 1))


# ----------------------------------------------------------------------------------------------- measured
def relative_errors() -> dict[tuple[str, str], list[float]]:
    """Predicted over measured seconds minus 1 for messages of 1 MiB and more, by cluster and source."""
    errors = defaultdict(list)
    with MEASURED.open() as stream:
        for row in csv.DictReader(stream):
            n, size = int(row["gpus"]), int(row["size_bytes"])
            if size < 1 << 20:
                continue
            measured = size * BUS_FACTOR[row["op"]](n) / (float(row["busbw_gb_per_s"]) * 1e9)
            predicted = seconds(load_cluster(row["cluster"], gpus=n), row["op"], size, n)
            errors[row["cluster"], row["source"]].append(predicted / measured - 1)
    return errors


def test_measured_bandwidths_are_reproduced(record_property):
    """Most constants were fitted to these rows, so this guards against regressions; it is no blind test.

    V100's cube mesh is the worst: groups of 5 and 6 wrap badly there and come out 2 to 3 times too fast.
    """
    errors = relative_errors()
    pooled = defaultdict(list)
    for (cluster, _), values in errors.items():
        pooled[cluster] += values
    medians = {cluster: float(np.median(np.abs(values))) for cluster, values in pooled.items()}
    record_property("median_absolute_error", medians)
    limits = {"h200-sxm": 0.03, "b200": 0.08, "a100-80g-sxm": 0.15, "aws-p6-b200": 0.12, "aws-p4d": 0.12}
    limits |= {"aws-p5": 0.20, "v100-sxm-32g": 0.30}
    assert medians.keys() == limits.keys()
    assert all(medians[cluster] < limit for cluster, limit in limits.items()), medians
    every = np.concatenate([np.abs(values) for values in pooled.values()])
    assert np.median(every) < 0.12


def test_fast_enough_for_a_search():
    """30 calls over 20,000 rows; 50 ms is the aim, twice that passes on a busy machine."""
    cluster = load_cluster("h100-sxm", gpus=1024)
    rng = np.random.default_rng(0)
    n = 2 ** rng.integers(0, 6, 20_000)
    placement = place(cluster, n, 2 ** rng.integers(0, 6, n.size))
    size = rng.uniform(1e3, 1e9, n.size)
    best = np.inf
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(30):
            collective_seconds(cluster, "all_reduce", size, placement)
        best = min(best, time.perf_counter() - start)
    assert best < 0.1


@pytest.mark.parametrize(
    ("system", "gpus", "nodes", "published"),
    [
        ("h100-sxm", 16, 2, (81e9, 90e9)),
        ("h100-sxm", 32, 4, (61e9, 61e9)),
        ("b200", 16, 2, (90e9, 91e9)),
        ("b200", 8, 8, (643e9, 740e9)),
    ],
)
def test_dispatch_of_tokens_is_as_fast_as_published(system, gpus, nodes, published) -> None:
    """DeepEP's README (V2): 8,192 tokens of 7,168 elements and eight choices, bf16 combine. Logical bandwidth: a copy
    for each node that is hit (for each rank, inside one), the own one counted in."""
    tokens = 8192 * 7168 * 2
    seconds = float(
        dispatch_seconds(load_cluster(system, gpus=gpus), tokens, 8, place(load_cluster(system, gpus=gpus), gpus, 1))[0]
    )
    copies = nodes * (1 - (1 - 1 / nodes) ** 8)
    assert 0.85 * published[0] < copies * tokens / seconds < 1.1 * published[1]


def test_dispatch_inside_a_node_is_an_exchange_of_the_copies() -> None:
    cluster = load_cluster("h100-sxm", gpus=8)
    group, tokens = place(cluster, 8, 1), 1e9
    copies = 8 * (1 - (7 / 8) ** 2)
    assert dispatch_seconds(cluster, tokens, 2, group) == pytest.approx(
        collective_seconds(cluster, "all_to_all", copies * tokens, group)
    )
    assert dispatch_seconds(cluster, tokens, 2, place(cluster, 1, 1)) == 0
