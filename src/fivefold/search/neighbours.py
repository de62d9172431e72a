"""Why each neighbour of a plan loses: every layout one step away, and whether it is slower, too large or refused."""

from __future__ import annotations

from typing import Any

import msgspec

from fivefold.estimate import Estimate, Problem
from fivefold.estimate.result import Parts
from fivefold.layout.layout import CHUNKS, CP_KINDS, SPLIT_BACKWARD, Layout, Recompute
from fivefold.layout.stages import resolve
from fivefold.search.price import Outcome, Refused, price_all
from fivefold.search.result import Neighbour
from fivefold.search.stage_counts import stage_counts
from fivefold.search.values import EVEN_STAGES
from fivefold.search.words import duration, gigabytes, percent

replace = msgspec.structs.replace

_SAME_S = 5e-5  # less reads 0.0 ms


def neighbours(problem: Problem, runtime: str, best: Layout, estimate: Estimate) -> tuple[Neighbour, ...]:
    """Every layout one step away that is worse, and in which way."""
    changes = _steps(problem, best)
    priced = iter(price_all(problem, runtime, [layout for _, layouts in changes for layout in layouts]))
    rows = [
        _neighbour(change, _best_of([next(priced) for _ in layouts]), estimate, problem) for change, layouts in changes
    ]
    order = {"slower": 0, "memory": 1, "rule": 2}
    return tuple(sorted(rows, key=lambda row: (order[row.reason], row.delta_s or 0.0, row.over_bytes or 0)))


def _best_of(outcomes: list[Outcome]) -> Outcome:
    """The fastest that fits, else the smallest that starts, else the first."""

    def worth(each: Outcome) -> tuple[int, float]:
        if isinstance(each, Refused):
            return 2, 0.0
        return (0, each.seconds) if each.fits else (1, each.reserved_bytes)

    return min(outcomes, key=worth)


def _steps(problem: Problem, best: Layout) -> list[tuple[str, list[Layout]]]:
    """(what changes, layouts that have it) for each single step; recomputation, sharding and schedule included.

    What the search chooses with a degree has a layout for each choice: the kind of CP, the blocks on the end stages.
    """
    out: list[tuple[str, list[Layout]]] = []
    moe = problem.model.is_moe
    degrees = ("tp", "cp", "pp", "micro_batch", *(("ep",) if moe else ()))
    for name in degrees:
        value = getattr(best, name)
        for new in (value * 2, value // 2 if value % 2 == 0 else 0):
            if new < 1:
                continue
            changes: dict[str, Any] = {name: new}
            if name == "tp":
                changes |= {"sequence_parallel": None, "etp": 1 if best.etp == 1 else new}
            if name == "pp":
                changes |= EVEN_STAGES
                changes |= {"vpp": 1, "schedule": None} if new == 1 else {}
            out.append((f"{name} {value} -> {new}", _chosen_with(problem, name, replace(best, **changes))))
    out += [(change, [layout]) for change, layout in _schedule_steps(problem, best)]
    for kind in ("none", "full"):
        if best.recompute.kind != kind:
            out.append((f"recompute {best.recompute.kind} -> {kind}", [replace(best, recompute=Recompute(kind=kind))]))
    for zero in problem.runtime.zero_stages:
        if zero != best.zero:
            overlap = replace(best.overlap, param=None)
            changed = replace(best, zero=zero, overlap=overlap, dp_replicate=1 if zero == 0 else best.dp_replicate)
            out.append((f"zero {best.zero} -> {zero}", [changed]))
    if best.cp > 1:
        other = "a2a" if best.cp_kind == "p2p" else "p2p"
        out.append((f"cp_kind {best.cp_kind} -> {other}", [replace(best, cp_kind=other)]))
    return out


def _chosen_with(problem: Problem, name: str, layout: Layout) -> list[Layout]:
    """`layout` in every way that the search would try beside a new degree, its own first."""
    if name == "cp" and layout.cp > 1:
        return [layout, *(replace(layout, cp_kind=kind) for kind in CP_KINDS if kind != layout.cp_kind)]
    if name == "pp":
        splits = [
            replace(
                layout,
                first_stage_layers=each.first_stage_layers or None,
                last_stage_layers=each.last_stage_layers or None,
                account_for_embedding=bool(each.account_for_embedding),
                account_for_loss=bool(each.account_for_loss),
            )
            for each in stage_counts(problem, layout.pp, layout.vpp)
        ]
        return [layout, *(each for each in splits if each != layout)]
    return [layout]


def _schedule_steps(problem: Problem, best: Layout) -> list[tuple[str, Layout]]:
    if best.pp == 1:
        return []
    out: list[tuple[str, Layout]] = []
    layers = problem.model.layers
    chunks = [v for v in range(1, layers // best.pp + 1) if layers % (best.pp * v) == 0] or [1]
    for v in {*[c for c in chunks if c < best.vpp][-1:], *[c for c in chunks if c > best.vpp][:1]}:
        out.append((f"vpp {best.vpp} -> {v}", replace(best, vpp=v, schedule=None)))
    now = best.schedule or ("interleaved" if best.vpp > 1 else "1f1b")
    if best.vpp == 1 and now != "afab":
        out.append((f"schedule {now} -> afab", replace(best, schedule="afab")))
    for name, (fewest, _) in CHUNKS.items():
        if name in SPLIT_BACKWARD and name in problem.runtime.schedules and now != name and best.vpp == fewest:
            out.append((f"schedule {now} -> {name}", replace(best, schedule=name)))
    return out


def _neighbour(change: str, outcome: Outcome, estimate: Estimate, problem: Problem) -> Neighbour:
    layout = resolve(outcome.layout, problem.model, problem.cluster.gpus, problem.work, problem.runtime.name)
    options = Parts(msgspec.to_builtins(outcome.layout))
    base = {"layout": Parts(layout.to_dict()), "options": options, "change": change}
    seconds = estimate.step.seconds.value if estimate.step else 0.0
    if isinstance(outcome, Refused):
        return Neighbour(**base, reason="rule", delta_s=None, over_bytes=None, stage=None, message=outcome.message)
    delta = outcome.seconds - seconds
    if not outcome.fits:
        over = max(outcome.reserved_bytes - problem.cluster.gpu.memory_bytes, 0)
        message = (
            "needs more host memory than a node has"
            if not over
            else f"needs {gigabytes(over)} more than the GPU has, on stage {outcome.stage}"
        )
        return Neighbour(**base, reason="memory", delta_s=delta, over_bytes=over, stage=outcome.stage, message=message)
    if abs(delta) < _SAME_S:
        message = "takes the same time"
    elif delta >= 0:
        message = f"{duration(delta)} slower per step ({percent(delta, seconds)})"
    else:
        message = f"{duration(-delta)} faster per step ({percent(delta, seconds)}): a tie with more axes, or pinned out"
    return Neighbour(**base, reason="slower", delta_s=delta, over_bytes=None, stage=outcome.stage, message=message)
