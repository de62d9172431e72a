"""`fivefold emulate` from the command line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fivefold.train import refuse

EMULATE = "emulate gpt2 --layers 2 --gpus 8 --seq 256 --gbs 16 --micro-batch 2 --tp 2 --pp 2 --rank 5"


def test_the_document(run) -> None:
    outcome = run(*EMULATE.split(), "--json")
    assert outcome.code == 0, outcome.err
    document = outcome.document
    assert (document["schema"], document["kind"]) == ("fivefold/1", "emulate")
    assert (document["rank"], document["world"], document["inputs"]["rank"]) == (5, 8, 5)
    assert document["coordinates"]["tp"] == 1
    memory = document["memory"]
    assert sum(memory["breakdown"].values()) == memory["peak_bytes"] > 0
    assert [phase["phase"] for phase in memory["phases"]][:3] == ["build", "forward", "backward"]
    assert {"forward", "backward", "recompute", "products"} <= set(document["flops"])
    assert {each["axis"] for each in document["collectives"]} >= {"tp", "pp", "dp"}
    assert any(unit["unit"] == "block" and unit["bytes"] > 0 for unit in document["saved"])
    assert document["seconds_s"] > 0
    assert document["host_peak_bytes"] > 0


def test_the_view(run) -> None:
    outcome = run(EMULATE)
    assert outcome.code == 0, outcome.err
    for part in ("rank 5 of 8", "TP2", "Memory", "Kept for backward", "FLOPs", "Collectives", "reduce_scatter"):
        assert part in outcome.out
    assert max(map(len, outcome.out.splitlines())) <= 100
    heads = next(line for line in outcome.out.splitlines() if line.startswith(" phase")).split()
    assert {"weights", "grads", "activ", "peak", "held"} <= set(heads)
    assert not re.search(r"\de-\d", outcome.out)


def test_a_plan_file(run, tmp_path: Path) -> None:
    path = str(tmp_path / "plan.toml")
    words = "estimate gpt2 --layers 2 --gpus 2 --seq 256 --gbs 4 --tp 2 --save"
    assert run(*words.split(), path).code == 0
    outcome = run("emulate", path, "--json")
    assert outcome.code == 0, outcome.err
    assert outcome.document["layout"]["tp"] == 2


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("emulate gpt2 --gpus 2 --rank 2", "ranks 0 to 1"),
        ("emulate gpt2 --gpus 2 --rank -1", "ranks 0 to 1"),
        ("emulate gpt2 --gpus 2 --rank 1.5", "--rank"),
        ("emulate gpt2 --gpus 2 --ramp 8:16:1M", "--ramp"),
        ("emulate gpt2", "--gpus"),
    ],
)
def test_bad_input(run, words: str, part: str) -> None:
    outcome = run(words)
    assert outcome.code == 2
    assert part in outcome.err
    assert outcome.err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("emulate gpt2 --gpus 2 --tp 5", "would not start"),
        ("emulate mixtral-8x7b --gpus 8 --ep 2", "experts"),
    ],
)
def test_a_layout_that_would_not_start_is_answered_with_one(run, words: str, part: str) -> None:
    outcome = run(words)
    assert (outcome.code, outcome.out) == (1, "")
    assert part in outcome.err and outcome.err.count("\n") == 1
    document = run(f"{words} --json").document
    assert document["error"]["option"] in ("--tp", "MODEL")


def test_without_torch_one_sentence(run, monkeypatch) -> None:
    monkeypatch.setattr(refuse, "find_spec", lambda name: None)
    outcome = run(EMULATE)
    assert outcome.code == 2
    assert "pip install 'torch>=2.9'" in outcome.err


def test_help_fits(run) -> None:
    outcome = run("emulate --help")
    assert outcome.code == 0
    assert "--rank" in outcome.out
    assert max(map(len, outcome.out.splitlines())) <= 100


def test_progress_says_how_many_micro_batches_there_are(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fivefold.cli.progress.PATIENCE_S", 0.0)
    assert "rank 5 of 8 of gpt2-2l, 4 micro-batches ... " in run(*EMULATE.split()).err
