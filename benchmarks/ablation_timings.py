"""What the constants of kernels and links are worth on the timings that they were fitted to.

    python benchmarks/ablation_timings.py    print the table

Timings: single kernels of tests/cluster/data/gemm_points.csv (fitted and held ones) and collectives of 1 MiB and more
of tests/cluster/data/collectives.csv. Each constant gets its neutral value (benchmarks/ablation_constants.py) on every
GPU or link at once. Errors are |predicted / measured - 1|, over the timings that the neutral value moves.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from ablation_constants import ATTENTION, CURVE, CURVE_TABLES, LINK, with_links
from accuracy import percent, table
from fit_compute import GPUS, Points, attention_ratios, product_ratios, read
from fivefold.cluster import Cluster, bytes_sent_per_rank, collective_seconds, load_cluster, place
from fivefold.cluster.curve import Curve, load_curve

DATA = Path(__file__).resolve().parents[1] / "tests" / "cluster" / "data"
MOVED = 0.02  # a timing is moved when its prediction changes by more than this share: timings repeat to some percent
LEAST_BYTES = 1 << 20  # below, what is timed is the host


class Worth(NamedTuple):
    """Of one constant on one kind of timings: those of `of` that it moves, and their median error with and without."""

    constant: str
    timings: str
    moved: int
    of: int
    with_it: float
    without: float
    better: float

    @property
    def matters(self) -> bool:
        return self.moved > 0


def worths() -> list[Worth]:
    """Of every constant of curves and links that moves a timing, in the order of benchmarks/ablation_constants.py."""
    kernels = Points(read([DATA / "gemm_points.csv"]))
    found = []
    for name, neutral in neutral_curves():
        for timings, errors in (("products", _products), ("attention", _attention)):
            found.append(_worth(name, timings, errors(kernels, lambda curve: curve), errors(kernels, neutral)))
    measured = list(_collectives())
    as_is = _collective_ratios(measured, lambda cluster: cluster)
    for name, alone in neutral_clusters():
        found.append(_worth(name, "collectives", as_is, _collective_ratios(measured, alone)))
    return [each for each in found if each.matters]


def _worth(constant: str, timings: str, as_is: np.ndarray, neutral: np.ndarray) -> Worth:
    moved = np.abs(neutral / as_is - 1) > MOVED
    was, now = np.abs(as_is[moved] - 1), np.abs(neutral[moved] - 1)
    if not moved.any():
        return Worth(constant, timings, 0, moved.size, 0.0, 0.0, 0.0)
    better = float((now > was).mean())
    return Worth(constant, timings, int(moved.sum()), moved.size, float(np.median(was)), float(np.median(now)), better)


# ---------------------------------------------------------------- kernels


def neutral_curves() -> Iterator[tuple[str, Callable[[Curve], Curve]]]:
    """Each constant of a GPU's curve, and how a curve gets its neutral value."""
    for field, _, neutral in CURVE:
        yield field, partial(_with_field, field, neutral)
    for field in CURVE_TABLES:
        yield field, partial(_with_ones, field)
    for field, neutral in ATTENTION:
        yield f"attention.{field}", partial(_with_attention, field, neutral)


def _with_field(field: str, neutral: float, curve: Curve) -> Curve:
    return replace(curve, **{field: neutral})


def _with_ones(field: str, curve: Curve) -> Curve:
    return replace(curve, **{field: dict.fromkeys(getattr(curve, field), 1.0)})


def _with_attention(field: str, neutral: float, curve: Curve) -> Curve:
    tables = field in ("forward", "backward")
    rates = {}
    for kernel, rate in curve.attention.items():
        new: dict[str, Any] = (
            {field: (neutral,) * len(rate.head_dims)}
            if tables
            else {f"{field}_{side}": neutral for side in ("forward", "backward")}
        )
        rates[kernel] = replace(rate, **new)
    return replace(curve, attention=rates)


def _products(points: Points, change: Callable[[Curve], Curve]) -> np.ndarray:
    """Predicted over measured seconds of all plain and grouped products."""
    return np.concatenate(
        [
            product_ratios(change(load_curve(name)), gpu, points, label, op)
            for label, (name, gpu) in GPUS.items()
            for op in ("matmul", "group_matmul")
        ]
    )


def _attention(points: Points, change: Callable[[Curve], Curve]) -> np.ndarray:
    return np.concatenate(
        [
            attention_ratios(change(load_curve(GPUS[label][0])), GPUS[label][1], kernel, op, timed)
            for (label, kernel, op), timed in points.attention.items()
        ]
    )


# ---------------------------------------------------------------- collectives


class Measured(NamedTuple):
    cluster: str
    operation: str
    gpus: int
    size_bytes: int
    seconds: float


def _collectives() -> Iterator[Measured]:
    with (DATA / "collectives.csv").open(encoding="utf-8") as stream:
        for row in csv.DictReader(stream):
            gpus, size = int(row["gpus"]), int(row["size_bytes"])
            if size >= LEAST_BYTES:
                # nccl-tests' bus bandwidth counts what the busiest rank sends (its PERFORMANCE.md).
                sent = float(bytes_sent_per_rank(row["op"], size, gpus))
                seconds = sent / (float(row["busbw_gb_per_s"]) * 1e9)
                yield Measured(row["cluster"], row["op"], gpus, size, seconds)


def neutral_clusters() -> Iterator[tuple[str, Callable[[Cluster], Cluster]]]:
    """Each constant of links, and how a cluster gets its neutral value."""
    for field, _, neutral in LINK:
        yield f"link.{field}", partial(with_links, field, neutral)
    yield "launch_s of a collective", lambda cluster: replace(cluster, launch_s=0.0)


def _collective_ratios(measured: list[Measured], change: Callable[[Cluster], Cluster]) -> np.ndarray:
    """Predicted over measured seconds of all collectives."""
    ratios = []
    for each in measured:
        cluster = change(load_cluster(each.cluster, gpus=each.gpus))
        predicted = collective_seconds(cluster, each.operation, each.size_bytes, place(cluster, each.gpus, 1))
        ratios.append(float(predicted[0]) / each.seconds)
    return np.array(ratios)


def report(found: list[Worth]) -> str:
    return table(
        ("constant", "timings", "moved", "better with it", "median error with it", "without"),
        (
            (
                each.constant,
                each.timings,
                f"{each.moved} of {each.of}",
                percent(each.better),
                percent(each.with_it),
                percent(each.without),
            )
            for each in found
        ),
    )


if __name__ == "__main__":
    print(report(worths()))
