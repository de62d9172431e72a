"""Optimizer states: bytes per parameter beside the fp32 master copy, one entry per optimizer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class Optimizer:
    """States of one optimizer.

    vector_bytes: per parameter of embeddings, norms and biases. matrix_bytes: per parameter of hidden matrices.
    factored: second moments kept as one row and one column per matrix, fp32.
    newton_schulz: the update of hidden matrices is orthogonalised by matrix products.
    """

    vector_bytes: float
    matrix_bytes: float
    factored: bool
    source: str
    newton_schulz: bool = False

    @property
    def uniform(self) -> bool:
        """Whether every parameter has the same number of bytes."""
        return not self.factored and self.vector_bytes == self.matrix_bytes


OPTIMIZERS = {
    "adamw": Optimizer(8, 8, False, "two fp32 moments (Loshchilov & Hutter 2019)"),
    "sgd": Optimizer(4, 4, False, "one fp32 momentum buffer"),
    "adafactor": Optimizer(0, 0, True, "row and column second moments, no momentum (Shazeer & Stern 2018)"),
    "muon": Optimizer(8, 4, False, "fp32 momentum for hidden matrices, AdamW for the rest (Jordan et al. 2024)", True),
    "adamw8bit": Optimizer(
        2.03125, 2.03125, False, "two 8-bit moments, each with an fp32 scale per 256 values (torchao; from memory)"
    ),
}
