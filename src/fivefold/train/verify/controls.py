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

from fivefold.train.mesh import AXES, Mesh

Spoil = Literal["drop", "double"]
_ROOM = "fivefold.train."
_SUM = 0  # int(dist.ReduceOp.SUM), which is what the operators' argument gives
# Helpers that make collectives on behalf of others: a site is who called them.
_HELPERS = (f"{_ROOM}mesh", f"{_ROOM}parallel.collectives", __name__)


class Site(NamedTuple):
    """Where a sum over ranks is made: module and function, which collective, and over which axis of the mesh: the first
    with these members ("tp" where that is the whole world), or "part of" the narrowest one that holds them."""

    module: str
    function: str
    collective: str
    axis: str = ""  # by whoever is not told the mesh

    def __str__(self) -> str:
        return f"{self.module}.{self.function} ({self.collective}{self.axis and ' over ' + self.axis})"


class Sums(TorchDispatchMode):
    """Records the site of every sum over ranks made inside it, in order of first appearance.

    Raises RuntimeError at a collective that adds in a way that Spoiled cannot spoil: it would have no control.
    """

    def __init__(self, mesh: Mesh | None = None) -> None:
        super().__init__()
        self.sites: dict[Site, int] = {}
        self._mesh = mesh

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        found = _sum(func, args)
        if found is not None:
            site = _site(found, self._mesh)
            self.sites[site] = self.sites.get(site, 0) + 1
        return result


class Spoiled(TorchDispatchMode):
    """Spoils every sum made at one site: "drop" leaves each rank its own contribution, "double" counts all twice.

    The collective itself still runs, so that no rank waits for another.
    """

    def __init__(self, site: Site, how: Spoil, mesh: Mesh | None = None) -> None:
        super().__init__()
        self._site, self._how, self._mesh = site, how, mesh

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = _sum(func, args)
        if found is None or _site(found, self._mesh) != self._site:
            return func(*args, **(kwargs or {}))
        if found.collective == "reduce_scatter":
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


class _Found(NamedTuple):
    collective: str
    group: dist.ProcessGroup


class _Row(NamedTuple):
    """Of an operator that adds: its collective's name, and which arguments are the group and the operation."""

    collective: str
    group: int
    operation: int


_OPERATORS = {
    torch.ops.c10d.allreduce_.default: _Row("all_reduce", 1, 2),
    torch.ops.c10d._reduce_scatter_base_.default: _Row("reduce_scatter", 2, 3),
}


def _sum(func: Any, args: Any) -> _Found | None:
    """The collective when this is one that adds."""
    row = _OPERATORS.get(func)
    if row is None:
        if func.namespace in ("c10d", "_c10d_functional") and "reduce" in func.name():
            raise RuntimeError(f"{func.name()} sums over ranks, and has no control.")
        return None
    added = args[row.operation].op() == _SUM
    return _Found(row.collective, dist.ProcessGroup.unbox(args[row.group])) if added else None


def _site(found: _Found, mesh: Mesh | None) -> Site:
    """Who made the collective: the innermost function of the trainer that is not a helper."""
    axis = "" if mesh is None else _axis(found.group, mesh)
    for frame in _frames():
        module = frame.f_globals.get("__name__", "")
        if module.startswith(_ROOM) and module not in _HELPERS:
            return Site(module.removeprefix(_ROOM), frame.f_code.co_qualname, found.collective, axis)
    return Site("", "", found.collective, axis)


def _axis(group: dist.ProcessGroup, mesh: Mesh) -> str:
    members = set(dist.get_process_group_ranks(group))
    around = [axis for axis in AXES if members <= set(mesh.members(axis))]
    narrowest = min(around, key=mesh.size, default="world")
    exact = narrowest == "world" or mesh.size(narrowest) == len(members)
    return narrowest if exact else f"part of {narrowest}"


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
