"""`fivefold plan --like`: the moved plan, its reasons, the best free plan beside it, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

SMALL = "gpt2 --gpus 8 --seq 1024 --gbs 32 --tp 2 --pp 2"


@pytest.fixture
def saved(run, tmp_path: Path) -> Path:
    path = tmp_path / "plan.toml"
    assert run(f"plan {SMALL} --save {path}").code == 0
    return path


def test_a_plan_moves_and_saves(run, saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "moved.toml"
    outcome = run(f"plan --like {saved} --gpu b200 --gpus 4 --save {out} --json")
    assert outcome.code == 0
    document = outcome.document
    moved = document["moved"]
    assert document["kind"] == "plan" and document["plans"]
    assert document["inputs"]["cluster"]["gpu"]["name"] == moved["after"]["inputs"]["cluster"]["gpu"]["name"]
    assert moved["before"]["inputs"]["cluster"]["gpus"] == 8 and moved["after"]["inputs"]["cluster"]["gpus"] == 4
    again = run(f"estimate {out} --json").document
    assert again["step"]["seconds"]["value"] == pytest.approx(moved["after"]["step"]["seconds"]["value"])
    best, after = document["plans"][0]["step"]["seconds"]["value"], moved["after"]["step"]["seconds"]["value"]
    assert moved["best_gain_s"] == pytest.approx(after - best)


def test_the_view_has_before_after_and_best(run, saved: Path) -> None:
    out = run(f"plan --like {saved} --gpus 3").out
    assert "The plan, moved" in out and "best here" in out and "changed" in out


def test_where_nothing_near_runs_nothing_is_saved(run, tmp_path: Path) -> None:
    before, out = tmp_path / "before.toml", tmp_path / "after.toml"
    degrees = "--tp 2 --pp 2 --cp 2 --recompute full"
    assert run(f"plan gpt2 --gpus 16 --seq 1024 --gbs 32 {degrees} --save {before}").code == 0
    outcome = run(f"plan --like {before} --gpus 1 --runtime fsdp --save {out} --json")
    assert outcome.document["plans"] and outcome.document["moved"]["after"] is None
    assert outcome.code == 1 and not out.exists()


@pytest.mark.parametrize(
    ("words", "option"),
    [
        ("plan gpt2 --like {saved}", "MODEL"),
        ("plan --like {saved} --days 3", "--days"),
        ("plan --like gpt2", "--like"),
        ("plan --gpus 8", "MODEL"),
    ],
)
def test_contradictions(run, saved: Path, words: str, option: str) -> None:
    outcome = run(words.format(saved=saved) + " --json")
    assert outcome.code == 2 and outcome.document["error"]["option"] == option


def test_options_that_are_given_are_kept(run, saved: Path) -> None:
    moved = run(f"plan --like {saved} --gpu h200 --gpus 16 --tp 4 --json").document["moved"]
    assert moved["after"]["layout"]["tp"] == 4
