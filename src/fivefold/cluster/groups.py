"""Process groups: which ranks they hold and which links they cross.

Ranks run in Megatron's order tp-cp-ep-dp-pp, the first varying fastest, so every group is an arithmetic progression:
`n` ranks that are `stride` apart. What it crosses comes from its member list (rank // span), worst over all the groups
that tile the cluster.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from fivefold.cluster.spec import Algorithm, Cluster, Link
from fivefold.errors import FivefoldError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# NCCL's trees reach this share of the ring's bandwidth (NCCL src/graph/tuning.cc, from memory).
TREE_SHARE = 0.92
# Peers that NCCL's point-to-point kernels serve at once (from memory of NCCL's channel scheduling, not measured here).
PEERS_AT_ONCE = 8


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Where groups lie and what moving data in them costs. Arrays of one row per group; L levels of links.

    members: (L, rows) fewest members that any of the group's domains of that level holds.
    domains: (L, rows) domains of that level that the group touches, most over the groups.
    siblings: (L, rows) groups alike that share one domain, each with its own GPUs' share of the network.
    Costs, seconds and seconds per byte: `ring_*` one step between neighbours and one byte past the narrowest edge;
    `tree_*`, `hierarchical_*` and `in_network_*` a whole all-reduce; `edge_*` one message between neighbours;
    `all_to_all_*` one exchange; of one whose messages enter an innermost domain once and are relayed inside it,
    `relay_*` the part inside and `network_*` the part between; `root_*` everything into one rank.
    """

    n: Ints
    members: Ints
    domains: Ints
    siblings: Ints
    ring_s: Floats
    ring_s_per_byte: Floats
    tree_s: Floats
    tree_s_per_byte: Floats
    hierarchical_s: Floats
    hierarchical_s_per_byte: Floats
    in_network_s: Floats
    in_network_s_per_byte: Floats
    edge_s: Floats
    edge_s_per_byte: Floats
    all_to_all_s: Floats
    all_to_all_s_per_byte: Floats
    relay_s_per_byte: Floats
    network_s_per_byte: Floats
    root_s: Floats
    root_s_per_byte: Floats

    def take(self, index: ArrayLike) -> Placement:
        """The rows at `index`, in its order."""
        at = np.asarray(index)
        return Placement(**{name: getattr(self, name)[..., at] for name in self.__struct_fields__})

    @property
    def level(self) -> Ints:
        """Index of the outermost link that the group crosses; -1 for a group of one."""
        crosses = np.vstack([self.n[None] > 1, self.domains[:-1] > 1])
        return np.where(self.n > 1, crosses.sum(axis=0) - 1, -1)


@lru_cache(maxsize=1 << 16)
def crossing(n: int, stride: int, span: int, world: int) -> tuple[int, int]:
    """Fewest members in one domain and most domains, over all groups of `n` ranks `stride` apart.

    Groups that start at the same offset in a domain are split alike, so at most `span` member lists are looked at.
    """
    if n == 1 or span >= world:
        return n, 1
    blocks = np.arange(0, world, n * stride, dtype=np.int64) % span
    offsets = np.arange(min(stride, span))
    starts = np.unique((np.unique(blocks)[:, None] + offsets) % span)
    domain = (starts[:, None] + np.arange(n, dtype=np.int64) * stride) // span
    first = np.ones(domain.shape, dtype=bool)
    first[:, 1:] = domain[:, 1:] != domain[:, :-1]
    runs = np.diff(np.append(np.flatnonzero(first), first.size))
    return int(runs.min()), int(first.sum(axis=1).max())


def place(cluster: Cluster, n: ArrayLike, stride: ArrayLike) -> Placement:
    """Placement of groups of `n` ranks, `stride` apart (integers or arrays); one row per element.

    Raises FivefoldError when groups of that size and stride do not tile the cluster.
    """
    sizes, strides = np.broadcast_arrays(
        np.atleast_1d(np.asarray(n, np.int64)), np.atleast_1d(np.asarray(stride, np.int64))
    )
    if sizes.size == 1:
        return _place_one(_network(cluster), int(sizes.flat[0]), int(strides.flat[0]))
    pairs, inverse = np.unique(sizes * (1 << 31) + strides, return_inverse=True)
    return _place_unique(_network(cluster), pairs >> 31, pairs & ((1 << 31) - 1)).take(inverse.reshape(-1))


class Network(NamedTuple):
    """What placement needs of a cluster, hashable so that single groups can be remembered."""

    links: tuple[Link, ...]
    algorithms: tuple[Algorithm, ...]
    gpus: int
    gpus_per_node: int
    spans: tuple[int, ...]


def _network(cluster: Cluster) -> Network:
    return Network(cluster.links, cluster.algorithms, cluster.gpus, cluster.gpus_per_node, cluster.spans)


@lru_cache(maxsize=4096)
def _place_one(network: Network, n: int, stride: int) -> Placement:
    """One group alone, remembered: an estimate of one layout asks for the same few again and again."""
    return _place_unique(network, np.array([n], np.int64), np.array([stride], np.int64))


def _place_unique(cluster: Network, n: Ints, stride: Ints) -> Placement:
    world = cluster.gpus
    wrong = (n < 1) | (stride < 1)
    wrong |= np.where(n > 1, world % np.maximum(n * stride, 1) != 0, False)
    if wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        raise FivefoldError(
            f"Groups of {n[at]} ranks {stride[at]} apart do not tile {world} GPUs: size x stride must divide the "
            f"number of GPUs. Choose degrees whose product divides {world}, or another number of GPUs.",
            code="group-does-not-tile",
            option="--gpus",
            value=world,
        )
    pairs = list(zip(n.tolist(), stride.tolist(), strict=True))
    cut = [[crossing(size, step, span, world) for size, step in pairs] for span in cluster.spans]
    members, domains = np.moveaxis(np.array(cut, np.int64).reshape(len(cluster.spans), len(pairs), 2), 2, 0)
    spans = np.array(cluster.spans, np.int64)[:, None]
    siblings = np.maximum(spans // members, 1)
    return Placement(n=n, members=members, domains=domains, siblings=siblings, **_costs(cluster, n, members, domains))


def _costs(cluster: Network, n: Ints, members: Ints, domains: Ints) -> dict[str, Floats]:
    """The cost columns of Placement. Sums and maxima over levels; each level costs what is moved between its parts.

    At level l the parts are the domains of level l-1 (single GPUs at level 0); a part drives as many GPUs' shares of
    the link as it has members.
    """
    rows = n.shape
    cost = {name: np.zeros(rows) for name in Placement.__struct_fields__[4:]}
    parts, width = n, np.ones(rows)
    inner_members = np.ones(rows)
    in_network = cluster.links[0].in_network and "in_network" in cluster.algorithms
    for level, link in enumerate(cluster.links):
        crosses = parts > domains[level]
        share = _share(link, members[level] if level == 0 else None)
        byte_s = np.where(crosses, 1 / (link.achieved_per_s * share * width), 0.0)
        step_s = np.where(crosses, link.latency_s, 0.0)
        ways = -(-parts // domains[level])  # parts joined inside one domain of this level

        edges = parts - np.where(domains[level] > 1, domains[level], 0)
        cost["ring_s"] += np.where(crosses, edges, 0) * link.latency_s / n
        np.maximum(cost["ring_s_per_byte"], byte_s, out=cost["ring_s_per_byte"])

        in_node = level == 0 or 0 < link.span <= cluster.gpus_per_node
        depth = (ways - 1) if in_node else np.ceil(np.log2(ways))  # NCCL: a chain inside the node, a tree across
        moved = 2 * (ways - 1) / ways * byte_s
        # Across nodes an inner rank of a double binary tree sends the tensor twice; between two nodes, once. The two
        # sockets of a node do not gain that: measured all-reduces over PCIe run at the ring's rate.
        times = moved if level == 0 else (2 if in_node else np.minimum(ways - 1, 2)) * byte_s
        climbed = times / TREE_SHARE
        cost["tree_s"] += 2 * depth * step_s
        np.maximum(cost["tree_s_per_byte"], climbed, out=cost["tree_s_per_byte"])
        cost["hierarchical_s"] += 2 * (ways - 1) * step_s
        cost["hierarchical_s_per_byte"] += moved
        if in_network:
            _add_in_network(cost, link, level, ways, crosses, share * width, climbed, depth)
            if level and not link.in_network and "tree" not in cluster.algorithms:
                cost["in_network_s"][crosses] = np.inf  # nothing to carry the reduced parts across

        _add_exchanges(cost, link, level, members[level], inner_members, n, crosses, share)

        parts, width, inner_members = domains[level], members[level], members[level]
    usable = {*cluster.algorithms} if in_network else {*cluster.algorithms} - {"in_network"}
    for algorithm in {"tree", "hierarchical", "in_network"} - usable:
        cost[f"{algorithm}_s"] = np.full(rows, np.inf)
    return cost


def _share(link: Link, members: Ints | None) -> Floats | float:
    """Share of its bandwidth that a group reaches: less than 1 where GPUs are wired pairwise and peers are few."""
    if members is None or not link.peer_bandwidth_per_s:
        return 1.0
    return np.minimum(1.0, np.maximum(members - 1, 1) * link.peer_bandwidth_per_s / link.bandwidth_per_s)


def _add_exchanges(
    cost: dict[str, Floats],
    link: Link,
    level: int,
    members: Ints,
    inner_members: Ints | Floats,
    n: Ints,
    crosses: NDArray[np.bool_],
    share: Floats | float,
) -> None:
    """What every rank's own messages cost on one level: to a neighbour, to all others, into one rank."""
    own_byte_s = np.where(crosses, 1 / (link.achieved_per_s * share), 0.0)
    step_s = np.where(crosses, link.latency_s, 0.0)
    np.maximum(cost["edge_s"], step_s, out=cost["edge_s"])
    np.maximum(cost["edge_s_per_byte"], own_byte_s / _alone(link, level, inner_members), out=cost["edge_s_per_byte"])

    # The network card carries all that leaves the inner domain, also what goes on to outer levels.
    leaving = (members - inner_members) / n if level == 0 else (n - inner_members) / n
    exchange_s = np.where(crosses, leaving / (link.all_to_all_per_s * share), 0.0)
    np.maximum(cost["all_to_all_s_per_byte"], exchange_s, out=cost["all_to_all_s_per_byte"])
    if level == 0:
        cost["relay_s_per_byte"] += np.where(crosses, (1 - 1 / members) / (link.all_to_all_per_s * share), 0.0)
    else:
        np.maximum(cost["network_s_per_byte"], exchange_s, out=cost["network_s_per_byte"])
    cost["all_to_all_s"] += np.ceil((members - inner_members) / PEERS_AT_ONCE) * step_s
    np.maximum(cost["root_s_per_byte"], leaving * own_byte_s, out=cost["root_s_per_byte"])
    np.maximum(cost["root_s"], step_s, out=cost["root_s"])


def _alone(link: Link, level: int, inner_members: Ints | Floats) -> Floats:
    """How many GPUs' shares of a network the one message has that leaves a domain for its group's next member: those of
    all members there, up to a whole card."""
    if level == 0 or not link.cards:
        return np.ones(1)
    whole_card = max(link.card_bits_per_s / 8 / link.bandwidth_per_s, 1.0)
    return np.clip(np.asarray(inner_members, np.float64), 1.0, whole_card)


def _add_in_network(
    cost: dict[str, Floats],
    link: Link,
    level: int,
    ways: Ints,
    crosses: NDArray[np.bool_],
    width: Floats,
    climbed: Floats,
    depth: Ints | Floats,
) -> None:
    """All-reduce with switches that reduce at the innermost level, trees (or switches again) across.

    NVLink switches: every GPU serves its whole tensor to the reductions and then multicasts its own part, so (1 + 1/n)
    tensors leave it; this reproduces the measured bandwidths of 5, 6, 7 and 8 GPUs with one efficiency.
    """
    if level == 0:
        once = np.where(crosses, (1 + 1 / ways) / (link.in_network_per_s * width), 0.0)
        cost["in_network_s"] += np.where(crosses, 2 * link.latency_s + link.in_network_latency_s, 0.0)
    elif link.in_network:
        once = np.where(crosses, 1 / (link.in_network_per_s * width), 0.0)
        cost["in_network_s"] += np.where(crosses, 2 * link.latency_s + link.in_network_latency_s, 0.0)
    else:
        once = climbed
        cost["in_network_s"] += 2 * depth * np.where(crosses, link.latency_s, 0.0)
    np.maximum(cost["in_network_s_per_byte"], once, out=cost["in_network_s_per_byte"])
