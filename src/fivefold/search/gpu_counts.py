"""Numbers of GPUs that are worth trying, and a problem moved to another number of them."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from fivefold.cluster import Cluster
from fivefold.estimate import Problem

# Nodes per doubling: 4, 5, 6 and 7 eighths of a power of two.
_EIGHTHS = (4, 5, 6, 7)
_USUAL_NODE = 8  # GPUs: a domain of links may span many nodes


def round_numbers(most: int) -> list[int]:
    """Powers of two and three times them up to `most`, ascending: batches and blocks are likely to divide by these."""
    powers = [1 << power for power in range(most.bit_length())]
    return sorted(number for number in {*powers, *(3 * power for power in powers)} if number <= most)


def usual_counts(node: int, most: int) -> list[int]:
    """GPUs up to `most`: powers of two inside a node of `node`, then round numbers of whole nodes."""
    return [*_inside(node, most), *(node * nodes for nodes in round_numbers(most // node))]


def close_counts(node: int, most: int) -> Iterator[int]:
    """The same with nodes by quarters of a doubling, for an answer that is close to the least that would do."""
    doublings = range((most // node).bit_length())
    nodes = sorted({1, 2, 3, *(step << power for step in _EIGHTHS for power in doublings)})
    yield from _inside(node, most)
    yield from (node * number for number in nodes if node * number <= most)


def _inside(node: int, most: int) -> list[int]:
    return [1 << power for power in range(node.bit_length()) if 1 << power < node and 1 << power <= most]


def with_gpus(problem: Problem, gpus: int) -> Problem:
    """The same problem on another number of GPUs, in nodes of the cluster's kind."""
    return Problem(problem.model, resized(problem.cluster, gpus), problem.work, problem.runtime)


def resized(cluster: Cluster, gpus: int) -> Cluster:
    """The cluster with another number of GPUs. A node that was cut down to fewer GPUs grows back to its domain."""
    node = cluster.gpus_per_node
    if gpus > node and cluster.gpus <= node:
        domain = max(link.span for link in cluster.links) or node
        node = max(node, min(gpus, domain, _USUAL_NODE))
    return msgspec.structs.replace(cluster, gpus=gpus, gpus_per_node=min(node, gpus))
