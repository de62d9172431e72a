"""Moving a plan: the same recipe on another GPU, another number of them, or another runtime.

What can be kept is kept. The layouts that differ from the given one in the fewest options are tried first; of those
that obey the rules and fit, the fastest is taken. Each change then says what happens without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product
from typing import Any, Literal

import msgspec
import numpy as np

from fivefold.errors import option_of
from fivefold.estimate import Estimate, Kernel, Problem, estimate
from fivefold.estimate.estimate import rule_context
from fivefold.layout.columns import Columns
from fivefold.layout.divisors import divisors
from fivefold.layout.layout import CP_KINDS, RECOMPUTE_KINDS, Layout, Recompute
from fivefold.layout.rules import valid_mask
from fivefold.layout.workload import Workload
from fivefold.search.price import Outcome, Refused, price_all, step_seconds, usable
from fivefold.search.values import EVEN_STAGES
from fivefold.search.words import duration, gigabytes, percent

replace = msgspec.structs.replace

_MOST_CHANGES = 3
_LARGEST_DEGREE, _LARGEST_MICRO_BATCH = 1024, 64  # that are tried
_PRECISIONS = {"mxfp8": ("fp8", "bf16"), "nvfp4": ("fp8", "bf16"), "fp8": ("bf16",), "fp16": ("bf16",), "bf16": ()}
_RECOMPUTED = (1, 2, 4, 8, 16, 32)
Change = dict[str, Any]


class Move(msgspec.Struct, frozen=True, kw_only=True):
    """One option that had to change. kind: what keeping it would break: a rule, the memory, or (with "together") only
    the combination with the other changes. message: that, in words."""

    option: str
    old: Any
    new: Any
    kind: Literal["rule", "memory", "together"]
    message: str


class Moved(msgspec.Struct, frozen=True, kw_only=True):
    """A plan moved. before: on its own cluster; after: on the new one, None where up to three changes do not make it
    run. unchanged: what becomes of the layout as it was on the new cluster, in words. changes: see Move. kept: options
    that are not at their defaults and stay. best_gain_s: seconds per step that the best free layout saves."""

    before: Estimate
    after: Estimate | None
    unchanged: str
    changes: tuple[Move, ...]
    kept: tuple[str, ...]
    best_gain_s: float | None = None


def move(before: Estimate, problem: Problem, layout: Layout, runtime: str, fixed: tuple[str, ...] = ()) -> Moved:
    """`layout` on the cluster of `problem` with as few changes as possible.

    before: the plan's estimate where it comes from. fixed: options that the user gave, which do not change.
    """
    changes: list[Move] = []
    target = _with_precision(problem, changes)
    as_it_was = price_all(target, runtime, [layout])[0]
    chosen = layout if usable(as_it_was) else _nearest(target, layout, runtime, fixed)
    after = None
    if chosen is not None:
        after = estimate(target.model, target.cluster, target.work, chosen, runtime)
        changes += _explained(target, layout, chosen, runtime)
    return Moved(
        before=before,
        after=after,
        unchanged=_outcome(as_it_was, target, "" if target is problem else ", but for its precision,"),
        changes=tuple(changes),
        kept=_kept(layout, chosen),
    )


def _with_precision(problem: Problem, changes: list[Move]) -> Problem:
    """The problem in a precision that the GPU and the runtime have."""
    work = problem.work
    peaks = problem.cluster.gpu.peak_flops_per_s
    if work.precision in peaks and work.precision in problem.runtime.precisions:
        return problem
    others = [name for name in _PRECISIONS.get(work.precision, ()) if name in peaks]
    new = next((name for name in others if name in problem.runtime.precisions), None)
    if new is None:
        return problem
    lacking = problem.cluster.gpu.name if work.precision not in peaks else problem.runtime.name
    changes.append(
        Move(
            option="--precision",
            old=work.precision,
            new=new,
            kind="rule",
            message=f"{lacking} does not compute in {work.precision}",
        )
    )
    changed: Workload = replace(work, precision=new)
    return Problem(problem.model, problem.cluster, changed, problem.runtime)


# ---------------------------------------------------------------- the nearest layout that runs


def _nearest(problem: Problem, layout: Layout, runtime: str, fixed: tuple[str, ...]) -> Layout | None:
    """The fastest of the fitting layouts with the fewest changes."""
    values = {name: tried for name, tried in _alternatives(problem, layout).items() if name not in fixed}
    context = rule_context(problem.model, problem.cluster, problem.work, runtime)
    for number in range(1, _MOST_CHANGES + 1):
        layouts = list(_changed(problem, layout, values, number))
        if not layouts:
            continue
        columns = Columns.from_layouts(layouts, problem.cluster.gpus, problem.work)
        valid = np.flatnonzero(valid_mask(columns, context))
        if not len(valid):
            continue
        kernel = Kernel(problem, columns.take(valid))
        rows = np.arange(len(valid))
        reserved = kernel.peak(rows).reserved
        rows = rows[kernel.fits(rows, reserved)]
        if len(rows):
            return layouts[int(valid[rows[kernel.step_seconds(rows).argmin()]])]
    return None


def _changed(problem: Problem, layout: Layout, values: dict[str, list[Change]], number: int) -> Iterator[Layout]:
    """Every layout with `number` options changed whose degrees divide the GPUs and the batch."""
    world, batch = problem.cluster.gpus, problem.work.global_batch
    for names in combinations(values, number):
        for each in product(*(values[name] for name in names)):
            changes = {key: value for change in each for key, value in change.items()}
            if _divides(layout, changes, world, batch):
                yield replace(layout, **changes)


def _divides(layout: Layout, changes: Change, world: int, batch: int) -> bool:
    names = ("tp", "cp", "pp", "ep", "etp", "micro_batch")
    tp, cp, pp, ep, etp, micro_batch = (changes.get(name, getattr(layout, name)) for name in names)
    if world % (tp * cp * pp) or world % (ep * etp * pp):
        return False
    return batch % (micro_batch * (world // (tp * cp * pp))) == 0


def _alternatives(problem: Problem, layout: Layout) -> dict[str, list[Change]]:
    """Other values of each option, with what each takes along."""
    world, work, model = problem.cluster.gpus, problem.work, problem.model
    degrees = [degree for degree in divisors(world) if degree <= _LARGEST_DEGREE]
    small = [size for size in divisors(work.global_batch) if size <= _LARGEST_MICRO_BATCH]
    out: dict[str, list[Change]] = {
        "tp": [_tp(layout, value) for value in degrees if value <= 64],
        "cp": [{"cp": value} for value in degrees if value <= max(work.seq_len // 128, 1)],
        "pp": [_pp(value) for value in degrees if value <= model.layers],
        "micro_batch": [{"micro_batch": value} for value in small],
        "vpp": [{"vpp": value, "schedule": None} for value in range(1, model.layers // max(layout.pp, 1) + 1)],
        "zero": [
            {"zero": value, "dp_replicate": layout.dp_replicate if value else 1,
             "overlap": replace(layout.overlap, param=None)}
            for value in problem.runtime.zero_stages
        ],
        "dp_replicate": [{"dp_replicate": value} for value in degrees],
        "recompute": [{"recompute": value} for value in _recomputations(model.layers)],
        "cp_kind": [{"cp_kind": value} for value in CP_KINDS],
        "schedule": [{"schedule": None, "vpp": 1}, {"schedule": None}],
        "sequence_parallel": [{"sequence_parallel": None}],
        "stages": [
            {**EVEN_STAGES, "account_for_embedding": embedding, "account_for_loss": loss}
            for embedding, loss in product((False, True), repeat=2)
        ],
    }  # fmt: skip
    if model.is_moe:
        out["ep"] = [{"ep": value} for value in degrees]
        out["etp"] = [{"etp": 1}, {"etp": layout.tp}]
    same = {name: [one for one in values if _differs(layout, one)] for name, values in out.items()}
    return {name: values for name, values in same.items() if values}


def _differs(layout: Layout, change: Change) -> bool:
    return any(getattr(layout, name) != value for name, value in change.items() if name != "overlap")


def _tp(layout: Layout, value: int) -> Change:
    change: Change = {"tp": value}
    if value == 1 or layout.tp == 1:
        change["sequence_parallel"] = None
    if layout.etp == layout.tp > 1:
        change["etp"] = value
    return change


def _pp(value: int) -> Change:
    change: Change = {"pp": value, **EVEN_STAGES}
    return {**change, "vpp": 1, "schedule": None} if value == 1 else change


def _recomputations(layers: int) -> list[Recompute]:
    kinds = [Recompute(kind=kind) for kind in RECOMPUTE_KINDS]
    return kinds + [Recompute(kind="full", layers=count) for count in _RECOMPUTED if count < layers]


# ---------------------------------------------------------------- in words


def _outcome(as_it_was: Outcome, problem: Problem, but: str) -> str:
    if isinstance(as_it_was, Refused):
        return f"As it was{but} it would not start here: {as_it_was.message}"
    if not as_it_was.fits:
        over = as_it_was.reserved_bytes - problem.cluster.gpu.memory_bytes
        return f"As it was{but} it does not fit here: {gigabytes(over)} are missing on stage {as_it_was.stage}."
    return f"As it was{but} it runs here, so that nothing {'else ' if but else ''}had to change."


_FIELDS = tuple(name for name in Layout.__struct_fields__ if name != "overlap")


def _explained(problem: Problem, layout: Layout, chosen: Layout, runtime: str) -> list[Move]:
    """Each option that differs, and what keeping it alone would break."""
    names = [name for name in _FIELDS if getattr(layout, name) != getattr(chosen, name)]
    kept = [replace(chosen, **{name: getattr(layout, name)}) for name in names]
    best = step_seconds(problem, chosen)
    out: list[Move] = []
    for name, one in zip(names, price_all(problem, runtime, kept), strict=True):
        old, new = (_plain(getattr(each, name)) for each in (layout, chosen))
        option = option_of(name)
        if isinstance(one, Refused):
            kind, message = "rule", one.message
        elif not one.fits:
            over = one.reserved_bytes - problem.cluster.gpu.memory_bytes
            kind, message = "memory", f"{gigabytes(over)} would be missing on stage {one.stage} with {old}"
        else:
            delta = one.seconds - best
            kind = "together"
            message = f"follows from the other changes; kept, a step would take {duration(abs(delta))} "
            message += f"{'more' if delta >= 0 else 'less'} ({percent(delta, best)})"
        out.append(Move(option=option, old=old, new=new, kind=kind, message=message))
    return out


def _plain(value: Any) -> Any:
    if not isinstance(value, Recompute):
        return "default" if value is None else value
    return (
        value.kind
        + (f" {'+'.join(value.modules)}" if value.modules else "")
        + (f" of {value.layers} blocks" if value.layers else "")
    )


def _kept(layout: Layout, chosen: Layout | None) -> tuple[str, ...]:
    usual = Layout()
    return tuple(
        option_of(name)
        for name in Layout.__struct_fields__
        if getattr(layout, name) != getattr(usual, name)
        and chosen is not None
        and getattr(layout, name) == getattr(chosen, name)
    )
