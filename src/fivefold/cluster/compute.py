"""Time of one operation on one GPU, from a handful of constants per GPU (fivefold.cluster.curve).

Matrix products follow the way a GPU does them. The output is cut into tiles; a wave is as many tiles as the GPU has
multiprocessors; every tile walks the inner dimension k and pays a fixed prologue on the way. So small outputs leave
multiprocessors idle, short k pays the prologue, and what is left is either arithmetic or memory traffic, whichever is
longer. Attention and bandwidth-bound operations have their own, simpler curves. Nothing is looked up by shape, and
every time grows with every size.

All functions are vectorised: sizes may be numbers or arrays of any shapes that broadcast, and seconds come back as a
float array of the broadcast shape. Every duration is that of a GPU kept busy; nothing here knows about overlap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from fivefold.cluster.curve import KINDS, AttentionRates, Curve, Kind, Precision
from fivefold.errors import FivefoldError

if TYPE_CHECKING:
    from fivefold.cluster.spec import Gpu

Floats = NDArray[np.float64]

# Bytes of one operand element.
_OPERAND_BYTES = {"bf16": 2, "fp16": 2, "fp8": 1, "mxfp8": 1.03, "nvfp4": 0.56, "tf32": 4, "fp32": 4}
# Bytes moved per output element: activations and their gradients are written in bf16, weight gradients are
# accumulated into an fp32 buffer, which is read and written.
_OUTPUT_BYTES = {"fwd": 2, "dgrad": 2, "wgrad": 8}
# Flash attention hands blocks of 128 query rows to the multiprocessors (Dao 2023, section 3.2).
_QUERY_ROWS = 128


def gemm_seconds(
    curve: Curve,
    gpu: Gpu,
    m: ArrayLike,
    n: ArrayLike,
    k: ArrayLike,
    precision: Precision = "bf16",
    kind: Kind = "fwd",
    *,
    output_bytes: float | None = None,
) -> Floats:
    """Seconds of the matrix product (m, k) x (k, n) -> (m, n).

    m, n, k are the sizes of this very product, at least 1: of a linear layer with T tokens, fwd is (T, out, in),
    dgrad (T, in, out), wgrad (out, in, T). fwd and dgrad write 2 bytes per output element; wgrad reads and writes an
    fp32 accumulator, 8 bytes, unless `output_bytes` says otherwise. Raises FivefoldError for a precision that the GPU
    lacks.
    """
    return _product_seconds(curve, gpu, 1, m, n, k, precision, kind, output_bytes)


def grouped_gemm_seconds(
    curve: Curve,
    gpu: Gpu,
    groups: ArrayLike,
    m: ArrayLike,
    n: ArrayLike,
    k: ArrayLike,
    precision: Precision = "bf16",
    kind: Kind = "fwd",
    *,
    output_bytes: float | None = None,
    uneven: bool = False,
) -> Floats:
    """Seconds of `groups` products (m, k) x (k, n) issued together, as a layer's local experts are.

    The groups' tiles share the waves, each group reads its own operands, and each group after the first costs
    ``group_launch_s``. With one group it is exactly `gemm_seconds`. Sizes and errors as there.
    uneven: m is the mean of groups that differ, as routed tokens do: on average half a tile of each is empty.
    """
    return _product_seconds(curve, gpu, groups, m, n, k, precision, kind, output_bytes, uneven)


def batched_gemm_seconds(
    curve: Curve,
    gpu: Gpu,
    batch: ArrayLike,
    m: ArrayLike,
    n: ArrayLike,
    k: ArrayLike,
    precision: Precision = "bf16",
    kind: Kind = "fwd",
) -> Floats:
    """Seconds of `batch` equal products in one kernel, as attention without a flash kernel makes them: their tiles
    share the waves, and nothing is paid per product. Sizes and errors as in `gemm_seconds`."""
    one_launch = msgspec.structs.replace(curve, group_launch_s=0.0)
    return _product_seconds(one_launch, gpu, batch, m, n, k, precision, kind, None)


def _floats(values: ArrayLike) -> Floats:
    return np.asarray(values, dtype=np.float64)


def _product_seconds(
    curve: Curve,
    gpu: Gpu,
    groups: ArrayLike,
    m: ArrayLike,
    n: ArrayLike,
    k: ArrayLike,
    precision: Precision,
    kind: Kind,
    output_bytes: float | None,
    uneven: bool = False,
) -> Floats:
    m, n, k, groups = _floats(m), _floats(n), _floats(k), _floats(groups)
    rate = _product_flops_per_s(curve, gpu, precision, kind)
    long, short = curve.tile

    # Tiles lie either way round, whichever needs fewer.
    rows = [np.maximum(m / size + 0.5, 1.0) if uneven else np.ceil(m / size) for size in (long, short)]
    tiles = np.minimum(rows[0] * np.ceil(n / short), rows[1] * np.ceil(n / long)) * groups
    waves = tiles / gpu.sms
    waves = waves + curve.wave_share * (np.ceil(waves) - waves)
    # Below one wave a tile still walks k, but a long k is split over idle multiprocessors.
    depth = np.maximum(waves * (k + curve.depth_ramp), np.minimum(k, curve.split_depth) + curve.depth_ramp)
    arithmetic_s = depth * (2 * long * short * gpu.sms / rate)

    out = _OUTPUT_BYTES[kind] if output_bytes is None else output_bytes
    bandwidth = gpu.memory_bandwidth_per_s * curve.memory_efficiency
    memory_s = ((m + n) * k * (_OPERAND_BYTES[precision] / bandwidth) + m * n * (out / bandwidth)) * groups

    hidden_s = np.minimum(arithmetic_s, memory_s)
    seconds = np.maximum(arithmetic_s, memory_s) + curve.memory_exposed * hidden_s
    return seconds + (curve.launch_s + curve.group_launch_s * (groups - 1))


def _product_flops_per_s(curve: Curve, gpu: Gpu, precision: Precision, kind: Kind) -> float:
    """FLOP/s inside a full wave."""
    if kind not in curve.efficiency:
        raise FivefoldError(f"Unknown kind of matrix product '{kind}'.", code="unknown-kind", value=kind, legal=KINDS)
    return _peak_flops_per_s(curve, gpu, precision) * curve.efficiency[kind] * curve.precision[precision]


def _peak_flops_per_s(curve: Curve, gpu: Gpu, precision: Precision) -> float:
    peak = gpu.peak_flops_per_s.get(precision)
    if not peak or precision not in curve.precision:
        legal = [name for name in curve.precision if gpu.peak_flops_per_s.get(name)]
        raise FivefoldError(
            f"{gpu.name} has no matrix units for {precision}, or none whose speed is known here. Choose one of "
            f"{', '.join(legal)}.",
            code="precision-not-on-gpu",
            option="--precision",
            value=precision,
            legal=legal,
        )
    return peak


def attention_seconds(
    curve: Curve,
    gpu: Gpu,
    flops: ArrayLike,
    seq: ArrayLike,
    head_dim: ArrayLike,
    precision: Precision = "bf16",
    backward: bool = False,
    *,
    kernel: str | None = None,
) -> Floats:
    """Seconds of flash attention's core: scores, softmax and weighted sum, no projections.

    flops: the pairs that the mask leaves, counted as flash attention papers do: causal forward over the whole batch is
        2 · batch · heads · seq² · head_dim (half of 4 · …), backward 2.5 times that (five products, one recomputed).
    seq: keys that the last query sees; for a sliding window, the window. head_dim: that of queries and keys.
    kernel: one of ``curve.attention``; None takes the GPU's usual one. Training stacks differ in the kernel they ship.
    Raises FivefoldError for an unknown kernel, and for fp8 and fp32: flash attention trains in bf16 or fp16.
    """
    rates = _attention_rates(curve, gpu, precision, kernel)
    flops, seq, head_dim = _floats(flops), _floats(seq), _floats(head_dim)
    if backward:
        table, half, tail, products = rates.backward, rates.seq_half_backward, rates.tail_backward, 5
    else:
        table, half, tail, products = rates.forward, rates.seq_half_forward, rates.tail_forward, 2
    if len(table) == 1:
        efficiency = table[0]
    else:
        efficiency = np.interp(head_dim, rates.head_dims, table)
    rate = _peak_flops_per_s(curve, gpu, precision) * efficiency
    # Work, plus the blocks of the last round that end after the others.
    round_flops = (products * _QUERY_ROWS * tail * gpu.sms) * seq * head_dim
    return (flops * (1 + half / seq) + round_flops) / rate + curve.launch_s


def _attention_rates(curve: Curve, gpu: Gpu, precision: str, kernel: str | None) -> AttentionRates:
    if precision not in ("bf16", "fp16"):
        raise FivefoldError(
            f"Flash attention in {precision} is not modelled: training recipes, fp8 ones too, keep attention in bf16 "
            "or fp16. Ask for its bf16 time.",
            code="attention-precision",
            value=precision,
            legal=("bf16", "fp16"),
        )
    name = curve.attention_kernel if kernel is None else kernel
    if name not in curve.attention:
        raise FivefoldError(
            f"No rates for the attention kernel '{name}' on {gpu.name}.",
            code="unknown-attention-kernel",
            value=name,
            legal=tuple(curve.attention),
        )
    return curve.attention[name]


def streaming_seconds(curve: Curve, gpu: Gpu, bytes: ArrayLike, kernels: ArrayLike = 1) -> Floats:
    """Seconds of bandwidth-bound work: norms, activations, residual additions, casts, optimizer updates.

    bytes: all bytes read and written. kernels: how many kernels do it, each costing ``launch_s``.
    """
    moved_s = _floats(bytes) / (gpu.memory_bandwidth_per_s * curve.streaming_efficiency)
    return moved_s + curve.launch_s * _floats(kernels)
