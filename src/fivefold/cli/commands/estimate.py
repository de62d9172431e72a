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
    balance_stages: Annotated[bool, Parameter(group=OUTPUT, negative="", show_default=False)] = False,
    save: Annotated[str | None, Parameter(group=OUTPUT)] = None,
    output: OutputFlags = _OUTPUT,
) -> int:
    """Price one layout: memory per stage, step time by owner, traffic, and the rules that it breaks.

    Exits with 1 when the layout breaks a rule of the runtime, does not fit or cannot have the --ramp. Options that are
    not given have their usual defaults (degrees 1, ZeRO-1, no recomputation) or, with a plan file, the file's values.

    For example:
      fivefold estimate llama-3-70b --gpus 64 --tp 4 --pp 4 --cp 2 --gbs 512
      fivefold estimate plan.toml --tp 8 --simple

    Parameters
    ----------
    model
        A name of the catalogue (fivefold models), a config.json, a folder with one, or a plan file (.toml).
    simple
        Set the closed formulas of the literature beside the exact numbers.
    balance_stages
        Also say how many blocks each pipeline stage should hold, embedding, MTP and head counted.
    save
        Write the plan file here.
    """
    from fivefold.cli.answer import as_document, balanced_stages, estimated, ramp_of
    from fivefold.cli.problem import estimate_question
    from fivefold.estimate.simple_view import simple_view
    from fivefold.layout import unusual
    from fivefold.search.budget import budget_of

    question = estimate_question(model, model_flags, cluster, work, runtime, layout)
    found = estimated(question)
    ramp, notes = ramp_of(question, found)
    notes = (*unusual(question.work, question.model), *notes)
    budget = budget_of(question.work, found)
    balanced = balanced_stages(question, found) if balance_stages and found.valid else None
    rows = ()
    if simple:
        rows = simple_view(question.model, question.cluster, question.work, question.layout, question.runtime, found)
    if save is not None:
        found.save(save)
    if output.json:
        extra = {
            "simple": rows if simple else None,
            "ramp": ramp,
            "budget": budget,
            "notes": notes,
            "saved": save,
            "balance": balanced,
        }
        write_json(as_document(found.to_dict(), question, **extra))
    else:
        from fivefold.cli.render.estimate import estimate_view

        console(output).print(estimate_view(question, found, rows, ramp, budget, notes, save, balanced))
    ramps = question.ramp is None or ramp is not None
    return 0 if found.valid and found.fits and ramps else 1
