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
from fivefold.errors import FivefoldError

if TYPE_CHECKING:
    from fivefold.cli.problem import Question
    from fivefold.train.emulate import Emulation
    from fivefold.train.job import Job

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
    from fivefold.cli.calibration import refuse_calibration
    from fivefold.cli.problem import estimate_question
    from fivefold.train.refuse import refuse, require_torch

    refuse_calibration(cluster, "emulate counts bytes and FLOPs, and predicts no time.")
    require_torch()
    question = estimate_question(model, model_flags, cluster, work, runtime, layout)
    if question.ramp is not None:
        raise FivefoldError(
            "emulate runs one step of one batch, which a ramp-up does not change. Leave out --ramp.",
            code="not-here",
            option="--ramp",
        )
    job = _job(question)
    refuse(job)
    from fivefold.train.emulate import emulate as run

    with progress(f"Emulating rank {rank:,} of {job.gpus:,} of {job.model.name}"):
        found = run(job, rank)
    if output.json:
        write_json(_document(question, found))
    else:
        from fivefold.cli.render.emulate import emulate_view

        console(output).print(emulate_view(found))
    return 0


def _job(question: Question) -> Job:
    from fivefold.train.job import Job

    cluster = question.cluster
    return Job(
        model=question.model, layout=question.layout, work=question.work, gpus=cluster.gpus,
        gpus_per_node=cluster.gpus_per_node, scale_up_size=cluster.spans[0], runtime=question.runtime,
    )  # fmt: skip


def _document(question: Question, found: Emulation) -> dict[str, Any]:
    import msgspec

    from fivefold.estimate.result import envelope

    inputs = {
        "model": msgspec.to_builtins(question.model),
        "cluster": question.cluster.to_dict(),
        "workload": msgspec.to_builtins(question.work),
        "layout": msgspec.to_builtins(question.layout),
        "runtime": question.runtime,
        "rank": found.rank,
        "defaults": question.defaults,
    }
    return {**envelope("emulate", inputs), **found.to_dict()}
