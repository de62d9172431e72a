"""`fivefold check` on the command line: the contract's object, exit codes, and what a person sees."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "interop" / "scripts"
CHECK = ["understood", "unknown_options", "estimate", "changes", "source", "runtime"]
CHANGE = ["description", "options", "gain_s", "delta_bytes", "estimate"]


def test_the_contracts_object(run) -> None:
    outcome = run("check", str(SCRIPTS / "variables.sh"), "--gpu", "h100-sxm", "--json")
    document = outcome.document
    assert outcome.code == 0
    assert (document["schema"], document["kind"]) == ("fivefold/1", "check")
    assert not [name for name in CHECK if name not in document]
    assert document["unknown_options"] == []
    assert document["estimate"]["valid"] and document["estimate"]["fits"]
    assert document["inputs"]["cluster"]["gpus"] == 16
    for change in document["changes"]:
        assert not [name for name in CHANGE if name not in change]
        assert set(change["options"]) == {"old", "new"}
        assert change["estimate"]["step"]["seconds"]["value"] < document["estimate"]["step"]["seconds"]["value"]
    options = {each["option"]: each for each in document["understood"]["options"]}
    assert options["--tensor-model-parallel-size"] == {
        "option": "--tensor-model-parallel-size",
        "value": "2",
        "place": "variables.sh:8",
        "field": "layout.tp",
        "effect": "priced",
    }


def test_exit_codes(run, tmp_path: Path) -> None:
    script = str(SCRIPTS / "variables.sh")
    assert run("check", script, "--gpu", "h100-sxm").code == 0
    assert run("check", script, "--gpu", "h100-sxm", "--with", "--tensor-model-parallel-size 3").code == 1
    assert run("check", script, "--gpu", "l4").code == 1  # does not fit
    assert run("check", script, "--gpu", "h100-sxm", "--with", "--save-interval 0 --min-lr 1").code == 1
    h100 = ("--gpu", "h100")
    for words in ([script], [script, "--gpu", "h1000"], ["no-such-file.sh", *h100], [str(tmp_path), *h100],
                  [script, *h100, "--set", "TP"], [script, *h100, "--launch", "3"], [script, *h100, "--with", "'"],
                  [script, *h100, "--runtime", "megatron@9"], [script, *h100, "--top", "0"]):  # fmt: skip
        outcome = run("check", *words)
        assert outcome.code == 2, words
        assert outcome.out == "" and outcome.err.startswith("error: ")


def test_errors_are_documents_too(run) -> None:
    outcome = run("check", str(SCRIPTS / "gpt_config.yaml"), "--gpu", "h100-sxm", "--json")
    assert outcome.code == 2
    error = outcome.document["error"]
    assert error["code"] == "incomplete-launch" and "--gpus" in error["message"] and "--gpus" in error["legal"]


@pytest.mark.parametrize("name", ["variables.sh", "case_if.sh", "nemo_overrides.sh", "srun_wrapper.sh"])
def test_what_a_person_sees(run, name: str) -> None:
    outcome = run("check", str(SCRIPTS / name), "--gpu", "h100-sxm")
    assert outcome.err == "" and outcome.code in (0, 1)
    assert max(len(line) for line in outcome.out.splitlines()) <= 100
    text = " ".join(outcome.out.split())
    assert "MFU should be about" in text and "Memory" in text and "What it wastes" in text
    document = json.loads(run("check", str(SCRIPTS / name), "--gpu", "h100-sxm", "--json").out)
    assert document["summary"] in text
    for change in document["changes"]:
        for option, value in change["options"]["new"].items():
            if value is not None:
                assert option in text


def test_what_would_not_start_names_the_users_option_and_line(run) -> None:
    outcome = run("check", str(SCRIPTS / "variables.sh"), "--gpu", "h100-sxm", "--set", "NODES=2", "--with",
                  "--tensor-model-parallel-size 3")  # fmt: skip
    assert outcome.code == 1
    text = " ".join(outcome.out.split())
    assert "would not start" in text and "--tensor-model-parallel-size 3" in text and "--tp " not in text


def test_the_gpu_may_come_from_slurm(run) -> None:
    outcome = run("check", str(SCRIPTS / "heredoc.sh"), "--json")
    assert outcome.document["inputs"]["cluster"]["gpu"]["name"] == "a100-80g-sxm"
    assert outcome.document["inputs"]["cluster"]["gpus"] == 32
