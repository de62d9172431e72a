"""`fivefold sweep`."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Group, Parameter

from fivefold.cli.flags import (
    SEARCH,
    ClusterFlags,
    LayoutFlags,
    ModelFlags,
    OutputFlags,
    RuntimeFlags,
    WorkFlags,
    whole_number,
)
from fivefold.cli.launch_flags import SlurmFlags
from fivefold.cli.output import console, write_json
from fivefold.cli.progress import progress

_SWEEP = Group("Sweep", sort_key=0)
_MODEL, _CLUSTER, _WORK, _RUNTIME = ModelFlags(), ClusterFlags(), WorkFlags(), RuntimeFlags()
_LAYOUT, _OUTPUT, _SLURM = LayoutFlags(), OutputFlags(), SlurmFlags()


def sweep(
    model: str,
    /,
    *,
    out: Annotated[str | None, Parameter(name=("--out", "-o"), group=_SWEEP)] = None,
    collect: Annotated[bool, Parameter(group=_SWEEP, negative="", show_default=False)] = False,
    top: Annotated[int, Parameter(group=SEARCH, converter=whole_number)] = 8,
    to: Annotated[str, Parameter(group=_SWEEP)] = "megatron",
    launcher: Annotated[str, Parameter(group=_SWEEP)] = "slurm",
    steps: Annotated[int, Parameter(group=_SWEEP, converter=whole_number)] = 20,
    name: Annotated[str | None, Parameter(group=_SWEEP)] = None,
    slurm: SlurmFlags = _SLURM,
    model_flags: ModelFlags = _MODEL,
    cluster: ClusterFlags = _CLUSTER,
    runtime: RuntimeFlags = _RUNTIME,
    work: WorkFlags = _WORK,
    layout: LayoutFlags = _LAYOUT,
    output: OutputFlags = _OUTPUT,
) -> int:
    """Measure the best layouts: write a job array that runs each for some steps, then collect and rank what it took.

    The runs train on random tokens and keep nothing. Exits with 1 when nothing fits, or nothing was measured.

    For example:
      fivefold sweep llama-3-8b --gpus 8 --top 8 -o sweep/ --partition gpu
      sbatch sweep/sweep.sbatch
      fivefold sweep sweep/ --collect

    Parameters
    ----------
    model
        A name of the catalogue, a config.json or a folder with one; with --collect the sweep's folder.
    out
        Folder for the array, which every node sees.
    collect
        Read the logs of a sweep that ran.
    top
        How many layouts to measure, 1 to 100.
    to
        megatron (Megatron-LM's pretrain_gpt.py) or fivefold (its own trainer).
    launcher
        slurm (a job array, one task at a time) or torchrun (a script that runs one after the other).
    steps
        Steps of each run; the first three are not counted. At least 5.
    name
        Name of the job. Default: the model's.
    """
    from fivefold.cli.sweep import collected, written

    if collect:
        found = collected(model, out)
        if output.json:
            write_json(found.to_dict())
        else:
            from fivefold.cli.render.sweep import collected_view

            console(output).print(collected_view(found))
        return 0 if found.measured else 1
    flags = (model_flags, cluster, work, runtime)
    with progress(f"Searching the layouts of {model[:60]}"):
        done = written(model, out, top, to, launcher, steps, name, slurm, flags, layout)
    if output.json:
        from fivefold.cli.answer import as_document

        body = {"to": to, "files": done.files, "start": done.start}
        write_json(as_document({**done.plan.to_dict(), "kind": "sweep"}, done.question, **body))
    else:
        from fivefold.cli.render.sweep import written_view

        console(output).print(written_view(done))
    return 0 if done.files else 1
