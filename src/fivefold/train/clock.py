"""Moments and the seconds between them: by the host's clock on a CPU, by events on the current stream on CUDA.

A stream runs behind the host, so on CUDA a moment is known only once the device has come there: settle() waits for
that. The CUDA half has not been run.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch

from fivefold.schedule import Action, ActionKind

_COMPUTE = (ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.INPUT_GRAD, ActionKind.WEIGHT_GRAD)


class Clock(Protocol):
    """now() marks a moment, whatever type that has; seconds() is the time between two, and may only be asked for after
    settle()."""

    def now(self) -> Any: ...

    def seconds(self, start: Any, end: Any) -> float: ...

    def settle(self) -> None: ...


class HostClock:
    """What this thread sees: a blocking call takes as long as it blocks."""

    def now(self) -> float:
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def settle(self) -> None:
        pass


class DeviceClock:
    """What the current CUDA stream sees: a wait that only orders streams takes as long as the stream stands still."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return start.elapsed_time(end) / 1e3

    def settle(self) -> None:
        torch.cuda.synchronize(self._device)


def clock_of(device: str) -> Clock:
    where = torch.device(device)
    return DeviceClock(where) if where.type == "cuda" else HostClock()


class PipelineTimes:
    """What a pipeline rank does in one step (a Pipeline's observer)."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._start: Any = None
        self._spans: list[tuple[Action, Any, Any]] = []

    def begin(self) -> None:
        """The pipeline starts, on all of its ranks at about the same moment."""
        self._spans.clear()
        self._start = self.clock.now()

    def __call__(self, action: Action, start: Any, end: Any) -> None:
        self._spans.append((action, start, end))

    def compute_s(self) -> list[tuple[Action, float, float]]:
        """(action, start, seconds) of every compute step, starts counted from begin(). After the clock has settled."""
        return [
            (action, self.clock.seconds(self._start, start), self.clock.seconds(start, end))
            for action, start, end in self._spans
            if action.kind in _COMPUTE
        ]

    @property
    def busy_s(self) -> float:
        """Seconds in compute steps, collectives inside a stage among them."""
        return sum(seconds for _, _, seconds in self.compute_s())

    @property
    def end_s(self) -> float:
        """Seconds from begin() to the end of this rank's last action."""
        return max((self.clock.seconds(self._start, end) for _, _, end in self._spans), default=0.0)
