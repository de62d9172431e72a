"""What the commands that run the trainer share: its Job, made of a question or a saved plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fivefold.errors import FivefoldError

if TYPE_CHECKING:
    from fivefold.cli.flags import ClusterFlags, LayoutFlags, ModelFlags, RuntimeFlags, WorkFlags
    from fivefold.cli.problem import Question
    from fivefold.cluster import Cluster
    from fivefold.layout import Layout, Workload
    from fivefold.model.spec import ModelSpec
    from fivefold.train.job import Job


def job_question(
    model: str,
    model_flags: ModelFlags,
    cluster: ClusterFlags,
    work: WorkFlags,
    runtime: RuntimeFlags,
    layout: LayoutFlags,
    *,
    no_calibration: str,
    no_ramp: str,
) -> tuple[Question, Job]:
    """The question of a command that trains one layout here, and its Job.

    no_calibration, no_ramp: why the command takes neither. Raises FivefoldError where one is given and without PyTorch.
    """
    from fivefold.cli.calibration import refuse_calibration
    from fivefold.cli.problem import estimate_question
    from fivefold.train.refuse import require_torch

    refuse_calibration(cluster, no_calibration)
    require_torch()
    question = estimate_question(model, model_flags, cluster, work, runtime, layout)
    if question.ramp is not None:
        raise FivefoldError(
            f"{no_ramp}, which a ramp-up does not change. Leave out --ramp.", code="not-here", option="--ramp"
        )
    return question, job_of(question.model, question.layout, question.work, question.cluster, question.runtime)


def job_of(model: ModelSpec, layout: Layout, work: Workload, cluster: Cluster, runtime: str) -> Job:
    """The Job of a layout on all GPUs of the cluster."""
    from fivefold.train.job import Job

    return Job(
        model=model, layout=layout, work=work, gpus=cluster.gpus, gpus_per_node=cluster.gpus_per_node,
        scale_up_size=cluster.spans[0], runtime=runtime,
    )  # fmt: skip


def resolved(question: Question) -> dict[str, Any]:
    """The question's `inputs` for JSON."""
    import msgspec

    from fivefold.estimate.result import with_defaults
    from fivefold.layout import resolve

    layout = resolve(question.layout, question.model, question.cluster.gpus, question.work, question.runtime)
    return {
        "model": msgspec.to_builtins(question.model),
        "cluster": question.cluster.to_dict(),
        "workload": msgspec.to_builtins(question.work),
        "layout": with_defaults(msgspec.to_builtins(question.layout), layout),
        "runtime": question.runtime,
        "defaults": question.defaults,
    }
