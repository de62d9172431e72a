"""What the schedules with two chunks per rank in a V share: their rule, and everything that follows from an order."""

from __future__ import annotations

from collections.abc import Callable

from fivefold.schedule.actions import Action, Boundary, Placement, RankActions
from fivefold.schedule.schedule import Ints, Schedule
from fivefold.schedule.split import peaks, with_exchanges

Order = Callable[[int, int, int], list[Action]]  # (rank, p, m) -> the compute steps of that rank


def two_chunks_in_a_v(p: int, m: int, v: int) -> str | None:
    """Why p ranks of v chunks make no V, or None if they do."""
    if p < 2:
        return f"a V needs at least 2 pipeline ranks, and p = {p}"
    if v != 2:
        return f"it runs exactly 2 chunks of layers per rank, and v = {v}"
    return None


def v_schedule(name: str, illegal: Callable[[int, int, int], str | None], order: Order) -> Schedule:
    """The schedule in a V that runs these compute steps and splits the backward."""

    def actions(p: int, m: int, v: int) -> list[RankActions]:
        return [with_exchanges(order(rank, p, m), Boundary(rank, p, v, Placement.V), m) for rank in range(p)]

    def held(p: int, m: int, v: int, steps: Ints) -> Ints:
        moments = peaks(actions(p, m, v), v)
        return moments[steps % len(moments)]

    return Schedule(
        name=name,
        illegal=illegal,
        actions=actions,
        held=held,
        cycle=lambda p, m, v: len(peaks(actions(p, m, v), v)),
        placement=Placement.V,
        splits_backward=True,
    )
