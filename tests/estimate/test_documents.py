"""Packed documents: pairs that attention computes, counted over documents drawn at random, and what stays the same."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from msgspec.structs import replace

from fivefold.cluster import load_cluster
from fivefold.errors import FivefoldError
from fivefold.estimate import Estimate, estimate
from fivefold.estimate.planfile import load_plan
from fivefold.layout import Layout, Workload
from fivefold.model import load_model

WORK = Workload(seq_len=8192, global_batch=64)


def priced(work: Workload = WORK, runtime: str = "megatron", model: str = "llama-3-8b", **how) -> Estimate:
    return estimate(load_model(model), load_cluster("h100-sxm", gpus=8), work, Layout(**{"tp": 2} | how), runtime)


def drawn_pairs(seq: int, mean: float, sequences: int) -> float:
    """Mean keys per query over sequences cut, anywhere at the same rate, into documents."""
    draw, total = random.Random(3), 0.0
    for _ in range(sequences):
        at = 0.0
        while at < seq:
            length = min(draw.expovariate(1 / mean), seq - at)
            total += length * length / 2
            at += length
    return total / (seq * sequences)


@pytest.mark.parametrize(("seq", "mean"), [(8192, 1000.0), (8192, 8192.0), (2048, 30_000.0), (32_768, 500.0)])
def test_pairs_of_documents_drawn_at_random(seq: int, mean: float) -> None:
    work = replace(WORK, seq_len=seq, document_length=mean)
    assert work.attended_seq / 2 == pytest.approx(drawn_pairs(seq, mean, 6000), rel=0.03)


@pytest.mark.parametrize("length", [512, 1024, 8192])
def test_equal_documents_are_shorter_sequences(length: int) -> None:
    """The arithmetic of the same tokens as sequences of their own; the causal FLOPs agree exactly."""
    packed = priced(replace(WORK, document_length=float(length), document_lengths="equal"))
    apart = priced(Workload(seq_len=length, global_batch=64 * 8192 // length), micro_batch=8192 // length)
    assert packed.step and apart.step
    assert packed.flops_per_token.causal == apart.flops_per_token.causal
    assert packed.step.breakdown_s.compute == pytest.approx(apart.step.breakdown_s.compute, rel=0.01)


def test_memory_stays_and_time_falls() -> None:
    whole, packed = priced(), priced(replace(WORK, document_length=1000.0))
    assert whole.step and packed.step and packed.memory == whole.memory
    assert packed.step.breakdown_s.compute < whole.step.breakdown_s.compute
    assert packed.step.breakdown_s.tp == whole.step.breakdown_s.tp


def test_a_window_shorter_than_documents_rules() -> None:
    """Mistral's 4,096-token window sees no more in documents of 100,000 tokens, and less in those of 500."""
    times = []
    for mean in (None, 1e8, 500.0):
        found = priced(replace(WORK, seq_len=16_384, document_length=mean), model="mistral-7b")
        assert found.step
        times.append(found.step.breakdown_s.compute)
    assert times[1] == pytest.approx(times[0], rel=1e-3) and times[2] < times[0]


def test_refusals() -> None:
    work = replace(WORK, document_length=1000.0)
    assert "documents-runtime" in {each.id for each in priced(work, "fivefold").violations}
    with pytest.raises(FivefoldError, match="document-length"):
        priced(replace(WORK, document_length=-1.0))


def test_the_flag_and_a_plan_file(tmp_path: Path) -> None:
    from fivefold.cli.main import main

    path = tmp_path / "plan.toml"
    assert main(f"estimate llama-3-8b --gpus 8 --tp 2 --gbs 64 --document-length 1000:equal --save {path}".split()) == 0
    saved = load_plan(path)
    assert (saved.workload.document_length, saved.workload.document_lengths) == (1000.0, "equal")
