"""Negative controls: find every sum over ranks that a step makes, and spoil one of them to see the proof fail.

Sums are found by tracing, so that a new one cannot be forgotten: whoever adds a reduction gets a control with it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Spoil = Literal["drop", "double"]
_ROOM = "fivefold.train."
_SUM = 0  # int(dist.ReduceOp.SUM), which is what the operators' argument gives
# Helpers that make collectives on behalf of others: a site is who called them.
_HELPERS = (f"{_ROOM}mesh", f"{_ROOM}parallel.collectives", __name__)


class Site(NamedTuple):
    """Where a sum over ranks is made: module and function, and which collective."""

    module: str
    function: str
    collective: str

    def __str__(self) -> str:
        return f"{self.module}.{self.function} ({self.collective})"


class Sums(TorchDispatchMode):
    """Records the site of every sum over ranks made inside it, in order of first appearance."""

    def __init__(self) -> None:
        super().__init__()
        self.sites: dict[Site, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        collective = _sum(func, args)
        if collective is not None:
            site = _site(collective)
            self.sites[site] = self.sites.get(site, 0) + 1
        return result


class Spoiled(TorchDispatchMode):
    """Spoils every sum made at one site: "drop" leaves each rank its own contribution, "double" counts all twice.

    The collective itself still runs, so that no rank waits for another.
    """

    def __init__(self, site: Site, how: Spoil) -> None:
        super().__init__()
        self._site, self._how = site, how

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        collective = _sum(func, args)
        if collective is None or _site(collective) != self._site:
            return func(*args, **(kwargs or {}))
        if collective == "reduce_scatter":
            # By its input: gloo writes the output whenever somebody waits.
            return func(args[0], self._spoiled_input(args), *args[2:], **(kwargs or {}))
        own = [tensor.clone() for tensor in args[0]]
        result = func(*args, **(kwargs or {}))
        dist.Work.unbox(result[1]).wait()
        for output, mine in zip(args[0], own, strict=True):
            output.copy_(mine) if self._how == "drop" else output.mul_(2)
        return result

    def _spoiled_input(self, args: Any) -> Tensor:
        """Twice the input of a reduce-scatter, or nothing but this rank's contribution to its own part."""
        whole, group = args[1], dist.ProcessGroup.unbox(args[2])
        if self._how == "double":
            return whole * 2
        alone = torch.zeros_like(whole)
        parts = alone.view(group.size(), -1)
        parts[group.rank()] = whole.view(group.size(), -1)[group.rank()]
        return alone


def _sum(func: Any, args: Any) -> str | None:
    """The collective's name when this is one that adds."""
    collectives = {
        torch.ops.c10d.allreduce_.default: "all_reduce",
        torch.ops.c10d._reduce_scatter_base_.default: "reduce_scatter",
    }
    name = collectives.get(func)
    if name is None:
        return None
    operation = args[2 if name == "all_reduce" else 3].op()
    return name if operation == _SUM else None


def _site(collective: str) -> Site:
    """Who made the collective: the innermost function of the trainer that is not a helper."""
    for frame in _frames():
        module = frame.f_globals.get("__name__", "")
        if module.startswith(_ROOM) and module not in _HELPERS:
            return Site(module.removeprefix(_ROOM), frame.f_code.co_qualname, collective)
    return Site("", "", collective)


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
