"""What each dimension of a plan bought and cost: the plan beside the same layout without it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from fivefold.estimate import Estimate, Problem
from fivefold.layout import Offload
from fivefold.layout.layout import Layout, Recompute
from fivefold.search.price import Outcome, Priced, Refused, price_all
from fivefold.search.result import DimensionEffect
from fivefold.search.values import EVEN_STAGES
from fivefold.search.words import duration, gigabytes, layout_words, percent

replace = msgspec.structs.replace

# The axis in `traffic` whose link each dimension loads.
_TRAFFIC_AXIS = {"tp": "tp", "cp": "cp", "pp": "pp", "vpp": "pp", "ep": "ep", "etp": "etp", "zero": "dp", "dp": "dp"}
_PLAIN_DISPATCH: dict[str, Any] = {"moe_dispatcher": "alltoall"}
_UNUSED: dict[str, Any] = {"tp": 1, "cp": 1, "pp": 1, "vpp": 1, "ep": 1, "etp": 1, "dp_replicate": 1}


def dimensions(problem: Problem, runtime: str, best: Layout, estimate: Estimate) -> tuple[DimensionEffect, ...]:
    """Every dimension in use against the same layout without it; the ranks it frees go to data parallelism."""
    removals = _removals(best)
    options = [option for _, _, options in removals for option in options]
    priced = iter(price_all(problem, runtime, options))
    effects: list[DimensionEffect] = []
    for axis, value, variants in removals:
        outcomes = [next(priced) for _ in variants]
        effects.append(_effect(axis, value, outcomes, estimate))
    return (*effects, *_of_the_work(problem, runtime, best, estimate))


def _of_the_work(problem: Problem, runtime: str, best: Layout, estimate: Estimate) -> Iterator[DimensionEffect]:
    """The options that are the workload's and not the layout's, each against the same layout without it."""
    work = problem.work
    for axis, value, without in (
        ("offload", work.offload.words, {"offload": Offload()} if work.offload.anything else None),
        ("moe_dispatcher", work.moe_dispatcher, _PLAIN_DISPATCH if work.moe_dispatcher != "alltoall" else None),
        ("cuda_graphs", True, {"cuda_graphs": False} if work.cuda_graphs else None),
    ):
        if without is not None:
            changed = Problem(problem.model, problem.cluster, replace(work, **without), problem.runtime)
            yield _effect(axis, value, price_all(changed, runtime, [best]), estimate)


def _removals(best: Layout) -> list[tuple[str, Any, list[Layout]]]:
    """(axis, its value, layouts without it by micro-batch, the same micro-batch first)."""
    out: list[tuple[str, Any, list[Layout]]] = []
    for axis, unused in _UNUSED.items():
        value = getattr(best, axis)
        if value == unused:
            continue
        changes: dict[str, Any] = {axis: unused}
        if axis == "pp":
            changes |= {"vpp": 1, "schedule": None, **EVEN_STAGES}
        if axis == "vpp":
            changes["schedule"] = None
        if axis == "tp":
            changes |= {"sequence_parallel": None, "etp": 1}
        out.append((axis, value, _with_micro_batches(best, **changes)))
    if best.zero > 0:
        out.append(
            ("zero", best.zero, [replace(best, zero=0, dp_replicate=1, overlap=replace(best.overlap, param=None))])
        )
    if best.sequence_parallel and best.tp > 1:
        out.append(("sequence_parallel", True, [replace(best, sequence_parallel=False)]))
    if best.recompute.kind != "none":
        out.append(("recompute", best.recompute.kind, [replace(best, recompute=Recompute())]))
    return out


def _with_micro_batches(best: Layout, **changes: Any) -> list[Layout]:
    """`best` changed, at its own micro-batch and, in case that no longer divides, at smaller ones."""
    sizes = [best.micro_batch] + [size for size in (8, 4, 2, 1) if size < best.micro_batch]
    return [replace(best, **changes, micro_batch=size) for size in sizes]


def _effect(axis: str, value: Any, outcomes: list[Outcome], estimate: Estimate) -> DimensionEffect:
    level = _level(estimate, axis)
    outcome = next((each for each in outcomes if isinstance(each, Priced)), outcomes[0])
    instead = layout_words(outcome.layout)
    step, memory = estimate.step, estimate.memory
    if not isinstance(outcome, Priced) or step is None or memory is None:
        refused = outcome.message if isinstance(outcome, Refused) else "the plan itself has no price"
        message = f"{axis} cannot be left out here: {refused}"
        return DimensionEffect(
            axis=axis, value=value, saves_bytes=None, costs_s=None, level=level, instead=instead, message=message
        )
    saves = outcome.reserved_bytes - memory.reserved_bytes
    costs = step.seconds.value - outcome.seconds
    cost = f"costs {duration(costs)}" if costs >= 0 else f"gains {duration(-costs)}"
    bytes_ = f"saves {gigabytes(saves)}" if saves >= 0 else f"takes {gigabytes(-saves)} more"
    needed = "" if outcome.fits else "; without it the layout does not fit"
    where = f" on {level}" if level not in ("none", "") else ""
    share = percent(costs, outcome.seconds)
    return DimensionEffect(
        axis=axis,
        value=value,
        saves_bytes=saves,
        costs_s=costs,
        level=level,
        instead=instead,
        message=f"{axis}={value} {bytes_} per GPU and {cost} per step ({share}){where}{needed}.",
    )


def _level(estimate: Estimate, axis: str) -> str:
    """The link that an axis crosses, by its largest traffic."""
    if axis == "offload":
        return "host link"
    rows = [row for row in estimate.traffic if row.axis == _TRAFFIC_AXIS.get(axis)]
    return max(rows, key=lambda row: row.bytes_sent_per_rank).level if rows else "none"
