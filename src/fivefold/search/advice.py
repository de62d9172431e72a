"""When nothing fits or starts: what is missing, and the smallest change that would help."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import msgspec
import numpy as np

from fivefold.estimate import Estimate, Problem
from fivefold.estimate.estimate import rule_context
from fivefold.layout import Offload
from fivefold.layout.columns import Columns
from fivefold.layout.rules import violations
from fivefold.search.gpu_counts import round_numbers, with_gpus
from fivefold.search.words import gigabytes

replace = msgspec.structs.replace

Fits = Callable[[Problem], bool]  # whether any layout of a changed problem fits

_MOST_GPUS_TRIED = 4096
_SHORTEST_TRIED = 512  # tokens of a sequence
_SAMPLED_FOR_RULES = 200


def missing_memory(problem: Problem, nearest: Estimate) -> str:
    """The first sentence: the layout that misses by least, and by how much."""
    memory = nearest.memory
    if memory is None:
        return ""
    over = memory.reserved_bytes - memory.capacity_bytes
    if over <= 0 and memory.host_bytes is not None:
        room = memory.host_capacity_bytes or 0
        return (
            f"{problem.model.name} does not fit the host memory: with --offload {problem.work.offload.words} a node "
            f"needs {gigabytes(memory.host_bytes)}, and it has {gigabytes(room)}: "
            f"{gigabytes(memory.host_bytes - room)} are missing. More nodes share it, a smaller share needs less."
        )
    largest = ", ".join(f"{tensor.name} {gigabytes(tensor.bytes)}" for tensor in memory.largest[:3])
    return (
        f"{problem.model.name} does not fit: the smallest layout needs {gigabytes(memory.reserved_bytes)} on each GPU "
        f"of stage {memory.peak_stage}, and {problem.cluster.gpu.name} has {gigabytes(memory.capacity_bytes)}: "
        f"{gigabytes(over)} are missing. The largest parts are {largest}."
    )


def changes_that_fit(problem: Problem, fits: Fits, least_bytes: float) -> tuple[str, ...]:
    """The smallest changes that would fit, each alone, cheapest first.

    least_bytes: what the smallest layout needs.
    """
    out: list[str] = []
    gpus = _more_gpus(problem, fits)
    if gpus is not None:
        name = problem.cluster.gpu.name
        out.append(f"Use {gpus} {name} instead of {problem.cluster.gpus}: then a layout fits (--gpus {gpus}).")
    else:
        out.append(f"More GPUs of this kind do not help: up to {_MOST_GPUS_TRIED} were tried.")
    out.append(f"Use a GPU with at least {gigabytes(least_bytes)} of memory, the number of GPUs unchanged.")
    shorter = _shorter_sequence(problem, fits)
    if shorter is not None:
        out.append(f"Shorten sequences to {shorter} tokens (--seq {shorter}).")
    offloaded = _offloaded(problem, fits)
    if offloaded is not None:
        out.append(f"Keep it in host memory (--offload {offloaded}), which costs time.")
    lighter = _lighter_optimizer(problem, fits)
    if lighter is not None:
        out.append(f"Use a lighter optimizer (--optimizer {lighter}).")
    return tuple(out)


def _more_gpus(problem: Problem, fits: Fits) -> int | None:
    """The fewest GPUs that fit: doubling finds a bracket, counts that batches like divide it."""
    gpus = problem.cluster.gpus
    while gpus * 2 <= _MOST_GPUS_TRIED:
        gpus *= 2
        if fits(with_gpus(problem, gpus)):
            between = [count for count in round_numbers(gpus) if gpus // 2 < count < gpus]
            return next((count for count in between if fits(with_gpus(problem, count))), gpus)
    return None


def _shorter_sequence(problem: Problem, fits: Fits) -> int | None:
    seq = problem.work.seq_len
    while seq > _SHORTEST_TRIED:
        seq //= 2
        work = replace(problem.work, seq_len=seq)
        if fits(Problem(problem.model, problem.cluster, work, problem.runtime)):
            return seq
    return None


# From the least that is moved: FSDP moves all or nothing, Megatron has no parameters to move.
_OFFLOADS = (Offload(optimizer=1), Offload(optimizer=1, parameters=1))


def _offloaded(problem: Problem, fits: Fits) -> str | None:
    if problem.work.offload.anything or problem.cluster.host_memory_bytes is None:
        return None
    for offload in _OFFLOADS:
        work = replace(problem.work, offload=offload)
        if fits(Problem(problem.model, problem.cluster, work, problem.runtime)):
            return offload.words
    return None


def _lighter_optimizer(problem: Problem, fits: Fits) -> str | None:
    for name in ("muon", "adamw8bit", "sgd", "adafactor"):
        if name == problem.work.optimizer or name not in problem.runtime.optimizers:
            continue
        work = replace(problem.work, optimizer=name)
        if fits(Problem(problem.model, problem.cluster, work, problem.runtime)):
            return name
    return None


def why_nothing_is_valid(problem: Problem, runtime: str, candidates: Columns) -> tuple[str, ...]:
    """The rules that refuse most of the candidates, each with its message."""
    context = rule_context(problem.model, problem.cluster, problem.work, runtime)
    picks = np.unique(np.linspace(0, len(candidates) - 1, _SAMPLED_FOR_RULES).astype(int))
    counts: Counter[str] = Counter()
    messages: dict[str, str] = {}
    for i in picks.tolist():
        for broken in violations(candidates.row(i), context):
            counts[broken.id] += 1
            messages.setdefault(broken.id, broken.message)
    # What refuses everything is the reason; what refuses a part would not have been in the way.
    everywhere = [name for name, count in counts.items() if count == len(picks)]
    named = everywhere[:3] or [name for name, _ in counts.most_common(3)]
    return tuple(
        f"{counts[name] / len(picks):.0%} of the candidates break '{name}': {messages[name]}" for name in named
    )


__all__ = [
    "changes_that_fit",
    "missing_memory",
    "why_nothing_is_valid",
]
