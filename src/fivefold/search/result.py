"""What a search says: the contract's `plan` object as typed structs."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from fivefold.estimate.result import Estimate, Parts, envelope
from fivefold.search.budget import Budget, budget_of

Objective = Literal["tokens_per_s", "gpus", "memory", "time", "cost"]


class DimensionEffect(msgspec.Struct, frozen=True, kw_only=True):
    """What one axis or option of the best layout bought and cost, by taking it away.

    saves_bytes: peak bytes per GPU that it saves. costs_s: seconds per step that it adds (negative: it gains time).
    level: the link that its communication crosses. instead: the layout without it, best of its kind, in words.
    """

    axis: str
    value: Any
    saves_bytes: int | None
    costs_s: float | None
    level: str
    instead: str
    message: str


class Neighbour(msgspec.Struct, frozen=True, kw_only=True):
    """A layout one step away and why it loses. options: the same as fivefold.Layout takes them, to price it again."""

    layout: Parts
    options: Parts
    change: str
    reason: Literal["slower", "memory", "rule"]
    delta_s: float | None
    over_bytes: int | None
    stage: int | None
    message: str


class PathStep(msgspec.Struct, frozen=True, kw_only=True):
    """One decision of the playbook, with what it costs at that point."""

    step: str
    rule_id: str
    decision: str
    seconds: float | None = None
    reserved_bytes: int | None = None


class PlaybookPath(msgspec.Struct, frozen=True, kw_only=True):
    """The rule-based path for the same question. gap_s: its step time minus the best plan's."""

    path: tuple[PathStep, ...]
    estimate: Estimate | None
    gap_s: float | None


class Limit(msgspec.Struct, frozen=True, kw_only=True):
    """What would have to change to do better. gain_s: seconds per step saved if it did."""

    change: str
    gain_s: float | None
    message: str


class Why(msgspec.Struct, frozen=True, kw_only=True):
    """Reasons for the first plan."""

    summary: str
    dimensions: tuple[DimensionEffect, ...]
    neighbours: tuple[Neighbour, ...]
    playbook: PlaybookPath | None
    limits: tuple[Limit, ...]


class CountRow(msgspec.Struct, frozen=True, kw_only=True):
    """A number of GPUs and what the best layout on it takes for the token budget.

    seconds, gpu_hours, cost: on the wall clock, failures included; None where nothing fits, which `reason` says.
    """

    gpus: int
    nodes: int
    global_batch: int
    layout: str
    step_s: float | None
    mfu: float | None
    goodput: float | None
    seconds: float | None
    gpu_hours: float | None
    cost: float | None
    in_time: bool
    reason: str = ""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to "which layout": counts of the search, the best plans and why.

    searched: candidates whose degrees divide; valid: obey every rule (of more than 1.5 million candidates, without the
    combinations that were set aside because no recomputation can make them fit or worth having); fitting: fit the
    memory; priced: step time computed; bounded: fitting, but excluded because a bound shows that they cannot be among
    the best.
    plans: the first is the choice; then the best of every other combination of degrees, fastest first.
    fastest: index of the fastest plan; it differs from 0 when a plan with fewer active axes lies within the tie.
    pareto: indices of plans that no layout beats in both memory and time; of a long front some are shown.
    nearest: when nothing fits, the layout that misses by least.
    counts: when the fewest GPUs that finish in time were asked for, every number that was tried.
    """

    searched: int
    valid: int
    fitting: int
    priced: int
    bounded: int
    seconds_used: float
    objective: Objective
    gpus: int
    plans: tuple[Estimate, ...]
    fastest: int | None
    pareto: tuple[int, ...]
    why: Why | None
    budget: Budget | None
    nearest: Estimate | None
    advice: tuple[str, ...]
    notes: tuple[str, ...]
    inputs: dict[str, Any]
    counts: tuple[CountRow, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """The contract's JSON."""
        fields = msgspec.to_builtins(self)
        fields.pop("inputs")
        playbook = (fields["why"] or {}).get("playbook") or {}
        for estimate in [*fields["plans"], fields["nearest"], playbook.get("estimate")]:
            if estimate:
                # All estimates of a plan have the plan's inputs, but for the layout, which each one gives.
                estimate.pop("inputs")
        return {**envelope("plan", self.inputs), **fields}


__all__ = [
    "Budget",
    "CountRow",
    "DimensionEffect",
    "Limit",
    "Neighbour",
    "Objective",
    "PathStep",
    "Plan",
    "PlaybookPath",
    "Why",
    "budget_of",
]
