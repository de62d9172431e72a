"""Tables of models and of GPUs."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table

from fivefold.cli.render.text import count, giga, plain_table
from fivefold.cluster import Cluster
from fivefold.model import ModelSpec, ParamCounts


def models_table(rows: Iterable[tuple[ModelSpec, ParamCounts]]) -> Table:
    """One row per model: sizes and parameters."""
    table = plain_table(("model", "<"), ("family", "<"), *((head, ">") for head in _SIZES))
    for spec, counts in rows:
        active = count(counts.active) if counts.active != counts.total else ""
        table.add_row(
            spec.name,
            spec.family,
            count(counts.total),
            active,
            str(spec.layers),
            f"{spec.hidden:,}",
            f"{spec.vocab:,}",
            f"{spec.max_position:,}",
        )
    return table


_SIZES = ("params", "active", "layers", "hidden", "vocab", "positions")


def gpus_table(clusters: Iterable[Cluster]) -> Table:
    """One row per system: the GPU and the links of its reference node."""
    table = plain_table(
        ("name", "<"), ("memory GB", ">"), ("bf16 TFLOP/s", ">"), ("fp8", ">"), ("HBM TB/s", ">"), ("links, GB/s", "<")
    )
    for cluster in clusters:
        gpu = cluster.gpu
        peaks = gpu.peak_flops_per_s
        links = ", ".join(
            f"{link.name} {giga(link.bandwidth_per_s)}" + (f" x{link.span}" if link.span else "")
            for link in cluster.links
        )
        table.add_row(
            cluster.name if cluster.name == gpu.name else f"{cluster.name} ({gpu.name})",
            f"{gpu.memory_bytes / 1e9:.1f}",
            *(f"{peaks[kind] / 1e12:,.0f}" if kind in peaks else "-" for kind in ("bf16", "fp8")),
            f"{gpu.memory_bandwidth_per_s / 1e12:.2f}",
            links,
        )
    return table
