"""A calibration applied: the cluster's curve and links, and the profile's host work, times the fitted factors.

Every factor multiplies seconds, so that rates are divided by it; where a product with its bounds would leave what a
constant may be, it stays at that bound.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from fivefold.cluster import Cluster, load_curve_of
from fivefold.cluster.calibration import Calibration, Constant
from fivefold.cluster.curve import merged
from fivefold.cluster.spec import Link
from fivefold.estimate.problem import Problem
from fivefold.runtime import Profile

_LARGEST_SHARE = 2.0  # of a datasheet number, as fivefold.cluster.curve has it
_LONGEST_S = 1.0


def with_calibration(cluster: Cluster, calibration: Calibration | None) -> Cluster:
    """The cluster with the calibration, or as it is where none is given."""
    return cluster if calibration is None else replace(cluster, calibration=calibration)


def calibrated(problem: Problem) -> Problem:
    """The problem with its cluster's calibration applied, once."""
    if problem.fit is None or problem.applied:
        return problem
    cluster, runtime = apply(problem.cluster, problem.runtime, problem.fit.factors)
    return dataclasses.replace(problem, cluster=cluster, runtime=runtime, applied=True)


def apply(cluster: Cluster, runtime: Profile, factors: Mapping[Constant, float]) -> tuple[Cluster, Profile]:
    """The cluster and the profile with `factors`; one that is absent is 1."""

    def of(name: Constant) -> float:
        return factors.get(name, 1.0)

    outermost = len(cluster.links) - 1
    links = tuple(
        _slower(link, of("network" if level and level == outermost else "scale_up"))
        for level, link in enumerate(cluster.links)
    )
    compute = merged(cluster.compute, _curve_changes(cluster, of("products"), of("attention"), of("memory")))
    profile = replace(
        runtime,
        step_overhead_s=runtime.step_overhead_s * of("step"),
        launch_host_s=runtime.launch_host_s * of("launch"),
        op_host_s=runtime.op_host_s * of("launch"),
        group_launch_host_s=runtime.group_launch_host_s * of("launch"),
        dispatch_host_s=runtime.dispatch_host_s * of("launch"),
        unpack_host_s=runtime.unpack_host_s * of("launch"),
    )
    return replace(cluster, links=links, compute=compute), profile


def _curve_changes(cluster: Cluster, products: float, attention: float, memory: float) -> dict[str, Any]:
    curve = load_curve_of(cluster)
    changes: dict[str, Any] = {}
    if products != 1:
        changes["efficiency"] = {kind: _share(rate / products) for kind, rate in curve.efficiency.items()}
    if memory != 1:
        for name in ("memory_efficiency", "streaming_efficiency"):
            changes[name] = _share(getattr(curve, name) / memory)
    if attention != 1:
        changes["attention"] = {
            name: {
                side: [_share(rate / attention) for rate in getattr(rates, side)] for side in ("forward", "backward")
            }
            for name, rates in curve.attention.items()
        }
    return changes


def _share(value: float) -> float:
    return min(value, _LARGEST_SHARE)


def _slower(link: Link, factor: float) -> Link:
    return replace(
        link,
        bandwidth_per_s=link.bandwidth_per_s / factor,
        peer_bandwidth_per_s=link.peer_bandwidth_per_s / factor,
        latency_s=min(link.latency_s * factor, _LONGEST_S),
        in_network_latency_s=min(link.in_network_latency_s * factor, _LONGEST_S),
    )
