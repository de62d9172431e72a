"""`calibrate`: a few factors on a GPU's and a runtime's constants, fitted to a user's own runs.

The factors are those of fivefold.cluster.calibration. How far each may be off is known from published runs
(factors.WIDTHS), and pulls it towards 1; what the runs do not tell stays there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import exp, sqrt
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fivefold import __version__
from fivefold.cluster import Cluster
from fivefold.cluster.calibration import Calibration, Constant, Fit
from fivefold.errors import FivefoldError
from fivefold.estimate.interval import NORMAL_80
from fivefold.estimate.result import envelope
from fivefold.measure.convert import Case, Unconvertible, convert
from fivefold.measure.factors import WIDTHS, Fitted, fit
from fivefold.measure.predict import Predicted, choose, predict_all
from fivefold.measure.runs import Run, RunTable, read_runs
from fivefold.measure.validate import Errors, Skipped, errors

MEANING: dict[Constant, str] = {
    "products": "matrix products",
    "attention": "flash attention",
    "memory": "operations bound by the GPU's memory",
    "scale_up": "links inside a node or NVLink domain",
    "network": "links between nodes",
    "step": "host work of a step",
    "launch": "host work of an operation",
}
# Leave-one-out errors are expected to be as large as the intervals without runs say, and that belief weighs as much as
# so many runs; an error counts up to so many standard deviations. Fit: coverage in benchmarks/accuracy_calibrated.py.
_BELIEF, _LARGEST = 6.0, 2.5
_TOLD = 0.95  # a factor's uncertainty is below this share of its prior's width: the runs told something
_MOST_RUNS = 2000


class Factor(msgspec.Struct, frozen=True, kw_only=True):
    """One fitted constant: value and relative uncertainty, the prior's width, and whether the runs told anything."""

    constant: Constant
    meaning: str
    value: float
    uncertainty: float
    prior: float
    told: bool


class CalibratedRow(msgspec.Struct, frozen=True, kw_only=True):
    """One run. left_out_error: with the factors fitted to the others alone, to first order; None for a lone run."""

    id: str
    measured_s: float
    before_s: float
    after_s: float
    before_error: float
    after_error: float
    left_out_error: float | None
    assumed: tuple[str, ...]


class FitReport(msgspec.Struct, frozen=True, kw_only=True):
    """The fit of one GPU under one runtime, with its errors before and after and when a run is left out.

    spread_before, spread: half-widths of the 80% interval, relative, the median of the runs'. scale: what the runs
    leave of each. experts: whether some run was of a mixture.
    """

    gpu: str
    runtime: str
    runs: int
    before: Errors
    after: Errors
    left_out: Errors
    spread_before: float
    spread: float
    scale: float
    experts: bool
    factors: tuple[Factor, ...]
    rows: tuple[CalibratedRow, ...]


class Calibrated(msgspec.Struct, frozen=True, kw_only=True):
    """What `calibrate` found. calibration: what estimate, plan and validate take."""

    calibration: Calibration
    fits: tuple[FitReport, ...]
    runs_total: int
    runs_used: int
    skipped: tuple[Skipped, ...]
    inputs: dict[str, Any]

    def save(self, path: str | Path) -> None:
        """Write the calibration file."""
        self.calibration.save(path)

    def to_dict(self) -> dict[str, Any]:
        body = msgspec.to_builtins(self)
        return {**envelope("calibrate", body.pop("inputs")), **body}


def calibrate(
    runs: RunTable | Iterable[Run] | str | Path,
    *,
    cluster: Cluster | None = None,
    runtime: str | None = None,
) -> Calibrated:
    """Fit the factors to `runs`, those of each GPU and runtime together.

    runs: a table, rows, or the path of a CSV file with the columns of the shipped runs. cluster: what they ran on, with
    the user's own numbers, in place of the catalogue's system for each row's GPU; its size follows the row. runtime:
    price every row under this runtime. Raises FivefoldError where no run can be used.
    """
    table = _table(runs)
    cases, skipped = _cases(table.runs, cluster, runtime)
    groups: dict[tuple[str, str], list[Case]] = {}
    for case in cases:
        groups.setdefault((case.cluster.gpu.name, case.runtime), []).append(case)
    reports = []
    for members in groups.values():
        used, unpriced = _priced(members)
        skipped += unpriced
        if used:
            reports.append(_report(used))
    if not reports:
        raise _nothing(table, skipped)
    return Calibrated(
        calibration=Calibration(fits=tuple(_as_fit(report, table.where) for report in reports)),
        fits=tuple(reports),
        runs_total=len(table.runs),
        runs_used=sum(report.runs for report in reports),
        skipped=tuple(skipped),
        inputs={
            "data": table.where,
            "unused_columns": list(table.unused_columns),
            "cluster": None if cluster is None else cluster.to_dict(),
            "runtime": runtime,
            "widths": dict(WIDTHS),
        },
    )


def _table(runs: RunTable | Iterable[Run] | str | Path) -> RunTable:
    if isinstance(runs, RunTable):
        return runs
    return read_runs(runs) if isinstance(runs, str | Path) else RunTable(runs=tuple(runs), where="given")


def _cases(rows: Sequence[Run], cluster: Cluster | None, runtime: str | None) -> tuple[list[Case], list[Skipped]]:
    cases: list[Case] = []
    skipped: list[Skipped] = []
    if len(rows) > _MOST_RUNS:
        raise FivefoldError(
            f"{len(rows):,} runs; calibrate fits at most {_MOST_RUNS:,}. Keep the newest ones.",
            code="too-many-runs",
            option="RUNS",
            value=len(rows),
            legal=f"1 to {_MOST_RUNS}",
        )
    for run in rows:
        try:
            if run.measured_s is None:
                raise Unconvertible("no step time or throughput is stated, so there is nothing to fit to")
            cases.append(choose(_on(convert(run, runtime), cluster)))
        except Unconvertible as reason:
            skipped.append(Skipped(id=run.id, reason=str(reason)))
    return cases, skipped


def _on(case: Case, cluster: Cluster | None) -> Case:
    """The case on the user's cluster, with the row's GPUs."""
    if cluster is None:
        return case
    own = case.cluster
    if cluster.gpu.name != own.gpu.name:
        raise Unconvertible(f"it ran on {own.gpu.name}, and the cluster has {cluster.gpu.name}")
    node = min(cluster.gpus_per_node, own.gpus)
    return msgspec.structs.replace(
        case, cluster=msgspec.structs.replace(cluster, gpus=own.gpus, gpus_per_node=node, calibration=None)
    )


def _priced(cases: list[Case]) -> tuple[list[Case], list[Skipped]]:
    used: list[Case] = []
    skipped: list[Skipped] = []
    for case, found in zip(cases, predict_all(cases), strict=True):
        if isinstance(found, Unconvertible):
            skipped.append(Skipped(id=case.run.id, reason=str(found)))
        else:
            used.append(case)
    return used, skipped


def _nothing(table: RunTable, skipped: Sequence[Skipped]) -> FivefoldError:
    reasons = list(dict.fromkeys(each.reason for each in skipped))[:3]
    said = "; ".join(reasons) or "the file holds none"
    return FivefoldError(
        f"None of the {len(table.runs):,} runs of {table.where[:100]} can be used: {said}. A run needs model sizes, "
        "GPU, degrees, batch and step_time_s or tokens_per_s_per_gpu.",
        code="no-usable-run",
        option="RUNS",
        value=table.where[:200],
    )


# ---------------------------------------------------------------- the report


def _report(cases: Sequence[Case]) -> FitReport:
    found = fit(cases)
    plain = predict_all(cases)
    measured = np.array([float(case.run.measured_s or 0) for case in cases])
    before, after = np.exp(found.plain) / measured - 1, np.exp(found.fitted) / measured - 1
    apart = np.exp(-found.left_out) - 1
    alone = len(cases) == 1
    return FitReport(
        gpu=cases[0].cluster.gpu.name,
        runtime=cases[0].runtime,
        runs=len(cases),
        before=errors(before.tolist()),
        after=errors(after.tolist()),
        left_out=errors([] if alone else apart.tolist()),
        spread_before=_usual_spread(plain),
        spread=exp(scale_of(found) * float(np.median(found.wide))) - 1,
        scale=scale_of(found),
        experts=any(case.model.is_moe for case in cases),
        factors=_factors(found),
        rows=tuple(
            CalibratedRow(
                id=case.run.id,
                measured_s=float(measured[i]),
                before_s=float(np.exp(found.plain[i])),
                after_s=float(np.exp(found.fitted[i])),
                before_error=float(before[i]),
                after_error=float(after[i]),
                left_out_error=None if alone else float(apart[i]),
                assumed=case.assumed,
            )
            for i, case in enumerate(cases)
        ),
    )


def _usual_spread(plain: Sequence[Predicted | Unconvertible]) -> float:
    """Half-width of the intervals without a calibration, relative; the median of the runs'."""
    quantities = [each.seconds for each in plain if isinstance(each, Predicted)]
    return float(np.median([each.high / each.value - 1 for each in quantities]))


def scale_of(found: Fitted) -> float:
    """What the runs leave of the half-widths of intervals: 1 where their leave-one-out errors are as those expect."""
    if np.isnan(found.left_out).any():
        return 1.0
    errors = np.minimum(np.abs(found.left_out) / found.wide * NORMAL_80, _LARGEST)
    return sqrt((_BELIEF + float(errors @ errors)) / (_BELIEF + len(errors)))


def _factors(found: Fitted) -> tuple[Factor, ...]:
    deviations = np.sqrt(np.diag(found.solution.covariance))
    return tuple(
        Factor(
            constant=name,
            meaning=MEANING[name],
            value=value,
            uncertainty=float(deviation),
            prior=WIDTHS[name],
            told=bool(deviation < _TOLD * WIDTHS[name]),
        )
        for (name, value), deviation in zip(found.factors.items(), deviations, strict=True)
    )


def _as_fit(report: FitReport, where: str) -> Fit:
    return Fit(
        gpu=report.gpu,
        runtime=report.runtime,
        runs=report.runs,
        factors={each.constant: each.value for each in report.factors},
        uncertainty={each.constant: each.uncertainty for each in report.factors},
        spread=report.spread,
        scale=report.scale,
        experts=report.experts,
        source=f"{Path(where).name[:200]}, fivefold {__version__}",
    )
