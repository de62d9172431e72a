"""Watches every operator of a rank while it trains: storages, saved tensors, matrix products, collectives."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fivefold.train.emulate.flops import Product, product_of
from fivefold.train.emulate.places import Made, Places, in_backward, in_recomputation
from fivefold.train.emulate.result import SavedUnit
from fivefold.train.emulate.storages import Peak, Storages
from fivefold.train.emulate.units import Units
from fivefold.train.emulate.world import Execute
from fivefold.train.mesh import Mesh
from fivefold.train.traffic import Transfer, transfer_of


class Multiplied(NamedTuple):
    product: Product
    phase: str
    unit: str | None


class Sent(NamedTuple):
    transfer: Transfer
    phase: str


class Recorder(TorchDispatchMode):
    """execute: what runs an operator, fivefold.train.emulate.world's Fakes or Reals.

    Until `start` is called everything is the phase "build", and neither products nor collectives count.
    """

    def __init__(self, execute: Execute, mesh: Mesh) -> None:
        super().__init__()
        self._execute, self._mesh = execute, mesh
        self._places = Places()
        self._stepping = False
        self._logits_width: int | None = None
        self.storages = Storages(self._made)
        self.units = Units(self.storages)
        self.products: Counter[Multiplied] = Counter()
        self.sent: Counter[Sent] = Counter()
        self.resting: dict[str, int] = {}
        self.peaks: dict[str, Peak] = {}
        self.saved: list[SavedUnit] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._stepping:
            self._count(func, args, kwargs)
        result = self._execute(func, args, kwargs)
        if func._schema.is_mutable:  # makes nothing: a phase of such operators alone has a level too
            self.storages.note(self._made().phase)
        self._see(func, result)
        return result

    def start(self, logits_width: int | None) -> None:
        """The step starts. logits_width: columns of the logits of this rank, where no other tensor has as many."""
        self._stepping, self._logits_width = True, logits_width
        self.resting = self.storages.breakdown

    def finish(self) -> None:
        """The step is over: what the storages and the units had becomes a result, before anything is let go."""
        self.peaks = dict(self.storages.peaks)
        self.saved = self.units.saved()

    def _count(self, func: Any, args: Any, kwargs: Any) -> None:
        transfer = transfer_of(func, args, self._mesh)
        if transfer is not None:
            self.sent[Sent(transfer, self._made().phase)] += 1
            return
        product = product_of(func, args, kwargs)
        if product is None:
            return
        if not in_backward():
            self.products[Multiplied(product, "forward", self.units.kind)] += 1
        else:
            self.products[Multiplied(product, "recompute" if in_recomputation() else "backward", None)] += 1

    def _see(self, func: Any, result: Any) -> None:
        if isinstance(result, Tensor):
            self.storages.see(result, partial(self.units.origin, func), self._category)
        elif isinstance(result, (list, tuple)):
            for each in result:
                self._see(func, each)

    def _category(self, tensor: Tensor) -> str | None:
        wide = self._logits_width is not None and tensor.dim() > 1 and tensor.shape[-1] == self._logits_width
        return "logits" if wide else None

    def _made(self) -> Made:
        if not self._stepping:
            return Made(self._places.made().category, "build")
        return self._places.made()
