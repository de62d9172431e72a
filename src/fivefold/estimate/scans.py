"""Seconds of kernels that carry a state along the sequence: linear attention and state spaces.

Each of the several kernels of a scan waits for its bytes and then for its products, so that the two add up: bytes at
the rate of other bandwidth-bound kernels, matrix products at the rate that FlashAttention 2 reaches at the same head
size, multiply-adds of Mamba 1 at the vector units'. tests/estimate/test_scans.py holds it to published times: of
forward kernels, the gated delta rule on H20 -12% and -6%, Mamba 2 on H100 +7% and -1%; of whole steps, Nemotron 3
Nano within 7%. On B300 the delta rule's kernels take 2.3 times as long as said here. Mamba 1 is unverified.
"""

from __future__ import annotations

import numpy as np

from fivefold.cluster.compute import attention_seconds, streaming_seconds
from fivefold.cluster.curve import Curve, Precision
from fivefold.cluster.spec import Gpu
from fivefold.estimate.ledger import Ledger, Scan

# Backward makes the forward's intermediates again and has two products for each of its own.
_BACKWARD_TO_FORWARD = 3
# Of the seven operations per element of Mamba 1's state one is an exponential, which the special function units do at
# an eighth of the lanes' rate (CUDA programming guide, throughput of arithmetic instructions: 16 of 128; from memory):
# 8 + 4 lane slots for what counts as 3.5 multiply-adds.
_VECTOR_SHARE = 3.5 / 12
# The attention kernel whose products are as fast as those of scans, where a GPU's curve has it: both public libraries
# write theirs in Triton, whose attention reaches 395 TFLOP/s on H100 where FlashAttention 2 reaches 370 and cuDNN 595
# (Shah et al. 2024, Figure 5, head size 128).
_TRITON = "fa2"
# Keys that a product spans: the rate of a long sequence, since chunks of all sequences run at once.
_LONG = 1 << 15


def scan_seconds(
    curve: Curve, gpu: Gpu, ledger: Ledger, row: Scan, precision: Precision
) -> tuple[np.ndarray, np.ndarray]:
    """[K] seconds of the forward and of the backward pass of a scan; nothing where a key has none."""
    flops = ledger.stack([row.flops])[0]
    busy = _busy_seconds(curve, gpu, np.stack([flops, _BACKWARD_TO_FORWARD * flops]), row, precision)
    size = ledger.stack([row.forward_bytes, row.backward_bytes])
    kernels = np.array([[row.forward_kernels], [row.backward_kernels]])
    ahead, back = np.where(size > 0, streaming_seconds(curve, gpu, size, kernels) + busy, 0.0)
    return ahead, back


def _busy_seconds(curve: Curve, gpu: Gpu, flops: np.ndarray, row: Scan, precision: Precision) -> np.ndarray:
    """Seconds of the arithmetic alone; 0 on the vector units of a GPU whose rate is not known."""
    if row.head_dim is None:
        vector = gpu.peak_flops_per_s.get("fp32")
        return flops / (vector * _VECTOR_SHARE) if vector else np.zeros_like(flops)
    # Without what a kernel of attention takes whatever its work: its launch and the end of its last round.
    work = np.concatenate([flops, np.zeros_like(flops)])
    kernel = _TRITON if _TRITON in curve.attention else None
    seconds = attention_seconds(curve, gpu, work, _LONG, row.head_dim, precision, kernel=kernel)
    return seconds[: len(flops)] - seconds[len(flops) :]
