"""What a piece's attention takes, flash or not, and what the host takes to launch its kernels."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fivefold.cluster.compute import attention_seconds, batched_gemm_seconds, streaming_seconds
from fivefold.cluster.curve import Curve, Precision
from fivefold.cluster.groups import Placement
from fivefold.cluster.spec import Gpu
from fivefold.estimate.ledger import Attend, Exchange, Ledger
from fivefold.layout.workload import SINGLE, Workload
from fivefold.runtime import Profile


def core_seconds(
    curve: Curve,
    gpu: Gpu,
    row: Attend,
    flops: np.ndarray,
    work: Workload,
    sixteen_bit: Precision,
    kernel: str | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Forward and backward seconds of one core of attention alone, [K]; `flops` are the forward ones.

    Its operands are in 16 bit beside narrower products, and in fp32 where all tensors are. Flash kernels take no fp32:
    what PyTorch runs in their place, its memory-efficient kernel, is taken to reach their share of the peak that fp32
    operands have.
    """
    single = work.precision in SINGLE
    own: Precision = work.precision if single else sixteen_bit
    if work.attention == "unfused":
        return unfused_seconds(curve, gpu, row, flops, own, work.dropout, work.compute_bytes)
    ahead, back = flash_seconds(curve, gpu, row, flops, sixteen_bit, kernel)
    if not single:
        return ahead, back
    reached, fewer = (gpu.peak_flops_per_s[each] * curve.precision[each] for each in (sixteen_bit, own))
    return reached / fewer * ahead, reached / fewer * back


def flash_seconds(
    curve: Curve, gpu: Gpu, row: Attend, work: np.ndarray, precision: Precision, kernel: str | None
) -> tuple[np.ndarray, np.ndarray]:
    """Forward and backward seconds of a flash kernel alone, [K]; `work` is the forward FLOPs."""
    ahead, back = (
        attention_seconds(curve, gpu, flops, row.seq, row.head_dim, precision, backward=side, kernel=kernel)
        for flops, side in ((work, False), (2.5 * work, True))  # flash attention's backward: five products
    )
    return ahead, back


# (bytes per score, kernels) forward and backward of what lies between attention's two products, by the bytes of one:
# Megatron-LM's fused scale, mask and softmax, which reads two in backward, and PyTorch's dropout of its output, whose
# mask is a byte.
_FUSED_SOFTMAX = {2: ((4, 1), (6, 1)), 4: ((8, 1), (12, 1))}
_SCORE_DROPOUT = {2: (5, 1), 4: (9, 1)}
# The fused kernel runs where micro-batch x heads of a rank is a multiple of 4 (megatron/model/fused_softmax.py, read at
# 0cb36de2d6). Elsewhere PyTorch casts to fp32 (6), scales (8), masks in place (8), takes the softmax (8) and casts back
# (6); backward the same, with a softmax that reads two. fp32 scores need no casts.
_HEADS_OF_A_BLOCK = 4
_PLAIN_SOFTMAX = {2: ((36, 5), (40, 5)), 4: ((24, 3), (28, 3))}


def _between_products(row: Attend, side: int, size: int, dropout: bool) -> tuple[np.ndarray, np.ndarray]:
    """(bytes per score of `size` bytes, kernels) between the products of attention without a flash kernel, [K]. side: 0
    forward."""
    fused = np.round(_squares(row)) % _HEADS_OF_A_BLOCK == 0
    (fewer, few), (more, many) = _FUSED_SOFTMAX[size][side], _PLAIN_SOFTMAX[size][side]
    moved, kernels = _SCORE_DROPOUT[size] if dropout else (0, 0)
    return np.where(fused, fewer, more) + moved, np.where(fused, few, many) + kernels


def _squares(row: Attend) -> np.ndarray:
    """Whole squares of scores of one rank: its micro-batch times its heads, [K]."""
    return np.asarray(row.scores, dtype=float) / np.asarray(row.seq, dtype=float) ** 2


def unfused_seconds(
    curve: Curve, gpu: Gpu, row: Attend, work: np.ndarray, precision: Precision, dropout: bool, size: int = 2
) -> tuple[np.ndarray, np.ndarray]:
    """The same without one: batched products over whole squares of scores, two forward and four backward, and what
    passes through memory between them: softmax, and dropout on its output. size: bytes of a score."""
    seq = np.asarray(row.seq, dtype=float)
    heads = _squares(row)
    width = work / (4 * heads * seq**2)
    score = batched_gemm_seconds(curve, gpu, heads, seq, seq, width, precision)
    value = batched_gemm_seconds(curve, gpu, heads, seq, width, seq, precision)
    between = (_between_products(row, side, size, dropout) for side in (0, 1))
    ahead, back = (streaming_seconds(curve, gpu, each * heads * seq**2, kernels) for each, kernels in between)
    return score + value + ahead, score + 3 * value + back


def _transfers(row: Exchange, placements: Mapping[str, Placement]) -> np.ndarray:
    """How often a collective is launched in a pass, [K]: a ring's in each of its steps."""
    moved = row.bytes * (placements[row.axis].n > 1) * row.ring_steps
    return np.where(np.asarray(moved) > 0, row.ring_steps if row.op == "send" else row.times, 0)


def launch_seconds(
    ledger: Ledger, runtime: Profile, placements: Mapping[str, Placement], work: Workload, side: str = "forward"
) -> np.ndarray:
    """Host seconds to launch a piece's operations of one pass one by one, [K].

    Products and attention launch once forward and twice backward, collectives once where they move something; a ring's
    attention and transfers in every step. What is made of PyTorch's own operations takes op_host_s for each, where the
    runtime has it.
    """
    passes = {"forward": 1, "backward": 2}[side]
    at = ("forward", "backward").index(side)
    unfused = work.attention == "unfused"
    attends = (3 + work.dropout if unfused else 1) * ledger.total([row.kernels for row in ledger.attends])
    further = ledger.total([np.asarray(row.groups) - 1.0 for row in ledger.gemms if row.grouped])
    # What a key does not have moves nothing and launches nothing.
    launched = [*(row for row in ledger.streams if not row.by_group), *ledger.scans]
    by_group = [np.asarray(row.groups) * getattr(row, f"{side}_kernels") for row in ledger.streams if row.by_group]
    moved = [getattr(row, f"{side}_bytes") for row in launched]
    op = runtime.op_host_s / runtime.launch_host_s if runtime.launch_host_s else 0.0
    own = [getattr(row, "host_ops", None) if op else None for row in launched]
    kernels = [ops[at] * op if ops else getattr(row, f"{side}_kernels") for ops, row in zip(own, launched, strict=True)]
    products = sum(not row.adapter for row in ledger.gemms)  # an adapter's are small, and were not measured
    launches = passes * (products + attends) + np.array(kernels) @ (ledger.stack(moved) > 0)
    launches = launches + ledger.total([_transfers(row, placements) for row in ledger.exchanges if row.when == side])
    if unfused:
        launches = launches + sum(
            _between_products(row, at, work.compute_bytes, False)[1] - _FUSED_SOFTMAX[work.compute_bytes][at][1]
            for row in ledger.attends
        )
    return runtime.launch_host_s * launches + runtime.group_launch_host_s * (passes * further + ledger.total(by_group))
