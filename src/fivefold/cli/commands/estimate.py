"""`fivefold estimate`."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from fivefold.cli.flags import (
    OUTPUT,
    ClusterFlags,
    LayoutFlags,
    ModelFlags,
    OutputFlags,
    RuntimeFlags,
    WorkFlags,
)
from fivefold.cli.output import console, write_json

_MODEL, _CLUSTER, _WORK, _RUNTIME = ModelFlags(), ClusterFlags(), WorkFlags(), RuntimeFlags()
_LAYOUT, _OUTPUT = LayoutFlags(), OutputFlags()


def estimate(
    model: str,
    /,
    *,
    model_flags: ModelFlags = _MODEL,
    cluster: ClusterFlags = _CLUSTER,
    runtime: RuntimeFlags = _RUNTIME,
    work: WorkFlags = _WORK,
    layout: LayoutFlags = _LAYOUT,
    simple: Annotated[bool, Parameter(group=OUTPUT, negative="", show_default=False)] = False,
    save: Annotated[str | None, Parameter(group=OUTPUT)] = None,
    output: OutputFlags = _OUTPUT,
) -> int:
    """Price one layout: memory per stage, step time by owner, traffic, and the rules that it breaks.

    Exits with 1 when the layout breaks a rule of the runtime or does not fit. Options that are not given have their
    usual defaults: degrees 1, ZeRO-1, no recomputation; of a plan file, the file's values.

    For example:
      fivefold estimate llama-3-70b --gpus 64 --tp 4 --pp 4 --cp 2 --gbs 512
      fivefold estimate plan.toml --tp 8 --simple

    Parameters
    ----------
    model
        A name of the catalogue (fivefold models), a config.json, a folder with one, or a plan file (.toml).
    simple
        Set the closed formulas of the literature beside the exact numbers.
    save
        Write the plan file here.
    """
    import fivefold as ff
    from fivefold.cli.problem import estimate_question
    from fivefold.cli.views import answer_inputs, ramp_of
    from fivefold.estimate.simple_view import simple_view
    from fivefold.search.result import budget_of

    question = estimate_question(model, model_flags, cluster, work, runtime, layout)
    assert_layout = question.layout or ff.Layout()
    found = ff.estimate(question.model, question.cluster, question.work, assert_layout, question.runtime)
    return 0
