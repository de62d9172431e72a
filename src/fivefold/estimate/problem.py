"""Problem: the question that an estimate or a search answers."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import msgspec

from fivefold.cluster import Cluster
from fivefold.cluster.calibration import Fit
from fivefold.layout.workload import Workload
from fivefold.model.spec import ModelSpec
from fivefold.runtime import Profile


@dataclass(slots=True, frozen=True)
class Problem:
    """What is planned, on what, for how much work, by which framework.

    applied: whether cluster and runtime hold the numbers of the cluster's calibration already. Raises FivefoldError
    for a calibration of another GPU or runtime.
    """

    model: ModelSpec
    cluster: Cluster
    work: Workload
    runtime: Profile
    applied: bool = False

    def __post_init__(self) -> None:
        _ = self.fit  # refuses one that is not for this pair

    @property
    def fit(self) -> Fit | None:
        """The cluster's calibration for this GPU and runtime."""
        calibration = self.cluster.calibration
        return None if calibration is None else calibration.fit_of(self.cluster.gpu.name, self.runtime.name)

    def dispatched(self) -> Problem:
        """The problem with what its dispatcher of tokens changes in the runtime's profile."""
        if self.work.moe_dispatcher != "deepep" or self.runtime.tokens_sent_once:
            return self
        return dataclasses.replace(self, runtime=msgspec.structs.replace(self.runtime, tokens_sent_once=True))

    @property
    def step_overhead_s(self) -> float:
        """Seconds of a step's host work that no stream hides, on this cluster's hosts."""
        return self.runtime.step_overhead_s * self.cluster.host_work_ratio

    @property
    def fully_sharded(self) -> bool:
        return self.runtime.sharding == "fully_sharded"

    @property
    def sums_in_full(self) -> bool:
        """Whether every rank gets the whole sum of the gradients under ZeRO-1 too."""
        in_bf16 = self.runtime.bf16_all_reduces and self.work.precision == "bf16"
        return self.runtime.sharded_reduced_at_once or in_bf16

    @property
    def by_unit(self) -> bool:
        """Whether some ZeRO stages of the runtime gather and scatter unit by unit, in every micro-batch."""
        return self.runtime.sharding in ("fully_sharded", "buckets")
