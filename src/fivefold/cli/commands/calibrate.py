"""`fivefold calibrate`."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Group, Parameter

from fivefold.cli.flags import OUTPUT, ClusterFlags, OutputFlags, RuntimeFlags
from fivefold.cli.output import console, write_json
from fivefold.cli.progress import progress

_DATA = Group("Measurements", sort_key=1)
_RUNTIME, _OUTPUT = RuntimeFlags(), OutputFlags()


def calibrate(
    runs: str,
    /,
    *,
    cluster: Annotated[str | None, Parameter(group=_DATA)] = None,
    runtime: RuntimeFlags = _RUNTIME,
    rows: Annotated[bool, Parameter(group=OUTPUT, negative="", show_default=False)] = False,
    save: Annotated[str | None, Parameter(group=OUTPUT)] = None,
    output: OutputFlags = _OUTPUT,
) -> int:
    """Fit a few factors on the GPU's and the runtime's constants to your own runs, one run or many.

    Each factor is 1 unless the runs say otherwise, and is held near it by how far published runs lie from it, so that
    one run already helps and three do not bend it. The runs of each GPU and runtime are fitted together.

    For example:
      fivefold calibrate my-runs.csv --save calibration.toml
      fivefold plan llama-3-8b --gpus 64 --calibration calibration.toml

    Parameters
    ----------
    runs
        CSV file of runs with the columns of fivefold validate's table: model sizes, GPU, degrees, batch, and
        step_time_s or tokens_per_s_per_gpu.
    cluster
        TOML file with your cluster's own numbers, in place of the catalogue's system for each run's GPU.
    rows
        Also print every run.
    save
        Write the factors here, for --calibration.
    """
    from fivefold.cli.problem import named_cluster
    from fivefold.errors import asked_as
    from fivefold.measure import calibrate as fit

    own = None if cluster is None else named_cluster(ClusterFlags(cluster=cluster), cluster)
    with asked_as("--runs", "RUNS"), progress("Fitting the runs"):
        found = fit(runs, cluster=own, runtime=runtime.runtime)
    if save is not None:
        found.save(save)
    if output.json:
        write_json({**found.to_dict(), "saved": save})
    else:
        from fivefold.cli.render.calibrate import calibrate_view

        console(output).print(calibrate_view(found, every_row=rows, saved=save))
    return 0
