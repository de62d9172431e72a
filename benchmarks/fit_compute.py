"""Fit the constants of src/fivefold/cluster/data/compute.toml to measured points, and print them with their residuals.

    python benchmarks/fit_compute.py POINTS.csv [POINTS.csv ...] [--score]

Points are rows of source, gpu, op, m, n, k, batch, layout, out_dtype, accumulate, tflops, shape and, for attention,
mask and kernel, as in tests/cluster/data/gemm_points.csv. A row that any of the files marks held = 1 is left out of the
fit and scored apart; --score fits nothing and scores the shipped constants. Fitting needs scipy, which fivefold does
not.

Conventions of the sources:
- matmul: layout TN is forward, NN the input gradient, NT the weight gradient; m, n, k are those of the product.
- group_matmul: M, N, K are the forward layer's rows, outputs and inputs whatever the stage.
- attention without a mask column (SimuMax): causal kernels timed, but FLOPs of the full square counted and five
  products in backward, so "efficiency" passes 1; halved here. With one (papers): FLOPs of the unmasked pairs.
- SimuMax times attention from the first kernel's start to the last one's end; on B200 the shortest calls sit at a floor
  of some 100 us whatever their work, which is the host and not the GPU: they are left out (HOST_BOUND_S).
"""

from __future__ import annotations

import argparse
import csv
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from fivefold.cluster.compute import attention_seconds, grouped_gemm_seconds
from fivefold.cluster.curve import AttentionRates, Curve, load_curve
from fivefold.cluster.spec import Gpu

KINDS = {"TN": "fwd", "NN": "dgrad", "NT": "wgrad", "fwd": "fwd", "bwd_grad_act": "dgrad", "bwd_grad_w": "wgrad"}


def _gpu(name: str, bandwidth: float, peak: float, sms: int) -> Gpu:
    return Gpu(
        name=name,
        memory_bytes=80 << 30,  # not used by the fit
        memory_bandwidth_per_s=bandwidth,
        peak_flops_per_s={"bf16": peak, "fp16": peak},
        sms=sms,
    )


# Datasheet numbers, as in gpus.toml; (name in the points, name of the curve).
GPUS = {
    "A100-PCIe-80GB": ("a100-80g-pcie", _gpu("a100-80g-pcie", 1.935e12, 312e12, 108)),
    "H100-SXM": ("h100-sxm", _gpu("h100-sxm", 3.35e12, 989.4e12, 132)),
    "B200": ("b200", _gpu("b200", 8e12, 2250e12, 148)),
    "RTX-4090": ("rtx-4090", _gpu("rtx-4090", 1.008e12, 165.2e12, 128)),
    "MI300X": ("mi300x", _gpu("mi300x", 5.3e12, 1307.4e12, 304)),
    "MI355X": ("mi355x", _gpu("mi355x", 8e12, 2516e12, 256)),
}
BOUNDS = {
    "depth_ramp": (0.0, 600.0),
    "wave_share": (0.0, 1.0),
    "split_depth": (512.0, 8192.0),
    "memory_efficiency": (0.2, 0.95),
    "memory_exposed": (0.0, 0.5),
    "group_launch_s": (0.0, 15e-6),
}
SHAPE = ("depth_ramp", "wave_share", "split_depth")
MEMORY = ("memory_efficiency", "memory_exposed", "group_launch_s")
# What a GPU's points can tell; the rest stays as shipped. H100's are forward products of one model: they fix the level.
FREE = {
    "A100-PCIe-80GB": ("fwd", "dgrad", "wgrad", *SHAPE, *MEMORY),
    "B200": ("fwd", "dgrad", "wgrad", *SHAPE, *MEMORY),
    "H100-SXM": ("fwd",),
}
HOST_BOUND_S = {("B200", "sdp_fwd"): 115e-6, ("B200", "sdp_bwd"): 130e-6}


class Products(NamedTuple):
    """Matrix products of one kind: arrays of equal length, seconds measured."""

    groups: np.ndarray
    m: np.ndarray
    n: np.ndarray
    k: np.ndarray
    output_bytes: np.ndarray
    seconds: np.ndarray


class Attention(NamedTuple):
    """Attention calls of one kernel and direction. mean_seq: twice the mean number of keys that a query sees."""

    flops: np.ndarray
    mean_seq: np.ndarray
    head_dim: np.ndarray
    seconds: np.ndarray


def product_row(row: dict[str, str]) -> tuple[str, tuple[float, ...]]:
    """(kind, (groups, m, n, k, output bytes, seconds)) of one matmul or group_matmul row."""
    m, n, k, batch = (int(row[name] or 1) for name in ("m", "n", "k", "batch"))
    seconds = 2 * m * n * k * batch / float(row["tflops"]) / 1e12
    kind = KINDS[row["layout"]]
    fp32 = row["out_dtype"] == "fp32" or "main_grad_dtype=fp32" in row["shape"]
    written = 4 if kind == "wgrad" and fp32 else 2
    output_bytes = written * (2 if row["accumulate"] == "True" and kind == "wgrad" else 1)
    if row["op"] == "group_matmul":
        m, n, k = {"fwd": (m, n, k), "dgrad": (m, k, n), "wgrad": (n, k, m)}[kind]
    return kind, (batch, m, n, k, output_bytes, seconds)


def attention_row(row: dict[str, str]) -> tuple[float, ...]:
    """(flops of unmasked pairs, twice the mean keys per query, head size, seconds) of one sdp row."""
    size = {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", row["shape"])}
    products = 1.0 if row["op"] == "sdp_fwd" else 2.5
    heads = size["batch"] * size["head_num"]
    full = products * 2 * heads * size["seq_len"] ** 2 * (size["qk_head_dim"] + size["v_head_dim"])
    mask = row.get("mask") or "causal counted full"
    flops = full if mask == "none" else full / 2
    counted = full if mask == "causal counted full" else flops
    mean_seq = size["seq_len"] * (2 if mask == "none" else 1)
    return flops, mean_seq, size["qk_head_dim"], counted / float(row["tflops"]) / 1e12


def usual_kernel(gpu: str) -> str:
    return "cudnn" if gpu == "B200" else "fa2"


class Points:
    """Measured points by GPU: products[gpu, op, kind] and attention[gpu, kernel, op]."""

    def __init__(self, rows: list[dict[str, str]]) -> None:
        products: dict[Any, list] = defaultdict(list)
        attention: dict[Any, list] = defaultdict(list)
        for row in rows:
            if row["gpu"] not in GPUS:
                continue
            if row["op"] in ("matmul", "group_matmul"):
                kind, point = product_row(row)
                products[row["gpu"], row["op"], kind].append(point)
            elif row["op"] in ("sdp_fwd", "sdp_bwd"):
                kernel = row.get("kernel") or usual_kernel(row["gpu"])
                point = attention_row(row)
                if point[-1] > HOST_BOUND_S.get((row["gpu"], row["op"]), 0.0):
                    attention[row["gpu"], kernel, row["op"]].append(point)
        self.products = {key: Products(*map(np.array, zip(*rows, strict=True))) for key, rows in products.items()}
        self.attention = {key: Attention(*map(np.array, zip(*rows, strict=True))) for key, rows in attention.items()}


def product_ratios(curve: Curve, gpu: Gpu, points: Points, name: str, op: str) -> np.ndarray:
    """Predicted over measured seconds of all products of one op on one GPU."""
    parts = [
        grouped_gemm_seconds(curve, gpu, *p[:4], "bf16", kind, output_bytes=p.output_bytes) / p.seconds  # type: ignore[arg-type]
        for (g, o, kind), p in points.products.items()
        if (g, o) == (name, op)
    ]
    return np.concatenate(parts) if parts else np.array([])


def attention_ratios(curve: Curve, gpu: Gpu, kernel: str, op: str, p: Attention) -> np.ndarray:
    seconds = attention_seconds(curve, gpu, p.flops, p.mean_seq, p.head_dim, backward=op == "sdp_bwd", kernel=kernel)
    return seconds / p.seconds


def misfit(ratios: np.ndarray) -> float:
    """Mean absolute log error: a few throttled or badly tuned points must not steer the curve."""
    return float(np.abs(np.log(ratios)).mean()) if ratios.size else 0.0


def fit_products(curve: Curve, gpu: Gpu, points: Points, name: str) -> Curve:
    """Efficiencies, ramp, wave share, split depth and memory terms together, on plain and grouped products."""
    free = FREE[name]

    def candidate(p: np.ndarray) -> Curve:
        values = dict(zip(free, map(float, p), strict=True))
        efficiency = {kind: values.pop(kind, old) for kind, old in curve.efficiency.items()}
        return msgspec.structs.replace(curve, efficiency=efficiency, **values)

    def loss(p: np.ndarray) -> float:
        trial = candidate(p)
        plain = product_ratios(trial, gpu, points, name, "matmul")
        group = product_ratios(trial, gpu, points, name, "group_matmul")
        return misfit(plain) + misfit(group) * min(1.0, group.size / max(plain.size, 1))

    bounds = [BOUNDS.get(key, (0.3, 1.0)) for key in free]
    return candidate(_least(loss, bounds))


def _least(loss: Callable[[np.ndarray], float], bounds: list[tuple[float, float]]) -> np.ndarray:
    """Where `loss` is smallest between `bounds`."""
    from scipy.optimize import differential_evolution  # scoring, and who imports this, goes without

    return differential_evolution(loss, bounds, seed=0, maxiter=300, tol=1e-7, polish=False).x


def fit_attention(curve: Curve, gpu: Gpu, points: Points, name: str, kernel: str) -> Curve:
    """Both directions of one kernel: efficiency by head size, and seq_half and tail where the points tell them."""
    dims = sorted({d for (g, kn, _), p in points.attention.items() if (g, kn) == (name, kernel) for d in p.head_dim})
    rates = msgspec.structs.replace(
        curve.attention[kernel],
        head_dims=tuple(int(d) for d in dims),
        forward=(0.5,) * len(dims),
        backward=(0.5,) * len(dims),
    )
    for op in ("sdp_fwd", "sdp_bwd"):
        rates = _fit_direction(curve, rates, gpu, kernel, op, points.attention[name, kernel, op])
    return _with_rates(curve, kernel, rates)


def _with_rates(curve: Curve, kernel: str, rates: AttentionRates) -> Curve:
    return msgspec.structs.replace(curve, attention={**curve.attention, kernel: rates})


def _fit_direction(curve: Curve, rates: AttentionRates, gpu: Gpu, kernel: str, op: str, p: Attention) -> AttentionRates:
    side = "forward" if op == "sdp_fwd" else "backward"
    measured = sorted(set(p.head_dim))
    free = [f"{item}_{side}" for item in _identified(p)]
    bounds = [(0.1, 1.3)] * len(measured) + [(0.0, 3000.0) if "half" in key else (0.0, 8.0) for key in free]

    def candidate(x: np.ndarray) -> AttentionRates:
        table = tuple(float(v) for v in np.interp(rates.head_dims, measured, x[: len(measured)]))
        return msgspec.structs.replace(
            rates, **{side: table}, **dict(zip(free, map(float, x[len(measured) :]), strict=True))
        )

    def loss(x: np.ndarray) -> float:
        # Squares: the few long sequences, throttled, must weigh beside the many short ones.
        return float(
            np.square(np.log(attention_ratios(_with_rates(curve, kernel, candidate(x)), gpu, kernel, op, p))).mean()
        )

    return candidate(_least(loss, bounds))


def _identified(p: Attention) -> list[str]:
    """Which of seq_half and tail the points can tell: short sequences, and calls with few and with many blocks."""
    blocks = p.flops / p.mean_seq / p.head_dim
    return ["seq_half"] * bool(p.mean_seq.min() <= 1024 < p.mean_seq.max()) + ["tail"] * bool(
        np.ptp(np.log(blocks)) > 1.5
    )


def residuals(ratios: np.ndarray) -> str:
    """n, median and 90th percentile of the absolute error, bias, and the spread that holds 80% of points."""
    error = np.abs(ratios - 1)
    spread = float(np.quantile(np.abs(np.log(ratios)), 0.8) / 1.2816)
    return (
        f"n {ratios.size:4d}  median {np.median(error):.3f}  p90 {np.quantile(error, 0.9):.3f}  "
        f"bias {np.mean(ratios - 1):+.3f}  spread {spread:.3f}"
    )


def report(curve: Curve, gpu: Gpu, points: Points, name: str, label: str) -> None:
    for op in ("matmul", "group_matmul"):
        ratios = product_ratios(curve, gpu, points, name, op)
        if ratios.size:
            print(f"  {label:5s} {op:22s} {residuals(ratios)}")
    for (g, kernel, op), p in points.attention.items():
        if g == name:
            print(f"  {label:5s} {op + ' ' + kernel:22s} {residuals(attention_ratios(curve, gpu, kernel, op, p))}")


def read(paths: list[Path]) -> list[dict[str, str]]:
    return [row for path in paths for row in csv.DictReader(path.open(encoding="utf-8"))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("points", type=Path, nargs="+")
    parser.add_argument("--score", action="store_true", help="score the shipped constants, fit nothing")
    args = parser.parse_args()

    def key(row: dict[str, str]) -> tuple[str, ...]:
        columns = ("source", "gpu", "op", "m", "n", "k", "batch", "layout", "out_dtype", "shape", "kernel")
        return tuple(row.get(column) or "" for column in columns)

    rows = read(args.points)
    held = {key(row): row for row in rows if row.get("held") == "1"}
    fitted, held_points = Points([row for row in rows if key(row) not in held]), Points(list(held.values()))
    for name, (curve_name, gpu) in GPUS.items():
        curve = load_curve(curve_name)
        if not args.score:
            if any(g == name for g, _, _ in fitted.products):
                curve = fit_products(curve, gpu, fitted, name)
            for kernel in sorted({kn for g, kn, _ in fitted.attention if g == name}):
                curve = fit_attention(curve, gpu, fitted, name, kernel)
        print(f"{curve_name}\n{msgspec.json.format(msgspec.json.encode(curve)).decode() if not args.score else ''}")
        report(curve, gpu, fitted, name, "fit")
        report(curve, gpu, held_points, name, "held")


if __name__ == "__main__":
    main()
