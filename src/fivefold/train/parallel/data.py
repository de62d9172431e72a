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

from collections.abc import Iterable, Iterator
from typing import cast

from torch import Tensor, nn

from fivefold.errors import FivefoldError
from fivefold.train.mesh import Mesh
from fivefold.train.parallel.bucket import Bucket, Piece, missing_gradient
from fivefold.train.parallel.fused_gradients import fuse
from fivefold.train.precision import Precision

BUCKET_BYTES = 25 * 2**20  # of gradients; PyTorch DDP's default bucket_cap_mb


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
