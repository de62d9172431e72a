"""The models of memory and time: a ledger of operations per block, priced on a cluster, assembled into stages, a step
and a peak. `estimate` prices one layout; the search calls the same `Kernel` with many."""

from __future__ import annotations

from fivefold.estimate.estimate import estimate
from fivefold.estimate.kernel import Kernel, Problem
from fivefold.estimate.result import Estimate, Quantity

__all__ = ["Estimate", "Kernel", "Problem", "Quantity", "estimate"]
