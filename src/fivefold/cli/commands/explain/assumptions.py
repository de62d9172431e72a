"""`fivefold explain assumptions`."""

from __future__ import annotations

from dataclasses import replace

from fivefold.cli.flags import ClusterFlags, ModelFlags, OutputFlags, RuntimeFlags, WorkFlags
from fivefold.cli.output import console, write_json

_CLUSTER, _RUNTIME, _OUTPUT = ClusterFlags(), RuntimeFlags(), OutputFlags()
_NO_MODEL_FLAGS, _NO_WORK_FLAGS = ModelFlags(), WorkFlags()
_MODEL = "llama-3-8b"
_GPUS = 8  # the assumptions do not depend on it, so it need not be given


def assumptions(
    model: str = _MODEL,
    /,
    *,
    cluster: ClusterFlags = _CLUSTER,
    runtime: RuntimeFlags = _RUNTIME,
    work: WorkFlags = _NO_WORK_FLAGS,
    output: OutputFlags = _OUTPUT,
) -> int:
    """The numbers of the runtime, the GPU and the links that estimates take for granted, with their sources.

    Parameters
    ----------
    model
        Whose estimate; its less common blocks have rows of their own, and so have options such as --offload.
    """
    from fivefold.cli.problem import plan_question
    from fivefold.estimate import Problem
    from fivefold.estimate.estimate import assumptions as taken
    from fivefold.estimate.estimate import inputs_of
    from fivefold.estimate.result import envelope
    from fivefold.runtime import load_runtime

    if cluster.gpus is None and cluster.cluster is None:
        cluster = replace(cluster, gpus=_GPUS)
    question = plan_question(model, _NO_MODEL_FLAGS, cluster, work, runtime)
    problem = Problem(question.model, question.cluster, question.work, load_runtime(question.runtime))
    rows = taken(problem)
    if output.json:
        inputs = {**inputs_of(problem, question.runtime), "defaults": question.defaults}
        write_json(
            {
                **envelope("explain", inputs),
                "topic": "assumptions",
                "assumptions": [{"field": row.field, "value": row.value, "source": row.source} for row in rows],
            }
        )
    else:
        from fivefold.cli.render.explain import assumptions_view

        console(output).print(assumptions_view(question, rows))
    return 0
