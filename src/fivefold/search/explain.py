"""Reasons for a plan: what each dimension bought and cost, why each neighbour loses, what would do better."""

from __future__ import annotations

from fivefold.estimate import Estimate, Problem
from fivefold.layout.layout import Layout
from fivefold.search.dimensions import dimensions
from fivefold.search.limits import limits
from fivefold.search.neighbours import neighbours
from fivefold.search.playbook import follow_playbook
from fivefold.search.result import Why
from fivefold.search.words import duration, gigabytes, layout_words


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
