"""Intervals: an 80% range around a predicted step time, from the spread that validation measured.

The relative spread joins the runtime's (what published runs scatter around predictions, docs/accuracy.md) and the
GPU's matrix-product curve (how well its constants fit), as independent errors.
"""

from __future__ import annotations

from math import hypot
from typing import TYPE_CHECKING

from fivefold.cluster import load_curve_of
from fivefold.estimate.result import Quantity

if TYPE_CHECKING:
    from fivefold.estimate.problem import Problem

_NORMAL_80 = 1.2816  # half-width of the central 80% of a normal distribution, in standard deviations
# A step sums over many shapes, whose errors partly cancel: half of one shape's spread is kept.
_SHAPES_KEPT = 0.5
# Mixtures of experts beside dense models: how evenly tokens fall on experts, which dispatcher moves them and which
# release ran are rarely stated (80% of 36 published runs lie within 24%, docs/accuracy.md).
_EXPERTS = 0.22


def relative_spread(problem: Problem) -> float:
    """Half-width of the 80% interval, relative to the value: of the user's own runs where they are fitted."""
    if problem.fit is not None:
        beyond = _EXPERTS if problem.model.is_moe and not problem.fit.experts else 0.0
        return hypot(problem.fit.spread, beyond)
    curve = load_curve_of(problem.cluster)
    shapes = _NORMAL_80 * _SHAPES_KEPT * curve.spread.get("gemm", 0.1)
    return hypot(problem.runtime.time_spread, shapes, _EXPERTS if problem.model.is_moe else 0.0)


def around(seconds: float, problem: Problem) -> Quantity:
    """The predicted seconds with their 80% interval."""
    spread = relative_spread(problem)
    profile = f"{problem.runtime.name} profile {problem.runtime.versions} on {problem.cluster.gpu.name}"
    origin = (
        f"{profile}; interval from the spread of published runs and of the compute curve"
        if problem.fit is None
        else f"{profile}, {problem.fit.provenance}; interval from their spread"
    )
    return Quantity(
        value=seconds,
        low=seconds / (1 + spread),
        high=seconds * (1 + spread),
        provenance=f"{origin}, +-{spread:.0%}",
    )
