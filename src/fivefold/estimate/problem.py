"""Problem: the question that an estimate or a search answers."""

from __future__ import annotations

from dataclasses import dataclass

from fivefold.cluster import Cluster
from fivefold.layout.workload import Workload
from fivefold.model.spec import ModelSpec
from fivefold.runtime import Profile


@dataclass(slots=True, frozen=True)
class Problem:
    """What is planned, on what, for how much work, by which framework."""

    model: ModelSpec
    cluster: Cluster
    work: Workload
    runtime: Profile

    @property
    def fully_sharded(self) -> bool:
        return self.runtime.sharding == "fully_sharded"

    @property
    def by_unit(self) -> bool:
        """Whether some ZeRO stages of the runtime gather and scatter unit by unit, in every micro-batch."""
        return self.runtime.sharding in ("fully_sharded", "buckets")
