"""What a rank sends, by axis and collective, counted as it happens. Every operation passes through Python while it
counts, so it is an option and not part of the loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from fivefold.train.mesh import AXES, Mesh


class Key(NamedTuple):
    """axis: one of the mesh's, or "world". collective: all_reduce, all_gather, reduce_scatter, all_to_all, send."""

    axis: str
    collective: str


class Volume(NamedTuple):
    """payload_bytes: of the whole tensor (gathered, or before it is scattered). sent_bytes: what this rank sends, by
    the ring algorithm where there is one (fivefold.cluster.collectives' convention)."""

    calls: int = 0
    payload_bytes: int = 0
    sent_bytes: float = 0.0


class _Row(NamedTuple):
    """One c10d operator: where its arguments hold the payload and the group, and the share of it that a rank of n
    sends (Thakur, Rabenseifner and Gropp 2005, for rings)."""

    collective: str
    payload: int
    group: int
    share: Callable[[int], float]


def _part(n: int) -> float:
    return (n - 1) / n


_OPERATORS: dict[str, _Row] = {
    "c10d::allreduce_": _Row("all_reduce", 0, 1, lambda n: 2 * (n - 1) / n),
    "c10d::_allgather_base_": _Row("all_gather", 0, 2, _part),
    "c10d::_reduce_scatter_base_": _Row("reduce_scatter", 1, 2, _part),
    "c10d::alltoall_base_": _Row("all_to_all", 1, 2, _part),
    "c10d::send": _Row("send", 0, 1, lambda n: 1.0),
}


class Traffic(TorchDispatchMode):
    """Counts inside `with Traffic(mesh) as traffic:`; traffic.volumes afterwards."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.volumes: dict[Key, Volume] = {}
        self._mesh = mesh

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        row = _OPERATORS.get(func.name().removesuffix(".default")) if func.namespace == "c10d" else None
        if row is not None:
            self._count(row, args)
        return func(*args, **(kwargs or {}))

    def _count(self, row: _Row, args: Any) -> None:
        tensors = args[row.payload] if isinstance(args[row.payload], list) else [args[row.payload]]
        payload = sum(tensor.numel() * tensor.itemsize for tensor in tensors)
        group = dist.ProcessGroup.unbox(args[row.group])
        key = Key(self._axis(group), row.collective)
        calls, bytes_so_far, sent = self.volumes.get(key, Volume())
        self.volumes[key] = Volume(calls + 1, bytes_so_far + payload, sent + payload * row.share(group.size()))

    def _axis(self, group: dist.ProcessGroup) -> str:
        """The axis with these members, else the narrowest one that they are a part of, else the world."""
        members = set(dist.get_process_group_ranks(group))
        around = [axis for axis in AXES if members <= set(self._mesh.members(axis))]
        return min(around, key=self._mesh.size, default="world")


def by_axis(volumes: dict[Key, Volume]) -> dict[str, float]:
    """Bytes sent by this rank on each axis."""
    total: dict[str, float] = {}
    for key, volume in volumes.items():
        total[key.axis] = total.get(key.axis, 0.0) + volume.sent_bytes
    return total


__all__ = ["Key", "Traffic", "Volume", "by_axis"]
