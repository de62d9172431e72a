"""What would have to change for the same layout to do better: faster links, a larger batch, more memory."""

from __future__ import annotations

from typing import Any

import msgspec

from fivefold.estimate import Estimate, Problem
from fivefold.layout.layout import Layout
from fivefold.search.price import step_seconds
from fivefold.search.result import Limit
from fivefold.search.words import duration, gigabytes

replace = msgspec.structs.replace


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
