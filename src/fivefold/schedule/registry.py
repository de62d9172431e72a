"""The schedules there are. A new one is one file and one row here."""

from __future__ import annotations

import numpy as np

from fivefold.errors import FivefoldError
from fivefold.schedule.actions import Placement, RankActions
from fivefold.schedule.afab import AFAB
from fivefold.schedule.dualpipev import DUALPIPEV
from fivefold.schedule.interleaved import INTERLEAVED
from fivefold.schedule.one_f_one_b import ONE_F_ONE_B
from fivefold.schedule.schedule import Ints, Schedule
from fivefold.schedule.split import backward_moments, peaks, whole_backward
from fivefold.schedule.zb_h1 import ZB_H1
from fivefold.schedule.zbv import ZBV

_ALL = (AFAB, ONE_F_ONE_B, INTERLEAVED, ZB_H1, ZBV, DUALPIPEV)
SCHEDULES: dict[str, Schedule] = {schedule.name: schedule for schedule in _ALL}


def illegal_reason(kind: str, p: int, m: int, v: int = 1) -> str | None:
    """Why p ranks, m micro-batches and v chunks per rank cannot run under this schedule, or None if they can.

    Raises FivefoldError for a schedule that does not exist.
    """
    schedule = _named(kind)
    for name, value in (("p", p), ("m", m), ("v", v)):
        if value < 1:
            return f"{name} has to be at least 1, and is {value}"
    return schedule.illegal(p, m, v)


def legal(kind: str, p: int, m: int, v: int = 1) -> bool:
    """Whether p ranks, m micro-batches and v chunks per rank can run under this schedule."""
    return illegal_reason(kind, p, m, v) is None


def get_schedule(kind: str, p: int, m: int, v: int = 1) -> Schedule:
    """The schedule of this name, once p, m and v are known to be legal. Raises FivefoldError otherwise."""
    reason = illegal_reason(kind, p, m, v)
    if reason is not None:
        raise FivefoldError(
            f"The {kind} schedule cannot run {m} micro-batches on {p} pipeline ranks with {v} chunks each: {reason}.",
            code="illegal-schedule",
            option="schedule",
            value={"schedule": kind, "pp": p, "num_micro_batches": m, "vpp": v},
        )
    return _named(kind)


def actions(kind: str, p: int, m: int, v: int = 1) -> list[RankActions]:
    """What each of p ranks does, in order, for m micro-batches and v chunks per rank."""
    return get_schedule(kind, p, m, v).actions(p, m, v)


def placement(kind: str) -> Placement:
    """Which rank holds which virtual stage under this schedule."""
    return _named(kind).placement


def in_flight(kind: str, p: int, m: int, v: int = 1, *, split: bool = True) -> Ints:
    """[p] most micro-batch x chunk activations that each rank holds at once, in units of one chunk."""
    return in_flight_by_chunk(kind, p, m, v, split=split).sum(axis=-1)


def in_flight_by_chunk(kind: str, p: int, m: int, v: int = 1, *, split: bool = True) -> Ints:
    """[p, v] how many micro-batches of each chunk each rank holds when it first holds the most.

    split: False where a schedule that splits the backward runs it whole all the same (split.whole_backward).
    """
    return in_flight_moments(kind, p, m, v, split=split)[0] if not split else _held_first(kind, p, m, v)


def in_flight_moments(kind: str, p: int, m: int, v: int = 1, *, split: bool = True) -> Ints:
    """[K, p, v] the same at every distinct moment at which a rank holds the most; by_chunk is the first of them.

    Where the chunks of a rank hold different bytes, its peak is max over K of sum over v of count * bytes: what a
    rank holds at any other moment is part of what it holds at one of these.
    """
    schedule = get_schedule(kind, p, m, v)
    if schedule.splits_backward and not split:
        return peaks([whole_backward(order) for order in schedule.actions(p, m, v)], v)
    return schedule.held(p, m, v, np.arange(schedule.cycle(p, m, v)))


def split_moments(kind: str, p: int, m: int, v: int = 1) -> tuple[Ints, Ints, Ints]:
    """What ranks hold when backward steps start, under a schedule that splits them: see split.backward_moments."""
    return backward_moments(get_schedule(kind, p, m, v).actions(p, m, v), v)


def _held_first(kind: str, p: int, m: int, v: int) -> Ints:
    return get_schedule(kind, p, m, v).held(p, m, v, np.zeros(1, dtype=np.int64))[0]


def _named(kind: str) -> Schedule:
    if kind not in SCHEDULES:
        raise FivefoldError(
            f"There is no pipeline schedule {kind!r}; fivefold has {', '.join(SCHEDULES)}.",
            code="unknown-schedule",
            option="schedule",
            value=kind,
            legal=list(SCHEDULES),
        )
    return SCHEDULES[kind]
