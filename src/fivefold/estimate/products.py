"""What matrix products take in each pass, and what comes with them that the GPU's memory bounds: casts of operands, and
weight gradients that a kernel of its own adds to their accumulator."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from fivefold.cluster.compute import gemm_seconds, grouped_gemm_seconds, streaming_seconds
from fivefold.cluster.curve import KINDS, Curve, Kind, Precision
from fivefold.cluster.spec import Gpu
from fivefold.estimate.casts import Casts
from fivefold.estimate.ledger import Gemm, Ledger
from fivefold.layout.workload import QUANTISED, Workload
from fivefold.runtime import Profile

# Bytes moved per element of a weight gradient: by a product that adds to an fp32 accumulator, and by one that does not.
_ACCUMULATED_BYTES, _SIXTEEN_BIT_BYTES = 8, 2
_ADDED_BYTES = 12  # by one that writes 16 bit and a kernel that adds that
# Of them, what a kernel that adds it saves where the accumulator, which it reads and writes, is 16 bit wide too.
_NARROW_ACCUMULATOR_BYTES = {"fp32": 0, "bf16": 4}


@dataclass(slots=True, frozen=True)
class Products:
    """Matrix products of a ledger that one kind of kernel does: R rows, K keys.

    flops: [R, K] forward. alone: [R, K] seconds of the products in each pass, beside: of what comes with them.
    """

    rows: tuple[Gemm, ...]
    flops: np.ndarray
    alone: dict[Kind, np.ndarray]
    beside: dict[Kind, np.ndarray]

    def seconds(self, kind: Kind) -> np.ndarray:
        """[R, K] of both."""
        return self.alone[kind] + self.beside[kind]


def backward_passes(products: Iterable[Products]) -> dict[tuple[str, str], np.ndarray]:
    """[K] seconds of backward's products by (name, gradient), for what hides behind them."""
    return {
        (row.name, kind): seconds
        for each in products
        for kind in ("dgrad", "wgrad")
        for row, seconds in zip(each.rows, each.seconds(kind), strict=True)
    }


def _moved_by_gradient(runtime: Profile, work: Workload) -> float:
    in_bf16 = runtime.bf16_wgrad_bytes if work.sixteen_bit == "bf16" else 0
    return in_bf16 or runtime.wgrad_bytes


def added_gradient_bytes(runtime: Profile, work: Workload) -> float:
    """Bytes moved per element by the kernel that adds a 16-bit gradient, which no product added, to its accumulator."""
    moved = max(_moved_by_gradient(runtime, work), _ADDED_BYTES)
    return moved - _SIXTEEN_BIT_BYTES - _NARROW_ACCUMULATOR_BYTES[work.grad_dtype]


class ProductPricer:
    """Prices the matrix products of ledgers on one GPU."""

    def __init__(self, curve: Curve, gpu: Gpu, runtime: Profile, work: Workload) -> None:
        self._curve, self._gpu = curve, gpu
        self._precision: Precision = work.precision
        self._sixteen_bit: Precision = work.sixteen_bit
        self._casts = Casts(
            curve,
            gpu,
            self._precision,
            by_row=runtime.scaled_by_row,
            compiled=runtime.compiled_casts,
            ready=runtime.quantised_parameters,
        )
        self._frozen = work.trained == "adapters"
        moved = _moved_by_gradient(runtime, work)
        added = moved > _ACCUMULATED_BYTES
        self._wgrad_bytes = _SIXTEEN_BIT_BYTES if added else moved
        self._added_bytes = added_gradient_bytes(runtime, work) if added else 0

    def of(self, ledger: Ledger) -> Iterator[Products]:
        """The products of a ledger, those of one kernel and precision together."""
        for grouped, quantised in itertools.product((False, True), repeat=2):
            rows = tuple(row for row in ledger.gemms if row.grouped is grouped and self._quantises(row) is quantised)
            if rows:
                yield self._together(ledger, rows, grouped, quantised)

    def _quantises(self, row: Gemm) -> bool:
        return self._precision in QUANTISED and not row.sixteen_bit

    def _together(self, ledger: Ledger, rows: tuple[Gemm, ...], grouped: bool, quantised: bool) -> Products:
        m, n, k, groups = (ledger.stack([getattr(row, size) for row in rows]) for size in ("m", "n", "k", "groups"))
        precision = self._precision if quantised or self._precision not in QUANTISED else self._sixteen_bit
        alone: dict[Kind, np.ndarray] = {kind: self._alone(m, n, k, groups, kind, grouped, precision) for kind in KINDS}
        beside: dict[Kind, np.ndarray] = {kind: np.zeros_like(alone[kind]) for kind in KINDS}
        if self._added_bytes:
            # Nothing hides the kernel that adds it.
            added = streaming_seconds(self._curve, self._gpu, self._added_bytes * n * k * groups)
            beside["wgrad"] += self._curve.in_step * added
        if self._frozen:
            trained = np.array([[row.adapter] for row in rows])
            alone["wgrad"], beside["wgrad"] = alone["wgrad"] * trained, beside["wgrad"] * trained
        if quantised:
            ours, theirs = (
                ledger.stack([getattr(row, name) for row in rows]) for name in ("input_shared", "gradient_shared")
            )
            inputs, gradients, weights = m * k * groups, m * n * groups, n * k * groups
            cast = ~np.array([row.comes_quantised for row in rows])
            beside["fwd"] += cast[:, :1] * self._casts.forward(inputs, ours, weights)
            for kind, seconds in self._casts.backward(inputs, gradients, theirs, weights).items():
                beside[kind] += cast[:, 1:] * seconds
        return Products(rows, 2 * m * n * k * groups, alone, beside)

    def _alone(
        self,
        m: np.ndarray,
        n: np.ndarray,
        k: np.ndarray,
        groups: np.ndarray,
        kind: Kind,
        grouped: bool,
        precision: Precision,
    ) -> np.ndarray:
        """Seconds of one pass's product of a layer that makes m x n of m x k."""
        if kind == "dgrad":
            n, k = k, n
        elif kind == "wgrad":
            m, n, k = (n, k, m)
        out = self._wgrad_bytes if kind == "wgrad" else None
        if grouped:
            # Experts get different numbers of tokens, which are the rows of all but the weights' gradients.
            seconds = grouped_gemm_seconds(
                self._curve, self._gpu, groups, m, n, k, precision, kind, output_bytes=out, uneven=kind != "wgrad"
            )
        else:
            seconds = gemm_seconds(self._curve, self._gpu, m, n, k, precision, kind, output_bytes=out)
        return self._curve.in_step * seconds
