"""`validate`: published runs predicted one by one, and how far off the predictions are, by source.

Nothing is fitted here. A row that cannot be converted, or whose layout a rule of the runtime refuses, is skipped with
the reason; a row that lacks a fact is used with the fact assumed and named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from fivefold.cluster.calibration import Calibration
from fivefold.errors import FivefoldError
from fivefold.estimate.result import envelope
from fivefold.measure.convert import Case, Unconvertible, convert
from fivefold.measure.factors import with_calibration
from fivefold.measure.predict import Predicted, choose, predict_all
from fivefold.measure.runs import Run, RunTable, shipped_runs, source_of

_FEWEST_FOR_RANKS = 3
# Assumptions that move a predicted step time by more than some percent when they are wrong.
_MOVE_TIME = frozenset(
    (
        "recompute", "micro_batch", "precision", "runtime", "attention", "attention_kernel", "vpp", "zero", "gpu",
        "vocab", "layers", "hidden", "seq", "gbs", "gpus", "tp", "dp", "schedule", "shard_groups",
    )
)  # fmt: skip


class Errors(msgspec.Struct, frozen=True, kw_only=True):
    """Of (predicted - measured) / measured: median and 90th percentile of its size, and its mean; None: no rows."""

    n: int
    median_ape: float | None
    p90_ape: float | None
    bias: float | None


class SourceErrors(msgspec.Struct, frozen=True, kw_only=True):
    """Errors of one source's rows on one GPU under one runtime.

    time_stated, time_assumed: of rows that state all that moves their time, and of those where some of it is assumed.
    tuned: how the numbers were come by, of most rows: "vendor's recipe", "winner of a sweep", "" if plainly measured.
    spearman: rank correlation of predicted and measured GPU seconds per token; None below three timed rows.
    coverage80: share of timed rows whose measured time lies inside the predicted 80% interval.
    layout_spread: standard deviation of ln(predicted / measured) around the mean of the same model; what is left to
        confuse the order of two layouts of one model. None when no model has two timed rows.
    """

    source: str
    gpu: str
    runtime: str
    n: int
    time: Errors
    time_stated: Errors
    time_assumed: Errors
    memory: Errors
    spearman: float | None
    coverage80: float | None
    layout_spread: float | None
    tuned: str


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One run: predicted beside measured. error and memory_error: (predicted - measured) / measured.

    stated: whether the source states all that moves its time. tuned: as in Case.
    memory_kind: what was measured. "allocated" and "unknown" are compared with peak_bytes, "reserved" (PyTorch's
    max_memory_reserved) with what the estimate reserves inside the allocator, "nvidia-smi" with reserved_bytes.
    """

    id: str
    predicted_s: float
    low_s: float
    high_s: float
    measured_s: float | None
    error: float | None
    predicted_bytes: int
    measured_bytes: int | None
    memory_kind: str | None
    memory_error: float | None
    assumed: tuple[str, ...]
    recompute_stated: bool
    stated: bool
    tuned: str


class Skipped(msgspec.Struct, frozen=True, kw_only=True):
    """A row that was not used."""

    id: str
    reason: str


class Validation(msgspec.Struct, frozen=True, kw_only=True):
    """The contract's `validate` object."""

    rows_total: int
    rows_used: int
    skipped: tuple[Skipped, ...]
    by_source: tuple[SourceErrors, ...]
    rows: tuple[Row, ...]
    inputs: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """The contract's JSON: schema, kind, version, inputs and the fields above."""
        body = msgspec.to_builtins(self)
        return {**envelope("validate", body.pop("inputs")), **body}


def validate(
    runs: RunTable | Iterable[Run] | None = None,
    *,
    sources: Sequence[str] | None = None,
    runtime: str | None = None,
    calibration: Calibration | None = None,
) -> Validation:
    """Predict `runs` (default: the shipped ones) and compare.

    sources: keep only these id prefixes ("simumax"). runtime: predict every row under this runtime instead of its own.
    calibration: predict with its factors; a row of a GPU or runtime that it does not hold is skipped.
    Raises FivefoldError for an unknown source or runtime.
    """
    if runs is None:
        runs = shipped_runs()
    table = runs if isinstance(runs, RunTable) else RunTable(runs=tuple(runs), where="given")
    rows = _of_sources(table, sources)
    unread = [row for row in table.unread if sources is None or source_of(row.id) in sources]
    cases, unconverted = _cases(rows, runtime, calibration)
    skipped = [*(Skipped(id=row.id, reason=row.reason) for row in unread), *unconverted]
    used: list[tuple[Case, Row]] = []
    for case, found in zip(cases, predict_all(cases), strict=True):
        if isinstance(found, Unconvertible):
            skipped.append(Skipped(id=case.run.id, reason=str(found)))
        else:
            used.append((case, _row(case, found)))
    return Validation(
        rows_total=len(rows) + len(unread),
        rows_used=len(used),
        skipped=tuple(skipped),
        by_source=_by_source(used),
        rows=tuple(row for _, row in used),
        inputs={
            "data": table.where,
            "unused_columns": list(table.unused_columns),
            "sources": None if sources is None else list(sources),
            "runtime": runtime,
            "calibration": msgspec.to_builtins(calibration),
        },
    )


def _cases(
    rows: Iterable[Run], runtime: str | None, calibration: Calibration | None
) -> tuple[list[Case], list[Skipped]]:
    cases: list[Case] = []
    skipped: list[Skipped] = []
    for run in rows:
        try:
            case = choose(convert(run, runtime))
            cases.append(case if calibration is None else with_calibration(case, calibration))
        except Unconvertible as reason:
            skipped.append(Skipped(id=run.id, reason=str(reason)))
    return cases, skipped


def _of_sources(table: RunTable, sources: Sequence[str] | None) -> tuple[Run, ...]:
    if sources is None:
        return table.runs
    known = sorted({source_of(row.id) for row in (*table.runs, *table.unread)})
    for name in sources:
        if name not in known:
            raise FivefoldError(
                f"No run's id starts with {name!r}; the file has {', '.join(known) or 'no rows'}.",
                code="unknown-source",
                option="--source",
                value=name,
                legal=known,
            )
    return tuple(run for run in table.runs if run.group in sources)


def _row(case: Case, found: Predicted) -> Row:
    run, seconds = case.run, found.seconds
    predicted_bytes = comparable_bytes(run, found)
    measured_s, measured_bytes = run.measured_s, run.measured_bytes
    return Row(
        id=run.id,
        predicted_s=seconds.value,
        low_s=seconds.low,
        high_s=seconds.high,
        measured_s=measured_s,
        error=None if measured_s is None else seconds.value / measured_s - 1,
        predicted_bytes=predicted_bytes,
        measured_bytes=measured_bytes,
        memory_kind=run.memory_kind,
        memory_error=None if not measured_bytes else predicted_bytes / measured_bytes - 1,
        assumed=case.assumed,
        recompute_stated="recompute" not in case.assumed,
        stated=not _MOVE_TIME.intersection(case.assumed),
        tuned=case.tuned,
    )


def comparable_bytes(run: Run, found: Predicted) -> int:
    """The predicted number of the kind that was measured."""
    if run.memory_kind == "reserved":
        return found.reserved_bytes - found.outside_bytes
    if run.memory_kind == "nvidia-smi":
        return found.reserved_bytes
    if "(la" in (run.peak_mem_kind or "") or "last rank" in (run.peak_mem_kind or ""):
        return found.last_rank_bytes
    return found.peak_bytes


# ---------------------------------------------------------------- statistics


def _by_source(used: list[tuple[Case, Row]]) -> tuple[SourceErrors, ...]:
    groups: dict[tuple[str, str, str], list[tuple[Case, Row]]] = {}
    for case, row in used:
        groups.setdefault((case.run.group, case.cluster.gpu.name, case.runtime), []).append((case, row))
    return tuple(_source_errors(*key, members) for key, members in groups.items())


def _source_errors(source: str, gpu: str, runtime: str, members: list[tuple[Case, Row]]) -> SourceErrors:
    timed = [(case, row, row.measured_s) for case, row in members if row.measured_s is not None]
    per_token = [case.work.tokens_per_batch / case.cluster.gpus for case, _, _ in timed]
    predicted = np.array([row.predicted_s for _, row, _ in timed])
    measured = np.array([seconds for _, _, seconds in timed])
    inside = [row.low_s <= seconds <= row.high_s for _, row, seconds in timed]
    models = [case.run.model or "" for case, _, _ in timed]
    return SourceErrors(
        source=source,
        gpu=gpu,
        runtime=runtime,
        n=len(members),
        time=errors([row.error for _, row in members]),
        time_stated=errors([row.error for _, row in members if row.stated]),
        time_assumed=errors([row.error for _, row in members if not row.stated]),
        memory=errors([row.memory_error for _, row in members]),
        spearman=spearman(predicted / per_token, measured / per_token) if timed else None,
        coverage80=float(np.mean(inside)) if timed else None,
        layout_spread=within_spread(np.log(predicted / measured), models) if timed else None,
        tuned=Counter(row.tuned for _, row in members).most_common(1)[0][0],
    )


def errors(relative: Iterable[float | None]) -> Errors:
    """Errors of relative deviations; None entries do not count."""
    known = np.array([value for value in relative if value is not None])
    if not known.size:
        return Errors(n=0, median_ape=None, p90_ape=None, bias=None)
    magnitude = np.abs(known)
    return Errors(
        n=int(known.size),
        median_ape=float(np.median(magnitude)),
        p90_ape=float(np.quantile(magnitude, 0.9)),
        bias=float(known.mean()),
    )


def spearman(a: np.ndarray, b: np.ndarray) -> float | None:
    """Rank correlation of two samples, ties sharing their mean rank; None for fewer than three points or no spread."""
    if len(a) < _FEWEST_FOR_RANKS:
        return None
    x, y = _ranks(a), _ranks(b)
    x, y = x - x.mean(), y - y.mean()
    scale = float(np.sqrt((x @ x) * (y @ y)))
    return float(x @ y) / scale if scale > 0 else None


def _ranks(values: np.ndarray) -> np.ndarray:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts - 1) / 2)[inverse]


def within_spread(logs: np.ndarray, labels: Sequence[str]) -> float | None:
    """Standard deviation of `logs` around the mean of their label; labels with one value say nothing."""
    squares, freedom = 0.0, 0
    for label in dict.fromkeys(labels):
        own = logs[[at for at, name in enumerate(labels) if name == label]]
        squares += float(((own - own.mean()) ** 2).sum())
        freedom += len(own) - 1
    return (squares / freedom) ** 0.5 if freedom else None
