"""What a rank sends, by axis and collective, counted as it happens. Every operation passes through Python while it
counts, so it is an option and not part of the loop; fivefold.train.waits counts less, and costs less."""

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


class Operator(NamedTuple):
    """One c10d operator: where its arguments hold the payload and the group, and the share of it that a rank of n
    sends (Thakur, Rabenseifner and Gropp 2005, for rings)."""

    collective: str
    payload: int
    group: int
    share: Callable[[int], float]


def _part(n: int) -> float:
    return (n - 1) / n


OPERATORS: dict[str, Operator] = {
    "c10d::allreduce_": Operator("all_reduce", 0, 1, lambda n: 2 * (n - 1) / n),
    "c10d::_allgather_base_": Operator("all_gather", 0, 2, _part),
    "c10d::_reduce_scatter_base_": Operator("reduce_scatter", 1, 2, _part),
    "c10d::alltoall_base_": Operator("all_to_all", 1, 2, _part),
    "c10d::send": Operator("send", 0, 1, lambda n: 1.0),
}


class Transfer(NamedTuple):
    """One collective as this rank takes part in it. ranks: of its group. payload_bytes, sent_bytes: as in Volume."""

    key: Key
    ranks: int
    payload_bytes: int
    sent_bytes: float


def transfer_of(func: Any, args: Any, mesh: Mesh) -> Transfer | None:
    """What a c10d operator sends, None for any other operator and for receives, which are the other side's sends."""
    row = OPERATORS.get(func.name().removesuffix(".default")) if func.namespace == "c10d" else None
    if row is None:
        return None
    payload = payload_bytes(args[row.payload])
    group = dist.ProcessGroup.unbox(args[row.group])
    ranks = group.size()
    return Transfer(Key(axis_of(group, mesh), row.collective), ranks, payload, payload * row.share(ranks))


def payload_bytes(argument: Any) -> int:
    """Of a tensor or a list of them."""
    tensors = argument if isinstance(argument, list) else [argument]
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


def axis_of(group: dist.ProcessGroup, mesh: Mesh) -> str:
    """The axis with the group's members, else the narrowest one that they are a part of, else "world"."""
    members = set(dist.get_process_group_ranks(group))
    around = [axis for axis in AXES if members <= set(mesh.members(axis))]
    return min(around, key=mesh.size, default="world")


class Traffic(TorchDispatchMode):
    """Counts inside `with Traffic(mesh) as traffic:`; traffic.volumes afterwards."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.volumes: dict[Key, Volume] = {}
        self._mesh = mesh

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        transfer = transfer_of(func, args, self._mesh)
        if transfer is not None:
            calls, payload, sent = self.volumes.get(transfer.key, Volume())
            self.volumes[transfer.key] = Volume(calls + 1, payload + transfer.payload_bytes, sent + transfer.sent_bytes)
        return func(*args, **(kwargs or {}))


__all__ = [
    "OPERATORS",
    "Key",
    "Operator",
    "Traffic",
    "Transfer",
    "Volume",
    "axis_of",
    "payload_bytes",
    "transfer_of",
]
