"""What a table of runs costs that says less: columns of complete rows are left out, and the rest is predicted again.

    python benchmarks/accuracy_omitted.py RUNS.csv    print the table

What is left out is then chosen as it is for rows that never stated it. Errors are against the measurement of the whole
row, so that only the prediction moves. Of vTrain's near-duplicates every twelfth is used.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from accuracy import percent, table
from accuracy_wide import REPORTED, complete, thinned
from fivefold.measure import Run, validate
from fivefold.measure.runs import source_of

# Of sources with near-duplicates, each how-manieth run is used.
EVERY = {"vtrain-single": 12}
MOVED = 0.02
SIZES = ("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab", "gated_mlp", "tied_embeddings")
# What is left out together: columns that say one thing.
OMITTED: dict[str, tuple[str, ...]] = {
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


def judged(path: Path) -> list[Run]:
    """The complete runs that are judged by, of near-duplicates a share."""
    return [run for run in thinned(complete(path), EVERY) if run.group not in REPORTED]


def predicted(runs: list[Run], columns: tuple[str, ...]) -> dict[str, float]:
    """Seconds of each run that is priced without some columns."""
    rows = validate([replace(run, **dict.fromkeys(columns)) for run in runs]).rows
    return {row.id: row.predicted_s for row in rows}


def report(path: Path) -> str:
    """The table: median error and bias by source, each omission a line."""
    runs = judged(path)
    whole = predicted(runs, ())
    measured = {run.id: run.measured_s for run in runs if run.measured_s is not None and run.id in whole}
    sources = sorted({source_of(name) for name in measured})

    def line(said: str, found: dict[str, float]) -> tuple[str, ...]:
        priced = [name for name in measured if name in found]
        moved = sum(abs(found[name] / whole[name] - 1) > MOVED for name in priced)
        errors: dict[str, list[float]] = {name: [] for name in sources}
        for name in priced:
            errors[source_of(name)].append(found[name] / measured[name] - 1)
        return said, str(moved), str(len(measured) - len(priced)), *map(_cell, errors.values())

    lines = [line("nothing", whole), *(line(said, predicted(runs, columns)) for said, columns in OMITTED.items())]
    return f"{len(measured)} runs.\n\n" + table(("left out", "moved by 2%", "not priced", *sources), lines)


def _cell(errors: list[float]) -> str:
    if not errors:
        return "–"
    return f"{percent(float(np.median(np.abs(errors))))} ({percent(float(np.mean(errors)), signed=True)})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, help="CSV file with the columns of the shipped runs")
    print(report(parser.parse_args().runs))


if __name__ == "__main__":
    main()
