"""What an estimate says: the contract's `estimate` object as typed structs. Attributes carry the JSON's names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from fivefold.layout.layout import ResolvedLayout


class Parts(dict[str, Any]):
    """Named parts of a whole: a dict whose keys are attributes too, as in `est.step.breakdown_s.compute`."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"no part named '{name}'; there are {', '.join(self)}") from None


class Quantity(msgspec.Struct, frozen=True, kw_only=True):
    """A predicted number with its 80% interval and where the number comes from."""

    value: float
    low: float
    high: float
    provenance: str


class Assumption(msgspec.Struct, frozen=True, kw_only=True):
    """A number that the estimate took for granted, and its source."""

    field: str
    value: Any
    source: str


class Tensor(msgspec.Struct, frozen=True, kw_only=True):
    """One of the largest tensors (or groups of equal ones) alive at a peak."""

    name: str
    bytes: int


class StageMemory(msgspec.Struct, frozen=True, kw_only=True):
    """One pipeline rank at its own steady-state peak. in_flight: micro-batches held, chunks counted as 1 / vpp."""

    stage: int
    peak_bytes: int
    in_flight: float
    breakdown: Parts


class Phase(msgspec.Struct, frozen=True, kw_only=True):
    """One phase of training on the peak rank, bytes by category."""

    phase: str
    bytes: Parts


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """peak_bytes: what the caching allocator hands out at most (comparable with max_memory_allocated).

    reserved_bytes: what the device needs: peak, fragmentation, driver context and communication buffers; fits compares
    it with capacity_bytes. host_bytes: what one host needs where something is offloaded to its memory, which has
    host_capacity_bytes; None where nothing is.
    """

    peak_bytes: int
    reserved_bytes: int
    capacity_bytes: int
    peak_stage: int
    peak_phase: str
    largest: tuple[Tensor, ...]
    stages: tuple[StageMemory, ...]
    timeline: tuple[Phase, ...]
    outside_allocator: Parts
    host_bytes: int | None = None
    host_capacity_bytes: int | None = None


class Mfu(msgspec.Struct, frozen=True, kw_only=True):
    """Model FLOPs utilisation by convention, over the dense peak of the compute precision."""

    noncausal: float
    causal: float
    hardware: float


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One optimizer step. breakdown_s: critical path of the slowest stage; sums to seconds.value."""

    seconds: Quantity
    breakdown_s: Parts
    tokens_per_s: float
    tokens_per_s_per_gpu: float
    mfu: Mfu
    slowest_stage: int


class Params(msgspec.Struct, frozen=True, kw_only=True):
    """Exact parameter counts of the whole model, unpadded. trained: those of adapters, None where all are trained."""

    total: int
    active: int
    trained: int | None = None


class Flops(msgspec.Struct, frozen=True, kw_only=True):
    """Training FLOPs per token, forward and backward, by convention."""

    noncausal: float
    causal: float
    hardware: float


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of collective per step on the slowest stage."""

    axis: str
    grid: str
    collective: str
    count: int
    bytes_sent_per_rank: int
    level: str
    exposed_s: float


class RuleViolation(msgspec.Struct, frozen=True, kw_only=True):
    """A rule that the layout breaks (the contract's `rule`)."""

    id: str
    option: str
    value: Any
    legal: Any
    message: str
    source: str
    runtimes: tuple[str, ...]


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """Memory and step time of one layout. `memory`, `step` are None when the layout breaks a rule."""

    layout: ResolvedLayout
    valid: bool
    violations: tuple[RuleViolation, ...]
    fits: bool | None
    assumptions: tuple[Assumption, ...]
    memory: Memory | None
    step: Step | None
    params: Params
    flops_per_token: Flops
    traffic: tuple[Traffic, ...]
    inputs: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """The contract's JSON: schema, kind, version, inputs and the estimate's own fields."""
        return {**envelope("estimate", self.resolved_inputs()), **self.body()}

    def resolved_inputs(self) -> dict[str, Any]:
        """`inputs` for JSON: of the layout, too, every default that was used, where `inputs` has it as asked for."""
        return {**self.inputs, "layout": with_defaults(self.inputs["layout"], self.layout)}

    def save(self, path: str | Path) -> None:
        """Write the plan file (TOML) that fivefold.load_plan reads: model, cluster, workload, layout and runtime."""
        from fivefold.estimate.planfile import save_plan  # only saving needs it

        save_plan(self, path)

    def body(self) -> dict[str, Any]:
        """The estimate's own fields, without the envelope, as builtins."""
        fields = msgspec.to_builtins(self)
        fields.pop("inputs")
        return fields


def with_defaults(asked: dict[str, Any], layout: ResolvedLayout) -> dict[str, Any]:
    """A layout as asked for, as builtins, with what was left to the defaults taken from the resolved one."""
    return _filled(asked, layout.to_dict())


def _filled(asked: dict[str, Any], taken: dict[str, Any]) -> dict[str, Any]:
    return {
        name: _filled(value, taken[name]) if isinstance(value, dict) else taken.get(name) if value is None else value
        for name, value in asked.items()
    }


def envelope(kind: str, inputs: dict[str, Any]) -> dict[str, Any]:
    """The fields that every JSON document of fivefold has."""
    from fivefold import __version__

    return {"schema": "fivefold/1", "kind": kind, "version": __version__, "inputs": inputs}
