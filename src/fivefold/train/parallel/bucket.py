"""Flat buckets of parameters with their gradients and master weights: what data parallelism sums and shards.

A bucket is a flat buffer of parameters cut into as many equal parts as the "shard" group has ranks (one, for plain
DP). Backward adds gradients to it in the accumulation precision; the sum is a reduce-scatter over "shard" and an
all-reduce over "replicate". The optimizer updates this rank's part, and an all-gather brings the parts together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fivefold.errors import FivefoldError
from fivefold.train.mesh import Group, gather_into, reduce_scatter_into
from fivefold.train.precision import Precision


class Piece(NamedTuple):
    """The part of one parameter that this rank's optimizer owns.

    start: offset of the part in the flattened parameter. master, gradient: flat views, [numel of the part].
    """

    name: str
    parameter: nn.Parameter
    start: int
    master: Tensor
    gradient: Tensor


class Bucket:
    """Some parameters in one flat buffer, and the part of it that this rank owns.

    shard, replicate: the ranks that own a part each, and those that own the same part. keep_whole: whether the whole
    gradient stays through the step (ZeRO-0, 1) or only this rank's part of it (ZeRO-2, 3). What reduce() starts and
    finish() adds follows from these:

        keep_whole  shard        reduce()                        finish()
        yes         one rank     all-reduce over replicate       nothing
        yes         several      reduce-scatter over shard       all-reduce of the part over replicate
        no          several      the same, each micro-batch      the same
        no          one rank     nothing                         all-reduce of the part over replicate
    """

    def __init__(
        self, parameters: Sequence[tuple[str, nn.Parameter]], shard: Group, replicate: Group, keep_whole: bool,
        precision: Precision
    ) -> None:  # fmt: skip
        ranks, index = (shard.size(), shard.rank()) if shard is not None else (1, 0)
        self.parameters = list(parameters)
        self._shard, self._replicate = shard, replicate
        self._keep_whole, self._precision = keep_whole, precision
        total = sum(parameter.numel() for _, parameter in parameters)
        self._part_size = -(-total // ranks)
        self._own = slice(index * self._part_size, (index + 1) * self._part_size)
        self._padded = self._part_size * ranks
        device = parameters[0][1].device

        self.flat = torch.zeros(self._padded, dtype=parameters[0][1].dtype, device=device)
        self._views: dict[nn.Parameter, slice] = {}
        offset = 0
        for _, parameter in parameters:
            place = slice(offset, offset + parameter.numel())
            self.flat[place].copy_(parameter.detach().flatten())
            parameter.data = self.flat[place].view_as(parameter)
            self._views[parameter] = place
            offset = place.stop
        own = self.flat[self._own]
        self.master = own if own.dtype == precision.master else own.to(precision.master)
        self._whole = self._new_gradient(self._padded) if keep_whole else None
        self.gradient = self._whole[self._own] if self._whole is not None else self._new_gradient(self._part_size)

        self._arrived = 0  # parameters of the current round, over all rounds
        self._filled: set[nn.Parameter] = set()  # whose place in the whole gradient holds something
        self._reduction: dist.Work | None = None
        self._received: Tensor | None = None
        self._gather: dist.Work | None = None

    def _new_gradient(self, numel: int) -> Tensor:
        return torch.zeros(numel, dtype=self._precision.gradient, device=self.flat.device)

    def pieces(self) -> Iterator[Piece]:
        """What this rank owns of each parameter; a parameter may lie wholly in the other ranks' parts."""
        for name, parameter in self.parameters:
            place = self._views[parameter]
            first, last = max(place.start, self._own.start), min(place.stop, self._own.stop)
            if first < last:
                part = slice(first - self._own.start, last - self._own.start)
                yield Piece(name, parameter, first - place.start, self.master[part], self.gradient[part])

    def accumulate(self, parameter: nn.Parameter) -> None:
        """Take the parameter's gradient of one micro-batch out of .grad and add it to the buffer; without one, it is
        zero or has been added already."""
        place = self._place(parameter)
        if parameter.grad is not None:
            place.add_(parameter.grad) if parameter in self._filled else place.copy_(parameter.grad)
            self._filled.add(parameter)
            parameter.grad = None
        self._arrived += 1

    def accumulate_product(self, parameter: nn.Parameter, left: Tensor, right: Tensor) -> None:
        """Add left^T @ right, a micro-batch's gradient of the parameter in the buffer's dtype. accumulate() follows."""
        place = self._place(parameter)
        place.addmm_(left.t(), right) if parameter in self._filled else torch.mm(left.t(), right, out=place)
        self._filled.add(parameter)

    def _place(self, parameter: nn.Parameter) -> Tensor:
        """The parameter's gradient in the whole buffer, free to be written."""
        self.wait_reduced()
        if self._whole is None:
            self._whole = self._new_gradient(self._padded)
        return self._whole[self._views[parameter]].view(parameter.shape)

    @property
    def rounds_done(self) -> int:
        """Micro-batches whose gradients have arrived from every parameter."""
        return self._arrived // len(self.parameters)

    @property
    def reducing(self) -> bool:
        """Whether a sum over the replicas is on its way."""
        return self._reduction is not None

    def reduce(self) -> None:
        """Start the sum over the replicas (under ZeRO-2: this micro-batch's)."""
        if self._whole is None:
            return
        if self._shard is not None:
            self._clear_unfilled()
            self._received = self._new_gradient(self._part_size)
            self._reduction = reduce_scatter_into(self._received, self._whole, group=self._shard, async_op=True)
        elif self._replicate is not None and self._keep_whole:
            self._clear_unfilled()
            self._reduction = dist.all_reduce(self._whole, group=self._replicate, async_op=True)

    def wait_reduced(self) -> None:
        """Wait for a sum that reduce() started, and put it where the optimizer reads it."""
        if self._reduction is None:
            return
        self._reduction.wait()
        self._reduction = None
        if self._received is None:
            return
        if self._keep_whole:
            self.gradient.copy_(self._received)
        else:
            self.gradient.add_(self._received)
            self._whole = None
            self._filled.clear()
        self._received = None

    def finish(self) -> None:
        """After the last micro-batch and its reduce(): the gradient is the sum over all replicas."""
        self.wait_reduced()
        self._clear_unfilled()
        if self._whole is not None and self._shard is None and not self._keep_whole:
            self.gradient.add_(self._whole)  # the part is the whole, which no reduce() took in
            self._whole = None
        summed_already = self._shard is None and self._keep_whole
        if self._replicate is not None and not summed_already:
            dist.all_reduce(self.gradient, group=self._replicate)

    def reset(self) -> None:
        """Forget the gradients of this step."""
        self._arrived = 0
        self._filled.clear()
        if not self._keep_whole:
            self._whole = None
            self.gradient.zero_()

    def gather(self) -> None:
        """Start to bring the updated parts of all ranks into the parameters."""
        own = self.flat[self._own]
        if own.dtype != self.master.dtype:  # else the master is this part itself
            own.copy_(self.master)
        if self._shard is not None:
            self._gather = gather_into(self.flat, own, group=self._shard, async_op=True)

    @property
    def gathering(self) -> bool:
        """Whether updated parts of other ranks are on their way."""
        return self._gather is not None

    def wait_gathered(self) -> None:
        if self._gather is not None:
            self._gather.wait()
            self._gather = None

    def _clear_unfilled(self) -> None:
        """A parameter without a gradient has a gradient of zero."""
        if self._whole is None:
            return
        for _, parameter in self.parameters:
            if parameter not in self._filled:
                self._whole[self._views[parameter]].zero_()


def missing_gradient(late: Bucket, rounds: int) -> FivefoldError:
    """The error of a bucket that fewer micro-batches reached than there are."""
    names = ", ".join(name for name, _ in late.parameters[:3])
    return FivefoldError(
        f"Backward reached the bucket of {names}, ... for {late.rounds_done} of {rounds} micro-batches: "
        "a micro-batch was left out, or a parameter is not used by the model.",
        code="missing-gradient",
        value=late.rounds_done,
        legal=[rounds],
    )


def sum_pieces(pieces: Iterable[Piece], groups: Mapping[str, dist.ProcessGroup]) -> None:
    """Sum the gradients of the named pieces over their groups, one all-reduce per group.

    For parameters whose gradient on a rank is one term of a sum over another axis than data (sequence-parallel norms,
    tied embeddings across stages). Every rank of the group holds the same pieces of them.
    """
    by_group: dict[dist.ProcessGroup, list[Tensor]] = {}
    for piece in pieces:
        if piece.name in groups:
            by_group.setdefault(groups[piece.name], []).append(piece.gradient)
    for group, gradients in by_group.items():
        flat = torch.cat(gradients) if len(gradients) > 1 else gradients[0]
        dist.all_reduce(flat, group=group)
        if len(gradients) > 1:
            for gradient, total in zip(gradients, flat.split([len(g) for g in gradients]), strict=True):
                gradient.copy_(total)
