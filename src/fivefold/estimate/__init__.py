"""The models of memory and time: a ledger of operations per block, priced on a cluster, assembled into stages, a step
and a peak. `estimate` prices one layout; the search calls the same `Kernel` with many."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from fivefold.estimate.estimate import estimate
from fivefold.estimate.kernel import Kernel, Problem
from fivefold.estimate.result import Estimate, Quantity

__all__ = ["Estimate", "Kernel", "Problem", "Quantity", "estimate"]


class _CallableRoom(ModuleType):
    """The contract's function and the room have one name: importing any part of the room makes `fivefold.estimate` this
    module, so the module itself answers the call (docs/decisions/0002-callable-estimate.md)."""

    def __call__(self, *args: Any, **kwargs: Any) -> Estimate:
        return estimate(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableRoom
