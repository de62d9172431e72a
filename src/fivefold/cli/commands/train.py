"""`fivefold train`."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Group, Parameter

from fivefold.cli.flags import OUTPUT, OutputFlags, whole_number
from fivefold.cli.output import console, write_json

if TYPE_CHECKING:
    from fivefold.cli.render.train import Screen
    from fivefold.estimate.planfile import SavedPlan
    from fivefold.train.job import Job
    from fivefold.train.launch import Run

_RUN = Group("Training", sort_key=1)
_OUTPUT = OutputFlags()
_SMOKE_RATE = {"adamw": 1e-2, "sgd": 0.3}  # the shrunken models learn in some tens of steps with these
_RATE = {"adamw": 3e-4, "sgd": 0.1}
_SPEAKER_FIRST_S = 2.0


def train(
    plan: str,
    /,
    *,
    smoke: Annotated[bool, Parameter(group=_RUN, negative="", show_default=False)] = False,
    steps: Annotated[int, Parameter(group=_RUN, converter=whole_number)] = 20,
    precision: Annotated[str | None, Parameter(group=_RUN)] = None,
    learning_rate: Annotated[float | None, Parameter(name=("--learning-rate", "--lr"), group=_RUN)] = None,
    seed: Annotated[int, Parameter(group=_RUN, converter=whole_number)] = 0,
    dropout: Annotated[float, Parameter(group=_RUN)] = 0.0,
    measure: Annotated[bool, Parameter(group=OUTPUT, negative="", show_default=False)] = False,
    peak_tflops: Annotated[float | None, Parameter(group=OUTPUT)] = None,
    log: Annotated[str | None, Parameter(name="--log-file", group=OUTPUT)] = None,
    output: OutputFlags = _OUTPUT,
) -> int:
    """Train the layout of a plan file with PyTorch, on synthetic data: gloo on CPUs, NCCL where CUDA is.

    Start one process per GPU of the plan with torchrun. The model starts from random weights. A rank that fails ends
    the job, with its traceback.

    For example:
      torchrun --nproc-per-node 4 -m fivefold train plan.toml --smoke
      torchrun --nproc-per-node 8 -m fivefold train plan.toml --steps 100 --log-file run.jsonl --measure

    Parameters
    ----------
    plan
        A plan file (.toml) written by fivefold plan --save.
    smoke
        Train a shrunken model in the same layout, with as many replicas as there are processes.
    steps
        How many steps.
    precision
        bf16, fp16, fp32 or fp64. Default: the plan's.
    learning_rate
        Peak, after a warm-up of a tenth of the steps. Default: 3e-4 for adamw, 0.1 for sgd; with --smoke 1e-2 and 0.3.
    seed
        Of the weights, the data and dropout.
    dropout
        Share of the embeddings, and of what attention and feed-forward add, that becomes zero. The same numbers in
        every layout. Attention weights are not dropped.
    measure
        Each rank's seconds in communication and bytes sent, by axis, its memory, and its share of the pipeline's
        bubble. Costs a meeting of the pipeline's ranks and one small all-gather per step (on CUDA also a wait for
        the device).
    peak_tflops
        Dense peak of one rank's device in TFLOP/s, for the MFU. Default: on CUDA the plan's GPU; on a CPU no MFU.
    log
        Append each step's numbers to this file, as lines of JSON; with --measure every rank's.
    """
    from fivefold.cli.failures import exit_code
    from fivefold.errors import FivefoldError
    from fivefold.estimate.result import envelope, with_defaults
    from fivefold.train.refuse import require_torch

    require_torch()
    from fivefold.train.launch import Run, launch, place

    where = place()
    try:
        _check(steps, learning_rate, peak_tflops, dropout)
        saved = _plan(plan)
        job, notes = _job(saved, smoke, where.world, precision)
        rates = _SMOKE_RATE if smoke else _RATE
        run = Run(
            steps=steps, precision=precision or job.work.precision, seed=seed,
            rate=learning_rate if learning_rate is not None else rates[job.work.optimizer],
            log=_writable(log) if where.rank == 0 else None,
            peak_flops_per_s={str(key): value for key, value in saved.cluster.gpu.peak_flops_per_s.items()},
            stated_peak_flops_per_s=peak_tflops * 1e12 if peak_tflops is not None else None, measure=measure,
            dropout=dropout,
        )  # fmt: skip
    except FivefoldError as error:
        if where.rank == 0:
            raise
        time.sleep(_SPEAKER_FIRST_S)  # every rank would say the same; rank 0 does
        return exit_code(error)
    screen = None if output.json or where.rank else _screen(job, run, notes, output)
    told = launch(job, run, where, screen.step if screen is not None else None)
    if screen is not None:
        screen.end(told)
    if output.json and where.rank == 0:
        import msgspec

        trained = msgspec.to_builtins(job)
        trained["layout"] = with_defaults(trained["layout"], job.resolved)
        inputs = {"plan": plan, "job": trained, "run": msgspec.to_builtins(run)}
        body = {"layout": job.resolved.to_dict(), "notes": notes, "steps": msgspec.to_builtins(told)}
        write_json({**envelope("train", inputs), **body})
    return 0


def _check(steps: int, rate: float | None, peak_tflops: float | None, dropout: float) -> None:
    from fivefold.cli.values import positive, whole
    from fivefold.train.dropout import Dropout

    whole("--steps", str(steps))
    positive("--learning-rate", rate)
    positive("--peak-tflops", peak_tflops)
    Dropout(dropout, 0)  # refuses what is no rate


def _plan(plan: str) -> SavedPlan:
    from fivefold.cli.problem import is_plan_file
    from fivefold.errors import FivefoldError, asked_as
    from fivefold.estimate.planfile import load_plan

    if not is_plan_file(plan):
        raise FivefoldError(
            f"train runs a plan file, and {plan[:100]!r} is none. Write one first: fivefold plan {plan[:60]} --gpus 4 "
            "--save plan.toml.",
            code="not-a-plan-file",
            option="PLAN",
            value=plan[:100],
            legal="a .toml file of fivefold plan --save",
        )
    with asked_as("MODEL", "PLAN"):
        return load_plan(plan)


def _job(saved: SavedPlan, smoke: bool, world: int, precision: str | None) -> tuple[Job, tuple[str, ...]]:
    """What is trained, once nothing speaks against it."""
    from fivefold.cli.job import job_of
    from fivefold.train.launch import require_world
    from fivefold.train.precision import precision as policy
    from fivefold.train.refuse import refuse
    from fivefold.train.smoke import smoke as small

    job = job_of(saved.model, saved.layout, saved.workload, saved.cluster, saved.runtime)
    refuse(job)
    policy(precision or saved.workload.precision, saved.workload.grad_dtype)
    if smoke:
        return small(job, world)
    require_world(job, world)
    return job, ()


def _writable(log: str | None) -> str | None:
    """The log's path, once it can be appended to."""
    from fivefold.errors import FivefoldError, reason_of

    if log is None:
        return None
    try:
        with open(log, "a", encoding="utf-8"):
            return log
    except (OSError, ValueError) as error:
        raise FivefoldError(
            f"The log cannot be written to {log[:200]!r}: {reason_of(error)}.",
            code="cannot-write",
            option="--log-file",
            value=log[:200],
        ) from error


def _screen(job: Job, run: Run, notes: tuple[str, ...], output: OutputFlags) -> Screen:
    """Says what is trained; it then shows the steps."""
    from fivefold.cli.render.layouts import degrees_words, options_words
    from fivefold.cli.render.train import Screen

    out = console(output)
    layout = job.resolved
    dropped = f", dropout {run.dropout:g}" if run.dropout else ""
    for line in (
        f"{job.model.name} on {job.gpus} ranks: {degrees_words(layout)}",
        options_words(layout),
        *notes,
        f"Synthetic data; {job.work.optimizer}, learning rate {run.rate:g}{dropped}.",
    ):
        out.print(line, soft_wrap=True)
    return Screen(out, run.steps, moving=sys.stdout.isatty())


__all__: list[Any] = ["train"]
