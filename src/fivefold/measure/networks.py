"""What a published network says of the link between nodes: cards and their rate, a node's rate, or a generation."""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec

from fivefold.cluster import Cluster

# Gb/s of one card (4 lanes) by its generation: InfiniBand's, Cornelis', HPE's (vendors' datasheets, from memory).
_GENERATIONS: dict[str, int] = {
    "XDR": 800, "NDR200": 200, "NDR": 400, "HDR100": 100, "HDR": 200, "EDR": 100, "FDR": 56, "QDR": 40,
    "OMNI-PATH": 100, "OMNIPATH": 100, "OPA": 100, "SLINGSHOT-10": 100, "SLINGSHOT": 200,
}  # fmt: skip
_NAMES = "|".join(_GENERATIONS)
_BITS = r"\s*(?:Gbps|Gb/s|Gbit/s|gbps|Gb|G)\b"
_WORDS = r"(?:[\w/-]+\s+){0,3}?"
_CARDS = r"(?i:NIC|card|HCA|adapter|rail|EFA)s?\b"
_EACH = r"(?:per|/)\s*(?i:GPU|HPU|NPU|Gaudi|chip|accelerator|device)\b"  # what a rank runs on

# Gb/s: the most that a rate of no stated owner is taken to be a node's only card at, and the most of any one card.
_ONLY_CARD, _FASTEST_CARD = 100, 800
# No card is so many times as fast as the one that a GPU's reference node has: such a rate is several cards' together.
_CARDS_AT_LEAST = 4
_RAILS = {"single": 1, "dual": 2, "quad": 4}

# How people write the same: "8×400G", "8*400G", "four 100 Gb/s NICs".
_COUNTS = {"one": 1, "single": 1, "two": 2, "dual": 2, "four": 4, "quad": 4, "eight": 8}
_COUNT = re.compile(rf"\b({'|'.join(_COUNTS)})[ -](?!rail)(?=[^;,+]{{0,24}}\b{_CARDS})", re.IGNORECASE)
# The torus of a TPU pod is no network between nodes.
_TORUS = re.compile(r"\bICI\b(?:[^;,+]|(?<=\d),(?=\d))*")

Rate = Callable[[re.Match[str], Cluster], float]  # bytes per second of one GPU


def _cards(found: re.Match[str], cluster: Cluster) -> float:
    return int(found["cards"]) * float(found["rate"]) * 1e9 / 8 / cluster.gpus_per_node


def _cards_in_bytes(found: re.Match[str], cluster: Cluster) -> float:
    return int(found["cards"]) * float(found["rate"]) * 1e9 / cluster.gpus_per_node


def _cards_of_generation(found: re.Match[str], cluster: Cluster) -> float:
    return int(found["cards"]) * _GENERATIONS[found["name"].upper()] * 1e9 / 8 / cluster.gpus_per_node


def _node(found: re.Match[str], cluster: Cluster) -> float:
    return float(found["rate"]) * 1e9 / 8 / cluster.gpus_per_node


def _node_in_tera(found: re.Match[str], cluster: Cluster) -> float:
    return float(found["rate"]) * 1e12 / 8 / cluster.gpus_per_node


def _gpu(found: re.Match[str], cluster: Cluster) -> float:
    return float(found["rate"]) * 1e9 / 8


def _node_in_bytes(found: re.Match[str], cluster: Cluster) -> float:
    return float(found["rate"]) * 1e9 / cluster.gpus_per_node


def _gpu_in_bytes(found: re.Match[str], cluster: Cluster) -> float:
    return float(found["rate"]) * 1e9


def _cards_of_gpu(found: re.Match[str], cluster: Cluster) -> float:
    return int(found["cards"]) * float(found["rate"]) * 1e9 / 8


def _generation(found: re.Match[str], cluster: Cluster) -> float:
    """As many cards as the reference node has, of the named generation."""
    link = cluster.links[-1]
    own = link.bandwidth_per_s
    return own * _GENERATIONS[found["name"].upper()] * 1e9 / link.card_bits_per_s if link.cards else own


def _small_is_the_nodes(found: re.Match[str], cluster: Cluster) -> float:
    """A rate of no stated owner: that of a node's only card where it is slower than any card of a GPU's own, and of a
    whole node where it is faster."""
    rate, link = float(found["rate"]), cluster.links[-1]
    several = rate > _FASTEST_CARD or (link.card_bits_per_s and rate * 1e9 >= _CARDS_AT_LEAST * link.card_bits_per_s)
    return _node(found, cluster) if rate <= _ONLY_CARD or several else link.bandwidth_per_s


def _rails(found: re.Match[str], cluster: Cluster) -> float:
    return _RAILS[found["rails"].lower()] * _GENERATIONS[found["name"].upper()] * 1e9 / 8 / cluster.gpus_per_node


# (pattern, rate), the first that is found counts. Bits have a small b: GB/s are NVLink's.
_RATES: tuple[tuple[str, Rate], ...] = (
    (rf"(?<!\d)(?P<cards>\d{{1,3}})\s*x\s*(?P<rate>\d{{2,3}})\s*G(?!B)\S*\s+{_WORDS}{_EACH}", _cards_of_gpu),
    (
        r"(?<!\d)(?P<cards>\d{1,3})\s*x\s*(?P<rate>\d{2,3}(?:\.\d)?)\s*GB/?p?s(?![^;,+]{0,20}NVLink)",
        _cards_in_bytes,
    ),
    (r"(?<!\d)(?P<cards>\d{1,3})\s*x\s*(?P<rate>\d{2,3})\s*G(?!B/?p?s)", _cards),
    (r"(?i)(?<!\d)(?P<cards>\d{1,3})\s*x\s*Omni-Path\s*(?P<rate>\d{3})", _cards),
    (r"(?i)(?<!\d)(?P<cards>\d{1,3})\s*x\s*(?:IB\s*|InfiniBand\s*)?[HNEX]DR[- ]?(?P<rate>\d{3})", _cards),
    (rf"(?i)(?<!\d)(?P<cards>\d{{1,3}})\s*x\s*(?:IB\s*|InfiniBand\s*)?(?P<name>{_NAMES})", _cards_of_generation),
    (rf"(?i)\b(?P<name>{_NAMES})\s*x\s*(?P<cards>\d{{1,2}})\b", _cards_of_generation),
    (r"(?<![\d.])(?P<rate>\d{2,3})\s*G(?!B)(?:b\S*|bE)?\s*x\s*(?P<cards>\d{1,2})(?!\d)", _cards),
    (
        rf"(?<![\d.])(?P<cards>\d{{1,2}})[ -](?:IB |InfiniBand )?{_CARDS}[^;,+]{{0,6}}?\b(?P<rate>\d{{2,3}})\s*G(?!B)",
        _cards,
    ),
    (
        rf"(?i)(?<![\d.])(?P<cards>\d{{1,2}})\s+(?P<name>{_NAMES})[- ]?(?:\d{{3}})?\s+{_WORDS}{_CARDS}",
        _cards_of_generation,
    ),
    (rf"(?i)\b(?P<rails>single|dual|quad)[- ]rail\W.{{0,20}}?(?P<name>{_NAMES})", _rails),
    (rf"(?i)(?<![.\d])(?P<cards>1)\s*(?:NIC|card).{{0,20}}(?P<name>{_NAMES})", _cards_of_generation),
    (rf"(?P<rate>\d{{2,4}}){_BITS}.*\b(?P<cards>\d{{1,3}}) (?:NIC|card|HCA)s?\b", _cards),
    (rf"(?<![\d.-])(?P<cards>\d{{1,2}})\s+(?P<rate>\d{{2,3}})[ -]?G(?!B)\S*\s+{_WORDS}{_CARDS}", _cards),
    (r"(?P<rate>\d{3,4})\s*Gbps node", _node),
    (r"(?i)inter[- ]?node (?P<rate>\d{2,4})\s*(?:Gbps|Gb/s)", _node),
    (rf"(?P<rate>\d{{2,4}}){_BITS}\s*{_WORDS}{_EACH}", _gpu),
    (rf"(?P<rate>\d{{2,4}}){_BITS}\s*{_WORDS}(?:per|/)\s*(?:node|host)", _node),
    (rf"(?<![\d.])(?P<rate>\d{{1,3}}(?:\.\d)?)\s*GB/?p?s\s*{_WORDS}(?:per|/)\s*(?:node|host)", _node_in_bytes),
    (
        rf"(?i)\b(?:IB|InfiniBand|RoCE|network)\W[^;,+]{{0,16}}?(?P<rate>\d{{1,3}}(?:\.\d)?)\s*GB/?p?s\s*{_WORDS}{_EACH}",
        _gpu_in_bytes,
    ),
    (r"(?P<rate>\d(?:\.\d+)?)\s*(?:Tbps|Tb/s|Tbit/s)", _node_in_tera),
    (r"(?i)(?P<rate>\d{1,3})\s*(?:GbE|GigE)\b", _small_is_the_nodes),
    (rf"(?P<rate>\d{{1,3}}){_BITS}\s*(?:Ethernet|TCP|VPC)", _node),
    (r"(?i)Ethernet\W{0,3}(?P<rate>\d{1,3})\s*G(?!B)", _node),
    (rf"(?i)\b(?P<name>{_NAMES})(?![A-Z])", _generation),
    (r"(?<![\d.])(?P<rate>\d{2,4})\s*(?:Gbps|Gb/s|Gbit/s|gbps)\b", _small_is_the_nodes),
    (r"(?<![\w.-])(?P<rate>\d{2,3})\s*G(?![\w/])", _small_is_the_nodes),
)


def _cards_of(found: re.Match[str], rate: Rate, cluster: Cluster) -> int:
    """Cards of a node as the words count them, 0 where they do not."""
    words = found.groupdict()
    if rate in (_cards, _cards_in_bytes, _cards_of_generation):
        return int(words["cards"])
    if rate is _rails:
        return _RAILS[words["rails"].lower()]
    if rate is _small_is_the_nodes:
        return 1 if float(words["rate"]) <= _ONLY_CARD else cluster.links[-1].cards
    return cluster.links[-1].cards if rate is _generation else 0


def with_network(cluster: Cluster, text: str) -> Cluster:
    """The cluster with the stated network's rate in place of its reference design's."""
    text = _COUNT.sub(lambda found: f"{_COUNTS[found[1].lower()]} ", _TORUS.sub(" ", text))
    text = re.sub(r"(?<=\d)\s*[*\u00d7]\s*(?=[\dA-Z])", "x ", text)
    for pattern, rate in _RATES:
        found = re.search(pattern, text)
        per_s = rate(found, cluster) if found else 0.0
        if per_s:
            cards = _cards_of(found, rate, cluster) if found else 0
            bits_per_s = per_s * 8 * cluster.gpus_per_node / cards if cards else 0.0
            outermost = msgspec.structs.replace(
                cluster.links[-1], bandwidth_per_s=per_s, cards=cards, card_bits_per_s=bits_per_s
            )
            return msgspec.structs.replace(cluster, links=(*cluster.links[:-1], outermost))
    return cluster
