"""The search: the whole space of layouts, pruned by rules, memory and bounds, and the reasons for what it found."""

from __future__ import annotations

from fivefold.search.pins import PIN_NAMES
from fivefold.search.result import Plan
from fivefold.search.search import OBJECTIVES, plan

__all__ = ["OBJECTIVES", "PIN_NAMES", "Plan", "plan"]
