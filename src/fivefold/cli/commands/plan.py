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
    model: str | None = None,
    /,
    *,
    model_flags: ModelFlags = _MODEL,
    cluster: ClusterFlags = _CLUSTER,
    runtime: RuntimeFlags = _RUNTIME,
    work: WorkFlags = _WORK,
    layout: LayoutFlags = _LAYOUT,
    top: Annotated[int, Parameter(group=SEARCH, converter=whole_number)] = 5,
    objective: Annotated[str, Parameter(group=SEARCH)] = "tokens_per_s",
    days: Annotated[float | None, Parameter(group=SEARCH)] = None,
    like: Annotated[str | None, Parameter(group=SEARCH)] = None,
    save: Annotated[str | None, Parameter(group=OUTPUT)] = None,
    output: OutputFlags = _OUTPUT,
) -> int:
    """Search every layout of a model on a cluster, and say why the best one is best.

    Layout options pin what is searched: one value, or a set. Exits with 1 when nothing fits, and says what is missing.

    For example:
      fivefold plan llama-3-8b --gpus 8
      fivefold plan llama-3-70b --gpu h100-sxm --gpus 64 --seq 8192 --gbs 512 --tp 4,8 --no-cp --save plan.toml
      fivefold plan deepseek-v3 --gpus 2048 --zero 1 --objective cost --tokens 14T --price 2.5
      fivefold plan llama-3-70b --gpu h100-sxm --tokens 15T --days 60
      fivefold plan llama-3-8b --gpu rtx-4090 --gpus 2 --gbs 32 --runtime fsdp --lora-rank 16 --base-precision nf4
      fivefold plan llama-3-70b --gpus 4 --gbs 32 --runtime deepspeed-zero --offload optimizer,parameters
      fivefold plan --like plan.toml --gpu b200 --gpus 128

    Parameters
    ----------
    model
        A name of the catalogue (fivefold models), a config.json, or a folder with one.
    top
        How many layouts to show, 1 to 100.
    objective
        tokens_per_s, gpus (fewest that fit), memory (least), time or cost (of --tokens).
    days
        Find the fewest GPUs that finish --tokens within so many days, failures included; --gpus is then the most.
    like
        Move this plan file's recipe to the given cluster or runtime with as few changes as possible, each with its
        reason, beside the best free layout there. It stands in place of MODEL.
    save
        Write the best layout's plan file here; with --like the moved plan's.
    """
    from fivefold.cli.answer import as_document, moved_document, ramp_of
    from fivefold.cli.problem import plan_question, refuse_mixed
    from fivefold.cli.values import pins_of

    pins = pins_of(layout)
    refuse_mixed(model, days, like)
    moved = None
    if like is not None:
        from fivefold.cli.like import plan_like

        with progress(f"Moving {like}"):
            question, found, moved = plan_like(like, model_flags, cluster, work, runtime, layout, pins, top, objective)
    elif days is not None:
        from fivefold.cli.within import plan_within

        with progress(f"Searching the fewest GPUs for {work.tokens or 'the'} tokens in {days:g} days"):
            question, found = plan_within(days, model or "", model_flags, cluster, work, runtime, pins, top, objective)
    else:
        question = plan_question(model or "", model_flags, cluster, work, runtime)
        with progress(f"Searching the layouts of {question.model.name} on {question.cluster.gpus:,} GPUs"):
            found = question.plan(pins, top, objective)
    best = found.plans[0] if found.plans else None
    ramp, ramp_notes = ramp_of(question, best)
    # Where no few changes move the recipe, the free best plan is shown, and is not what was asked for.
    kept = best if moved is None else moved.after
    saved = save if kept is not None else None
    if kept is not None and save is not None:
        kept.save(save)
    if output.json:
        document = found.to_dict()
        document["inputs"] |= {"days": days, "like": like}
        notes = (*found.notes, *ramp_notes)
        write_json(as_document(document, question, ramp=ramp, notes=notes, saved=saved, moved=moved_document(moved)))
    else:
        from fivefold.cli.render.plan import plan_view

        console(output).print(plan_view(question, found, top, ramp, ramp_notes, saved, moved))
    return 0 if kept is not None else 1
