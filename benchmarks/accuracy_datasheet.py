"""How far off is a GPU that nobody has timed: its datasheet, and the curve of another chip by share of the peak.

    python benchmarks/accuracy_datasheet.py RUNS.csv    print the table

Each row keeps its GPU's datasheet (peak, memory, bandwidth, multiprocessors) and its links; the fractions of them that
kernels reach are another measured GPU's, as a new GPU of the catalogue would get them. Own: with the GPU's own curve.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path

import msgspec
import numpy as np

from accuracy import percent, table
from accuracy_wide import REPORTED, complete
from fivefold.cluster import load_curve_of
from fivefold.measure import Run
from fivefold.measure.convert import Case, Unconvertible, convert
from fivefold.measure.hardware import with_kernel
from fivefold.measure.predict import Predicted, choose, predict_all
from fivefold.measure.unstated import framework_of

# (GPUs whose runs are predicted, curve that is lent to them): to and from the chips that have one of their own.
LOANS: tuple[tuple[str, str], ...] = (
    ("a100", "h100-sxm"),
    ("a100", "b200"),
    ("h100-sxm", "a100-80g-sxm"),
    ("h100-sxm", "b200"),
    ("b200", "h100-sxm"),
    ("gb200", "h100-sxm"),
)


def lent(case: Case, curve: str) -> Case:
    """The case on the same datasheet with another GPU's fractions of it.

    Attention runs on the lender's usual kernel, whatever it is called here (slowed where the row's framework ran an
    older one); a precision that the lender lacks is reached as its fp8 is.
    """
    own = load_curve_of(case.cluster)
    gpu = msgspec.structs.replace(case.cluster.gpu, curve=curve)
    cluster = msgspec.structs.replace(case.cluster, gpu=gpu, compute={})
    other = load_curve_of(cluster)
    rates = msgspec.to_builtins(other.attention[other.attention_kernel])
    compute = {
        "precision": {name: other.precision.get("fp8", 1.0) for name in own.precision if name not in other.precision},
        "attention": dict.fromkeys({*own.attention, *other.attention, "fa2"}, rates),
    }
    cluster = msgspec.structs.replace(cluster, compute=compute)
    return msgspec.structs.replace(case, cluster=with_kernel(cluster, framework_of(case.run).kernel, set()))


def cases(runs: list[Run]) -> list[Case]:
    """Those rows that can be priced, with their open choices made on their own curve."""
    found = []
    for run in runs:
        try:
            found.append(choose(convert(run)))
        except Unconvertible:
            continue
    return found


def errors(members: list[Case]) -> dict[str, list[float]]:
    """Relative errors of step time by source."""
    found: dict[str, list[float]] = defaultdict(list)
    for case, predicted in zip(members, predict_all(members), strict=True):
        if isinstance(predicted, Predicted) and case.run.measured_s is not None:
            found[case.run.group].append(predicted.seconds.value / case.run.measured_s - 1)
    return found


def datasheet(runs: list[Run]) -> str:
    """The table, one line for each source, GPU and lender."""
    priced = cases(runs)
    lines = []
    for gpus, curve in LOANS:
        members = [case for case in priced if case.cluster.gpu.name.startswith(gpus)]
        own, other = errors(members), errors([lent(case, curve) for case in members])
        for source in (name for name in own if name not in REPORTED):
            before, after = np.array(own[source]), np.array(other[source])
            lines.append(
                (
                    gpus,
                    curve,
                    source,
                    str(len(after)),
                    percent(float(np.median(np.abs(before)))),
                    percent(float(before.mean()), signed=True),
                    percent(float(np.median(np.abs(after)))),
                    percent(float(after.mean()), signed=True),
                    percent(float(np.median((1 + after) / (1 + before) - 1)), signed=True),
                )
            )
    head = ("GPU", "curve of", "source", "rows", "own: median", "bias", "lent: median", "bias", "moved by")
    return table(head, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path, help="a CSV file of published runs")
    print(datasheet(complete(parser.parse_args().runs)))


if __name__ == "__main__":
    main()
