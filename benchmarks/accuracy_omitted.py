"""What a table of runs costs that says less: columns of complete rows are left out, and the rest is predicted again.

    python benchmarks/accuracy_omitted.py RUNS.csv    print the table

What is left out is then chosen as it is for rows that never stated it. Errors are against the measurement of the whole
row, so that only the prediction moves. Of vTrain's near-duplicates every twelfth is used.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from accuracy import percent, table
from accuracy_wide import REPORTED, complete
from fivefold.measure import Run, validate
from fivefold.measure.runs import source_of

# Of sources with near-duplicates, each how-manieth run is used.
EVERY = {"vtrain-single": 12}
MOVED = 0.02
SIZES = ("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab", "gated_mlp", "tied_embeddings")
# What is left out together: columns that say one thing.
OMITTED: dict[str, tuple[str, ...]] = {
    "nothing": (),
    "micro-batch": ("mbs",),
    "recomputation": ("recompute", "recompute_kind"),
    "ZeRO": ("zero", "dist_opt"),
    "chunks per rank": ("vpp",),
    "sequence parallelism": ("sp",),
    "experts' ranks": ("ep", "etp"),
    "attention": ("attention",),
    "overlap": ("overlap",),
    "notes": ("notes",),
    "date": ("source_date",),
    "network": ("interconnect", "gpus_per_node"),
    "blocks, given width and parameters": ("layers",),
    "all sizes": (*SIZES, "experts", "topk", "moe_ffn", "shared_experts"),
    "precision": ("precision", "precision_kind"),
}


class Outcome(NamedTuple):
    """Errors by source of the runs that were priced, how many moved by more than MOVED, how many were not priced."""

    errors: dict[str, np.ndarray]
    moved: int
    unpriced: int


def judged(path: Path) -> list[Run]:
    """The complete runs that are judged by, of near-duplicates a share."""
    runs = [run for run in complete(path) if source_of(run.id) not in REPORTED]
    kept = [run for run in runs if source_of(run.id) not in EVERY]
    for name, every in EVERY.items():
        kept += [run for run in runs if source_of(run.id) == name][::every]
    return kept


def outcome(runs: list[Run], columns: tuple[str, ...], whole: dict[str, tuple[float, float]]) -> Outcome:
    """Without some columns. whole: (predicted, measured) seconds of each run as published."""
    rows = validate([replace(run, **dict.fromkeys(columns)) for run in runs]).rows
    found = [(row.id, row.predicted_s) for row in rows if row.id in whole]
    errors: dict[str, list[float]] = {}
    for name, seconds in found:
        errors.setdefault(source_of(name), []).append(seconds / whole[name][1] - 1)
    moved = sum(abs(seconds / whole[name][0] - 1) > MOVED for name, seconds in found)
    return Outcome({name: np.array(each) for name, each in errors.items()}, moved, len(whole) - len(found))


def report(path: Path) -> str:
    """The table: median error and bias by source, each omission a line."""
    runs = judged(path)
    rows = validate(runs).rows
    whole = {row.id: (row.predicted_s, row.measured_s) for row in rows if row.measured_s is not None}
    sources = sorted({source_of(name) for name in whole})
    lines = []
    for said, columns in OMITTED.items():
        found = outcome(runs, columns, whole)
        cells = (_cell(found.errors.get(name)) for name in sources)
        lines.append((said, str(found.moved), str(found.unpriced), *cells))
    return f"{len(whole)} runs.\n\n" + table(("left out", "moved by 2%", "not priced", *sources), lines)


def _cell(errors: np.ndarray | None) -> str:
    if errors is None:
        return "–"
    return f"{percent(float(np.median(np.abs(errors))))} ({percent(float(errors.mean()), signed=True)})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, help="CSV file with the columns of the shipped runs")
    print(report(parser.parse_args().runs))


if __name__ == "__main__":
    main()
