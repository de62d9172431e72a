"""`fivefold export`."""

from __future__ import annotations

from typing import Annotated

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
from fivefold.cli.launch_flags import KubernetesFlags, SlurmFlags
from fivefold.cli.output import console, write_json

_EXPORT = Group("Export", sort_key=0)
_MODEL, _CLUSTER, _WORK, _RUNTIME = ModelFlags(), ClusterFlags(), WorkFlags(), RuntimeFlags()
_LAYOUT, _OUTPUT, _SLURM, _KUBERNETES = LayoutFlags(), OutputFlags(), SlurmFlags(), KubernetesFlags()


def export(
    model: str,
    /,
    *,
    out: Annotated[str, Parameter(name=("--out", "-o"), group=_EXPORT)],
    to: Annotated[str | None, Parameter(group=_EXPORT)] = None,
    launcher: Annotated[str, Parameter(group=_EXPORT)] = "torchrun",
    name: Annotated[str | None, Parameter(group=_EXPORT)] = None,
    data_path: Annotated[str | None, Parameter(group=_EXPORT)] = None,
    tokenizer_model: Annotated[str | None, Parameter(group=_EXPORT)] = None,
    mock_data: Annotated[bool, Parameter(group=_EXPORT, negative="", show_default=False)] = False,
    steps: Annotated[int | None, Parameter(group=_EXPORT, converter=whole_number)] = None,
    balance_stages: Annotated[bool, Parameter(group=_EXPORT, negative="", show_default=False)] = False,
    force: Annotated[bool, Parameter(group=_EXPORT, negative="", show_default=False)] = False,
    slurm: SlurmFlags = _SLURM,
    kubernetes: KubernetesFlags = _KUBERNETES,
    model_flags: ModelFlags = _MODEL,
    cluster: ClusterFlags = _CLUSTER,
    runtime: RuntimeFlags = _RUNTIME,
    work: WorkFlags = _WORK,
    layout: LayoutFlags = _LAYOUT,
    output: OutputFlags = _OUTPUT,
) -> int:
    """Write a plan as launch files: Megatron-LM's options, or fivefold's own trainer, for torchrun, Slurm, Kubernetes.

    What a plan does not know (your data, your tokenizer, where Megatron-LM lies) becomes a variable that the script
    asks for before it starts anything. Exits with 1, writing nothing, when the layout would not start or not fit.

    For example:
      fivefold export plan.toml --launcher slurm --partition gpu --time 24:00:00 -o out/
      fivefold export llama-3-70b --gpus 64 --tp 4 --pp 4 --cp 2 --gbs 512 --launcher torchrun,slurm -o out/
      fivefold export plan.toml --to fivefold --launcher kubernetes --kind jobset --image registry/train:1 -o out/

    Parameters
    ----------
    model
        A plan file (.toml), or a model whose layout the flags give, as for fivefold estimate.
    out
        Folder for the files.
    to
        megatron (Megatron-LM's pretrain_gpt.py) or fivefold (its own trainer). Default: fivefold for a plan of
        fivefold's own, else megatron.
    launcher
        torchrun, slurm or kubernetes, or several with commas between them.
    name
        Name of the job. Default: the model's.
    data_path
        Prefix of Megatron-LM's data set. Default: the variable DATA_PATH, asked for at the start.
    tokenizer_model
        Hugging Face name or folder of the tokenizer. Default: the variable TOKENIZER_MODEL.
    mock_data
        Train on Megatron-LM's random tokens, which need no files.
    steps
        Train so many steps and keep nothing, to measure.
    balance_stages
        Give each pipeline stage the blocks that make the step shortest, embedding, MTP and head counted.
    force
        Write a layout that is predicted not to fit, too.
    """
    from fivefold.cli.export import Wanted, exported, for_target, moved_words, target_of
    from fivefold.cli.problem import estimate_question, is_plan_file
    from fivefold.interop.export import Data

    planned = estimate_question(model, model_flags, cluster, work, runtime, layout)
    target = target_of(to, planned.runtime)
    question = for_target(planned, target, runtime.runtime)
    moved = moved_words(planned.runtime, question.runtime) if is_plan_file(model) else ""
    data = Data(path=data_path, tokenizer=tokenizer_model, mock=mock_data, steps=steps)
    done = exported(
        question,
        Wanted(
            out=out,
            to=target,
            launcher=launcher,
            name=name,
            data=data,
            balance=balance_stages,
            force=force,
            slurm=slurm,
            kubernetes=kubernetes,
        ),
    )
    if output.json:
        from fivefold.cli.answer import as_document

        body = {
            "to": target,
            "planned_for": planned.runtime if moved else None,
            "files": done.written,
            "needs": [name for name, _ in done.needs],
            "reason": done.reason or None,
        }
        write_json(as_document({**done.found.to_dict(), "kind": "export"}, question, **body))
    else:
        from fivefold.cli.render.export import export_view

        console(output).print(export_view(question, done, moved))
    return 0 if done.written else 1
