"""The fewest GPUs that finish a token budget in time, failures included."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from fivefold.errors import FivefoldError
from fivefold.estimate import Estimate, Problem
from fivefold.layout import Layout
from fivefold.model import training_flops_per_token
from fivefold.search.budget import budget_of
from fivefold.search.gpu_counts import close_counts
from fivefold.search.result import CountRow, Plan
from fivefold.search.words import layout_words

MOST_GPUS = 65_536  # that are tried
_DAY_S = 86_400.0


def least_gpus(problem: Problem, seconds: float) -> float:
    """GPUs that would do the model's FLOPs in `seconds` at the peak of its precision: no layout needs fewer."""
    work = problem.work
    flops = (work.tokens or 0.0) * training_flops_per_token(problem.model, work.seq_len, "causal")
    return flops / (problem.cluster.gpu.peak_flops_per_s[work.precision] * seconds)


def fewest_in_time(
    plan_at: Callable[[int], Plan], problem: Problem, days: float, most: int = MOST_GPUS
) -> tuple[int | None, tuple[CountRow, ...]]:
    """(the fewest GPUs whose best layout finishes within `days` on the wall clock, every count that was tried).

    plan_at: the search's answer on a number of GPUs. problem: the question on any number. Every count from the one that
    the peak allows is tried in order, and the first beyond the answer, for comparison. The problem has a token budget.
    """
    rows: list[CountRow] = []
    found: int | None = None
    least = least_gpus(problem, days * _DAY_S)
    counts = [*close_counts(problem.cluster.gpus_per_node, most)]
    # Where even the peak is too slow, the most GPUs show by how much.
    for gpus in [count for count in counts if count >= least] or counts[-1:]:
        row = _row(gpus, problem, plan_at, days)
        rows.append(row)
        if found is not None:
            break
        if row.in_time:
            found = gpus
    return found, tuple(rows)


def _row(gpus: int, problem: Problem, plan_at: Callable[[int], Plan], days: float) -> CountRow:
    nodes = -(-gpus // problem.cluster.gpus_per_node)
    nothing = CountRow(
        gpus=gpus, nodes=nodes, global_batch=problem.work.global_batch, layout="", step_s=None, mfu=None, goodput=None,
        seconds=None, gpu_hours=None, cost=None, in_time=False,
    )  # fmt: skip
    try:
        answer = plan_at(gpus)
    except FivefoldError as error:
        if error.code != "empty-space":
            raise
        return msgspec.structs.replace(nothing, reason="no layout divides the GPUs and the batch")
    batch = answer.inputs["workload"]["global_batch"]
    if not answer.plans:
        return msgspec.structs.replace(nothing, global_batch=batch, reason="nothing fits")
    return _priced(msgspec.structs.replace(nothing, global_batch=batch), answer.plans[0], problem, days)


def _priced(row: CountRow, best: Estimate, problem: Problem, days: float) -> CountRow:
    budget = budget_of(problem.work, best)
    if budget is None or budget.reliability is None or best.step is None:
        return row
    wall = budget.reliability
    return msgspec.structs.replace(
        row,
        layout=layout_words(msgspec.convert(best.inputs["layout"], Layout)),
        step_s=best.step.seconds.value,
        mfu=best.step.mfu.causal,
        goodput=wall.goodput,
        seconds=wall.seconds,
        gpu_hours=wall.gpu_hours,
        cost=wall.cost,
        in_time=wall.seconds <= days * _DAY_S,
    )


def too_late(rows: tuple[CountRow, ...], days: float, most: int) -> str:
    """The sentence when no number of GPUs finishes in time."""
    timed = [row for row in rows if row.seconds is not None]
    if not timed:
        return f"No layout fits on any number of GPUs up to {most:,}, so that nothing finishes within {days:g} days."
    best = min(timed, key=lambda row: row.seconds or 0.0)
    return (
        f"No number of GPUs up to {most:,} finishes within {days:g} days: {best.gpus:,} come nearest with "
        f"{(best.seconds or 0.0) / _DAY_S:.1f} days. Allow more days, a larger batch (--tokens-per-batch) that more "
        "GPUs can share, a faster GPU, or fewer tokens."
    )
