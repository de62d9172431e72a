"""What is printed for people: it fits the width, its colour can be forced and forbidden, and it holds the numbers."""

from __future__ import annotations

import re

import pytest

SMALL = "--gpus 4 --seq 1024 --gbs 16"
COMMANDS = [
    f"plan gpt2-medium {SMALL} --tokens 1B --price 2 --ramp 8:16:100M",
    "plan deepseek-v2-lite --gpus 16 --seq 4096 --gbs 64 --pp 2 --top 2",
    "plan llama-3-70b --gpus 1 --gbs 1",
    "estimate llama-3-70b --gpus 64 --tp 4 --pp 4 --cp 2 --gbs 512 --simple",
    "estimate gpt-1t --gpu a100-80g-sxm --gpus 3072 --tp 8 --pp 64 --vpp 2 --recompute full --gbs 3072",
    "estimate llama-3-8b --gpus 8 --tp 3 --gbs 8",
    "compare llama-3-70b --gpus 64 --a tp=4,pp=4,cp=2 --b tp=8,pp=4,recompute=full",
    "compare gpt2 --gpus 4 --seq 1024 --a tp=3 --b pp=2",
    "explain axes --gbs 512",
    "explain dp-limit --gpus 64",
    "explain rules",
    "explain assumptions mixtral-8x7b",
    "explain --help",
    "models",
    "gpus",
    "validate --source simumax --rows",
    "--help",
    "plan --help",
    "estimate --help",
    "compare --help",
    "explain dp-limit --help",
    "validate --help",
]


@pytest.mark.parametrize("command", COMMANDS)
def test_no_line_is_wider_than_100_columns(run, command: str) -> None:
    outcome = run(command)
    assert outcome.code in (0, 1)
    assert outcome.err == ""
    assert max(len(line) for line in outcome.out.splitlines()) <= 100
    assert "\x1b" not in outcome.out
    assert "None" not in outcome.out or command == "explain rules"  # a rule's source may quote Python


@pytest.mark.parametrize("width", [60, 80, 200])
def test_a_terminals_width_is_kept(run, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for command in ("plan gpt2 --gpus 4 --gbs 16", "gpus", "explain rules"):
        monkeypatch.setenv("COLUMNS", str(width))
        assert max(len(line) for line in run(command).out.splitlines()) <= min(width, 100)


def test_colour(run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\x1b[" in run("gpus --color always").out
    assert "\x1b[" not in run("gpus --color never").out
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[" in run("gpus").out
    assert "\x1b[" not in run("gpus --color never").out
    monkeypatch.setenv("NO_COLOR", "1")
    assert not re.search(r"\x1b\[[0-9;]*3\dm", run("gpus").out)
    assert "\x1b[" not in run("gpus --json --color always").out


def test_a_plan_says_what_it_found_and_why(run) -> None:
    command = f"plan gpt2-medium {SMALL}"
    document, text = run(f"{command} --json").document, " ".join(run(command).out.split())
    best = document["plans"][0]
    layout = best["layout"]
    assert f"TP{layout['tp']} CP{layout['cp']} PP{layout['pp']} DP{layout['dp']}" in text
    assert f"{document['searched']:,} layouts searched in" in text
    assert f"{document['fitting']:,} fit" in text
    assert f"{best['step']['tokens_per_s_per_gpu']:,.0f}" in text
    assert f"{best['memory']['reserved_bytes'] / 1e9:,.1f} of {best['memory']['capacity_bytes'] / 1e9:,.1f} GB" in text
    assert document["why"]["summary"] in text
    for neighbour in document["why"]["neighbours"]:
        assert neighbour["change"] in text
    for step in document["why"]["playbook"]["path"]:
        assert step["step"] in text
    for option in document["inputs"]["defaults"]:
        assert option in text


def test_equal_stages_share_a_row(run) -> None:
    text = run("estimate gpt-1t --gpu a100-80g-sxm --gpus 512 --tp 8 --pp 64 --mbs 1 --gbs 1 --recompute full").out
    assert re.search(r"^ 1-62 ", text, re.MULTILINE)


def test_a_broken_rule_names_option_legal_values_and_source(run) -> None:
    document = run("estimate llama-3-8b --gpus 8 --tp 3 --gbs 8 --json").document
    text = " ".join(run("estimate llama-3-8b --gpus 8 --tp 3 --gbs 8").out.split())
    for rule in document["violations"]:
        assert rule["id"] in text
        assert " ".join(rule["message"].split()) in text
        assert rule["option"] in text


def test_help_lists_every_flag_with_words(run) -> None:
    text = run("plan --help").out
    for flag in [
        "--tp",
        "--pp",
        "--zero",
        "--recompute",
        "--seq-len",
        "--seq",
        "--gbs",
        "--cluster",
        "--json",
        "--color",
        "--save",
        "--objective",
    ]:
        assert flag in text
    assert "fivefold plan llama-3-8b --gpus 8" in text
