"""Every constant that was fitted to timed kernels or collectives is worth something on them."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def found() -> dict:
    """What benchmarks/ablation_timings.py finds, by (constant, timings)."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        worths = importlib.import_module("ablation_timings").worths()
    finally:
        sys.path.remove(str(BENCHMARKS))
    return {(each.constant, each.timings): each for each in worths}


@pytest.mark.parametrize(
    ("constant", "timings"),
    [
        *((name, "products") for name in ("efficiency", "depth_ramp", "wave_share", "split_depth")),
        *((name, "products") for name in ("memory_efficiency", "memory_exposed", "group_launch_s")),
        *((f"attention.{name}", "attention") for name in ("forward", "backward", "seq_half", "tail")),
        *((f"link.{name}", "collectives") for name in ("efficiency", "all_to_all_efficiency", "latency_s")),
        *((f"link.in_network_{name}", "collectives") for name in ("efficiency", "latency_s")),
        ("launch_s of a collective", "collectives"),
    ],
)
def test_timings_are_farther_off_without_a_fitted_constant(found: dict, constant: str, timings: str) -> None:
    worth = found[constant, timings]
    assert worth.moved >= 5
    assert worth.without > worth.with_it
    assert worth.better > 0.5
