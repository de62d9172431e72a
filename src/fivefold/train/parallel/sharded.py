"""ZeRO-3: parameters too are sharded, and whole only while a module uses them (Rajbhandari et al. 2020, arXiv
1910.02054, section 5.3).

The parameters of a block lie in one flat buffer, of which a rank keeps its part of the master weights. The parts are
gathered before the block's forward and again before its backward, into memory that goes back right after; the gather
of the next block (in backward, of the one before) runs beside this one's work. When a block's gradients have all
arrived, they are reduce-scattered over "shard", micro-batch by micro-batch, while backward goes on. HSDP's replicas
sum their parts once a step. Everything is driven by what the modules do, so it is the same with and without a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from fivefold.train.mesh import Group, Mesh, gather_into
from fivefold.train.parallel.bucket import Bucket, Piece, missing_gradient
from fivefold.train.parallel.data import units
from fivefold.train.parallel.fused_gradients import fuse
from fivefold.train.precision import Precision


class Unit(Bucket):
    """The parameters of one module; this rank owns a part of them, and has the rest between gather() and release().

    A released parameter has its shape and is NaN everywhere, in the memory of one element.
    """

    def __init__(
        self, parameters: Sequence[tuple[str, nn.Parameter]], shard: Group, replicate: Group, precision: Precision
    ) -> None:
        super().__init__(parameters, shard, replicate, False, precision)
        self.master = self.flat[self._own].to(precision.master, copy=True)
        self._storage = self.flat.untyped_storage()
        self._bytes = self._storage.nbytes()
        self._nothing = self.flat.new_full((), torch.nan)
        self.release()

    @property
    def whole(self) -> bool:
        """Whether the parameters are in memory, or on their way."""
        return self._storage.size() > 0

    def gather(self) -> None:
        """Start to make the parameters whole, unless they are; wait_gathered() ends it."""
        if self.whole:
            return
        # Resized, not replaced: autograd may have saved views of it in forward, which find the values again.
        self._storage.resize_(self._bytes)
        part = self.master.to(self.flat.dtype)
        if self._shard is None:
            self.flat.copy_(part)
        else:
            self._gather = gather_into(self.flat, part, group=self._shard, async_op=True)
        for parameter, place in self._views.items():
            parameter.data = self.flat[place].view(parameter.shape)

    def release(self) -> None:
        """Give the memory of the parameters back."""
        self.wait_gathered()
        for parameter in self._views:
            parameter.data = self._nothing.expand(parameter.shape)
        self._storage.resize_(0)


class FullySharded:
    """The units of one pipeline stage: one per module that its forward calls, blocks one by one.

    module: the stage, with every other axis applied. rounds: backward passes that reach each parameter in one step, the
    number of micro-batches. overlap_grad: reductions run beside backward, one at a time. overlap_param: the next gather
    runs beside forward and backward. A tied embedding is one unit, gathered for the embedding and again for the head.
    whole_backward: see DataParallel. Where a schedule computes weight gradients apart, they need no parameter and find
    them released.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        precision: Precision,
        *,
        rounds: int,
        overlap_grad: bool = True,
        overlap_param: bool = True,
        whole_backward: bool = False,
    ) -> None:
        self._rounds, self._overlap_grad, self._overlap_param = rounds, overlap_grad, overlap_param
        self.buckets: list[Unit] = []
        self._unit_of: dict[nn.Parameter, Unit] = {}
        self._needs: list[list[Unit]] = []  # of each module, in the order of forward
        self._is_table: list[bool] = []
        self._reducing: Unit | None = None
        names = {parameter: name for name, parameter in module.named_parameters()}
        for user in units(module):
            new = [(names[p], p) for p in user.parameters() if p not in self._unit_of]
            if new:
                unit = Unit(new, mesh.group("shard"), mesh.group("replicate"), precision)
                self.buckets.append(unit)
                self._unit_of.update((parameter, unit) for _, parameter in new)
            place = len(self._needs)
            self._is_table.append(False)
            self._needs.append(list(dict.fromkeys(self._unit_of[p] for p in user.parameters())))
            user.register_forward_pre_hook(partial(self._before_forward, place))
            user.register_forward_hook(partial(self._after_forward, place))
        for parameter in self._unit_of:
            parameter.register_post_accumulate_grad_hook(self.accumulate)
        if whole_backward and precision.gradient == precision.compute:
            fuse(module, self.accumulate_product)

    @property
    def pieces(self) -> list[Piece]:
        """What this rank's optimizer updates; gradients are valid between finish() and the next backward."""
        return [piece for unit in self.buckets for piece in unit.pieces()]

    def accumulate(self, parameter: Tensor) -> None:
        """Take in one micro-batch's gradient. The last one of its unit starts the sum over the replicas."""
        owner = cast(nn.Parameter, parameter)
        unit = self._unit_of[owner]
        before = unit.rounds_done
        unit.accumulate(owner)
        if unit.rounds_done > before:
            self._reduce(unit)

    def accumulate_product(self, parameter: nn.Parameter, left: Tensor, right: Tensor) -> None:
        """Take in left^T @ right, one micro-batch's gradient of a matrix, ahead of accumulate (see fused_gradients)."""
        self._unit_of[parameter].accumulate_product(parameter, left, right)

    def finish(self) -> None:
        """End of the step's backward passes: all gradients are sums over the replicas afterwards.

        Raises FivefoldError when a parameter got fewer gradients than there are micro-batches.
        """
        for unit in self.buckets:
            if unit.rounds_done < self._rounds:
                raise missing_gradient(unit, self._rounds)
            unit.finish()
        self._reducing = None

    def gather(self) -> None:
        """After the optimizer's step: parameters are the updated ones at the next forward; forgets the gradients."""
        _release(self.buckets)
        self.reset()

    def wait(self) -> None:
        """Make every parameter whole, so that it can be read outside a forward, until the next one has used it."""
        _make_whole(self.buckets)

    def reset(self) -> None:
        for unit in self.buckets:
            unit.reset()

    def _reduce(self, unit: Unit) -> None:
        """Start the sum over the replicas. The one before has to end, so that at most two whole gradients exist."""
        unit.reduce()
        if self._reducing is not None:
            self._reducing.wait_reduced()
        self._reducing = unit
        if not self._overlap_grad:
            unit.wait_reduced()

    def _before_forward(self, place: int, _module: nn.Module, _inputs: object) -> None:
        _make_whole(self._needs[place])
        self._prefetch(self._needs[place + 1 : place + 2])

    def _after_forward(self, place: int, _module: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> None:
        _release(self._needs[place])
        # Tokens or positions come in where a module is a table: its backward reads no parameter.
        self._is_table[place] = not inputs[0].is_floating_point()
        _once(out, lambda: self._before_backward(place))
        _once(inputs[0], lambda: _release(self._needs[place]))

    def _before_backward(self, place: int) -> None:
        """The gradient of this module's output is there, so the backward of the module after it has ended."""
        for needed in self._needs[place + 1 : place + 2]:
            _release(needed)
        if self._is_table[place]:
            return
        _make_whole(self._needs[place])
        if place and not self._is_table[place - 1]:
            self._prefetch(self._needs[place - 1 : place])

    def _prefetch(self, needs: Sequence[Sequence[Unit]]) -> None:
        for unit in (unit for needed in needs if self._overlap_param for unit in needed):
            unit.gather()


def _once(tensor: Tensor, do: Callable[[], None]) -> None:
    """Call `do` once, when the tensor's gradient is first there: a split backward comes by again for the weights."""

    def hook(_gradient: Tensor) -> None:
        handle.remove()
        do()

    if tensor.requires_grad:
        handle = tensor.register_hook(hook)


def _make_whole(needed: Sequence[Unit]) -> None:
    for unit in needed:
        unit.gather()
    for unit in needed:
        unit.wait_gathered()


def _release(needed: Sequence[Unit]) -> None:
    for unit in needed:
        unit.release()
