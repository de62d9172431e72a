"""One rank of a training job: its process group, its device, its steps, and its end when anything fails.

torchrun tells each process its place by environment variables. A rank that fails prints its own traceback and leaves at
once, without the clean-up of process groups, which would wait for the others; gloo's peers then find their connections
closed, and torchrun (or srun --kill-on-bad-exit) ends those that wait in NCCL. SIGINT and SIGTERM end a rank at once,
also one that waits in a collective, where Python runs no handler.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from msgspec import Struct

from fivefold.errors import FivefoldError
from fivefold.train.build import Setup
from fivefold.train.data import Synthetic
from fivefold.train.job import Job
from fivefold.train.loop import JsonLines, Metrics, train
from fivefold.train.mesh import Mesh
from fivefold.train.optimizer import Cosine, Recipe
from fivefold.train.precision import precision
from fivefold.train.trainer import Trainer

T = TypeVar("T")
FAILED = 1
# A collective that waits longer has lost a rank; PyTorch's default is 10 minutes for NCCL and 30 for gloo.
TIMEOUT_S = 600
# What a rank sees when another one is gone, by gloo and by NCCL.
_LOST_A_PEER = re.compile(
    r"connection (closed|reset|refused)|broken pipe|remote process exited|NCCL communicator", re.I
)
_PATIENCE_S = 2.0  # the rank with the cause speaks first


class Place(NamedTuple):
    """rank of world; local: of this machine."""

    rank: int = 0
    world: int = 1
    local: int = 0


class Run(Struct, frozen=True, kw_only=True):
    """How to train. rate: peak learning rate, cosine over the steps after a warm-up of a tenth. log: JSON lines.
    peak_flops_per_s: dense peak of one GPU by precision, for the MFU on CUDA. stated_peak_flops_per_s: of one rank's
    device, whichever it is, in its place. measure: see fivefold.train.measured. dropout: see fivefold.train.dropout."""

    steps: int
    precision: str
    seed: int
    rate: float
    log: str | None = None
    peak_flops_per_s: Mapping[str, float] = {}
    stated_peak_flops_per_s: float | None = None
    measure: bool = False
    dropout: float = 0.0


def place(environment: Mapping[str, str] = os.environ) -> Place:
    """This process's place, by torchrun's variables; one process alone without them."""
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return Place()
    try:
        rank, world, local = (int(environment.get(name, "0")) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    except ValueError:
        rank = world = local = -1
    if not 0 <= rank < world or local < 0:
        raise FivefoldError(
            "RANK, WORLD_SIZE and LOCAL_RANK in the environment do not say which process this is. Start with torchrun.",
            code="bad-environment",
            option="RANK",
            value=environment.get("RANK"),
        )
    return Place(rank, world, local)


def require_world(job: Job, world: int) -> None:
    """Raises FivefoldError unless `world` processes run for the plan's GPUs."""
    if world == job.gpus:
        return
    alone = " (torchrun did not start this process)" if world == 1 else ""
    running = "1 process is running" if world == 1 else f"{world:,} processes are running"
    raise FivefoldError(
        f"The plan is for {job.gpus:,} GPUs and {running}{alone}. Start it with torchrun "
        f"--nproc-per-node {min(job.gpus, job.gpus_per_node)}"
        + (f" --nnodes {-(-job.gpus // job.gpus_per_node)}" if job.gpus > job.gpus_per_node else "")
        + " -m fivefold train, or add --smoke to train a small model on fewer.",
        code="world-size",
        option="--nproc-per-node",
        value=world,
        legal=[job.gpus],
    )


def recipe_of(job: Job, run: Run) -> Recipe:
    """The plan's optimizer with the run's learning rate."""
    kind: Any = job.work.optimizer  # refuse() has let adamw and sgd pass
    return Recipe(kind=kind, rate=run.rate, schedule=Cosine(total=run.steps, warmup=run.steps // 10))


def launch(job: Job, run: Run, where: Place, tell: Callable[[Metrics], None] | None = None) -> list[Metrics]:
    """Train and return this rank's metrics. With several ranks the process ends here when something fails.

    tell: called after each step on rank 0. Collective: every rank of the job calls it.
    """
    precision(run.precision, job.work.grad_dtype)  # refused before there is a process group
    device = _device(where)
    if where.world == 1:
        return _steps(job, run, where, device, tell)
    with ending_at_once(where):
        return or_die(where, lambda: _in_group(job, run, where, device, tell))


def _in_group(job: Job, run: Run, where: Place, device: str, tell: Callable[[Metrics], None] | None) -> list[Metrics]:
    backend = "nccl" if device.startswith("cuda") else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=TIMEOUT_S))
    told = _steps(job, run, where, device, tell)
    dist.barrier()  # a rank that leaves early closes the connections of the others
    dist.destroy_process_group()
    return told


def _steps(job: Job, run: Run, where: Place, device: str, tell: Callable[[Metrics], None] | None) -> list[Metrics]:
    layout = job.resolved
    setup = Setup(
        precision=run.precision, grad_dtype=job.work.grad_dtype, recipe=recipe_of(job, run), seed=run.seed,
        device=device, dropout=run.dropout,
    )  # fmt: skip
    trainer = Trainer(job.model, layout, Mesh(layout), setup)
    source = Synthetic(job.model.vocab, job.work.seq_len, seed=run.seed)
    peak = run.stated_peak_flops_per_s
    if peak is None and device.startswith("cuda"):
        peak = run.peak_flops_per_s.get(run.precision)
    first = where.rank == 0
    with JsonLines(run.log) if run.log is not None and first else nullcontext() as lines:

        def heard(metrics: Metrics) -> None:
            if lines is not None:
                lines(metrics)
            if tell is not None and first:
                tell(metrics)

        return train(trainer, source, range(run.steps), peak_flops_per_s=peak, measure=run.measure, tell=heard)


def _device(where: Place) -> str:
    if not torch.cuda.is_available():
        return "cpu"
    if where.local >= torch.cuda.device_count():
        raise FivefoldError(
            f"Process {where.local} of this machine has no GPU: there are {torch.cuda.device_count()}. Start one "
            "process per GPU, or hide all GPUs with CUDA_VISIBLE_DEVICES= to train on the CPU.",
            code="too-few-gpus",
            option="--nproc-per-node",
            value=where.local + 1,
            legal=f"1 to {torch.cuda.device_count()}",
        )
    torch.cuda.set_device(where.local)
    return f"cuda:{where.local}"


@contextmanager
def ending_at_once(where: Place) -> Iterator[None]:
    """SIGINT and SIGTERM end this process, with exit code 128 + signal and one line from rank 0, whatever its main
    thread is waiting for. Nothing to do outside the main thread, which alone can have handlers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard, told = os.pipe()
    os.set_blocking(told, False)
    # The number of a signal is written when it comes, by C code; a handler of Python's has to be there for that.
    before = signal.set_wakeup_fd(told, warn_on_full_buffer=False)
    handlers = {number: signal.signal(number, lambda *_: None) for number in _ENDING}
    threading.Thread(target=_end_when_told, args=(heard, where), daemon=True).start()
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(before)
        os.close(told)


_ENDING = (signal.SIGINT, signal.SIGTERM)


def _end_when_told(heard: int, where: Place) -> None:
    with os.fdopen(heard, "rb", buffering=0) as signals:
        while number := signals.read(1):
            if number[0] not in _ENDING:
                continue
            if where.rank == 0:
                name = signal.Signals(number[0]).name
                why = " (torchrun sends it to all when one rank has failed)" if name == "SIGTERM" else ""
                sys.stderr.write(f"rank 0 stopped by {name}{why}\n")
                sys.stderr.flush()
            os._exit(128 + number[0])


def or_die(where: Place, work: Callable[[], T]) -> T:
    """work(), or the end of this process: the cause on standard error, exit code 1, no waiting for anybody."""
    try:
        return work()
    except BaseException as error:
        if isinstance(error, FivefoldError) and where.rank > 0:
            time.sleep(_PATIENCE_S)  # most often every rank says the same, and torchrun ends this one meanwhile
        sys.stdout.flush()
        sys.stderr.write(_last_words(where, error))
        sys.stderr.flush()
        os._exit(FAILED)


def _last_words(where: Place, error: BaseException) -> str:
    if isinstance(error, FivefoldError):
        return f"error: {error.message}\n"
    if isinstance(error, RuntimeError) and _LOST_A_PEER.search(str(error)):
        return f"rank {where.rank} stopped: another rank is gone ({' '.join(str(error).split())[:160]})\n"
    head = f"rank {where.rank} failed\n"
    return head + "".join(traceback.format_exception(error)) if not isinstance(error, KeyboardInterrupt) else head
