"""Intervals: an 80% range around a predicted step time, from the spread that validation measured.

Three things join as independent errors: the runtime's spread, which holds for every step; the owners of the step that
are less sure (fivefold.estimate.doubt); and, for a GPU that no training run was compared on, its curve.
"""

from __future__ import annotations

from math import hypot
from typing import TYPE_CHECKING

from fivefold.cluster import load_curve_of
from fivefold.estimate.result import Quantity

if TYPE_CHECKING:
    from fivefold.estimate.problem import Problem

NORMAL_80 = 1.2816  # half-width of the central 80% of a normal distribution, in standard deviations
# Mixtures of experts beside dense models: how evenly tokens fall on experts, which dispatcher moves them and which
# release ran are rarely stated (fit, with the widths of doubt.py: 36 published runs, docs/accuracy.md).
EXPERTS_SPREAD = 0.17


def relative_spread(problem: Problem, doubt: float) -> float:
    """Half-width of the 80% interval, relative to the value: of the user's own runs where they are fitted.

    doubt: what the owners of the step add, relative (fivefold.estimate.doubt).
    """
    experts = EXPERTS_SPREAD if problem.model.is_moe else 0.0
    if problem.fit is None:
        return hypot(problem.runtime.time_spread, doubt, experts, _level_spread(problem))
    known, beyond = (experts, 0.0) if problem.fit.experts else (0.0, experts)
    own = hypot(problem.runtime.time_spread, doubt, known)
    return hypot(problem.fit.scale * own if problem.fit.scale else problem.fit.spread, beyond)


def _level_spread(problem: Problem) -> float:
    """What the speed of the whole GPU may be off where no training run says: the curve's spread, of which nothing
    cancels between shapes. Where runs say, it is part of the runtimes' spread, which is that of those runs. Published
    runs on B200 come out 25% too fast with H100's shares of peak, those on H100 30% too slow with B200's, those on
    A100 and H100 5 to 7% off with each other's."""
    curve = load_curve_of(problem.cluster)
    return 0.0 if curve.in_runs else NORMAL_80 * curve.spread["gemm"]


def around(seconds: float, problem: Problem, doubt: float) -> Quantity:
    """The predicted seconds with their 80% interval."""
    spread = relative_spread(problem, doubt)
    profile = f"{problem.runtime.name} profile {problem.runtime.versions} on {problem.cluster.gpu.name}"
    origin = (
        f"{profile}; interval from the spread of published runs and what the step spends its time on"
        if problem.fit is None
        else f"{profile}, {problem.fit.provenance}; interval from their spread"
    )
    return Quantity(
        value=seconds,
        low=seconds / (1 + spread),
        high=seconds * (1 + spread),
        provenance=f"{origin}, +-{spread:.0%}",
    )
