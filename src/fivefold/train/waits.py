"""Seconds that a rank stands in communication, and bytes that it sends, by axis, at little cost.

A dispatch mode sees a collective start, and never when somebody waits for it; and it sends every other operation of
the step through Python too. So what is watched is PyTorch's own boundary, the methods of ProcessGroup that start a
collective and Work.wait: they are replaced while a Waits is open, for the whole process, and put back at its end.

The seconds include waiting for ranks that come late: a receive cannot tell a slow link from a busy sender, so that
"pp" holds the pipeline's bubble too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import TracebackType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch.distributed as dist

from fivefold.errors import FivefoldError
from fivefold.train.clock import Clock
from fivefold.train.mesh import Mesh
from fivefold.train.traffic import OPERATORS, Operator, axis_of, payload_bytes

# ProcessGroup's methods, of PyTorch 2.9 and of 2.13, by the operator that each one calls with the same arguments;
# None for those that send nothing themselves.
_METHODS: dict[str, str | None] = {
    "allreduce": "c10d::allreduce_",
    "_allgather_base": "c10d::_allgather_base_",
    "all_gather_single": "c10d::_allgather_base_",
    "_reduce_scatter_base": "c10d::_reduce_scatter_base_",
    "reduce_scatter_single": "c10d::_reduce_scatter_base_",
    "alltoall_base": "c10d::alltoall_base_",
    "all_to_all_single": "c10d::alltoall_base_",
    "send": "c10d::send",
    "recv": None,
    "_end_coalescing": None,
}


class Waited(NamedTuple):
    """wait_s: in calls that start or await a collective. sent_bytes: see fivefold.train.traffic.Volume."""

    wait_s: float = 0.0
    sent_bytes: float = 0.0


class Waits:
    """Watches inside `with Waits(mesh, clock) as waits:`; waits.take() gives what came since the last take, by axis.

    One at a time in a process: FivefoldError for a second one.
    """

    def __init__(self, mesh: Mesh, clock: Clock) -> None:
        self._mesh, self._clock = mesh, clock
        self._paused = False
        self._axes: dict[dist.ProcessGroup, str] = {}
        self._axis_of: WeakKeyDictionary[dist.Work, str] = WeakKeyDictionary()
        self._spans: list[tuple[str, Any, Any]] = []
        self._sent: defaultdict[str, float] = defaultdict(float)
        self._replaced: list[tuple[type, str, Any]] = []

    def take(self) -> dict[str, Waited]:
        """By axis, what came since the last call. The clock has to have settled."""
        seconds: defaultdict[str, float] = defaultdict(float)
        for axis, start, end in self._spans:
            seconds[axis] += self._clock.seconds(start, end)
        found = {axis: Waited(seconds[axis], self._sent[axis]) for axis in {*seconds, *self._sent}}
        self._spans.clear()
        self._sent.clear()
        return found

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Communication that measuring itself makes."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def __enter__(self) -> Waits:
        if getattr(dist.Work.wait, _MARK, False):
            raise FivefoldError("Communication is being measured already in this process.", code="measured-twice")
        for method, operator in _METHODS.items():
            if hasattr(dist.ProcessGroup, method):
                row = OPERATORS[operator] if operator is not None else None
                self._replace(dist.ProcessGroup, method, lambda original, row=row: self._starting(original, row))
        self._replace(dist.Work, "wait", self._waiting)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        while self._replaced:
            setattr(*self._replaced.pop())

    def _replace(self, owner: type, name: str, make: Callable[[Any], Any]) -> None:
        watched = make(getattr(owner, name))
        setattr(watched, _MARK, True)
        # What the class holds is not what getattr gives: put back, the latter would no longer bind to its object.
        self._replaced.append((owner, name, vars(owner)[name]))
        setattr(owner, name, watched)

    def _starting(self, original: Any, row: Operator | None) -> Any:
        @wraps(original)
        def start(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            if self._paused:
                return original(group, *args, **kwargs)
            axis = self._axis(group)
            with self._span(axis):
                work = original(group, *args, **kwargs)
            if row is not None:
                self._sent[axis] += payload_bytes(args[row.payload]) * row.share(group.size())
            if work is not None:
                self._axis_of[work] = axis
            return work

        return start

    def _waiting(self, original: Any) -> Any:
        @wraps(original)
        def wait(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
            axis = self._axis_of.get(work)
            if axis is None:
                return original(work, *args, **kwargs)
            with self._span(axis):
                return original(work, *args, **kwargs)

        return wait

    @contextmanager
    def _span(self, axis: str) -> Iterator[None]:
        start = self._clock.now()
        try:
            yield
        finally:
            self._spans.append((axis, start, self._clock.now()))

    def _axis(self, group: dist.ProcessGroup) -> str:
        if group not in self._axes:
            self._axes[group] = axis_of(group, self._mesh)
        return self._axes[group]


_MARK = "_fivefold_watches"
