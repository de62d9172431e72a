"""The transfers of a pipeline rank: posted as the schedule says, waited for when the tensor is needed.

A transfer is named by (tensor, micro-batch, consuming virtual stage), the same on both of its ranks, and that name is
its tag, so gloo matches transfers in whatever order they are posted. NCCL ignores tags and matches by order: the
orders of sender and receiver agree for each pair of ranks, direction and kind of tensor (tests/train/test_pipeline.py),
but a pipeline over NCCL has not been run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.errors import FivefoldError
from fivefold.schedule import Action, ActionKind, Direction, Placement, RankActions, Transfer
from fivefold.schedule import Tensor as Kind
from fivefold.train.mesh import Group

Key = tuple[Kind, int, int]  # tensor, micro-batch, consuming virtual stage


@dataclass(frozen=True, slots=True)
class BoundaryTensor:
    """What goes between stages, the same for every micro-batch: [micro-batch, seq, hidden] of this rank."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device | str = "cpu"

    def empty(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


class Peers:
    """The tensors on their way from and to this rank.

    group: the pipeline's ranks. stages: how many virtual stages there are. releases: see the function of that name.
    """

    def __init__(
        self, group: Group, boundary: BoundaryTensor, stages: int, releases: Mapping[Key, Sequence[Key]]
    ) -> None:
        self._group, self._boundary, self._stages, self._releases = group, boundary, stages, releases
        self._made: dict[Key, Tensor] = {}  # to be sent
        self._kept: dict[Key, Tensor] = {}  # for another stage of this rank
        self._sending: dict[Key, tuple[dist.Work, Tensor]] = {}  # the tensor has to live until it is sent
        self._receiving: dict[Key, tuple[dist.Work | None, Tensor]] = {}  # no work left: it has arrived

    def offer(self, key: Key, tensor: Tensor) -> None:
        """Keep a tensor until a later exchange sends it."""
        if tensor.shape != self._boundary.shape or tensor.dtype != self._boundary.dtype:
            raise FivefoldError(
                f"A stage made a tensor of {tuple(tensor.shape)} {tensor.dtype} for the next one, and the pipeline "
                f"moves {self._boundary.shape} {self._boundary.dtype}.",
                code="boundary-mismatch",
            )
        self._made[key] = tensor.contiguous()

    def keep(self, key: Key, tensor: Tensor) -> None:
        """Keep a tensor for another stage of this rank."""
        self._kept[key] = tensor

    def take(self, key: Key) -> Tensor:
        """The tensor of this name, once it is here."""
        if key in self._kept:
            return self._kept.pop(key)
        self._arrive(key)
        return self._receiving.pop(key)[1]

    def exchange(self, action: Action) -> None:
        """Post all transfers of an EXCHANGE together, and wait for them if it blocks."""
        tensors = [self._tensor_of(transfer) for transfer in action.transfers]
        works = dist.batch_isend_irecv([self._operation(t, x) for t, x in zip(action.transfers, tensors, strict=True)])
        # NCCL gives one work for all of them.
        works = works * len(tensors) if len(works) == 1 else works
        for transfer, tensor, work in zip(action.transfers, tensors, works, strict=True):
            target = self._sending if transfer.direction is Direction.SEND else self._receiving
            target[key_of(transfer)] = (work, tensor)
        if action.blocking:
            for transfer in action.transfers:
                (self._sent if transfer.direction is Direction.SEND else self._arrive)(key_of(transfer))

    def finish(self) -> None:
        """Wait for what is still being sent."""
        for key in list(self._sending):
            self._sent(key)

    def _tensor_of(self, transfer: Transfer) -> Tensor:
        is_send = transfer.direction is Direction.SEND
        return self._made.pop(key_of(transfer)) if is_send else self._boundary.empty()

    def _operation(self, transfer: Transfer, tensor: Tensor) -> dist.P2POp:
        kind, micro_batch, stage = key_of(transfer)
        tag = 2 * (micro_batch * self._stages + stage) + (kind is Kind.GRADIENT)
        call = dist.isend if transfer.direction is Direction.SEND else dist.irecv
        return dist.P2POp(call, tensor, group=self._group, group_peer=transfer.peer, tag=tag)

    def _arrive(self, key: Key) -> None:
        work, tensor = self._receiving[key]
        if work is None:
            return
        work.wait()
        self._receiving[key] = (None, tensor)
        for sent in self._releases.get(key, ()):
            self._sent(sent)

    def _sent(self, key: Key) -> None:
        if key in self._sending:
            work, _ = self._sending.pop(key)
            work.wait()


def key_of(transfer: Transfer) -> Key:
    return transfer.tensor, transfer.micro_batch, transfer.virtual_stage


def releases(lists: Sequence[RankActions], rank: int, placement: Placement) -> dict[Key, list[Key]]:
    """For each tensor that `rank` receives, the ones it has sent that must have arrived by then.

    gloo cannot be asked whether a send is done, and waiting for one could stop a rank that the schedule lets go on.
    But a peer that sends something after using what it got from us shows by it that our send is done.
    """
    released: dict[Key, list[Key]] = defaultdict(list)
    sent = {(key_of(t), t.peer) for action in lists[rank] for t in action.transfers if t.direction is Direction.SEND}
    for peer in sorted({peer for _, peer in sent}):
        used: list[Key] = []  # by the peer, from us, since it last sent us something
        for action in lists[peer]:
            for key in _used_by(action, peer, len(lists), placement):
                if (key, peer) in sent:
                    sent.remove((key, peer))
                    used.append(key)
            for transfer in action.transfers:
                if transfer.direction is Direction.SEND and transfer.peer == rank:
                    released[key_of(transfer)] += used
                    used = []
    return released


def _used_by(action: Action, rank: int, p: int, placement: Placement) -> list[Key]:
    """What `rank` has certainly received once this action is done, whoever sent it."""
    if action.kind is ActionKind.EXCHANGE:
        if not action.blocking:
            return []
        return [key_of(transfer) for transfer in action.transfers if transfer.direction is Direction.RECV]
    tensor = _CONSUMED.get(action.kind)
    if tensor is None or action.micro_batch is None or action.chunk is None:
        return []
    return [(tensor, action.micro_batch, placement.stage(rank, action.chunk, p))]


_CONSUMED = {
    ActionKind.FORWARD: Kind.ACTIVATION,
    ActionKind.BACKWARD: Kind.GRADIENT,
    ActionKind.INPUT_GRAD: Kind.GRADIENT,
}
