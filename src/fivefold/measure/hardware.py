"""From a published GPU and network to a cluster of the catalogue."""

from __future__ import annotations

import re
from itertools import pairwise

import msgspec

from fivefold.cluster import Cluster, aliases, clusters, load_cluster, load_curve_of
from fivefold.errors import FivefoldError
from fivefold.measure.chips import CHIPS
from fivefold.measure.frameworks import Framework
from fivefold.measure.networks import with_network
from fivefold.measure.runs import Run
from fivefold.measure.unstated import dated

# (system, pattern in the published network) -> the catalogue's system with that network.
_NETWORKS: tuple[tuple[str, str, str], ...] = (
    ("h100-sxm", r"EFA|\bp5\b", "aws-p5"),
    ("a100-40g-sxm", r"EFA|\bp4d\b", "aws-p4d"),
    ("a100-80g-sxm", r"EFA|\bp4de\b", "aws-p4de"),
    ("h200-sxm", r"EFA|\bp5en\b", "aws-p5en"),
    ("b200", r"EFA", "aws-p6-b200"),
    ("b300", r"EFA", "aws-p6-b300"),
    ("h100-sxm", r"TCPXO", "gcp-a3-megagpu"),
    ("h100-sxm", r"TCPX\b", "gcp-a3-highgpu"),
)
# Nodes of clouds without a system of their own: their network (vendors' pages, from memory).
_NODES = ((r"\bp3\.8", "10 Gbps per node"), (r"\bg5\.24", "50 Gbps per node"), (r"\bg6e\.24", "200 Gbps per node"))
# Devices that a chip of these counts as, where nodes have so many times more than chips (from memory).
_CORES = {"trainium": (2,), "trainium2": (4, 8), "trainium3": (4, 8)}
# Cards of two dies, whose memory a name has where the catalogue has one die's.
_OF_TWO_DIES = ("mi250x-gcd", "mi250-gcd", "ascend-910c-die", "max-1550-tile")
_SHARE_OF_TWO = 0.15
# Cards of which the name alone means the SXM module, where the row's links are PCIe's.
_ON_PCIE = {
    "a100-40g-sxm": "a100-40g-pcie",
    "a100-80g-sxm": "a100-80g-pcie",
    "a800-80g-sxm": "a100-80g-pcie",
    "h100-sxm": "h100-pcie",
    "h800-sxm": "h100-pcie",
    "v100-sxm-16g": "v100-pcie-16g",
    "v100-sxm-32g": "v100-pcie-32g",
    "p100-sxm": "p100-pcie",
}
_NO_NVLINK = r"\b(?:no|without|w/o) NVLink\b(?! (?:across|between|beyond|outside))"
# GPUs of a board without a switch, where nodes of several have so many; links then join each pair.
_UNSWITCHED = 4
# Of the gigabytes in a card's name, what the driver leaves, in GiB (79.2 of 80, 39.5 of 40). A name that differs little
# from the catalogue means its card; one that differs by more than a factor means another memory: a GH200's 480 GB.
_USABLE, _SAME_MEMORY, _LEAST, _MOST = 0.988, 0.12, 0.4, 2.5
# "A10G" is a card, and "200Gb/s" a link.
_MEMORY = re.compile(r"(?<!\bA)(\d{2,3}) ?G(?:I?B)?\b(?! ?/ ?S)")
_CLOUDS = ("aws-", "gcp-", "azure-")
# The driver names a Grace Hopper by its processor's memory: "GH200 120GB" has 96 GB of its own (from memory).
_OF_THE_HOST = re.compile(r"(?<=GH200)\W*(?:120|240|480) ?GB?\b")
# An A100 of before this date had 40 GB: the 80 GB card was announced in November 2020.
_LARGER_A100 = "2021-01"
# FlashAttention 1's rates as fa2's over this. FlashAttention-2 (Dao 2023) reports 1.7 to 3.0 times FlashAttention 1 and
# 1.3 to 2.5 times its Triton version; 1.7 is what fits the shipped llm-foundry runs, whose error is so not blind to it.
_FA2_OVER_FA1 = 1.7


def cluster_of(run: Run, line: Framework, assumed: set[str]) -> Cluster:
    """The cluster of a row. Raises FivefoldError for a GPU that the catalogue lacks."""
    name = re.sub(r"(?<=\d)[ _](?=GI?B)", "", (run.gpu or "").upper())
    found = next(((system, guess) for pattern, system, guess in CHIPS if re.search(pattern, name)), None)
    found = found or _by_catalogue(name)
    if found is None:
        raise FivefoldError(f"the GPU {str(run.gpu)[:60]!r} is not in the catalogue", code="unknown-gpu", value=run.gpu)
    system, guessed = _of_cloud(run, found)
    if system == "a100-80g-sxm" and guessed and dated(run) < _LARGER_A100:
        system = "a100-40g-sxm"
    if _is_pcie(run):
        system = _ON_PCIE.get(system, system)
    if f"{system}-nvlink" in clusters() and _is_bridged(run):
        system = f"{system}-nvlink"
    if guessed:
        assumed.add("gpu")
    if not run.interconnect:
        assumed.add("interconnect")
    for base, pattern, other in _NETWORKS:
        if system == base and re.search(pattern, run.interconnect or ""):
            system = other
    if run.gpus_per_node is None:
        assumed.add("gpus_per_node")
    gpus = int(run.gpus or 1)
    per_node = None if run.gpus_per_node is None else min(run.gpus_per_node, gpus)
    cluster = with_network(_board(_node(system, gpus, per_node, assumed), run), _network(run))
    cluster = _of_cores(_with_memory(cluster, name), system)
    return with_kernel(cluster, _kernel(run, line, cluster.gpu.name), assumed)


def _of_cores(cluster: Cluster, system: str) -> Cluster:
    """The cluster with cores in place of its chips, where a node has as many times more as a chip has of them."""
    chips = load_cluster(system)
    cores = cluster.gpus_per_node // chips.gpus_per_node
    if cores not in _CORES.get(system, ()):
        return cluster
    gpu = cluster.gpu
    core = msgspec.structs.replace(
        gpu,
        memory_bytes=gpu.memory_bytes // cores,
        memory_bandwidth_per_s=gpu.memory_bandwidth_per_s / cores,
        peak_flops_per_s={name: peak / cores for name, peak in gpu.peak_flops_per_s.items()},
        sms=max(gpu.sms // cores, 1),
    )
    links = tuple(
        msgspec.structs.replace(link, bandwidth_per_s=link.bandwidth_per_s / cores)
        if link.bandwidth_per_s == of_chip.bandwidth_per_s  # a stated network is shared by all ranks of a node already
        else link
        for link, of_chip in zip(cluster.links, chips.links, strict=True)
    )
    return msgspec.structs.replace(cluster, gpu=core, links=links)


def _network(run: Run) -> str:
    """The published network, else that of a cloud's node whose name a row has in place of one."""
    known = (words for pattern, words in _NODES if re.search(pattern, run.gpu or ""))
    return run.interconnect or next(known, "")


def _of_cloud(run: Run, found: tuple[str, bool]) -> tuple[str, bool]:
    """The cloud's node that a row names beside its GPU ("H100 (a3-megagpu-8g)"), where it has such GPUs."""
    words = re.findall(r"[\w.-]+", f"{run.gpu} {run.interconnect}".lower())
    pairs = ("-".join(pair) for pair in pairwise(words))
    for name in (*words, *pairs):
        node = aliases().get(name.removeprefix("ml."), "")
        if node.startswith(_CLOUDS) and _same_gpu(node, found):
            return node, False
    return found


def _same_gpu(node: str, found: tuple[str, bool]) -> bool:
    """Whether a cloud's node has the GPUs that were found, or ones that differ in what was guessed of them."""
    system, guessed = found
    own, other = load_cluster(node).gpu.name, load_cluster(system).gpu.name
    return own == other or (guessed and own.partition("-")[0] == other.partition("-")[0])


def _kernel(run: Run, line: Framework, gpu: str) -> str:
    """The framework's attention kernel; of one that ran FlashAttention 1 on Ampere, its second release elsewhere unless
    a row names the Triton kernel, which is of the first one's kind."""
    older = "a100" in gpu or "triton" in (run.attention or "").lower()
    return line.kernel if line.kernel != "fa1" or older else "fa2"


def _node(system: str, gpus: int, per_node: int | None, assumed: set[str]) -> Cluster:
    """Nodes of so many GPUs, or the system's own where so many do not go with its bridges or sockets."""
    try:
        return load_cluster(system, gpus=gpus, gpus_per_node=per_node)
    except FivefoldError as error:
        if error.code != "bad-count":
            raise
        assumed.add("gpus_per_node")
        return load_cluster(system, gpus=gpus)


def _board(cluster: Cluster, run: Run) -> Cluster:
    """The cluster on boards of four modules, which have no NVSwitch but a third of each one's links to every other (HGX
    A100 and H100 of 4 GPUs, V100 nodes of 4; from memory). A single node of four may be half of a larger one."""
    inner = cluster.links[0]
    four = run.gpus_per_node == _UNSWITCHED < (run.gpus or 0)
    if not (four and inner.name == "nvlink" and inner.span == _UNSWITCHED and cluster.gpu.vendor == "nvidia"):
        return cluster
    pairs = msgspec.structs.replace(
        inner, peer_bandwidth_per_s=inner.bandwidth_per_s / (_UNSWITCHED - 1), in_network=False
    )
    return msgspec.structs.replace(cluster, links=(pairs, *cluster.links[1:]))


def _with_memory(cluster: Cluster, name: str) -> Cluster:
    """The cluster with the memory in a published name where it is not the catalogue's: "A100-64GB"."""
    found = _MEMORY.search(_OF_THE_HOST.sub(" ", name))
    if found is None:
        return cluster
    stated = int(int(found[1]) * _USABLE * 2**30)
    ratio = stated / cluster.gpu.memory_bytes
    if cluster.gpu.name in _OF_TWO_DIES and abs(ratio / 2 - 1) < _SHARE_OF_TWO:
        return cluster
    if not _LEAST < ratio < _MOST or abs(ratio - 1) < _SAME_MEMORY:
        return cluster
    return msgspec.structs.replace(cluster, gpu=msgspec.structs.replace(cluster.gpu, memory_bytes=stated))


def _by_catalogue(name: str) -> tuple[str, bool] | None:
    """A system of the catalogue by its own name or by a cloud's or a vendor's: "p4d.24xlarge"."""
    whole = name.strip().lower().replace(" ", "-").removeprefix("ml.")
    bare = re.sub(r"^(?:nvidia|amd|aws|intel|google)-+", "", whole)
    known = next((one for one in (whole, bare) if one in clusters() or one in aliases()), None)
    nodes = (word for word in re.findall(r"[\w.-]+", name.lower()) if aliases().get(word, "").startswith(_CLOUDS))
    known = known or next(nodes, None)
    return None if known is None else (known, False)


def _is_pcie(run: Run) -> bool:
    """Whether a row's links are PCIe's: said to be without NVLink, or said to be PCIe of a card whose form is not."""
    links = run.interconnect or ""
    if re.search("SXM|DGX|HGX", run.gpu or "", re.IGNORECASE):
        return False
    return bool(re.search(rf"PCIe only|{_NO_NVLINK}", links, re.IGNORECASE)) or bool(
        re.match(r"PCIe ?(Gen ?)?\d?(\.0)?( x16)?\s*($|[,;+/])", links, re.IGNORECASE)
    )


def _is_bridged(run: Run) -> bool:
    """Whether a row's cards, which PCIe joins, are said to have NVLink: bridges between two."""
    words = f"{run.gpu} {run.interconnect}"
    return "nvlink" in words.lower() and not re.search(_NO_NVLINK, words, re.IGNORECASE)


def with_kernel(cluster: Cluster, name: str, assumed: set[str]) -> Cluster:
    """The cluster with a compute curve on which whatever kernel the runtime picks has the framework's rates."""
    attention = load_curve_of(cluster).attention
    if not name or "fa2" not in attention:
        return cluster
    assumed.add("attention_kernel")
    rates = msgspec.to_builtins(attention["fa2"])
    if name == "fa1":
        for side in ("forward", "backward"):
            rates[side] = [rate / _FA2_OVER_FA1 for rate in rates[side]]
        rates["source"] = "FlashAttention 1: fa2's rates over a fitted ratio"
    changes = {**cluster.compute, "attention": dict.fromkeys(attention, rates)}
    return msgspec.structs.replace(cluster, compute=changes)
