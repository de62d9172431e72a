"""Seconds of many pipelines at once, equal to the event simulator's makespan without building any action list."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from fivefold.errors import FivefoldError
from fivefold.schedule.registry import get_schedule
from fivefold.schedule.schedule import Floats


def pipeline_seconds(
    kind: str, p: int, m: int, v: int, forward_s: ArrayLike, backward_s: ArrayLike, exchange_s: ArrayLike
) -> Floats:
    """[R] seconds from the first forward to the last backward or transfer, of R pipelines of the same shape.

    forward_s, backward_s: [R, p*v] seconds of one micro-batch on each virtual stage (chunk * p + rank).
    exchange_s:            [R] or one number: seconds of one transfer of a boundary tensor.
    Raises FivefoldError when p, m, v are illegal for the schedule, shapes differ, or a time is negative or not finite.
    """
    schedule = get_schedule(kind, p, m, v)
    forward, backward = np.asarray(forward_s, dtype=np.float64), np.asarray(backward_s, dtype=np.float64)
    if forward.ndim != 2 or forward.shape != backward.shape or forward.shape[1] != p * v:
        raise FivefoldError(
            f"Stage times need shape [rows, {p * v}] for {p} ranks of {v} chunks; "
            f"forward_s has {forward.shape} and backward_s {backward.shape}.",
            code="bad-stage-times",
            value=[forward.shape, backward.shape],
        )
    exchange = np.asarray(exchange_s, dtype=np.float64)
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
    if not len(forward):
        return np.zeros(0)
    return schedule.seconds(
        p, m, v, _by_rank(forward, p, v), _by_rank(backward, p, v), np.broadcast_to(exchange, len(forward))
    )


def _by_rank(times: Floats, p: int, v: int) -> Floats:
    """[R, p*v] -> [v, p, R]: one contiguous row per stage, so that a step over ranks is one slice."""
    return np.ascontiguousarray(times.T).reshape(v, p, -1)
