"""Process groups of a layout: for each axis, the ranks that this one communicates with.

The grids are fivefold.layout.grids': tp fastest, then cp, dp, pp; "dp_cp" holds the ranks over which gradients are
summed, "shard" and "replicate" cut it into the ranks that share ZeRO's states and the copies of those. An axis of
one rank has no process group: its group is None, and every helper below returns its input for None.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
import torch.distributed as dist

from fivefold.errors import FivefoldError
from fivefold.layout import ResolvedLayout
from fivefold.layout.grids import group_members, world_size

AXES = ("tp", "cp", "dp", "dp_cp", "shard", "replicate", "pp")
Group = dist.ProcessGroup | None

# (output, input, group=, async_op=) along dimension 0. PyTorch 2.13 has new names for them and warns at the old ones.
gather_into = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_into = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class Mesh:
    """The groups of one rank.

    layout: what to build groups for. rank: this process's rank, by default the one torch.distributed knows (0 when no
    process group exists). backend: of the groups, by default that of the world's group.
    Every rank of the world has to make its Mesh, since making a group is a collective call among its members.
    Raises FivefoldError when torch.distributed's world is not the layout's.
    """

    def __init__(self, layout: ResolvedLayout, rank: int | None = None, backend: str | None = None) -> None:
        world = world_size(layout)
        running = dist.get_world_size() if dist.is_initialized() else 1
        if running != world:
            raise FivefoldError(
                f"The layout is for {world} ranks (tp {layout.tp} x cp {layout.cp} x dp {layout.dp} x pp {layout.pp}) "
                f"and {running} are running: start {world} processes, or plan for {running}.",
                code="world-size",
                option="--nproc-per-node",
                value=running,
                legal=[world],
            )
        self.layout = layout
        self.world = world
        self.rank = rank if rank is not None else (dist.get_rank() if dist.is_initialized() else 0)
        self._backend = backend
        self._groups: dict[tuple[int, ...], Group] = {}
        self._members = {axis: group_members(layout, axis, self.rank) for axis in AXES}
        for axis in AXES:
            self.subgroup(self._members[axis])
        self.world_group = self.subgroup(tuple(range(world)))

    def subgroup(self, members: tuple[int, ...]) -> Group:
        """The process group of `members` (ascending ranks, this one among them), None for one rank.

        Made once per set of members: a later axis with the same members shares it. All members have to ask for it, in
        the same order as for their other groups.
        """
        if members not in self._groups:
            self._groups[members] = self._new_group(members)
        return self._groups[members]

    def _new_group(self, members: tuple[int, ...]) -> Group:
        if len(members) == 1:
            return None
        if len(members) == self.world and self._backend is None:
            return cast(Group, dist.group.WORLD)
        return cast(Group, dist.new_group(list(members), backend=self._backend, use_local_synchronization=True))

    def group(self, axis: str) -> Group:
        """The process group of `axis`, None when it has one rank. Raises KeyError for an unknown axis."""
        return self._groups[self._members[axis]]

    def members(self, axis: str) -> tuple[int, ...]:
        """Global ranks of this rank's group on `axis`, ascending."""
        return self._members[axis]

    def size(self, axis: str) -> int:
        return len(self._members[axis])

    def index(self, axis: str) -> int:
        """This rank's place in its group of `axis`."""
        return self._members[axis].index(self.rank)

    @property
    def coordinates(self) -> Mapping[str, tuple[int, int]]:
        """(index, size) by axis, as fivefold.train.init.shard_of takes them."""
        return {axis: (self.index(axis), self.size(axis)) for axis in AXES}

    def axis_of(self, group: Group) -> str | None:
        """The first axis, in the order of AXES, whose group this is: the name under which its traffic is counted."""
        return next((axis for axis in AXES if group is not None and self.group(axis) is group), None)


def all_reduce(tensor: torch.Tensor, group: Group, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> torch.Tensor:
    """Reduce `tensor` over the group in place and return it."""
    if group is not None:
        dist.all_reduce(tensor, op=op, group=group)
    return tensor


def all_gather(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """The tensors of all ranks of the group, concatenated along dimension 0 in the order of the group."""
    if group is None:
        return tensor
    whole = tensor.new_empty((tensor.shape[0] * group.size(), *tensor.shape[1:]))
    gather_into(whole, tensor.contiguous(), group=group)
    return whole
