"""The verdict: every parameter's error beside its bound, over all ranks that hold a part of it.

The bound is ||g - g0|| <= tolerance * max(||g0||, 1e-3 * ||g_model|| / sqrt(tensors)): relative to the tensor's own
norm, and for tensors whose gradient is mathematically zero (key biases) to a thousandth of a typical tensor's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fivefold.layout import ResolvedLayout
from fivefold.model import ModelSpec
from fivefold.model import Tensor as TensorSpec
from fivefold.train.init import part_of, shard_of
from fivefold.train.model import tensor_table
from fivefold.train.verify.observe import Part, RankReport
from fivefold.train.verify.reference import Reference

TOLERANCES = {"fp64": 1e-12, "fp32": 5e-6}
FLOOR = 1e-3


class ParameterError(NamedTuple):
    """Frobenius norms of the difference from one process; error and bound are the gradient's. An element that no rank
    holds makes the error infinite."""

    name: str
    error: float
    bound: float
    sgd_error: float
    sgd_bound: float
    adamw_error: float
    adamw_bound: float

    @property
    def passed(self) -> bool:
        pairs = ((self.error, self.bound), (self.sgd_error, self.sgd_bound), (self.adamw_error, self.adamw_bound))
        return all(error <= bound for error, bound in pairs)


class Relative(NamedTuple):
    """The largest relative errors of a proof: over the tensor's own norm or the floor above, over the value itself."""

    gradients: float
    norm: float
    weights: float
    losses: float


class Verdict(NamedTuple):
    """The contract's `verify`. losses, grad_norms: (reference, worst of the ranks) of the SGD and the AdamW steps."""

    layout: ResolvedLayout
    tolerance: float
    parameters: list[ParameterError]
    losses: list[tuple[float, float]]
    grad_norms: list[tuple[float, float]]

    @property
    def numbers_agree(self) -> bool:
        return all(abs(a - b) <= self.tolerance * abs(a) for a, b in (*self.losses, *self.grad_norms))

    @property
    def passed(self) -> bool:
        return self.numbers_agree and all(parameter.passed for parameter in self.parameters)

    @property
    def worst(self) -> float:
        """The largest error over its bound."""
        ratios = [p.error / p.bound for p in self.parameters]
        ratios += [p.sgd_error / p.sgd_bound for p in self.parameters]
        ratios += [p.adamw_error / p.adamw_bound for p in self.parameters]
        return max(ratios)

    @property
    def relative(self) -> Relative:
        """What a report prints: the bounds without the tolerance in them."""
        parameters = self.parameters
        sides = [(p.sgd_error, p.sgd_bound) for p in parameters] + [(p.adamw_error, p.adamw_bound) for p in parameters]
        return Relative(
            gradients=self.tolerance * max(p.error / p.bound for p in parameters),
            norm=max(abs(a - b) / abs(a) for a, b in self.grad_norms),
            weights=self.tolerance * max(error / bound for error, bound in sides),
            losses=max(abs(a - b) / abs(a) for a, b in self.losses),
        )

    def failures(self) -> list[str]:
        """A line for each parameter or number out of bounds."""
        lines = [str(parameter) for parameter in self.parameters if not parameter.passed]
        for kind, pairs in (("loss", self.losses), ("gradient norm", self.grad_norms)):
            lines += [
                f"{kind} {step}: reference {a!r}, layout {b!r}"
                for step, (a, b) in enumerate(pairs)
                if not abs(a - b) <= self.tolerance * abs(a)
            ]
        return lines

    def to_dict(self) -> dict[str, Any]:
        reference, layout = self.grad_norms[0]
        return {
            "layout": self.layout.to_dict(),
            "passed": self.passed,
            "tolerance": self.tolerance,
            "parameters": [{**p._asdict(), "passed": p.passed} for p in self.parameters],
            "losses": [{"reference": a, "layout": b} for a, b in self.losses],
            "grad_norm": {"reference": reference, "layout": layout},
        }


def compare(
    spec: ModelSpec,
    layout: ResolvedLayout,
    reference: Reference,
    reports: Sequence[RankReport],
    tolerance: float = TOLERANCES["fp64"],
) -> Verdict:
    """Set the reports of all ranks beside the reference. tolerance: see TOLERANCES for each precision's."""
    table = {tensor.name: tensor for tensor in tensor_table(spec).values()}
    columns = []
    for kind in ("gradients", "after_sgd", "after_adamw"):
        full: dict[str, Tensor] = getattr(reference, kind)
        parts = [part for report in reports for part in getattr(report, kind)]
        columns.append((_errors(table, full, parts, layout.tp), _bounds(full, tolerance)))
    parameters = [
        ParameterError(name, *(side[name] for pair in columns for side in pair)) for name in reference.gradients
    ]
    return Verdict(
        layout,
        tolerance,
        parameters,
        _furthest(reference.losses, [report.losses for report in reports]),
        _furthest(reference.grad_norms, [report.grad_norms for report in reports]),
    )


def _bounds(full: dict[str, Tensor], tolerance: float) -> dict[str, float]:
    norms = {name: _norm(tensor) for name, tensor in full.items()}
    floor = FLOOR * math.hypot(*norms.values()) / math.sqrt(len(norms))
    return {name: tolerance * max(norm, floor) for name, norm in norms.items()}


def _errors(table: dict[str, TensorSpec], full: dict[str, Tensor], parts: Sequence[Part], tp: int) -> dict[str, float]:
    """Norm of the difference by name; of an element that several ranks hold, the worst copy counts."""
    squares: dict[str, dict[tuple[int, int, int], float]] = {name: {} for name in full}
    for part in parts:
        tensor = table[part.name]
        _, cut, _ = part_of(tensor, part.tp_index, tp)
        mine = shard_of(full[part.name], tensor, {"tp": (part.tp_index, tp)}).flatten()
        difference = part.values - mine[part.start : part.start + len(part.values)]
        key = (cut, part.start, len(part.values))
        square = _norm(difference) ** 2
        squares[part.name][key] = max(squares[part.name].get(key, 0.0), math.inf if math.isnan(square) else square)
    return {
        name: math.sqrt(sum(found.values())) if _complete(table[name], full[name], found, tp) else math.inf
        for name, found in squares.items()
    }


def _complete(tensor: TensorSpec, full: Tensor, found: dict[tuple[int, int, int], float], tp: int) -> bool:
    """Whether the parts cover the whole tensor."""
    _, _, cuts = part_of(tensor, 0, tp)
    local = shard_of(full, tensor, {"tp": (0, tp)}).numel()
    return sum(length for _, _, length in found) == cuts * local


def _furthest(reference: Sequence[float], reported: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
    columns = zip(*reported, strict=True)
    return [(a, max(column, key=lambda b: abs(b - a))) for a, column in zip(reference, columns, strict=True)]


def _norm(tensor: Tensor) -> float:
    return torch.linalg.vector_norm(tensor.double()).item()
