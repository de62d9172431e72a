"""What a measured step tells about every rank: where it waited, what it sent, and how long its pipeline stood idle."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import NamedTuple

import msgspec
import torch

from fivefold.layout.grids import group_members
from fivefold.train.clock import PipelineTimes, clock_of
from fivefold.train.mesh import AXES, Mesh, all_gather, all_reduce
from fivefold.train.trainer import Trainer
from fivefold.train.waits import Waited, Waits

_NAMES = (*AXES, "world")  # of traffic's axes


class RankTimes(msgspec.Struct, frozen=True, kw_only=True):
    """One rank in one step.

    step_s: of this rank, which may have begun before the others.
    wait_s, sent_bytes: by axis, without the axes that it had no traffic on; see fivefold.train.waits. Axes of the same
    ranks share the first one's name, so the scalars of the whole world may count there.
    pipeline_s: from the common start of its pipeline to the end of the last of its ranks. busy_s: of that, in compute
    steps, collectives inside a stage among them. bubble: 1 - busy_s / pipeline_s. All three None without a pipeline.
    """

    rank: int
    step_s: float
    wait_s: dict[str, float]
    sent_bytes: dict[str, int]
    peak_memory_bytes: int
    pipeline_s: float | None
    busy_s: float | None
    bubble: float | None


class _Own(NamedTuple):
    """What a rank knows of itself. end_s: of its last action in the pipeline."""

    waited: dict[str, Waited]
    step_s: float
    end_s: float
    busy_s: float
    peak_memory_bytes: int


class Measured:
    """Measures the steps made inside `with Measured(trainer) as measured:`; measured.take() after each one.

    Costs, per step, one meeting of each pipeline's ranks before it starts, one all-gather of some numbers, and on
    CUDA a wait for the device.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._mesh = trainer, trainer.mesh
        self._clock = clock_of(trainer.setup.device)
        self._waits = Waits(trainer.mesh, self._clock)
        self.times = _Together(trainer, self._waits) if trainer.layout.pp > 1 else None

    def __enter__(self) -> Measured:
        self._waits.__enter__()
        self._trainer.engine.time_with(self.times)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._trainer.engine.time_with(None)
        self._waits.__exit__(kind, error, at)

    def take(self, step_s: float, peak_memory_bytes: int) -> tuple[RankTimes, ...]:
        """All ranks' numbers since the last call, by rank, on every rank. Collective. The arguments are this rank's."""
        self._clock.settle()
        end_s, busy_s = (self.times.end_s, self.times.busy_s) if self.times is not None else (0.0, 0.0)
        row = _to_row(_Own(self._waits.take(), step_s, end_s, busy_s, peak_memory_bytes))
        with self._waits.paused():
            mine = torch.tensor([row], dtype=torch.float64, device=self._trainer.setup.device)
            rows = all_gather(mine, self._mesh.world_group).tolist()
        return _ranks(self._mesh, [_from_row(row) for row in rows])


class _Together(PipelineTimes):
    """Starts the clock of a pipeline's ranks at one moment, by a meeting: no clock is shared between machines."""

    def __init__(self, trainer: Trainer, waits: Waits) -> None:
        super().__init__(clock_of(trainer.setup.device))
        self._group, self._waits = trainer.mesh.group("pp"), waits
        self._nothing = torch.zeros(1, device=trainer.setup.device)

    def begin(self) -> None:
        with self._waits.paused():
            all_reduce(self._nothing, self._group)
        super().begin()


def _to_row(own: _Own) -> list[float]:
    waited = [own.waited.get(name, Waited()) for name in _NAMES]
    return [own.step_s, own.end_s, own.busy_s, own.peak_memory_bytes, *(x for pair in waited for x in pair)]


def _from_row(row: Sequence[float]) -> _Own:
    step_s, end_s, busy_s, peak, *pairs = row
    waited = {name: Waited(*pairs[2 * i : 2 * i + 2]) for i, name in enumerate(_NAMES)}
    return _Own({name: pair for name, pair in waited.items() if any(pair)}, step_s, end_s, busy_s, int(peak))


def _ranks(mesh: Mesh, owns: Sequence[_Own]) -> tuple[RankTimes, ...]:
    found = []
    for rank, own in enumerate(owns):
        pipeline_s = max(owns[member].end_s for member in group_members(mesh.layout, "pp", rank))
        piped = pipeline_s > 0
        found.append(
            RankTimes(
                rank=rank,
                step_s=own.step_s,
                wait_s={name: pair.wait_s for name, pair in own.waited.items()},
                sent_bytes={name: round(pair.sent_bytes) for name, pair in own.waited.items()},
                peak_memory_bytes=own.peak_memory_bytes,
                pipeline_s=pipeline_s if piped else None,
                busy_s=own.busy_s if piped else None,
                bubble=1 - own.busy_s / pipeline_s if piped else None,
            )
        )
    return tuple(found)
