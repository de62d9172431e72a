"""Data parallelism: gradients summed over the replicas in flat buckets; ZeRO-1 and ZeRO-2 shard what the sum feeds.

One mechanism for all of them. A bucket is a flat buffer of parameters cut into as many equal parts as the "shard"
group has ranks (one, for plain DP). Backward adds gradients to the bucket in the accumulation precision; when the
last micro-batch has filled it, it is reduce-scattered over "shard" and all-reduced over "replicate" while backward
goes on. The optimizer updates this rank's part of the master weights, and an all-gather brings the parts together,
each waited for by the first module that needs it.
    ZeRO-0  shard is one rank, replicate all of DP x CP: one all-reduce per bucket.
    ZeRO-1  the gradient buffer stays whole (like Megatron-Core's distributed optimizer), master and moments are parts.
    ZeRO-2  only the part of the gradients is kept: every micro-batch reduce-scatters (Rajbhandari et al. 2020,
            arXiv 1910.02054, section 5.2).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fivefold.errors import FivefoldError
from fivefold.train.mesh import Group, Mesh, gather_into, reduce_scatter_into
from fivefold.train.parallel.fused_gradients import fuse
from fivefold.train.precision import Precision

BUCKET_BYTES = 25 * 2**20  # of gradients; PyTorch DDP's default bucket_cap_mb


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
    """Some parameters in one flat buffer, and the part of it that this rank owns."""

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
        if self._whole is None or (self._shard is None and self._replicate is None):
            return
        if self._shard is None and not self._keep_whole:
            return  # the part is the whole: replicas sum it once a step, in finish()
        self._clear_unfilled()
        if self._shard is None:
            self._reduction = dist.all_reduce(self._whole, group=self._replicate, async_op=True)
            return
        self._received = self._new_gradient(self._part_size)
        self._reduction = reduce_scatter_into(self._received, self._whole, group=self._shard, async_op=True)

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
        if self._shard is None and not self._keep_whole and self._whole is not None:
            self._clear_unfilled()
            self.gradient.add_(self._whole[self._own])
            self._whole = None
        elif self._keep_whole:
            self._clear_unfilled()
        if self._replicate is not None and not (self._shard is None and self._keep_whole):
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


class DataParallel:
    """The buckets of one pipeline stage.

    module: the stage, with every other axis applied. Its parameters become views into the buckets.
    rounds: backward passes that reach each parameter in one step, the number of micro-batches.
    zero: 0, 1 or 2. alone: names that get a bucket of their own, so that their pieces are the same on every rank that
    holds the parameter whatever else it holds (tied embeddings across stages). whole_backward: no schedule splits the
    backward, so that a gradient may be added where its product is made.
    Raises FivefoldError for ZeRO-3, which is another mechanism (fivefold.train.parallel.sharded).
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        precision: Precision,
        *,
        zero: int,
        rounds: int,
        overlap_grad: bool = True,
        overlap_param: bool = True,
        bucket_bytes: int = BUCKET_BYTES,
        alone: frozenset[str] = frozenset(),
        whole_backward: bool = False,
    ) -> None:
        if zero not in (0, 1, 2):
            raise FivefoldError(
                f"These buckets are for ZeRO 0, 1 and 2, not {zero}: ZeRO-3 shards parameters by another mechanism.",
                code="bad-zero",
                option="--zero",
                value=zero,
                legal=[0, 1, 2],
            )
        self._rounds, self._overlap_grad, self._overlap_param = rounds, overlap_grad, overlap_param
        numel = max(bucket_bytes // precision.gradient.itemsize, 1)
        shard, replicate = mesh.group("shard"), mesh.group("replicate")
        # Last parameters first: about the order in which backward fills them.
        named = list(module.named_parameters())[::-1]
        self.buckets = [Bucket(group, shard, replicate, zero < 2, precision) for group in _grouped(named, numel, alone)]
        self._bucket_of = {parameter: bucket for bucket in self.buckets for _, parameter in bucket.parameters}
        # ZeRO-2 reduces after every round, the others after the last one only.
        self._order = [
            (bucket, count) for count in (range(1, rounds + 1) if zero == 2 else (rounds,)) for bucket in self.buckets
        ]
        self._next = 0
        self._keeps_parts, self._reducing = zero == 2, cast(Bucket | None, None)
        self._gathering = False
        for parameter in self._bucket_of:
            parameter.register_post_accumulate_grad_hook(self.accumulate)
        for unit in units(module):
            unit.register_forward_pre_hook(self._before_forward)
        if whole_backward and precision.gradient == precision.compute:
            fuse(module, self.accumulate_product)

    @property
    def pieces(self) -> list[Piece]:
        """What this rank's optimizer updates; gradients are valid between finish() and the next backward."""
        return [piece for bucket in self.buckets for piece in bucket.pieces()]

    def accumulate(self, parameter: Tensor) -> None:
        """Take in one micro-batch's gradient. Called by a hook in backward; a split backward that computes weight
        gradients itself sets .grad and calls this once per parameter and micro-batch."""
        owner = cast(nn.Parameter, parameter)
        self._bucket_of[owner].accumulate(owner)
        if self._overlap_grad:
            self._launch()

    def accumulate_product(self, parameter: nn.Parameter, left: Tensor, right: Tensor) -> None:
        """Take in left^T @ right, one micro-batch's gradient of a matrix, ahead of accumulate (see fused_gradients)."""
        self._bucket_of[parameter].accumulate_product(parameter, left, right)

    def _launch(self) -> None:
        """Start reductions in one fixed order, the same on every rank, as far as they are ready."""
        while self._next < len(self._order):
            bucket, count = self._order[self._next]
            if bucket.rounds_done < count:
                return
            before, self._reducing = self._reducing, bucket
            if before is bucket:  # the round before, which without overlap brought this one's gradients too
                bucket.wait_reduced()
            bucket.reduce()
            self._next += 1
            if self._keeps_parts and before is not None and before is not bucket:
                before.wait_reduced()  # so that at most two whole gradients exist

    def finish(self) -> None:
        """End of the step's backward passes: all gradients are sums over the replicas afterwards.

        Raises FivefoldError when a parameter got fewer gradients than there are micro-batches, which would leave other
        ranks waiting or sum the wrong thing.
        """
        self._gathering = False  # every forward has waited for what it needed
        self._launch()
        if self._next < len(self._order):
            raise missing_gradient(self._order[self._next][0], self._rounds)
        for bucket in self.buckets:
            bucket.finish()

    def gather(self) -> None:
        """After the optimizer's step: parameters are the updated ones at the next forward; forgets the gradients."""
        for bucket in reversed(self.buckets):
            bucket.gather()
        self._gathering = True
        self.reset()
        if not self._overlap_param:
            self.wait()

    def wait(self) -> None:
        """Wait for every gather, so that parameters can be read outside a forward."""
        for bucket in self.buckets:
            bucket.wait_gathered()
        self._gathering = False

    def reset(self) -> None:
        self._next, self._reducing = 0, None
        for bucket in self.buckets:
            bucket.reset()

    def _before_forward(self, module: nn.Module, _inputs: object) -> None:
        if not self._gathering:
            return
        for parameter in module.parameters():
            self._bucket_of[parameter].wait_gathered()


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


def units(module: nn.Module) -> Iterator[nn.Module]:
    """The modules that a stage's forward calls one after the other: its children, blocks one by one. Not their parts:
    tensor parallelism reads the weights of some without calling them."""
    for child in module.children():
        if isinstance(child, (nn.ModuleDict, nn.ModuleList)):
            yield from child.children()
        else:
            yield child


def _grouped(
    named: Iterable[tuple[str, nn.Parameter]], numel: int, alone: frozenset[str]
) -> Iterator[list[tuple[str, nn.Parameter]]]:
    """Consecutive parameters in groups of at least `numel` elements, those of `alone` each by itself."""
    group: list[tuple[str, nn.Parameter]] = []
    for name, parameter in named:
        if name in alone:
            yield [(name, parameter)]
            continue
        group.append((name, parameter))
        if sum(p.numel() for _, p in group) >= numel:
            yield group
            group = []
    if group:
        yield group
