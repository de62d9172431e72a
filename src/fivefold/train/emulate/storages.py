"""Bytes of the storages that are alive, by category, and the moments at which each phase had the most.

A storage counts from the operator that returns it until nothing holds it, whoever that is: Python, autograd, a
collective in flight. Memory that an operator takes and gives back inside itself is not seen, nor what an allocator
rounds up or a library keeps.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fivefold.train.emulate.places import CATEGORIES, Made


class Peak(NamedTuple):
    """bytes: sum of the breakdown, which is by category. in_flight: forward passes of a stage of which activations
    were held."""

    bytes: int
    breakdown: dict[str, int]
    in_flight: int


class Origin(NamedTuple):
    """unit: of the model, None outside of forward. name: the part of it and the operator."""

    unit: str | None
    name: str


class Record:
    """One storage. origin: who made it. saved: whether autograd has kept it. forward_pass: the one that saved it, None
    for whole numbers (tokens, labels), which the micro-batch holds anyway."""

    __slots__ = ("bytes", "category", "forward_pass", "kept", "origin", "saved", "watch")

    def __init__(self, size: int, category: str, origin: Origin, watch: Any) -> None:
        self.bytes, self.category, self.origin, self.watch = size, category, origin, watch
        self.kept = False  # of the trainer: never an activation
        self.saved = False
        self.forward_pass: int | None = None


class Storages:
    """made: category and phase of what is made now."""

    def __init__(self, made: Callable[[], Made]) -> None:
        self._made = made
        self._records: dict[int, Record] = {}
        self._bytes: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
        self._total = 0
        self._passes: Counter[int] = Counter()
        self.peaks: dict[str, Peak] = {}

    @property
    def breakdown(self) -> dict[str, int]:
        return dict(self._bytes)

    def record(self, tensor: Tensor) -> Record | None:
        return self._records.get(tensor.untyped_storage()._cdata)

    def see(self, tensor: Tensor, origin: Callable[[], Origin], category: Callable[[Tensor], str | None]) -> None:
        """An operator returned this tensor. category: None for what `made` says."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._records.get(key)
        if known is not None:
            if known.bytes != storage.nbytes():
                self._resized(known, storage.nbytes())
            return
        if tensor.device.type == "meta":
            return
        made = self._made()
        watch = weakref.ref(storage, lambda _: self._gone(key))
        record = Record(storage.nbytes(), category(tensor) or made.category, origin(), watch)
        self._records[key] = record
        self._add(record, record.bytes)
        self.note(made.phase)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Somebody gave the storage another size."""
        known = self._records.get(storage._cdata)
        if known is not None:
            self._resized(known, storage.nbytes())

    def keep(self, tensor: Tensor, category: str) -> None:
        """The trainer holds this tensor, for this purpose, from step to step."""
        record = self.record(tensor)
        if record is not None:
            self._move(record, category)
            record.kept = True

    def save(self, tensor: Tensor, forward_pass: int, category: str) -> Record | None:
        """Autograd keeps this tensor for backward. None where that costs nothing: it is the trainer's, or unknown."""
        record = self.record(tensor)
        if record is None or record.kept:
            return None
        if not record.saved:
            record.saved = True
            if tensor.is_floating_point():
                record.forward_pass = forward_pass
                self._passes[forward_pass] += 1
            if record.category != "logits":
                self._move(record, category)
        return record

    def mark(self, tensor: Tensor, category: str) -> None:
        """This tensor is of that category, whoever made it."""
        record = self.record(tensor)
        if record is not None and not record.kept:
            self._move(record, category)

    def _resized(self, record: Record, size: int) -> None:
        grown = size - record.bytes
        record.bytes = size
        self._add(record, grown)
        if grown > 0:
            self.note(self._made().phase)

    def _add(self, record: Record, size: int) -> None:
        self._bytes[record.category] += size
        self._total += size

    def _move(self, record: Record, category: str) -> None:
        self._bytes[record.category] -= record.bytes
        self._bytes[category] += record.bytes
        record.category = category

    def note(self, phase: str) -> None:
        """Something runs in this phase now."""
        best = self.peaks.get(phase)
        if best is None or self._total > best.bytes:
            self.peaks[phase] = Peak(self._total, dict(self._bytes), len(self._passes))

    def _gone(self, key: int) -> None:
        record = self._records.pop(key)
        self._add(record, -record.bytes)
        if record.forward_pass is not None:
            self._passes[record.forward_pass] -= 1
            if not self._passes[record.forward_pass]:
                del self._passes[record.forward_pass]


@contextmanager
def watching_resizes(storages: Storages) -> Iterator[None]:
    """Storages are also resized without an operator (ZeRO-3 gives memory back like that)."""
    kind = torch.UntypedStorage
    before = kind.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        result = before(storage, size)
        storages.resized(storage)
        return result

    kind.resize_ = resize_  # type: ignore[assignment] - shadows the base class's
    try:
        yield
    finally:
        del kind.resize_
