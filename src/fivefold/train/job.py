"""What is to be trained: a plan's model, layout and work, without what only the planner needs. Imports no PyTorch."""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from fivefold.layout import Context, Layout, ResolvedLayout, Violation, Workload, resolve, violations
from fivefold.model import ModelSpec


class Job(Struct, frozen=True, kw_only=True):
    """gpus: ranks of the job. gpus_per_node, scale_up_size: of its cluster, for the rules that ask.
    runtime: whose rules the plan obeys, "megatron" or "megatron@0.16"."""

    model: ModelSpec
    layout: Layout
    work: Workload
    gpus: int
    gpus_per_node: int
    scale_up_size: int
    runtime: str

    @property
    def resolved(self) -> ResolvedLayout:
        return resolve(self.layout, self.model, self.gpus, self.work, self.runtime)

    @property
    def model_ranks(self) -> int:
        """Ranks of one data-parallel replica."""
        return self.layout.tp * self.layout.cp * self.layout.pp

    def broken(self) -> list[Violation]:
        """The shared rules of the runtime that it breaks."""
        context = Context(
            model=self.model, cluster_gpus=self.gpus, gpus_per_node=self.gpus_per_node,
            scale_up_size=self.scale_up_size, work=self.work, runtime=self.runtime,
        )  # fmt: skip
        return violations(self.layout, context)

    def with_batch(self, micro_batch: int, micro_batches: int, dp: int) -> Job:
        """The same job on dp replicas that run so many micro-batches each."""
        return replace(
            self,
            layout=replace(self.layout, micro_batch=micro_batch),
            work=replace(self.work, global_batch=micro_batch * micro_batches * dp),
            gpus=self.model_ranks * dp,
        )
