"""What was measured: published training runs as typed rows (read_runs, shipped_runs), each turned into the input of
`estimate` with its assumptions named (convert), and how far predictions are off by source (validate)."""

from __future__ import annotations

from fivefold.measure.calibrate import Calibrated, FitReport, calibrate
from fivefold.measure.convert import Case, Unconvertible, convert
from fivefold.measure.runs import Run, RunTable, read_runs, shipped_runs
from fivefold.measure.validate import Errors, Row, Skipped, SourceErrors, Validation, errors, validate

__all__ = [
    "Calibrated",
    "Case",
    "Errors",
    "FitReport",
    "Row",
    "Run",
    "RunTable",
    "Skipped",
    "SourceErrors",
    "Unconvertible",
    "Validation",
    "calibrate",
    "convert",
    "errors",
    "read_runs",
    "shipped_runs",
    "validate",
]
