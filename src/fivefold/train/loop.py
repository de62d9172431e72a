"""The training loop, and the numbers that it tells while it runs."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import TracebackType
from typing import Protocol

import msgspec
import torch

from fivefold.layout import ResolvedLayout
from fivefold.model import training_flops_per_token
from fivefold.train.data import Batch
from fivefold.train.measured import Measured, RankTimes
from fivefold.train.trainer import Trainer


class Source(Protocol):
    """Where batches come from: each replica's micro-batches of whole sequences, the same for every layout."""

    seq_len: int

    def micro_batches(self, step: int, layout: ResolvedLayout, dp_index: int) -> list[Batch]: ...


class Metrics(msgspec.Struct, frozen=True, kw_only=True):
    """One step of the whole job, as this rank sees it.

    loss: mean over valid tokens. grad_norm: before clipping. tokens_per_s: of the whole job, masked tokens included,
    since they cost the same. mfu: causal model FLOPs over the ranks' peak, None when the peak is not known.
    peak_memory_bytes: of this rank; on CUDA what the allocator reserved, on a CPU the process's largest resident set.
    skipped: fp16 gradients overflowed, nothing was updated. ranks: every rank's waits, bytes, memory and bubble, None
    where the run is not measured.
    """

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    step_s: float
    tokens_per_s: float
    tokens_per_s_per_gpu: float
    mfu: float | None
    peak_memory_bytes: int
    valid_tokens: int
    loss_scale: float
    skipped: bool
    ranks: tuple[RankTimes, ...] | None = None


class JsonLines:
    """Appends each step's metrics as one line of JSON, at once, so that a killed run leaves what it did.

    Numbers that are not finite are null: JSON has no word for them.
    """

    def __init__(self, path: Path | str) -> None:
        self._file = Path(path).open("a", encoding="utf-8")  # noqa: SIM115 - closed by __exit__

    def __call__(self, metrics: Metrics) -> None:
        fields = {name: _finite(value) for name, value in msgspec.to_builtins(metrics).items()}
        self._file.write(json.dumps({"schema": "fivefold/1", "kind": "step", **fields}) + "\n")
        self._file.flush()

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()


def train(
    trainer: Trainer,
    source: Source,
    steps: range,
    *,
    peak_flops_per_s: float | None = None,
    measure: bool = False,
    tell: Callable[[Metrics], None] | None = None,
) -> list[Metrics]:
    """Run the given steps and return their metrics. Every rank calls it.

    peak_flops_per_s: dense peak of one device in the compute precision, for the MFU. measure: tell every rank's waits,
    bytes and bubble (fivefold.train.measured says what that costs). tell: called after each step (on every rank: pass
    it where it is wanted).
    """
    told = []
    for metrics in run_steps(trainer, source, steps, peak_flops_per_s, measure):
        told.append(metrics)
        if tell is not None:
            tell(metrics)
    return told


def run_steps(
    trainer: Trainer, source: Source, steps: range, peak_flops_per_s: float | None, measure: bool = False
) -> Iterator[Metrics]:
    """The metrics of each step, as it ends."""
    layout, mesh = trainer.layout, trainer.mesh
    tokens = layout.num_micro_batches * layout.micro_batch * layout.dp * source.seq_len
    flops = tokens * training_flops_per_token(trainer.spec, source.seq_len, "causal")
    with Measured(trainer) if measure else nullcontext() as measured:
        for step in steps:
            start = time.perf_counter()
            scale = trainer.scale.value
            # The step ends with the sum of its losses on the host: the device has finished all but the last update.
            result = trainer.step(step, source.micro_batches(step, layout, mesh.index("dp")))
            seconds = time.perf_counter() - start
            peak = peak_memory_bytes(trainer.setup.device)
            yield Metrics(
                step=step,
                loss=result.loss,
                grad_norm=result.grad_norm,
                learning_rate=result.rate,
                step_s=seconds,
                tokens_per_s=tokens / seconds,
                tokens_per_s_per_gpu=tokens / seconds / mesh.world,
                mfu=flops / seconds / (mesh.world * peak_flops_per_s) if peak_flops_per_s else None,
                peak_memory_bytes=peak,
                valid_tokens=result.valid_tokens,
                loss_scale=scale,
                skipped=result.skipped,
                ranks=measured.take(seconds, peak) if measured is not None else None,
            )


def peak_memory_bytes(device: str) -> int:
    """The most memory that this process has held so far on the device (see Metrics)."""
    if torch.device(device).type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts it in KiB


def _finite(value: object) -> object:
    return None if isinstance(value, float) and value - value != 0.0 else value
