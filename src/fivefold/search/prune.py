"""Branch and bound over combinations of degrees, before recomputation multiplies them.

A base is a layout without its choice of recomputation. With everything recomputed it needs the least memory, and with
nothing recomputed it takes the least time. So a base is set aside when the first does not fit, or when a layout that
was priced is no heavier than the first and faster, beyond a tie, than a lower bound on the second, unless it may hold
one of the answers (leaders.py). None of this loses the optimum, what ties with it, the front of memory and time, the
fastest and the lightest of the best sets of degrees, or, where nothing fits, the layout that misses by least.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce

import numpy as np

from fivefold.estimate import Kernel, Problem
from fivefold.layout.columns import ALL_LAYERS, Columns
from fivefold.layout.layout import RECOMPUTE_KINDS
from fivefold.search.front import Front
from fivefold.search.leaders import Leaders

Expand = Callable[[np.ndarray], Columns]

_FULL, _SELECTIVE, _NONE = (RECOMPUTE_KINDS.index(kind) for kind in ("full", "selective", "none"))
_CHUNK = 16_384
_ROUNDS = 4
_TRIED = 128  # bases priced in a round: so many among all, and as many again shared by the classes
_CLASSES = 64


def promising(problem: Problem, bases: Columns, parts: Sequence[int], expand: Expand, wanted: int) -> np.ndarray:
    """Positions of the bases that can still hold a layout worth pricing; where none was found to fit, also of those
    that may hold the one that misses by least.

    parts: masks of the modules that selective recomputation may name. expand: from positions of bases to their valid
    layouts with every choice of recomputation. wanted: how many sets of degrees will be listed.
    """
    least = _least_bytes(problem, bases, parts)
    left = np.flatnonzero(least <= problem.cluster.gpu.memory_bytes)
    if not len(left):
        return _nearest(problem, least, expand)
    lightest = least[left]
    bound = in_chunks(Kernel(problem, _recomputing(bases.take(left), _NONE)), Kernel.lower_bound)
    front, leaders = Front(), Leaders(bases, left, wanted)
    group, tried = leaders.group, np.zeros(len(left), dtype=bool)
    tie = 1 + problem.runtime.tie_spread
    for _ in range(_ROUNDS):
        untried = np.flatnonzero(~tried)
        picks = (
            _along_the_front(bound[untried], lightest[untried]),
            _first_of_groups(bound[untried], group[untried], wanted),
            _first_of_groups(lightest[untried], group[untried], wanted),
        )
        take = untried[np.unique(np.concatenate(picks))]
        if not len(take):
            break
        tried[take] = True
        columns, seconds, reserved = _priced(problem, expand(left[take]))
        front.add(seconds, reserved)
        leaders.add(leaders.groups_of(columns), seconds, reserved)
        keep = ~front.beats(bound / tie, lightest) | leaders.may_lead(bound, lightest, group)
        left, bound, lightest, group, tried = left[keep], bound[keep], lightest[keep], group[keep], tried[keep]
    return np.sort(left) if len(front.seconds) else np.union1d(left, _nearest(problem, least, expand))


def _least_bytes(problem: Problem, bases: Columns, parts: Sequence[int]) -> np.ndarray:
    """[n] bytes below which no choice of recomputation gets a base.

    Recomputing all blocks needs least. In fivefold's trainer recomputing parts of blocks may need less still, because
    it brings back less at a time than a whole block.
    """
    choices = [(_FULL, 0), *((_SELECTIVE, mask) for mask in parts if problem.runtime.sharding == "buckets")]
    each = (in_chunks(Kernel(problem, _recomputing(bases, *choice)), _never_below) for choice in choices)
    return reduce(np.minimum, each)


def _never_below(kernel: Kernel, rows: np.ndarray) -> np.ndarray:
    """[n] reserved bytes that no choice allocating at least as much goes below.

    Where states do not fragment, fragmentation is left out: the rank that then reserves most may be another one, with
    more states and so less that fragments.
    """
    peak = kernel.peak(rows)
    if kernel.problem.runtime.states_fragment:
        return peak.reserved
    return peak.allocated + sum(kernel.outside_allocator(rows).values())


def _nearest(problem: Problem, lightest: np.ndarray, expand: Expand) -> np.ndarray:
    """Positions of the bases that may hold the lightest valid layout."""
    order = np.argsort(lightest, kind="stable")
    least, taken = np.inf, 0
    while taken < len(order) and lightest[order[taken]] < least:
        columns = expand(order[taken : taken + _TRIED])
        if len(columns):
            least = min(least, in_chunks(Kernel(problem, columns), reserved_bytes).min())
        taken += _TRIED
    return order[:taken]


def _along_the_front(bound: np.ndarray, lightest: np.ndarray) -> np.ndarray:
    """Positions of the bases with the lowest bounds: among all of them, and within each of some classes of about equal
    memory."""
    by_weight = np.argsort(lightest, kind="stable")
    classes = np.array_split(by_weight, min(_CLASSES, max(len(by_weight), 1)))
    picks = [part[np.argsort(bound[part], kind="stable")[: _TRIED // _CLASSES]] for part in classes]
    return np.unique(np.concatenate([np.argsort(bound, kind="stable")[:_TRIED], *picks]))


def _first_of_groups(bound: np.ndarray, group: np.ndarray, wanted: int) -> np.ndarray:
    """Positions of the base with the lowest bound in each group, for twice as many groups as are wanted."""
    order = np.argsort(bound, kind="stable")
    _, first = np.unique(group[order], return_index=True)
    return order[np.sort(first)[: 2 * wanted]]


def _priced(problem: Problem, columns: Columns) -> tuple[Columns, np.ndarray, np.ndarray]:
    """(the layouts that fit, their seconds, their reserved bytes)."""
    if not len(columns):
        return columns, np.zeros(0), np.zeros(0)
    kernel = Kernel(problem, columns)
    rows = np.arange(len(columns))
    reserved = kernel.peak(rows).reserved
    rows = rows[kernel.fits(rows, reserved)]
    return columns.take(rows), kernel.step_seconds(rows) if len(rows) else np.zeros(0), reserved[rows]


def in_chunks(kernel: Kernel, measure: Callable[[Kernel, np.ndarray], np.ndarray]) -> np.ndarray:
    """`measure` of every layout of the kernel, some thousand at a time, which stay in the processor's cache."""
    rows = np.arange(len(kernel.columns))
    return np.concatenate([measure(kernel, rows[at : at + _CHUNK]) for at in range(0, len(rows), _CHUNK)])


def reserved_bytes(kernel: Kernel, rows: np.ndarray) -> np.ndarray:
    """What the device needs for each of the kernel's `rows`, [n]."""
    return kernel.peak(rows).reserved


def _recomputing(bases: Columns, kind: int, modules: int = 0) -> Columns:
    """The bases with all blocks recomputed, some modules of each, or none."""
    same = np.zeros(len(bases), dtype=np.int64)
    return replace(
        bases, recompute_kind=same + kind, recompute_layers=same + ALL_LAYERS, recompute_modules=same + modules
    )


__all__ = ["in_chunks", "promising", "reserved_bytes"]
