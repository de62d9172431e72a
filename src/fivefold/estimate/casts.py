"""What it takes to quantise the operands of a linear layer's products, by recipe and by who does it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fivefold.cluster.compute import streaming_seconds
from fivefold.cluster.curve import Curve, Kind, Precision
from fivefold.cluster.spec import Gpu

# Bytes moved to quantise an element: read in 16 bit, written as it lies and transposed. Block scales differ along rows
# and columns, so that those recipes read twice (Transformer Engine, from memory).
_CAST_BYTES = {"fp8": 4.0, "mxfp8": 6.0, "nvfp4": 5.1}
# Of an operand that is gathered after it was quantised: bytes of each rank's own share, and of the whole afterwards.
# Scales of a whole tensor: cast (3), and the gathered one transposed (2) (Transformer Engine module/linear.py, read at
# 0004dbd023); block scales: both quantised copies are made of the share and gathered each in its pass, of which the
# 4-bit one is put in order (distributed.py, from memory).
_SHARE_CAST_BYTES = {"fp8": 3.0, "mxfp8": 6.0, "nvfp4": 5.1}
_GATHERED_CAST_BYTES = {"fp8": 2.0, "mxfp8": 0.0, "nvfp4": 1.1}
# With a scale for every row or column of a 16-bit operand: along rows as they lie, whose second reading is from cache
# (read 2, write 1); across them, the largest value of each column first (2) and then the cast, written transposed (3).
_ROW_CAST_BYTES, _COLUMN_CAST_BYTES = 3.0, 5.0
# Where a compiler writes the kernels (torchao under torch.compile) one scale takes a kernel that reads for the largest
# value (2) before the one that casts (3), and the copy that lies transposed is made for the product that needs it: of
# the gradient beside its cast (1 more), of the input and the weight from their quantised copies (2).
_LARGEST_BYTES, _CAST_ALONE_BYTES, _TRANSPOSE_BYTES = 2.0, 3.0, 2.0
# What Inductor writes transposed moves 1.4 TB/s where its other casts move 2.2 (pytorch/pytorch issue 133242, H100),
# and 1.2 to 1.6 with the largest values of columns (pytorch/ao pull request 2769).
_TRANSPOSED = 1.5


@dataclass(slots=True, frozen=True)
class Casts:
    """Casts of one recipe on one GPU. by_row, compiled: as the profile's scaled_by_row and compiled_casts. ready: as
    its quantised_parameters, so that weights with one scale come quantised.

    inputs, gradients, weights: elements of a layer's input, of its output's gradient, of its weight, any shape;
    *_shared: ranks that quantise it together. Seconds of that shape.
    """

    curve: Curve
    gpu: Gpu
    precision: Precision
    by_row: bool
    compiled: bool = False
    ready: bool = False

    def forward(self, inputs: np.ndarray, inputs_shared: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Seconds of what the forward pass quantises."""
        if self._each_product:
            return self._seconds(_ROW_CAST_BYTES * (inputs + weights), 2)
        if self._apart:
            alone = _LARGEST_BYTES + _CAST_ALONE_BYTES
            return self._seconds(alone * (inputs / inputs_shared + (0 if self.ready else weights)), 2)
        return self._once(inputs, inputs_shared)

    def backward(
        self, inputs: np.ndarray, gradients: np.ndarray, gradients_shared: np.ndarray, weights: np.ndarray
    ) -> dict[Kind, np.ndarray]:
        """Seconds of what the backward pass quantises, by the product that waits for it."""
        if self._each_product:
            across = self._column_bytes
            return {
                "dgrad": self._seconds(_ROW_CAST_BYTES * gradients + across * weights, 2),
                "wgrad": self._seconds(across * (inputs + gradients), 2),
            }
        if self._apart:
            return self._of_one_scale(inputs, gradients, gradients_shared, weights)
        return {"dgrad": self._once(gradients, gradients_shared)}

    def _of_one_scale(
        self, inputs: np.ndarray, gradients: np.ndarray, shared: np.ndarray, weights: np.ndarray
    ) -> dict[Kind, np.ndarray]:
        turned = _TRANSPOSED * _TRANSPOSE_BYTES
        whole = _LARGEST_BYTES + _TRANSPOSED * (_CAST_ALONE_BYTES + 1)
        gathered = (_LARGEST_BYTES + _CAST_ALONE_BYTES) / shared + turned
        return {
            "dgrad": self._seconds(np.where(shared > 1, gathered, whole) * gradients + turned * weights, 3),
            "wgrad": self._seconds(turned * inputs, 1),
        }

    @property
    def _each_product(self) -> bool:
        return self.by_row and self.precision == "fp8"

    @property
    def _apart(self) -> bool:
        return self.compiled and self.precision == "fp8"

    @property
    def _column_bytes(self) -> float:
        return _LARGEST_BYTES + _TRANSPOSED * _CAST_ALONE_BYTES if self.compiled else _COLUMN_CAST_BYTES

    def _once(self, elements: np.ndarray, shared: np.ndarray) -> np.ndarray:
        """An operand quantised for both of its products."""
        together = _GATHERED_CAST_BYTES[self.precision] + _SHARE_CAST_BYTES[self.precision] / shared
        return self._seconds(np.where(shared > 1, together, _CAST_BYTES[self.precision]) * elements, 1)

    def _seconds(self, moved: np.ndarray, kernels: int) -> np.ndarray:
        return self.curve.in_step * streaming_seconds(self.curve, self.gpu, moved, kernels)
