"""Which part of the model runs, and what autograd keeps of it: by the hooks of its modules."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from fivefold.train.emulate.places import in_backward
from fivefold.train.emulate.result import SavedTensor, SavedUnit
from fivefold.train.emulate.storages import Origin, Record, Storages
from fivefold.train.model import Decoder


class _Kept(NamedTuple):
    record: Record
    name: str
    shape: tuple[int, ...]
    dtype: str


class _Unit(NamedTuple):
    """kind: "block" and its index among the model's kinds, or the module's name and None."""

    name: str
    kind: tuple[str, int | None]
    layer: int | None


class Units:
    """Watches the modules of every stage of a rank; `saved` then has what the first forward pass of each kept."""

    def __init__(self, storages: Storages) -> None:
        self._storages = storages
        self._unit: _Unit | None = None
        self._path: list[str] = []  # of modules inside the unit
        self._pass = 0
        self._input: Record | None = None  # of the unit that runs
        self._kept: dict[int, _Kept] = {}
        self._shared: dict[int, _Kept] = {}
        self._seen: dict[int, Record] = {}  # saved by this pass
        self._done: dict[str, tuple[_Unit, list[SavedTensor]]] = {}

    @property
    def kind(self) -> str | None:
        """Of the unit that runs."""
        return None if self._unit is None else self._unit.kind[0]

    def watch(self, decoder: Decoder, kinds: Sequence[int]) -> None:
        """Hook the modules of one stage. kinds: of each block of the whole model."""
        first = True
        for name, module in decoder.named_children():
            blocks = module.items() if isinstance(module, nn.ModuleDict) else None
            for layer, each in blocks or ((None, module),):
                index = None if layer is None else int(layer)
                kind = (name, None) if index is None else ("block", kinds[index])
                unit = _Unit(name if layer is None else f"{name}.{layer}", kind, index)
                each.register_forward_pre_hook(partial(self._enter, unit, first), prepend=False)
                each.register_forward_hook(partial(self._leave, unit), always_call=True)
                for path, part in each.named_modules():
                    if path:
                        part.register_forward_pre_hook(partial(self._into, path))
                        part.register_forward_hook(self._out_of, always_call=True)
                first = False

    def hooks(self) -> saved_tensors_hooks:
        """The context in which autograd tells what it keeps."""
        # Detached: an output that its own node keeps would otherwise hold the node, and be held until the end of time
        # where the graph is retained (a split backward). Autograd itself keeps outputs without their node.
        return saved_tensors_hooks(lambda tensor: _without_node(self._keep(tensor)), lambda tensor: tensor)

    def origin(self, func: Any) -> Origin:
        """Of what the operator makes now."""
        operator = func.name().split("::")[-1].removesuffix(".default")
        unit = None if in_backward() else self._unit
        if unit is None:
            return Origin(None, operator)
        where = self._path[-1] if self._path else unit.kind[0]
        return Origin(unit.name, f"{where}/{operator}")

    def saved(self) -> list[SavedUnit]:
        """Of one forward pass, units that keep the same together."""
        self._close()
        found: dict[Any, SavedUnit] = {}
        for unit, tensors in self._done.values():
            key = (unit.kind, tuple(tensors))
            layers = ([] if key not in found else found[key].layers) + ([] if unit.layer is None else [unit.layer])
            found[key] = SavedUnit(
                unit=unit.kind[0], kind=unit.kind[1], layers=layers, bytes=sum(t.bytes for t in tensors),
                tensors=tensors,
            )  # fmt: skip
        return list(found.values())

    def _enter(self, unit: _Unit, first: bool, _module: nn.Module, inputs: Any) -> None:
        if in_backward():
            return
        self._close()
        if first:
            self._pass += 1
            self._seen, self._shared = {}, {}
        self._unit, self._path, self._kept = unit, [], {}
        self._input = self._storages.record(inputs[0])

    def _leave(self, unit: _Unit, _module: nn.Module, _inputs: Any, _out: Any) -> None:
        if in_backward():
            return
        self._close()
        after = _LOSS if unit.name == "lm_head" else _SHARED
        self._unit, self._path, self._kept, self._input = after, [], {}, None

    def _into(self, path: str, _module: nn.Module, _inputs: Any) -> None:
        self._path.append(path)

    def _out_of(self, _module: nn.Module, _inputs: Any, _out: Any) -> None:
        if self._path:
            self._path.pop()

    def _keep(self, tensor: Tensor) -> Tensor:
        if in_backward():
            return tensor
        record = self._storages.save(tensor, self._pass, "activations")
        if record is not None and id(record) not in self._seen:
            self._seen[id(record)] = record
            kept = self._kept if self._is_own(record) else self._shared
            name = "input" if record is self._input else record.origin.name
            kept[id(record)] = _Kept(record, name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        return tensor

    def _is_own(self, record: Record) -> bool:
        """Whether the unit that runs made it, or is the first to get it."""
        unit = self._unit
        return unit is None or unit == _LOSS or record is self._input or record.origin.unit == unit.name

    def _close(self) -> None:
        """The unit is done: what it kept has its size of now, which is nothing where it was freed meanwhile."""
        for unit, kept in ((self._unit, self._kept), (_SHARED, self._shared)):
            if unit is None or unit.name in self._done or not kept:
                continue
            tensors = [
                SavedTensor(name=k.name, shape=k.shape, dtype=k.dtype, bytes=k.record.bytes)
                for k in kept.values()
                if k.record.bytes
            ]
            self._done[unit.name] = (unit, tensors)


_SHARED = _Unit("shared", ("shared", None), None)  # what runs between the units
_LOSS = _Unit("loss", ("loss", None), None)


def _without_node(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_leaf else tensor.detach()
