"""The loop: loss falls, the numbers are what they say, fp16 skips overflows, divergence is told."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from proofs import SEQ, VOCAB, layout_of, llama
from ranks import run_ranks

from fivefold.errors import FivefoldError
from fivefold.model import count_params
from fivefold.train.build import Setup
from fivefold.train.data import Synthetic
from fivefold.train.loop import JsonLines, Metrics, train
from fivefold.train.mesh import Mesh
from fivefold.train.optimizer import Cosine, Recipe
from fivefold.train.trainer import Trainer

SPEC = llama(2)


def trainer_of(ranks: int = 1, name: str = "fp32", recipe: Recipe | None = None, **degrees: Any) -> Trainer:
    layout = layout_of(SPEC, ranks, **degrees)
    return Trainer(SPEC, layout, Mesh(layout), Setup(precision=name, recipe=recipe or Recipe(rate=1e-2)))


def test_the_loss_falls_below_that_of_guessing() -> None:
    recipe = Recipe(rate=1e-2, schedule=Cosine(total=50, warmup=5))
    told = train(trainer_of(micro_batch=8, recipe=recipe), Synthetic(VOCAB, SEQ), range(50))
    assert told[0].loss == pytest.approx(math.log(VOCAB), abs=0.1)
    assert told[-1].loss < 2.5  # the walk's entropy is about 0.74 nats


def test_numbers_are_consistent() -> None:
    peak = 1e12
    [step] = train(trainer_of(), Synthetic(VOCAB, SEQ), range(4, 5), peak_flops_per_s=peak)
    tokens = 8 * SEQ
    assert step.step == 4
    assert step.tokens_per_s == pytest.approx(tokens / step.step_s)
    assert step.valid_tokens == tokens
    # 6 P per token, P without the embedding, with little attention on top (Kaplan et al. 2020, arXiv 2001.08361)
    weights = count_params(SPEC).total - VOCAB * SPEC.hidden
    assert step.mfu is not None
    assert step.mfu * peak * step.step_s / tokens == pytest.approx(6 * weights, rel=0.2)
    assert step.peak_memory_bytes > 50e6  # a process with PyTorch in it
    assert train(trainer_of(), Synthetic(VOCAB, SEQ), range(1))[0].mfu is None


def test_json_lines(tmp_path: Any) -> None:
    path = tmp_path / "metrics.jsonl"
    with JsonLines(path) as lines:
        told = train(trainer_of(), Synthetic(VOCAB, SEQ), range(2), tell=lines)
    written = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["loss"] for line in written] == [metrics.loss for metrics in told]
    assert written[0]["schema"] == "fivefold/1"
    assert set(Metrics.__struct_fields__) < set(written[0])
    assert written[0]["mfu"] is None


def test_every_rank_hears_the_same() -> None:
    def told(rank: int) -> list[tuple[float, float]]:
        found = train(trainer_of(2, zero=2), Synthetic(VOCAB, SEQ, uneven=True), range(3))
        return [(metrics.loss, metrics.grad_norm) for metrics in found]

    first, second = run_ranks(2, told)
    assert first == second


def test_fp16_skips_an_overflow_and_halves_the_scale() -> None:
    def run(rank: int) -> tuple[list[bool], list[float], bool]:
        trainer = trainer_of(2, "fp16")
        trainer.scale.value = 2.0**40
        before = [piece.master.clone() for piece in trainer.pieces]
        source = Synthetic(VOCAB, SEQ)
        told = train(trainer, source, range(1))
        same = all(torch.equal(a, p.master) for a, p in zip(before, trainer.pieces, strict=True))
        while told[-1].skipped:
            told += train(trainer, source, range(1))
        return [m.skipped for m in told], [m.loss_scale for m in told], same

    for skipped, scales, unchanged in run_ranks(2, run):
        assert skipped[0] and not skipped[-1]
        assert scales == [2.0 ** (40 - k) for k in range(len(scales))]
        assert unchanged


def test_divergence_is_told() -> None:
    trainer = trainer_of()
    with torch.no_grad():
        trainer.pieces[0].parameter.fill_(float("nan"))
    with pytest.raises(FivefoldError, match="diverged"):
        train(trainer, Synthetic(VOCAB, SEQ), range(1))
