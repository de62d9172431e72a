"""Limits that follow from the cluster alone: where data parallelism stops paying, and what each axis is for.

The rule of data parallelism. With P parameters and T tokens per GPU and step, backward is 4·P·T FLOP. Meanwhile the
ring moves the bf16 gradients (2·P bytes) twice, once to reduce-scatter and once to all-gather them: 4·P bytes leave
each GPU, for many ranks. Hidden while 4·P / bandwidth <= 4·P·T / FLOP rate, so T >= FLOP rate / bandwidth: the
parameter count and the two fours cancel, and the constant is 1. ZeRO-1 gives the same: 2·P bytes beside the 4·P·T of
backward and 2·P beside the 2·P·T of the next forward, of which the second binds. fp32 gradients double it.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
from msgspec.structs import replace

from fivefold.cluster.groups import Placement, place
from fivefold.cluster.spec import Cluster, Link
from fivefold.errors import FivefoldError

BF16_BYTES = 2
BACKWARD_FLOPS_PER_PARAMETER = 4  # per token: gradients of the inputs and of the weights, 2 FLOP each
RING_PASSES = 2  # reduce-scatter, all-gather
# Megatron-Core's default bucket: max(40e6, 1e6 x data-parallel ranks) parameters (distributed_data_parallel_config,
# from memory).
BUCKET_PARAMETERS = 40_000_000
BUCKET_PARAMETERS_PER_RANK = 1_000_000


class DpLimit(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens per GPU and step from which overlapped bf16 data parallelism pays.

    link_bytes_per_s: what one GPU gets past the ring's narrowest edge; link: which link that is.
    tokens_first_order: achieved FLOP/s over link bytes/s. tokens_finite: with (n-1)/n of the bytes, as n ranks move.
    tokens_with_latency: tokens_finite and the ring's steps, for buckets of bucket_bytes.
    tokens_one_card: first order if each rank had only its own network card (one rank per node, as under TP over the
        node; then the tokens of the node's GPUs together count).
    """

    dp: int
    achieved_flops_per_s: float
    link: str
    link_bytes_per_s: float
    bucket_bytes: int
    tokens_first_order: float
    tokens_finite: float
    tokens_with_latency: float
    tokens_one_card: float
    constant: float
    sentences: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return msgspec.to_builtins(self)


def dp_limit(
    cluster: Cluster, achieved_flops_per_s: float, dp: int | None = None, bucket_bytes: int | None = None
) -> DpLimit:
    """The batch that pure data parallelism needs on this cluster.

    achieved_flops_per_s: what one GPU achieves in the matrix products, not its peak. dp: ranks of the ring, the first
    of the cluster (None: all its GPUs). bucket_bytes: bytes reduced at a time (None: Megatron-Core's default).
    """
    ranks = cluster.gpus if dp is None else dp
    _check(achieved_flops_per_s, ranks)
    bucket = bucket_bytes or BF16_BYTES * max(BUCKET_PARAMETERS, BUCKET_PARAMETERS_PER_RANK * ranks)
    row = place(cluster, ranks, 1)
    byte_s, step_s = float(row.ring_s_per_byte[0]), float(row.ring_s[0])
    flops_per_byte = BACKWARD_FLOPS_PER_PARAMETER / BF16_BYTES  # backward FLOP per gradient byte and token
    constant = RING_PASSES / flops_per_byte
    first = constant * achieved_flops_per_s * byte_s
    bucket_s = RING_PASSES * (ranks - 1) * (step_s + byte_s * bucket / ranks) + cluster.launch_s
    own = cluster.links[int(row.level[0])]
    found = DpLimit(
        dp=ranks,
        achieved_flops_per_s=float(achieved_flops_per_s),
        link=_narrowest(cluster, row),
        link_bytes_per_s=1 / byte_s,
        bucket_bytes=int(bucket),
        tokens_first_order=first,
        tokens_finite=first * (ranks - 1) / ranks,
        tokens_with_latency=achieved_flops_per_s * bucket_s / (flops_per_byte * bucket),
        tokens_one_card=constant * achieved_flops_per_s / own.achieved_per_s,
        constant=constant,
        sentences=(),
    )
    return replace(found, sentences=_sentences(found, own, step_s))


def _check(achieved_flops_per_s: float, ranks: int) -> None:
    if not (math.isfinite(achieved_flops_per_s) and achieved_flops_per_s > 0):
        raise FivefoldError(
            f"The achieved FLOP/s of a GPU is {achieved_flops_per_s!r}; it has to be a positive number, for example "
            "40% of the peak.",
            code="bad-value",
            option="achieved_flops_per_s",
            value=achieved_flops_per_s,
        )
    if ranks < 2:
        raise FivefoldError(
            "Data parallelism over one GPU moves nothing, so it has no limit. Ask for 2 GPUs or more.",
            code="bad-value",
            option="--gpus",
            value=ranks,
            legal="2 or more",
        )


def _sentences(limit: DpLimit, own: Link, step_s: float) -> tuple[str, ...]:
    """The rule in words. own: the link that the ring's ranks are on; step_s: latency of a step of the ring."""
    ranks, achieved = limit.dp, limit.achieved_flops_per_s
    return (
        f"First order: {achieved / 1e12:,.0f} TFLOP/s / {limit.link_bytes_per_s / 1e9:,.1f} GB/s = "
        f"{limit.tokens_first_order:,.0f} tokens per GPU and step; the {limit.link} link is the narrowest of the ring "
        f"over {ranks:,} GPUs.",
        "The constant is 1: backward is 4 FLOP per parameter and token, the ring moves 4 bytes per parameter, and the "
        "parameter count cancels. With fp32 gradients it is twice as many tokens.",
        f"With the ring's latency ({2 * (ranks - 1):,} steps of {step_s * 1e6:,.1f} us for each bucket of "
        f"{limit.bucket_bytes / 1e6:,.0f} MB): {limit.tokens_with_latency:,.0f} tokens per GPU and step.",
        f"A ring with one rank per domain has only its own share of {own.name} ({own.achieved_per_s / 1e9:,.1f} GB/s; "
        f"so under tensor parallelism over the domain): {limit.tokens_one_card:,.0f} tokens, counted over the GPUs "
        "that share them.",
        "This is the rule of thumb; the estimate prices the overlap bucket by bucket, and says where it parts from it.",
    )


def _narrowest(cluster: Cluster, row: Placement) -> str:
    """Name of the link that the ring is slowest over: a domain's edge is as wide as its members' shares together."""
    parts, width, worst, name = int(row.n[0]), 1, 0.0, ""
    for level, link in enumerate(cluster.links):
        byte_s = 1 / (link.achieved_per_s * width)
        if parts > row.domains[level, 0] and byte_s > worst:
            worst, name = byte_s, link.name
        parts, width = int(row.domains[level, 0]), int(row.members[level, 0])
    return name


class Axis(msgspec.Struct, frozen=True, kw_only=True):
    """One axis of parallelism, as a row of `explain axes`."""

    axis: str
    grid: str
    cuts: str
    moves: str
    when: str
    bound: str


class AxesTable(msgspec.Struct, frozen=True, kw_only=True):
    """rows: the axes. pairs: which go together. readings: the two ways to count the world. headroom: what limits DP."""

    rows: tuple[Axis, ...]
    pairs: dict[str, str]
    readings: tuple[str, ...]
    headroom: str

    def to_dict(self) -> dict[str, Any]:
        return msgspec.to_builtins(self)


_AXES = (
    Axis(
        axis="dp",
        grid="dense",
        cuts="batch (with ZeRO also optimizer states, gradients, parameters)",
        moves="gradients: reduce-scatter + all-gather of all parameters",
        when="once per step (ZeRO-2: gradients per micro-batch; ZeRO-3: parameters per micro-batch)",
        bound="global batch / micro-batch",
    ),
    Axis(
        axis="tp",
        grid="dense",
        cuts="hidden (heads, ffn width, vocabulary); with SP also the sequence between the matrix products",
        moves="activations: all-gather + reduce-scatter (without SP all-reduce)",
        when="per layer, twice forward and twice backward",
        bound="attention heads; KV heads unless replicated; the scale-up domain by default",
    ),
    Axis(
        axis="cp",
        grid="dense",
        cuts="sequence, inside attention too",
        moves="keys and values around a ring, or heads by all-to-all",
        when="per attention layer, forward and backward",
        bound="sequence length (ring: 2 chunks a rank); heads / TP for all-to-all",
    ),
    Axis(
        axis="pp",
        grid="dense and expert",
        cuts="layers",
        moves="activations at stage boundaries, point to point",
        when="per micro-batch and boundary, forward and backward",
        bound="layers; the bubble wants micro-batches >> stages",
    ),
    Axis(
        axis="ep",
        grid="expert",
        cuts="experts",
        moves="tokens: all-to-all to the experts and back",
        when="per MoE layer, twice forward and twice backward",
        bound="number of experts; TP x CP x DP ranks of a stage",
    ),
    Axis(
        axis="etp",
        grid="expert",
        cuts="hidden of each expert",
        moves="activations inside an expert: all-gather + reduce-scatter",
        when="per MoE layer, forward and backward",
        bound="expert ffn width; the scale-up domain by default",
    ),
)

_PAIRS = {
    "tp x cp": "orthogonal: hidden and sequence",
    "tp x pp": "orthogonal: TP inside a node, PP across nodes",
    "tp x dp": "orthogonal: each DP rank reduces only its TP share",
    "tp x ep": "legal; SP is required, so that every TP rank dispatches its own tokens",
    "cp x pp": "orthogonal",
    "cp x dp": "orthogonal in compute; gradients and ZeRO shards span DP x CP",
    "cp x ep": "legal: the expert grid reuses the CP ranks",
    "pp x dp": "orthogonal; with ZeRO-1. ZeRO-2 gains little (gradients accumulate over micro-batches anyway)",
    "pp x zero-3": "not by default: both cut parameters along depth, and every micro-batch would gather them again",
    "pp x ep": "orthogonal",
    "dp x ep": "the expert grid reuses the DP ranks: experts are replicated over expert-DP only",
    "ep x etp": "orthogonal; EP first, because ETP narrows already narrow experts",
}


def explain_axes(global_batch: int | None = None, micro_batch: int = 1, dp: int = 1) -> AxesTable:
    """What each axis cuts and moves, which pairs go together, and DP's headroom for the user's batch if given."""
    headroom = (
        "DP is limited by the batch: headroom = global batch / (micro-batch x DP), the micro-batches left to cut."
    )
    if global_batch is not None:
        if min(global_batch, micro_batch, dp) < 1:
            raise FivefoldError(
                f"Global batch {global_batch}, micro-batch {micro_batch} and DP {dp} have to be 1 or more.",
                code="bad-value",
                option="--global-batch",
                value=global_batch,
            )
        left = global_batch / (micro_batch * dp)
        headroom += f" Here {global_batch:,} / ({micro_batch:,} x {dp:,}) = {left:,.4g}."
    return AxesTable(
        rows=_AXES,
        pairs=dict(_PAIRS),
        readings=(
            "Dense layers: world = TP x PP x CP x DP. Experts use the same ranks again: "
            "world = ETP x EP x PP x expert-DP.",
            "Older guides: world = TP x PP x CP x EP x DP. There EP is cut out of DP, so their DP is ours / EP.",
        ),
        headroom=headroom,
    )
