"""Tables of a wider file of published runs for docs/accuracy.md: sources of equal weight, regimes, intervals, ranking.

    python benchmarks/accuracy_wide.py RUNS.csv    rewrite the second block of tables in docs/accuracy.md

Only complete rows are used: full_config is 1 and check_flags is blank, where the file has these columns.
"""

from __future__ import annotations

import argparse
import csv
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from accuracy import PAGE, PARTS, percent, table
from fivefold.estimate.doubt import WIDTHS, shares
from fivefold.estimate.interval import EXPERTS_SPREAD, relative_spread
from fivefold.measure import Row, Run, Validation, read_runs, validate
from fivefold.measure.convert import Case, convert
from fivefold.measure.predict import choose, kernel_of
from fivefold.measure.runs import source_of
from fivefold.measure.validate import spearman
from pages import put

# Sources whose numbers are too noisy, too partial or of another kind to be judged by: reported, not pooled.
REPORTED = ("bigscience_v100", "mcoreci", "x_extra")
TIE = 1.06
COVERED = 0.8
ROUNDS = 6


def complete(path: Path) -> list[Run]:
    """The runs of a file whose configuration is complete and unflagged."""
    with path.open(encoding="utf-8-sig") as stream:
        rows = {row["id"]: row for row in csv.DictReader(stream)}
    return [
        run
        for run in read_runs(path).runs
        if rows[run.id].get("full_config", "1") == "1" and not rows[run.id].get("check_flags")
    ]


def thinned(runs: Iterable[Run], every: Mapping[str, int]) -> list[Run]:
    """The runs; of sources with near-duplicates, each how-manieth one."""
    seen: Counter[str] = Counter()
    kept = []
    for run in runs:
        seen[run.group] += 1
        if seen[run.group] % every.get(run.group, 1) == 0:
            kept.append(run)
    return kept


def source(row: Row) -> str:
    return source_of(row.id)


def quantile(values: Iterable[tuple[str, float]], share: float) -> float:
    """Of (source, value) pairs, each source weighing the same."""
    pairs = sorted(values, key=lambda pair: pair[1])
    counts = Counter(name for name, _ in pairs)
    weight = np.cumsum([1 / counts[name] for name, _ in pairs]) / len(counts)
    return pairs[min(int(np.searchsorted(weight, share)), len(pairs) - 1)][1]


def summary(report: Validation, rows: list[Row]) -> str:
    pooled = [(source(row), abs(row.error or 0)) for row in rows]
    names = sorted({name for name, _ in pooled})
    bias = np.mean([np.mean([row.error for row in rows if source(row) == name]) for name in names])
    inside = [np.mean([_inside(row) for row in rows if source(row) == name]) for name in names]
    return (
        f"{report.rows_used:,} of {report.rows_total:,} complete rows are priced. Step time of {', '.join(names)}, "
        f"each source with the same weight: median error {percent(quantile(pooled, 0.5))}, 90th percentile "
        f"{percent(quantile(pooled, 0.9))}, bias {percent(float(bias), signed=True)}, "
        f"{percent(float(np.mean(inside)))} inside the 80% interval."
    )


def _inside(row: Row) -> bool:
    return row.measured_s is not None and row.low_s <= row.measured_s <= row.high_s


def by_key(rows: list[Row], key: Callable[[Row], str], head: str) -> str:
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    lines = []
    for name, members in sorted(groups.items()):
        error = np.array([row.error for row in members])
        lines.append(
            (
                name,
                str(len(members)),
                percent(float(np.median(np.abs(error)))),
                percent(float(np.quantile(np.abs(error), 0.9))),
                percent(float(error.mean()), signed=True),
                percent(float(np.mean([_inside(row) for row in members]))),
            )
        )
    return table((head, "rows", "median", "p90", "bias", "in 80% range"), lines)


def memory(report: Validation) -> str:
    groups: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in report.rows:
        if row.memory_error is not None:
            groups[source(row), row.memory_kind or "unknown"].append(row.memory_error)
    return table(
        ("source", "kind", "rows", "median", "p90", "bias"),
        (
            (
                *key,
                str(len(errors)),
                percent(float(np.median(np.abs(errors)))),
                percent(float(np.quantile(np.abs(errors), 0.9))),
                percent(float(np.mean(errors)), signed=True),
            )
            for key, errors in sorted(groups.items())
        ),
    )


class Pieces(NamedTuple):
    """[N, 4] of each row what the fitted widths multiply: mixture of experts or not, and the shares of doubt.WIDTHS.
    fixed: [N] the rest of the interval, runtime and GPU."""

    parts: np.ndarray
    fixed: np.ndarray

    def widths(self, fitted: np.ndarray) -> np.ndarray:
        """[N] half-widths, relative, as interval.relative_spread joins them."""
        return np.sqrt(self.fixed**2 + (fitted[0] * self.parts[:, 0]) ** 2 + (self.parts[:, 1:] @ fitted[1:]) ** 2)


def pieces(cases: Iterable[Case]) -> Pieces:
    parts, fixed = [], []
    for case in cases:
        kernel, one = kernel_of(case, [case.layout]), np.arange(1)
        found = shares(kernel, one, kernel.step_seconds(one))
        parts.append((float(case.model.is_moe), *(float(found[kind][0]) for kind in WIDTHS)))
        problem = kernel.problem
        experts = EXPERTS_SPREAD if case.model.is_moe else 0.0
        fixed.append(np.sqrt(relative_spread(problem, 0.0) ** 2 - experts**2))
    return Pieces(np.array(parts), np.array(fixed))


def cross_validated(rows: list[Row], cases: dict[str, Case]) -> str:
    """Coverage of each source by widths that are fitted to all other sources."""
    found = pieces(choose(cases[row.id]) for row in rows)
    error = np.array([_log_error(row) for row in rows])
    names = np.array([source(row) for row in rows])
    lines = []
    for left_out in sorted(set(names.tolist())):
        own = names == left_out
        fitted = _fit_widths(found, error, np.where(own, 0.0, [1 / np.sum(names == name) for name in names]))
        inside = error[own] <= np.log1p(found.widths(fitted)[own])
        lines.append((left_out, str(own.sum()), *(f"{value:.2g}" for value in fitted), percent(float(inside.mean()))))
    mean = np.mean([float(line[-1].rstrip("%")) for line in lines])
    return f"{table(('left out', 'rows', 'experts', *WIDTHS, 'covered'), lines)}\n\nMean over sources: {mean:.0f}%."


def _fit_widths(found: Pieces, error: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """The widths with the least weighted interval score (Gneiting and Raftery 2007), by coordinate descent from the
    shipped ones; an error counts up to half, so that one row does not choose them."""

    def score(fitted: np.ndarray) -> float:
        width = np.log1p(found.widths(fitted))
        return float(weight @ (2 * width + 2 / (1 - COVERED) * np.maximum(np.minimum(error, 0.5) - width, 0)))

    fitted = np.array([EXPERTS_SPREAD, *WIDTHS.values()])
    for _ in range(ROUNDS):
        for at in range(len(fitted)):
            trials = [fitted * np.where(np.arange(len(fitted)) == at, scale, 1.0) for scale in (1.0, 0.8, 1.25)]
            fitted = min(trials, key=score)
    return fitted


def _log_error(row: Row) -> float:
    return abs(float(np.log1p(row.error or 0.0)))


def ranking(rows: list[Row], runs: dict[str, Run]) -> str:
    """Of jobs with five or more layouts: rank correlation, times within 6% of the fastest of a tie counting as equal,
    and what the layout that is predicted to be fastest costs."""
    jobs: dict[tuple[str | int | None, ...], list[Row]] = defaultdict(list)
    for row in rows:
        run = runs[row.id]
        if run.group == "vtrain-single":
            jobs[run.model, run.gbs, run.gpus].append(row)
    correlations, regrets = [], []
    for members in jobs.values():
        if len(members) < 5:
            continue
        predicted = np.array([row.predicted_s for row in members])
        measured = np.array([row.measured_s for row in members])
        found = spearman(_ties(predicted), _ties(measured))
        if found is not None:
            correlations.append(found)
        regrets.append(measured[predicted.argmin()] / measured.min() - 1)
    return (
        f"vTrain's {len(regrets)} jobs with five or more layouts (one model, batch and number of GPUs): rank "
        f"correlation {np.mean(correlations):.3f} in the mean, {np.median(correlations):.3f} at the median, "
        f"{min(correlations):.2f} at worst. The layout predicted to be fastest runs "
        f"{percent(float(np.mean(regrets)))} slower than the fastest in the mean."
    )


def _ties(values: np.ndarray) -> np.ndarray:
    order, ranks, rank, start = np.argsort(values), np.empty(len(values)), 0, 0.0
    for at in order:
        if values[at] > start * TIE:
            start, rank = values[at], rank + 1
        ranks[at] = rank
    return ranks


def worst(rows: list[Row], runs: dict[str, Run], number: int = 12) -> str:
    off = sorted(rows, key=lambda row: -_log_error(row))[:number]
    return table(
        ("run", "what", "error", "assumed"),
        (
            (
                row.id,
                f"{runs[row.id].framework}: {runs[row.id].model}, {runs[row.id].gpus}x{runs[row.id].gpu}",
                percent(row.error, signed=True),
                ", ".join(row.assumed),
            )
            for row in off
        ),
    )


def tables(path: Path) -> str:
    data = complete(path)
    runs = {run.id: run for run in data}
    report = validate(data)
    timed = [row for row in report.rows if row.error is not None]
    judged = [row for row in timed if source(row) not in REPORTED]
    cases = {row.id: convert(runs[row.id]) for row in timed}
    native = {"megatron": "Transformer Engine", "megatron-fsdp": "Transformer Engine"}
    regime = {
        name: "mixture of experts" if case.model.is_moe else native.get(case.runtime, "plain PyTorch")
        for name, case in cases.items()
    }
    return "\n\n".join(
        (
            summary(report, judged),
            "### By source",
            by_key(
                timed, lambda row: source(row) + ("" if source(row) not in REPORTED else " (reported only)"), "source"
            ),
            "### Rows that state all that moves their time, and the others",
            by_key(judged, lambda row: f"{source(row)}, {'stated' if row.stated else 'assumed'}", "source"),
            "### By how the number was come by",
            by_key(judged, lambda row: row.tuned or "plainly measured", "kind"),
            "### By GPU",
            by_key(judged, lambda row: cases[row.id].cluster.gpu.name, "GPU"),
            "### By runtime profile and regime",
            by_key(judged, lambda row: f"{cases[row.id].runtime}, {regime[row.id]}", "profile"),
            "### Memory",
            memory(report),
            "### Order of layouts",
            ranking(timed, runs),
            "### Intervals, cross-validated",
            cross_validated(judged, cases),
            "### Largest errors",
            worst(judged, runs),
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, help="CSV file of runs")
    args = parser.parse_args()
    body = tables(args.runs)  # before the page is read: others may write it meanwhile
    put(PAGE, body, *PARTS["wide"])


if __name__ == "__main__":
    main()
