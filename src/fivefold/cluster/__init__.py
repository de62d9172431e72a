"""What training runs on: GPUs, the levels of links that join them, which of them a process group crosses, and what
moving bytes through a group costs. Everything is a table of numbers with sources (data/gpus.toml, the user's own file)
and numpy arithmetic over rows of groups; nothing here knows about models or layouts."""

from __future__ import annotations

from fivefold.cluster.catalogue import aliases, clusters, gpus, load_cluster, load_curve_of, load_gpu
from fivefold.cluster.collectives import (
    OPERATIONS,
    bytes_sent_per_rank,
    collective_seconds,
    dispatch_seconds,
    drawn,
)
from fivefold.cluster.groups import Placement, place
from fivefold.cluster.limits import AxesTable, Axis, DpLimit, dp_limit, explain_axes
from fivefold.cluster.spec import Algorithm, Cluster, Gpu, Link

__all__ = [
    "OPERATIONS",
    "Algorithm",
    "AxesTable",
    "Axis",
    "Cluster",
    "DpLimit",
    "Gpu",
    "Link",
    "Placement",
    "aliases",
    "bytes_sent_per_rank",
    "clusters",
    "collective_seconds",
    "dispatch_seconds",
    "dp_limit",
    "drawn",
    "explain_axes",
    "gpus",
    "load_cluster",
    "load_curve_of",
    "load_gpu",
    "place",
]
