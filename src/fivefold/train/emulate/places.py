"""Who makes a tensor: the functions of the trainer that say what their tensors are for, and in which phase they run."""

from __future__ import annotations

import sys
from types import CodeType, FrameType
from typing import NamedTuple

import torch

_TRAIN = "fivefold.train."
PHASES: tuple[str, ...] = ("build", "forward", "backward", "exchange", "reduce", "optimizer", "gather")
CATEGORIES: tuple[str, ...] = (
    "weights", "gradients", "master", "optimizer", "activations", "logits", "gathered", "buffers", "working",
)  # fmt: skip


class Place(NamedTuple):
    """category: of what the function makes. phase: while it runs. called_by: its category under another caller."""

    category: str | None = None
    phase: str | None = None
    called_by: tuple[str, str] | None = None


# The innermost function that has an answer gives it, for each of the two.
PLACES: dict[tuple[str, str], Place] = {
    ("build", "local_batch"): Place("buffers", "forward"),
    ("loss", "global_valid_tokens"): Place(phase="forward"),
    ("loss", "_CrossEntropySum.forward"): Place("logits"),
    ("loss", "_CrossEntropySum.backward"): Place("logits"),
    ("loss", "TokenLoss.__call__"): Place("logits"),
    ("parallel.vocabulary", "_CrossEntropy.forward"): Place("logits"),
    ("parallel.vocabulary", "_CrossEntropy.backward"): Place("logits"),
    ("engine", "OneStage.run"): Place(phase="compute"),
    ("engine", "Pipelined.run"): Place(phase="compute"),
    ("parallel.collectives", "start_gather"): Place("gathered"),
    ("parallel.collectives", "start_reduce_scatter"): Place("buffers"),
    ("parallel.context", "_Neighbours.pass_on"): Place("buffers"),
    ("parallel.peers", "BoundaryTensor.empty"): Place("buffers"),
    ("parallel.peers", "Peers.exchange"): Place(phase="exchange"),
    ("parallel.pipeline", "Pipeline._backward"): Place(phase="backward"),
    ("parallel.pipeline", "Pipeline._input_grad"): Place(phase="backward"),
    ("parallel.pipeline", "Pipeline._weight_grad"): Place(phase="backward"),
    ("parallel.bucket", "Bucket.__init__"): Place("weights"),
    ("parallel.bucket", "Bucket._new_gradient"): Place("gradients", called_by=("Bucket.reduce", "buffers")),
    ("parallel.bucket", "sum_pieces"): Place("buffers", "reduce"),
    ("parallel.data", "DataParallel.finish"): Place(phase="reduce"),
    ("parallel.data", "DataParallel.gather"): Place(phase="gather"),
    ("parallel.sharded", "Unit.__init__"): Place("weights"),
    ("parallel.sharded", "Unit.gather"): Place("buffers"),
    ("parallel.sharded", "FullySharded.finish"): Place(phase="reduce"),
    ("parallel.sharded", "FullySharded.gather"): Place(phase="gather"),
    ("optimizer", "Optimizer.step"): Place(phase="optimizer"),
    ("trainer", "Trainer.gradients"): Place(phase="reduce"),
    ("trainer", "Trainer.update"): Place(phase="optimizer"),
}
_NOTHING = Place()
_RECOMPUTES = "torch.utils.checkpoint"


class Made(NamedTuple):
    category: str
    phase: str


class Places:
    """Looks up who is running. One instance per emulation: it remembers what it found for each function."""

    def __init__(self) -> None:
        self._known: dict[CodeType, Place] = {}

    def made(self) -> Made:
        """The category and the phase of a tensor that is made now; "working" where no function says more."""
        category: str | None = None
        phase: str | None = None
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and (category is None or phase is None):
            place = self._place(frame)
            category = category or _category(place, frame)
            phase = phase or place.phase
            frame = frame.f_back
        if phase is None or phase == "compute":
            phase = "backward" if in_backward() else "forward"
        return Made(category or "working", phase)

    def _place(self, frame: FrameType) -> Place:
        code = frame.f_code
        if code not in self._known:
            module = frame.f_globals.get("__name__", "")
            key = (module.removeprefix(_TRAIN), code.co_qualname)
            self._known[code] = PLACES.get(key, _NOTHING) if module.startswith(_TRAIN) else _NOTHING
        return self._known[code]


def _category(place: Place, frame: FrameType) -> str | None:
    if place.called_by is not None and frame.f_back is not None:
        caller, category = place.called_by
        if frame.f_back.f_code.co_qualname == caller:
            return category
    return place.category


def in_backward() -> bool:
    """Whether autograd is running a node."""
    return torch._C._current_autograd_node() is not None


def in_recomputation() -> bool:
    """Whether what runs in backward is a forward that runs again."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == _RECOMPUTES:
            return True
        frame = frame.f_back
    return False
