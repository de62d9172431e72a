"""One rank of a job, run by the trainer itself on tensors without values, in this process."""

from __future__ import annotations

import resource
import time
from typing import Any

import torch
from torch import Tensor

from fivefold.errors import FivefoldError
from fivefold.layout import ResolvedLayout
from fivefold.layout.grids import rank_coordinates, world_size
from fivefold.model import ModelSpec
from fivefold.train.build import HEAD, Setup, Stage
from fivefold.train.data import Batch
from fivefold.train.emulate.places import PHASES
from fivefold.train.emulate.recorder import Recorder
from fivefold.train.emulate.result import Collective, Emulation, Flops, Memory, PhasePeak, Products
from fivefold.train.emulate.storages import Peak, watching_resizes
from fivefold.train.emulate.world import Execute, Fakes, fake_world
from fivefold.train.job import Job
from fivefold.train.mesh import Mesh
from fivefold.train.optimizer import Recipe
from fivefold.train.refuse import refuse
from fivefold.train.trainer import Trainer

CONVENTION = (
    "2 m k n per product of matrices; attention as the flash kernel runs it: 2 products forward and 5 backward, half "
    "of the score matrix under a causal mask, all of it under a sliding window"
)


def emulate(job: Job, rank: int = 0, precision: str | None = None) -> Emulation:
    """Run rank `rank` of the job for one step, without its memory, its arithmetic or its peers.

    precision: in place of the job's. Raises FivefoldError for what the trainer does not run and for a rank that the
    job does not have.
    """
    refuse(job)
    kind: Any = job.work.optimizer  # refuse() has let adamw and sgd pass
    setup = Setup(precision=precision or job.work.precision, grad_dtype=job.work.grad_dtype, recipe=Recipe(kind=kind))
    return emulate_layout(job.model, job.resolved, rank, job.work.seq_len, setup)


def emulate_layout(spec: ModelSpec, layout: ResolvedLayout, rank: int, seq_len: int, setup: Setup) -> Emulation:
    """The same, for a layout that is known to be one that the trainer runs."""
    start, cpu_start_s = time.perf_counter(), time.process_time()
    world = world_size(layout)
    if not 0 <= rank < world:
        raise FivefoldError(
            f"The job has ranks 0 to {world - 1}, not {rank}.", code="no-such-rank", option="--rank", value=rank,
            legal=f"0 to {world - 1}",
        )  # fmt: skip
    _ = setup.policy  # refused before anything is built
    with fake_world(rank, world):
        mesh = Mesh(layout, rank)
        recorder = record_step(spec, layout, mesh, setup, seq_len, Fakes())
    coordinates = rank_coordinates(layout, rank)
    return Emulation(
        model=spec.name, rank=rank, world=world, coordinates=dict(coordinates), layout=layout,
        precision=setup.precision, grad_dtype=setup.grad_dtype, optimizer=setup.recipe.kind, seq_len=seq_len,
        micro_batches=layout.num_micro_batches, memory=memory_of(recorder), saved=recorder.saved,
        flops=flops_of(recorder), collectives=collectives_of(recorder), notes=[],
        seconds_s=time.perf_counter() - start, cpu_s=time.process_time() - cpu_start_s,
        host_peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,  # Linux counts it in KiB
    )  # fmt: skip


def record_step(
    spec: ModelSpec, layout: ResolvedLayout, mesh: Mesh, setup: Setup, seq_len: int, execute: Execute
) -> Recorder:
    """Build the trainer, give its optimizer the states that it has after a first update, and watch one step.

    execute: Fakes() for an emulation, Reals() on a rank of a real job, which then does exactly the same.
    """
    recorder = Recorder(execute, mesh)
    with watching_resizes(recorder.storages), recorder:
        trainer = Trainer(spec, layout, mesh, setup)
        trainer.update(0, 1.0)
        batches = _blank_batches(layout, seq_len)
        _tell_what_it_holds(recorder, trainer, batches)
        kinds = [spec.kinds.index(run.block) for run in spec.runs for _ in range(run.count)]
        for stage in trainer.stages:
            recorder.units.watch(stage.module, kinds)
        recorder.start(_logits_width(trainer.stages))
        with recorder.units.hooks():
            trainer.step(1, batches)
        recorder.finish()
    return recorder


def _blank_batches(layout: ResolvedLayout, seq_len: int) -> list[Batch]:
    shape = (layout.micro_batch, seq_len)
    return [
        Batch(torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64), torch.arange(seq_len))
        for _ in range(layout.num_micro_batches)
    ]


def _tell_what_it_holds(recorder: Recorder, trainer: Trainer, batches: list[Batch]) -> None:
    """What the trainer and its optimizer keep from step to step, by what it is for."""
    keep = recorder.storages.keep
    policy = trainer.setup.policy
    for tensor in (tensor for batch in batches for tensor in batch):
        keep(tensor, "buffers")
    sharded = trainer.layout.zero == 3
    for stage in trainer.stages:
        for bucket in stage.data.buckets:
            keep(bucket.gradient, "gradients")
            keep(bucket.master, "weights" if policy.master == policy.compute else "master")
            keep(bucket.flat, "gathered" if sharded else "weights")  # last: the master may be a part of it
    for state in trainer.optimizer.state_tensors():
        keep(state, "optimizer")

    def mark(gradient: Tensor | None) -> None:
        if gradient is not None:  # else its product went straight into the bucket
            recorder.storages.mark(gradient, "gradients")

    for parameter in (p for stage in trainer.stages for p in stage.module.parameters()):
        parameter.register_hook(mark)


def _logits_width(stages: list[Stage]) -> int | None:
    """Columns of this rank's logits, unless another of its tensors could have as many."""
    shapes = {name: tuple(p.shape) for stage in stages for name, p in stage.module.named_parameters()}
    if HEAD not in shapes:
        return None
    width = shapes.pop(HEAD)[0]
    others = {size for name, shape in shapes.items() if name != "embed_tokens.weight" for size in shape}
    return None if width in others else width


def memory_of(recorder: Recorder) -> Memory:
    peaks = recorder.peaks
    phase = max((p for p in PHASES if p in peaks and p != "build"), key=lambda p: peaks[p].bytes)
    peak = peaks[phase]
    return Memory(
        peak_bytes=peak.bytes, peak_phase=phase, in_flight=peak.in_flight, breakdown=peak.breakdown,
        resting_bytes=sum(recorder.resting.values()), resting=recorder.resting,
        phases=[_phase_peak(phase, peaks.get(phase)) for phase in PHASES],
    )  # fmt: skip


def _phase_peak(phase: str, peak: Peak | None) -> PhasePeak:
    if peak is None:
        return PhasePeak(phase=phase, peak_bytes=None, in_flight=None, breakdown=None)
    return PhasePeak(phase=phase, peak_bytes=peak.bytes, in_flight=peak.in_flight, breakdown=peak.breakdown)


def flops_of(recorder: Recorder) -> Flops:
    products = [
        Products(
            name=each.product.name,
            phase=each.phase,
            unit=each.unit,
            shape=each.product.shape,
            count=count,
            flops=each.product.flops * count,
        )
        for each, count in recorder.products.items()
    ]

    def total(phase: str) -> float:
        return sum(each.flops for each in products if each.phase == phase)

    return Flops(
        forward=total("forward"), backward=total("backward"), recompute=total("recompute"), convention=CONVENTION,
        products=products,
    )  # fmt: skip


def collectives_of(recorder: Recorder) -> list[Collective]:
    return [
        Collective(
            axis=each.transfer.key.axis,
            grid="dense",
            collective=each.transfer.key.collective,
            ranks=each.transfer.ranks,
            count=count,
            payload_bytes=each.transfer.payload_bytes,
            bytes_sent_per_rank=each.transfer.sent_bytes,
            phase=each.phase,
        )
        for each, count in sorted(recorder.sent.items(), key=str)
    ]


__all__ = ["emulate", "emulate_layout", "record_step"]
