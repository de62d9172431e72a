"""Time of one operation on one GPU, from a handful of constants per GPU (``data/compute.toml``).

Matrix products follow the way a GPU does them. The output is cut into tiles; a wave is as many tiles as the GPU has
multiprocessors; every tile walks the inner dimension k and pays a fixed prologue on the way. So small outputs leave
multiprocessors idle, short k pays the prologue, and what is left is either arithmetic or memory traffic, whichever is
longer. Attention and bandwidth-bound operations have their own, simpler curves. Nothing is looked up by shape, and
every time grows with every size.

All functions are vectorised: sizes may be numbers or arrays of any shapes that broadcast, and seconds come back as a
float array of the broadcast shape. Every duration is that of a GPU kept busy; nothing here knows about overlap.
"""

from __future__ import annotations

import math
import tomllib
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from fivefold.errors import FivefoldError

if TYPE_CHECKING:
    from fivefold.cluster.spec import Gpu

Kind = Literal["fwd", "dgrad", "wgrad"]
Precision = Literal["bf16", "fp16", "fp8", "mxfp8", "nvfp4", "fp32"]
Operation = Literal["gemm", "grouped", "attention", "streaming"]
Floats = NDArray[np.float64]

# Ranges that any real GPU is far inside of; they keep hostile or mistyped files out.
Fraction = Annotated[float, msgspec.Meta(gt=0, le=2)]  # of a datasheet peak, which clocks can pass
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Size = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1)]
Table = Annotated[tuple[Fraction, ...], msgspec.Meta(min_length=1, max_length=64)]

# Bytes of one operand element.
_OPERAND_BYTES = {"bf16": 2, "fp16": 2, "fp8": 1, "mxfp8": 1.03, "nvfp4": 0.56, "fp32": 4}
# Bytes moved per output element: activations and their gradients are written in bf16, weight gradients are
# accumulated into an fp32 buffer, which is read and written.
_OUTPUT_BYTES = {"fwd": 2, "dgrad": 2, "wgrad": 8}
# Flash attention hands blocks of 128 query rows to the multiprocessors (Dao 2023, section 3.2).
_QUERY_ROWS = 128


class AttentionRates(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One flash-attention kernel on one GPU.

    head_dims: query/key head sizes at which the efficiencies are given; linear between, constant outside.
    forward, backward: fraction of the dense peak reached by a long sequence that fills the GPU, at each head size, with
        FLOPs counted over the unmasked pairs only (causal: half) and five products in backward (2.5 x forward).
    seq_half_forward, seq_half_backward: sequence length at which the rate has fallen to half of that.
    tail_forward, tail_backward: idle time at the end of the kernel, in units of one multiprocessor's time for one block
        of 128 query rows (of a causal sequence, on average): what few heads or a short batch cost.
    """

    head_dims: Annotated[tuple[int, ...], msgspec.Meta(min_length=1, max_length=64)]
    forward: Table
    backward: Table
    seq_half_forward: Size
    seq_half_backward: Size
    tail_forward: Size
    tail_backward: Size
    source: str

    def __post_init__(self) -> None:
        if not len(self.head_dims) == len(self.forward) == len(self.backward):
            raise ValueError("head_dims, forward and backward need the same number of entries")
        if list(self.head_dims) != sorted(set(self.head_dims)):
            raise ValueError("head_dims must increase")


class Curve(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The constants of one GPU.

    efficiency: fraction of the dense peak inside a full wave, per kind of product: fwd (TN), dgrad (NN), wgrad (NT).
    precision: factor on that fraction per operand precision; a precision that is absent is refused.
    tile: output tile of one multiprocessor, either way round.
    depth_ramp: a tile's prologue and epilogue, in elements of k.
    wave_share: how much of a last, partly filled wave is waited for (1: all of it, as one kernel alone; 0: none).
    split_depth: k beyond which one tile's work is split over several multiprocessors when tiles are few.
    memory_efficiency: fraction of memory bandwidth that matrix products reach. memory_exposed: part of the shorter of
        arithmetic and memory traffic that the longer does not hide.
    launch_s: start and drain of a kernel, seconds. group_launch_s: each further group of a grouped product, seconds.
    streaming_efficiency: fraction of memory bandwidth for elementwise operations, norms and optimizer updates.
    attention: kernels by name; attention_kernel: the one that current training stacks pick on this GPU.
    in_step: seconds of the ledger's operations inside a training step over the same kernels timed alone: sustained
        clocks, cold caches and the small kernels that a ledger leaves out. 1 where no training run was fitted.
    spread: relative standard deviation of measured around predicted seconds, per operation (gemm, grouped, attention,
        streaming): 80% of the fitted points lie within 1.28 spread. source: where the numbers come from.
    in_runs: whether published training runs on this very GPU bear its level out: 20 or more, whose mean error is within
        the runtimes' spread (docs/accuracy.md, by GPU). A GPU does not inherit it from its base.
    """

    efficiency: dict[Kind, Fraction]
    precision: dict[Precision, Fraction]
    tile: tuple[Annotated[int, msgspec.Meta(ge=1, le=4096)], Annotated[int, msgspec.Meta(ge=1, le=4096)]]
    depth_ramp: Size
    wave_share: Share
    split_depth: Annotated[float, msgspec.Meta(ge=1, le=1e9)]
    memory_efficiency: Fraction
    memory_exposed: Share
    launch_s: Seconds
    group_launch_s: Seconds
    streaming_efficiency: Fraction
    attention: dict[str, AttentionRates]
    attention_kernel: str
    spread: dict[Operation, Share]
    source: str
    in_step: Annotated[float, msgspec.Meta(ge=0.5, le=3)] = 1.0
    in_runs: bool = False

    def __post_init__(self) -> None:
        for table, keys in (
            (self.efficiency, _OUTPUT_BYTES),
            (self.spread, ("gemm", "grouped", "attention", "streaming")),
        ):
            missing = [key for key in keys if key not in table]
            if missing:
                raise ValueError(f"efficiency or spread lacks {', '.join(missing)}")
        if self.attention_kernel not in self.attention:
            raise ValueError(f"attention_kernel '{self.attention_kernel}' is not in attention")


@cache
def _tables() -> dict[str, dict[str, Any]]:
    """compute.toml with ``base`` references resolved."""
    text = resources.files("fivefold.cluster").joinpath("data/compute.toml").read_text(encoding="utf-8")
    tables: dict[str, dict[str, Any]] = {}
    for name, table in tomllib.loads(text).items():
        base = table.pop("base", None)
        tables[name] = {**(_merge(tables[base], table) if base else table), "in_runs": table.get("in_runs", False)}
    return tables


def _merge(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """`base` with the entries of `change` replaced, table by table."""
    merged = dict(base)
    for key, value in change.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def curves() -> tuple[str, ...]:
    """Names of the GPUs that have a curve."""
    return tuple(_tables())


@cache
def load_curve(gpu_name: str) -> Curve:
    """The constants of a GPU by its catalogue name. Raises FivefoldError for a GPU without a curve."""
    return override_curve(gpu_name, {})


def override_curve(gpu_name: str, changes: dict[str, Any], option: str = "[compute]") -> Curve:
    """The constants of a GPU with some of them replaced, as a cluster file's compute table does.

    changes: keys of Curve; nested tables are merged key by key, so ``{"efficiency": {"fwd": 0.8}}`` keeps the others.
    Raises FivefoldError, naming the key, for an unknown GPU, an unknown key or an impossible value.
    """
    tables = _tables()
    if gpu_name not in tables:
        raise FivefoldError(
            f"No compute curve for the GPU '{gpu_name}'. Name the GPU after the measured one that is nearest to it and "
            "replace the constants that differ.",
            code="unknown-gpu",
            option="gpu",
            value=gpu_name,
            legal=curves(),
        )
    try:
        _refuse_nan(changes)
        return msgspec.convert(_merge(tables[gpu_name], changes), Curve)
    except (msgspec.ValidationError, ValueError) as error:
        raise FivefoldError(
            f"{option} for {gpu_name}: {error}. See fivefold.cluster.compute.Curve for the keys and their meaning.",
            code="bad-compute-constant",
            option=option,
            value=changes,
            legal=Curve.__struct_fields__,
        ) from None


def _refuse_nan(value: Any) -> None:
    """NaN passes every range check."""
    if isinstance(value, float) and math.isnan(value):
        raise ValueError("nan is not a number")
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
        _refuse_nan(item)


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
        raise FivefoldError(
            f"Unknown kind of matrix product '{kind}'.", code="unknown-kind", value=kind, legal=tuple(_OUTPUT_BYTES)
        )
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
