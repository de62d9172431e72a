"""Seconds of collective operations: latency plus bytes over bandwidth, cheapest algorithm taken.

Sizes: all_reduce, ring_all_reduce, broadcast and reduce the tensor; all_gather the gathered output; reduce_scatter the
input; gather and scatter the total at the root; all_to_all one rank's whole send buffer, its own part included; send
the message. The latency of rings follows NCCL's tuning model: of the steps around the ring, those over a node boundary
cost the network's latency and the others the inner link's, so it grows with the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fivefold.cluster.groups import Placement
from fivefold.cluster.spec import Cluster
from fivefold.errors import FivefoldError

Floats = NDArray[np.floating[Any]]
Seconds = Floats | float


def _ring_all_reduce(p: Placement, size: Floats) -> Floats:
    steps = p.n - 1.0
    return 2.0 * steps * (p.ring_s + p.ring_s_per_byte / p.n * size)


def _tree_all_reduce(p: Placement, size: Floats) -> Floats:
    return p.tree_s + p.tree_s_per_byte * size


def _hierarchical_all_reduce(p: Placement, size: Floats) -> Floats:
    return p.hierarchical_s + p.hierarchical_s_per_byte * size


def _in_network_all_reduce(p: Placement, size: Floats) -> Floats:
    return p.in_network_s + p.in_network_s_per_byte * size


def _ring_gather(p: Placement, size: Floats) -> Floats:
    """All-gather, and reduce-scatter, which is the same ring the other way round."""
    return (p.n - 1.0) * (p.ring_s + p.ring_s_per_byte / p.n * size)


def _ring_broadcast(p: Placement, size: Floats) -> Floats:
    return (p.n - 1.0) * p.ring_s + p.ring_s_per_byte * size


def _tree_broadcast(p: Placement, size: Floats) -> Floats:
    """Half of an all-reduce's way through the tree; every edge carries the whole tensor."""
    return 0.5 * p.tree_s + np.maximum(p.ring_s_per_byte, 0.5 * p.tree_s_per_byte) * size


def _through_root(p: Placement, size: Floats) -> Floats:
    return p.root_s + p.root_s_per_byte * size


def _all_to_all(p: Placement, size: Floats) -> Floats:
    return p.all_to_all_s + p.all_to_all_s_per_byte * size


def _send(p: Placement, size: Floats) -> Floats:
    return p.edge_s + p.edge_s_per_byte * size


_Table = dict[str, Callable[[Placement, Floats], Floats]]

_ALL_REDUCE: _Table = {
    "ring": _ring_all_reduce,
    "tree": _tree_all_reduce,
    "hierarchical": _hierarchical_all_reduce,
    "in_network": _in_network_all_reduce,
}
_ROOTED: _Table = {"ring": _ring_broadcast, "tree": _tree_broadcast}

# Which algorithms each operation has. Rings always exist; the others as Cluster.algorithms allows (an algorithm that
# is not allowed has infinite cost in the placement).
OPERATIONS: dict[str, _Table] = {
    "all_reduce": _ALL_REDUCE,
    "ring_all_reduce": {"ring": _ring_all_reduce},
    "all_gather": {"ring": _ring_gather},
    "reduce_scatter": {"ring": _ring_gather},
    "broadcast": _ROOTED,
    "reduce": _ROOTED,
    "gather": {"direct": _through_root},
    "scatter": {"direct": _through_root},
    "all_to_all": {"direct": _all_to_all},
    "send": {"direct": _send},
    "barrier": _ALL_REDUCE,
}
# Bytes that the busiest rank sends, in units of the operation's size, for n ranks (n >= 2): ring algorithms.
_SENT: dict[str, Callable[[Floats], Seconds]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "ring_all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "broadcast": lambda n: np.where(n > 1, 1.0, 0.0),
    "reduce": lambda n: np.where(n > 1, 1.0, 0.0),
    "gather": lambda n: np.where(n > 1, 1 / n, 0.0),
    "scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "send": lambda n: np.where(n > 1, 1.0, 0.0),
    "barrier": lambda n: 0 * n,
}


def _lookup(table: Mapping[str, object], op: str) -> None:
    if op not in table:
        raise FivefoldError(
            f"There is no collective {op!r}. Choose one of {', '.join(table)}.",
            code="unknown-collective",
            option="op",
            value=op,
            legal=list(table),
        )


def collective_seconds(cluster: Cluster, op: str, size_bytes: ArrayLike, placement: Placement) -> Floats:
    """Seconds of one collective, by row of `placement`; `size_bytes` as the module's docstring says.

    The result has the shape of `placement.n` and `size_bytes` broadcast. A group of one costs nothing.
    Raises FivefoldError for an unknown operation.
    """
    _lookup(OPERATIONS, op)
    size = np.zeros(1) if op == "barrier" else np.asarray(size_bytes, np.float64)
    candidates = iter(OPERATIONS[op].values())
    best: Floats = next(candidates)(placement, size)
    for algorithm in candidates:
        best = np.minimum(best, algorithm(placement, size))
    return best + cluster.launch_s * (placement.n > 1)


def dispatch_seconds(cluster: Cluster, token_bytes: ArrayLike, choices: int, placement: Placement) -> Floats:
    """Seconds to send every token to `choices` ranks drawn at random, or back, by DeepEP's way: once to each innermost
    domain that holds one of them, and inside it once to each of them.

    token_bytes: one copy of all tokens of a rank. The two parts run side by side, so that the slower one counts (DeepEP
    README, "NVLink and RDMA forwarding": 81 to 90 GB/s with two nodes and 61 with four, the local node's part counted
    in, which is 45 of a 400 Gb/s card's 50).
    """
    ranks, domains = placement.n.astype(float), placement.domains[0].astype(float)
    size = np.asarray(token_bytes, np.float64)
    inside = size * drawn(ranks, choices) * placement.relay_s_per_byte
    between = size * drawn(domains, choices) * placement.network_s_per_byte
    return np.maximum(inside, between) + placement.all_to_all_s + cluster.launch_s * (placement.n > 1)


def drawn(places: ArrayLike, choices: int) -> Floats:
    """How many of `places` are hit by `choices` draws with equal chances, expected."""
    n = np.asarray(places, np.float64)
    return n * (1 - (1 - 1 / n) ** choices)


def bytes_sent_per_rank(op: str, size_bytes: ArrayLike, n: ArrayLike) -> Floats:
    """Bytes that the rank which sends most puts on its link (ring algorithms), arrays or scalars broadcast."""
    _lookup(_SENT, op)
    return np.asarray(size_bytes, np.float64) * _SENT[op](np.asarray(n, np.float64))
