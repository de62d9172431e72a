"""Reasons for a plan: what each dimension bought and cost, why each neighbour loses, what would do better."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from fivefold.estimate import Estimate, Problem
from fivefold.estimate.result import Parts
from fivefold.layout import Offload
from fivefold.layout.layout import CHUNKS, CP_KINDS, SPLIT_BACKWARD, Layout, Recompute
from fivefold.layout.stages import resolve
from fivefold.search.playbook import follow_playbook
from fivefold.search.price import Priced, price_all, step_seconds
from fivefold.search.result import DimensionEffect, Limit, Neighbour, Why
from fivefold.search.stage_counts import stage_counts
from fivefold.search.values import EVEN_STAGES
from fivefold.search.words import duration, gigabytes, layout_words, percent

replace = msgspec.structs.replace

# The axis in `traffic` whose link each dimension loads.
_TRAFFIC_AXIS = {"tp": "tp", "cp": "cp", "pp": "pp", "vpp": "pp", "ep": "ep", "etp": "etp", "zero": "dp", "dp": "dp"}
_SAME_S = 5e-5  # less reads 0.0 ms
_PLAIN_DISPATCH: dict[str, Any] = {"moe_dispatcher": "alltoall"}
_UNUSED: dict[str, Any] = {"tp": 1, "cp": 1, "pp": 1, "vpp": 1, "ep": 1, "etp": 1, "dp_replicate": 1}


def reasons(problem: Problem, runtime: str, best: Layout, estimate: Estimate, alternatives: str) -> Why:
    """Why `best` is the choice. alternatives: a sentence on how it was chosen among ties."""
    return Why(
        summary=_summary(problem, best, estimate, alternatives),
        dimensions=dimensions(problem, runtime, best, estimate),
        neighbours=neighbours(problem, runtime, best, estimate),
        playbook=follow_playbook(problem, runtime, estimate),
        limits=limits(problem, best, estimate),
    )


def _summary(problem: Problem, best: Layout, estimate: Estimate, alternatives: str) -> str:
    step, memory = estimate.step, estimate.memory
    if step is None or memory is None:
        return ""
    owners = sorted(step.breakdown_s.items(), key=lambda item: -item[1])
    lost = [f"{name} {value / step.seconds.value:.0%}" for name, value in owners if name != "compute" and value > 0][:3]
    room = memory.capacity_bytes - memory.reserved_bytes
    return (
        f"{layout_words(best)} on {problem.cluster.gpus} GPUs: {duration(step.seconds.value)} per step, of which "
        f"compute {step.breakdown_s['compute'] / step.seconds.value:.0%}; the rest is mostly "
        f"{', '.join(lost) or 'nothing'}. "
        f"It needs {gigabytes(memory.reserved_bytes)} of {gigabytes(memory.capacity_bytes)} on its fullest stage "
        f"({memory.peak_stage}), {gigabytes(room)} to spare. {alternatives}"
    )


# ---------------------------------------------------------------- dimensions


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


def _effect(axis: str, value: Any, outcomes: list[Priced], estimate: Estimate) -> DimensionEffect:
    level = _level(estimate, axis)
    outcome = next((each for each in outcomes if each.broken is None), outcomes[0])
    instead = layout_words(outcome.layout)
    if outcome.broken is not None or estimate.step is None or estimate.memory is None:
        message = f"{axis} cannot be left out here: {outcome.broken}"
        return DimensionEffect(
            axis=axis, value=value, saves_bytes=None, costs_s=None, level=level, instead=instead, message=message
        )
    saves = (outcome.reserved_bytes or 0) - estimate.memory.reserved_bytes
    costs = estimate.step.seconds.value - (outcome.seconds or 0.0)
    cost = f"costs {duration(costs)}" if costs >= 0 else f"gains {duration(-costs)}"
    bytes_ = f"saves {gigabytes(saves)}" if saves >= 0 else f"takes {gigabytes(-saves)} more"
    needed = "" if outcome.fits else "; without it the layout does not fit"
    where = f" on {level}" if level not in ("none", "") else ""
    share = percent(costs, outcome.seconds or 0.0)
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


# ---------------------------------------------------------------- neighbours


def neighbours(problem: Problem, runtime: str, best: Layout, estimate: Estimate) -> tuple[Neighbour, ...]:
    """Every layout one step away that is worse, and in which way."""
    changes = _steps(problem, best)
    priced = iter(price_all(problem, runtime, [layout for _, layouts in changes for layout in layouts]))
    rows = [
        _neighbour(change, _best_of([next(priced) for _ in layouts]), estimate, problem) for change, layouts in changes
    ]
    order = {"slower": 0, "memory": 1, "rule": 2}
    return tuple(sorted(rows, key=lambda row: (order[row.reason], row.delta_s or 0.0, row.over_bytes or 0)))


def _best_of(outcomes: list[Priced]) -> Priced:
    """The fastest that fits, else the smallest that starts, else the first."""

    def worth(each: Priced) -> tuple[bool, bool, float]:
        return each.broken is not None, not each.fits, (each.seconds if each.fits else each.reserved_bytes) or 0

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


def _neighbour(change: str, outcome: Priced, estimate: Estimate, problem: Problem) -> Neighbour:
    layout = resolve(outcome.layout, problem.model, problem.cluster.gpus, problem.work, problem.runtime.name)
    options = Parts(msgspec.to_builtins(outcome.layout))
    base = {"layout": Parts(layout.to_dict()), "options": options, "change": change}
    seconds = estimate.step.seconds.value if estimate.step else 0.0
    if outcome.broken is not None:
        return Neighbour(**base, reason="rule", delta_s=None, over_bytes=None, stage=None, message=outcome.broken)
    delta = (outcome.seconds or 0.0) - seconds
    if not outcome.fits:
        over = max((outcome.reserved_bytes or 0) - problem.cluster.gpu.memory_bytes, 0)
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


# ---------------------------------------------------------------- limits


def limits(problem: Problem, best: Layout, estimate: Estimate) -> tuple[Limit, ...]:
    """What the same layout would gain from faster links, more batch, no waits or no bubble, largest first."""
    if estimate.step is None:
        return ()
    now = estimate.step.seconds.value
    rows: list[Limit] = []
    for i, link in enumerate(problem.cluster.links):
        if all(row.level != link.name for row in estimate.traffic):
            continue
        faster = replace(link, bandwidth_per_s=2 * link.bandwidth_per_s)
        links = (*problem.cluster.links[:i], faster, *problem.cluster.links[i + 1 :])
        rows.append(_limit(f"twice the bandwidth of {link.name}", now, _changed(problem, best, links=links)))
    batch = replace(problem.work, global_batch=2 * problem.work.global_batch)
    per_batch = step_seconds(Problem(problem.model, problem.cluster, batch, problem.runtime), best) / 2
    rows.append(_limit("twice the global batch (per the same number of tokens)", now, per_batch))
    if estimate.step.breakdown_s["host"] > 0:
        launched = replace(problem.runtime, launch_host_s=0.0)
        free = step_seconds(Problem(problem.model, problem.cluster, problem.work, launched), best)
        rows.append(_limit("no waiting for the host (CUDA graphs and larger micro-batches come near)", now, free))
    bubble = estimate.step.breakdown_s["bubble"]
    if bubble > 0:
        rows.append(
            _limit("no pipeline bubble (zero-bubble schedules come near; searched when pinned)", now, now - bubble)
        )
    return tuple(sorted(rows, key=lambda row: -(row.gain_s or 0.0)))


def _changed(problem: Problem, best: Layout, **cluster: Any) -> float:
    changed = replace(problem.cluster, **cluster)
    return step_seconds(Problem(problem.model, changed, problem.work, problem.runtime), best)


def _limit(change: str, now: float, then: float) -> Limit:
    gain = now - then
    return Limit(change=change, gain_s=gain, message=f"{change}: {duration(gain)} per step ({gain / now:.1%})")


def memory_limit(seconds: float, reserved: float, now: float, words: str) -> Limit | None:
    """What more memory would allow: the fastest layout that does not fit, if it beats the choice."""
    if seconds >= now:
        return None
    return Limit(
        change=f"{gigabytes(reserved)} of memory per GPU",
        gain_s=now - seconds,
        message=f"with {gigabytes(reserved)} per GPU, {words} would take {duration(seconds)} per step "
        f"({(now - seconds) / now:.1%} less)",
    )
