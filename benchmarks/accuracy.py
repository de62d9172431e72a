"""Validate the planner against published runs and write docs/accuracy.md: tables, plots, what each constant is worth.

    python benchmarks/accuracy.py                  the shipped runs' tables; the page's other parts stay as they are
    python benchmarks/accuracy.py --wide RUNS.csv  the whole page, with a wider table of published runs (minutes)
    python benchmarks/accuracy.py --runs RUNS.csv  print the tables of another file with the same columns

The text is benchmarks/accuracy_text.md, in which {{name}} is a part's place; change it there, not in the page.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from fivefold import __version__
from fivefold.measure import Run, RunTable, Validation, read_runs, shipped_runs, validate

PAGE = Path(__file__).resolve().parents[1] / "docs" / "accuracy.md"
TEXT = Path(__file__).with_name("accuracy_text.md")
PLOTS = PAGE.with_name("accuracy")
# What stands around each part in the page, so that a part can be kept when another is written anew.
PARTS = {
    "shipped": ("<!-- tables: begin (benchmarks/accuracy.py) -->", "<!-- tables: end -->"),
    "wide": ("<!-- wide tables: begin (benchmarks/accuracy_wide.py) -->", "<!-- wide tables: end -->"),
    "omitted": ("<!-- omitted: begin (benchmarks/accuracy_omitted.py) -->", "<!-- omitted: end -->"),
    "calibrated": ("<!-- calibration: begin (benchmarks/accuracy_calibrated.py) -->", "<!-- calibration: end -->"),
    "constants": ("<!-- constants: begin (benchmarks/ablation.py) -->", "<!-- constants: end -->"),
}
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


# ---------------------------------------------------------------- the page


def kept(page: str, name: str) -> str:
    """A part as the page has it; a word about how to get it where it has none."""
    begin, end = PARTS[name]
    _, found, rest = page.partition(begin)
    return rest.partition(end)[0].strip() if found else "Written by `python benchmarks/accuracy.py --wide RUNS.csv`."


def assemble(text: str, page: str, parts: Mapping[str, str]) -> str:
    """The text with every part in its place: the given ones, and what the page has of the others."""
    for name, (begin, end) in PARTS.items():
        body = parts.get(name) or kept(page, name)
        text = text.replace("{{" + name + "}}", f"{begin}\n\n{body}\n\n{end}")
    return text


def wide(path: Path) -> str:
    """Tables of the wider file, and predicted against measured seconds as a plot."""
    import accuracy_wide
    import plots

    points: dict[str, list[tuple[float, float]]] = {}
    for row in validate(accuracy_wide.complete(path)).rows:
        name = row.id.rpartition("-")[0]
        if row.measured_s is not None and name not in accuracy_wide.REPORTED:
            points.setdefault(name, []).append((row.measured_s, row.predicted_s))
    title = "Predicted against measured seconds of a step, with a band of 10%"
    _plot("predicted.svg", plots.scatters(dict(sorted(points.items())), title, 0.10))
    return accuracy_wide.tables(path)


def calibrated(path: Path) -> str:
    """Errors cold and after three runs, as tables and as a plot."""
    import accuracy_calibrated
    import accuracy_wide
    import plots

    groups = accuracy_calibrated.groups_of(accuracy_wide.complete(path))
    gains = accuracy_calibrated.gains(groups)
    medians = {
        source: (float(np.median(gain.cold)), float(np.median(gain.after)))
        for source, _, gain in accuracy_calibrated.by_source(gains, groups)
    }
    title = "Median error of runs that were not fitted"
    _plot("calibrated.svg", plots.pairs(medians, title, ("cold", "after three runs")))
    return accuracy_calibrated.report(gains, groups)


def constants(path: Path) -> str:
    """What each constant is worth, as tables and as a plot."""
    import ablation
    import accuracy_wide
    import plots

    base = ablation.base_of(accuracy_wide.complete(path))
    effects = ablation.effects(base)
    worth = {each.constant.name: 100 * each.mean for each in effects if each.matters and abs(each.mean) > 0.0005}
    title = "Median error without a constant minus with it, mean over sources"
    _plot("constants.svg", plots.bars(worth, title, "points"))
    return ablation.report(effects, base)


def omitted(path: Path) -> str:
    """What leaving out each column costs, as a table."""
    import accuracy_omitted

    return accuracy_omitted.report(path)


# The parts that need the wider table.
WIDE = {"wide": wide, "omitted": omitted, "calibrated": calibrated, "constants": constants}


def _plot(name: str, svg: str) -> None:
    PLOTS.mkdir(exist_ok=True)
    (PLOTS / name).write_text(svg, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, help="another CSV file of runs; its tables are printed")
    parser.add_argument("--wide", type=Path, help="CSV file of a wider table of runs; the whole page is written")
    parser.add_argument("--parts", nargs="+", choices=[*WIDE], default=[*WIDE], help="of --wide, write only these")
    args = parser.parse_args()
    if args.runs:
        print(tables(read_runs(args.runs)))
        return
    parts = {"shipped": tables(shipped_runs())}
    if args.wide:
        parts |= {name: WIDE[name](args.wide) for name in args.parts}
    page = PAGE.read_text(encoding="utf-8") if PAGE.is_file() else ""
    PAGE.write_text(assemble(TEXT.read_text(encoding="utf-8"), page, parts), encoding="utf-8")


if __name__ == "__main__":
    main()
