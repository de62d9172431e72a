"""`fivefold train` and `fivefold verify` from the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fivefold.train import refuse

PLAN = "estimate gpt2 --gpus {gpus} --seq 512 --gbs 64 {flags} --save"
VERIFY = "verify gpt2 --gpus 2 --seq 512 --gbs 16 --micro-batch 4 --tp 2"


@pytest.fixture
def plan(run, tmp_path: Path):
    def save(flags: str = "", gpus: int = 4) -> str:
        path = str(tmp_path / "plan.toml")
        assert run(*PLAN.format(flags=flags, gpus=gpus).split(), path).code == 0
        return path

    return save


def test_verify_passes_and_keeps_the_contract(run) -> None:
    outcome = run(*VERIFY.split(), "--json")
    assert outcome.code == 0, outcome.out
    document = outcome.document
    assert (document["schema"], document["kind"], document["passed"]) == ("fivefold/1", "verify", True)
    assert {"layout", "parameters", "losses", "grad_norm", "inputs"} <= set(document)
    assert {"name", "error", "bound"} <= set(document["parameters"][0])
    assert document["layout"]["tp"] == 2
    assert document["inputs"]["model"]["hidden"] == 768


def test_verify_prints_a_table(run) -> None:
    outcome = run(VERIFY)
    assert outcome.code == 0
    assert "PASSED" in outcome.out
    assert "layers.0." in outcome.out
    assert "Model shrunk" in outcome.out
    assert max(map(len, outcome.out.splitlines())) <= 100


def test_verify_fails_where_a_sum_is_dropped(run, monkeypatch) -> None:
    from fivefold.train.verify import prove
    from fivefold.train.verify.controls import Site, Spoiled

    honest = prove.observe

    def spoiled(*arguments: Any) -> Any:
        with Spoiled(Site("parallel.vocabulary", "VocabEmbedding.forward", "all_reduce"), "double"):
            return honest(*arguments)

    monkeypatch.setattr(prove, "observe", spoiled)
    outcome = run(*VERIFY.split(), "--no-sequence-parallel")
    assert outcome.code == 1
    assert "FAILED" in outcome.out
    assert "out of bounds" in outcome.out


def test_verify_tells_a_rank_that_fails(run, monkeypatch) -> None:
    from fivefold.train.verify import prove

    def broken(*arguments: Any) -> Any:
        raise ValueError("the cause")

    monkeypatch.setattr(prove, "observe", broken)
    outcome = run(*VERIFY.split(), "--json")
    assert outcome.code == 1
    assert outcome.document["passed"] is False
    assert "the cause" in outcome.document["failure"]
    late = run(*VERIFY.split())
    assert late.code == 1
    assert "the cause" in late.out


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("verify mixtral-8x7b --gpus 8 --ep 2", "experts"),
        ("verify llama-3-70b --gpus 32 --tp 8 --pp 4", "--max-ranks 32"),
        ("verify gpt2 --gpus 2 --tp 5", "would not start"),
        ("verify gpt2 --gpus 2 --timeout 0", "--timeout"),
        ("verify gpt2 --gpus 2 --max-ranks 0", "--max-ranks"),
        ("train gpt2", "plan file"),
        ("train nowhere.toml", "no such file"),
    ],
)
def test_bad_input(run, words: str, part: str) -> None:
    outcome = run(words)
    assert outcome.code == 2
    assert part in outcome.err
    assert outcome.err.count("\n") == 1


def test_train_refuses_before_it_starts(run, plan) -> None:
    path = plan("--tp 2 --pp 2")
    for words, part in (
        ((), "4 GPUs and 1 processes"),
        (("--smoke",), "--nproc-per-node 4"),
        (("--precision", "fp8"), "fp8"),
        (("--steps", "0"), "--steps"),
        (("--learning-rate", "-1"), "--learning-rate"),
    ):
        outcome = run("train", path, *words)
        assert outcome.code == 2
        assert part in outcome.err


def test_train_refuses_a_log_that_cannot_be_written(run, plan) -> None:
    outcome = run("train", plan(gpus=1), "--smoke", "--log", "/nowhere/log.jsonl")
    assert outcome.code == 2
    assert "/nowhere/log.jsonl" in outcome.err


def test_without_torch_one_sentence(run, plan, monkeypatch) -> None:
    path = plan()
    monkeypatch.setattr(refuse, "find_spec", lambda name: None)
    for words in (("train", path), ("verify", path)):
        outcome = run(*words)
        assert outcome.code == 2
        assert "pip install 'torch>=2.9'" in outcome.err


def test_one_process_trains(run, plan, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    outcome = run("train", plan(gpus=1), "--smoke", "--steps", "12", "--precision", "fp32", "--log", str(log), "--json")
    assert outcome.code == 0, outcome.err
    steps = outcome.document["steps"]
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.5
    assert [json.loads(line)["loss"] for line in log.read_text().splitlines()] == [step["loss"] for step in steps]
    assert "Model shrunk" in outcome.document["notes"][0]


def test_torchrun_trains_a_plan(plan, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "fivefold"]
    done = subprocess.run(
        [sys.executable, *words, "train", plan("--tp 2"), "--smoke", "--steps", "10", "--log-file", str(log)],
        capture_output=True, text=True, check=False, timeout=120,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    losses = [json.loads(line)["loss"] for line in log.read_text().splitlines()]
    assert losses[-1] < losses[0]
    assert done.stdout.count("step ") == 10
    assert "TP2" in done.stdout
    assert "Data parallelism reduced from 2 replicas to 1" in done.stdout


@pytest.mark.parametrize("words", ["train --help", "verify --help"])
def test_help_fits(run, words: str) -> None:
    outcome = run(words)
    assert outcome.code == 0
    assert max(map(len, outcome.out.splitlines())) <= 100
