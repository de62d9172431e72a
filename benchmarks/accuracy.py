"""Validate the planner against published runs and write the tables of docs/accuracy.md.

    python benchmarks/accuracy.py                  rewrite the tables from the shipped runs
    python benchmarks/accuracy.py --runs RUNS.csv  print the tables of another file with the same columns

Only what lies between the markers of docs/accuracy.md is replaced; the text around it is written by hand.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from fivefold import __version__
from fivefold.measure import Run, RunTable, Validation, read_runs, shipped_runs, validate

PAGE = Path(__file__).resolve().parents[1] / "docs" / "accuracy.md"
BEGIN, END = "<!-- tables: begin (benchmarks/accuracy.py) -->", "<!-- tables: end -->"
WORST = 8


def percent(value: float | None, *, signed: bool = False) -> str:
    if value is None:
        return "–"
    return f"{value:+.1%}" if signed else f"{value:.1%}"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def by_source(report: Validation) -> str:
    return table(
        ("source", "GPU", "runtime", "rows", "median", "p90", "bias", "rank corr.", "in 80% range", "between layouts"),
        (
            (
                group.source,
                group.gpu,
                group.runtime,
                str(group.time.n),
                percent(group.time.median_ape),
                percent(group.time.p90_ape),
                percent(group.time.bias, signed=True),
                "–" if group.spearman is None else f"{group.spearman:.3f}",
                percent(group.coverage80),
                percent(group.layout_spread),
            )
            for group in report.by_source
        ),
    )


def memory(report: Validation) -> str:
    return table(
        ("source", "GPU", "runtime", "rows", "median", "p90", "bias"),
        (
            (
                group.source,
                group.gpu,
                group.runtime,
                str(group.memory.n),
                percent(group.memory.median_ape),
                percent(group.memory.p90_ape),
                percent(group.memory.bias, signed=True),
            )
            for group in report.by_source
            if group.memory.n
        ),
    )


def describe(run: Run) -> str:
    degrees = " ".join(f"{name}{getattr(run, name)}" for name in ("tp", "cp", "pp", "ep", "dp") if getattr(run, name))
    return f"{run.model}, {run.gpus}x{run.gpu}, seq {run.seq}, {degrees}, mbs {run.mbs}"


def worst(report: Validation, runs: dict[str, Run]) -> str:
    off = sorted((row for row in report.rows if row.error is not None), key=lambda row: -abs(row.error or 0))[:WORST]
    return table(
        ("run", "what", "predicted", "measured", "error"),
        (
            (
                row.id,
                describe(runs[row.id]),
                f"{row.predicted_s:.3g} s",
                f"{row.measured_s:.3g} s",
                percent(row.error, signed=True),
            )
            for row in off
        ),
    )


def parts(report: Validation, runs: dict[str, Run]) -> str:
    """The same errors by what the layout does, so that a systematic part shows."""
    groups: dict[tuple[str, str], list[float]] = {}
    for row in report.rows:
        if row.error is None:
            continue
        run = runs[row.id]
        for kind in labels(run):
            groups.setdefault((run.group, kind), []).append(row.error)
    return table(
        ("source", "rows where", "rows", "median", "bias", "spread"),
        (
            (
                source,
                kind,
                str(len(values)),
                percent(float(np.median(np.abs(values)))),
                percent(float(np.mean(values)), signed=True),
                percent(float(np.std(values))),
            )
            for (source, kind), values in sorted(groups.items())
            if len(values) > 1
        ),
    )


def labels(run: Run) -> list[str]:
    seq = run.seq or 0
    nodes = (run.gpus or 1) // (run.gpus_per_node or run.gpus or 1)
    return [
        f"tp {run.tp}",
        "pp 1" if (run.pp or 1) == 1 else "pp above 1",
        f"recompute {run.recompute_kind}",
        "up to 2,048 tokens" if seq <= 2048 else "up to 16,384 tokens" if seq <= 16384 else "longer sequences",
        "one node" if nodes <= 1 else "2 to 8 nodes" if nodes <= 8 else "more nodes",
    ]


def tables(data: RunTable) -> str:
    report = validate(data)
    runs = {run.id: run for run in data.runs}
    skipped = [f"- {row.id}: {row.reason}" for row in report.skipped[:20]]
    sections = [
        f"fivefold {__version__}, {report.rows_used} of {report.rows_total} rows used.",
        "### Step time",
        by_source(report),
        "### Peak memory",
        memory(report),
        "### By what the layout does",
        parts(report, runs),
        "### Largest time errors",
        worst(report, runs),
    ]
    if skipped:
        sections += ["### Skipped", "\n".join(skipped)]
    return "\n\n".join(sections)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, help="another CSV file of runs; its tables are printed")
    args = parser.parse_args()
    if args.runs:
        print(tables(read_runs(args.runs)))
        return
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n{tables(shipped_runs())}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
