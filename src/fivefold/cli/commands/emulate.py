"""`fivefold emulate`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Group, Parameter

from fivefold.cli.flags import (
    ClusterFlags,
    LayoutFlags,
    ModelFlags,
    OutputFlags,
    RuntimeFlags,
    WorkFlags,
    whole_number,
)
from fivefold.cli.output import console, write_json
from fivefold.cli.progress import progress

if TYPE_CHECKING:
    from fivefold.cli.problem import Question
    from fivefold.train.emulate import Emulation

_RANK = Group("Emulation", sort_key=5)
_MODEL, _CLUSTER, _WORK, _RUNTIME = ModelFlags(), ClusterFlags(), WorkFlags(), RuntimeFlags()
_LAYOUT, _OUTPUT = LayoutFlags(), OutputFlags()


def emulate(
    model: str,
    /,
    *,
    model_flags: ModelFlags = _MODEL,
    cluster: ClusterFlags = _CLUSTER,
    runtime: RuntimeFlags = _RUNTIME,
    work: WorkFlags = _WORK,
    layout: LayoutFlags = _LAYOUT,
    rank: Annotated[int, Parameter(group=_RANK, converter=whole_number)] = 0,
    output: OutputFlags = _OUTPUT,
) -> int:
    """Run one rank of a job of any size, without its memory: what it holds, computes and sends in one step.

    The trainer itself runs, on tensors that have shapes and no values, in one process on a CPU. Needs PyTorch, and
    neither a GPU nor memory for the model. It takes some seconds for each micro-batch of a large model: a small --gbs
    says the same about memory once the pipeline is full.

    For example:
      fivefold emulate plan.toml --rank 3
      fivefold emulate llama-3-70b --gpus 1024 --tp 8 --pp 4 --gbs 256 --rank 300

    Parameters
    ----------
    model
        A name of the catalogue (fivefold models), a config.json, a folder with one, or a plan file (.toml).
    rank
        Which rank of the job.
    """
    from fivefold.cli.job import job_question

    question, job = job_question(
        model, model_flags, cluster, work, runtime, layout,
        no_calibration="emulate counts bytes and FLOPs, and predicts no time.",
        no_ramp="emulate runs one step of one batch",
    )  # fmt: skip
    from fivefold.train.emulate import emulate as run

    # A step of hundreds takes that many times as long, and whoever waits should see why.
    count = job.resolved.num_micro_batches
    with progress(f"Emulating rank {rank:,} of {job.gpus:,} of {job.model.name}, {count:,} micro-batches"):
        found = run(job, rank)
    if output.json:
        write_json(_document(question, found))
    else:
        from fivefold.cli.render.emulate import emulate_view

        console(output).print(emulate_view(found))
    return 0


def _document(question: Question, found: Emulation) -> dict[str, Any]:
    from fivefold.cli.job import resolved
    from fivefold.estimate.result import envelope

    return {**envelope("emulate", {**resolved(question), "rank": found.rank}), **found.to_dict()}
