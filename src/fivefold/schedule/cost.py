"""Seconds of many pipelines at once, equal to the event simulator's makespan without building any action list."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from fivefold.errors import FivefoldError
from fivefold.schedule.registry import get_schedule
from fivefold.schedule.schedule import Floats, Schedule
from fivefold.schedule.simulator import simulate


def pipeline_seconds(
    kind: str,
    p: int,
    m: int,
    v: int,
    forward_s: ArrayLike,
    backward_s: ArrayLike,
    exchange_s: ArrayLike,
    *,
    weight_grad_s: ArrayLike | None = None,
) -> Floats:
    """[R] seconds from the first forward to the last backward or transfer, of R pipelines of the same shape.

    forward_s, backward_s: [R, p*v] seconds of one micro-batch on each virtual stage; backward_s is the whole one.
    exchange_s:            [R] or one number: seconds of one transfer of a boundary tensor.
    weight_grad_s:         [R, p*v] the part of backward_s that the weights' gradients take, for the schedules that
                           split the backward, and for them alone.
    Raises FivefoldError when p, m, v are illegal for the schedule, shapes differ, or a time is negative or not finite.
    """
    schedule = get_schedule(kind, p, m, v)
    forward, backward = np.asarray(forward_s, dtype=np.float64), np.asarray(backward_s, dtype=np.float64)
    exchange = np.asarray(exchange_s, dtype=np.float64)
    _check(forward, backward, exchange, p, v)
    exchange = np.broadcast_to(exchange, len(forward))
    if schedule.splits_backward != (weight_grad_s is not None):
        need = "needs the seconds of the weights' gradients" if schedule.splits_backward else "splits no backward"
        raise FivefoldError(f"The {kind} schedule {need}.", code="bad-stage-times", option="weight_grad_s")
    if not len(forward):
        return np.zeros(0)
    if schedule.seconds is None:
        return _simulated(schedule, p, m, v, forward, backward, exchange, weight_grad_s)
    return schedule.seconds(p, m, v, _by_rank(forward, p, v), _by_rank(backward, p, v), exchange)


def _check(forward: Floats, backward: Floats, exchange: Floats, p: int, v: int) -> None:
    if forward.ndim != 2 or forward.shape != backward.shape or forward.shape[1] != p * v:
        raise FivefoldError(
            f"Stage times need shape [rows, {p * v}] for {p} ranks of {v} chunks; "
            f"forward_s has {forward.shape} and backward_s {backward.shape}.",
            code="bad-stage-times",
            value=[forward.shape, backward.shape],
        )
    if exchange.ndim > 1 or exchange.size not in (1, len(forward)):
        raise FivefoldError(
            f"exchange_s needs one number or one per row ({len(forward)}), and has shape {exchange.shape}.",
            code="bad-stage-times",
            value=exchange.shape,
        )
    for name, times in (("forward_s", forward), ("backward_s", backward), ("exchange_s", exchange)):
        # One comparison chain catches NaN too.
        if times.size and not (times.min() >= 0 and times.max() < np.inf):
            raise FivefoldError(
                f"{name} has a time that is negative or not finite.", code="bad-stage-times", option=name
            )


def _simulated(
    schedule: Schedule,
    p: int,
    m: int,
    v: int,
    forward: Floats,
    backward: Floats,
    exchange: Floats,
    weight_grad_s: ArrayLike | None,
) -> Floats:
    """[R] by running the event simulator on every row: exact, and as slow as that."""
    lists = schedule.actions(p, m, v)
    weights = [None] * len(forward) if weight_grad_s is None else np.asarray(weight_grad_s, dtype=np.float64)
    if len(weights) != len(forward):
        raise FivefoldError(
            f"weight_grad_s has {len(weights)} rows and forward_s {len(forward)}.", code="bad-stage-times"
        )
    rows = zip(forward, backward, exchange, weights, strict=True)
    return np.array(
        [simulate(lists, f, b, c, weight_grad_s=w, placement=schedule.placement).makespan_s for f, b, c, w in rows]
    )


def _by_rank(times: Floats, p: int, v: int) -> Floats:
    """[R, p*v] -> [v, p, R]: one contiguous row per stage, so that a step over ranks is one slice."""
    return np.ascontiguousarray(times.T).reshape(v, p, -1)
