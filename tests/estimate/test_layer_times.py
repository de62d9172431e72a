"""One block alone: Korthikanti et al. 2022, table 4, every variant within 10% forward, backward and together."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

_FILE = Path(__file__).parents[2] / "benchmarks" / "layer_times.py"
_SPEC = importlib.util.spec_from_file_location("layer_times", _FILE)
assert _SPEC and _SPEC.loader
layer_times = importlib.util.module_from_spec(_SPEC)
sys.modules[_SPEC.name] = layer_times
_SPEC.loader.exec_module(layer_times)


@pytest.mark.parametrize("row", layer_times.PUBLISHED, ids=lambda row: row.name)
def test_a_block_alone_takes_what_was_published(row):
    forward, backward = layer_times.block_ms(row)
    assert forward == pytest.approx(row.forward_ms, rel=0.10)
    assert backward == pytest.approx(row.backward_ms, rel=0.10)
    assert forward + backward == pytest.approx(row.forward_ms + row.backward_ms, rel=0.10)
