"""Single changes to a layout on the same GPUs: every value of one axis or option at a time, priced together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from fivefold.estimate import Problem
from fivefold.layout.divisors import divisors
from fivefold.layout.layout import Layout, Overlap, Recompute
from fivefold.layout.mixers import largest_tp
from fivefold.search.price import Priced, price_all, usable
from fivefold.search.values import EVEN_STAGES, recompute_parts

replace = msgspec.structs.replace

_LARGEST_MICRO_BATCH = 64
_MOST_CHUNKS = 32
_MOST_STAGES = 512
_TIE = 0.003  # of the step; see best_of_each


@dataclass(frozen=True, slots=True)
class Candidate:
    """A layout that differs from the launch's in one thing, `kind`."""

    kind: str
    layout: Layout


def single_changes(problem: Problem, base: Layout) -> list[Candidate]:
    """Everything one step away: each degree at every value that divides the GPUs, and each option's other values."""
    found: dict[Layout, Candidate] = {}
    for kind, layout in (*_degrees(problem, base), *_pipeline(problem, base), *_options(problem, base)):
        if layout != base:
            found.setdefault(layout, Candidate(kind, layout))
    return [*found.values()]


def best_of_each(problem: Problem, runtime: str, candidates: list[Candidate]) -> list[tuple[Candidate, Priced]]:
    """For every kind, the best change that starts and fits; the fastest of these first.

    Within a kind candidates come in the order of their values, and the first one within _TIE of the fastest is taken:
    two chunks should not lose to twenty that gain a thousandth.
    """
    outcomes = price_all(problem, runtime, [candidate.layout for candidate in candidates])
    by_kind: dict[str, list[tuple[Candidate, Priced]]] = {}
    for candidate, outcome in zip(candidates, outcomes, strict=True):
        if usable(outcome):
            by_kind.setdefault(candidate.kind, []).append((candidate, outcome))
    best = [_first_of_the_best(rows) for rows in by_kind.values()]
    return sorted(best, key=lambda each: each[1].seconds)


def _first_of_the_best(rows: list[tuple[Candidate, Priced]]) -> tuple[Candidate, Priced]:
    fastest = min(outcome.seconds for _, outcome in rows)
    return next(row for row in rows if row[1].seconds <= fastest * (1 + _TIE))


# ---------------------------------------------------------------- what can change

Changed = Iterator[tuple[str, Layout]]


def _degrees(problem: Problem, base: Layout) -> Changed:
    world, model = problem.cluster.gpus, problem.model
    heads = largest_tp(model.kinds, model.hidden)
    shared = base.sequence_parallel is not False or base.tp == 1
    follows = base.etp == base.tp
    for degree in divisors(world):
        if degree <= heads:
            etp = degree if follows and base.etp > 1 else min(base.etp, degree)
            changes = {"sequence_parallel": shared and degree > 1, "etp": etp}
            yield "tensor parallelism", replace(base, tp=degree, **changes, overlap=_overlap(base, degree))
        if degree <= problem.work.seq_len // 128:
            yield "context parallelism", replace(base, cp=degree)
        if model.is_moe:
            yield "expert parallelism", replace(base, ep=degree)
            yield "expert tensor parallelism", replace(base, etp=degree)
    for size in divisors(problem.work.global_batch):
        if size <= _LARGEST_MICRO_BATCH:
            yield "micro-batch", replace(base, micro_batch=size)


def _overlap(base: Layout, tp: int) -> Overlap:
    return replace(base.overlap, tp=base.overlap.tp and tp > 1)


def _pipeline(problem: Problem, base: Layout) -> Changed:
    layers = problem.model.layers
    for pp in divisors(problem.cluster.gpus):
        if pp > min(layers, _MOST_STAGES) or pp == base.pp:
            continue
        even = replace(base, pp=pp, vpp=1, schedule=None, **EVEN_STAGES)
        for split in _splits(even, layers):
            yield "pipeline parallelism", split
    if base.pp == 1:
        return
    for chunks in range(1, min(layers // base.pp, _MOST_CHUNKS) + 1):
        yield "interleaving", replace(base, vpp=chunks, schedule=None)
    for split in _splits(replace(base, **EVEN_STAGES), layers):
        yield "stage balance", split


def _splits(even: Layout, layers: int) -> Iterator[Layout]:
    """Even stages, and those where embedding and head count as blocks."""
    stages = even.pp * even.vpp
    for embedding, loss in ((False, False), (True, True), (False, True), (True, False)):
        if (layers + embedding + loss) % stages == 0:
            yield replace(even, account_for_embedding=embedding, account_for_loss=loss)


def _options(problem: Problem, base: Layout) -> Changed:
    overlap = base.overlap
    for recompute in _recomputes(problem, base):
        yield "recomputation", replace(base, recompute=recompute)
    for zero in problem.runtime.zero_stages:
        param = bool(overlap.param) and zero >= 1
        yield "optimizer sharding", replace(base, zero=zero, dp_replicate=1, overlap=replace(overlap, param=param))
    if base.tp > 1:
        yield "sequence parallelism", replace(base, sequence_parallel=base.sequence_parallel is False)
        yield "TP overlap", replace(base, overlap=replace(overlap, tp=not overlap.tp))
    if base.ep > 1:
        yield "EP overlap", replace(base, overlap=replace(overlap, ep=not overlap.ep))
    if base.cp > 1:
        yield "kind of CP", replace(base, cp_kind="a2a" if base.cp_kind == "p2p" else "p2p")
    if not overlap.grad:
        yield "gradient overlap", replace(base, overlap=replace(overlap, grad=True, param=bool(overlap.param)))
    if base.zero >= 1 and not (overlap.param and overlap.grad):
        yield "parameter overlap", replace(base, overlap=replace(overlap, grad=True, param=True))


def _recomputes(problem: Problem, base: Layout) -> Iterator[Recompute]:
    model = problem.model
    yield Recompute()
    yield Recompute(kind="full")
    for names in recompute_parts(model):
        yield Recompute(kind="selective", modules=names)
    share = -(-model.layers // base.pp)
    for layers in sorted({1, *(step << power for step in (1, 3) for power in range(7))}):
        if layers * base.vpp < share:
            yield Recompute(kind="full", layers=layers * base.vpp)
