"""benchmarks/runtimes.py: one layout in several frameworks, and entries that explain the differences to the byte."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from fivefold.cluster import load_cluster
from fivefold.estimate.estimate import estimate
from fivefold.layout import Layout, Recompute, Workload
from fivefold.model import load_model

REPOSITORY = Path(__file__).parents[2]
TOKENS, FFN, HIDDEN, LAYERS = 4096, 14336, 4096, 32  # of one sequence through Llama 3 8B


@pytest.fixture(scope="module")
def runtimes() -> ModuleType:
    """benchmarks/runtimes.py."""
    spec = importlib.util.spec_from_file_location("runtimes", REPOSITORY / "benchmarks" / "runtimes.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["runtimes"] = module
    spec.loader.exec_module(module)
    return module


def _question(runtimes: ModuleType, **layout: object):
    work = Workload(seq_len=TOKENS, global_batch=32)
    return runtimes.Question("llama-3-8b", 8, work, Layout(**layout))  # type: ignore[arg-type]


@pytest.mark.parametrize("number", range(5))
def test_entries_sum_to_the_peak_and_differences_to_the_difference(runtimes: ModuleType, number: int) -> None:
    question = runtimes.QUESTIONS[number]
    cells = {name: runtimes.cell(question, name) for name in runtimes.RUNTIMES}
    priced = {name: cell for name, cell in cells.items() if not cell.refused}
    assert len(priced) >= 3
    for cell in priced.values():
        assert sum(cell.entries.values()) == cell.estimate.memory.peak_bytes
        deltas = runtimes.difference(priced["megatron"], cell)
        assert sum(deltas.values()) == cell.estimate.memory.peak_bytes - priced["megatron"].estimate.memory.peak_bytes
        assert all(runtimes._why(name) for name in cell.entries)
    for name, cell in cells.items():
        if cell.refused:
            assert all(len(sentence) > 20 for sentence in cell.refused), name


def test_differences_by_hand(runtimes: ModuleType) -> None:
    """Without axes but data parallelism: what each framework keeps beside Megatron's, from its own code's tensors."""
    question = _question(runtimes)
    base = runtimes.cell(question, "megatron")
    nanotron = runtimes.difference(base, runtimes.cell(question, "nanotron"))
    assert nanotron["activations: mlp.activated gate"] == 2 * TOKENS * FFN * LAYERS
    fsdp = runtimes.difference(runtimes.cell(question, "torchtitan"), runtimes.cell(question, "fsdp"))
    norms = 2 * TOKENS * HIDDEN * LAYERS
    assert fsdp["activations: input_norm.fp32 input"] == 2 * norms
    assert fsdp["activations: input_norm.normalised"] == norms
    assert fsdp["activations: input_norm.input"] == -norms


def test_selective_recomputation_of_torchtitan_keeps_every_second_product() -> None:
    """Of gate and up projections one output stays; the largest tensors say what is there, not what was dropped."""
    work, cluster = Workload(seq_len=TOKENS, global_batch=8), load_cluster("h100-sxm", 8)
    layout = Layout(zero=3, recompute=Recompute(kind="selective"))
    found = estimate(load_model("llama-3-8b"), cluster, work, layout, "torchtitan")
    assert found.memory is not None
    named = {tensor.name: tensor.bytes for tensor in found.memory.largest}
    assert named["mlp.fc1 output"] == 2 * TOKENS * FFN * LAYERS


def test_zero_3_of_deepspeed_keeps_18_bytes_a_parameter(runtimes: ModuleType) -> None:
    """DeepSpeed's estimate_zero3_model_states_mem_needs: 18 bytes per parameter over the ranks."""
    cell = runtimes.cell(_question(runtimes), "deepspeed-zero")
    states = sum(cell.entries[name] for name in ("weights", "gradients", "master", "optimizer"))
    assert states == pytest.approx(18 * cell.estimate.params.total / 8, rel=1e-6)


def test_the_page_has_every_model_and_framework(runtimes: ModuleType) -> None:
    page = (REPOSITORY / "docs" / "runtimes.md").read_text(encoding="utf-8")
    for question in runtimes.QUESTIONS:
        assert f"## {question.model}, " in page
    for name in runtimes.RUNTIMES:
        assert f"{name} less " in page or f"{name} refuses" in page or name == "megatron"
