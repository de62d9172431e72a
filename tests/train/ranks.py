"""Run a function on several forked ranks: the proof's own ranks, whose failure fails a test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fivefold.train.verify.forked import RankFailedError, run_forked


class RankFailure(AssertionError):  # noqa: N818 - a failure of a test, not an error of the harness
    """A rank raised, died or did not come back in time."""


def run_ranks(n: int, fn: Callable[..., Any], *args: Any, timeout: float = 60) -> list[Any]:
    """Call fn(rank, *args) in n forked processes that form one gloo world; the results, by rank.

    fn may be a local function: processes are forked, and only the result is pickled. All ranks are killed as soon as
    one fails or `timeout` seconds have passed, and RankFailure carries the failing rank's traceback.
    """
    try:
        return run_forked(n, lambda rank: fn(rank, *args), timeout)
    except RankFailedError as error:
        message = str(error)
        raise RankFailure(message[:1].lower() + message[1:]) from None
