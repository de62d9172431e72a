"""`fivefold plan`."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from fivefold.cli.flags import (
    OUTPUT,
    SEARCH,
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

_MODEL, _CLUSTER, _WORK, _RUNTIME = ModelFlags(), ClusterFlags(), WorkFlags(), RuntimeFlags()
_LAYOUT, _OUTPUT = LayoutFlags(), OutputFlags()


def plan(
    model: str,
    /,
    *,
    model_flags: ModelFlags = _MODEL,
    cluster: ClusterFlags = _CLUSTER,
    runtime: RuntimeFlags = _RUNTIME,
    work: WorkFlags = _WORK,
    layout: LayoutFlags = _LAYOUT,
    top: Annotated[int, Parameter(group=SEARCH, converter=whole_number)] = 5,
    objective: Annotated[str, Parameter(group=SEARCH)] = "tokens_per_s",
    save: Annotated[str | None, Parameter(group=OUTPUT)] = None,
    output: OutputFlags = _OUTPUT,
) -> int:
    """Search every layout of a model on a cluster, and say why the best one is best.

    Layout options pin what is searched: one value, or a set. Exits with 1 when nothing fits, and says what is missing.

    For example:
      fivefold plan llama-3-8b --gpus 8
      fivefold plan llama-3-70b --gpu h100-sxm --gpus 64 --seq 8192 --gbs 512 --tp 4,8 --no-cp --save plan.toml
      fivefold plan deepseek-v3 --gpus 2048 --zero 1 --objective cost --tokens 14T --price 2.5

    Parameters
    ----------
    model
        A name of the catalogue (fivefold models), a config.json, or a folder with one.
    top
        How many layouts to show, 1 to 100.
    objective
        tokens_per_s, gpus (fewest that fit), memory (least), time or cost (of --tokens).
    save
        Write the best layout's plan file here.
    """
    import fivefold as ff
    from fivefold.cli.answer import as_document, ramp_of
    from fivefold.cli.problem import plan_question
    from fivefold.cli.values import pins_of

    question = plan_question(model, model_flags, cluster, work, runtime)
    pins = pins_of(layout)
    with progress(f"Searching the layouts of {question.model.name} on {question.cluster.gpus:,} GPUs"):
        found = ff.plan(
            question.model,
            question.cluster,
            question.work,
            question.runtime,
            top=top,
            pins=dict(pins),
            objective=objective,  # type: ignore[arg-type]  # plan refuses other words itself
        )
    best = found.plans[0] if found.plans else None
    ramp, ramp_notes = ramp_of(question, best)
    saved = save if best is not None else None
    if best is not None and save is not None:
        best.save(save)
    if output.json:
        document = found.to_dict()
        notes = (*found.notes, *ramp_notes)
        write_json(as_document(document, question, ramp=ramp, notes=notes, saved=saved))
    else:
        from fivefold.cli.render.plan import plan_view

        console(output).print(plan_view(question, found, top, ramp, ramp_notes, saved))
    return 0 if best is not None else 1
