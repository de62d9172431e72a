"""Boxes without an NVLink switch, meshes and tori, beside rings walked edge by edge and measured bandwidths."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from fivefold.cluster import collective_seconds, load_cluster, place


def walked_seconds_per_byte(groups: list[list[int]], x16_per_s: float, socket_per_s: float, per_socket: int) -> float:
    """One byte past every edge of all groups' rings at once, on the busiest resource.

    A card's own lanes carry one edge out and one in at a time (full duplex); the link between the two sockets carries,
    in each direction, every edge that crosses it.
    """
    lanes: Counter[tuple[int, str]] = Counter()
    between: Counter[tuple[int, int]] = Counter()
    for group in groups:
        for sender, receiver in zip(group, [*group[1:], group[0]], strict=True):
            lanes[sender, "out"] += 1
            lanes[receiver, "in"] += 1
            sockets = sender // per_socket, receiver // per_socket
            if sockets[0] != sockets[1]:
                between[sockets] += 1
    own = max(lanes.values()) / x16_per_s
    return max(own, max(between.values(), default=0) / socket_per_s)


@pytest.mark.parametrize("name", ["l40s", "rtx-4090", "a100-80g-pcie", "h100-pcie", "rtx-5090"])
@pytest.mark.parametrize(("n", "stride"), [(2, 1), (4, 1), (8, 1), (2, 4), (2, 2), (4, 2)])
def test_groups_share_the_link_between_the_sockets(name, n, stride):
    cluster = load_cluster(name)
    pcie, socket = cluster.links[0], cluster.links[1]
    starts = [block + offset for block in range(0, 8, n * stride) for offset in range(stride)]
    groups = [[start + stride * step for step in range(n)] for start in starts]
    expected = walked_seconds_per_byte(groups, pcie.achieved_per_s, 4 * socket.achieved_per_s, per_socket=4)
    assert place(cluster, n, stride).ring_s_per_byte[0] == pytest.approx(expected)


def bus_bandwidth(name: str, n: int, size: int, gpus: int | None = None) -> float:
    """As nccl-tests count it, GB/s, for an all-reduce of `size` bytes over the first n GPUs."""
    seconds = collective_seconds(load_cluster(name, gpus=gpus), "all_reduce", size, place(load_cluster(name), n, 1))
    return 2 * (n - 1) / n * size / float(seconds[0]) / 1e9


@pytest.mark.parametrize(
    ("name", "n", "size", "measured"),
    [
        ("rtx-5090", 8, 8 << 30, 28),  # nccl issue 1639
        ("rtx-5090", 4, 8 << 30, 35),  # the same
        ("mi300x", 8, 4 << 30, 312.9),  # ml-engineering, network page
        ("mi300x", 2, 4 << 30, 47.7),  # the same
        ("h800-sxm", 8, 1 << 30, 215),  # nccl issue 1374
        ("a100-80g-pcie", 8, 1 << 30, 12.5),  # SimuMax a100_pcie fits
    ],
)
def test_bandwidths_are_those_measured(name, n, size, measured):
    assert bus_bandwidth(name, n, size) == pytest.approx(measured, rel=0.10)


def test_without_peer_to_peer_and_without_nvlink_costs_what_it_should():
    size = 256 << 20
    order = ["rtx-4090", "l40s", "rtx-5090", "h100-pcie", "a100-80g-sxm", "h100-sxm", "b200"]
    bandwidths = [bus_bandwidth(name, 4, size) for name in order]
    assert bandwidths == sorted(bandwidths)
    # Across the sockets every PCIe box falls; an NVSwitch node does not.
    for name in ("l40s", "h100-pcie", "rtx-4090"):
        assert bus_bandwidth(name, 8, size) < 0.9 * bus_bandwidth(name, 4, size)


@pytest.mark.parametrize("name", ["a100-80g-pcie", "h100-pcie", "rtx-3090", "rtx-a6000"])
def test_bridges_join_pairs_only(name):
    size = 256 << 20
    plain, bridged = (bus_bandwidth(each, 2, size) for each in (name, f"{name}-nvlink"))
    assert bridged > 2 * plain
    # Over the whole node the sockets bind, bridges or not.
    assert bus_bandwidth(f"{name}-nvlink", 8, size) == pytest.approx(bus_bandwidth(name, 8, size), rel=0.15)
    assert load_cluster(f"{name}-nvlink").links[0].span == 2


@pytest.mark.parametrize(("name", "pod", "axes", "port"), [("tpu-v5e", 256, 2, 50e9), ("tpu-v6e", 256, 2, 100e9)])
def test_tori(name, pod, axes, port):
    """One axis has two ports; the pod's bisection, from its geometry, is what an all-to-all is held to."""
    cluster = load_cluster(name, gpus=2 * pod)
    ici, dcn = cluster.links
    assert (ici.span, dcn.span) == (pod, 0) and ici.bandwidth_per_s == 2 * port
    side = round(pod ** (1 / axes))
    bisection = 2 * side ** (axes - 1) * port  # a wrapped axis is cut twice; bytes per second, one direction
    crossing_per_byte = (pod / 2) * 0.5  # half of what a chip of one half sends goes to the other
    assert ici.all_to_all_per_s == pytest.approx(bisection / crossing_per_byte * ici.efficiency)
    inside, across = place(cluster, pod, 1), place(cluster, 2 * pod, 1)
    assert across.ring_s_per_byte[0] >= inside.ring_s_per_byte[0]
    assert place(cluster, 2, pod).ring_s_per_byte[0] == pytest.approx(1 / dcn.achieved_per_s)


def test_the_link_between_sockets_carries_what_goes_to_other_nodes_too() -> None:
    """An exchange of 16 ranks on two boxes of two sockets: all but what stays on the own socket leaves it."""
    box = load_cluster("l40s", gpus=16)
    pcie, socket, network = (link.all_to_all_per_s for link in box.links)
    slow = msgspec.structs.replace(box.links[1], bandwidth_per_s=box.links[1].bandwidth_per_s / 1000)
    cluster = msgspec.structs.replace(box, links=(box.links[0], slow, box.links[2]))
    assert place(cluster, 16, 1).all_to_all_s_per_byte[0] == pytest.approx((16 - 4) / 16 / (socket / 1000))
    assert place(box, 16, 1).all_to_all_s_per_byte[0] == pytest.approx(
        max(3 / 16 / pcie, 12 / 16 / socket, 8 / 16 / network)
    )
