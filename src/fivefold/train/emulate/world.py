"""Tensors without values and a process group without peers: what lets one process be one rank of any job.

A tensor here is one of PyTorch's fake tensors: it has a shape, a type and a storage of the right size, and no memory.
Operators give fake tensors of the right shapes; values that the trainer reads on the host (the loss, norms, the number
of valid tokens) are all one. What the trainer builds on the meta device stays there until it asks for the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from fivefold.errors import FivefoldError

Execute = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
_DEVICE = torch.ops.prim.device.default
_READ_ON_HOST = torch.ops.aten._local_scalar_dense.default


@contextmanager
def fake_world(rank: int, world: int) -> Iterator[None]:
    """torch.distributed as rank `rank` of `world` sees it, with collectives that reach nobody.

    Raises FivefoldError where this process is already a rank of a real job.
    """
    if dist.is_initialized():
        raise FivefoldError(
            "An emulated rank needs torch.distributed for itself, and this process is already a rank of a job. "
            "Emulate in a process of its own.",
            code="process-group-exists",
        )
    if world == 1:  # as the trainer runs it: without a process group
        yield
        return
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Fakes:
    """Executes operators on fake tensors, and collectives not at all."""

    def __init__(self) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._held: list[Held] = []

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is _DEVICE:  # more than half of all calls
            return args[0].fake_device
        if func.namespace == "c10d":
            return self._collective(func, args)
        if func is _READ_ON_HOST:
            return 1.0 if args[0].is_floating_point() else 1
        if _on_meta(args, kwargs):
            return func(*args, **kwargs)
        emptied = _emptied(args[0]) if func.is_view else None
        with self._mode:
            result = func(*args, **kwargs)
        if emptied is not None:
            # FakeTensorMode makes a view that it has made before by `set_`, which fills an emptied storage up again.
            emptied.resize_(0)
        return result

    def _collective(self, func: Any, args: tuple[Any, ...]) -> Any:
        held = Held(_tensors(args))
        self._held.append(held)  # PyTorch keeps only the C++ half of it
        return _answer(func, args, held)


class Reals:
    """Executes everything for real, and collectives on copies, so that what lives how long does not hang on when a
    background thread of gloo lets go of a tensor. Sends and receives have no such thread."""

    def __init__(self) -> None:
        self._held: list[Held] = []

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func.namespace != "c10d":
            return func(*args, **kwargs)
        if func is torch.ops.c10d.recv_.default:
            held = Held(_tensors(args), dist.Work.unbox(func(*args, **kwargs)))
        elif func is torch.ops.c10d.send.default:
            held = Held(_tensors(args), dist.Work.unbox(func([x.clone() for x in args[0]], *args[1:], **kwargs)))
        else:
            self._on_copies(func, args, kwargs)
            held = Held(_tensors(args))
        self._held.append(held)
        return _answer(func, args, held)

    def _on_copies(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        copies = [[x.clone() for x in arg] if _is_list(arg) else _cloned(arg) for arg in args]
        result = func(*copies, **kwargs)
        work = result[1] if isinstance(result, tuple) else result
        dist.Work.unbox(work).wait()
        for tensor, copy in zip(_tensors(args), _tensors(tuple(copies)), strict=True):
            tensor.copy_(copy)


class Held(dist.Work):
    """A collective in flight, which keeps its tensors until somebody waits for it, as NCCL's and gloo's do."""

    def __init__(self, tensors: list[Tensor], real: dist.Work | None = None) -> None:
        super().__init__()
        self._tensors, self._real = tensors, real

    def wait(self, timeout: Any = None) -> bool:
        if self._real is not None:
            self._real.wait()
        self._tensors, self._real = [], None
        return True

    def is_completed(self) -> bool:
        return True


def _answer(func: Any, args: tuple[Any, ...], held: Held) -> Any:
    """What the operator returns: its work, behind the tensors that it wrote where the operator returns those too."""
    alone = len(func._schema.returns) == 1
    return held.boxed() if alone else (args[0], held.boxed())


def _on_meta(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the operator's result is on the meta device: by the device that it asks for, or by its inputs."""
    device = kwargs.get("device")
    if device is None:
        first = next(iter(_tensors(args)), None)
        device = None if first is None else first.device
    return device is not None and torch.device(device).type == "meta"


def _tensors(args: tuple[Any, ...] | list[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for arg in args:
        if isinstance(arg, Tensor):
            found.append(arg)
        elif _is_list(arg):
            found += [x for x in arg if isinstance(x, Tensor)]
    return found


def _is_list(arg: Any) -> bool:
    return isinstance(arg, (list, tuple)) and any(isinstance(x, Tensor) for x in arg)


def _cloned(arg: Any) -> Any:
    return arg.clone() if isinstance(arg, Tensor) else arg


def _emptied(tensor: Any) -> torch.UntypedStorage | None:
    """The storage of a tensor that has elements, where it was resized to nothing (a parameter that ZeRO-3 released)."""
    storage = tensor.untyped_storage() if isinstance(tensor, Tensor) else None
    return storage if storage is not None and storage.nbytes() == 0 and tensor.numel() > 0 else None
