"""Cluster: the GPU and the levels of links that join GPUs, innermost first. Every number has a source."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from fivefold.cluster.calibration import Calibration

Vendor = Literal["nvidia", "amd", "intel", "google", "huawei", "amazon"]
Algorithm = Literal["ring", "tree", "hierarchical", "in_network"]
# What NCCL chooses from. "hierarchical" (reduce-scatter inside a domain, all-reduce across, all-gather inside, one
# after the other) is for libraries that have it; NCCL does not, and measured multi-node bandwidths follow its ring.
NCCL_ALGORITHMS: tuple[Algorithm, ...] = ("ring", "tree", "in_network")

# Ranges that any real machine is far inside of; they keep hostile or mistyped files out. Bandwidths start at 1 MB/s and
# arithmetic at 1 GFLOP/s, so that 450 for 450 GB/s and 989 for 989 TFLOP/s are refused, not priced as years a step.
# Shares start at one in a million: less would make times that no float holds.
Bandwidth = Annotated[float, msgspec.Meta(ge=1e6, le=1e20)]
Flops = Annotated[float, msgspec.Meta(ge=1e9, le=1e20)]
Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
Fraction = Annotated[float, msgspec.Meta(ge=1e-6, le=1)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1)]
WorkRatio = Annotated[float, msgspec.Meta(ge=0.1, le=100)]
HostBytes = Annotated[int, msgspec.Meta(ge=1 << 20, le=1 << 50)]
Text = Annotated[str, msgspec.Meta(max_length=2000)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=100)]


class Gpu(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One GPU.

    memory_bytes: what the driver reports as the device's total, before any context or framework reserve.
    memory_bandwidth_per_s: bytes per second, datasheet.
    peak_flops_per_s: dense (no structured sparsity) matrix peak by precision, keys among bf16, fp16, fp8, mxfp8, nvfp4,
        tf32 (fp32 operands on matrix units) and fp32 (the non-tensor peak); a precision that the GPU does not have is
        absent.
    sms: streaming multiprocessors (compute units on AMD).
    vendor: who makes it, which decides what software runs on it.
    curve: whose compute curve (fivefold.cluster.curve) it follows, None: the one of its own name.
    sources: where each number comes from, by field name.
    """

    name: Name
    memory_bytes: Annotated[int, msgspec.Meta(ge=1 << 20, le=1 << 50)]
    memory_bandwidth_per_s: Bandwidth
    peak_flops_per_s: dict[Literal["bf16", "fp16", "fp8", "mxfp8", "nvfp4", "tf32", "fp32"], Flops]
    sms: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
    vendor: Vendor = "nvidia"
    curve: Name | None = None
    sources: dict[Name, Text] = {}


class Link(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One level of the network.

    span: GPUs with consecutive ranks that one domain of this level joins; 0 is the whole cluster.
    bandwidth_per_s: bytes per second of one GPU in one direction, as the datasheet has it. Where GPUs share a network
        card this is each GPU's share.
    latency_s: seconds per step of an algorithm that crosses this link.
    efficiency: achieved share of the bandwidth in ring collectives of large messages.
    all_to_all_efficiency: the same for all-to-all, None: as efficiency.
    peer_bandwidth_per_s: bytes per second between one pair where GPUs are wired to each other without a switch (a
        group of n then has (n-1) times this, up to bandwidth_per_s); 0: switched.
    oversubscription: how many times less than bandwidth_per_s all GPUs together get (a tapered spine).
    in_network: whether switches reduce and multicast (NVLink SHARP, InfiniBand SHARP).
    in_network_efficiency: achieved share of the bandwidth then, None: as efficiency.
    in_network_latency_s: seconds that such an all-reduce takes beyond its bytes.
    cards, card_bits_per_s: network cards of one node and the rate of each, where the link is a network; 0: not stated.
        bandwidth_per_s is each GPU's share of them.
    """

    name: Name
    span: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]
    bandwidth_per_s: Bandwidth
    latency_s: Seconds
    efficiency: Fraction = 1.0
    all_to_all_efficiency: Fraction | None = None
    peer_bandwidth_per_s: Annotated[float, msgspec.Meta(ge=0, le=1e20)] = 0.0
    oversubscription: Annotated[float, msgspec.Meta(ge=1, le=1e4)] = 1.0
    in_network: bool = False
    in_network_efficiency: Fraction | None = None
    in_network_latency_s: Seconds = 0.0
    cards: Annotated[int, msgspec.Meta(ge=0, le=1 << 12)] = 0
    card_bits_per_s: Annotated[float, msgspec.Meta(ge=0, le=1e20)] = 0.0
    source: Text = ""

    @property
    def achieved_per_s(self) -> float:
        """Bytes per second of one GPU, one direction, in ring collectives of large messages."""
        return self.bandwidth_per_s * self.efficiency / self.oversubscription

    @property
    def all_to_all_per_s(self) -> float:
        """Bytes per second of one GPU, one direction, in large all-to-all exchanges."""
        return self.bandwidth_per_s * (self.all_to_all_efficiency or self.efficiency) / self.oversubscription

    @property
    def in_network_per_s(self) -> float:
        """Bytes per second of one GPU, one direction, when switches reduce."""
        return self.bandwidth_per_s * (self.in_network_efficiency or self.efficiency) / self.oversubscription


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """What a training job runs on.

    gpus: GPUs of the job. gpus_per_node: GPUs of one host; the scale-up domain may be larger (NVL72) or smaller (PCIe).
    links: levels of the network, innermost first; the last spans everything.
    launch_s: seconds to start one collective and bring its ranks together, whatever its size.
    algorithms: what the communication library chooses from.
    compute: numbers of the GPU's compute curve that the user's file replaces, by field name.
    source: where launch_s and algorithms come from.
    host_memory_bytes: memory of one host (node), for its whole number of GPUs. None: unknown.
    host_link_bandwidth_per_s: bytes per second between one GPU and its host's memory, one direction, while all GPUs of
        the node copy at once (so after sharing a PCIe switch or a host bridge), as large pinned copies reach. None:
        unknown.
    host_memory_bandwidth_per_s: bytes per second of one host's memory, all sockets together, datasheet; None: unknown.
    host_pcie: generation and lanes of one GPU's own link to the host, in words. host_sockets: CPU sockets of a host, 0:
        not stated. Both are for the reader; what they mean for a copy or a collective is in the numbers above and in
        the links.
    host_work_ratio: time that one core of the host takes for the work between kernels (Python, launches), over that of
        the Xeon 8480C of a DGX H100. Multiplies the host times of a runtime's profile.
    host_source: where the numbers come from, and what joins the GPUs to the host.
    calibration: factors fitted to the user's own runs; what is priced on this cluster is priced with them.
    """

    name: Name
    gpu: Gpu
    gpus: Count
    gpus_per_node: Count
    links: tuple[Link, ...]
    launch_s: Seconds = 4e-5
    algorithms: tuple[Algorithm, ...] = NCCL_ALGORITHMS
    compute: dict[str, Any] = {}
    source: Text = ""
    host_memory_bytes: HostBytes | None = None
    host_link_bandwidth_per_s: Bandwidth | None = None
    host_memory_bandwidth_per_s: Bandwidth | None = None
    host_pcie: Text = ""
    host_sockets: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0
    host_work_ratio: WorkRatio = 1.0
    host_source: Text = ""
    calibration: Calibration | None = None

    @property
    def nodes(self) -> int:
        """Hosts, the last one possibly part-filled."""
        return -(-self.gpus // self.gpus_per_node)

    @property
    def spans(self) -> tuple[int, ...]:
        """GPUs per domain of every level, innermost first; the outermost spans the whole cluster.

        A job that does not fill whole domains gets equal parts of them: 512 GPUs on racks of 72 are 8 times 64.
        """
        return (*(self._share_of_domain(link.span or self.gpus) for link in self.links[:-1]), self.gpus)

    def _share_of_domain(self, span: int) -> int:
        """The most GPUs of one domain, in whole nodes, of which equal parts make up the job; the domain if none do."""
        if span >= self.gpus:
            return self.gpus
        if self.gpus % span == 0:
            return span
        shares = range(span - span % self.gpus_per_node, 0, -self.gpus_per_node)
        return next((share for share in shares if self.gpus % share == 0), span)

    def to_dict(self) -> dict[str, Any]:
        return msgspec.to_builtins(self)
