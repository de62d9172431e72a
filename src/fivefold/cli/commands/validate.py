"""`fivefold validate`."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Group, Parameter

from fivefold.cli.flags import OUTPUT, OutputFlags, RuntimeFlags
from fivefold.cli.output import console, write_json
from fivefold.cli.progress import progress

_DATA = Group("Measurements", sort_key=1)
_RUNTIME, _OUTPUT = RuntimeFlags(), OutputFlags()


def validate(
    *,
    source: Annotated[str | None, Parameter(group=_DATA)] = None,
    runs: Annotated[str | None, Parameter(name=["--runs", "--data"], group=_DATA)] = None,
    runtime: RuntimeFlags = _RUNTIME,
    calibration: Annotated[str | None, Parameter(group=_DATA)] = None,
    rows: Annotated[bool, Parameter(group=OUTPUT, negative="", show_default=False)] = False,
    output: OutputFlags = _OUTPUT,
) -> int:
    """Predictions beside published measurements: how far off, by source, GPU and runtime.

    For example:
      fivefold validate
      fivefold validate --source simumax --rows
      fivefold validate --runs my-runs.csv --json

    Parameters
    ----------
    source
        Keep the runs of these sources (the part of a run's id before its number), separated by commas.
    runs
        CSV file of runs with the columns of the shipped table; id is needed, others may be missing, and a row with a
        mistake is skipped. Default: the published runs that come with fivefold.
    calibration
        File of factors fitted to your own runs (fivefold calibrate --save).
    rows
        Also print every run.
    """
    from fivefold.cli.values import names
    from fivefold.cluster.calibration import load_calibration
    from fivefold.errors import FivefoldError
    from fivefold.measure import read_runs
    from fivefold.measure import validate as predict

    with progress("Predicting the runs"):
        table = None if runs is None else read_runs(runs, leave_out_mistakes=True)
        wanted = None if source is None else names("--source", source)
        factors = None if calibration is None else load_calibration(calibration)
        found = predict(table, sources=wanted, runtime=runtime.runtime, calibration=factors)
    if not found.rows_total:
        raise FivefoldError(
            f"{runs} holds no runs, only the names of columns. Give one line per run.",
            code="no-runs",
            option="--runs",
            value=runs,
        )
    if output.json:
        write_json(found.to_dict())
    else:
        from fivefold.cli.render.validate import validate_view

        console(output).print(validate_view(found, every_row=rows))
    return 0
